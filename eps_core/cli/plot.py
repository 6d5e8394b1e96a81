"""`run --plot`: what the sparse steps of a run read, as one HTML page."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from eps_core.cli.help import OUTPUT, OUTPUT_FILE, option
from eps_core.io import outputs

if TYPE_CHECKING:
    from eps_core.evaluation.trace import Trace

plot_option = option(
    "--plot", heading=OUTPUT, type=OUTPUT_FILE, metavar="FILE",
    help="HTML output file: tokens that were read, KL along the text (implies --kl), bytes and times by layer.",
)  # fmt: skip


@contextmanager
def plotting(path: Path | None) -> Iterator[Callable[["Trace"], None] | None]:
    """Yields what draws a run's page into the file at `path`, which is this process's meanwhile; None for no path."""
    if path is None:
        yield None
        return
    with outputs.Output(path, "plot") as output:

        def draw(trace: "Trace") -> None:
            from eps_core.report.run_page import run_page

            with output.replacing() as file:
                file.write(run_page(trace))

        yield draw
