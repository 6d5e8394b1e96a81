"""`eps-proto` in this process and in one of its own: what a command line prints and how it ends."""

import contextlib
import io
import json
import os
import re
import runpy
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from eps_core.cli.main import main


class Outcome(NamedTuple):
    code: object
    out: str
    err: str


SCRIPTS = Path(__file__).parents[1] / "scripts"


def program(name: str) -> Callable[[], object]:
    """Return what runs a script of scripts/, or the command of an experiment."""
    path = SCRIPTS / (name if name.endswith(".py") else f"experiments/{name}/run.py")
    return lambda: runpy.run_path(str(path), run_name="__main__")


def prints_its_usage_or_refuses(name: str, folder: Path) -> None:
    """Assert that a script answers --help and does nothing else, and refuses a flag that it does not know."""
    usage, unknown = (outcome([flag], folder, main=program(name)) for flag in ("--help", "--bogus"))
    assert not usage.code and "usage: " in usage.out.lower() and unknown.code == 2
    assert not list(folder.iterdir())


def passes_dry(name: str, folder: Path) -> None:
    """Assert that every phase of a script for a machine of another kind passes with --dry-run, with files in folder."""
    done = subprocess.run(
        ["bash", str(SCRIPTS / name), "--dry-run"], cwd=SCRIPTS.parent, capture_output=True, text=True, timeout=900,
        env={**os.environ, "PYTHON": sys.executable, "OUT": str(folder)},
    )  # fmt: skip
    assert done.returncode == 0 and "all phases passed" in done.stdout, done.stdout[-3000:] + done.stderr[-1000:]


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


def last(done: Outcome) -> dict[str, Any]:
    """Return the object of the last line of a command line that must succeed."""
    assert done.code in (None, 0), done.err
    found: dict[str, Any] = json.loads(done.out.splitlines()[-1])
    return found


def refused(line: Iterable[object], folder: Path, words: str, **more: Any) -> str:
    """Return the one line of a command line that ends with exit code 2; it holds `words`, and `folder` is as it was."""
    before = sorted(folder.iterdir())
    done = outcome([*map(str, line)], folder, **more)
    assert done.code == 2 and done.out == "", done
    assert re.fullmatch(r"error: [^\n]+\n", done.err) and words in done.err, done.err
    assert sorted(folder.iterdir()) == before
    return done.err


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSONL file, whose lines are whole and hold no number that JSON does not have."""
    text = path.read_text()
    assert text.endswith("\n") and "NaN" not in text and "Infinity" not in text
    return [json.loads(line) for line in text.splitlines()]


def process_line(*args: object) -> list[str]:
    """Return the command line of `eps-proto` as a process of its own."""
    return [sys.executable, "-m", "eps_core.cli", *map(str, args)]


def call(*args: object, **more: Any) -> subprocess.CompletedProcess:
    return subprocess.run(process_line(*args), capture_output=True, text=True, timeout=300, **more)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextlib.contextmanager
def served(line: list[str], port: int, log: Path, **environment: str) -> Iterator[subprocess.Popen]:
    """Yield a server's process when it answers on its port. Its stderr goes to `log`; it is killed at the end."""
    with log.open("w") as file:
        process = subprocess.Popen(
            line, stdout=subprocess.PIPE, stderr=file, text=True, env={**os.environ, **environment}
        )
    try:
        for _ in range(600):
            assert process.poll() is None, log.read_text()
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            except OSError:
                time.sleep(0.1)
        yield process
    finally:
        process.kill()
        process.wait()
