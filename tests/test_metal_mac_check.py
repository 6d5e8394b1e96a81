"""The script for a day with a Mac runs without one."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_phase_runs_dry(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", "scripts/mac_check.sh", "--dry-run"], cwd=ROOT, capture_output=True, text=True, timeout=900,
        env={**os.environ, "PYTHON": sys.executable, "OUT": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0 and "all phases passed" in done.stdout, done.stdout[-3000:] + done.stderr[-1000:]
    rows = [json.loads(line) for line in (tmp_path / "pools.jsonl").read_text().splitlines()]
    assert [row["asynchronous"] for row in rows] == [False, True]
    assert all(row["extra_bytes"] < row["pool_bytes"] / 2 for row in rows), "MLX's CPU writes in place"
    assert (tmp_path / "layer.jsonl").is_file() and (tmp_path / "step.jsonl").is_file()
