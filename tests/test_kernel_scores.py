"""Kernels that score, against the reference over the same stored bytes: random summaries, of which some are invalid,
some not finite and some repeated, and queries of any size."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
from kernel_scenes import like

from eps_core import reference
from eps_core.config.cache import CacheSpec
from eps_core.config.eps import EpsConfig
from eps_core.config.selection import COMBINES
from eps_core.cpu.units import NO_HEAD
from eps_core.kv_cache.step_plan import StepPlan
from eps_core.summaries.base import LARGEST_ESTIMATE
from eps_core.summaries.rq import part_dims, rotate

pytestmark = pytest.mark.kernels("numba", "triton", "metal", arrays=False)
KV_HEADS = 2


@dataclass(frozen=True)
class Case:
    """Random pools, a table of two ragged sequences of up to `num_units` units, and a query."""

    head_dim: int = 64
    repeat: int = 3
    size: int = 2
    mean_tokens: int = 32
    cascade: tuple[float, ...] = (0.25,)
    rescore: float = 0.125
    block_size: int = 64
    num_units: int = 9
    combine: str = "max"
    repeated: bool = False  # a unit of the pool occurs several times: whole runs of equal estimates
    method: str = "rq"

    @property
    def config(self) -> EpsConfig:
        if self.method != "rq":
            return EpsConfig.of(method=self.method, group_size=self.size, budget=0.01)
        return EpsConfig.of(
            method="rq", group_size=self.size, mean_tokens=self.mean_tokens,
            cascade=self.cascade, rescore=self.rescore, block_size=self.block_size,
            budget=0.01, combine=self.combine,
        )  # fmt: skip


ONCE = Case(64, 4, mean_tokens=64, size=1, cascade=(), rescore=1.0, combine="sum", num_units=3)
CASES = {
    "usual": Case(),
    "unit of the pool is one of a mean": Case(128, 4, mean_tokens=64, num_units=7),
    "whole codes": Case(128, 2, cascade=()),
    "three parts": Case(64, 4, mean_tokens=64, cascade=(0.5, 0.2), rescore=0.0625),
    "three parts of equal groups": Case(128, 1, cascade=(0.5, 0.2), repeated=True),
    "no rescoring bit": Case(64, 8, cascade=(0.5, 0.3), rescore=0.0),
    "all of them on and on": Case(32, 2, cascade=(1.0, 1.0), rescore=1.0, repeated=True),
    "no power of two": Case(80, 5, size=4, cascade=(0.25,)),
    "odd head dim": Case(33, 2, size=16, mean_tokens=64, num_units=12),
    "parts of a byte": Case(16, 7, size=1, cascade=(0.4, 0.4), num_units=3),
    "less than a byte": Case(5, 2, size=8),
    "wide": Case(256, 16, size=1, mean_tokens=64, num_units=4),
    "two groups a unit": Case(64, 2, size=32, mean_tokens=64, num_units=30),
    "several threadgroups": Case(16, 1, size=1, mean_tokens=64, num_units=40),
    "one unit": Case(64, 2, num_units=1),
    "nine query heads": Case(repeat=9, num_units=3),
    "summed": Case(combine="sum"),
    "summed at once": Case(64, 4, cascade=(), rescore=0.0, combine="sum"),
    "read at once": Case(64, 4, cascade=(), rescore=1.0),
    "summed, read at once": ONCE,
    "128 dimensions, read at once": replace(ONCE, head_dim=128, repeat=4),
    "256 dimensions, read at once": Case(256, 2, mean_tokens=64, size=1, cascade=(), rescore=1.0, num_units=3),
    "one head, read at once": replace(ONCE, head_dim=32, repeat=1),
    "three heads, read at once": replace(ONCE, head_dim=160, repeat=3),
    "nine heads, read at once": replace(ONCE, repeat=9),
    "seventeen heads, read at once": replace(ONCE, repeat=17),
    "two means a unit, read at once": replace(ONCE, block_size=128, num_units=4),
    "96 dimensions, read at once": replace(ONCE, head_dim=96, repeat=2),
    "no power of two, read at once": Case(80, 5, size=4, cascade=(), rescore=1.0, combine="sum"),
    "summed in three parts": Case(64, 4, mean_tokens=64, cascade=(0.5, 0.2), rescore=0.0625, combine="sum"),
    "summed, no power of two": Case(80, 5, size=4, cascade=(0.25,), combine="sum"),
    "one summed": Case(repeat=1, num_units=3, combine="sum"),
    "seven summed": Case(repeat=7, num_units=3, combine="sum"),
    "eight summed": Case(repeat=8, num_units=3, combine="sum"),
}


class Filled:
    """A reference's cache of random summaries, and what it says of a query."""

    def __init__(self, case: Case, factor: float = 1.0) -> None:
        rng = np.random.default_rng([case.head_dim, case.repeat])
        config, cache_config = case.config, case.config.cache_config
        total = 2 * case.num_units + 1
        self.case, self.config = case, config
        self.cache = reference.new_cache(CacheSpec(1, KV_HEADS, case.head_dim, total), cache_config)
        self.pools = self.cache.summaries[0]
        for name, pool in self.pools.items():
            if pool.dtype == np.float16:
                pool[:] = rng.uniform(0.01, 0.1, pool.shape)
            elif name in ("scale", "second_scale"):
                pool[:] = rng.integers(0x58, 0x70, pool.shape)  # of 1/64 to 1/2
            else:
                pool[:] = rng.integers(0, 256, pool.shape).astype(np.uint8).view(pool.dtype)
        if case.method == "rq":
            self.pools["scale"][1::3, :, :, ::4] = 0  # a mean alone
            small = self.pools["scale"][::3, :, :, 1::4]
            small[:] = rng.integers(1, 8, small.shape)  # of the evenly spaced ones
            self.clear_spare_bits()
        if case.repeated:  # sums with a mean would not tell equal ones apart alike everywhere
            self.pools["mean_scale"][:] = 0
        self.pools["mean_scale"][-1] = np.inf  # of the first unit of the first sequence
        self.table = rng.permutation(total)[: 2 * case.num_units].reshape(2, case.num_units).astype(np.int32)
        if case.num_units > 1:
            self.table[self.table == total - 1] = self.table[0, 0]
            self.table[0, 0] = total - 1
        if case.repeated:
            self.table[:, 1:] = self.table[:, 1:2]
        tokens = case.num_units * cache_config.unit_tokens
        self.lengths = np.array([tokens - cache_config.span_tokens // 2, max(tokens // 2 - 1, 1)])
        for b, length in enumerate(self.lengths):
            self.table[b, -(-length // cache_config.unit_tokens) :] = -1
        self.valid = rng.random(total * cache_config.spans_per_unit) < 0.9
        self.valid[-cache_config.spans_per_unit :] = True
        self.cache.state[0].fill[self.valid] = cache_config.span_tokens
        self.q = rng.normal(0, 3, (2, KV_HEADS * case.repeat, case.head_dim)).astype(np.float32)
        self.q[:, 0] *= 1e-6 if case.repeat > 1 else 1  # one head of another size than the others
        self.q[1, -1] *= case.repeat == 1
        self.q = (self.q * factor).astype(np.float32)
        self.cache.k[0][:] = rng.normal(0, 2, self.cache.k[0].shape)
        self.plan = StepPlan.of(config, self.table, self.lengths)

    def clear_spare_bits(self) -> None:
        """Bits past the last dimension are 0."""
        case = self.case
        spare = -case.head_dim % 8
        for name in ("codes", "second"):
            whole = len(part_dims(self.config.cache_config, case.head_dim)) == 1
            if name in self.pools and spare and (name != "codes" or whole):
                last = self.pools[name][..., -1, :] if name == "codes" else self.pools[name][..., -1]
                last &= 0xFF >> spare

    def expected(self) -> np.ndarray:
        with np.errstate(invalid="ignore", over="ignore"):
            return reference.score(self.cache, 0, self.q.astype(np.float64), self.plan).estimate

    def size(self) -> np.ndarray:
        """[B, Hkv]: what the magnitudes of an estimate's terms add up to."""
        a = self.q.astype(np.float64) / math.sqrt(self.case.head_dim)
        if self.case.method != "rq":
            return np.abs(a).sum(axis=-1).reshape(2, KV_HEADS, -1).max(axis=-1) * 255 * 0.2
        most = np.abs(rotate(a, self.config.cache_config.seed)).sum(axis=-1).reshape(2, KV_HEADS, -1).max(axis=-1)
        size = most * (256 * 0.1 + 0.5 * 1.5)
        if self.case.combine == "max":
            return size
        first_keys = self.cache.k[0][self.table[:, 0], :, 0].astype(np.float64)
        products = np.abs(a * np.repeat(first_keys, self.case.repeat, axis=1)).sum(axis=-1)
        return size + products.reshape(2, KV_HEADS, -1).max(axis=-1)

    def estimate(self, backend, device) -> np.ndarray:
        """[B, Hkv, G] of the backend, over the same bytes."""
        cache = backend.new_cache(self.cache.spec, self.config.cache_config, device)
        cache.k[0] = backend.from_numpy(self.cache.k[0], "float32", device)
        cache.summaries[0] = {name: like(cache.k[0], pool) for name, pool in self.pools.items()}
        cache.state[0].fill[:] = self.cache.state[0].fill
        if cache.valid:
            cache.valid[0] = like(cache.k[0], self.valid.astype(np.uint8))
        scores = backend.score(cache, 0, backend.from_numpy(self.q, "float32", device), self.plan)
        return backend.to_numpy(scores.estimate).astype(np.float64)


def check(backend, device, filled: Filled) -> None:
    found, expected = filled.estimate(backend, device), filled.expected()
    if filled.case.combine == "sum":  # the least sum of compiled CPU kernels
        found, expected = (np.where(np.isneginf(x), x, np.maximum(x, NO_HEAD)) for x in (found, expected))
    assert np.isfinite(expected).any() and np.isposinf(expected).any()
    large, infinite = expected == LARGEST_ESTIMATE, ~np.isfinite(expected)
    assert large.any() or filled.case.num_units == 1
    assert (found[large] == np.float32(LARGEST_ESTIMATE)).all(), "what is past float32 differs"
    assert (np.isfinite(found) == ~infinite).all() and (found[infinite] == expected[infinite]).all()
    found, expected = (np.where(large | infinite, 0, x) for x in (found, expected))
    error = np.abs(found - expected)
    assert (error <= 2.0**-20 * (filled.size()[..., None] + np.abs(expected))).all(), error.max()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_estimates_are_the_reference_s(target, case) -> None:
    check(*target, Filled(case))


@pytest.mark.parametrize("factor", [0.0, 1e-30, 1e6, 1e30])
@pytest.mark.parametrize("name", ["usual", "summed", "summed at once"])
def test_queries_of_any_size(target, name, factor) -> None:
    """Masses past float32, or all but equal."""
    check(*target, Filled(CASES[name], factor))


@pytest.mark.parametrize("combine", COMBINES)
def test_a_query_that_is_no_number_ranks_nothing_apart(target, combine) -> None:
    filled = Filled(Case(combine=combine))
    known = np.isfinite(filled.expected()[0, 0])
    for value in (np.nan, np.inf):
        filled.q[0, 1, 3] = value
        assert (filled.estimate(*target)[0, 0][known] == np.float32(LARGEST_ESTIMATE)).all()


@pytest.mark.kernels("triton", arrays=False)
def test_what_dropped_out_ranks_above_what_went_on(target) -> None:
    """Of the case of equal groups in three parts: else a pass that chose among all groups would not be found."""
    filled = Filled(CASES["three parts of equal groups"])
    end = filled.estimate(*target)
    filled.plan = StepPlan.of(filled.config, filled.table, filled.lengths)
    filled.plan.__dict__["rescored"] = np.zeros(2, np.int64)
    filled.plan.once(("staged", 128), lambda: [np.zeros(2, np.int64)] * 2)
    start = filled.estimate(*target)
    moved = start != end
    assert moved.any() and start[np.isfinite(start) & ~moved].max() > end[moved].min()
