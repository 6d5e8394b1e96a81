"""Whole decode steps at a long context, dense and sparse: `eps-proto run` on the demo model, a random 1B shape, or any
model's folder.

Speed only: the demo model is run past its trained context and the 1B model knows nothing, so what they say is not
looked at. Appends the last line of every run, with the run line's versions and commit, to a JSONL.

    python scripts/experiments/whole_step/run.py --context 32768 --models demo,llama-1b --backend cuda
    python scripts/experiments/whole_step/run.py --context 8000 --models DIR --backend cuda   (DIR of get_model.py)
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import click
from random_models import MODELS
from shared import appended, cut

from eps_core.errors import exit_code
from eps_core.models.config import DEMO_MODEL
from eps_core.models.tokenizer import load_tokenizer
from eps_core.tasks.corpus import corpus


def prompt_of(model: Path, context: int) -> str:
    """Return text of `context` tokens, the one that begins a text included."""
    tokenizer = load_tokenizer(model)

    def encode(text: str, special: bool = True) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=special).ids)

    return cut(corpus().decode("ascii"), encode, context - len(encode("")))


def run(*flags: object) -> dict[str, Any]:
    """Return the last line of a run of its own process, which ends this one where it fails."""
    command = [sys.executable, "-m", "eps_core.cli", "run", *map(str, flags)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:  # it has said why
        sys.exit(done.returncode)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@click.command()
@click.option("--context", type=click.IntRange(min=512), default=32768, show_default=True, help="Tokens of the prompt.")
@click.option("--new-tokens", type=click.IntRange(min=2), default=32, show_default=True)
@click.option("--models", default="demo", show_default=True, help=f"Of {', '.join(MODELS)}, or folders; commas.")
@click.option("--backend", default="cuda,mlx", show_default=True, help="Separated by commas.")
@click.option("--dtype", default="float32,bfloat16", show_default=True, help="Of weights and cache; commas.")
@click.option(
    "-o", "--output", "--out", "out", type=click.Path(path_type=Path), default=Path("results/whole_step.jsonl"),
    show_default=True,
)  # fmt: skip
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
def main(
    context: int, new_tokens: int, models: str, backend: str, dtype: str, out: Path, flags: tuple[str, ...]
) -> None:
    """FLAGS, after --, go to `eps-proto run` as they are."""
    names = [name.strip() for name in models.split(",")]
    unknown = sorted(name for name in set(names) - set(MODELS) if not Path(name).is_dir())
    if unknown:
        raise click.UsageError(f"model {', '.join(unknown)} is no folder: give one, or of {', '.join(MODELS)}")
    with appended(out, {"the demo model": DEMO_MODEL}) as writer:
        for name in names:
            with tempfile.TemporaryDirectory() as scratch:
                folder = Path(scratch)
                (folder / "model").mkdir()
                model = Path(name)
                if name in MODELS:
                    model = MODELS[name](folder / "model", context + new_tokens + 1)
                prompt, metrics = folder / "prompt.txt", folder / "metrics.jsonl"
                prompt.write_text(prompt_of(model, context))
                for one in backend.split(","):
                    for kind in dtype.split(","):
                        result = run(
                            "--model", model, "--prompt-file", prompt, "--backend", one, "--dtype", kind,
                            "--max-new-tokens", new_tokens, "--no-stop", "--method", "rq", "--metrics", metrics, *flags,
                        )  # fmt: skip
                        first = json.loads(metrics.read_text().splitlines()[0])
                        writer.write(line_of(Path(name).name, kind, result, first))


def line_of(name: str, dtype: str, result: dict[str, Any], first: dict[str, Any]) -> dict[str, Any]:
    """Return a run's last line, without its tokens, and what the `first` one of its records says of how it was made."""
    for side in ("dense", "eps"):
        result[side].pop("tokens")
    dense_ms, sparse_ms = (result[side]["decode_ms_p50"] for side in ("dense", "eps"))
    print(
        f"{name:9} {result['backend']:5} {dtype:9} {result['prompt_tokens']:,} tokens: dense {dense_ms:.1f} ms, sparse "
        f"{sparse_ms:.1f} ms a step ({dense_ms / sparse_ms:.2f} x), bytes {result['bytes_ratio']:.3f}",
        flush=True,
    )
    made = {key: first[key] for key in ("config", "versions", "git_commit", "device_name", "platform")}
    kept = {key: value for key, value in result.items() if key not in ("text", "tokens")}
    same = {"model": name, "dtype": dtype, "speedup": dense_ms / sparse_ms}
    return {"type": "whole_step", **kept, **made, **same}


if __name__ == "__main__":
    sys.exit(exit_code(main))
