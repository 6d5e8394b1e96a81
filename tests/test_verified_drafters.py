"""Whatever the drafter does, the text is the dense one: drafters that are always wrong, always right, or broken."""

from typing import Any

import numpy as np
import pytest
from verified_runs import DRAWN, GREEDY, Drafter, Model, check_rounds, eps, judge, prompt

from eps_core.config.speculative import SpeculativeConfig

CONFIG = eps("box", budget=0.3)
PROMPTS = (prompt(45), prompt(22, 1))
TOKENS = 14


def never(logits: np.ndarray) -> np.ndarray:
    """One token alone is possible, and dense decoding of these prompts never says it."""
    found = np.full_like(logits, -np.inf)
    found[:, 299] = 0.0
    return found


def noise(logits: np.ndarray) -> np.ndarray:
    rng = np.random.default_rng(abs(int(1000 * logits[0, 0])))
    return rng.normal(size=logits.shape).astype(logits.dtype)


def nan(logits: np.ndarray) -> np.ndarray:
    return np.full_like(logits, np.nan)


def one_infinity(logits: np.ndarray) -> np.ndarray:
    logits = logits.copy()
    logits[:, 7] = np.inf
    return logits


WRONG: dict[str, dict[str, Any]] = {
    "one token": {"change": never},
    "noise": {"change": noise},
    "reversed": {"change": np.negative},
    "huge": {"change": lambda logits: np.float32(1e30) * np.sign(logits)},
}
BROKEN: dict[str, dict[str, Any]] = {
    "nan": {"change": nan},
    "infinity": {"change": one_infinity},
    "nan in the cache": {"place": np.nan, "change": nan},
}
PLACED: dict[str, dict[str, Any]] = {
    "zeros in the cache": {"place": 0.0},
    "1e30 in the cache": {"place": 1e30},
    "nan in the cache, logits as they were": {"place": np.nan},
}


def drafted(model: Model, sampling: Any, verify: SpeculativeConfig, **how: Any) -> tuple[list, Drafter]:
    drafter = Drafter(model, **how)
    return check_rounds(model, PROMPTS, CONFIG, TOKENS, sampling, verify, drafter), drafter


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("name", [*WRONG, *PLACED])
def test_a_wrong_drafter_changes_no_token(name: str, sampling: Any) -> None:
    records, drafter = drafted(judge(), sampling, SpeculativeConfig("tokens", 4), **(WRONG | PLACED)[name])
    assert drafter.steps and sum(sum(r.drafted) for r in records) > 10
    if name == "one token":
        assert sum(sum(r.accepted) for r in records) == 0
        assert len(records) == TOKENS


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_drafter_is_a_fallback(name: str) -> None:
    records, _ = drafted(judge(), DRAWN, SpeculativeConfig("tokens", 4), **BROKEN[name])
    assert len(records) == TOKENS and not any(sum(r.drafted) for r in records)
    # two sequences in each round that had room for a draft
    assert [r.fallbacks for r in records] == [{"non_finite": 2}] * (TOKENS - 1) + [{}]


def test_a_drafter_that_breaks_for_one_sequence_drafts_for_the_others() -> None:
    def first_alone(logits: np.ndarray) -> np.ndarray:
        if len(logits) == 2:
            logits = logits.copy()
            logits[1] = np.nan
        return logits

    records, _ = drafted(judge(), GREEDY, SpeculativeConfig("tokens", 3), change=first_alone)
    both = [r for r in records if len(r.drafted) == 2 and r.fallbacks]
    assert both and all(r.drafted[1] == 0 and r.fallbacks == {"non_finite": 1} for r in both)
    assert any(r.drafted[0] for r in both)


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("gamma", [1, 3, 13])
def test_a_drafter_that_is_always_right_is_always_accepted(gamma: int, sampling: Any) -> None:
    records, _ = drafted(judge(), sampling, SpeculativeConfig("tokens", gamma), dense=True)
    for record in records:
        assert record.accepted == record.drafted
    # each round says all of its drafts and one token more
    assert len(records) == -(-TOKENS // (gamma + 1))
