"""The style of plots and pages: palette, markers, dashes, settings, templates. The same data gives the same bytes.

matplotlib draws and Jinja2 sets the page: both come with the extra `report` and are imported when something is drawn.
"""

import io
import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

from eps_core.errors import ConfigError, install
from eps_core.io import caches
from eps_core.summaries.table import METHODS, method_spec

# matplotlib wants colours: on the page these two stand for the page's own and are replaced in the SVG
INK, GRID = "#010203", "#010204"
PAGE_LIGHT, PAGE_DARK = "#ffffff", "#14171a"
# at least 3 to 1 against both the light and the dark page
PALETTE = (
    "#3b82d6", "#d9730d", "#2b9a57", "#9b6bdf", "#e0524f", "#1695a4", "#d6589f", "#8a8a2a", "#b0703c", "#7f8790",
)  # fmt: skip
DASHES = ("-", "--", "-.", ":")
MARKERS = "osD^vP*Xhp<>"
_SETTINGS: dict[str, Any] = {
    # glyphs as paths: a plot looks the same whatever fonts a machine has, and nothing is clipped
    "svg.fonttype": "path", "svg.hashsalt": "eps", "font.family": "DejaVu Sans", "font.size": 10,
    "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False, "legend.fontsize": 9,
}  # fmt: skip


def need(module: str) -> Any:
    """The module; ConfigError that says what to install where there is none."""
    folder = caches.folder()
    if folder is not None:  # matplotlib keeps a list of fonts, and complains where its own folder cannot be written
        os.environ.setdefault("MPLCONFIGDIR", str(folder / "matplotlib"))
    try:
        return import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise ConfigError(f"plots and pages need {package} ({error}): {install('report')}") from error


def templates() -> Any:
    """The Jinja2 environment of the pages in `templates/`: everything is escaped, and what is undefined is an error."""
    jinja2 = need("jinja2")
    return jinja2.Environment(
        loader=jinja2.PackageLoader("eps_core.report"), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip


def svg(inches: tuple[float, float], plot: Callable[[Any], None], **settings: Any) -> str:
    """The SVG of what `plot` draws on a figure; `settings` (rcParams) go before the shared ones."""
    matplotlib, figures = need("matplotlib"), need("matplotlib.figure")
    with matplotlib.rc_context({**_SETTINGS, **settings}):
        figure = figures.Figure(figsize=inches, layout="constrained")
        plot(figure)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return out.getvalue()


def colour(method: str) -> str:
    """One colour for a method on every plot; what is best possible has the ink."""
    known = method_spec(method).colour if method in METHODS else len(PALETTE) - 2 + sum(map(ord, method)) % 2
    return INK if known is None else PALETTE[known % len(PALETTE)]
