"""The script for a day with a Mac runs without one."""

import json
from pathlib import Path

from command import passes_dry


def test_every_phase_runs_dry(tmp_path: Path) -> None:
    passes_dry("mac_check.sh", tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "pools.jsonl").read_text().splitlines()]
    assert [row["asynchronous"] for row in rows] == [False, True]
    assert all(row["extra_bytes"] < row["pool_bytes"] / 2 for row in rows), "MLX's CPU writes in place"
    assert (tmp_path / "layer.jsonl").is_file() and (tmp_path / "step.jsonl").is_file()
