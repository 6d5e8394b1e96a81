"""rq about units' means, read in stages: what is stored, which groups are read further, what a write does to a unit."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_conformance import Case, anchored, as_read, eps
from test_rescore import TIES, Filled, case_of, heads_of

from eps_core import reference
from eps_core.config.bytes import scoring_bytes, span_bytes, summary_bytes, summary_group_bytes
from eps_core.config.cache import CacheConfig, CacheSpec
from eps_core.config.eps import EpsConfig
from eps_core.config.selection import COMBINES, SelectionConfig
from eps_core.errors import ConfigError
from eps_core.kv_cache.step_plan import StepPlan
from eps_core.load import load_backend
from eps_core.reference.selection import best_first
from eps_core.summaries import base, rq

# a budget so small that scores read on by their shares, not in twice what is selected
UNIT = {"mean_tokens": 64, "cascade": (0.25,), "rescore": 0.0625}
UNIT |= {"budget": 0.002}


def units_case(lengths=(600, 290, 37), head_dim: int = 64, **more):
    config = {**UNIT, **more}
    return case_of(lengths, rescore=config.pop("rescore"), config=config, head_dim=head_dim)


def score_with(one: Filled, **changed) -> np.ndarray:
    """Estimates of the same cache read otherwise."""
    config = EpsConfig.over(one.case.config.cache_config, SelectionConfig(**changed))
    return one.host(one.backend.score(one.cache, 0, one.native, StepPlan.of(config, one.table, one.lengths)).estimate)


# --------------------------------------------------------------------------------------------------------- what is kept


def test_a_scale_of_one_byte_is_within_a_sixteenth() -> None:
    values = np.geomspace(2.0**-14, 61440, 20_000).astype(np.float16)
    stored = base.to_byte(values)
    assert stored.dtype == np.uint8 and (np.diff(stored.astype(int)) >= 0).all()
    near = base.from_byte(stored)
    assert (np.abs(near / values.astype(np.float64) - 1) <= 1 / 16).all()
    assert base.from_byte(base.to_byte(np.float16(0))) == 0
    assert np.isfinite(base.from_byte(base.to_byte(np.array([65504, np.inf], np.float16)))).all()
    every = np.arange(0xF8, dtype=np.uint8)
    assert (base.to_byte(base.from_byte(every).astype(np.float16)) == every).all()


@pytest.mark.parametrize(("parts", "head_dim", "dims"), [
    (1, 128, (128,)), (2, 128, (64, 64)), (3, 128, (32, 32, 64)), (3, 32, (8, 8, 16)), (3, 16, (8, 8)), (2, 8, (8,)),
    (2, 96, (96,)), (3, 20, (20,)), (2, 64, (32, 32)), (3, 64, (16, 16, 32)),
])  # fmt: skip
def test_the_parts_of_a_code(parts: int, head_dim: int, dims: tuple[int, ...]) -> None:
    cache_config = CacheConfig(method="rq", mean_tokens=64, parts=parts)
    assert rq.part_dims(cache_config, head_dim) == dims and sum(dims) == head_dim
    fields = rq.fields(cache_config, head_dim)
    assert [name for name in fields if name in ("codes", "more", "rest")] == list(rq.PARTS[len(dims)])
    assert [fields[name].part for name in rq.PARTS[len(dims)]] == list(range(len(dims)))


def test_bytes_are_counted_stage_by_stage() -> None:
    config = EpsConfig.of(method="rq", group_size=2, **UNIT)
    # of 64 tokens: a mean of 8 bits and its scale, 32 scales, the first half of 32 codes
    read_of_all = 128 + 2 + 32 + 32 * 8
    assert scoring_bytes(config, 128, [2000]) == 32 * read_of_all + 250 * 8 + 63 * (16 + 1)
    assert scoring_bytes(config, 128, [2000, 64]) - scoring_bytes(config, 128, [2000]) == read_of_all + 8 * 8 + 2 * 17
    assert span_bytes(config.cache_config, 128) == read_of_all + 32 * 8 + 32 * 17
    assert summary_group_bytes(config.cache_config, 128) == span_bytes(config.cache_config, 128) / 32
    stored = summary_bytes(config.cache_config, 2, 3, 128, 130)
    assert stored == 2 * 3 * 3 * span_bytes(config.cache_config, 128)
    quarters = config.replace(mean_tokens=32, cascade=(0.5, 0.2), rescore=0)
    assert scoring_bytes(quarters, 128, [3200]) == 100 * (128 + 2 + 16 + 16 * 4) + 800 * 4 + 320 * 8
    whole = EpsConfig.over(config.cache_config)  # no stage: every part of all
    assert scoring_bytes(whole, 128, [2000]) == 32 * read_of_all + 1000 * 8
    share = scoring_bytes(config, 128, [65536]) / (65536 * 2 * 2 * 128)
    assert 0.0155 < share < 0.0165


def test_codes_are_those_of_the_definition(target) -> None:
    """Decoded from what is stored: the mean within half a step of each dimension, the signs those of the rest, and the
    first part of the codes byte by byte."""
    one = Filled(target, units_case((320, 130), cascade=(0.5, 0.2), mean_tokens=32))
    cache_config = one.case.config.cache_config
    for b, head in heads_of(one):
        full = int(one.lengths[b]) // 32
        stored = {
            name: one.stored(name)[one.table[b], head].reshape(-1, *one.stored(name).shape[3:])[:full]
            for name in one.cache.summaries[0]
        }
        assert stored["codes"].shape == (full, 2, 16) and stored["rest"].shape == (full, 16, 4)
        turned = rq.rotate(one.means(b, head)[: full * 16], cache_config.seed).reshape(full, 16, 64)
        codes = stored["mean"].astype(int) - 128
        scale = stored["mean_scale"].astype(np.float64)[:, None]
        assert np.abs(codes).max() == 127
        assert (np.abs(codes * scale - turned.mean(axis=1)) <= scale * (0.5 + 1e-3)).all()
        rest = turned - (codes * scale)[:, None]
        signs = rq._signs(cache_config, stored, 64, 3)
        assert (signs == np.where(rest >= 0, 1, -1)).mean() > 0.999
        wanted = (rest**2).sum(axis=2) / np.abs(rest).sum(axis=2)
        assert (np.abs(base.from_byte(stored["scale"]) / wanted - 1) < 1 / 14).all()


# --------------------------------------------------------------------------------------------------------------- stages


def test_a_part_of_the_dimensions_estimates_them_all() -> None:
    """Unbiased over the random signs: the mean over seeds nears the whole code's, within five standard errors."""
    rng = np.random.default_rng(3)
    k, a = rng.normal(size=(64, 64)) + rng.normal(size=64), rng.normal(size=64)
    gaps = []
    for seed in range(300):
        cache_config = CacheConfig(method="rq", mean_tokens=64, parts=2, seed=seed)
        summary = {name: np.asarray(x)[None] for name, x in rq.build(cache_config, {}, k).items()}
        gaps.append(rq.stage(cache_config, summary, a, 1) - rq.stage(cache_config, summary, a, 2))
    gaps = np.array(gaps)
    assert (np.abs(gaps.mean(axis=0)) < 5 * gaps.std(axis=0) / np.sqrt(len(gaps))).all() and gaps.std() > 0.1


@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
def test_no_two_dimensions_hide_from_half_a_code(head_dim: int) -> None:
    """Half of the rotated dimensions hold .4 to 1.6 of their share of every sum and difference of two dimensions. Rows
    of one Sylvester matrix hold nothing of some."""
    half = rq.rotate(np.eye(head_dim), 0)[:, : head_dim // 2]
    i, j = np.triu_indices(head_dim, 1)
    for sign in (1, -1):
        share = ((half[i] + sign * half[j]) ** 2).sum(axis=1)
        assert share.min() > 0.4 and share.max() < 1.6


@pytest.mark.kernels("numba")
@pytest.mark.parametrize("cascade", [(0.25,), (0.37,), (0.5, 0.2), (1.0,)], ids=str)
@pytest.mark.parametrize("rescore", [0.0, 0.1])
@pytest.mark.parametrize("combine", COMBINES)
def test_exactly_the_best_are_read_further(target, cascade, rescore, combine) -> None:
    """Judged by the estimates of every group read one part, two parts, .. and refined."""
    one = Filled(target, units_case(cascade=cascade, rescore=rescore, combine=combine))
    got, parts = one.estimate(), len(cascade) + 1
    cache_config = one.case.config.cache_config
    stored = {name: one.stored(name) for name in one.cache.summaries[0]}
    for b, head in heads_of(one):
        spans = int(one.lengths[b]) // 64
        if not spans:
            continue
        own = {name: array[one.table[b, :spans], head, 0] for name, array in stored.items()}
        heads = one.q[b].reshape(one.case.num_kv_heads, -1, 64)[head].astype(np.float64) / 8
        first = as_read(one.case, one.keys[b][:1, head])[0]

        anchors = anchored(heads @ first) if combine == "sum" else np.zeros(len(heads))

        def of_all(each: list[np.ndarray], last: bool, anchors: np.ndarray = anchors) -> np.ndarray:
            one = np.array(each) - anchors[:, None]
            return np.logaddexp.reduce(one) if combine == "sum" and last else one.max(axis=0)

        by_part = [
            of_all([rq.stage(cache_config, own, a, part) for a in heads], part == parts and not rescore)
            for part in range(1, parts + 1)
        ]
        left, want = np.arange(32 * spans), by_part[0].copy()
        for share, finer in zip(cascade, by_part[1:], strict=True):
            count = int(np.ceil(share * -(-one.lengths[b] // 2)))
            left = np.sort(left[best_first(want[left])[:count]])
            want[left] = finer[left]
        if rescore:
            left = left[best_first(want[left])[: int(np.ceil(rescore * -(-one.lengths[b] // 2)))]]
            want[left] = of_all([rq.rescore(cache_config, {}, own, a) for a in heads], True)[left]
        np.testing.assert_allclose(got[b, head, : 32 * spans], want, atol=2e-5)


def test_a_read_without_stages_reads_every_code_whole(target) -> None:
    one = Filled(target, units_case(rescore=0.0, combine="max"))
    whole = Filled(target, units_case(rescore=0.0, cascade=(), combine="max"))
    known = np.isfinite(one.estimate())
    np.testing.assert_allclose(score_with(one)[known], whole.estimate()[known], atol=1e-6)
    assert np.abs(one.estimate()[known] - whole.estimate()[known]).max() > 0.1


@pytest.mark.kernels("numba")
@pytest.mark.parametrize("rescore", [0.0, 1.0])
def test_groups_that_say_the_same_tie_to_the_bit(target, rescore) -> None:
    """Of one unit: by scales and sums that differ, too, as long as their product is equal."""
    config = {"mean_tokens": 64, "cascade": (1.0,)}
    one = Filled(target, case_of((1300, 900), rescore, config=config, head_dim=64, num_heads=2, num_kv_heads=2))
    got, cache_config, ties = one.estimate(), one.case.config.cache_config, 0
    stored = {name: one.stored(name) for name in one.cache.summaries[0]}
    for b, head in heads_of(one):
        spans = int(one.lengths[b]) // 64
        own = {name: array[one.table[b, :spans], head, 0] for name, array in stored.items()}
        integers, _ = rq.rounded_query(rq.rotate_query(one.q[b, head] / np.float32(8), cache_config.seed))
        levels, scale = rq._signs(cache_config, own, 64, 2), own["scale"]
        if rescore:
            levels, scale = levels + rq.unpack_codes(own["second"], 1, 64) - 0.5, own["second_scale"]
        said = base.from_byte(scale) * (levels @ integers)
        for span in range(spans):
            _, first, which = np.unique(said[span], return_index=True, return_inverse=True)
            estimate = got[b, head, 32 * span : 32 * (span + 1)]
            assert (estimate == estimate[first][which]).all()
            ties += len(which) - len(first)
    assert ties > 10


@pytest.mark.parametrize("case", [
    units_case((700, 290)), units_case((700, 290), cascade=(0.5, 0.2), mean_tokens=32, head_dim=128),
    case_of((700, 290), head_dim=64), case_of((700,), head_dim=64, dtype="bfloat16"),
    *(Case((700,), eps("rq", group_size=2, mean_tokens=many), head_dim=64, dtype="bfloat16", chunk=333)
      for many in (32, 64)),
], ids=str)  # fmt: skip
def test_all_backends_store_the_same_and_visit_the_same_groups(case) -> None:
    """Codes and visit lists must not depend on the library: the mean and the rotation are prescribed sums."""
    mlx, cuda, numpy = ones = [Filled((load_backend(name), "cpu"), case) for name in ("mlx", "cuda", "numpy")]
    first, *others = (one.backend.to_numpy(one.backend.select(one.scores(), one.plan).groups) for one in ones)
    assert all(np.array_equal(first, other) for other in others)
    for name in mlx.cache.summaries[0]:
        gap = np.abs(mlx.stored(name).astype(float) - cuda.stored(name))
        # of sums in an order of their own
        assert gap.max() <= (name in ("scale", "second_scale") and case.dtype == "bfloat16"), name
    for name in ("codes", "second"):
        bits = [rq.unpack_codes(one.stored(name), 1, 8 * one.stored(name).shape[-1]) for one in (cuda, numpy)]
        assert (bits[0] != bits[1]).mean() <= TIES, name


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e30, np.inf])
@pytest.mark.parametrize("combine", COMBINES)
def test_extreme_queries_rank_without_nan(target, scale, combine) -> None:
    one = Filled(target, units_case((300,), combine=combine))
    with np.errstate(invalid="ignore", over="ignore"):
        one.native = one.backend.from_numpy((one.q * np.float32(scale)).astype(np.float32), "float32", target[1])
    estimate = one.estimate()
    assert not np.isnan(estimate).any() and (estimate[..., :128] > -np.inf).all() and (estimate < np.inf).any()


# --------------------------------------------------------------------------------------------------- the life of a unit


class Written:
    """One sequence's cache [1 layer, 2 kv heads], written piece by piece."""

    def __init__(self, target, num_units: int = 6, **config) -> None:
        self.backend, self.device = target
        self.config = eps("rq", group_size=2, **{**UNIT, **config})
        self.cache = self.backend.new_cache(CacheSpec(1, 2, 32, num_units), self.config.cache_config, self.device)

    def write(self, k: np.ndarray, slots: np.ndarray, place: bool = False) -> None:
        native = self.backend.from_numpy(np.ascontiguousarray(k), "float32", self.device)
        write = self.backend.write_kv_tentative if place else self.backend.write_kv
        self.cache = write(self.cache, 0, native, native, slots)

    def missing(self, length: int, table=(0, 1, 2, 3)) -> np.ndarray:
        plan = StepPlan.of(self.config, np.array([table]), np.array([length]))
        q = self.backend.from_numpy(np.ones((1, 2, 32), np.float32), "float32", self.device)
        return np.isposinf(self.backend.to_numpy(self.backend.score(self.cache, 0, q, plan).estimate))[0, 0]

    def stored(self, unit: int) -> dict[str, np.ndarray]:
        return {name: self.backend.to_numpy(pool)[unit] for name, pool in self.cache.summaries[0].items()}

    def assert_stores(self, want: "Written", units: tuple[int, ...], theirs: tuple[int, ...]) -> None:
        """The summaries of units are those of another cache's."""
        for unit, other in zip(units, theirs, strict=True):
            for name, value in self.stored(unit).items():
                assert np.array_equal(value, want.stored(other)[name]), (unit, name)


def keys(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(length, 2, 32)).astype(np.float32)


@pytest.mark.kernels("numba")
def test_a_unit_is_summarised_once_its_last_token_is_written(target) -> None:
    k, one, whole = keys(130), Written(target), Written(target)
    for at in range(130):
        one.write(k[at : at + 1], np.array([at]))
        finalized = (at + 1) // 64 * 32
        assert not one.missing(at + 1)[:finalized].any() and one.missing(at + 1)[finalized : -(-(at + 1) // 2)].all()
    whole.write(k, np.arange(130))
    one.assert_stores(whole, (0, 1), (0, 1))
    assert one.cache.bytes_k_reread == 2 * 64 * 2 * 32 * 4 and whole.cache.bytes_k_reread == 0


@pytest.mark.kernels("numba")
def test_what_is_written_over_is_summarised_anew(target) -> None:
    """A token inside a full unit: nothing is known of its groups until the unit is whole again."""
    k, other = keys(128), keys(128, 1)
    one, fresh = Written(target), Written(target)
    one.write(k, np.arange(128))
    one.write(other[10:11], np.array([10]))
    assert one.missing(128)[:32].all() and not one.missing(128)[32:64].any()
    one.write(other[11:64], np.arange(11, 64))
    assert not one.missing(128)[:64].any()
    fresh.write(np.concatenate([k[:10], other[10:64], k[64:]]), np.arange(128))
    one.assert_stores(fresh, (0, 1), (0, 1))


def test_a_draft_in_a_unit_leaves_it_open(target) -> None:
    k, draft, one, never = keys(128), keys(8, 2), Written(target), Written(target)
    for each in (one, never):
        each.write(k[:60], np.arange(60))
    one.write(draft, np.arange(60, 68), place=True)
    assert one.missing(68)[:34].all()
    for each in (one, never):
        each.write(k[60:], np.arange(60, 128))
    one.assert_stores(never, (0, 1), (0, 1))


def test_a_fork_goes_on_from_a_copied_open_unit(target) -> None:
    k, mine, theirs, one = keys(100), keys(64, 3), keys(64, 4), Written(target)
    one.write(k, np.arange(100))
    one.cache = one.backend.copy_units(one.cache, [1], [4])
    one.write(mine[:28], np.arange(100, 128))
    one.write(theirs[:28], np.arange(4 * 64 + 36, 5 * 64))
    for unit, rest in ((1, mine), (4, theirs)):
        fresh = Written(target)
        fresh.write(np.concatenate([k[64:], rest[:28]]), np.arange(64))
        one.assert_stores(fresh, (unit,), (0,))
    assert not one.missing(128, (0, 4, 2, 3))[:64].any()


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_units_written_in_any_pieces_are_those_written_whole(data) -> None:
    """Float64: pieces, rewinds and reuse of units, against one write of what is there at last."""
    mean_tokens = data.draw(st.sampled_from([32, 64]))
    one = Written((reference, "cpu"), mean_tokens=mean_tokens, block_size=64)
    k, length = np.zeros((256, 2, 32), np.float32), 0
    for step in range(data.draw(st.integers(2, 7))):
        length = data.draw(st.integers(0, length))  # back to here
        count = data.draw(st.integers(1, 256 - length)) if length < 256 else 0
        k[length : length + count] = keys(count, 10 + step)
        if count:
            one.write(k[length : length + count], np.arange(length, length + count))
        length += count
    fresh = Written((reference, "cpu"), mean_tokens=mean_tokens, block_size=64)
    fresh.write(k[:length], np.arange(length))
    assert np.array_equal(one.missing(length), fresh.missing(length))
    per_unit = 64 // mean_tokens
    for span in range(length // mean_tokens):
        for name, value in one.stored(span // per_unit).items():
            assert np.array_equal(value[:, span % per_unit], fresh.stored(span // per_unit)[name][:, span % per_unit])


# ------------------------------------------------------------------------------------------------------------- settings


def test_what_is_usual() -> None:
    usual = EpsConfig.of(method="rq")
    assert usual.cache_config.mean_tokens == 64 and usual.cache_config.S == 1
    assert usual.cache_config.parts == 1 + len(usual.selection_config.cascade) > 1
    assert EpsConfig.of(**usual.to_dict()) == usual
    assert EpsConfig.of(method="rq", cascade=(0.05,)).selection_config.rescore == 0.05  # no more than is read whole
    assert EpsConfig.of(method="rq", rescore=0.6).selection_config.cascade == (0.6,)
    bounded = EpsConfig.of(method="rq", rq_bounds=True)
    assert bounded.cache_config.mean_tokens == 64 and bounded.selection_config.cascade == ()
    assert EpsConfig.of(method="box").cache_config.mean_tokens == 0


@pytest.mark.parametrize(("wrong", "words"), [
    ({"mean_tokens": 16}, "eps-mean-tokens 16 is not 32 or 64"),
    ({"mean_tokens": 0}, "eps-mean-tokens 0 is not 32 or 64"),
    ({"method": "box", "mean_tokens": 32}, "not for method box"),
    ({"mean_tokens": 32, "group_size": 32}, "no multiple of the group of 32 tokens"),
    ({"mean_tokens": 64, "block_size": 48}, "does not fit"),
    ({"cascade": (0.5, 0.4, 0.3)}, "up to 2 shares"),
    ({"cascade": (1.5,)}, "eps-cascade 1.5 is not"),
    ({"cascade": (0.2, 0.5)}, "rise"),
    ({"cascade": (0.05,), "rescore": 0.1}, "eps-cascade 0.05 and then eps-rescore 0.1 rise"),
    ({"method": "box", "cascade": (0.25,)}, "eps-cascade reads rq codes in parts, and method box has none"),
    ({"cascade": (0.25,), "rq_bounds": True}, "eps-rq-bounds reads the whole code"),
], ids=str)  # fmt: skip
def test_contradictions_are_one_line(wrong: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EpsConfig.of(**{"method": "rq", **wrong})


def test_a_read_in_more_parts_than_are_kept_is_refused() -> None:
    with pytest.raises(ConfigError, match="in more parts than the 2"):
        EpsConfig.over(EpsConfig.of(method="rq", cascade=(0.25,)).cache_config, SelectionConfig(cascade=(0.5, 0.2)))
