"""`eps-proto balance`: a model's keys balanced in its files, for engines."""

from pathlib import Path
from typing import Any

import click

from eps_core.cli.help import OUTPUT, OUTPUT_FILE, command, option
from eps_core.cli.source import backend_option, device_option, model_option
from eps_core.io import outputs


@command(
    "balance",
    examples={
        "eps-proto balance --model DIR -o DIR2": "then: EPS_METHOD=rq vllm serve DIR2",
        "eps-proto balance --model org/name -o DIR2": "a model of the Hub",
        "eps-proto balance --model DIR -o DIR2 --device cpu": "without the GPU",
    },
)
@backend_option
@device_option
@model_option
@option(
    "-o", "--output", "out", heading=OUTPUT, type=OUTPUT_FILE, metavar="DIR", required=True,
    help="Output folder; it must not exist.",
)  # fmt: skip
def balance_command(out: Path, **flags: Any) -> None:
    """Write a copy of a model whose keys are balanced for EPS's codes, for vLLM, SGLang or your own code.

    Rows of the weights that make queries and keys are multiplied by powers of two, so that every logit of attention
    stays as it is, and EPS selects better. EPS's own decoders do so when they open a model, and `run` and `serve` when
    they open one in transformers or mlx-lm. Refused: float16 weights, and norms of queries and keys that are stored
    about 1 (Gemma 3).

    The last line of stdout is one JSON object.
    """
    from eps_core.decode.balanced_folder import write_balanced
    from eps_core.decode.session import Session

    session = Session.open(flags["model"], flags["backend"], flags["device"], method="rq")
    pairs = write_balanced(session, out)
    total = len(session.spec.full) * session.spec.num_kv_heads * session.spec.head_dim // 2
    click.echo(f"{out}: {pairs:,} of {total:,} pairs of dimensions of its keys are multiplied by a power of two")
    click.echo(outputs.to_json({"out": str(out), "pairs": pairs, "of": total}))
