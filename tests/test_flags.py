"""What every command's flags have in common: help that starts with examples, one name for one thing, numbers that are
numbers."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from command import last, outcome, refused

from eps_core.cli.help import HEADINGS, OTHER
from eps_core.cli.main import cli

MODEL = "llama2"
EVERY = {"": cli, **cli.commands}
PROMPT = "It was a dark and stormy night; the rain fell in torrents. " * 5


@pytest.mark.parametrize("name", EVERY)
def test_help_starts_with_three_examples_and_groups_its_flags(name: str) -> None:
    done = CliRunner().invoke(cli, [name, "--help"] if name else ["--help"])
    assert done.exit_code == 0
    first = done.stdout.splitlines()[:4]
    assert all(line.startswith("eps-proto ") for line in first[:3]) and not first[3]
    assert max(map(len, first)) <= 120
    headings = re.findall(r"^(\w.*):$", done.stdout, re.M)
    assert [heading for heading in headings if heading != "Commands"] == [h for h in HEADINGS if h in headings]
    other = done.stdout.split(f"\n{OTHER}:\n")[1]
    assert re.findall(r"--[\w-]+", other) == (["--help"] if name else ["--version", "--help"])


EXAMPLES = dict.fromkeys(line for one in EVERY.values() for line in one.examples)  # type: ignore[attr-defined]


@pytest.mark.parametrize("line", EXAMPLES)
def test_an_example_is_a_line_that_the_command_takes(line: str) -> None:
    name, *words = shlex.split(line.partition("<")[0])[1:]
    with cli.commands[name].make_context(name, words):
        pass


# of every command: the name that help shows -> the names that are taken besides
NAMES = {
    "-o": {"capture", "calibrate", "replay", "evaluate", "report", "bench", "balance"},
    "--output": {"capture", "calibrate", "replay", "evaluate", "report", "bench", "balance"},
    "--out": {"evaluate", "report"},
    "--jsonl": {"replay"},
    "--method": {"run", "capture", "calibrate", "replay", "evaluate", "bench", "serve"},
    "--eps-method": {"run", "capture", "calibrate", "replay", "evaluate", "bench", "serve"},
    "--methods": {"replay", "bench"},
    "--repeats": {"bench"},
    "--audit-every": {"run", "serve"},
    "--eps-audit-every": {"run", "serve"},
    "--eps-audit-factor": {"run"},
    "--eps-audit-off": {"run"},
}  # fmt: skip
OLD = {"--out", "--jsonl", "--eps-method", "--methods", "--eps-audit-every", "--eps-audit-factor",
       "--eps-audit-off"}  # fmt: skip


@pytest.mark.parametrize("flag", NAMES)
def test_one_thing_has_one_name_and_old_ones_are_taken(flag: str) -> None:
    for name, command in cli.commands.items():
        context = click.Context(command)
        parser = command.make_parser(context)
        taken = {one for param in command.params for one in (*param.opts, *getattr(param, "also", ()))}
        assert (flag in taken) == (name in NAMES[flag]), name
        if flag in taken:
            assert flag in {**parser._long_opt, **parser._short_opt}
            shown = re.search(rf"(^|\s){re.escape(flag)}[ ,]", command.get_help(context).split("\nUsage:")[1])
            assert bool(shown) == (flag not in OLD)


def test_an_old_name_says_what_the_new_one_does(model: Path, tmp_path: Path) -> None:
    same = ["run", "--model", str(model), "--backend", "numpy", "--prompt", PROMPT, "--max-new-tokens", "2"]
    found = []
    for names in (("--method", "--audit-every"), ("--eps-method", "--eps-audit-every")):
        found.append(last(outcome([*same, names[0], "box", names[1], "1"], tmp_path))["eps"])
    times = ("_ms_p50", "_ms_p95", "per_s")
    new, old = ({key: value for key, value in one.items() if not key.endswith(times)} for one in found)
    assert new == old and new["method"] == "box" and new["skipped_mass_true_max"] is not None


NO_NUMBERS = ("nan", "inf", "1e400", "", "²", "٣", "1_000", "0x1", str(2**63), "1" + "0" * 400, "9" * 5000)


@pytest.mark.parametrize("value", NO_NUMBERS, ids=lambda value: value[:8] or "empty")
def test_what_is_no_number_or_too_large_a_one_is_named_with_its_limit(value: str, tmp_path: Path) -> None:
    """Of every flag that takes a number, or a list of them."""
    tried = 0
    for name, command in cli.commands.items():
        for param in command.params:
            kind = getattr(param.type, "kind", "")
            kind = kind if isinstance(kind, str) else getattr(kind, "kind", "")  # of a list
            if not isinstance(kind, str) or "number" not in kind or (value == str(2**63) and "whole" not in kind):
                continue
            tried += 1
            assert len(refused([name, param.opts[-1], value], tmp_path, "error: Invalid value for ")) <= 276
    assert tried > 30 + 60 * (value != str(2**63))


SIZED = (["replay", "x", "--method", "rq@²"], ["bench", "--method", "rq@٣"], ["bench", "--method", "rq@" + "9" * 5000])


@pytest.mark.parametrize("line", SIZED, ids=("replay", "bench", "digits"))
def test_a_group_size_is_of_ascii_digits(line: list[str], tmp_path: Path) -> None:
    refused(line, tmp_path, "has no group size in tokens after the @: write rq@16")


def test_evaluate_takes_the_default_method_and_what_the_model_holds(model: Path, tmp_path: Path) -> None:
    flags = ["--model", str(model), "--backend", "numpy", "--tasks", "none", "--samples", "1", "--text-steps", "4"]
    found = last(outcome(["evaluate", *flags, "--no-oracle"], tmp_path))
    assert found["method"] == "rq" and found["text"][0]["context_tokens"] == 512 - 4


NUMBERS = "".join(map(str, range(400)))


@pytest.mark.parametrize(
    ("text", "num_samples", "num_texts", "words"),
    [
        (
            "x" * 999,
            5,
            1,
            "note    text at 60 tokens: 1 of 5 windows differ, and only these count: give a longer",
        ),
        (NUMBERS, 18, 18, "note    text at 60 tokens: 18 windows, about 1,152 bytes, overlap in a text of 1,090: give"),
        (NUMBERS, 2, 2, None),
    ],
    ids=["repeated", "overlapping", "apart"],
)
def test_windows_of_a_text_count_once(
    text: str, num_samples: int, num_texts: int, words: str | None, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "t").write_text(text)
    line = f"evaluate --backend numpy --tasks none --context 60 --text-steps 4 --text t --samples {num_samples}"
    done = outcome([*line.split(), "--no-oracle", "--model", str(model), "-o", "e.jsonl"], tmp_path)
    assert last(done)["text"][0]["num_documents"] == num_texts
    assert words in done.out if words else "note" not in done.out
    again = outcome([*line.split(), "--no-oracle", "--model", str(model), "-o", "e.jsonl"], tmp_path)
    assert last(again)["resumed"] == num_texts


@pytest.mark.parametrize(("size", "want"), [(9000, 512 - 3), (100, 97)], ids=["model", "text"])
def test_a_context_that_is_not_given_is_what_model_and_text_hold(
    model: Path, tmp_path: Path, size: int, want: int
) -> None:
    (tmp_path / "long.txt").write_text("x" * size)
    flags = ["--model", str(model), "--backend", "numpy", "--text", "long.txt", "--steps", "3"]
    assert last(outcome(["capture", *flags, "-o", "c.safetensors"], tmp_path))["context_tokens"] == want
    last(outcome(["calibrate", *flags, "--recent-tokens", "64", "-o", "p.json"], tmp_path))
    assert json.loads((tmp_path / "p.json").read_text())["settings"]["context_tokens"] == want


@pytest.mark.parametrize(
    ("flags", "want"), [("--eps-rescore 0", 17 + 130 / 64), ("--eps-mean-tokens 32", 34 + 130 / 32)]
)
def test_info_counts_the_bytes_that_flags_leave(flags: str, want: float, tmp_path: Path) -> None:
    rows = last(outcome(["info", *flags.split()], tmp_path))["summaries"]
    fine = (row for row in rows if row["method"] == "rq" and not (row["rq_bounds"] or row["bound_bits"]))
    assert next(fine)["bytes_per_group"] == want


STREAMS = {
    "stdout-closed": ("info >&-", 0, ""),
    "stderr-closed": ("info --bogus 2>&-", 2, ""),
    "all-closed": ("info <&- >&- 2>&-", 0, ""),
    "stdout-full": ("info > /dev/full", 2, "error: standard output cannot be written (No space left on device)"),
    "stderr-full": ("info --bogus 2> /dev/full", 2, ""),
}


@pytest.mark.parametrize("unbuffered", ["", "1"])  # Python's own flush at exit has nothing to say either
@pytest.mark.parametrize("name", STREAMS)
def test_standard_streams_that_are_closed_or_full_give_no_traceback(name: str, unbuffered: str) -> None:
    line, code, words = STREAMS[name]
    if unbuffered and "--bogus" not in line:
        line = line.replace("info", "--version")  # which loads no library
    shell = ["bash", "-c", f'"$0" -m eps_core.cli {line}', sys.executable]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(shell, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == code and done.stderr.startswith(words) and done.stderr.count("\n") == bool(words)
