"""Figures of the report page: matplotlib, offline, the same bytes every time."""

import html
import io
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from eps_core.errors import ConfigError
from eps_core.summaries.table import METHODS, facts

# matplotlib wants colours: these two stand for the page's own and are replaced in the SVG
_INK, _GRID = "#010203", "#010204"
PAGE_LIGHT, PAGE_DARK = "#ffffff", "#14171a"
# at least 3 to 1 against both the light and the dark page
PALETTE = (
    "#3b82d6", "#d9730d", "#2b9a57", "#9b6bdf", "#e0524f", "#1695a4", "#d6589f", "#8a8a2a", "#b0703c", "#7f8790",
)  # fmt: skip
_DASHES = ("-", "--", "-.", ":")
_MARKERS = "osD^vP*Xhp<>"
MAX_CURVES = 12  # past this a legend is unreadable: methods then share one colour and show their best front


# --- plots ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Curve:
    """Points (x, y) in order of x. `joined` False: single cells, of which the lowest front is drawn as a line."""

    name: str
    points: list[tuple[float, float]]
    method: str
    joined: bool = True


class _Drawer:
    """Makes figures; counts them, so that ids in the page differ."""

    def __init__(self) -> None:
        try:
            import matplotlib
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ConfigError(f"the report needs matplotlib ({error}): pip install 'eps[report]'") from error
        self._matplotlib, self._figure = matplotlib, Figure
        self._count = 0

    def _draw(self, height_inches: float, caption: str, plot: Callable[[Any, Any], None]) -> str:
        self._count += 1
        settings: Any = {
            # glyphs as paths: the page looks the same whatever fonts a machine has, and nothing is clipped
            "svg.fonttype": "path",
            "svg.hashsalt": "eps",
            "font.family": "DejaVu Sans",
            "font.size": 10,
            "axes.spines.top": False,
            "axes.spines.right": False,
            **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _INK),
            "grid.color": _GRID,
            "legend.frameon": False,
            "legend.fontsize": 9,
        }
        with self._matplotlib.rc_context(settings):
            figure = self._figure(figsize=(5.2, height_inches), layout="constrained")
            axes = figure.add_subplot()
            plot(figure, axes)
            out = io.StringIO()
            figure.savefig(
                out, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
            )
        svg = out.getvalue()
        return f"<figure>{_inline(svg, self._count, caption)}<figcaption>{_text(caption)}</figcaption></figure>"

    def curves(
        self,
        curves: list[_Curve],
        x: str,
        y: str,
        caption: str,
        log_x: bool = False,
        log_y: bool = False,
        y_range: tuple[float, float | None] | None = None,
        line_y: tuple[float, str] | None = None,
    ) -> str:
        drawn = [curve for curve in curves if any(not log_y or point[1] > 0 for point in curve.points)]
        if not drawn:
            return f"<figure>{_nothing(f'{y} was not measured')}</figure>"

        def plot(figure: Any, axes: Any) -> None:
            variants: Counter[str] = Counter()  # of one method: one colour, another dash
            for index, curve in enumerate(drawn):
                points = [point for point in curve.points if not log_y or point[1] > 0]
                xs, ys = zip(*points, strict=True)
                style: dict[str, Any] = {"color": _colour(curve.method), "marker": _MARKERS[index % len(_MARKERS)]}
                style["linestyle"] = _DASHES[variants[curve.method] % len(_DASHES)]
                variants[curve.method] += 1
                if not curve.joined:
                    axes.plot(*zip(*_front(points, lower=log_y), strict=True), color=style["color"], linewidth=1.2)
                    style |= {"linestyle": "none", "alpha": 0.6}
                axes.plot(xs, ys, label=curve.name, markersize=4.5, linewidth=1.4, **style)
            if line_y is not None:
                axes.axhline(line_y[0], color=_INK, linewidth=1, linestyle=":", label=line_y[1])
            if log_y:
                axes.set_yscale("log")
            if log_x:
                axes.set_xscale("log", base=2)
                ticks = sorted({point[0] for curve in drawn for point in curve.points})
                axes.set_xticks(ticks, [f"{tick / 1024:g}k" if tick >= 1024 else f"{tick:g}" for tick in ticks])
                axes.minorticks_off()
            if y_range is not None:
                axes.set_ylim(*y_range)
            axes.set_xlabel(x)
            axes.set_ylabel(y)
            axes.grid(linewidth=0.6)
            figure.legend(loc="outside lower center", ncols=2)

        return self._draw(3.4 + 0.19 * -(-(len(drawn) + (line_y is not None)) // 2), caption, plot)

    def scatter(self, points: dict[str, list[tuple[float, float]]], x: str, y: str, caption: str) -> str:
        """`points` by arm: (bound, true)."""

        def plot(figure: Any, axes: Any) -> None:
            for index, (name, pairs) in enumerate(points.items()):
                axes.plot(
                    [true for _, true in pairs], [cert for cert, _ in pairs], linestyle="none", alpha=0.7,
                    marker=_MARKERS[index % len(_MARKERS)], markersize=4, color=_colour(name.split()[0]), label=name,
                )  # fmt: skip
            axes.plot([0, 1], [0, 1], color=_INK, linewidth=1, linestyle=":", label="certificate = truth")
            axes.set_xlabel(x)
            axes.set_ylabel(y)
            axes.grid(linewidth=0.6)
            figure.legend(loc="outside lower center", ncols=2)

        return self._draw(3.6 + 0.19 * -(-(len(points) + 1) // 2), caption, plot)

    def heat_map(self, values: np.ndarray, x: str, y: str, caption: str) -> str:
        layers, heads = values.shape

        def plot(figure: Any, axes: Any) -> None:
            # few enough levels that the colour bar stays a drawing and is no embedded bitmap
            levels = self._matplotlib.colormaps["viridis"].resampled(32)
            mesh = axes.pcolormesh(values, cmap=levels, vmin=0, vmax=1, edgecolors="face", linewidth=0.5)
            axes.invert_yaxis()
            for centre, count, set_ticks in ((0.5, heads, axes.set_xticks), (0.5, layers, axes.set_yticks)):
                shown = range(0, count, max(1, -(-count // 16)))
                set_ticks([tick + centre for tick in shown], [str(tick) for tick in shown])
            if values.size <= 64:
                for layer, head in np.ndindex(*values.shape):
                    axes.text(
                        head + 0.5, layer + 0.5, f"{values[layer, head]:.2f}", ha="center", va="center", fontsize=9,
                        # viridis is dark below about 0.6
                        color="#ffffff" if values[layer, head] < 0.6 else "#000000",
                    )  # fmt: skip
            axes.set_xlabel(x)
            axes.set_ylabel(y)
            figure.colorbar(mesh, ax=axes, label="share visited")

        return self._draw(min(1.6 + 0.3 * layers, 6.5), caption, plot)


def _colour(method: str) -> str:
    """One colour for a method on every plot; what is best possible has the ink."""
    known = facts(method).colour if method in METHODS else len(PALETTE) - 2 + sum(map(ord, method)) % 2
    return _INK if known is None else PALETTE[known % len(PALETTE)]


def _front(points: list[tuple[float, float]], lower: bool) -> list[tuple[float, float]]:
    """The points that no cheaper point beats, in order of x."""
    front: list[tuple[float, float]] = []
    for x, y in points:
        if not front or (y < front[-1][1] if lower else y > front[-1][1]):
            front.append((x, y))
    return front


def _inline(svg: str, number: int, caption: str) -> str:
    """The SVG element alone, as wide as its place, with ids of its own and the page's ink."""
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'\bid="([^"]*)"', rf'id="f{number}-\1"', svg)
    svg = re.sub(r'href="#([^"]*)"', rf'href="#f{number}-\1"', svg)
    svg = re.sub(r"url\(#([^)]*)\)", rf"url(#f{number}-\1)", svg)
    svg = svg.replace(_INK, "currentColor").replace(_GRID, "var(--grid)")
    return svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(caption, quote=True)}"', 1)


def _text(value: str) -> str:
    return html.escape(value)


def _nothing(why: str) -> str:
    return f"<p class=nothing>No data: {_text(why)}.</p>\n"
