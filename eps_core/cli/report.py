"""`eps-proto report` draws result files as one page."""

from pathlib import Path

import click

from eps_core.cli.help import FILE, OUTPUT, OUTPUT_FILE, command, option
from eps_core.errors import require
from eps_core.io import outputs


@command(
    "report",
    examples={
        "eps-proto report scores.jsonl -o report.html": "of `eps-proto evaluate -o`",
        "eps-proto report steps.jsonl -o report.html": "of `eps-proto run --metrics`",
        "eps-proto report scores.jsonl steps.jsonl -o report.html": "several in one",
    },
)
@click.argument("results", type=FILE, nargs=-1, required=True)
@option(
    "-o",
    "--output",
    "out",
    also=["--out"],
    heading=OUTPUT,
    type=OUTPUT_FILE,
    metavar="FILE",
    required=True,
    help="Output HTML file.",
)
def report_command(results: tuple[Path, ...], out: Path) -> None:
    """Draw results (JSONL of evaluate, run --metrics or an experiment's grid) as one HTML page that needs no network.

    The last line of stdout is one JSON object.
    """
    outputs.check({"-o": out}, {"results": results})
    outputs.check_distinct("results", results)
    outputs.check_start("-o", out, *outputs.PAGE)
    from eps_core.report.load import load_results
    from eps_core.report.page import page

    with outputs.Output(out, "report") as output:
        loaded = load_results(results)
        require(
            loaded.drawn,
            f"{', '.join(map(str, results))}: nothing to draw: give JSONL of eps-proto evaluate -o that has ended a "
            "task or text, of eps-proto run --metrics, or of an experiment's grid",
        )
        html = page(loaded)
        with output.replacing() as file:
            file.write(html)
    for note in loaded.notes:
        click.echo(f"note: {note}")
    click.echo(outputs.to_json({"out": str(out), "lines": loaded.counts}))
