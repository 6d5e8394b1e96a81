"""The script for a day with a GPU runs without one, in the interpreter."""

import json
from pathlib import Path

from command import passes_dry


def test_every_phase_runs_dry(tmp_path: Path) -> None:
    passes_dry("gpu_check.sh", tmp_path)
    for name, kind in (("times", "layer"), ("times-at-once", "layer"), ("step", "step")):
        lines = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        assert kind in {line["type"] for line in lines}, name
    at_once = json.loads((tmp_path / "times-at-once.jsonl").read_text().splitlines()[0])["config"]
    assert (at_once["cascade"], at_once["rescore"]) == ([], 1.0)
