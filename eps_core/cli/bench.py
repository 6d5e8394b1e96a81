"""`eps-proto bench`: times one attention layer, dense and sparse."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from eps_core.bench.layer import GRAPH, Bench
from eps_core.bench.plan import DEFAULT_FRACTIONS, DEFAULT_REPEATS, SCALING_CONTEXTS, BenchRequest
from eps_core.cli.help import INPUT, MEASURING, METHOD, OUTPUT, OUTPUT_FILE, SELECTION, command, option
from eps_core.cli.numbers import MOST_SECONDS, PART, SEED, TOKENS, ListOf, Real, SizedMethod
from eps_core.cli.options import given_flags, kernels_option
from eps_core.cli.source import backend_option, device_option
from eps_core.config.cache import DTYPE_BYTES, METHODS
from eps_core.errors import ConfigError
from eps_core.io import outputs
from eps_core.metrics import terminal
from eps_core.report.bench_plot import PLOTS, cell_name, draw
from eps_core.report.style import need

# flags that a request calls the same
_SAME = (
    "q_heads", "kv_heads", "head_dim", "block_size", "kernels", "backend", "device", "seconds", "warm_seconds", "seed",
    "output",
)  # fmt: skip


@command(
    "bench",
    examples={
        "eps-proto bench": "one layer at 4k and 32k tokens",
        "eps-proto bench --context 32768 --bytes 0.1 --method rq,box@128 --repeats 40": "at a tenth of the bytes",
        "eps-proto bench --scaling --method rq --bytes 0.1 -o scaling.jsonl --plot figures": "how it grows, 4k to 128k",
    },
)
@backend_option
@device_option
@option("--context", heading=INPUT, type=ListOf(TOKENS), default="4096,32768", help="Context lengths in tokens.")
@option(
    "--scaling",
    heading=INPUT,
    is_flag=True,
    help=f"Measure contexts {', '.join(map(str, SCALING_CONTEXTS))} of one dtype.",
)
@option("--batch", heading=INPUT, type=ListOf(TOKENS), default="1", help="Sequences in a batch.")
@option(
    "--fraction", heading=SELECTION, type=ListOf(PART),
    help=f"Share of the groups that is selected.  [default: {','.join(map(str, DEFAULT_FRACTIONS))}]",
)  # fmt: skip
@option(
    "--bytes", "byte_shares", heading=SELECTION, type=ListOf(PART),
    help="Share of the dense bytes, summaries included, that the selected groups may take; replaces --fraction.",
)  # fmt: skip
@option(
    "--dtype", heading=INPUT, type=ListOf(click.Choice(("auto", *DTYPE_BYTES))), default="auto",
    help="Dtype of cache and queries; auto: float32 on a CPU, else bfloat16.",
)  # fmt: skip
@option("--q-heads", heading=INPUT, type=TOKENS, default=32)
@option("--kv-heads", heading=INPUT, type=TOKENS, default=8)
@option("--head-dim", heading=INPUT, type=TOKENS, default=128)
@option(
    "--method", also=["--methods", "--eps-method"], heading=METHOD, type=ListOf(SizedMethod(METHODS)), default="rq,box",
    help="Summary methods; @N sets the group size: rq@2,box@128.",
)  # fmt: skip
@option(
    "--group-size", also=["--eps-group-size", "--group-tokens", "--eps-group-tokens"], heading=METHOD,
    type=ListOf(TOKENS), help="Group size in tokens of methods without @N.  [default: each method's best]",
)  # fmt: skip
@option("--block-size", heading=METHOD, type=TOKENS, default=16, help="Tokens of a block.")
@kernels_option
@option("--repeats", heading=MEASURING, type=TOKENS, help=f"Measurements of every cell.  [default: {DEFAULT_REPEATS}]")
@option(
    "--seconds", heading=MEASURING, type=Real(0, MOST_SECONDS, above=True),
    help="Seconds of measurement of every cell, without warm-up.",
)  # fmt: skip
@option(
    "--warm-seconds", heading=MEASURING, type=Real(0, MOST_SECONDS), default=1.0,
    help="Seconds of warm-up before every cell.",
)  # fmt: skip
@option("--seed", heading=INPUT, type=SEED, default=0, help="Random seed of keys, values and queries.")
@option("-o", "--output", heading=OUTPUT, type=OUTPUT_FILE, metavar="FILE", help="JSONL output file with every sample.")
@option(
    "--plot", heading=OUTPUT, type=OUTPUT_FILE, metavar="DIR", help="Output folder of roofline.svg and scaling.svg."
)
@click.pass_context
def bench_command(ctx: click.Context, /, **flags: Any) -> None:
    """Time one attention layer: score, select, attend and write of EPS, and the fastest dense attention here.

    Nothing is printed unless it was verified on the arrays that were timed that groups were skipped, that exactly the
    selected ones were read, that the kernels are those asked for, and that the results are right.

    \b
    selected     groups selected, share of all
    bytes       K, V and summaries read by a step, over dense K and V
    dense       median ms of the fastest dense variant, and its name; dense variants read contiguous K and V
    step        score + select + attend, called as one; the parts are timed apart and need not add up
    faster      dense / step
    of roof     bytes of K and V that attend reads a second, over the measured bandwidth; of its graph on CUDA
    graphed     the step as a CUDA graph, and dense over it

    Every call finds the caches overwritten. Times are medians of --repeats rounds (10th to 90th percentile in
    brackets); each round runs every variant once. The last line of stdout is one JSON object.
    """
    given = given_flags(ctx, flags)
    for first, second in (("fraction", "byte_shares"), ("repeats", "seconds"), ("scaling", "context")):
        if {first, second} <= given:
            names = [f"--{'bytes' if name == 'byte_shares' else name}" for name in (first, second)]
            raise click.UsageError(f"{names[0]} and {names[1]} say the same thing twice: give one of them")
    if flags["scaling"] and len(flags["dtype"]) > 1:
        raise click.UsageError("--scaling is of one dtype: name one with --dtype")
    request = BenchRequest(
        contexts=SCALING_CONTEXTS if flags["scaling"] else flags["context"],
        batches=flags["batch"],
        fractions=flags["fraction"] or DEFAULT_FRACTIONS,
        byte_shares=flags["byte_shares"] or (),
        dtypes=flags["dtype"],
        methods=flags["method"],
        group_size=flags["group_size"] or (None,),
        repeats=flags["repeats"] or DEFAULT_REPEATS,
        **{name: flags[name] for name in _SAME},
    )
    plots = {}
    if flags["plot"] is not None:
        _check_plots(flags["plot"])
        if flags["plot"].is_dir():
            plots = {f"--plot {name}": flags["plot"] / name for name in PLOTS}
    outputs.check({"-o": request.output, **plots}, {})
    outputs.check_start("-o", request.output, b'{"type": "run", "command": "bench"', "JSONL of bench")
    lines = []
    with ExitStack() as stack:
        output = None if request.output is None else stack.enter_context(outputs.Output(request.output))
        bench = Bench(request, stack.enter_context(terminal.Progress("bench:", "cells")))
        writer = None if output is None else stack.enter_context(outputs.JsonlWriter(output))
        for line in bench.lines():
            lines.append(outputs.jsonable(line))
            if writer is not None:
                writer.write(line)
    click.echo(bench_text(lines))
    drawn = [] if flags["plot"] is None else draw(lines, flags["plot"])
    click.echo(outputs.to_json(_summary(lines, request, drawn)))


def _check_plots(folder: Path) -> None:
    """Before anything is measured: a folder that can be made, and something to draw with."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"plot folder {folder} is a file: name a folder")
    if not folder.parent.is_dir():
        raise ConfigError(f"plot folder {folder}: there is no directory {folder.parent}; create it first")
    need("matplotlib")


def bench_text(lines: list[dict[str, Any]]) -> str:
    """Return a run's line and its cells as text for a person."""
    run, cells = lines[0], lines[1:]
    bandwidth = run["bandwidth"]
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items() if version)
    head = (
        f"{run['backend']} on {run['device']} ({run.get('device_name') or 'unnamed'}), kernels {run['kernels']} "
        f"({versions}); copy {bandwidth['copy_gbps']:,.1f} GB/s, read {bandwidth['read_gbps']:,.1f} GB/s, roof "
        f"{bandwidth['roof']}\n"
    )
    if run["interpreted"]:
        head += "INTERPRETED: these kernels ran in an interpreter, their times mean nothing\n"
    notes = {f"{name.strip()}: {reason}" for cell in cells for name, reason in cell["failed_variants"].items()}
    for cell in cells:
        plain = [part for part, code in cell["check"]["computed_by"].items() if code != cell["kernels"]]
        if plain:
            notes.add(
                f"{cell_name(cell)}: {', '.join(plain)} has no {cell['kernels']} kernel and ran as array operations"
            )
        if cell["dense_exceeds_last_cache"] is False:
            notes.add(f"{cell['batch']} x {cell['context']:,} tokens of K and V fit the last cache, which was flushed")
    header = [
        "method", "dtype", "context", "batch", "selected", "bytes", "dense", "best dense", "score", "select", "attend",
        "step", "write", "faster", "of roof", "graphed",
    ]  # fmt: skip
    table = terminal.table([_row(cell) for cell in cells], header)
    return head + table + "".join(f"\nnote: {note}" for note in sorted(notes))


def _row(cell: dict[str, Any]) -> list[str]:
    variants = cell["arms"]

    def ms(name: str, spread: bool = False) -> str:
        if name not in variants:
            return "-"
        variant = variants[name]
        text = f"{variant['ms']:.3f}"
        return f"{text} ({variant['p10_ms']:.3f}-{variant['p90_ms']:.3f})" if spread else text

    graphed = cell["graphed_step_ms"]
    return [
        cell_name(cell),
        cell["dtype"],
        f"{cell['context']:,}",
        str(cell["batch"]),
        f"{100 * cell['selected_ratio']:.1f} %",
        f"{100 * cell['bytes_ratio']:.1f} %",
        ms(cell["best_dense"], spread=True),
        cell["best_dense"],
        *(ms(name) for name in ("score", "select", "attend")),
        ms("step", spread=True),
        ms("write"),
        f"{cell['speedup']:.2f}x",
        f"{100 * variants.get('attend' + GRAPH, variants['attend'])['share_of_bandwidth']:.0f} %",
        "-" if graphed is None else f"{graphed:.3f} ({cell['graphed_speedup']:.2f}x)",
    ]


_SUMMARY_KEYS = (
    "context", "batch", "dtype", "method", "group_size", "kernels", "asked", "selected_ratio", "bytes_ratio",
    "best_dense", "best_dense_ms", "step_ms", "speedup", "speedup_with_write", "scoring_share_of_dense",
    "graphed_step_ms", "graphed_speedup",
)  # fmt: skip


def _summary(lines: list[dict[str, Any]], request: BenchRequest, plots: list[Path]) -> dict[str, Any]:
    run, cells = lines[0], lines[1:]
    return {
        **{name: run.get(name) for name in ("backend", "device", "device_name", "kernels", "interpreted", "bandwidth")},
        "output": None if request.output is None else str(request.output),
        "plots": [str(path) for path in plots],
        "cells": [
            {name: cell[name] for name in _SUMMARY_KEYS}
            | {f"{part}_ms": cell["arms"][part]["ms"] for part in ("score", "select", "attend", "write")}
            for cell in cells
        ],
    }
