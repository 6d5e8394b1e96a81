"""Results as one HTML page: plots as inline SVG, the numbers under each as a table, and no network.

The same lines give the same bytes. `templates/` sets the page (Jinja2, everything escaped), `sections` says what is in
it, `figures` draws.
"""

from itertools import count

from eps_core.report.figures import Figure
from eps_core.report.load import Results
from eps_core.report.sections import sections_of
from eps_core.report.style import need, templates

FOLDED_ROWS = 12  # a table of more is folded


def page(results: Results) -> str:
    """Return the whole page."""
    environment, markup = templates(), need("markupsafe").Markup
    need("matplotlib")  # refused before anything is drawn, also where there is nothing to draw
    numbers = count(1)

    def inline(figure: Figure) -> str:
        return markup(figure.inline(next(numbers)))  # drawn here, of numbers and escaped names: safe

    html: str = environment.get_template("page.html").render(
        sections=sections_of(results), inline=inline, folded_rows=FOLDED_ROWS
    )
    return html
