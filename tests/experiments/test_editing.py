"""Edited texts: tokens, K and V are those of rows moved and rotated, and the command measures every kind of edit."""

from pathlib import Path

import numpy as np
import pytest
import tiny_models
from command import lines_of, outcome, program

from eps_core.config.cache import CacheConfig
from eps_core.decode.session import Session
from eps_core.errors import ConfigError
from experiments.editing import edits
from experiments.editing.run import FIXES, logits

TOKENS = [int(token) for token in np.random.default_rng(5).integers(0, 256, 75)]
OTHER = [int(token) for token in np.random.default_rng(6).integers(0, 256, 21)]
# what is done, and the tokens of the result
EDITS = {
    "cut": (lambda text, new: edits.cut(text, 20, 37), TOKENS[:20] + TOKENS[37:]),
    "cut-start": (lambda text, new: edits.cut(text, 0, 5), TOKENS[5:]),
    "cut-nothing": (lambda text, new: edits.cut(text, 9, 9), TOKENS),
    "splice": (lambda text, new: edits.splice(text, new, 33), TOKENS[:33] + OTHER + TOKENS[33:]),
    "splice-over": (lambda text, new: edits.splice(text, new, 16, 21), TOKENS[:16] + OTHER + TOKENS[37:]),
    "move-on": (
        lambda text, new: edits.move(text, 10, 25, 50),
        TOKENS[:10] + TOKENS[25:50] + TOKENS[10:25] + TOKENS[50:],
    ),
    "move-back": (
        lambda text, new: edits.move(text, 48, 64, 17),
        TOKENS[:17] + TOKENS[48:64] + TOKENS[17:48] + TOKENS[64:],
    ),
}


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    model = tiny_models.save_model("llama3.1-tied-sharded", tmp_path_factory.mktemp("model"))
    return Session.open(model, "numpy")


@pytest.mark.parametrize("name", EDITS)
def test_the_first_layer_is_that_of_the_edited_text(session: Session, name: str) -> None:
    """It depends on a token and its position alone. Deeper layers stay those of the text that was read."""
    edit, tokens = EDITS[name]
    text = edit(edits.prefilled(session, TOKENS), edits.prefilled(session, OTHER))
    assert text.tokens == tokens
    fresh = edits.prefilled(session, tokens)
    for mine, want in zip(text.keys_values[0], fresh.keys_values[0], strict=True):
        np.testing.assert_allclose(mine, want, atol=5e-5)
    assert name == "cut-nothing" or np.abs(text.keys_values[1][1] - fresh.keys_values[1][1]).max() > 1e-2


def test_a_text_that_was_not_edited_has_the_logits_of_a_prefill(session: Session) -> None:
    got = logits(session, edits.prefilled(session, TOKENS[:-3]), TOKENS[-3:])
    cache, pool = session.cache(CacheConfig(), len(TOKENS))
    sequence, _ = pool.open()
    slots, _ = pool.append(sequence, TOKENS)
    _, want = session.decoder.prefill(cache, np.array(TOKENS), slots, pool.table([sequence])[0], len(TOKENS))
    np.testing.assert_allclose(got[-1], want, atol=1e-3)


def test_spans_outside_of_a_text_are_refused(session: Session) -> None:
    text = edits.prefilled(session, TOKENS)
    for call in (
        lambda: edits.cut(text, 70, 80),
        lambda: edits.splice(text, text, 80),
        lambda: edits.move(text, 3, 9, 5),
    ):
        with pytest.raises(ConfigError):
            call()


def test_the_command_writes_a_line_an_edit(tmp_path: Path) -> None:
    done = outcome(
        ["--context", "1200", "--edits", "1", "--steps", "2", "-o", "e.jsonl"], tmp_path, main=program("editing")
    )
    assert not done.code, done.err
    first, *lines = lines_of(tmp_path / "e.jsonl")
    assert first["kind"] == "edit" and first["plan"]["context_tokens"] == 1200
    assert [one["type"] for one in lines] == ["edit"] * 3 + ["answer"] * len(FIXES)
    said = {one["fix"]: one["answer"] for one in lines[3:]}
    assert said["recomputed"] == "new" and said["left as it was"] == "old"
