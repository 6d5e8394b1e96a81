"""The script for a day with a Mac runs without one."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from command import SCRIPTS, passes_dry


def test_every_phase_runs_dry(tmp_path: Path) -> None:
    passes_dry("mac_check.sh", tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "pools.jsonl").read_text().splitlines()]
    assert [(row["kernels"], row["asynchronous"]) for row in rows] == [
        (kernels, asynchronous) for kernels in ("numba", "arrays") for asynchronous in (False, True)
    ]
    # the scores of array operations take as much as the pools, whoever waits
    assert all(row["extra_bytes"] < row["pool_bytes"] / 2 for row in rows[:2]), "MLX's CPU writes in place"
    assert (tmp_path / "layer.jsonl").is_file() and (tmp_path / "step.jsonl").is_file()


@pytest.mark.parametrize("tools", [("timeout",), ("perl",)])
def test_a_phase_that_fails_or_is_late_is_named(tools: tuple[str, ...], tmp_path: Path) -> None:
    """With and without GNU's timeout."""
    for tool in ("bash", "sleep", "tee", "grep", "tail", "mkdir", "true", "false", *tools):
        (tmp_path / tool).symlink_to(shutil.which(tool) or pytest.fail(f"{tool} is not there"))
    phases = "phase good 9 true; phase bad 9 false; phase late 1 sleep 60; finish"
    script = f"set -u; out={tmp_path}; at_most() {{ :; }}; . {SCRIPTS}/phases.sh; {phases}"
    done = subprocess.run(
        [str(tmp_path / "bash"), "-c", script], env={**os.environ, "PATH": str(tmp_path)}, capture_output=True,
        text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1 and done.stdout.endswith("FAILED: bad; late (time);\n"), done.stdout + done.stderr
