"""The compiled CPU kernels over K and V as codes: every value to the last bit, and attention against float64 over what
the quantiser's formula says is read. Rows are in `test_cpu_rows.py`, CPUs without AVX-512 in `test_cpu_kernels.py`."""

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from test_cpu_kernels import kernels_of, writable

from eps_core.config.cache import CacheSpec
from eps_core.config.eps import EpsConfig
from eps_core.cpu import attend as attend_cpu
from eps_core.cpu import threads as threads_cpu
from eps_core.cpu.compile import FAST, kernel
from eps_core.cpu.pool_vectors import DOT_ROWS, PREFETCH_ROWS, add_weighted, dots, widen_rows
from eps_core.cpu.vectors import HEADS
from eps_core.kv_cache.step_plan import StepPlan
from eps_core.load import load_backend
from eps_core.reference import pages as oracle_pages
from eps_core.reference.formulas import attend_keys

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
ELEMENTS = {"float32": np.float32, "float16": np.int16, "bfloat16": np.uint16}


@pytest.fixture(params=("cuda", "mlx"))
def backend(request: pytest.FixtureRequest) -> Any:
    return load_backend(request.param)


# --------------------------------------------------------------------------------------------------------------- values


@kernel(fastmath=FAST)
def read_every_way(pool, rows, count, head_dim, queries, wide, logits, sums):
    most, weights = np.empty(HEADS, np.float32), np.ones(HEADS * len(rows), np.float32)
    widen_rows(pool, rows, 0, count, head_dim, wide)
    dots(pool, rows, (count + DOT_ROWS - 1) // DOT_ROWS * DOT_ROWS, head_dim, queries, logits, most)
    own = np.empty(HEADS * head_dim, np.float32)
    for i in range(count):
        own[:] = 0
        add_weighted(pool, rows, i, i + 1, head_dim, weights, own)
        sums[i * head_dim : (i + 1) * head_dim] = own[-head_dim:]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4])
def test_values_are_the_oracles_to_the_last_bit(bits: int, dtype: str) -> None:
    """Of every code times every scale that float16 has, and of rows that are NaN, however a row is read."""
    patterns = np.arange(2**15, dtype=np.uint16)
    scale = patterns[patterns <= 0x7C00].view(np.float16)
    scale = np.append(scale, np.float16(np.nan))
    if bits == 8:
        codes, head_dim = np.tile(np.arange(-127, 128, dtype=np.int8), (len(scale), 1)), 255
    else:
        nibbles = np.concatenate([np.arange(16), np.arange(16)[::-1], np.arange(2, 8)]).astype(np.uint8)
        codes, head_dim = np.tile(nibbles[::2] | nibbles[1::2] << 4, (len(scale), 1)), len(nibbles)
    codes[~np.isfinite(scale)] = 0 if bits == 8 else 0x88  # as the quantiser leaves them: Inf times 0 is NaN
    want = oracle_pages.dequantise(codes, scale, bits, DTYPES[dtype]).astype(np.float32)
    rows = np.minimum(np.arange(len(scale) + DOT_ROWS + PREFETCH_ROWS), len(scale) - 1)
    pool = codes.reshape(-1), scale.view(np.int16), np.empty(0, ELEMENTS[dtype])
    wide, sums = (np.full(want.size, 7, np.float32) for _ in range(2))
    logits = np.empty(len(rows) * HEADS, np.float32)
    finite = np.isfinite(scale)
    for first in [*range(0, head_dim - 3, 9), head_dim - 4]:
        queries = np.zeros((HEADS, head_dim), np.float32)
        queries[np.arange(HEADS), first + np.arange(HEADS)] = 1
        read_every_way(pool, rows, len(scale), head_dim, queries.reshape(-1), wide, logits, sums)
        read = logits.reshape(-1, HEADS)[: len(scale)]
        np.testing.assert_array_equal(read[finite], want[finite, first : first + HEADS])
        assert np.isnan(read[~finite]).all()
    np.testing.assert_array_equal(wide.reshape(want.shape), want)
    np.testing.assert_array_equal(sums.reshape(want.shape), want)


# ------------------------------------------------------------------------------------------------------------ attention


@dataclass(frozen=True)
class Case:
    lengths: tuple[int, ...]
    bits: tuple[int, int]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str = "float32"
    group_size: int = 4

    def __str__(self) -> str:
        lengths, (k_bits, v_bits) = "+".join(map(str, self.lengths)), self.bits
        shape = f"{self.num_heads}q{self.num_kv_heads}kv-D{self.head_dim}-S{self.group_size}"
        return f"K{k_bits}V{v_bits}-T{lengths}-{shape}-{self.dtype}"


CASES = [
    Case((150, 37), (8, 8), 8, 2, 64),
    Case((301, 3, 64), (8, 8), 8, 8, 128, "bfloat16", 2),
    Case((530,), (4, 4), 8, 1, 128, "bfloat16"),
    Case((150, 1), (4, 4), 4, 1, 64, "float16", 16),
    Case((290, 41), (8, 4), 16, 2, 64, "bfloat16", 3),
    Case((290, 41), (4, 8), 4, 4, 128),
    Case((150, 129), (16, 4), 8, 2, 64, "bfloat16", 1),
    Case((150, 129), (4, 16), 3, 1, 64, "float16"),
    Case((300,), (8, 16), 8, 1, 128),
    Case((150, 37), (16, 8), 6, 2, 33, "bfloat16"),  # rows that begin anywhere
    Case((150, 37), (4, 4), 6, 2, 34, "bfloat16", 48),
    Case((1500,), (4, 8), 2, 1, 20, "float16"),  # several tasks
]


class Filled:
    """A cache with kernels, and what it holds as the formula says, [B][T, Hkv, D] float64 each of K and V."""

    def __init__(self, backend: Any, case: Case) -> None:
        rng = np.random.default_rng(case.head_dim + sum(case.lengths))
        self.backend, self.case = backend, case
        self.config = EpsConfig.of(
            method="box", group_size=case.group_size, num_sink_tokens=4, num_recent_tokens=8, min_context=0, budget=0.3,
            block_size=12 if case.group_size == 3 else 16,
        )  # fmt: skip
        unit = self.config.cache_config.unit_tokens
        per_sequence = -(-max(case.lengths) // unit)
        units = per_sequence * len(case.lengths) + 3
        order = rng.permutation(units)[: per_sequence * len(case.lengths)].astype(np.int32)
        self.table, self.lengths = order.reshape(len(case.lengths), -1), np.array(case.lengths)
        k_bits, v_bits = case.bits
        spec = CacheSpec(
            1, case.num_kv_heads, case.head_dim, units, case.dtype, k_bits=k_bits, v_bits=v_bits
        )  # fmt: skip
        self.cache = backend.new_cache(spec, self.config.cache_config, "cpu", "numba")
        self.places = []
        for table, length in zip(self.table, case.lengths, strict=True):
            shape = (2, length, case.num_kv_heads, case.head_dim)
            k, v = (rng.standard_normal(shape) * 10 ** rng.uniform(-1, 1, shape[:-1])[..., None]).astype(np.float32)
            tokens = np.arange(length)
            self.places.append((table[tokens // unit], tokens % unit))
            slots = self.places[-1][0].astype(np.int64) * unit + tokens % unit
            given = (backend.from_numpy(x, case.dtype, "cpu") for x in (k, v))
            self.cache = backend.write_kv(self.cache, 0, *given, slots)
        self.q = rng.standard_normal((len(case.lengths), case.num_heads, case.head_dim)).astype(np.float32)
        self.native = backend.from_numpy(self.q, "float32", "cpu")
        self.plan = StepPlan.of(self.config, self.table, self.lengths)

    def held(self) -> list[list[np.ndarray]]:
        """K and V of each sequence [T, Hkv, D] float64."""
        found = []
        for pool, bits in zip((self.cache.k[0], self.cache.v[0]), self.case.bits, strict=True):
            if bits == 16:
                values = np.asarray(self.backend.to_numpy(pool))
            else:
                codes, scale = (self.backend.to_numpy(x) for x in (pool.codes, pool.scale))
                if bits == 4:
                    pairs = np.stack([codes % 16, codes // 16], axis=-1).astype(np.float32) - 8
                    codes = pairs.reshape(*codes.shape[:-1], -1)
                values = codes.astype(np.float32) * scale.astype(np.float32)[..., None]
                values = values.astype(DTYPES[self.case.dtype])
            found.append([values[units, :, offsets].astype(np.float64) for units, offsets in self.places])
        return found

    def tokens(self, selection: Any, b: int, h: int) -> np.ndarray:
        """Listed tokens of a sequence and kv head."""
        if selection is None:
            return np.arange(self.lengths[b])
        size = self.case.group_size
        groups, counts = (self.backend.to_numpy(x) for x in (selection.groups, selection.counts))
        listed = (groups[b, h, : counts[b, h], None] * size + np.arange(size)).reshape(-1)
        return listed[listed < self.lengths[b]]


def check(filled: Filled, selection: Any, state: Any) -> None:
    """(out, lse) against float64 over the tokens of the selection."""
    case, (keys, values) = filled.case, filled.held()
    out, lse = (filled.backend.to_numpy(x).astype(np.float64) for x in state)
    repeat = case.num_heads // case.num_kv_heads
    for b, head in np.ndindex(len(case.lengths), case.num_heads):
        tokens = filled.tokens(selection, b, head // repeat)
        k, v = (x[b][tokens, head // repeat] for x in (keys, values))
        want, mass = attend_keys(filled.q[b, head].astype(np.float64) / math.sqrt(case.head_dim), k, v)
        terms = np.abs(k).max(axis=0) @ np.abs(filled.q[b, head]) / math.sqrt(case.head_dim)
        slack = 8 * 2.0**-23 * (terms + 4)  # of a logit's float32 sum, and of exp
        assert abs(lse[b, head] - mass) <= slack
        assert np.abs(out[b, head] - want).max() <= 2 * slack * np.abs(v).max()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_is_over_what_codes_say(backend, case, threads, monkeypatch) -> None:
    """Sparse and dense, by the kernels themselves; the plan counts the bytes that codes take."""
    filled, ran = Filled(backend, case), []
    monkeypatch.setattr(threads_cpu, "num_threads", lambda: threads)

    def run(one: Any, phases: int, *args: Any, alone: bool = False) -> None:
        ran.append(one)
        threads_cpu.run(one, phases, *args, alone=alone)

    monkeypatch.setattr(kernels_of(backend), "run", run)
    selection = backend.select(backend.score(filled.cache, 0, filled.native, filled.plan), filled.plan)
    for chosen in (selection, None):
        ran.clear()
        state = backend.attend(filled.cache, 0, filled.native, filled.plan, chosen)
        assert ran == [attend_cpu.attend]
        check(filled, chosen, state)
    row = {
        16: case.head_dim * np.dtype(DTYPES[case.dtype]).itemsize,
        8: case.head_dim + 2,
        4: case.head_dim // 2 + 2,
    }
    spec, token_bytes = filled.cache.spec, sum(row[bits] for bits in case.bits)
    assert filled.plan.kv_bytes(spec, 3) == 3 * case.group_size * token_bytes
    assert filled.plan.dense_kv_bytes(spec) == int(filled.lengths.sum()) * case.num_kv_heads * token_bytes


def test_kernels_are_asked_for_codes_that_they_know(backend) -> None:
    """Others are read by array operations; writes of codes are array operations, scores read summaries alone."""
    table = kernels_of(backend).table()

    def unsupported(one: Any, *bits: Any) -> Any:
        spec = SimpleNamespace(quantised=True, k_bits=bits[0], v_bits=bits[1])
        return one.unsupported(SimpleNamespace(spec=spec))

    for one in (table.attend, table.attend_rows):
        for bits in ((8, 8), (4, 16), (16, 4)):
            assert unsupported(one, *bits) is None
        for bits in (("another", 8), (16, "another")):
            assert unsupported(one, *bits) == "K in {} and V in {}".format(*bits)
    assert table.write_kv is None and table.score is not None


@pytest.mark.parametrize("bits", [(8, 8), (4, 4), (16, 4)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_was_not_written_is_not_read(backend, bits, dtype) -> None:
    """Any code with a scale of NaN behind the last token changes nothing."""
    filled = Filled(backend, Case((301, 258), bits, 4, 2, 20, dtype))
    at = (filled.cache, 0, filled.native, filled.plan)
    selection = backend.select(backend.score(*at), filled.plan)
    before = [backend.attend(*at, chosen) for chosen in (selection, None)]
    unit = filled.config.cache_config.unit_tokens
    with writable(backend):
        for table, length in zip(filled.table, filled.lengths, strict=True):
            last, offset = int(table[(length - 1) // unit]), int(length % unit)
            for pool in (filled.cache.k[0], filled.cache.v[0]):
                if hasattr(pool, "codes"):
                    pool.codes[last, :, offset:], pool.scale[last, :, offset:] = 85, float("nan")
                else:
                    pool[last, :, offset:] = float("nan")
    for one, chosen in zip(before, (selection, None), strict=True):
        for a, b in zip(backend.attend(*at, chosen), one, strict=True):
            np.testing.assert_array_equal(backend.to_numpy(a), backend.to_numpy(b))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_value_that_is_no_number_makes_its_readers_nan(backend, bits, dtype) -> None:
    """As over 16 bits; NaN in K is refused before anybody reads it."""
    filled = Filled(backend, Case((90,), (bits, bits), 4, 2, 36, dtype))
    with writable(backend):
        filled.cache.v[0].scale[int(filled.table[0, 1]), 1, 3] = float("nan")
    out, lse = backend.attend(filled.cache, 0, filled.native, filled.plan, None)
    out = backend.to_numpy(out)
    assert np.isnan(out[0, 2:]).all() and np.isfinite(out[0, :2]).all() and np.isfinite(backend.to_numpy(lse)).all()
