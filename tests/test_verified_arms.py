"""Verified decoding as a variant: what `run`, `evaluate` and `grid` hand on, and where a verified text is not the dense
one: which token of which prompt, and how close the runner-up was."""

import io
from types import SimpleNamespace
from typing import Any

import pytest
from verified_runs import GREEDY, TOKENS, Drafter, Model, eps, judge, prompt

from eps_core.config.selection import SelectionConfig
from eps_core.config.speculative import SpeculativeConfig
from eps_core.evaluation import measure, runner
from eps_core.evaluation.outcomes import Parting, Ran, partings, report
from eps_core.evaluation.runner import Document, Outcome
from experiments.grid.grid_verified import Measured

CONFIG = eps("meanstd", budget=0.3)
PROMPTS = [prompt(45), prompt(22, 1)]


@pytest.fixture
def outcomes() -> tuple[Outcome, Outcome]:
    """Of the same text."""
    model: Model = judge()
    dense = model.dense(PROMPTS, CONFIG, 6, GREEDY)
    exact = model.verified(
        PROMPTS, CONFIG, 6, GREEDY, SpeculativeConfig("tokens", 3), drafter=Drafter(model, dense=True)
    )
    texts = ["", ""]
    return (
        Outcome(dense.records, tokens=dense.said, texts=texts),
        Outcome(rounds=exact.records, tokens=exact.said, texts=texts),
    )


def given(verify: SpeculativeConfig, outcomes: tuple[Outcome, Outcome]) -> tuple[str, dict[str, Any]]:
    out = io.StringIO()
    line = report(Ran({}, CONFIG, [45, 22], None, verify), *outcomes, out)
    return out.getvalue(), line


def test_the_same_text_parts_nowhere(outcomes: tuple[Outcome, Outcome]) -> None:
    assert partings(*outcomes) == []
    table, line = given(SpeculativeConfig("tokens", 3), outcomes)
    assert line["tokens_equal"] is True and line["partings"] == [] and "runner-up" not in table


def test_a_parting_has_the_margins_of_both_at_its_token(outcomes: tuple[Outcome, Outcome]) -> None:
    dense, exact = outcomes
    exact.tokens[1] = [*exact.tokens[1][:4], exact.tokens[1][4] + 1, exact.tokens[1][5]]
    want = dense.records[4].margins[1]
    (found,) = partings(dense, exact)
    assert (found.prompt, found.token) == (1, 4)
    assert found.dense_margin == want and found.verified_margin == pytest.approx(want, abs=1e-5)
    exact.tokens[1] = exact.tokens[1][:3]  # ended earlier
    assert [(one.prompt, one.token) for one in partings(dense, exact)] == [(1, 3)]
    dense.records, exact.rounds = [], []  # an engine's, which do not tell
    assert partings(dense, exact) == [Parting(1, 3, None, None)]


def test_the_table_says_from_which_token_a_text_is_another(outcomes: tuple[Outcome, Outcome]) -> None:
    outcomes[1].tokens[0] = [token + 1 for token in outcomes[1].tokens[0]]
    table, line = given(SpeculativeConfig("tokens", 3), outcomes)
    assert len(line["partings"]) == 1 and "not from new token 1 of prompt 1 on" in table
    assert line["tokens_equal"] is False and "runner-up" in table


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
    assert given[1] == {"drafter": "small", "written": None}
