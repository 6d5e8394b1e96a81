"""What eviction policies promise besides their formula: the properties of each, and the rules that all share."""

from dataclasses import replace

import numpy as np
import pytest
from evict_heads import FREQUENCIES, D, asked, head, made, paired, turned

from eps_core.errors import ConfigError
from eps_core.evict import (
    adakv,
    epikv,
    infinigen,
    keydiff,
    kv_compress,
    kv_compress_full,
    logdet,
    nacl,
    nexus,
    pyramidkv,
    random,
    rkv,
    rswa,
    snapkv,
    streaming,
    tova,
    triattention,
)
from eps_core.evict.base import Head, Rule, best, descending, draws, older, pinned, ranked
from eps_core.evict.keep import Keep
from eps_core.evict.table import POLICIES, policy

RULE = Rule(first_tokens=2, last_tokens=5)
FREE = Rule(first_tokens=0, last_tokens=0)


def bare(rows: int, **statistics: np.ndarray) -> Head:
    return Head(np.arange(rows), rows, **statistics)


def keyed(keys: np.ndarray, **statistics: np.ndarray) -> Head:
    return bare(len(keys), keys=keys.astype(np.float32), frequencies=FREQUENCIES, **statistics)


def random_keys(rows: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, 6]).normal(size=(rows, D)).astype(np.float32).astype(np.float64)


# ------------------------------------------------------------------------------------------------- rules that all share


@pytest.mark.parametrize(
    "budget, kept",
    [(0, []), (1, [9]), (3, [7, 8, 9]), (4, [0, 7, 8, 9]), (5, [0, 1, 7, 8, 9]), (6, [0, 1, 5, 7, 8, 9])],
)
def test_of_pinned_rows_the_newest_win_then_the_sinks_in_order(budget: int, kept: list[int]) -> None:
    scores = np.array([0, 0, 1, 1, 1, 9, 1, 0, 0, 0.0])
    assert best(bare(10), scores, budget, Rule(2, 3)).tolist() == kept


def test_ties_go_to_the_lower_row_and_nan_comes_last() -> None:
    scores = np.array([1, 3, np.nan, 3, -np.inf, 1 + 1e-12])
    assert ranked(bare(6), scores, FREE).tolist() == [1, 3, 0, 5, 4, 2]


def test_newest_and_first_are_of_positions_not_of_rows() -> None:
    one = Head(np.array([90, 3, 40, 0, 95, 60]), 100)
    assert pinned(one, Rule(4, 2)).tolist() == [4, 0, 3, 1]
    assert older(one, Rule(4, 2)).tolist() == [3, 1, 2, 5]


def test_a_row_that_is_first_and_newest_counts_once() -> None:
    assert pinned(bare(3), Rule(4, 32)).tolist() == [2, 1, 0]
    assert best(bare(3), np.zeros(3), 2, Rule(4, 32)).tolist() == [1, 2]


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


@pytest.mark.parametrize("name", ["first_tokens", "last_tokens", "seed"])
def test_a_negative_rule_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name.replace("_", "-")):
        Rule(**{name: -1})


@pytest.mark.parametrize("name", POLICIES)
def test_facts_say_their_source_and_uneven_ones_alone_differ(name: str) -> None:
    facts = POLICIES[name].FACTS
    assert facts.source and (facts.at_prefill or facts.while_decoding)
    kept = POLICIES[name].keep(asked(made(rows=60, layers=3, seed=6), POLICIES[name]), 40, RULE)
    sizes = {len(rows) for heads in kept for rows in heads}
    assert (len(sizes) > 1) == facts.uneven


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
    keep = Keep(name, 0.5)
    assert (keep.facts.window, keep.rule(1000).last_tokens) == DEFAULTS[name]
    assert Keep(name, 0.5, last_tokens=7).rule(1000).last_tokens == 7


def test_half_of_what_h2o_keeps_are_the_newest() -> None:
    sums = np.zeros((1, 1000))
    sums[0, :400] = np.arange(400, 0, -1)
    for budget in (100, 101):
        kept = POLICIES["h2o"].keep([[bare(1000, sums=sums)]], budget, Keep("h2o", float(budget)).rule(budget))[0][0]
        assert kept.tolist() == [*range(budget - budget // 2), *range(1000 - budget // 2, 1000)]


def test_kv_compress_pools_each_query_head_before_it_adds_them() -> None:
    window = np.zeros((2, 32, 100), np.float32)
    window[0, :, 40], window[1, :, 45] = 0.5, 0.25
    scores = kv_compress.scores(bare(100, window=window))
    assert scores[37:49].tolist() == [8, 8, 8, 8, 8, 10, 10, 2, 2, 2, 2, 2] and scores.sum() == 7 * 8 + 7 * 2
    assert POLICIES["kv-compress-full"].FACTS.buffer == 10


# ----------------------------------------------------------------------------------------------------- policy by policy


def test_streaming_keeps_the_first_and_the_latest() -> None:
    assert streaming.keep([[bare(100)]], 12, Rule(4, 3))[0][0].tolist() == [0, 1, 2, 3, *range(92, 100)]


def test_rswa_keeps_the_prompt_and_a_ring_of_what_came_after() -> None:
    rows = np.arange(40)
    for length in range(41, 60):
        rows = np.append(rows, length - 1)
        rows = rows[rswa.keep([[Head(rows, length, prompt=30)]], 30 + 7, FREE)[0][0]]
        newest = range(max(length - 7, 30), length)
        assert rows.tolist() == [*range(30), *newest], "k < prefix or q - k < w"


def test_random_keeps_after_two_evictions_what_one_would_have_left() -> None:
    whole = [[bare(300)] * 2] * 2
    (_, (_, once)) = random.keep(whole, 40, RULE)
    (_, (_, first)) = random.keep(whole, 120, RULE)
    left = Head(first, 300)
    (_, (_, then)) = random.keep([[left] * 2] * 2, 40, RULE)
    assert np.array_equal(first[then], once)
    (_, (_, other)) = random.keep(whole, 40, replace(RULE, seed=1))
    assert not np.array_equal(once, other)


def test_tova_keeps_the_same_rows_of_a_layer() -> None:
    for heads in tova.keep(asked(made(layers=2), tova), 20, RULE):
        assert np.array_equal(*heads)


def test_snapkv_keeps_neighbours_of_what_is_attended() -> None:
    window = np.zeros((1, 4, 60), np.float32)
    window[..., 30] = 1
    kept = snapkv.keep([[bare(60, window=window)]], 12, RULE)[0][0]
    assert kept.tolist() == [0, 1, 28, 29, 30, 31, 32, *range(55, 60)]


@pytest.mark.parametrize("num_layers", [1, 2, 3, 8, 32])
@pytest.mark.parametrize("budget", [5, 30, 36, 64, 200, 450, 500])
def test_pyramid_budgets_fall_and_add_up(num_layers: int, budget: int) -> None:
    budgets = pyramidkv.layer_budgets(num_layers, 500, 30, budget)
    assert (np.diff(budgets) <= 0).all() and budgets.max() <= 500
    assert abs(int(budgets.sum()) - num_layers * budget) <= num_layers / 2
    layers = [[bare(500, window=np.ones((1, 4, 500), np.float32))] * 2] * num_layers
    sizes = np.array([[len(rows) for rows in heads] for heads in pyramidkv.keep(layers, budget, Rule(10, 20))])
    assert sizes.sum() == 2 * num_layers * budget
    assert (np.diff(sizes[:, 0]) <= 0).all() and np.array_equal(sizes[:, 0], sizes[:, 1])


def test_a_pyramid_is_as_steep_as_its_source_says() -> None:
    assert pyramidkv.layer_budgets(5, 4000, 64, 1400).tolist() == [2730, 2065, 1400, 735, 70]
    assert pyramidkv.layer_budgets(3, 2000, 64, 1600).tolist() == [1936, 1600, 1264]  # the first layer is nearly full
    assert pyramidkv.layer_budgets(3, 2000, 64, 1200).tolist() == [1936, 1200, 464]
    # the last layer would keep 50 rows, less than the window: every layer keeps the same
    assert pyramidkv.layer_budgets(3, 4000, 64, 1000).tolist() == [1000, 1000, 1000]


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("normalise", [True, False])
def test_adakv_blends_a_heads_part_of_the_layer_with_the_even_one(
    share: float, normalise: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adakv, "NORMALISED", normalise)
    rng = np.random.default_rng(0)
    heads = [bare(80) for _ in range(3)]
    scores = [rng.random(80) * size for size in (1, 5, 0.1)]
    kept = adakv.spread(heads, scores, 20, FREE, share)
    assert sum(map(len, kept)) == 60 and min(map(len, kept)) >= int(20 * share)
    if share == 1:
        assert [rows.tolist() for rows in kept] == [best(bare(80), x, 20, FREE).tolist() for x in scores]
    if share == 0 and not normalise:
        flat = np.sort(np.argsort(-np.concatenate(scores), kind="stable")[:60])
        assert np.array_equal(np.concatenate([rows + 80 * i for i, rows in enumerate(kept)]), flat)
        assert len(kept[2]) == 0


def test_adakv_weighs_a_head_by_what_its_even_budget_holds() -> None:
    """One head's mass is in few rows, the other's is spread: weighted by 1 and 0.25, the first wins the ties."""
    sharp, flat = np.zeros(80), np.full(80, 0.5)
    sharp[:20] = 0.5
    kept = adakv.spread([bare(80), bare(80)], [flat, sharp], 20, FREE, 0.0)
    assert [len(rows) for rows in kept] == [20, 20]
    kept = adakv.spread([bare(80), bare(80)], [flat * 1.5, sharp], 10, FREE, 0.0)  # 0.75 * 10 / 80 < 0.5 * 10 / 20
    assert kept[1].tolist() == list(range(20)) and len(kept[0]) == 0


def test_keydiff_looks_at_directions_alone() -> None:
    keys = random_keys(50) + 0.3
    sizes = 2.0 ** np.random.default_rng(1).integers(-5, 6, (50, 1))
    assert np.array_equal(keydiff.scores(keyed(keys)), keydiff.scores(keyed(keys * sizes)))
    same = np.repeat(keys[:1], 50, axis=0)
    assert np.ptp(keydiff.scores(keyed(same))) < 1e-12
    odd = same.copy()
    odd[20] = np.roll(np.eye(D)[0], 3) - (np.eye(D)[3] @ same[0]) * same[0] / (same[0] @ same[0])
    assert 20 in keydiff.keep([[keyed(odd)]], 1, FREE)[0][0]


def test_nacl_keeps_the_best_and_draws_of_the_others() -> None:
    rng = np.random.default_rng(0)
    one = bare(2000, window=rng.random((2, 64, 2000)).astype(np.float32))
    rule = Rule(4, 32, seed=3)
    kept, best_rows = nacl.kept(one, 0, 0, 226, rule), best(one, nacl.scores(one), 226 - 70, rule)
    assert len(kept) == 226 and set(best_rows) <= set(kept)  # 190 beyond the pinned: 120 the best, 70 by lot
    drawn = {seed: set(nacl.kept(one, 0, 0, 226, replace(rule, seed=seed))) - set(best_rows) for seed in range(4)}
    assert all(len(rows) == 70 for rows in drawn.values()) and len({frozenset(rows) for rows in drawn.values()}) == 4
    assert np.array_equal(kept, nacl.kept(one, 0, 0, 226, rule))


def test_nacl_draws_by_softmax_of_the_scores() -> None:
    """Three places: two for the best, one by lot among the other four; 3,000 seeds, five standard errors."""
    score = np.array([0.0, 1.0, 2.0, 0.5, 9.0, 10.0])
    one = bare(6, window=score[None, None].astype(np.float32))
    counts = sum(np.isin(np.arange(6), nacl.kept(one, 0, 0, 3, Rule(0, 0, seed))) for seed in range(3000))
    share = np.exp(score[:4]) / np.exp(score[:4]).sum()
    assert counts[4] == counts[5] == 3000
    assert (np.abs(counts[:4] - 3000 * share) < 5 * np.sqrt(3000 * share * (1 - share))).all()


def test_rkv_spares_the_latest_of_duplicates() -> None:
    keys = random_keys(40, 2) * 3
    keys[[6, 11, 19, 24, 30]] = keys[6]
    one = keyed(keys, queries=np.zeros((1, 8, D), np.float32))
    order = ranked(one, rkv.scores(one, FREE, rkv.IMPORTANCE), FREE).tolist()
    assert max(map(order.index, (30,))) < min(map(order.index, (6, 11, 19, 24)))


def test_rkv_of_importance_alone_is_a_window_policy() -> None:
    one = made(layers=1, heads=1, seed=4)[0][0]
    one = replace(one, queries=one.queries[:, -8:])
    assert np.array_equal(rkv.scores(one, RULE, 1.0), rkv.importance(one, RULE))
    logits = (one.queries.astype(float) @ one.keys.T.astype(float)).max(0)[:, :43] / np.sqrt(D)
    mass = np.exp(logits)
    mean = np.where(np.arange(43) <= np.arange(40, 48)[:, None], mass, 0)
    mean = (mean / mean.sum(1, keepdims=True)).mean(0)
    pooled = [mean[max(i - 3, 0) : i + 4].max() for i in range(43)]
    assert np.allclose(rkv.importance(one, RULE), [*pooled, 0, 0, 0, 0, 0], rtol=1e-5)


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


def log_det(keys: np.ndarray, ridge: float) -> float:
    return float(np.linalg.slogdet(keys.T @ keys + ridge * np.eye(keys.shape[1]))[1])


@pytest.mark.parametrize("together", [1, 5, 20])
def test_cholesky_factors_follow_keys_that_come_and_go(together: int) -> None:
    keys, more = random_keys(30), random_keys(together, 1)
    lower = logdet.factor(keys, 0.3)
    assert np.allclose(lower @ lower.T, keys.T @ keys + 0.3 * np.eye(D), atol=1e-12)
    raised = logdet.update(lower, more)
    assert np.allclose(raised, logdet.factor(np.concatenate([keys, more]), 0.3), atol=1e-12)
    assert abs(2 * np.log(np.diag(raised)).sum() - log_det(np.concatenate([keys, more]), 0.3)) < 1e-10
    back = logdet.downdate(raised, more)
    assert back is not None and np.allclose(back, lower, atol=1e-12)


def test_the_determinant_lemma() -> None:
    keys = random_keys(30)
    lower = logdet.factor(keys, 0.3)
    inverse_lower = np.linalg.inv(lower)
    leverage = logdet.leverages(inverse_lower, keys)
    for i in (0, 17, 29):
        assert abs(log_det(np.delete(keys, i, 0), 0.3) - log_det(keys, 0.3) - np.log1p(-leverage[i])) < 1e-10
    gain = float(logdet.leverages(inverse_lower, keys[:1])[0])
    twice = log_det(np.concatenate([keys, keys[:1]]), 0.3)
    assert abs(twice - log_det(keys, 0.3) - np.log1p(gain)) < 1e-10
    again = log_det(np.concatenate([keys, keys[:1], keys[:1]]), 0.3)
    assert again - twice < twice - log_det(keys, 0.3)  # a key that is there already adds less
    inverse = np.linalg.inv(keys.T @ keys + 0.3 * np.eye(D))
    assert abs(leverage.sum() - (D - 0.3 * np.trace(inverse))) < 1e-10


def test_a_downdate_that_leaves_nothing_says_so_and_the_policy_factors_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    assert logdet.downdate(np.eye(D), np.eye(D)[2]) is None
    assert logdet.downdate(np.eye(D), 2 * np.eye(D)[0]) is None
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


def test_logdet_keeps_more_of_the_determinant_than_chance() -> None:
    rng = np.random.default_rng(0)
    keys = np.concatenate([random_keys(180) * [3, 1, 1, 0.2, 0.1, 0.1, 0.1, 0.1], random_keys(20, 1)])
    kept = logdet.keep([[keyed(keys)]], 25, FREE)[0][0]
    chance = [log_det(keys[rng.choice(200, 25, replace=False)], 0.1) for _ in range(50)]
    assert log_det(keys[kept], 0.1) > max(chance)


def with_moments(keys: np.ndarray, q: np.ndarray, positions: np.ndarray, length: int) -> Head:
    return Head(
        positions,
        length,
        keys=turned(keys, positions).astype(np.float32),
        query_mean=paired(q).mean(1),
        query_abs=np.abs(paired(q)).mean(1),
        frequencies=FREQUENCIES,
    )


def test_triattention_is_the_mean_logit_of_a_constant_query() -> None:
    keys, q = random_keys(20), np.repeat(random_keys(1, 5)[None], 9, axis=1)
    one = with_moments(keys, q, np.arange(20), 20)
    ahead = 19 + 2 ** np.arange(17)
    cached = turned(keys, np.arange(20))
    logits = turned(np.repeat(q[0, :1], 17, axis=0), ahead) @ cached.T
    assert np.allclose(triattention.expected_logits(one)[0], logits.mean(0), atol=1e-4)
    norms = np.abs(paired(q[0, 0])) @ np.abs(paired(keys)).T  # no mean direction: norms alone
    still = replace(one, query_mean=np.zeros_like(one.query_mean))
    assert np.allclose(triattention.expected_logits(still)[0], norms, rtol=1e-5)


def test_triattention_looks_at_distances_not_at_positions() -> None:
    keys, q = random_keys(30), np.random.default_rng(3).normal(size=(2, 12, D)) + 1
    here = triattention.scores(with_moments(keys, q, np.arange(30), 30))
    far = triattention.scores(with_moments(keys, q, np.arange(30) + 5000, 5030))
    assert np.allclose(here, far, atol=1e-4) and np.ptp(here) > 1


def test_triattention_keeps_of_a_kv_head_the_same_rows_in_all_layers() -> None:
    kept = triattention.keep(asked(made(layers=3, seed=8), triattention), 16, RULE)
    assert all(np.array_equal(kept[0][i], heads[i]) for heads in kept for i in range(2))
    assert not np.array_equal(*kept[0])


def test_epikv_looks_back_only() -> None:
    q, keys = np.zeros((1, 100, D)), random_keys(100)
    changed = np.concatenate([keys[:60], random_keys(40, 1)])
    before, after = (epikv.scores([[head(q, k)]]) for k in (keys, changed))
    assert np.array_equal(before[:60], after[:60]) and not np.allclose(before[60:], after[60:])


def test_epikv_keeps_where_the_state_jumps() -> None:
    keys = np.repeat(random_keys(1), 100, axis=0) + 0.01 * random_keys(100, 1)
    keys[40:] += 2
    kept = epikv.keep([[head(np.zeros((1, 100, D)), keys)]], 8, RULE)[0][0]
    assert 40 in kept
    assert epikv.layer_weights(8).tolist() == [0, 0, 1, 1, -1, -1, 0, 0]
    assert epikv.layer_weights(1).tolist() == [1]


def test_nexus_includes_rows_of_one_weight_alike() -> None:
    """Identical keys under uniform attention: 20 rows, 5 places, 2,000 seeds; each count within 5 standard errors."""
    one = keyed(np.repeat(random_keys(1), 20, axis=0), window=np.full((1, 4, 20), 0.05, np.float32))
    assert np.ptp(nexus.weights(one)) < 1e-12
    counts = sum(np.isin(np.arange(20), nexus.keep([[one]], 5, Rule(0, 0, seed))[0][0]) for seed in range(2000))
    assert np.abs(counts - 500).max() < 5 * np.sqrt(2000 * 0.25 * 0.75)


def test_nexus_includes_rows_by_their_weights() -> None:
    """One place: the probability of a row is its share of the weights; 4,000 seeds."""
    window = np.array([0.05, 0.1, 0.2, 0.3, 0.35], np.float32)[None, None]
    one = keyed(random_keys(5, 4), window=window)
    share = nexus.weights(one) / nexus.weights(one).sum()
    assert np.ptp(share) > 0.1
    counts = sum(np.isin(np.arange(5), nexus.keep([[one]], 1, Rule(0, 0, seed))[0][0]) for seed in range(4000))
    assert (np.abs(counts - 4000 * share) < 5 * np.sqrt(4000 * share * (1 - share))).all()


def test_infinigen_with_all_columns_speculates_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(infinigen, "PARTIAL", 1.0)
    (one,) = asked(made(layers=1, heads=1), infinigen)[0]
    exact = one.queries.astype(float) @ one.keys.T.astype(float) / np.sqrt(D)
    found = infinigen.partial_logits(one)
    sees = np.arange(48) <= np.arange(40, 48)[:, None]
    assert np.allclose(found[:, sees], exact[:, sees], atol=1e-9) and np.isneginf(found[:, ~sees]).all()


@pytest.mark.parametrize("rows", [64, 75])
def test_kv_compress_frees_whole_blocks(rows: int) -> None:
    rng = np.random.default_rng(rows)
    layers = [[bare(rows, squares=rng.random((2, rows)) * size) for size in (1, 3)] for _ in range(3)]
    kept = [len(found) for heads in kv_compress_full.keep(layers, 32, RULE) for found in heads]
    assert sum(kept) == 6 * 32 and sum(size % 16 != 0 and size != rows for size in kept) <= 1
    assert kept[0] < kept[1]  # what weighs less goes first


def test_kv_compress_goes_on_where_a_head_has_lost_everything() -> None:
    strong, weak = (bare(48, squares=np.full((1, 48), size)) for size in (2.0, 1.0))
    ((first, second),) = kv_compress_full.keep([[weak, strong]], 24, FREE)
    assert len(first) == 0 and len(second) == 48
    nothing = Head(np.arange(0), 48, squares=np.zeros((1, 0)))
    ((first, second),) = kv_compress_full.keep([[nothing, strong]], 16, FREE)
    assert len(first) == 0 and second.tolist() == list(range(32))  # the places that it leaves are another's
