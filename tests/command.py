"""`eps-proto` in this process: what a command line prints and how it ends."""

import contextlib
import io
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from eps_core.cli.main import main


class Outcome(NamedTuple):
    code: object
    out: str
    err: str


def program(experiment: str) -> Callable[[], object]:
    """Return what runs the command of an experiment."""
    path = Path(__file__).parents[1] / "scripts" / "experiments" / experiment / "run.py"
    return lambda: runpy.run_path(str(path), run_name="__main__")


def outcome(line: list[str], folder: Path, stdin: str = "", main: Callable[[], object] = main) -> Outcome:
    """Of a command line without its first word, run in `folder`. What it raises but its exit is raised."""
    out, err = io.BytesIO(), io.BytesIO()
    with (
        mock.patch.object(sys, "argv", ["eps-proto", *line]),
        mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode()))),
        contextlib.redirect_stdout(io.TextIOWrapper(out, "utf-8", write_through=True)),
        contextlib.redirect_stderr(io.TextIOWrapper(err, "utf-8", "backslashreplace", write_through=True)),
        contextlib.chdir(folder),
    ):
        try:
            main()
            code: object = None
        except SystemExit as end:
            code = end.code
        # before the wrappers go, which close them
        return Outcome(code, *(stream.getvalue().decode(errors="replace") for stream in (out, err)))
