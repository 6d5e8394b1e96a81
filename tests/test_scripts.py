"""Every script says how it is used and then does nothing; a flag that it does not know is exit status 2."""

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent.parent / "scripts"
SHELL = sorted(path.name for path in SCRIPTS.glob("*.sh") if os.access(path, os.X_OK))
PYTHON = sorted(path.name for path in SCRIPTS.glob("*.py"))
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
        ("certificates.py", ["{}/c.safetensors", "-o", "{}/c.safetensors"], "c.safetensors"),
        ("certificates.py", ["{}/c.safetensors", "-o", "{}/link.safetensors"], "c.safetensors"),
        ("evaluate.py", ["--model", "{}", "-o", "{}/config.json"], "config.json"),
        ("train_demo.py", ["-o", "{}", "--checkpoint", "{}/c.safetensors"], "c.safetensors"),
        ("whole_step.py", ["-o", "{}/c.safetensors"], "c.safetensors"),
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
        ("ablate.py", ["--texts", "-1"]),
        ("ablate.py", ["--jobs", "0"]),
        ("evaluate.py", ["--contexts", "2048", "0"]),
        ("evaluate.py", ["--budgets", "nan"]),
        ("check_bounds.py", ["--jobs", "0"]),
        ("model_card.py", ["{}/model", "--needle-documents", "0"]),
    ],
)
def test_a_script_refuses_numbers_that_mean_nothing(
    name: str,
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    assert ran(name, *(argument.format(tmp_path) for argument in arguments), monkeypatch=monkeypatch) == 2
    error = capsys.readouterr().err
    assert f"'{arguments[-1]}' is not a" in error and "Traceback" not in error
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "name, arguments",
    [("check_bounds.py", ["--backends", "abacus"]), ("profile_step.py", ["--backend", "abacus"])],
)
def test_a_script_names_what_the_user_can_mend_in_one_line(
    name: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    assert ran(name, *arguments, monkeypatch=monkeypatch) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: backend 'abacus' is unknown") and error.count("\n") == 1


def test_the_published_tables_are_those_of_the_published_rows(tmp_path: Path) -> None:
    """What the default is changes which rows its tables ask for."""
    for file in (SCRIPTS.parent / "results").glob("*.json*"):
        shutil.copy(file, tmp_path)
    done = subprocess.run(
        [sys.executable, "scripts/evidence.py", tmp_path], cwd=SCRIPTS.parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "evidence.md").read_text() == (SCRIPTS.parent / "results" / "evidence.md").read_text()
