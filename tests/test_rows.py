"""Dense attention of several rows of several sequences in one pass, and writes that may be taken back: every backend
and kernel against the float64 oracle, which goes row by row."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from eps_core import reference
from eps_core.config.cache import CacheSpec
from eps_core.config.eps import EpsConfig
from eps_core.kv_cache.pool import PagePool
from eps_core.kv_cache.rows import Rows
from eps_core.kv_cache.step_plan import StepPlan

pytestmark = pytest.mark.kernels("numba", "triton", "metal")

EPS = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


@dataclass(frozen=True)
class Case:
    lengths: tuple[int, ...]
    num_rows: tuple[int, ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    dtype: str = "float32"
    group_size: int = 2
    block_size: int = 16
    scale_q: float = 2.0
    bits: tuple[int, int] = (16, 16)  # of K and of V

    def __str__(self) -> str:
        return (
            f"T{'+'.join(map(str, self.lengths))}-N{'+'.join(map(str, self.num_rows))}-{self.num_heads}q"
            f"{self.num_kv_heads}kv-D{self.head_dim}-S{self.group_size}-{self.dtype}"
            + (f"-K{self.bits[0]}V{self.bits[1]}" if self.bits != (16, 16) else "")
        )


CASES = [
    Case((150,), (1,)),
    Case((150,), (9,)),
    Case((150, 37, 64), (9, 1, 5)),
    Case((9, 3), (9, 3)),  # nothing before the rows
    Case((300, 290), (17, 2), num_heads=8, num_kv_heads=2, head_dim=64, dtype="bfloat16"),
    Case((530,), (17,), num_heads=8, num_kv_heads=1, head_dim=128, dtype="bfloat16", block_size=64),
    Case((290,), (5,), num_heads=3, num_kv_heads=3, head_dim=20, group_size=3, block_size=12),
    Case((290, 60), (33, 4), num_heads=6, num_kv_heads=3, head_dim=33, group_size=48, dtype="float16"),
    Case((150,), (7,), num_heads=14, num_kv_heads=2, head_dim=80, group_size=1),
    Case((700,), (4,), num_heads=16, num_kv_heads=1, head_dim=96, group_size=16, scale_q=20.0),
    Case((64, 128), (1, 8), group_size=64, block_size=64),
    Case((300, 290), (17, 2), num_heads=8, num_kv_heads=2, head_dim=64, dtype="bfloat16", bits=(8, 4)),
    Case((150, 37), (5, 1), head_dim=34, bits=(4, 16)),
]


class Filled:
    """The same keys in a backend's cache and in the oracle's, in units that lie scattered."""

    def __init__(self, backend: Any, device: str, case: Case, rng: np.random.Generator) -> None:
        self.case, self.backend, self.device = case, backend, device
        self.config = EpsConfig.of(method="box", block_size=case.block_size, group_size=case.group_size)
        size = self.config.cache_config.unit_tokens
        units, (k_bits, v_bits) = sum(-(-t // size) for t in case.lengths) + 2, case.bits
        spec = CacheSpec(
            1, case.num_kv_heads, case.head_dim, units, case.dtype, k_bits=k_bits, v_bits=v_bits
        )  # fmt: skip
        pool = PagePool(spec.num_units, size)
        sequences = [pool.open([])[0] for _ in case.lengths]
        self.slots = []
        parts: list[list[np.ndarray]] = [[] for _ in case.lengths]
        for start in range(0, max(case.lengths), 50):  # in turns, so that no sequence's units follow each other
            for b, length in enumerate(case.lengths):
                if start < length:
                    parts[b].append(pool.append(sequences[b], range(min(50, length - start)))[0])
        self.slots = [np.concatenate(part) for part in parts]
        self.table, self.lengths = pool.table(sequences), pool.lengths(sequences)
        self.keys = [rng.normal(size=(t, case.num_kv_heads, case.head_dim)).astype(np.float32) for t in case.lengths]
        self.values = [rng.normal(size=k.shape).astype(np.float32) for k in self.keys]
        self.cache = backend.new_cache(spec, self.config.cache_config, device)
        self.judge = reference.new_cache(spec, self.config.cache_config)
        for b in range(len(case.lengths)):
            self.write(b, self.keys[b], self.values[b])

    def write(self, b: int, k: np.ndarray, v: np.ndarray) -> None:
        given = (self.backend.from_numpy(x, self.case.dtype, self.device) for x in (k, v))
        self.cache = self.backend.write_kv_tentative(self.cache, 0, *given, self.slots[b])
        rounded = (reference.from_numpy(x, self.case.dtype) for x in (k, v))
        self.judge = reference.write_kv_tentative(self.judge, 0, *rounded, self.slots[b])

    def rows(self) -> Rows:
        return Rows.of(self.table, self.lengths, np.array(self.case.num_rows))


def query(case: Case, rng: np.random.Generator) -> np.ndarray:
    q = rng.normal(size=(sum(case.num_rows), case.num_heads, case.head_dim)) * case.scale_q
    return np.asarray(reference.from_numpy(q.astype(np.float32), case.dtype), np.float32)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("exact_q", [True, False], ids=["own dtype", "float32 q"])
def test_rows_are_what_the_oracle_says(target, case, exact_q) -> None:
    backend, device = target
    rng = np.random.default_rng(1)
    filled = Filled(backend, device, case, rng)
    q, rows = query(case, rng), filled.rows()
    dtype = case.dtype if exact_q else "float32"
    groups = rows.table.shape[1] * filled.config.cache_config.groups_per_unit
    selected_mask = rng.random((rows.total, case.num_kv_heads, groups)) < 0.3
    selected_mask[0] = False  # a row of which nothing was visited
    got = backend.attend_rows(
        filled.cache,
        0,
        backend.from_numpy(q, dtype, device),
        rows,
        backend.from_numpy(selected_mask, "float32", device) > 0,
    )
    want = reference.attend_rows(filled.judge, 0, q.astype(np.float64), rows, selected_mask)
    out, lse, selected = (backend.to_numpy(x) for x in (got.out, got.lse, got.selected_lse))
    size = np.abs(q).sum(axis=2).max() * 5 / math.sqrt(case.head_dim)  # of a logit
    slack = 64 * 2.0**-23 * (size + 1)
    weights = 2.0**-7 if case.dtype != "float32" else 0  # kernels may round softmax weights to the cache's dtype
    assert np.abs(lse - want.lse).max() < slack
    assert np.abs(out - want.out).max() < 5 * (slack + EPS[dtype] + weights * EPS[case.dtype] * 2**7)
    np.testing.assert_array_equal(np.isneginf(selected), np.isneginf(want.selected_lse))
    there = ~np.isneginf(want.selected_lse)
    assert np.abs(selected[there] - want.selected_lse[there]).max(initial=0) < slack
    plain = backend.attend_rows(filled.cache, 0, backend.from_numpy(q, dtype, device), rows)
    assert plain.selected_lse is None
    np.testing.assert_array_equal(backend.to_numpy(plain.out), out)
    np.testing.assert_array_equal(backend.to_numpy(plain.lse), lse)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e30], ids=str)
def test_what_a_row_does_not_see_does_not_reach_it(target, poison, dtype) -> None:
    """A wrong draft may hold anything: rows before it are what they are without it."""
    backend, device = target
    case, rng = Case((150,), (6,), dtype=dtype), np.random.default_rng(3)
    filled = Filled(backend, device, case, rng)
    q = backend.from_numpy(query(case, rng), "float32", device)
    clean = backend.attend_rows(filled.cache, 0, q, filled.rows())
    for which in ("keys", "values"):
        broken = Filled(backend, device, case, np.random.default_rng(3))
        k, v = broken.keys[0].copy(), broken.values[0].copy()
        (k if which == "keys" else v)[147:] = poison
        broken.write(0, k, v)
        read = backend.attend_rows(broken.cache, 0, q, broken.rows())
        for a, b in ((read.out, clean.out), (read.lse, clean.lse)):
            np.testing.assert_array_equal(backend.to_numpy(a)[:3], backend.to_numpy(b)[:3])
        if not np.isfinite(poison):
            assert not np.isfinite(backend.to_numpy(read.out)[3:]).all(axis=(1, 2)).any(), which


def test_placed_tokens_have_no_summary(target) -> None:
    """Full groups of a unit's last owner do not count for what is placed over them; groups that go on, go on."""
    backend, device = target
    rng = np.random.default_rng(4)
    config = EpsConfig.of(method="meanstd", block_size=16, group_size=4)
    spec = CacheSpec(1, 2, 16, 4, "float32")

    def filled(*written: int) -> Any:
        cache = backend.new_cache(spec, config.cache_config, device)
        at = 0
        for count in written:
            rows = backend.from_numpy(keys[at : at + count], "float32", device)
            cache = backend.write_kv(cache, 0, rows, rows, np.arange(at, at + count))
            at += count
        return cache

    keys = rng.normal(size=(40, 2, 16)).astype(np.float32)
    cache = filled(40)
    rows = backend.from_numpy(keys[18:27] + 1, "float32", device)
    cache = backend.write_kv_tentative(cache, 0, rows, rows, np.arange(18, 27))
    plan = StepPlan.of(EpsConfig.over(config.cache_config, config.selection_config), np.arange(3)[None], np.array([40]))
    np.testing.assert_array_equal(np.flatnonzero(plan.missing(cache.state[0])[0]), [4, 5, 6])
    # a partial group, whose tokens were not placed over, is summarised as if nothing had been placed behind it
    cache, plain = filled(18), filled(18)
    cache = backend.write_kv_tentative(cache, 0, rows, rows, np.arange(18, 27))
    rest = backend.from_numpy(keys[18:22], "float32", device)
    cache, plain = (backend.write_kv(one, 0, rest, rest, np.arange(18, 22)) for one in (cache, plain))
    for name, summary in plain.summaries[0].items():
        np.testing.assert_array_equal(backend.to_numpy(cache.summaries[0][name]), backend.to_numpy(summary))
    np.testing.assert_array_equal(cache.state[0].fill, plain.state[0].fill)
    assert cache.bytes_k_reread == plain.bytes_k_reread


def test_numbers_of_rows_are_checked() -> None:
    table = np.zeros((2, 1), np.int32)
    for lengths, num_rows in (([3, 3], [1, 0]), ([3, 3], [1, 4]), ([3], [1]), ([3, 3], [1, 1, 1])):
        with pytest.raises(ValueError, match=r"rows|lengths"):
            Rows.of(table, np.array(lengths), np.array(num_rows))
    rows = Rows.of(table, np.array([5, 9]), np.array([2, 3]))
    np.testing.assert_array_equal(rows.seen, [4, 5, 7, 8, 9])
    np.testing.assert_array_equal(rows.sequence, [0, 0, 1, 1, 1])
    np.testing.assert_array_equal(rows.starts, [0, 2, 5])
