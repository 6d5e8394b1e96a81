"""Every script says how it is used and then does nothing; a flag that it does not know is exit status 2."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path

import pytest
from command import SCRIPTS, outcome, prints_its_usage_or_refuses, program, refused

from eps_core.errors import exit_code

SHELL = sorted(path.name for path in SCRIPTS.glob("*.sh") if os.access(path, os.X_OK))
PYTHON = sorted(path.name for path in SCRIPTS.glob("*.py") if "__main__" in path.read_text())
TAKEN = ", which it would destroy: give another path"
PASSED_ON = {"demo.sh", "test.sh", "test_vllm.sh", "test_sglang.sh"}  # their flags are those of another program


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The scripts where there is nothing to install or to run."""
    return shutil.copytree(SCRIPTS, tmp_path / "scripts", ignore=shutil.ignore_patterns("__pycache__"))


def ran(copy: Path, name: str, *arguments: str) -> subprocess.CompletedProcess:
    """Run a shell script, which must leave every file as it is."""
    before = sorted(copy.parent.rglob("*"))
    done = subprocess.run([copy / name, *arguments], capture_output=True, text=True, timeout=60)
    assert sorted(copy.parent.rglob("*")) == before
    return done


@pytest.mark.parametrize("flag", ["--help", "-h"])
@pytest.mark.parametrize("name", SHELL)
def test_a_shell_script_prints_its_usage_and_does_nothing(name: str, flag: str, copy: Path) -> None:
    done = ran(copy, name, flag)
    assert done.returncode == 0 and done.stderr == ""
    assert f"scripts/{name}" in done.stdout and "Usage: " in done.stdout and "set -" not in done.stdout


@pytest.mark.parametrize("arguments", [["--bogus"], ["a", "b"]], ids=" ".join)
@pytest.mark.parametrize("name", [name for name in SHELL if name not in PASSED_ON])
def test_a_shell_script_refuses_what_it_does_not_know(name: str, arguments: list[str], copy: Path) -> None:
    done = ran(copy, name, *arguments)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.startswith("error: ")


def test_paths_are_read_from_where_the_user_stands(copy: Path, tmp_path: Path) -> None:
    user, python = tmp_path / "user", tmp_path / "venv" / "bin" / "python"
    for folder in (user, python.parent):
        folder.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$PWD" "$@"\n')
    python.chmod(0o755)
    for file in ("pyproject.toml", "constraints.txt"):
        (tmp_path / file).touch()
    extras = "mlx" if sys.platform == "darwin" else "cuda-models"
    (tmp_path / "venv" / f".installed-{extras}-4294967295").touch()  # cksum of nothing

    def said(*line: object) -> str:
        made = subprocess.run(
            [*map(str, line)], cwd=user, capture_output=True, text=True, check=True,
            env={**os.environ, "EPS_VENV": "../venv"},
        )  # fmt: skip
        return made.stdout.strip()

    assert said("../scripts/demo.sh", "--prompt-file", "t.txt") == f"{user} ../scripts/demo.py --prompt-file t.txt"
    begun = """. "$(dirname "$0")/help.sh"; begin "$@"; echo "$out" """
    assert said("bash", "-c", begun, "../scripts/speed.sh", "mine") == f"{user}/mine" and (user / "mine").is_dir()
    begun += "$(scripts/setup.sh)"
    assert said("bash", "-c", begun, "../scripts/speed.sh", "mine") == f"{user}/mine {user}/../venv"
    begun = begun.replace(" $(scripts/setup.sh)", "")
    assert said("bash", "-c", begun, "../scripts/speed.sh") == "results" and (tmp_path / "results").is_dir()


@pytest.mark.parametrize("name", PYTHON)
def test_a_python_script_prints_its_usage_or_refuses(name: str, tmp_path: Path) -> None:
    prints_its_usage_or_refuses(name, tmp_path)


@pytest.mark.parametrize(
    "name, arguments, words",
    [
        ("methods", "--model . -o config.json", f"is config.json of --model .{TAKEN}"),
        ("training", "-o . --checkpoint c.safetensors", f"is c.safetensors of -o .{TAKEN}"),
        ("whole_step", "-o c.safetensors", "c.safetensors is there and is no JSONL: give another path"),
        ("gpu_times.py", "--device cpu -o config.json", "config.json is there and is no JSONL of this script"),
        ("gpu_times.py", "--device cpu --settings { -o new", "--settings { is no JSON object"),
    ],
)
def test_a_script_names_what_the_user_can_mend_in_one_line(
    name: str, arguments: str, words: str, tmp_path: Path
) -> None:
    """A script never replaces what it reads, too."""
    for file in ("c.safetensors", "config.json"):
        (tmp_path / file).write_text("of the user")
    refused(arguments.split(), tmp_path, words, main=program(name))
    assert {(tmp_path / file).read_text() for file in ("c.safetensors", "config.json")} == {"of the user"}


@pytest.mark.parametrize(
    "name, arguments",
    [
        ("methods", "--texts -1"),
        ("methods", "--jobs 0"),
        ("methods", "--contexts 2048 0"),
        ("methods", "--budgets nan"),
        ("experiments/training/model_card.py", "model --needle-documents 0"),
    ],
)
def test_a_script_refuses_numbers_that_mean_nothing(name: str, arguments: str, tmp_path: Path) -> None:
    done = outcome(arguments.split(), tmp_path, main=program(name))
    assert done.code == 2 and f"'{arguments.split()[-1]}' is not a" in done.err and "Traceback" not in done.err
    assert not list(tmp_path.iterdir())


def test_a_table_that_was_stopped_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts that were finished are not measured again, and the file is what one run would have left."""
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
