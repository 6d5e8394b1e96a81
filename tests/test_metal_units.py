"""The Metal kernels of codes about units' means, as the text that MLX would compile, run on this machine by the shim.

Estimates are judged by the float64 oracle from the same stored bytes, rounded queries by the oracle to the bit.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import cached_property

import mlx.core as mx
import numpy as np
import pytest
from metal import cuda_check, shim
from test_metal_select import BARRIER, everything_written, same

import eps_mlx
from eps_core.config.cache import CacheConfig, CacheSpec
from eps_core.config.eps import EpsConfig
from eps_core.config.selection import COMBINES
from eps_core.kv_cache.step_plan import StepPlan
from eps_core.reference.selection import best_first
from eps_core.summaries import base as oracle_base
from eps_core.summaries import rq as oracle
from eps_core.summaries.table import fields, num_parts
from eps_mlx.kernels import launch, select, turn_units, units

SEED = 3
metal_shim = shim.metal_shim


@dataclasses.dataclass
class Units:
    """Random summaries of a paged cache and queries; `summary` by name, [P, Hkv, spans of a unit, ..]."""

    lengths: tuple[int, ...] = (301, 64, 150)
    kv_heads: int = 2
    repeat: int = 3
    head_dim: int = 64
    size: int = 2
    mean_tokens: int = 64
    mean_bits: int = 4
    cascade: tuple[float, ...] = (0.25,)
    page: int = 16
    spoilt: bool = True
    combine: str = "max"
    seed: int = 0

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        per_unit, unit = self.cache_config.spans_per_unit, self.cache_config.unit_tokens
        held = [-(-length // unit) for length in self.lengths]
        num_units = sum(held) + 3
        free = rng.permutation(num_units)
        self.table = np.full((len(self.lengths), max(held) + 1), -1, np.int32)
        for b, number in enumerate(held):
            self.table[b, :number], free = free[:number], free[number:]
        self.valid = (rng.random(num_units * per_unit) < 0.9).astype(np.uint8)
        self.q = (3 * rng.normal(size=(len(held), self.kv_heads * self.repeat, self.head_dim))).astype(np.float32)
        pool = num_units, self.kv_heads, per_unit
        self.summary = {}
        for name, one in fields(self.cache_config, self.head_dim).items():
            if name == "mean_scale":
                self.summary[name] = (0.01 + rng.random((*pool, *one.shape)) / 20).astype(np.float16)
            else:
                least, most = (0, 0x70) if name.endswith("scale") else (0, 256)  # bytes of up to 0.5
                self.summary[name] = rng.integers(least, most, (*pool, *one.shape)).astype(np.uint8)
        first_keys = 2 * rng.normal(size=(len(held), self.kv_heads, 1, self.head_dim))
        heads = self.q.reshape(len(held), self.kv_heads, self.repeat, self.head_dim).astype(np.float64)
        self.anchors = ((heads * first_keys).sum(axis=-1) / math.sqrt(self.head_dim)).astype(np.float32)
        if len(self.table[0]) > 2:
            self.valid[self.table[0, 1] * per_unit] = 0
        if self.spoilt:  # a mean past float16 makes estimates the largest, never NaN
            self.summary["mean_scale"][self.table[0, 0], 0, 0] = np.inf
            self.valid[self.table[0, 0] * per_unit] = 1

    @cached_property
    def cache_config(self) -> CacheConfig:
        return EpsConfig.of(
            method="rq", group_size=self.size, mean_tokens=self.mean_tokens, mean_bits=self.mean_bits,
            cascade=self.cascade, rescore=0.1, block_size=self.page, seed=SEED,
        ).cache_config  # fmt: skip

    @property
    def num_groups(self) -> int:
        return self.table.shape[1] * self.cache_config.groups_per_unit

    @property
    def known(self) -> np.ndarray:
        """[B, G] bool."""
        cache_config = self.cache_config
        spans = (
            np.maximum(self.table, 0)[:, :, None] * cache_config.spans_per_unit + np.arange(cache_config.spans_per_unit)
        ).reshape(len(self.table), -1)
        full = np.arange(spans.shape[1]) < np.array(self.lengths)[:, None] // cache_config.span_tokens
        return np.repeat((self.valid[spans] != 0) & full, cache_config.groups_per_span, axis=1)

    def judged(self, estimate: Callable[[dict[str, np.ndarray], np.ndarray], np.ndarray]) -> np.ndarray:
        """[B, Hkv, G] float64: `estimate` of one query head's groups, with what is known before any score."""
        judged = np.full((len(self.lengths), self.kv_heads, self.num_groups), -np.inf)
        scaled = self.q * np.float32(1 / math.sqrt(self.head_dim))
        for b, head in np.ndindex(*judged.shape[:2]):
            tiles = np.maximum(self.table[b], 0)
            summary = {name: pool[tiles, head].reshape(-1, *pool.shape[3:]) for name, pool in self.summary.items()}
            with np.errstate(all="ignore"):
                each = [estimate(summary, scaled[b, head * self.repeat + r]) for r in range(self.repeat)]
            best = self.combined(np.array(each), self.anchors[b, head].astype(np.float64)[:, None])
            inside = np.arange(self.num_groups) * self.size < self.lengths[b]
            judged[b, head] = np.where(inside, np.where(self.known[b], best, np.inf), -np.inf)
        return judged

    def combined(self, each: np.ndarray, anchors: np.ndarray) -> np.ndarray:
        """[G] of the query heads' estimates [R, G]."""
        finite = np.isfinite(each) & (each < oracle_base.LARGEST_ESTIMATE)
        if self.combine == "max":
            return np.where(finite, each, oracle_base.LARGEST_ESTIMATE).max(axis=0)
        return np.logaddexp.reduce(np.where(finite, each - anchors, oracle_base.LARGEST_ESTIMATE))

    def stage(self, parts: int | None) -> np.ndarray:
        """The oracle's [B, Hkv, G] of every group, from so many parts of the codes; None: from two bits."""
        if parts is None:
            return self.judged(lambda summary, a: oracle.rescore(self.cache_config, {}, summary, a.astype(np.float64)))
        return self.judged(lambda summary, a: oracle.stage(self.cache_config, summary, a, parts))

    @property
    def sums(self) -> bool:
        return self.combine == "sum"

    def arrays(self) -> dict[str, mx.array]:
        return {name: mx.array(pool) for name, pool in self.summary.items()}

    def asked(self, dtype: mx.Dtype = mx.float32) -> turn_units.Query:
        signs = mx.array(oracle.rq_signs(SEED, self.head_dim))
        return turn_units.turn_units(mx.array(self.q).astype(dtype), signs, self.kv_heads)

    def scored(self) -> tuple[turn_units.Query, mx.array, mx.array]:
        query = self.asked()
        places = [mx.array(self.valid), mx.array(self.table), mx.array(np.array(self.lengths, np.int32))]
        estimate, base = units.score_units(
            query, self.arrays(), *places, mx.array(self.anchors) if self.sums else None, group_size=self.size,
            mean_bits=self.mean_bits, sums=self.sums,
        )  # fmt: skip
        return query, estimate, base

    @property
    def rounding(self) -> float:
        """float32 additions of D products in one order and float64 ones in another, of the largest query."""
        a = np.abs(self.q).sum(axis=-1).max() / math.sqrt(self.head_dim)
        anchor = np.abs(self.anchors).max() if self.sums else 0.0
        size = a * (1.5 * 0.5 + 0.06 * 2**self.mean_bits / 2) + anchor + 1
        return 2.0**-22 * (math.sqrt(self.head_dim) + 8) * size


def check_turned(dtype=mx.float32, **shape) -> None:
    one = Units(lengths=(3, 1), **shape)
    one.q[0, 0] = 0
    query = one.asked(dtype)
    held = np.array(mx.array(one.q).astype(dtype).astype(mx.float32))
    for b, row in np.ndindex(*held.shape[:2]):
        place = b, row // one.repeat, row % one.repeat
        turned = oracle.rotate_query(held[b, row] * np.float32(1 / math.sqrt(one.head_dim)), SEED)
        rounded, step = oracle.rounded_query(turned)
        assert np.array_equal(np.array(query.turned)[place], turned)
        assert np.array_equal(np.array(query.rounded)[place], rounded) and np.array(query.step)[place] == step
    assert np.abs(np.array(query.rounded)).max() == oracle.QUERY_STEPS
    everything_written("eps_turn_units", **{name: np.array(part) for name, part in query._asdict().items()})


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32], ids=str)
@pytest.mark.parametrize("head_dim", [16, 20, 33, 80, 96, 128, 256])
def test_queries_are_turned_and_rounded_to_the_bit(dtype, head_dim, metal_shim):
    check_turned(dtype, head_dim=head_dim, repeat=1 if head_dim > 100 else 2)


@pytest.mark.parametrize("combine", COMBINES)
def test_a_query_past_float32_has_no_whole_numbers(combine, metal_shim):
    one = Units(lengths=(130,), spoilt=False, combine=combine)
    one.q[0, 0, 0], one.anchors[0, 0, 0] = np.inf, np.inf
    query, estimate, _ = one.scored()
    assert (np.array(query.rounded)[0, 0, 0] == 0).all()
    assert (np.array(estimate)[0, 0][one.known[0]] == np.float32(oracle_base.LARGEST_ESTIMATE)).all()


def check_score(factor=1.0, **shape) -> None:
    """Of queries that are `factor` times as large."""
    one = Units(**shape)
    one.q, one.anchors = one.q * np.float32(factor), one.anchors * np.float32(factor)
    _, estimate, base = one.scored()
    same(estimate, one.stage(1), one.rounding)
    everything_written("eps_score_units", estimate=np.array(estimate), base=np.array(base))


SHAPES = {
    "default": {},
    "head dim 128": {"head_dim": 128, "repeat": 4, "kv_heads": 1},
    "head dim 256": {"head_dim": 256, "repeat": 8, "kv_heads": 1, "cascade": (0.5, 0.2)},
    "three parts": {"cascade": (0.5, 0.2)},
    "three parts of 128": {"head_dim": 128, "cascade": (0.5, 0.2), "repeat": 1},
    "whole codes": {"cascade": ()},
    "fewer parts than asked": {"head_dim": 16, "cascade": (0.5, 0.2), "mean_bits": 8},
    "head dim 80": {"head_dim": 80, "repeat": 5},
    "head dim 33": {"head_dim": 33, "repeat": 1, "mean_bits": 8},
    "head dim 20": {"head_dim": 20, "repeat": 16, "size": 1},
    "eight bits": {"mean_bits": 8, "repeat": 2, "lengths": (95, 64)},
    "means of 32": {"mean_tokens": 32, "lengths": (301, 33, 95)},
    "means of 32, groups of 1": {"mean_tokens": 32, "size": 1, "head_dim": 16},
    "two groups a mean": {"mean_tokens": 32, "size": 16},
    "four groups a mean": {"size": 16, "head_dim": 16},
    "units of several means": {"mean_tokens": 32, "page": 128, "lengths": (301, 33, 127)},
    "one token": {"lengths": (1,), "head_dim": 16, "spoilt": False},
    "several threadgroups": {"lengths": (2900, 1), "head_dim": 16, "size": 1, "repeat": 1, "kv_heads": 1},
    "summed": {"combine": "sum"},
    "one summed": {"combine": "sum", "repeat": 1, "head_dim": 128, "cascade": (0.5, 0.2)},
    "seven summed": {"combine": "sum", "repeat": 7, "kv_heads": 1, "mean_tokens": 32},
    "eight summed": {"combine": "sum", "repeat": 8, "kv_heads": 1, "head_dim": 80, "size": 16},
}


@pytest.mark.parametrize("case", SHAPES.values(), ids=SHAPES)
def test_first_estimates_are_the_oracles(case, metal_shim):
    check_score(**case)


@pytest.mark.parametrize("factor", [0.0, 1e6, 1e30])
@pytest.mark.parametrize("combine", COMBINES)
def test_queries_of_any_size(combine, factor, metal_shim):
    check_score(factor, combine=combine)


def check_read_on(wanted=((40, 32, 1), (16, 5, 0)), first=2, **shape) -> None:
    """A stage from the `first` parts on (None: the rescoring bit at once), and the rescoring bit of what it leaves."""
    one = Units(**shape)
    before = one.stage(1).astype(np.float32)
    query, _, base = one.scored()
    estimate, values, groups = mx.array(before), mx.array(before), None
    want, left = before.astype(np.float64), np.isfinite(before)
    for parts, counts in zip((first, None), wanted, strict=False):
        now = np.array(estimate)
        picked, listed = select.select_best(values, mx.array(list(counts), mx.int32), width=max(*counts, 1))
        estimate, values, groups = units.read_on(
            query, base, one.arrays(), mx.array(one.table), estimate, groups, picked, listed, parts=parts,
            sums=one.sums,
        )  # fmt: skip
        finer = one.stage(parts)
        for b, head in np.ndindex(*now.shape[:2]):
            alive = np.flatnonzero(left[b, head])
            best = np.sort(alive[best_first(now[b, head, alive])[: counts[b]]])
            want[b, head, best] = finer[b, head, best]
            left[b, head] = False
            left[b, head, best] = True
            assert np.array(groups)[b, head].tolist() == [*best, *[-1] * (groups.shape[2] - len(best))]
            found = np.array(estimate)[b, head]
            assert np.array_equal(found[~left[b, head]], now[b, head][~left[b, head]])
            assert np.array_equal(np.array(values)[b, head, : len(best)], found[best])
            assert np.isneginf(np.array(values)[b, head, len(best) :]).all()
        same(estimate, want, one.rounding)
        everything_written("eps_read_on", values=np.array(values), listed=np.array(groups))
        # what is listed was copied before
        assert shim.last["eps_read_on"].stored["refined"] == now.nbytes + 4 * int(np.array(listed).sum())


READ_ON = {name: case for name, case in SHAPES.items() if name not in ("one token", "several threadgroups")} | {
    "the third part": {"cascade": (0.5, 0.2), "first": 3},
    "the rescoring bit at once": {"first": None},
    "none of one": {"wanted": ((0, 3, 9), (0, 3, 2))},
    "none of all": {"wanted": ((0, 0, 0),)},
    "all": {"wanted": ((151, 151, 151), (151, 151, 151))},
    "several threadgroups": {
        "lengths": (1900, 600, 3), "wanted": ((1400, 599, 0), (900, 40, 0)), "size": 1, "head_dim": 16, "repeat": 1,
        "kv_heads": 1,
    },
}  # fmt: skip


@pytest.mark.parametrize("case", READ_ON.values(), ids=READ_ON)
def test_only_what_is_listed_is_read_on(case, metal_shim):
    one = Units(**{name: value for name, value in case.items() if name not in ("wanted", "first")})
    counts = case.get("wanted", ((40, 32, 1), (16, 5, 0)))
    wanted = tuple(part[: len(one.lengths)] for part in counts)
    # a code in one part has no second
    first = case["first"] if "first" in case else min(2, num_parts(one.cache_config, one.head_dim))
    check_read_on(**case | {"wanted": wanted, "first": first})


@pytest.mark.parametrize("combine", COMBINES)
def test_equal_codes_tie_to_the_bit(combine, metal_shim):
    one = Units(spoilt=False, lengths=(900,), repeat=4, kv_heads=1, combine=combine)
    one.valid[:] = 1
    for name, pool in one.summary.items():
        axis = 4 if name == "codes" else 3
        alike = pool if name.startswith("mean") else np.broadcast_to(np.take(pool, [0], axis=axis), pool.shape)
        one.summary[name] = np.broadcast_to(alike[:1, :, :1], pool.shape).copy()
    query, estimate, base = one.scored()
    full = 900 // 64 * 32
    assert (np.array(estimate)[0, 0, :full] == np.array(estimate)[0, 0, 0]).all()
    picked, counts = select.select_best(estimate, mx.array([300]), width=300)
    for parts in (2, None):
        _, values, groups = units.read_on(
            query, base, one.arrays(), mx.array(one.table), estimate, None, picked, counts, parts=parts, sums=one.sums
        )
        assert (np.array(values) == np.array(values)[0, 0, 0]).all()
        assert np.array(groups)[0, 0].tolist() == list(range(300))  # the lower index first


PATHS = {
    "halves": (64, {}),
    "halves, no rescoring bit": (64, {"rescore": 0.0}),
    "three parts about means of 32": (128, {"mean_tokens": 32, "cascade": (0.5, 0.2)}),
    "whole codes of a head dim of 96": (96, {"group_size": 4, "mean_bits": 8}),
    "groups of one": (16, {"group_size": 1, "cascade": (1.0,), "rescore": 1.0}),
    "query heads summed": (64, {"correction_tokens": 0, "combine": "sum"}),
}


@pytest.mark.parametrize(("head_dim", "settings"), PATHS.values(), ids=PATHS)
def test_a_step_visits_what_the_array_path_visits(head_dim, settings, metal_shim):
    """Through prefill, decode and a group that is written again, several sequences of which one is short."""
    lengths, rng = np.array([470, 260, 40]), np.random.default_rng(4)
    config = EpsConfig.of(
        method="rq", **{"mean_tokens": 64, "correction_tokens": 64, "budget": 0.2, "num_sink_tokens": 4, **settings}
    )
    spec = CacheSpec(1, 2, head_dim, 16, "bfloat16")
    table = np.array([range(8), [8, 9, 10, 11, 12, *[-1] * 3], [13, *[-1] * 7]])
    mean = 2 * rng.normal(size=(2, head_dim))
    k, v = ((rng.normal(size=(16 * 64, 2, head_dim)) + mean).astype(np.float32) for _ in range(2))
    q = mx.array(3 * rng.normal(size=(3, 6, head_dim)).astype(np.float32))
    slots = [table[b, np.arange(n) // 64] * 64 + np.arange(n) % 64 for b, n in enumerate(lengths)]
    writes = [np.concatenate([one[:-30] for one in slots]), *np.array([one[-30:] for one in slots]).T, slots[0][64:130]]
    found = []
    for kernels in ("arrays", "metal"):
        cache = eps_mlx.new_cache(spec, config.cache_config, "cpu", kernels)
        for at in writes:
            cache = eps_mlx.write_kv(cache, 0, mx.array(k[at]), mx.array(v[at]), at)
        plan = StepPlan.of(config, table, lengths)
        scores = eps_mlx.score(cache, 0, q, plan)
        found.append((cache, scores, eps_mlx.select(scores, plan)))
    (arrays, coarse, wanted), (metal, fine, chosen) = found
    assert metal_shim["eps_read_on"].threadgroups
    assert np.isposinf(np.array(coarse.estimate)).any() and np.isfinite(np.array(coarse.estimate)).any()
    for name, stored in arrays.summaries[0].items():
        assert np.array_equal(np.array(stored), np.array(metal.summaries[0][name])), name
    np.testing.assert_allclose(np.array(fine.estimate), np.array(coarse.estimate), rtol=2e-6, atol=2e-5)
    assert np.array_equal(np.array(chosen.groups), np.array(wanted.groups))


# --------------------------------------------------------------------------------------------------------- what is read


@pytest.mark.parametrize("cascade", [(), (0.25,), (0.5, 0.2)], ids=str)
def test_scoring_reads_the_first_part_of_groups_with_a_summary_once(cascade, metal_shim):
    one = Units(head_dim=128, lengths=(301, 64, 1), repeat=4, cascade=cascade)
    one.scored()
    groups = int(one.known.sum()) * one.kv_heads
    assert groups
    spans, seen = groups // 32, metal_shim["eps_score_units"]
    assert seen.read["codes"] == seen.loaded["codes"] == groups * (16 if not cascade else 8 if len(cascade) == 1 else 4)
    assert seen.read["mean"] == seen.loaded["mean"] == spans * 64
    assert seen.read["scale"] == groups and seen.read["mean_scale"] == spans * 2


def test_further_parts_are_read_of_listed_groups_only(metal_shim):
    one = Units(head_dim=128, repeat=4, cascade=(0.5, 0.2), spoilt=False)
    query, estimate, base = one.scored()
    given = one.arrays()
    listed = mx.array([[[0, 7, 9, -1]] * 2, [[-1] * 4] * 2, [[30, 31, 32, 33]] * 2], mx.int32)
    counts = mx.array([[3, 3], [0, 0], [4, 4]], mx.int32)
    places = mx.array([[[0, 2, -1]] * 2, [[-1] * 3] * 2, [[1, 2, 3]] * 2], mx.int32)
    fewer = mx.array([[2, 2], [0, 0], [3, 3]], mx.int32)
    table = mx.array(one.table)
    for parts, want in ((2, {"more": 4}), (3, {"more": 4, "rest": 8})):
        _, _, groups = units.read_on(query, base, given, table, estimate, None, listed, counts, parts=parts, sums=False)
        seen = metal_shim["eps_read_on"]
        for name in ("more", "rest", "second"):
            own = want.get(name, 0) * 14
            assert seen.loaded[name] == own and (not own or seen.read[name] == own), name
        assert seen.read["codes"] == seen.loaded["codes"] == 14 * 4 and seen.read["scale"] == 14
    _, _, groups = units.read_on(query, base, given, table, estimate, groups, places, fewer, parts=None, sums=False)
    seen = metal_shim["eps_read_on"]
    assert seen.read["second"] == seen.loaded["second"] == 10 * 16 and seen.read["scale"] == 10
    assert np.array(groups)[:, 0].tolist() == [[0, 9, -1], [-1, -1, -1], [31, 32, 33]]


def test_more_query_heads_than_threadgroup_memory_holds_are_refused():
    one = Units(lengths=(3,), head_dim=256, repeat=24, cascade=(), spoilt=False)
    shape = 1, 2, 24, 256
    query = turn_units.Query(mx.zeros(shape), mx.zeros(shape), mx.zeros(shape[:3]))
    places = [mx.array(one.valid), mx.array(one.table), mx.array([3], mx.int32)]
    with pytest.raises(ValueError, match="49152 bytes of threadgroup memory"):
        units.score_units(query, one.arrays(), *places, None, group_size=2, mean_bits=4, sums=False)


# ----------------------------------------------------------------------------------------------------- wrong on purpose

WRONG = {
    "no signs": ("_turn_units", " * signs[d]", "", {}),
    "sum where the difference belongs": ("_turn_units", "other - own", "own - other", {}),
    "blocks mixed": ("_turn_units", "block > apart ? x", "true ? x", dict(head_dim=96)),
    "not scaled back": ("_turn_units", " * inverse[d]", "", {}),
    "rounded to zero": ("_turn_units", "rint(", "trunc(", {}),
    "one step more": ("_turn_units", "most / 31.0f", "most / 32.0f", {}),
    "a query of zeros divided": ("_turn_units", "usable ? rint", "true ? rint", {}),
    "wrong head of codes": ("_score_units", "(unit * HKV + head)", "(unit * HKV + (head + 1) % HKV)", {}),
    "means without a zero": ("_score_units", " - ZERO", " - ZERO + 1.0f", {}),
    "last word of a mean dropped": ("_score_units", "w < WORDS;", "w + 1 < WORDS;", dict(repeat=1, mean_bits=8)),
    "lanes not added": ("_score_units", "apart < SHARING", "apart < 1", {}),
    "last plane dropped": ("_score_units", "j < B0; j++", "j + 1 < B0; j++", {}),
    "planes read as groups": (
        "_score_units", "B0 + j) * N + part * PIECE", "N + part * PIECE) * B0 + j * PIECE - j * PIECE", dict(size=16),
    ),
    "a part that speaks of itself alone": ("_score_units", "float(STRETCH)", "1.0f", {}),
    "query not rounded": ("_score_units", "= d < D ? rounded[", "= d < D ? step[0] * turned[", {}),
    "spans without a summary": ("_score_units", "% SPU] != 0", "% SPU] != 2", {}),
    "partial span scored": ("_score_units", "span < length / (N * S)", "span * N * S < length", {}),
    "last query head instead of the best": ("_score_units", "best = max(best, ", "best = max(x, ", {}),
    "infinite estimates": ("_score_units", "isfinite(x) ? x", "true ? x", {}),
    "log S forgotten": ("_score_units", "log(float(S)) + ", "", {}),
    "small scales as large ones": ("_score_units", "byte < 8u", "byte < 0u", {}),
    "small scales eight times as large": ("_score_units", "7.62939453125e-6f", "6.103515625e-5f", dict(repeat=1)),
    "anchors forgotten": ("_score_units", "-= anchor", "-= 0.0f * anchor", dict(combine="sum")),
    "anchor of the first query head": ("_score_units", "anchor[row * R + r]", "anchor[row * R]", dict(combine="sum")),
    "the largest for the sum": ("_score_units", "best += log(total)", "best += 0.0f", dict(combine="sum")),
    "the sum for the largest": ("_score_units", "(SUM) {\n        float", "(true) {\n        float", {}),
    "masses past float32": ("_score_units", "[r] - best);", "[r]);", dict(combine="sum", factor=1e6)),
    "sums without what is not finite": ("_score_units", "isfinite(x) ? x", "true ? x", dict(combine="sum")),
    "the largest for the refined sum": ("_read_on", "best += log(total)", "best += 0.0f", dict(combine="sum")),
    "the refined sum for the largest": ("_read_on", "if (SUM)", "if (true)", {}),
    "last byte dropped": ("_read_on", "j < BYTES; j++", "j + 1 < BYTES; j++", {}),
    "one group too many": ("_read_on", "if (own >= count)", "if (own > count)", {}),
    "rescoring bit as large as the first": ("_read_on", "? 0.5f : -0.5f", "? 1.0f : -1.0f", {}),
    "lists of lists as lists": ("_read_on", "PICKED ? groups[", "false ? groups[", {}),
    "rest not copied": (
        "_read_on", "next < count ? (PICKED", "next < count ? true ? from : (PICKED", READ_ON["several threadgroups"],
    ),
    "base of another unit": ("_read_on", "* spans + span) * R", "* spans) * R", {}),
    "infinite refined estimates": ("_read_on", "isfinite(x) ? x", "true ? x", READ_ON["all"]),
    "stale values": ("_read_on", "] = -INFINITY", "] = 0.0f", {}),
    "a query without its step": ("_read_on", "step[row * R + r] * ", "", {}),
    "query of the first head": ("_read_on", "query[(8 * j + i) * R + r]", "query[(8 * j + i) * R]", {}),
}  # fmt: skip
CHECKS: dict[str, Callable[..., None]] = {
    "_turn_units": check_turned, "_score_units": check_score, "_read_on": check_read_on,
}  # fmt: skip


def kernel_of(name: str) -> launch.Kernel:
    return vars(turn_units if name == "_turn_units" else units)[name]


def caught(monkeypatch, name: str, source: str, settings: dict) -> None:
    """The check of a kernel must fail with `source` in place of its own."""
    module = turn_units if name == "_turn_units" else units
    monkeypatch.setattr(module, name, dataclasses.replace(kernel_of(name), source=source))
    with pytest.raises(AssertionError) as error:
        CHECKS[name](**settings)
    assert "kernel.cpp" not in str(error.value), "it does not compile"


@pytest.mark.parametrize(("name", "right", "wrong", "settings"), WRONG.values(), ids=WRONG)
def test_a_wrong_kernel_is_caught(name, right, wrong, settings, metal_shim, monkeypatch):
    source = kernel_of(name).source
    assert right in source
    caught(monkeypatch, name, source.replace(right, wrong), settings)


BARRIERS = [(name, place) for name in CHECKS for place in range(kernel_of(name).source.count(BARRIER))]


@pytest.mark.parametrize(("name", "place"), BARRIERS, ids=str)
def test_a_missing_barrier_is_caught(name, place, metal_shim, monkeypatch):
    parts = kernel_of(name).source.split(BARRIER)
    end = parts[place + 1].index(";")
    parts[place : place + 2] = [parts[place] + "(void)(" + parts[place + 1][:end] + parts[place + 1][end:]]
    caught(monkeypatch, name, BARRIER.join(parts), {})


def launched(monkeypatch) -> list[tuple]:
    """Kernel, template, inputs and dtypes of outputs of launches of every kernel, for inputs of fewer than 8 elements
    and more."""
    calls = []

    def record(kernel, inputs, template, grid, threadgroup, shapes, dtypes):
        calls.append((kernel, template, inputs, list(dtypes)))
        return [mx.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]

    monkeypatch.setattr(launch, "runner", record)
    few = {"lengths": (3,), "repeat": 1, "kv_heads": 1, "head_dim": 8, "spoilt": False}
    for shape in (
        few, {}, {"head_dim": 33}, {"head_dim": 128, "cascade": (0.5, 0.2)}, {"mean_tokens": 32, "size": 16},
        {"combine": "sum"},
    ):  # fmt: skip
        one = Units(**shape)
        query, estimate, base = one.scored()
        one.asked(mx.bfloat16)
        picked = mx.zeros((len(one.lengths), one.kv_heads, 1), mx.int32)
        for parts in (*range(2, 1 + num_parts(one.cache_config, one.head_dim)), None):
            for groups in (None, picked):
                units.read_on(
                    query, base, one.arrays(), mx.array(one.table), estimate, groups, picked, picked[..., 0],
                    parts=parts, sums=one.sums,
                )  # fmt: skip
    return calls


def test_texts_keep_the_front_end_rules_of_metal(monkeypatch):
    clang_check = pytest.importorskip("metal.clang_check")
    calls = launched(monkeypatch)
    texts = {shim.generated_text(kernel, inputs, template, dtypes) for kernel, template, inputs, dtypes in calls}
    assert [line for text in texts for line in clang_check.diagnostics(text)] == []
    assert len(texts) >= 20


@cuda_check.needs_nvcc
def test_nvcc_compiles_every_body(monkeypatch, tmp_path):
    assert not cuda_check.errors(launched(monkeypatch), tmp_path)
