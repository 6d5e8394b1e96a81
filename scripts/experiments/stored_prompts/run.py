"""Time to first token of a prompt that is kept between runs (`eps-proto run --cache-dir`): every context twice, each
run a process of its own, the second one beginning from the file of the first.

    python scripts/experiments/stored_prompts/run.py --model DIR -o persist.jsonl

A line a run: what was loaded and stored, `ttft_ms` from the start of loading to the first new token, and of the second
run whether its tokens are the first one's (`tokens_same`) and its share of the first one's time (`ttft_share`).
"""

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
from experiments.whole_step.run import prompt_of, run

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
    with tempfile.TemporaryDirectory() as folder:
        prompt = Path(folder) / "prompt.txt"
        prompt.write_text(prompt_of(model, context - NEW_TOKENS))
        for number in (1, 2):
            result = run(
                "--model", model, "--backend", backend, "--device", "cpu", "--prompt-file", prompt,
                "--max-new-tokens", NEW_TOKENS, "--no-stop", "--method", "rq", "--no-baseline",
                "--cache-dir", Path(folder) / "kept",
            )  # fmt: skip
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
