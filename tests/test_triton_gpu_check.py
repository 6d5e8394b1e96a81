"""The script for a day with a GPU runs without one, in the interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_phase_runs_dry(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", "scripts/gpu_check.sh", "--dry-run"], cwd=ROOT, capture_output=True, text=True, timeout=900,
        env={**os.environ, "PYTHON": sys.executable, "OUT": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0 and "all phases passed" in done.stdout, done.stdout[-3000:] + done.stderr[-1000:]
    for name, kind in (("times", "layer"), ("times-at-once", "layer"), ("step", "step")):
        lines = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        assert kind in {line["type"] for line in lines}, name
    at_once = json.loads((tmp_path / "times-at-once.jsonl").read_text().splitlines()[0])["config"]
    assert (at_once["cascade"], at_once["rescore"]) == ([], 1.0)
