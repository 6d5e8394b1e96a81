"""The measurement of edits: its documents, what its arms are, and its tables."""

import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

from eps_core.decode.session import Session
from eps_core.errors import ConfigError
from eps_core.evaluation import editing
from eps_core.evaluation.editing import FIXES, KINDS, Answered, Desk, Edited, Plan, markdown, measure

SCRIPT = Path(__file__).parent.parent / "scripts" / "edit_error.py"
PLAN = Plan(context_tokens=1200, num_edits=2, num_steps=4)


@pytest.fixture(scope="module")
def demo() -> Session:
    return Session.open(backend="cuda", device="cpu", dtype="float32", kernels="arrays")


@pytest.fixture(scope="module")
def results(demo: Session) -> list[Edited | Answered]:
    return list(measure(demo, PLAN))


def test_every_kind_is_measured_as_often_as_asked(results: list) -> None:
    edits = [one for one in results if isinstance(one, Edited)]
    assert [(one.kind, one.index) for one in edits] == [(kind, index) for index in (0, 1) for kind in KINDS]
    answers = [one for one in results if isinstance(one, Answered)]
    assert [(one.fix, one.index) for one in answers] == [(fix, index) for index in (0, 1) for fix in FIXES]
    for one in edits:
        assert one.kl_max >= one.kl_mean > 0 and one.kl_unedited > 0 and 0 <= one.top1_agreement <= 1
        assert one.tokens_edited > 20 and 0 <= one.tokens_behind < 1200


def test_a_recomputed_value_is_answered_and_an_old_one_where_nothing_was_done(results: list) -> None:
    said = {(one.fix, one.index): one.answer for one in results if isinstance(one, Answered)}
    for index in (0, 1):
        assert said["recomputed", index] == "new" and said["left as it was", index] == "old"


def test_logits_are_of_the_text_whole(demo: Session) -> None:
    """Along a text that nobody edited, and of a segment, they are a prefill's."""
    tokens = demo.encode("import os\n\n\ndef name(path):\n    return os.path.basename(path)\n" * 3)
    desk = Desk(demo, len(tokens) + 1)
    got = desk.logits(desk.filled(tokens[:-3]), tokens[-3:])
    for number in range(3):
        end = len(tokens) - 2 + number
        cache, pool = Desk(demo, len(tokens) + 1).cache, Desk(demo, len(tokens) + 1).pool
        sequence, _ = pool.open()
        slots, _ = pool.append(sequence, tokens[:end])
        _, want = demo.decoder.prefill(cache, np.array(tokens[:end]), slots, pool.table([sequence])[0], end)
        np.testing.assert_allclose(got[number], want, atol=1e-3)
    alone = desk.alone(tokens[5:9])
    assert alone.tokens == tokens[5:9] and alone.start == 1 and len(alone.keys_values[0][0]) == 4


@pytest.mark.parametrize("kind", KINDS)
def test_places_are_lines_and_what_moves_moves(kind: str) -> None:
    body = "\n".join(f"line {number} of a text that has many" for number in range(60))
    for seed in range(20):
        a, b, to = editing._places(body, kind, np.random.default_rng(seed))
        assert body[a - 1] == body[b - 1] == body[to - 1] == "\n" and a > len(body) / 8
        assert body[a:b].count("\n") == (8 if kind == "move" else 1)
        assert kind != "move" or to < a or to > b
    with pytest.raises(ConfigError, match="longer --context"):
        editing._places("no line", kind, np.random.default_rng(0))


def test_tables_say_means_and_counts() -> None:
    edits = [Edited("cut", i, 10 * i, 200 * i, kl, 2 * kl, 0.5, 1.0) for i, kl in enumerate((0.1, 0.3), start=1)]
    answers = [Answered("erratum", i, answer) for i, answer in enumerate(("new", "old", "new", "other"))]
    lines = markdown([*edits, *answers]).splitlines()
    assert lines[2].startswith("| cut of 15 tokens | 2 | 1.0000 | 0.2000 (0.1000 to 0.3000) | 0.1000 (of 1) | 0.600 |")
    assert lines[-1] == "| erratum | 2 | 1 | 1 |"


def test_the_script_writes_a_line_an_edit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = ["edit_error.py", "--context", "1200", "--edits", "1", "--steps", "2", "-o", str(tmp_path / "e.jsonl")]
    monkeypatch.setattr(sys, "argv", line)
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert not end.value.code
    first, *lines = map(json.loads, (tmp_path / "e.jsonl").read_text().splitlines())
    assert first["kind"] == "edit" and first["plan"]["context_tokens"] == 1200
    assert [one["type"] for one in lines] == ["edit"] * 3 + ["answer"] * len(FIXES)
