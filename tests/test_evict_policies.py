"""Every eviction policy keeps the rows that its formula says (`evict_formulas`)."""

from collections.abc import Callable

import numpy as np
import pytest
from evict_formulas import expected, logdet_head, pins
from evict_heads import asked, coarse, made, ragged

from eps_core.eviction import logdet, nacl
from eps_core.eviction.base import Head, Rule
from eps_core.eviction.table import POLICIES

RULE = Rule(num_sink_tokens=3, num_recent_tokens=6, seed=5)
SAME_ROWS = ("tova", "triattention", "epikv")  # keep the same rows of several heads
THIN = np.sort(np.random.default_rng(1).choice(70, 45, replace=False))  # what earlier evictions left of 70 tokens
MIXED = np.random.default_rng(2).permutation(THIN)  # .. and holes were filled

INPUTS: dict[str, Callable[[], list[list[Head]]]] = {
    "random": lambda: made(),
    "other": lambda: made(rows=41, layers=4, seed=3),
    "one head, one layer": lambda: made(rows=37, layers=1, heads=1, group=1, seed=1),
    "long": lambda: made(rows=130, layers=2, heads=1, seed=2),
    "identical keys": lambda: made(kind="identical keys"),
    "few keys": lambda: made(kind="few keys"),
    "uniform weights": lambda: made(kind="uniform weights"),
    "zero keys": lambda: made(kind="zero keys"),
    "coarse statistics": lambda: coarse(made()),
    "one row": lambda: made(rows=1, layers=2),
    "evicted before": lambda: made(rows=70, positions=THIN),
    "holes filled": lambda: made(rows=70, positions=MIXED),
    "ragged": ragged,
}


def check(name: str, layers: list[list[Head]], budget: int, rule: Rule) -> None:
    """A policy's answer is well-formed, of the exact size, keeps what is pinned, and is what its formula says."""
    policy = POLICIES[name]
    layers = asked(layers, policy)
    kept = policy.keep(layers, budget, rule)
    assert [len(heads) for heads in kept] == [len(heads) for heads in layers], "a head is missing"
    pairs = [(head, rows) for a, heads in enumerate(layers) for head, rows in zip(heads, kept[a], strict=True)]
    for head, rows in pairs:
        assert rows.ndim == 1 and rows.dtype.kind == "i", "not indices"
        assert (np.diff(rows) > 0).all() and (not len(rows) or 0 <= rows[0] <= rows[-1] < head.rows), "not ascending"
        first = pins(head, rule)[: min(budget, head.rows)]
        assert set(first) <= set(rows.tolist()), "a pinned row is gone"
    sizes, there = [len(rows) for _, rows in pairs], [head.rows for head, _ in pairs]
    if policy.SPEC.uneven:
        together = len(layers[0]) if name == "adakv" else len(pairs)  # heads of a layer, or of all
        for at in range(0, len(pairs), together):
            some = slice(at, at + together)
            assert sum(sizes[some]) == min(budget * together, sum(there[some])), "not the budget"
    else:
        assert sizes == [min(budget, rows) for rows in there], "not the budget"
    wanted = expected(name, layers, budget, rule)
    assert [[rows.tolist() for rows in heads] for heads in kept] == wanted, "not the formula's rows"


def test_nacl_draws_by_the_mean_of_query_heads() -> None:
    ((head, *_), *_) = asked(made(rows=130, layers=1, heads=1, seed=2), POLICIES["nacl"])
    np.testing.assert_allclose(nacl.scores(head), head.window[:, -1].mean(0), rtol=1e-6)


@pytest.mark.parametrize("which", INPUTS)
@pytest.mark.parametrize("name", POLICIES)
def test_it_keeps_what_its_formula_says(name: str, which: str) -> None:
    layers = INPUTS[which]()
    if which == "ragged" and name in SAME_ROWS:
        with pytest.raises(ValueError, match="hold different ones"):
            POLICIES[name].keep(asked(layers, POLICIES[name]), 20, RULE)
        return
    for budget in (25,) if which == "long" else (1, 14, 30, 500):
        check(name, layers, budget, RULE)


@pytest.mark.parametrize("rule", [Rule(0, 0), Rule(4, 0), Rule(0, 9), Rule(8, 33), Rule(100, 2), Rule(2, 100)], ids=str)
@pytest.mark.parametrize("name", POLICIES)
def test_whatever_is_pinned(name: str, rule: Rule) -> None:
    for budget in (1, 7, 36):
        check(name, INPUTS["random"](), budget, rule)


def test_blocks_of_the_log_determinant(monkeypatch: pytest.MonkeyPatch) -> None:
    """With blocks of 3 rows, it is the block-wise order, not the greedy one."""
    monkeypatch.setattr(logdet, "BLOCK", 3)
    (heads,) = asked(made(layers=1, heads=3, rows=40, kind="few keys"), logdet)
    blockwise = [logdet_head(head, 15, RULE, block=3) for head in heads]
    assert [rows.tolist() for rows in logdet.keep([heads], 15, RULE)[0]] == blockwise
    assert blockwise != [logdet_head(head, 15, RULE) for head in heads]


@pytest.mark.parametrize("name", POLICIES)
def test_a_statistic_that_was_not_gathered_is_an_error(name: str) -> None:
    layers = [[Head(np.arange(50), 50)] * 2]
    if name in ("streaming", "rswa", "random"):
        POLICIES[name].keep(layers, 20, RULE)
    else:
        with pytest.raises(ValueError, match="was not gathered"):
            POLICIES[name].keep(layers, 20, RULE)
