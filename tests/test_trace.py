"""The table of a sampled profile: own and whole times of functions, counted by hand."""

import json
import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "speedscope_top.py"
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


def ran(path: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> object:
    monkeypatch.setattr(sys, "argv", [SCRIPT.name, str(path), *more])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return end.value.code


def test_own_and_whole_shares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps(PROFILE))
    assert not ran(path, monkeypatch)
    rows = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()[1:]]
    assert rows == [["50.0%", "50.0%", "attend (?)"], ["12.5%", "62.5%", "step (loop.py)"],
                    ["6.2%", "50.0%", "main (run.py)"]]  # fmt: skip
    assert not ran(path, monkeypatch, "--top", "1") and len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"shared": {"frames": []}, "profiles": [{"type": "evented"}]}'])
def test_what_is_no_profile_is_one_line(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    assert ran(path, monkeypatch) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "is no sampled speedscope profile" in error
