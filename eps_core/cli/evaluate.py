"""`eps-proto evaluate`: what EPS costs in quality, on tasks, benchmark files and plain text."""

import sys
from itertools import chain
from typing import Any

import click

from eps_core.cli.help import CHECKS, FILE, INPUT, OUTPUT, OUTPUT_FILE, command, option
from eps_core.cli.numbers import COUNT, SEED, TOKENS, ListOf
from eps_core.cli.options import DEMO_METHOD, config_of, given_flags, method_option, selection_options, summary_options
from eps_core.cli.source import backend_option, device_option, model_option
from eps_core.cli.speculative import speculative_of, speculative_options
from eps_core.evaluation.runner import DEFAULT_CONTEXT
from eps_core.io import outputs
from eps_core.models.config import DEMO_MODEL

DEFAULT_TASKS = "niah_single,niah_multikey"
NO_TASKS = "none"
# flags that a request calls the same
_SAME = (
    "samples", "text_steps", "oracle", "seed", "longbench", "longbench_prompts", "ruler", "model", "backend", "device",
    "text", "out", "chat",
)  # fmt: skip


@command(
    "evaluate",
    examples={
        "eps-proto evaluate": "needles and text, the demo model",
        "eps-proto evaluate --model DIR --longbench qasper.jsonl -o quality.jsonl": "every answer is kept",
        "eps-proto evaluate --model DIR --tasks none --text long.txt --method box": "KL along a text of yours",
    },
)
@backend_option
@device_option
@model_option
@option(
    "--tasks", heading=INPUT, default=DEFAULT_TASKS, metavar="A,B,...",
    help=f"Generated tasks; an unknown name lists all. {NO_TASKS}: no tasks.",
)  # fmt: skip
@option(
    "--longbench", heading=INPUT, type=FILE, multiple=True, metavar="FILE",
    help="LongBench v1 JSONL file; prompts that are too long lose their middle. Repeatable.",
)  # fmt: skip
@option(
    "--longbench-prompts", heading=INPUT, type=FILE, metavar="FILE",
    help="LongBench's file config/dataset2prompt.json.  [default: prompts of our own, not comparable with "
    "published scores]",
)  # fmt: skip
@option("--ruler", heading=INPUT, type=FILE, multiple=True, metavar="FILE", help="RULER JSONL file. Repeatable.")
@option(
    "--context", heading=INPUT, type=ListOf(TOKENS), multiple=True,
    help="Context lengths in tokens, answer included, as in 4096,8192. Repeatable.  "
    f"[default: {DEFAULT_CONTEXT}, or as many as the model holds]",
)  # fmt: skip
@option("--chat", heading=INPUT, is_flag=True, help="Use the model's chat template in tasks whose authors do.")
@option(
    "--samples", heading=INPUT, type=TOKENS, default=20,
    help="Number of samples of each task, context and dataset (the first ones of a file), and of text documents.",
)  # fmt: skip
@option(
    "--text-steps", heading=INPUT, type=COUNT, default=64,
    help="Tokens of real text to decode along for KL and top-1 agreement; 0: none.",
)  # fmt: skip
@option(
    "--text", heading=INPUT, type=FILE, metavar="FILE",
    help="UTF-8 text file for haystacks and KL.  [default: the shipped corpus, sources of Python's library]",
)  # fmt: skip
@option(
    "--oracle/--no-oracle", heading=CHECKS, default=True,
    help="Also run the oracle: true masses as scores, at the same budget and group size.",
)  # fmt: skip
@option("--seed", heading=INPUT, type=SEED, default=0, help="Random seed of tasks and resampling.")
@option(
    "-o", "--output", "out", also=["--out"], heading=OUTPUT, type=OUTPUT_FILE, metavar="FILE",
    help="JSONL output file with every sample and result. A stopped run is continued.",
)  # fmt: skip
@method_option(DEMO_METHOD)
@selection_options
@speculative_options
@summary_options
@click.pass_context
def evaluate_command(ctx: click.Context, /, **flags: Any) -> None:
    """Score tasks densely and with EPS, and measure how far the next-token distribution moves on real text.

    Differences are paired, over the same documents, with 95 % bootstrap intervals. Without
    --chat no chat template is applied: an instruction-tuned model may score below its published figures.

    The demo model knows the sentence of niah_single and niah_multikey and nothing else: it fails the other tasks
    densely, and a task that dense fails says nothing about EPS.

    Started again with the same -o it goes on where it was stopped, however it was stopped: finished samples are not
    asked again.

    With --eps-verify the answers of EPS are verified, which makes them the dense ones, and real text is left out.

    Prints a table; the last line of stdout is one JSON object.
    """
    read = ("model", "text", "longbench", "longbench_prompts", "ruler", "eps_head_policy")
    inputs = {f"--{name.replace('_', '-')}": flags[name] for name in read}
    outputs.check({"-o": flags["out"]}, inputs | {"--model": flags["model"] or DEMO_MODEL})
    outputs.check_distinct("benchmark file", (*flags["longbench"], *flags["ruler"]))
    given = given_flags(ctx, flags)
    config = config_of(flags, given, default=DEMO_METHOD)
    verify = speculative_of(flags, given, config)
    if verify.enabled and "text_steps" not in given:
        flags["text_steps"] = 0  # a verified text is the dense one: there is no way to go
    if not config.cache_config.enabled:
        raise click.UsageError("evaluate compares EPS with dense decode and EPS is off: name another --method")
    named = [task.strip() for task in flags["tasks"].split(",")]
    tasks = () if named == [NO_TASKS] else tuple(dict.fromkeys(named))
    if not (tasks or flags["longbench"] or flags["ruler"] or flags["text_steps"]):
        raise click.UsageError("nothing to evaluate: give --tasks, --longbench, --ruler or --text-steps")
    if flags["longbench_prompts"] is not None and not flags["longbench"]:
        raise click.UsageError("--longbench-prompts means nothing without a --longbench file: add one or drop it")
    if "context" in given and not (tasks or flags["text_steps"]):
        raise click.UsageError("--context means nothing to benchmark files, which have their own lengths: drop it")
    # late: `eps-proto info` and --help must work where a model cannot be loaded
    from eps_core.evaluation.measure import MeasureRequest, measure

    request = MeasureRequest(
        config=config,
        verify=verify,
        tasks=tasks,
        contexts=tuple(dict.fromkeys(chain.from_iterable(flags["context"]))),
        **{name: flags[name] for name in _SAME},
    )
    click.echo(outputs.to_json(measure(request, sys.stdout)))
