"""The compiled CPU kernels over K and V as codes: every value to the last bit, and which codes they know. Attention is
tested with all kernels, in test_kernel_attention.py; CPUs without AVX-512 in test_cpu_kernels.py."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from conftest import bound
from kernel_scenes import Case, Filled, changed, query
from test_cpu_kernels import kernels_of

from eps_core.backend.pages import arrays_of
from eps_core.config.cache import CacheSpec
from eps_core.config.eps import EpsConfig
from eps_core.cpu.compile import FAST, kernel
from eps_core.cpu.pool_vectors import DOT_ROWS, PREFETCH_ROWS, add_weighted, dots, widen_rows
from eps_core.cpu.vectors import HEADS
from eps_core.cpu.write import put_row
from eps_core.load import load_backend
from eps_core.reference import codes as oracle_codes
from eps_core.reference import pages as oracle_pages

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
ELEMENTS = {"float32": np.float32, "float16": np.int16, "bfloat16": np.uint16}


@pytest.fixture(params=("cuda", "mlx"))
def backend(request: pytest.FixtureRequest) -> Any:
    return bound(request.param, "numba")


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


@kernel()
def put_rows(pool, rows, finite):
    for i in range(len(rows)):
        finite[i] = put_row(pool, i, rows[i])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4])
def test_codes_are_the_oracles(bits: int, dtype: str) -> None:
    """A compiled write makes the codes and scales of the reference, of rows of every size, NaN and Inf among them."""
    rng, most = np.random.default_rng(0), 127.0 if bits == 8 else 7.0
    x = (rng.normal(size=(2000, 34)) * 10.0 ** rng.integers(-45, 38, (2000, 1))).astype(np.float32)
    x[:8] = 0
    x[1, 3], x[2, 5], x[3, 0], x[4, 1], x[5, 7], x[6, 2] = np.nan, -np.inf, 2.0**-127, 65504 * most, -65505 * most, 1e-4
    x[7, 3] = 2.0**-126
    with np.errstate(over="ignore"):
        rows = x.astype(DTYPES[dtype])
    want, scale = oracle_codes.quantise(rows, bits)
    element = ELEMENTS[dtype]
    for given in (rows.view(element), *([x] if dtype == "bfloat16" else [])):  # rounded as it is written
        codes, scales, finite = np.full_like(want, 77), np.zeros(len(x), np.int16), np.zeros(len(x), bool)
        put_rows((codes.reshape(-1), scales, np.empty(0, element)), given, finite)
        np.testing.assert_array_equal(scales.view(np.float16), scale)
        np.testing.assert_array_equal(codes, want)
        np.testing.assert_array_equal(finite, np.isfinite(scale))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_bits", [(8, 4), (4, 16), (16, 8)])
def test_a_write_leaves_what_array_operations_leave(kv_bits: tuple[int, int], dtype: str) -> None:
    """Codes, and summaries of keys as they are stored: of a write that holds all of them, and of the last one."""
    backend, config, found = load_backend("cuda"), EpsConfig.of(method="rq"), []
    k, v = np.random.default_rng(0).normal(size=(2, 128, 2, 16)).astype(np.float32)
    for kernels in ("numba", "arrays"):
        spec = CacheSpec(1, 2, 16, 2, dtype, k_bits=kv_bits[0], v_bits=kv_bits[1])
        cache = backend.new_cache(spec, config.cache_config, "cpu", kernels)
        for first, last in ((0, 64), (64, 124), *((token, token + 1) for token in range(124, 128))):
            rows = (backend.from_numpy(one[first:last], "float32", "cpu") for one in (k, v))
            cache = backend.write_kv(cache, 0, *rows, np.arange(first, last))
        assert cache.state[0].valid(np.arange(2)).all()
        pools = (array for pool in (cache.k[0], cache.v[0]) for array in arrays_of(pool))
        found.append([*pools, *cache.summaries[0].values()])
    assert all(one.equal(other) for one, other in zip(*found, strict=True))


def test_kernels_are_asked_for_codes_that_they_know(backend) -> None:
    """Others are read and written by array operations; scores read summaries alone."""
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


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_value_that_is_no_number_makes_its_readers_nan(backend, bits, dtype) -> None:
    """As over 16 bits; NaN in K is refused before anybody reads it."""
    case = Case((90,), head_dim=36, dtype=dtype, bits=(bits, bits))
    one = Filled(backend, "cpu", case, np.random.default_rng(1))
    broken = np.zeros(one.cache.v[0].scale.shape, bool)
    broken[int(one.table[0, 1]), 1, 3] = True
    one.cache.v[0] = replace(one.cache.v[0], scale=changed(one.cache.v[0].scale, broken, np.full((), np.nan)))
    q = backend.from_numpy(query(case, one.rng, 1), "float32", "cpu")
    out, lse = (backend.to_numpy(x) for x in backend.attend(one.cache, 0, q, one.plan, None))
    assert np.isnan(out[0, 2:]).all() and np.isfinite(out[0, :2]).all() and np.isfinite(lse).all()
