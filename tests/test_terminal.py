"""What a terminal shows, and what a file or a pipe gets of the same."""

import fcntl
import io
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from eps_core.config.eps import EpsConfig
from eps_core.evaluation import quality
from eps_core.eviction.config import EvictionConfig
from eps_core.metrics import terminal

MODEL = "llama2-bf16-sharded"
ROOT = Path(__file__).parent.parent
PROMPT = "It was a dark and stormy night; the rain fell in torrents. " * 5
COLOUR = re.compile(r"\x1b\[(?:[\d;]*;)?(?:3|4|9|10)\d(?:;[\d;]*)?m")
CODE = re.compile(r"\x1b\[\??[\d;]*[A-Za-z]")


class Screen(io.StringIO):
    """A terminal's stream."""

    encoding = "utf-8"  # type: ignore[assignment]

    def isatty(self) -> bool:
        return True


def shown(text: str) -> list[str]:
    """The lines of an endless terminal after `text`: carriage return, erasing and moving up, as a bar uses them."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[\??[\d;]*[A-Za-z]|[^\x1b]", text):
        if part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part == "\r":
            column = 0
        elif part.endswith("K") and len(part) > 1:
            lines[row] = "" if "2" in part else lines[row][:column]
        elif part.endswith("A") and len(part) > 1:
            row -= int(part[2:-1] or 1)
        elif part.startswith("\x1b"):
            assert part[-1] in "mhl", repr(part)
        else:
            lines[row] = lines[row].ljust(column)[:column] + part + lines[row][column + 1 :]
            column += 1
    return lines


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def run_on_a_terminal(args: list[object], stdout_too: bool) -> tuple[str, str]:
    """(what a terminal of 80 columns received, what a pipe got of stdout if that is no terminal)."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "eps_core.cli", *map(str, args)], stdin=subprocess.DEVNULL, stderr=theirs,
        stdout=theirs if stdout_too else subprocess.PIPE, cwd=ROOT,
    )  # fmt: skip
    os.close(theirs)
    received: list[bytes] = []

    def read() -> None:
        try:
            while piece := os.read(ours, 65536):
                received.append(piece)
        except OSError:  # how a pty says that nobody writes to it any more
            pass

    reader = threading.Thread(target=read)
    reader.start()
    out, _ = process.communicate(timeout=300)
    reader.join()
    os.close(ours)
    text = b"".join(received).decode()
    assert process.returncode == 0, text
    return text, (out or b"").decode()


@pytest.mark.parametrize("stdout_too", [True, False], ids=["both", "stderr-alone"])
def test_progress_leaves_the_labels_of_a_run(model: Path, stdout_too: bool) -> None:
    received, piped = run_on_a_terminal(
        ["run", "--device", "cpu", "--model", model, "--prompt", PROMPT, "--prefill-chunk", 33, "--no-stop",
         "--max-new-tokens", 3, "--eps-method", "rq"],
        stdout_too,
    )  # fmt: skip
    assert re.search(r"prefill: [━╸╺]+ [\d,]+ of 294 tokens, [\d,]+/s, \d+ s left", CODE.sub("", received)), received
    status = re.search(r"[\d.]+ tokens/s, [\d.]+ MB of the KV cache read a token", CODE.sub("", received))
    assert bool(status) == stdout_too
    lines = shown(received)
    assert not any(("prefill:" in line and "━" in line) or "tokens/s" in line for line in lines)  # the bar went
    assert received.rfind("\x1b[?25h") > received.rfind("\x1b[?25l")  # and the cursor is back
    if not stdout_too:
        assert not any(lines) and "\x1b" not in piped
        lines = piped.splitlines()
    text = "\n".join(lines)
    assert re.search(r"^dense > ", text, re.M) and re.search(r"^eps   > ", text, re.M), text
    assert json.loads(text.strip().splitlines()[-1])["new_tokens"] == 3


def test_the_progress_of_a_capture_ends_with_its_prefill(model: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text(PROMPT)
    args = ["capture", "--device", "cpu", "--model", model, "--text", tmp_path / "text", "--context", 64, "--steps", 2]
    received, _ = run_on_a_terminal([*args, "-o", tmp_path / "c"], stdout_too=True)
    assert "64 of 64 tokens" in received
    assert not any("prefill" in line for line in shown(received))


def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn() -> str:
        stream = Screen()
        with terminal.Progress("dense: prefill", "tokens", stream) as progress:
            progress(1, 2)
        return stream.getvalue() + terminal.table([["rq", "1"]], ["", "bytes"], Screen())

    assert COLOUR.search(drawn())
    monkeypatch.setenv("NO_COLOR", "1")
    assert COLOUR.search(drawn()) is None


def test_a_bar_goes_when_the_work_ends_or_fails() -> None:
    stream = Screen()
    progress = terminal.Progress("grid:", "cells", stream)
    for done in (1, 2):
        progress(done, 3, "[bold]x[/bold]")
        assert re.search(rf"grid: [━╸╺]+ {done} of 3 cells, \[bold\]x\[/bold\]", CODE.sub("", stream.getvalue()))
    progress(3, 3)
    assert not any(shown(stream.getvalue()))
    stream = Screen()
    with pytest.raises(KeyError), terminal.Progress("grid:", "cells", stream) as progress:
        progress(1, 3)
        raise KeyError
    assert not any(shown(stream.getvalue())) and stream.getvalue().rfind("\x1b[?25h") > 0


@pytest.mark.parametrize("dumb", [False, True])
def test_where_there_is_no_terminal_lines_are_few(dumb: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now)
    stream = io.StringIO()
    if dumb:
        stream = Screen()
        monkeypatch.setenv("TERM", "dumb")
    progress = terminal.Progress("eps: prefill", "tokens", stream)
    for done in range(0, 4000, 100):
        now += 1.0
        progress(done, 4000, "slowly")
    assert stream.getvalue().splitlines() == [
        f"eps: prefill {done:,} of 4,000 tokens, 100/s, {(4000 - done) // 100} s left, slowly"
        for done in (900, 1900, 2900, 3900)
    ]


class Bytes:
    """A tokenizer whose tokens are characters."""

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return "".join(map(chr, tokens))


def test_an_answer_streams_and_on_a_terminal_says_how_fast_and_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    now, text = 100.0, "It was a dark and stormy night. " * 60
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("LINES", "10")
    for out in (io.StringIO(), Screen()):
        with terminal.Answer(Bytes(), out, "dense > ") as answer:
            for character in text:
                answer.add([ord(character)], 1_500_000)
                now += 0.5
                assert isinstance(out, Screen) or out.getvalue().endswith(character)
        assert [line for line in shown(out.getvalue()) if line] == [f"dense > {text}"]
    said = CODE.sub("", out.getvalue())
    assert " 2.0 tokens/s, 1.5 MB of the K" in said  # cut to the width
    up = [int(code[2:-1] or 1) for code in re.findall(r"\x1b\[\d*A", out.getvalue())]
    assert max(up) < 10  # what cannot be erased is not drawn


def test_an_answer_that_is_interrupted_keeps_what_came() -> None:
    for out in (io.StringIO(), Screen()):
        with pytest.raises(KeyboardInterrupt), terminal.Answer(Bytes(), out, "eps   > ") as answer:
            answer.add([ord("a"), ord("b")], 10)
            raise KeyboardInterrupt
        assert [line for line in shown(out.getvalue()) if line] == ["eps   > ab"]
        assert out.getvalue().rfind("\x1b[?25h") >= out.getvalue().rfind("\x1b[?25l")
    nothing = io.StringIO()
    with pytest.raises(KeyError), terminal.Answer(Bytes(), nothing, "eps   > "):
        raise KeyError
    assert nothing.getvalue() == ""


HEADER = ["method", "bytes", "a long name of a column", "KL", "x [not markup]", "decode ms, p50 / p95", "last"]
ROWS = [[f"rq@{i}", f"{i},000", "-", "0.1", "[red]y[/red]", "12.50 / 13.00", f"end {i}"] for i in range(3)]


def test_a_table_in_a_file_is_plain_text() -> None:
    text = terminal.table([["rq", "12"], ["meanstd", "3"]], ["name", "bytes"], io.StringIO())
    assert text == "name     bytes\n-------  -----\nrq          12\nmeanstd      3"


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_a_table_on_a_terminal_fits_it_and_says_the_same(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = CODE.sub("", terminal.table(ROWS, HEADER, Screen())).splitlines()
    assert max(map(len, lines)) <= columns and "─" * 5 in lines[1]
    for cell in (*HEADER, *(cell for row in ROWS for cell in row)):
        assert any(cell in line for line in lines), cell  # whole, on one line
    parts = "\n".join(lines).split("\n\n")
    assert len(parts) == {40: 3, 80: 2, 200: 1}[columns]
    for part in parts:  # each can be read alone
        assert [line.split()[0] for line in part.splitlines()][2:] == [row[0] for row in ROWS]


def test_tasks_and_texts_are_tables_with_what_limits_them() -> None:
    known: dict[str, Any] = dict.fromkeys(field.name for field in fields(quality.TaskResult))
    known |= {"task": "niah", "context_tokens": 4096, "num_samples": 20, "num_truncated": 3, "dense": 1.0, "eps": 0.95}
    known |= {"eps_minus_dense": -0.05, "num_changed": 1, "changed_share_upper": 0.236, "bytes_ratio": 0.125}
    failed = known | {"task": "vt", "context_tokens": None, "num_truncated": 0, "dense": 0.0, "says_nothing": True}
    text: dict[str, Any] = dict.fromkeys(field.name for field in fields(quality.TextResult))
    text |= {"context_tokens": 4096, "num_documents": 2, "text_steps": 64, "eps_kl": 0.01, "eps_kl_interval": (0, 1)}
    text |= {"eps_top1_agreement": 0.99, "bytes_ratio": 0.1}
    tasks = [quality.TaskResult(**known), quality.TaskResult(**failed)]
    words = quality.table(tasks, [quality.TextResult(**text)], io.StringIO()).splitlines()
    assert [line.split() for line in words] == [
        ["task", "context", "n", "dense", "EPS", "oracle", "EPS", "-", "dense", "(95", "%)", "changed", "bytes"],
        ["-" * n for n in (4, 7, 2, 5, 5, 6, 18, 10, 5)],
        ["niah", "4,096", "20", "1.000", "0.950", "-", "-0.050", "1", "(<=", "24%)", "0.125"],
        ["vt", "own", "20", "0.000", "0.950", "-", "-", "-", "-"],
        "niah, 4,096: 3 of 20 prompts lost their middle".split(),
        "vt, own: says nothing: dense itself fails".split(),
        [],
        ["text", "context", "n", "KL,", "nats", "(95", "%)", "top-1", "oracle", "KL", "bytes"],
        ["-" * n for n in (13, 7, 1, 26, 6, 9, 5)],
        ["64", "steps", "each", "4,096", "2", "0.01000", "[0.00000,", "1.00000]", "0.9900", "-", "0.100"],
    ]


@pytest.mark.parametrize(
    "name, share, says",
    [
        ("snapkv", 0.5, "snapkv: 0.5 of the prompt's tokens (1,500 of 3,001), "),
        ("tova", 4, "tova: 4 rows a head (36 of 3,001), again every 128 tokens (compacted by repack), 4 + 32 "),
        (
            "h2o",
            0.5,
            "h2o: 0.5 of the prompt's tokens (1,500 of 3,001), again every 128 tokens (compacted by repack), 4 + 750 ",
        ),
        ("snapkv", 3000, "snapkv: 3,000 rows a head (all of 3,001), "),
        ("snapkv", 1e9, "snapkv: 1,000,000,000 rows a head (all of 3,001), "),
        ("rswa", 5, "rswa: the prompt and 32 new tokens, again every 128 tokens"),
    ],
)
def test_how_much_is_kept_is_told_in_rows(name: str, share: float, says: str) -> None:
    assert terminal.describe_keep(EvictionConfig(name, share), 3001).startswith(says)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            {"method": "rq"},
            "rq (1 bit a dimension about the mean of 64 tokens, 0.5 of each code first, a second bit of the best "
            "0.125 or of twice what is read), single tokens; reads 0.1 of the tokens, at least 1,024, for each kv "
            "head, always the first 4 and last 8 tokens",
        ),
        (
            {"method": "box", "scope": "union", "top_pages": 9},
            "box, groups of 16 tokens; reads 9 groups, for all kv heads together, always the first 16 and last 128 "
            "tokens",
        ),
        (
            {"method": "box", "budget": 300, "strict": True, "epsilon": 0.1},
            "box, groups of 16 tokens; reads 300 tokens, for each kv head, always the first 16 and last 128 tokens, "
            "strict (epsilon 0.1)",
        ),
        ({"method": "dense"}, "off: dense attention, nothing allocated"),
    ],
    ids=["default", "union", "strict", "off"],
)
def test_a_config_is_told_in_one_line(settings: dict[str, Any], line: str) -> None:
    config = EpsConfig() if settings["method"] == "dense" else EpsConfig.of(**settings)
    assert terminal.describe(config) == line
