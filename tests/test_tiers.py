"""Every test is in one of the two tiers, and scripts/test.sh runs the tier that it says."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from conftest import KEPT, LEFT_OUT, marker_of, matches

ROOT = Path(__file__).parent.parent


# prints the ids of each tier's tests, in one process: a file is imported once
PROGRAM = """
import sys
import pytest
for tier in sys.argv[1:]:
    print("tier", tier)
    assert not pytest.main(["-q", "-p", "no:cacheprovider", "-o", "addopts=", "--collect-only", "--tier", tier])
"""


def test_the_tiers_hold_every_test_once() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "all", "default", "rest"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    every, default, rest = (
        # pytest escapes ids again whenever it collects
        [re.sub(r"\\+", "", line) for line in part.splitlines() if "::" in line]
        for part in re.split(r"^tier .*$", done.stdout, flags=re.M)[1:]
    )
    assert default and rest and sorted(default + rest) == sorted(every)
    patterns = [pattern for name in LEFT_OUT for pattern in LEFT_OUT[name]]
    unused = [one for one in (*patterns, *KEPT) if not any(matches(test, [one]) for test in every)]
    assert not unused, f"no test is called so: {unused}"


def test_what_no_pattern_names_is_in_the_default_tier() -> None:
    assert marker_of("tests/test_new.py::test_it") is None
    assert marker_of("tests/test_new.py::test_it[numpy-cpu-arrays-1]") is None
    assert marker_of("tests/test_new.py::test_it[cuda-cpu-triton-1]") == "emulators"
    assert marker_of("tests/test_new.py::test_it[cuda-cuda-triton-1]") is None


def test_every_marker_is_registered() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    named = [line.partition(":")[0].partition("(")[0] for line in settings["markers"]]
    assert named == ["kernels", *LEFT_OUT]


@pytest.fixture
def environments(tmp_path: Path) -> Path:
    """Two installed environments whose programs write what they are called with to a file and do nothing."""
    for name in ("venv", "vllm"):
        (tmp_path / name / "bin").mkdir(parents=True)
        for program in ("python", "ruff", "mypy"):
            file = tmp_path / name / "bin" / program
            file.write_text(f'#!/bin/sh\necho "{name} {program} $*" >> "{tmp_path}/calls"\n')
            file.chmod(0o755)
    return tmp_path


STYLE = ["venv ruff check .", "venv ruff format --check .", "venv mypy "]


def suite(tier: str, *arguments: str) -> str:
    return " ".join(["venv python -m pytest -n 3 --dist worksteal --durations=50 --tier", tier, *arguments])


SERVERS = [  # vLLM's, SGLang's
    "vllm python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --durations=50",
    "vllm python -m pytest",
]


@pytest.mark.parametrize(
    ("arguments", "calls"),
    [
        ([], [*STYLE, suite("default")]),
        (["--rest"], [suite("rest"), *SERVERS]),
        (["--all"], [*STYLE, suite("all"), *SERVERS]),
        (["tests/test_cli.py", "-x"], [*STYLE, suite("all", "tests/test_cli.py", "-x")]),
        (["--rest", "-x"], [suite("rest", "-x")]),
    ],
    ids=lambda value: " ".join(value) if value and value[0].startswith(("-", "tests")) else "",
)
def test_the_script_runs_a_tier(environments: Path, arguments: list[str], calls: list[str]) -> None:
    for venv, files, stamp in (
        ("venv", "pyproject.toml constraints.txt", ".installed-mlx-cuda-dev-"),
        ("vllm", "pyproject.toml tests/vllm/requirements.txt", ".installed-"),
        ("vllm/sglang", "tests/sglang/requirements.txt", ".installed-"),
        ("kvpress", "tests/kvpress/requirements.txt", ".installed-"),
    ):
        sums = subprocess.run(
            f"cat {files} | cksum | cut -d' ' -f1", shell=True, cwd=ROOT, capture_output=True, text=True, check=True
        )
        (environments / venv).mkdir(exist_ok=True)
        (environments / venv / (stamp + sums.stdout.strip())).touch()
    environment = {
        **os.environ,
        "EPS_VENV": str(environments / "venv"),
        "EPS_VLLM_VENV": str(environments / "vllm"),
        "EPS_KVPRESS_VENV": str(environments / "kvpress"),
        "EPS_TEST_WORKERS": "3",
    }
    done = subprocess.run(
        ["bash", ROOT / "scripts" / "test.sh", *arguments], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (environments / "calls").read_text().splitlines() == calls
