"""Time to first token of a prompt that is kept between runs (`eps-proto run --cache-dir`): every context twice, each
run a process of its own, the second one beginning from the file of the first.

    python scripts/experiments/stored_prompts/run.py --model DIR -o persist.jsonl

A line a run: what was loaded and stored, `ttft_ms` from the start of loading to the first new token, and of the second
run whether its tokens are the first one's (`tokens_same`) and its share of the first one's time (`ttft_share`).
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import click

from eps_core.errors import exit_code
from eps_core.io import outputs
from eps_core.load import BACKENDS
from eps_core.metrics import provenance
from eps_core.models.config import DEMO_MODEL
from eps_core.models.tokenizer import load_tokenizer
from eps_core.tasks.corpus import corpus
from eps_core.tasks.sizing import cut

NEW_TOKENS = 16


@click.command()
@click.option("--model", type=click.Path(path_type=Path), default=DEMO_MODEL, help="That holds the contexts.")
@click.option("--contexts", default="4096,16384", show_default=True, help="Tokens, new ones included; commas.")
@click.option("--backend", default=",".join(BACKENDS), show_default=True, help="Separated by commas.")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), default=Path("results/persist.jsonl"), show_default=True
)
def main(model: Path, contexts: str, backend: str, output: Path) -> None:
    """Each context twice on each backend, from a cache folder that is empty at first."""
    outputs.check({"-o": output}, {"--model": model})
    with outputs.Output(output, "-o") as place, outputs.JsonlWriter(place) as lines:
        lines.write({"type": "run", "model": model.name, **provenance.provenance({})})
        for name in backend.split(","):
            for context in map(int, contexts.split(",")):
                for line in twice(model, name, context):
                    lines.write({"type": "persist", **line})
                    print(outputs.to_json(line), flush=True)


def twice(model: Path, backend: str, context: int) -> list[dict[str, object]]:
    """Both runs of one backend and context."""
    lines: list[dict[str, object]] = []
    tokenizer = load_tokenizer(model)

    def encode(text: str, special: bool = True) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=special).ids)

    with tempfile.TemporaryDirectory() as folder:
        prompt = Path(folder) / "prompt.txt"
        prompt.write_text(cut(corpus().decode(), encode, context - NEW_TOKENS - len(encode(""))))
        command = [
            sys.executable, "-m", "eps_core.cli", "run", "--model", str(model), "--backend", backend, "--device", "cpu",
            "--prompt-file", str(prompt), "--max-new-tokens", str(NEW_TOKENS), "--no-stop", "--method", "rq",
            "--no-baseline", "--cache-dir", str(Path(folder) / "kept"),
        ]  # fmt: skip
        for number in (1, 2):
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
            if done.returncode:  # it has said why
                sys.exit(done.returncode)
            result = json.loads(done.stdout.splitlines()[-1])
            line = {
                "backend": backend, "device": result["device"], "kernels": result["kernels"], "context_tokens": context,
                "prompt_tokens": result["prompt_tokens"], "run": number, **result["stored"]["eps"],
                "tokens": result["tokens"],
            }  # fmt: skip
            if lines:
                line["tokens_same"] = line["tokens"] == lines[0]["tokens"]
                line["ttft_share"] = line["ttft_ms"] / lines[0]["ttft_ms"]
            lines.append(line)
    return lines


if __name__ == "__main__":
    sys.exit(exit_code(main))
