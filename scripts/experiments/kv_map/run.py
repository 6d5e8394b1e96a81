"""Measures what fewer bits of K and V cost, by format and layer.

python scripts/experiments/kv_map/run.py --plot map.svg
"""

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import click

from eps_core.cli.captures import context_option, text_option
from eps_core.cli.help import INPUT, OUTPUT, OUTPUT_FILE, command, option
from eps_core.cli.numbers import TOKENS
from eps_core.cli.source import backend_option, device_option, dtype_option, kv_dtype_option, model_option
from eps_core.errors import exit_code
from eps_core.io import outputs
from eps_core.models.config import DEMO_MODEL
from eps_core.report.style import need
from experiments.kv_map.figure import figure
from experiments.kv_map.kv_map import KvMapRequest, kv_map


@command(
    "kv-map",
    context_settings={"help_option_names": ["-h", "--help"]},
    examples={
        "run.py --plot map.svg": "the demo model along the shipped text, drawn",
        "run.py --model DIR --text long.txt -o map.jsonl": "yours, a line for each pair and layer",
        "eps-proto run --model DIR --prompt-file long.txt --kv-bits 8,4": "decode with what you chose",
    },
)
@model_option
@text_option
@context_option
@option("--steps", heading=INPUT, type=TOKENS, default=64, show_default=True, help="Tokens whose next one is compared.")
@backend_option
@device_option
@dtype_option
@kv_dtype_option
@option(
    "-o", "--output", heading=OUTPUT, type=OUTPUT_FILE, metavar="FILE", help="Write JSONL, a line for each variant."
)
@option("--plot", heading=OUTPUT, type=OUTPUT_FILE, metavar="FILE", help="Draw the map there, as SVG.")
def main(**flags: Any) -> None:
    """Measure how far K and V as codes move the next token: KL by --kv-bits of K, of V, and layer.

    The text's first --context tokens are prefilled once. Over caches of every pair of formats, with all layers as codes
    and with each alone, the model then reads the last --steps tokens in one dense pass; what it says next is compared
    with what it says over K and V as they are.

    Prints two tables; the last line of stdout is one JSON object.
    """
    if flags["plot"] is not None:
        need("matplotlib")  # before anything is measured
    outputs.check(
        {"-o": flags["output"], "--plot": flags["plot"]},
        {"--text": flags["text"], "--model": flags["model"] or DEMO_MODEL},
    )
    same = {name: flags[name] for name in ("output", "model", "text", "backend", "device", "dtype")}
    lengths = {"context_tokens": flags["context"], "num_steps": flags["steps"]}
    with ExitStack() as stack:
        plot = None if flags["plot"] is None else stack.enter_context(outputs.Output(flags["plot"], "plot"))
        found, result = kv_map(KvMapRequest(**same, **lengths, kv_dtype=flags["kv_dtype"] or "auto"), sys.stdout)
        if plot is not None:
            with outputs.replacing(plot) as file:
                file.write(figure(found))
    click.echo(outputs.to_json(result))


if __name__ == "__main__":
    sys.exit(exit_code(main))
