"""Print who wins where in memory: codes, eviction and EPS, alone and together.

python scripts/experiments/memory/tables.py memory.jsonl -o memory.svg
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from shared import markdown_table

from eps_core.errors import ConfigError, exit_code
from eps_core.io.outputs import replacing
from eps_core.report import kept
from eps_core.report.cells import titled
from eps_core.report.figures import front
from eps_core.report.kinds import Line
from eps_core.report.load import load_results
from eps_core.report.style import INK, PALETTE, svg

TICKS = (0.02, 0.05, 0.1, 0.2, 0.5, 1)


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
    parser.add_argument("results", type=Path, nargs="+", metavar="JSONL", help="of run.py")
    parser.add_argument("-o", "--output", type=Path, help="SVG of KL against bytes read and kept, of the first model")
    args = parser.parse_args()
    found = titled(load_results(args.results).kept)
    if not found:
        names = ", ".join(map(str, args.results))
        raise ConfigError(f"{names}: no cell of a variant that keeps less: give what run.py wrote")
    for title, cells in found:
        tables = [markdown_table(one.head, one.rows) for one in (kept.winners(cells), kept.all_variants(cells))]
        print("\n\n".join([title, *tables]), end="\n\n")
    if args.output is not None:
        with replacing(args.output) as out:
            out.write(figure(found[0][1]))


if __name__ == "__main__":
    sys.exit(exit_code(main))
