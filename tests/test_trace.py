"""The table of a sampled profile: own and whole times of functions, counted by hand."""

import json
from pathlib import Path

import pytest
from command import outcome, program, refused

# samples are stacks of frames, the outermost first; 2 is called by 1 and by itself
PROFILE = {
    "shared": {
        "frames": [
            {"name": "main", "file": "/a/run.py", "line": 3},
            {"name": "step", "file": "/a/b/loop.py", "line": 9},
            {"name": "attend", "file": None, "line": 1},
        ]
    },
    "profiles": [
        {"type": "sampled", "samples": [[0], [0, 1], [0, 1, 2, 2]], "weights": [1.0, 2.0, 5.0]},
        {"type": "sampled", "samples": [[1, 2], []], "weights": [3.0, 5.0]},
    ],
}


RUN = program("top.py")


def test_own_and_whole_shares(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(json.dumps(PROFILE))
    done = outcome(["p.json"], tmp_path, main=RUN)
    rows = [line.split(maxsplit=2) for line in done.out.splitlines()[1:]]
    assert not done.code and rows == [
        ["50.0%", "50.0%", "attend (?)"], ["12.5%", "62.5%", "step (loop.py)"], ["6.2%", "50.0%", "main (run.py)"],
    ]  # fmt: skip
    done = outcome(["p.json", "--top", "1"], tmp_path, main=RUN)
    assert not done.code and len(done.out.splitlines()) == 2


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"shared": {"frames": []}, "profiles": [{"type": "evented"}]}'])
def test_what_is_no_profile_is_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(text)
    refused(["p.json"], tmp_path, "is no sampled speedscope profile", main=RUN)
