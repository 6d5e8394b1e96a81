"""Verified decoding as a variant: what `run`, `evaluate` and `grid` hand on, and what cells count as equal to dense."""

from types import SimpleNamespace
from typing import Any

import pytest

from eps_core.config.selection import SelectionConfig
from eps_core.config.speculative import SpeculativeConfig
from eps_core.evaluation import measure, runner
from eps_core.evaluation.runner import Document, Outcome
from experiments.grid.grid_verified import Measured

TOKENS = SpeculativeConfig("tokens")


def test_a_document_that_parts_from_dense_is_not_equal() -> None:
    cell = Measured(0)
    cell.add(Outcome(said=[[1, 2], [3, 4]]), Outcome(said=[[1, 2], [3, 5]]), 2)
    numbers = cell.numbers()
    assert (numbers["documents"], numbers["documents_equal"]) == (2, 1)
    assert [(one["prompt"], one["token"]) for one in numbers["partings"]] == [(1, 1)]


def test_evaluate_verifies_the_answers_of_eps(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(measure, "run_document", lambda *args, **more: asked.append(more) or {})
    session: Any = SimpleNamespace(spec=SimpleNamespace(eos_token_ids=(7,)))
    question: Any = SimpleNamespace(tokens=[1, 2], max_new_tokens=3)
    measure.ask(session, question, {}, TOKENS)
    assert asked == [{"verifies": {"eps": TOKENS}}]


def test_a_verified_decode_is_told_where_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def verified(*args: Any, **more: Any) -> Any:
        given.extend([args, more])
        return "cache"
        yield

    monkeypatch.setattr(runner, "verified", verified)
    session: Any = SimpleNamespace(
        decoder="decoder", drafter=lambda verify: "small", check_kernels=lambda *a, **k: None
    )
    cache, pool = SimpleNamespace(cache_config=SimpleNamespace(enabled=True)), SimpleNamespace()
    _, after = runner.decode(session, cache, pool, [Document([1], 4, stop=(7,))], SelectionConfig(), verify=TOKENS)  # type: ignore[arg-type]
    assert after == "cache" and given[0][-2:] == (TOKENS, (7,)) and given[0][3:5] == ([[1]], 4)
    assert given[1] == {"drafter": "small"}
