"""What eviction policies promise besides their formula: the properties of each, and the rules that all share."""

import numpy as np
import pytest
from evict_heads import FREQUENCIES, D, asked, made

from eps_core.cli.main import cli
from eps_core.errors import ConfigError
from eps_core.eviction import keydiff, kv_compress, kv_compress_full, logdet, pyramidkv, rkv
from eps_core.eviction.base import Head, Rule, descending, draws, ranked
from eps_core.eviction.config import EvictionConfig
from eps_core.eviction.table import POLICIES, policy

RULE = Rule(num_sink_tokens=2, num_recent_tokens=5)
FREE = Rule(num_sink_tokens=0, num_recent_tokens=0)


def bare(rows: int, **statistics: np.ndarray) -> Head:
    return Head(np.arange(rows), rows, **statistics)


def keyed(keys: np.ndarray) -> Head:
    return bare(len(keys), keys=keys.astype(np.float32), frequencies=FREQUENCIES)


def random_keys(rows: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, 6]).normal(size=(rows, D)).astype(np.float32).astype(np.float64)


# ------------------------------------------------------------------------------------------------- rules that all share


def test_ties_go_to_the_lower_row_and_nan_comes_last() -> None:
    scores = np.array([1, 3, np.nan, 3, -np.inf, 1 + 1e-12])
    assert ranked(bare(6), scores, FREE).tolist() == [1, 3, 0, 5, 4, 2]


def test_draws_are_of_seed_layer_head_and_position() -> None:
    positions = np.arange(200)
    base = draws(1, 2, 3, positions)
    assert ((base > 0) & (base < 1)).all() and len(set(base)) == 200
    assert np.array_equal(draws(1, 2, 3, positions[[150, 7]]), base[[150, 7]])
    for other in ((0, 2, 3), (1, 0, 3), (1, 2, 0)):
        assert abs(np.corrcoef(base, draws(*other, positions))[0, 1]) < 0.25
    assert len(draws(1, 2, 3, positions[:0])) == 0


def test_the_table_names_all_and_refuses_others_in_one_line() -> None:
    assert policy("kv-compress") is kv_compress
    with pytest.raises(ConfigError) as error:
        policy("lru")
    assert "\n" not in str(error.value) and all(name in str(error.value) for name in POLICIES)


def test_a_negative_rule_is_refused() -> None:
    with pytest.raises(ConfigError, match="recent-tokens -1 of an eviction must be 0 or more"):
        Rule(num_recent_tokens=-1)  # others by EvictionConfig, in test_evicting.py


@pytest.mark.parametrize("name", POLICIES)
def test_facts_say_their_source_and_uneven_ones_alone_differ(name: str) -> None:
    """docs/memory.md is made of these, and the flag's help names the defaults."""
    policy_spec = POLICIES[name].SPEC
    assert policy_spec.source and (policy_spec.at_prefill or policy_spec.while_decoding)
    assert "reconstruction" not in policy_spec.source  # deviations say so
    assert policy_spec.deviations and "\n" not in policy_spec.deviations
    (flag,) = [param for param in cli.commands["run"].params if "--kv-recent-tokens" in param.opts]
    assert policy_spec.num_recent_tokens == 32 or name in flag.help
    kept = POLICIES[name].keep(asked(made(rows=60, layers=3, seed=6), POLICIES[name]), 40, RULE)
    sizes = {len(rows) for heads in kept for rows in heads}
    assert (len(sizes) > 1) == policy_spec.uneven


DEFAULTS = {
    "h2o": (0, 500),  # half of the budget: heavy_ratio and recent_ratio of FMInference/H2O are equal
    "snapkv": (32, 32),
    "adakv": (32, 32),
    "pyramidkv": (64, 64),
    "kv-compress": (32, 32),
    "kv-compress-full": (0, 32),
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_the_window_and_the_pinned_rows_are_those_of_the_source(name: str) -> None:
    keep = EvictionConfig(name, 0.5)
    assert (keep.policy_spec.window, keep.rule(1000).num_recent_tokens) == DEFAULTS[name]
    assert EvictionConfig(name, 0.5, num_recent_tokens=7).rule(1000).num_recent_tokens == 7


# ----------------------------------------------------------------------------------------------------- policy by policy


def test_a_pyramid_is_as_steep_as_its_source_says() -> None:
    assert pyramidkv.layer_budgets(5, 4000, 64, 1400).tolist() == [2730, 2065, 1400, 735, 70]
    assert pyramidkv.layer_budgets(3, 2000, 64, 1600).tolist() == [1936, 1600, 1264]  # the first layer is nearly full
    assert pyramidkv.layer_budgets(3, 2000, 64, 1200).tolist() == [1936, 1200, 464]
    # the last layer would keep 50 rows, less than the window: every layer keeps the same
    assert pyramidkv.layer_budgets(3, 4000, 64, 1000).tolist() == [1000, 1000, 1000]


def test_rkv_compares_in_columns_what_it_compares_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    unit = keydiff.unit_keys(keyed(random_keys(90, 3) + 0.5))
    whole = rkv.latest_similar(unit)
    assert -1 in whole or len(set(whole)) > 3
    monkeypatch.setattr(rkv, "COLUMNS", 7)
    assert np.array_equal(rkv.latest_similar(unit), whole)


def test_rkv_rounds_no_cosine_at_the_line() -> None:
    turn = np.linalg.qr(np.random.default_rng(0).normal(size=(2, 2)))[0]
    differs = 0
    for angle in np.arccos(rkv.SIMILAR) + np.linspace(-3e-7, 3e-7, 61):
        unit = np.array([[1.0, 0.0], [np.cos(angle), np.sin(angle)]]) @ turn
        single = unit.astype(np.float32)
        similar = unit[0] @ unit[1] > rkv.SIMILAR
        differs += similar != (single[0] @ single[1] > rkv.SIMILAR)
        assert rkv.latest_similar(unit).tolist() == ([1, 0] if similar else [-1, -1])
    assert differs > 5, "float32 alone would be wrong"


def test_a_downdate_that_leaves_nothing_says_so_and_the_policy_factors_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    assert logdet.downdate(np.eye(D), np.eye(D)[[2]]) is None
    assert logdet.downdate(np.eye(D), 2 * np.eye(D)[[0]]) is None
    layers = [[keyed(random_keys(300, seed)) for seed in range(2)]]
    right = logdet.keep(layers, 60, RULE)
    monkeypatch.setattr(logdet, "downdate", lambda lower, keys: None)
    assert all(np.array_equal(a, b) for a, b in zip(right[0], logdet.keep(layers, 60, RULE)[0], strict=True))


@pytest.mark.parametrize("number", [1, 20, 299, 400])
def test_lazily_found_leverages_are_the_least_of_all(number: int) -> None:
    keys = np.concatenate([random_keys(300) * [9, 3, 1, 1, 0.3, 0.1, 0.1, 0.1], np.tile(random_keys(1), (20, 1))])
    before, among = logdet.factor(keys, 0.3), np.arange(5, 315)
    known = logdet.leverages(np.linalg.inv(before), keys)
    computed, whole = [], logdet.leverages
    less = logdet.downdate(before, keys[[0, 7, 9, 100]])
    assert less is not None
    inverse, among = np.linalg.inv(less), np.setdiff1d(among, [7, 9, 100])
    of_all = whole(inverse, keys[among])
    assert (of_all >= known[among] - 1e-12).all()
    expected = np.sort(among[descending(of_all)[::-1][:number]])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logdet, "leverages", lambda inverse, keys: (computed.append(len(keys)), whole(inverse, keys))[1])
        assert np.array_equal(logdet.lowest(inverse, keys, known, among, number), expected)
        assert np.allclose(known[expected], whole(inverse, keys[expected]), rtol=1e-12)  # for the next look
    assert np.array_equal(logdet.lowest(inverse, keys, np.zeros(len(keys)), among, number), expected), "nothing known"
    assert sum(computed) <= len(among) and (number > 20 or sum(computed) < len(among) / 2)


def test_kv_compress_goes_on_where_a_head_has_lost_everything() -> None:
    strong, weak = (bare(48, squares=np.full((1, 48), size)) for size in (2.0, 1.0))
    ((first, second),) = kv_compress_full.keep([[weak, strong]], 24, FREE)
    assert len(first) == 0 and len(second) == 48
    nothing = Head(np.arange(0), 48, squares=np.zeros((1, 0)))
    ((first, second),) = kv_compress_full.keep([[nothing, strong]], 16, FREE)
    assert len(first) == 0 and second.tolist() == list(range(32))  # the places that it leaves are another's
