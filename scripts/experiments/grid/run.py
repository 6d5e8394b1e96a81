"""Measures a grid of settings into one JSONL file, which `eps-proto report` draws.

python scripts/experiments/grid/run.py --preset quick -o grid.jsonl
"""

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import click

from eps_core.cli.help import CHECKS, FILE, INPUT, MEASURING, MODEL, OUTPUT, OUTPUT_FILE, SELECTION, command, option
from eps_core.cli.numbers import COUNT, SEED, TOKENS, Whole
from eps_core.cli.source import backend_option, device_option, dtype_option, model_option
from eps_core.config.cache import DTYPE_BYTES
from eps_core.decode.heads import check_policy, load_policy, model_fingerprint
from eps_core.decode.session import Session
from eps_core.errors import ConfigError, exit_code
from eps_core.io import outputs
from eps_core.io.resumable import ResumableFile
from eps_core.models.config import DEMO_MODEL
from experiments.grid.grid import IDENTITY, Progress, check_settings, header, run_cells
from experiments.grid.grid_cell import Bench, Plan
from experiments.grid.grid_settings import PRESETS, expand, load_grid

MIB = 2**20
_PLAN = Plan()


@command(
    "grid",
    context_settings={"help_option_names": ["-h", "--help"]},
    examples={
        "run.py --preset quick -o grid.jsonl": "the same line again goes on where it stopped",
        "run.py --model DIR --grid axes.json -o grid.jsonl --repeats 3": "axes of your own",
        "eps-proto report grid.jsonl -o report.html": "as one page",
    },
)
@option("--grid", heading=INPUT, type=FILE, metavar="FILE", help="JSON: axes and their values.")
@option(
    "--preset",
    heading=INPUT,
    type=click.Choice(tuple(PRESETS)),
    help="quick: 4 cells; small: minutes; verified: exact text, half an hour; long: 8k to 32k; prd: the requirements' "
    "1,296.",
)
@option(
    "-o", "--output", "out", also=["--out"], heading=OUTPUT, type=OUTPUT_FILE, metavar="FILE", required=True,
    help="JSONL; continued.",
)  # fmt: skip
@backend_option
@device_option
@model_option
@dtype_option
@option(
    "--kv-dtype", heading=MODEL, type=click.Choice(tuple(DTYPE_BYTES)), default=_PLAN.kv_dtype, show_default=True,
    help="Of the KV cache.",
)  # fmt: skip
@option("--needles", heading=INPUT, type=COUNT, default=_PLAN.needles, show_default=True, help="Questions.")
@option("--texts", heading=INPUT, type=TOKENS, default=_PLAN.texts, show_default=True, help="Windows of text.")
@option(
    "--text-steps", heading=INPUT, type=Whole(2), default=_PLAN.text_steps, show_default=True,
    help="Tokens of a window that are decoded.",
)  # fmt: skip
@option(
    "--repeats", "repeat", also=["--repeat"], heading=MEASURING, type=TOKENS, default=_PLAN.repeat, show_default=True,
    help="Decodes of each text, for more timings.",
)  # fmt: skip
@option(
    "--audit-every", also=["--eps-audit-every"], heading=CHECKS, type=COUNT, default=_PLAN.audit_every,
    show_default=True, help="Measure the true skipped mass every N steps; 0: never.",
)  # fmt: skip
@option("--eps-head-policy", heading=SELECTION, type=FILE, metavar="FILE", help="For cells of heads retrieval.")
@option(
    "--prefill-chunk", heading=MEASURING, type=TOKENS, default=_PLAN.prefill_chunk, show_default=True,
    help="Tokens at a time.",
)  # fmt: skip
@option(
    "--prefill-mib", heading=MEASURING, type=COUNT, default=4096, show_default=True,
    help="Most K and V of prefilled documents kept for the next cells.",
)  # fmt: skip
@option("--seed", heading=INPUT, type=SEED, default=_PLAN.seed, show_default=True, help="Of the documents.")
def main(**flags: Any) -> None:
    """Measure every combination of a grid, dense and sparse side by side, one JSON line a finished cell.

    Started again with the same -o it goes on where it was stopped, however it was stopped, but not over cells that were
    measured with other defaults than there are now. The grid file holds axes,
    {"context": [2048, 4096], "method": ["rq", "box"], "budget": [0.1, 0.2]}, or a list of such objects.

    A cell that is impossible as it is set is skipped for good. One that fails, for want of memory or by a fault, is
    tried again when the grid is started again, and makes the exit code 2. Reasons are printed; the last line of stdout
    is one JSON object.
    """
    path: Path | None = flags["grid"]
    if (path is None) == (flags["preset"] is None):
        raise click.UsageError("give either --grid FILE or --preset NAME")
    out: Path = flags["out"]
    outputs.check(
        {"-o": out},
        {"--grid": path, "--model": flags["model"] or DEMO_MODEL, "--eps-head-policy": flags["eps_head_policy"]},
    )
    with outputs.Output(out, "results file") as output:
        _grid(output, flags)


def _grid(output: outputs.Output, flags: dict[str, Any]) -> None:
    path: Path | None = flags["grid"]
    cells = load_grid(path) if path else expand(PRESETS[flags["preset"]], f"preset {flags['preset']}")
    session = Session.open(flags["model"], flags["backend"], flags["device"], flags["dtype"], flags["kv_dtype"])
    head_modes = None
    if flags["eps_head_policy"] is not None:
        policy = load_policy(flags["eps_head_policy"])
        check_policy(policy, session.path, session.spec)
        head_modes = policy.head_modes
    plan = Plan(**{name: flags[name] for name in vars(_PLAN)})
    first = header(
        cells, plan, head_modes, session.backend.versions(),
        preset=flags["preset"], model=session.model, model_id=model_fingerprint(session.path),
        backend=session.backend_name, device=session.device, dtype=session.dtype, cpu_count=os.cpu_count(),
    )  # fmt: skip
    results = ResumableFile(output, first, IDENTITY)  # before the weights are loaded, which may take minutes
    there = results.indexed("cell", len(cells))
    check_settings(cells, head_modes, there, output.path)
    finished = set(there)
    if len(finished) < len(cells):
        session.load()  # nothing is written until everything that can be refused has been
    bench = Bench(session, plan, flags["prefill_mib"] * MIB)
    progress = Progress(cells, finished)
    with results, progress.bar:
        counts = run_cells(bench, cells, head_modes, results, finished, progress)
    # a grid that was finished before has the same holes
    counts.skipped.update(str(line["skipped"]) for line in there.values() if line.get("skipped") is not None)
    for reason in counts.reasons():
        click.echo(reason)
    skipped, failed = counts.skipped.total(), counts.failed.total()
    result = {"out": str(output.path), "cells": len(cells), "resumed": len(finished), "measured": counts.measured}
    click.echo(outputs.to_json({**result, "skipped": skipped, "failed": failed}))
    if failed:
        raise ConfigError(
            f"{failed} of {len(cells)} cells failed ({counts.failed.most_common(1)[0][0]}): run the same grid again to "
            "try them again"
        )


if __name__ == "__main__":
    sys.exit(exit_code(main))
