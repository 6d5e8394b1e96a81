"""Prints who wins where in memory: codes, eviction and EPS, alone and together; draws memory.svg there.

python scripts/experiments/memory/tables.py results
"""

import argparse
import sys
from pathlib import Path

from eps_core.errors import ConfigError, exit_code
from eps_core.io.outputs import replacing
from eps_core.report import kept
from eps_core.report.cells import Table, titled
from eps_core.report.figures import front
from eps_core.report.kinds import Line
from eps_core.report.load import load_results
from eps_core.report.style import INK, PALETTE, svg

FILES = ("memory.jsonl", "memory-wide.jsonl")
MEND = "run scripts/memory.sh again"
TICKS = (0.02, 0.05, 0.1, 0.2, 0.5, 1)


def markdown(table: Table) -> str:
    rows = [table.head, ["---"] * len(table.head), *table.rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def figure(cells: list[Line]) -> str:
    """KL against bytes read beside KL against bytes kept."""

    def plot(figure) -> None:
        left, right = figure.subplots(1, 2, sharey=True)
        for axes, (axis, name) in zip((left, right), kept.AXES, strict=True):
            for curve in kept.families(cells, axis):
                points, tint = (
                    [point for point in curve.points if point[1] > 0],
                    PALETTE[(curve.colour or 0) % len(PALETTE)],
                )
                axes.plot(*zip(*points, strict=True), "o", color=tint, alpha=0.35, markersize=3)
                axes.plot(*zip(*front(points, lower=True), strict=True), color=tint, linewidth=1.6, label=curve.name)
            axes.axhline(kept.KL_LIMIT, color=INK, linewidth=0.8, linestyle=":")
            axes.set(xscale="log", yscale="log", xlabel=f"{name}, share of dense")
            axes.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS], minor=False)
            axes.minorticks_off()
        left.set_ylabel("KL to dense, nats")
        handles, names = left.get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=4)

    return svg((9.5, 4.2), plot)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("results"), help="of memory.sh's raw files")
    folder = parser.parse_args().folder
    found = titled(load_results(path for name in FILES if (path := folder / name).exists()).kept)
    if not found:
        raise ConfigError(f"{folder} holds no cells of arms that keep less: {MEND}")
    for title, cells in found:
        print(f"{title}\n\n{markdown(kept.winners(cells))}\n\n{markdown(kept.all_variants(cells))}\n")
    with replacing(folder / "memory.svg") as out:
        out.write(figure(found[0][1]))


if __name__ == "__main__":
    sys.exit(exit_code(main))
