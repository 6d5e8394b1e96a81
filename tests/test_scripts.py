"""Every script says how it is used and then does nothing; a flag that it does not know is exit status 2."""

import importlib
import json
import os
import runpy
import shutil
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path

import pytest

from eps_core.errors import exit_code

SCRIPTS = Path(__file__).parent.parent / "scripts"
SHELL = sorted(path.name for path in SCRIPTS.glob("*.sh") if os.access(path, os.X_OK))
PYTHON = sorted(path.name for path in SCRIPTS.glob("*.py") if "__main__" in path.read_text())
PASSED_ON = {"demo.sh", "test.sh", "test_vllm.sh"}  # their flags are those of another program


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The scripts where there is nothing to install or to run."""
    return shutil.copytree(SCRIPTS, tmp_path / "scripts", ignore=shutil.ignore_patterns("__pycache__"))


def everything(folder: Path) -> list[Path]:
    return sorted(folder.parent.rglob("*"))


@pytest.mark.parametrize("flag", ["--help", "-h"])
@pytest.mark.parametrize("name", SHELL)
def test_a_shell_script_prints_its_usage_and_does_nothing(name: str, flag: str, copy: Path) -> None:
    before = everything(copy)
    done = subprocess.run([copy / name, flag], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr == ""
    assert f"scripts/{name}" in done.stdout and "Usage: " in done.stdout and "set -" not in done.stdout
    assert everything(copy) == before


@pytest.mark.parametrize("arguments", [["--bogus"], ["a", "b"]], ids=" ".join)
@pytest.mark.parametrize("name", [name for name in SHELL if name not in PASSED_ON])
def test_a_shell_script_refuses_what_it_does_not_know(name: str, arguments: list[str], copy: Path) -> None:
    before = everything(copy)
    done = subprocess.run([copy / name, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.startswith("error: ")
    assert everything(copy) == before


def ran(name: str, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> object:
    """The exit code of a Python script, run here."""
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    monkeypatch.setattr(sys, "path", [str(SCRIPTS), *sys.path])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(SCRIPTS / name), run_name="__main__")
    return end.value.code


@pytest.mark.parametrize("name", PYTHON)
def test_a_python_script_prints_its_usage_or_refuses(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    assert not ran(name, "--help", monkeypatch=monkeypatch)
    assert "usage: " in capsys.readouterr().out.lower()
    assert ran(name, "--bogus", monkeypatch=monkeypatch) == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "name, arguments, taken",
    [
        ("experiments/methods/certificates.py", ["{}/c.safetensors", "-o", "{}/c.safetensors"], "c.safetensors"),
        ("experiments/methods/certificates.py", ["{}/c.safetensors", "-o", "{}/link.safetensors"], "c.safetensors"),
        ("experiments/methods/run.py", ["--model", "{}", "-o", "{}/config.json"], "config.json"),
        ("experiments/training/run.py", ["-o", "{}", "--checkpoint", "{}/c.safetensors"], "c.safetensors"),
        ("experiments/whole_step/run.py", ["-o", "{}/c.safetensors"], "c.safetensors"),
    ],
)
def test_a_script_never_replaces_what_it_reads(
    name: str,
    arguments: list[str],
    taken: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    for file in ("c.safetensors", "config.json"):
        (tmp_path / file).write_text("of the user")
    (tmp_path / "link.safetensors").symlink_to(tmp_path / "c.safetensors")
    assert ran(name, *(argument.format(tmp_path) for argument in arguments), monkeypatch=monkeypatch) == 2
    error = capsys.readouterr().err
    assert taken in error and "give another path" in error and "Traceback" not in error
    assert (tmp_path / taken).read_text() == "of the user"


@pytest.mark.parametrize(
    "name, arguments",
    [
        ("experiments/methods/run.py", ["--texts", "-1"]),
        ("experiments/methods/run.py", ["--jobs", "0"]),
        ("experiments/methods/run.py", ["--contexts", "2048", "0"]),
        ("experiments/methods/run.py", ["--budgets", "nan"]),
        ("experiments/training/model_card.py", ["{}/model", "--needle-documents", "0"]),
    ],
)
def test_a_script_refuses_numbers_that_mean_nothing(
    name: str, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    assert ran(name, *(argument.format(tmp_path) for argument in arguments), monkeypatch=monkeypatch) == 2
    error = capsys.readouterr().err
    assert f"'{arguments[-1]}' is not a" in error and "Traceback" not in error
    assert not list(tmp_path.iterdir())


def test_a_table_that_was_stopped_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts that were finished are not measured again, and the file is what one run would have left."""
    monkeypatch.setattr(sys, "path", [str(SCRIPTS), *sys.path])
    evaluate = importlib.import_module("experiments.methods.run")
    measured: list[int] = []
    stop_at = 4096

    def document(suite, model, backend, device, plan, kind, index):
        if plan.context_tokens == stop_at:
            raise KeyboardInterrupt
        measured.append(plan.context_tokens)
        return kind, {}, kind == "needle"

    class Here:
        """A pool that works at once."""

        def __init__(self, *about: object) -> None: ...
        def __enter__(self) -> "Here":
            return self

        def __exit__(self, *exc: object) -> None: ...
        def submit(self, function, *arguments):
            done = Future()
            done.set_result(function(*arguments))
            return done

    monkeypatch.setattr(evaluate, "_document", document)
    monkeypatch.setattr(evaluate, "ProcessPoolExecutor", Here)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(out: str, *more: str) -> int | None:
        sizes = ["--contexts", "2048", "4096", "--needles", "2", "--texts", "1", "--arms", "default"]
        monkeypatch.setattr(sys, "argv", ["evaluate.py", *sizes, "-o", str(tmp_path / out), *more])
        return exit_code(evaluate.main)

    with pytest.raises(KeyboardInterrupt):
        run("a.jsonl")
    assert measured == [2048] * 3
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl.part"]
    assert run("a.jsonl", "--seed", "1") == 2, "another run's table"
    stop_at = 0
    measured.clear()
    assert not run("a.jsonl") and measured == [4096] * 3
    assert not run("b.jsonl")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl"]
    first, second = ((tmp_path / name).read_text().splitlines()[1:] for name in ("a.jsonl", "b.jsonl"))
    assert first == second and [json.loads(line)["type"] for line in first].count("context") == 2


@pytest.mark.parametrize("name, arguments", [("experiments/step_profile/run.py", ["--backend", "abacus"])])
def test_a_script_names_what_the_user_can_mend_in_one_line(
    name: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    assert ran(name, *arguments, monkeypatch=monkeypatch) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: backend 'abacus' is unknown") and error.count("\n") == 1
