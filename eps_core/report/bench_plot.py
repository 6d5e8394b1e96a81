"""Plots of a benchmark's record as SVG: a roofline, and how time and bytes grow with the context.

The same record gives the same bytes.
"""

from pathlib import Path
from typing import Any

from eps_core.bench.layer import GRAPH
from eps_core.io.outputs import replacing
from eps_core.report.style import MARKERS, PALETTE, svg

Line = dict[str, Any]

PLOTS = ("roofline.svg", "scaling.svg")
_PARTS = ("attend", "score", "select", "write", "step")
_COLOURS = dict(zip((*_PARTS, "dense"), PALETTE, strict=False))


def draw(lines: list[Line], folder: Path) -> list[Path]:
    """Writes roofline.svg and scaling.svg of a run's line and its cells; returns their paths."""
    run, cells = lines[0], lines[1:]
    folder.mkdir(exist_ok=True)
    drawn = (
        svg((8.0, 5.2), lambda figure: _roofline(figure, run, cells)),
        svg((10.5, 0.6 + 3.6 * len(_families(cells))), lambda figure: _scaling(figure, cells)),
    )
    paths = [folder / name for name in PLOTS]
    for path, text in zip(paths, drawn, strict=True):
        with replacing(path) as file:
            file.write(text)
    return paths


def _title(line: Line) -> str:
    name = f"{line['backend']} on {line['device']}, kernels {line['kernels']}"
    return name + (" (INTERPRETED: times mean nothing)" if line["interpreted"] else "")


def _variant(cell: Line, part: str) -> Line | None:
    """The part's variant: the recorded launch where there is one, as an engine would run it."""
    variants = cell["arms"]
    return variants[cell["best_dense"]] if part == "dense" else variants.get(part + GRAPH, variants.get(part))


def cell_name(cell: Line) -> str:
    return f"{cell['method']}@{cell['group_size']}"


def _roofline(figure: Any, run: Line, cells: list[Line]) -> None:
    """Bytes a second of every part over the bytes that it moves; what was measured of the memory is the roof."""
    axes = figure.add_subplot()
    methods = list(dict.fromkeys(map(cell_name, cells)))
    seen: set[str] = set()

    def point(variant: Line, part: str, marker: str, label: str) -> None:
        axes.plot(
            variant["bytes"] / 2**20, variant["gbps"], linestyle="none", marker=marker, color=_COLOURS[part],
            markersize=6, alpha=0.8, label=None if label in seen else label,
        )  # fmt: skip
        seen.add(label)

    for cell in cells:
        marker = MARKERS[1 + methods.index(cell_name(cell)) % (len(MARKERS) - 1)]
        for part in ("attend", "score", "step"):
            if (variant := _variant(cell, part)) is not None and variant["bytes"]:
                point(variant, part, marker, f"{part}, {cell_name(cell)}")
        dense = _variant(cell, "dense")
        assert dense is not None
        point(dense, "dense", "o", "fastest dense variant")
    for name, style in (("copy", "--"), ("read", ":")):
        gbps = run["bandwidth"][f"{name}_gbps"]
        axes.axhline(gbps, color="black", linewidth=1, linestyle=style, label=f"measured {name}: {gbps:,.0f} GB/s")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("bytes that one call moves, MiB")
    axes.set_ylabel("achieved, GB/s")
    axes.set_title(_title(run), fontsize=10)
    axes.grid(linewidth=0.4, alpha=0.5)
    figure.legend(loc="outside right upper")


def _families(cells: list[Line]) -> dict[str, list[Line]]:
    """Cells that differ by context alone, by the name of what they share."""
    families: dict[str, list[Line]] = {}
    for cell in cells:
        ((kind, share),) = cell["asked"].items()
        name = f"{cell_name(cell)}, {kind} {share:g}, batch {cell['batch']}, {cell['dtype']}"
        families.setdefault(name, []).append(cell)
    return {name: sorted(group, key=lambda cell: cell["context"]) for name, group in families.items()}


def _scaling(figure: Any, cells: list[Line]) -> None:
    """Time and bytes of every part over the context: one row for each family."""
    families = _families(cells)
    grid = figure.subplots(len(families), 2, squeeze=False)
    for (name, group), row in zip(families.items(), grid, strict=True):
        contexts = [cell["context"] for cell in group]
        for axes, key, unit in ((row[0], "ms", "ms"), (row[1], "bytes", "MiB")):
            factor = 1 if key == "ms" else 2**-20
            for part in (*_PARTS, "dense"):
                variants = [variant for cell in group if (variant := _variant(cell, part)) is not None]
                if len(variants) < len(group):
                    continue
                axes.plot(
                    contexts, [variant[key] * factor for variant in variants], color=_COLOURS[part], label=part,
                    linewidth=1.5, marker="o", markersize=4, linestyle="--" if part == "dense" else "-",
                )  # fmt: skip
                if key == "ms":
                    axes.fill_between(
                        contexts, [variant["p10_ms"] for variant in variants],
                        [variant["p90_ms"] for variant in variants], color=_COLOURS[part], alpha=0.15, linewidth=0,
                    )  # fmt: skip
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            ticks = sorted(set(contexts))
            axes.set_xticks(ticks, [f"{tick / 1024:g}k" if tick >= 1024 else f"{tick}" for tick in ticks])
            axes.minorticks_off()
            axes.set_xlabel("context, tokens")
            axes.set_ylabel(f"one call, {unit}")
            axes.grid(linewidth=0.4, alpha=0.5)
        row[0].set_title(name, fontsize=10, loc="left")
        row[1].set_title(_title(group[0]), fontsize=10, loc="left")
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside right upper")
