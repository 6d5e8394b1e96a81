"""Figures of the report page, offline and the same bytes every time; ink and grid lines take the page's colours."""

import html
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eps_core.report.style import DASHES, GRID, INK, MARKERS, colour, need, svg

MAX_CURVES = 12  # past this a legend is unreadable: methods then share one colour and show their best front
_INKED = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")


@dataclass(frozen=True)
class Figure:
    """A drawing, `svg`; where it is empty, `nothing` says why."""

    svg: str
    caption: str
    nothing: str = ""

    def inline(self, number: int) -> str:
        """The SVG element alone, as wide as its place, with ids of the page's figure `number` and the page's ink."""
        text = self.svg[self.svg.index("<svg") :].strip()
        text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
        text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
        text = re.sub(r'\bid="([^"]*)"', rf'id="f{number}-\1"', text)
        text = re.sub(r'href="#([^"]*)"', rf'href="#f{number}-\1"', text)
        text = re.sub(r"url\(#([^)]*)\)", rf"url(#f{number}-\1)", text)
        text = text.replace(INK, "currentColor").replace(GRID, "var(--grid)")
        return text.replace("<svg", f'<svg role="img" aria-label="{html.escape(self.caption)}"', 1)


@dataclass(frozen=True)
class Curve:
    """Points (x, y) in order of x. `joined` False: single cells, of which the lowest front is drawn as a line."""

    name: str
    points: list[tuple[float, float]]
    method: str
    joined: bool = True


def _draw(height_inches: float, caption: str, plot: Callable[[Any, Any], None]) -> Figure:
    inked = {**dict.fromkeys(_INKED, INK), "grid.color": GRID, "savefig.transparent": True}
    return Figure(svg((5.2, height_inches), lambda figure: plot(figure, figure.add_subplot()), **inked), caption)


def _label(figure: Any, axes: Any, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(linewidth=0.6)
    figure.legend(loc="outside lower center", ncols=2)


def curves(
    curves: Sequence[Curve],
    x: str,
    y: str,
    caption: str,
    log_x: bool = False,
    log_y: bool = False,
    y_range: tuple[float, float | None] | None = None,
    line_y: tuple[float, str] | None = None,
) -> Figure:
    drawn = [curve for curve in curves if any(not log_y or point[1] > 0 for point in curve.points)]
    if not drawn:
        zero = any(curve.points for curve in curves)
        return Figure(
            "", caption, f"{y} is 0 everywhere, which a log scale cannot show" if zero else f"{y} was not measured"
        )

    def plot(figure: Any, axes: Any) -> None:
        variants: Counter[str] = Counter()  # of one method: one colour, another dash
        for index, curve in enumerate(drawn):
            points = [point for point in curve.points if not log_y or point[1] > 0]
            xs, ys = zip(*points, strict=True)
            style: dict[str, Any] = {"color": colour(curve.method), "marker": MARKERS[index % len(MARKERS)]}
            style["linestyle"] = DASHES[variants[curve.method] % len(DASHES)]
            variants[curve.method] += 1
            if not curve.joined:
                axes.plot(*zip(*front(points, lower=log_y), strict=True), color=style["color"], linewidth=1.2)
                style |= {"linestyle": "none", "alpha": 0.6}
            axes.plot(xs, ys, label=_plain(curve.name), markersize=4.5, linewidth=1.4, **style)
        if line_y is not None:
            axes.axhline(line_y[0], color=INK, linewidth=1, linestyle=":", label=line_y[1])
        if log_y:
            axes.set_yscale("log")
        if log_x:
            axes.set_xscale("log", base=2)
            ticks = sorted({point[0] for curve in drawn for point in curve.points})
            axes.set_xticks(ticks, [f"{tick / 1024:g}k" if tick >= 1024 else f"{tick:g}" for tick in ticks])
            axes.minorticks_off()
        if y_range is not None:
            axes.set_ylim(*y_range)
        _label(figure, axes, x, y)

    return _draw(3.4 + 0.19 * -(-(len(drawn) + (line_y is not None)) // 2), caption, plot)


def scatter(
    points: Mapping[str, list[tuple[float, float]]], x: str, y: str, caption: str, diagonal: str = "bound = truth"
) -> Figure:
    """`points` by variant: (y, x), as (bound, true)."""

    def plot(figure: Any, axes: Any) -> None:
        for index, (name, pairs) in enumerate(points.items()):
            axes.plot(
                [true for _, true in pairs], [cert for cert, _ in pairs], linestyle="none", alpha=0.7,
                marker=MARKERS[index % len(MARKERS)], markersize=4, color=colour(name.split(" ")[0]),
                label=_plain(name),
            )  # fmt: skip
        axes.plot([0, 1], [0, 1], color=INK, linewidth=1, linestyle=":", label=diagonal)
        _label(figure, axes, x, y)

    return _draw(3.6 + 0.19 * -(-(len(points) + 1) // 2), caption, plot)


def heat_map(values: np.ndarray, x: str, y: str, caption: str) -> Figure:
    """`values` [L, Hkv], shares from 0 to 1."""
    layers, heads = (list(map(str, range(count))) for count in values.shape)

    def plot(figure: Any, axes: Any) -> None:
        mesh = shade(axes, values, (0, 1), layers, heads, lambda value: f"{value:.2f}")
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        figure.colorbar(mesh, ax=axes, label="share selected")

    return _draw(min(1.6 + 0.3 * len(layers), 6.5), caption, plot)


def shade(
    axes: Any,
    values: np.ndarray,
    limits: tuple[float, float],
    rows: Sequence[str],
    columns: Sequence[str],
    said: Callable[[float], str],
) -> Any:
    """Values [rows, columns] as colours from the one limit to the other, and as `said` where there are few; NaN is left
    blank. Returns what a colour bar is of."""
    # few enough levels that the colour bar stays a drawing and is no embedded bitmap
    levels = need("matplotlib").colormaps["viridis"].resampled(32)
    low, high = limits
    mesh = axes.pcolormesh(values, cmap=levels, vmin=low, vmax=high, edgecolors="face", linewidth=0.5)
    axes.invert_yaxis()
    for names, set_ticks in ((columns, axes.set_xticks), (rows, axes.set_yticks)):
        shown = range(0, len(names), max(1, -(-len(names) // 16)))
        set_ticks([tick + 0.5 for tick in shown], [names[tick] for tick in shown])
    if values.size <= 64:
        for row, column in np.argwhere(np.isfinite(values)):
            value = float(values[row, column])
            axes.text(
                column + 0.5, row + 0.5, said(value), ha="center", va="center", fontsize=9,
                # viridis is dark below about 0.6
                color="#ffffff" if value < low + 0.6 * (high - low) else "#000000",
            )  # fmt: skip
    return mesh


def _plain(name: str) -> str:
    """A name from a results file, of which matplotlib would read what is between dollars as a formula."""
    return name.replace("$", r"\$")


def front(points: list[tuple[float, float]], lower: bool) -> list[tuple[float, float]]:
    """The points that no cheaper point beats, in order of x."""
    front: list[tuple[float, float]] = []
    for x, y in points:
        if not front or (y < front[-1][1] if lower else y > front[-1][1]):
            front.append((x, y))
    return front
