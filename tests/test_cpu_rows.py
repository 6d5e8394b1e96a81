"""The compiled kernels of dense attention over several rows, portable and on tile registers: against the float64
oracle, and the promise that a row's bits are its own."""

import importlib
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from kernel_scenes import Case, Filled, query
from test_cpu_kernels import kernels_of

from eps_core import reference
from eps_core.cpu import amx, rows_amx
from eps_core.cpu import rows as portable
from eps_core.cpu.blocks import powers
from eps_core.cpu.compile import kernel
from eps_core.kv_cache.rows import Rows
from eps_core.load import load_backend


@kernel()
def powers_of_all(x):
    powers(x, len(x))


# what tile registers take: bfloat16, whole steps of 32 channels, units of whole tiles
TILED = [
    Case((150, 37, 64), (9, 1, 5), num_heads=8, num_kv_heads=2, head_dim=64, dtype="bfloat16"),
    Case((1100,), (17,), num_heads=8, num_kv_heads=2, head_dim=128, dtype="bfloat16", block_size=64),
    Case((9, 3), (9, 3), num_heads=3, num_kv_heads=3, head_dim=32, dtype="bfloat16"),
    Case((1300, 129), (33, 128), num_heads=6, num_kv_heads=1, head_dim=96, dtype="bfloat16", group_size=16),
    Case((700,), (5,), num_heads=20, num_kv_heads=2, head_dim=32, dtype="bfloat16", group_size=48, block_size=48),
    Case((290,), (4,), num_heads=2, num_kv_heads=1, head_dim=64, dtype="bfloat16", group_size=64, scale_q=15.0),
]
OTHERS = [
    Case((1100, 40), (5, 2), num_heads=14, num_kv_heads=2, head_dim=64, dtype="float16"),
    Case((1300, 129), (9, 128), num_heads=5, num_kv_heads=1, head_dim=33, group_size=3, block_size=12),
    Case((300,), (33,), num_heads=8, num_kv_heads=2, head_dim=80, dtype="bfloat16", group_size=1),
    Case((300,), (3,), num_heads=4, num_kv_heads=2, head_dim=64, dtype="bfloat16", group_size=3, block_size=12),
    Case((1100, 40), (5, 2), num_heads=8, num_kv_heads=1, head_dim=128, dtype="bfloat16", bits=(8, 4)),
    Case((290,), (4,), num_heads=6, num_kv_heads=2, head_dim=34, dtype="float16", bits=(4, 16)),
    Case((290, 37), (4, 3), num_heads=4, num_kv_heads=4, head_dim=33, bits=(16, 8)),
]
needs_tiles = pytest.mark.skipif(not amx.usable(), reason="no AMX on this machine")
ARMS = [
    *(pytest.param(case, True, id=f"tiles-{case}", marks=needs_tiles) for case in TILED),
    *(pytest.param(case, False, id=f"portable-{case}") for case in TILED + OTHERS),
]


@pytest.fixture(params=("cuda", "mlx"))
def backend(request: pytest.FixtureRequest):
    return load_backend(request.param)


class Chosen:
    """Runs `attend_rows` with kernels, on tile registers or without, on several threads or on one, and sees which."""

    def __init__(self, backend: Any, tiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        from eps_core.cpu import threads

        if not tiles:
            monkeypatch.setattr(amx, "usable", lambda: False)
        self.backend, self.alone, self.ran = backend, False, set()
        self.kernels = kernels_of(backend)
        self.expected = rows_amx.attend_rows if tiles else portable.attend_rows

        def run(kernel: Any, phases: int, *args: Any, alone: bool = False) -> None:
            self.ran.add(kernel)
            threads.run(kernel, phases, *args, alone=self.alone or alone)

        monkeypatch.setattr(threads, "num_threads", lambda: 3)
        monkeypatch.setattr(self.kernels, "run", run)

    def __call__(
        self, cache: Any, q: np.ndarray, rows: Rows, selected_mask: np.ndarray | None = None, dtype: str = "float32"
    ) -> list[np.ndarray]:
        listed = (
            None
            if selected_mask is None
            else self.backend.from_numpy(selected_mask.astype(np.float32), "float32", "cpu") > 0
        )
        read = self.backend.attend_rows(cache, 0, self.backend.from_numpy(q, dtype, "cpu"), rows, listed)
        assert self.ran == {self.expected}
        return [self.backend.to_numpy(x) for x in (read.out, read.lse, read.selected_lse) if x is not None]


def filled_of(backend: Any, case: Case, seed: int = 1) -> Filled:
    filled = Filled(backend, "cpu", case, np.random.default_rng(seed))
    filled.cache = replace(filled.cache, kernels="numba")
    return filled


@pytest.mark.parametrize(("case", "tiles"), ARMS)
def test_rows_are_as_exact_as_float32(backend, case, tiles, monkeypatch) -> None:
    """Queries of float32 and of the cache's own dtype, over keys as they are stored: no term of bfloat16's error."""
    filled, rng = filled_of(backend, case), np.random.default_rng(2)
    attend, rows = Chosen(backend, tiles, monkeypatch), filled.rows()
    shape = rows.total, case.num_kv_heads, rows.table.shape[1] * filled.config.cache_config.groups_per_unit
    selected_mask = rng.random(shape) < 0.2
    selected_mask[1:2] = True
    short = query(case, rng)
    for q, dtype in ((short, case.dtype), (rng.normal(size=short.shape).astype(np.float32) * case.scale_q, "float32")):
        want = reference.attend_rows(filled.judge, 0, q.astype(np.float64), rows, selected_mask)
        out, lse, selected = attend(filled.cache, q, rows, selected_mask, dtype)
        slack = 64 * 2.0**-23 * (np.abs(q).sum(axis=2).max() * 5 / math.sqrt(case.head_dim) + 1)
        rounding = {"float32": 2.0**-22, "float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype]  # of what is returned
        assert np.abs(out - want.out).max() < 5 * (slack + 2.0**-16 + rounding)
        for a, b in ((lse, want.lse), (selected, want.selected_lse)):
            np.testing.assert_array_equal(np.isneginf(a), np.isneginf(b))
            there = ~np.isneginf(b)
            assert np.abs(a[there] - b[there]).max(initial=0) < slack
        for one, other in zip(attend(filled.cache, q, rows, dtype=dtype), (out, lse), strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(("case", "tiles"), ARMS)
def test_the_bits_of_a_row_are_its_own(backend, case, tiles, monkeypatch) -> None:
    """Whatever rows and sequences are there, and however many threads."""
    filled, rng = filled_of(backend, case), np.random.default_rng(2)
    attend, rows = Chosen(backend, tiles, monkeypatch), filled.rows()
    q = rng.normal(size=(rows.total, case.num_heads, case.head_dim)).astype(np.float32) * case.scale_q
    whole = attend(filled.cache, q, rows)
    attend.alone = True
    for one, other in zip(attend(filled.cache, q, rows), whole, strict=True):
        np.testing.assert_array_equal(one, other)
    attend.alone = False
    last = len(case.lengths) - 1
    for t in {0, 1, rows.total // 2, rows.total - 1} & set(range(rows.total)):
        b = int(rows.sequence[t])
        for before in {0, min(2, t - int(rows.starts[b]))}:
            # the row alone, or as the last of three
            alone = Rows.of(rows.table[[b]], rows.seen[[t]], np.array([before + 1]))
            # and behind another sequence's
            batch = Rows.of(
                rows.table[[last, b]], np.array([rows.lengths[last], rows.seen[t]]), np.array([1, before + 1])
            )
            for given, asked in ((alone, q[t - before : t + 1]), (batch, q[[-1, *range(t - before, t + 1)]])):
                for one, other in zip(attend(filled.cache, asked, given), whole, strict=True):
                    np.testing.assert_array_equal(one[-1], other[t])


@pytest.mark.parametrize(("case", "tiles"), ARMS[:3] + ARMS[-4:])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 1e30], ids=str)
def test_what_a_row_does_not_see_does_not_reach_it(backend, case, tiles, poison, monkeypatch) -> None:
    filled, rng = filled_of(backend, case), np.random.default_rng(2)
    attend, rows = Chosen(backend, tiles, monkeypatch), filled.rows()
    if rows.num_rows[0] < 3:
        pytest.fail("a case of too few rows shows nothing")
    q = rng.normal(size=(rows.total, case.num_heads, case.head_dim)).astype(np.float32)
    poison = min(poison, 6e4) if case.dtype == "float16" and np.isfinite(poison) else poison
    clean = attend(filled.cache, q, rows)
    hidden = rows.seen >= rows.lengths[0] - 1  # who sees the last but one of the first sequence
    hidden &= rows.sequence == 0
    for which in ("keys", "values"):
        broken = filled_of(backend, case)
        k, v = broken.keys[0].copy(), broken.values[0].copy()
        (k if which == "keys" else v)[rows.lengths[0] - 2, :, 1:3] = [poison, -poison]
        broken.write(0, k, v)
        read = attend(broken.cache, q, rows)
        for one, other in zip(read, clean, strict=True):
            np.testing.assert_array_equal(one[~hidden], other[~hidden])
        if not np.isfinite(poison) and which == "values":
            assert not np.isfinite(read[0][hidden]).all(axis=2).any()


@pytest.mark.parametrize("tiles", [pytest.param(True, marks=needs_tiles), False], ids=["tiles", "portable"])
def test_pools_of_engines(tiles, monkeypatch) -> None:
    """K and V of a token side by side, heads before tokens or behind: the same bits as from contiguous pools."""
    torch, eps_cuda = importlib.import_module("torch"), load_backend("cuda")
    case = Case((290, 60), (9, 4), num_heads=8, num_kv_heads=2, head_dim=64, dtype="bfloat16")
    filled, rng = filled_of(eps_cuda, case), np.random.default_rng(2)
    attend, rows = Chosen(eps_cuda, tiles, monkeypatch), filled.rows()
    q = rng.normal(size=(rows.total, case.num_heads, case.head_dim)).astype(np.float32)
    want = attend(filled.cache, q, rows)
    k, v = filled.cache.k[0], filled.cache.v[0]
    units, heads, tokens, dim = k.shape
    for order in ((0, 1, 2), (0, 2, 1)):
        shape = [(units, heads, tokens)[i] for i in order]
        base = torch.full((*shape, 2 * dim), torch.nan, dtype=k.dtype).permute(*order, 3)
        with torch.inference_mode():
            base[..., :dim], base[..., dim:] = k, v
        strided = replace(filled.cache, k=[base[..., :dim]], v=[base[..., dim:]])
        for one, other in zip(attend(strided, q, rows), want, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("tiles", [pytest.param(True, marks=needs_tiles), False], ids=["tiles", "portable"])
def test_weights_are_rounded_to_either_side(tiles, monkeypatch) -> None:
    """Values of 1 give a mean of 1: what is cut off of every weight would show."""
    eps_cuda = load_backend("cuda")
    filled, rng = filled_of(eps_cuda, TILED[0]), np.random.default_rng(2)
    filled.cache.v[0] = filled.cache.v[0] * 0 + 1
    attend, rows = Chosen(eps_cuda, tiles, monkeypatch), filled.rows()
    q = rng.normal(size=(rows.total, TILED[0].num_heads, TILED[0].head_dim)).astype(np.float32)
    assert abs(attend(filled.cache, q, rows)[0].mean(dtype=np.float64) - 1) < 5e-7


@needs_tiles
def test_weights_of_one_part_are_those_of_a_prompt_in_bfloat16(backend, monkeypatch) -> None:
    """Each has 8 bits, rounded to either side; queries of more, and rows that are verified, keep 16."""
    case, seen = TILED[1], []
    filled, rng, kernels = filled_of(backend, case), np.random.default_rng(2), kernels_of(backend)
    run = kernels.run
    monkeypatch.setattr(kernels, "run", lambda kernel, *args, **more: (seen.append(args), run(kernel, *args, **more)))
    q, rows, table = query(case, rng), filled.rows(), filled.table[0]
    for dtype, parts, weight_parts in (("bfloat16", 1, 1), ("float32", 3, 2)):
        native = backend.from_numpy(q, dtype, "cpu")
        out = backend.to_numpy(kernels.attend_prefill(filled.cache, 0, native, table, case.lengths[0]))
        assert seen[-1][2:4] == (parts, weight_parts)
        read = kernels.attend_rows(filled.cache, 0, native, rows, weight_parts=weight_parts)
        np.testing.assert_allclose(out, backend.to_numpy(read.out), rtol=2.0**-7, atol=2.0**-9)
    kernels.attend_rows(filled.cache, 0, backend.from_numpy(q, "bfloat16", "cpu"), rows)
    assert seen[-1][2:4] == (1, 2)
    native, values = backend.from_numpy(q, "float32", "cpu"), np.abs(backend.to_numpy(filled.cache.v[0])).max()
    one, two = (kernels.attend_rows(filled.cache, 0, native, rows, weight_parts=parts) for parts in (1, 2))
    apart = np.abs(backend.to_numpy(one.out) - backend.to_numpy(two.out)).max()
    assert 2.0**-14 * values < apart < 2.0**-8 * values
    np.testing.assert_array_equal(backend.to_numpy(one.lse), backend.to_numpy(two.lse))
    filled.cache.v[0] = filled.cache.v[0] * 0 + 1
    out = backend.to_numpy(kernels.attend_rows(filled.cache, 0, native, rows, weight_parts=1).out)
    assert abs(out.mean(dtype=np.float64) - 1) < 2.0**-12


def test_powers_of_two_vanish_below_their_limit_and_nan_stays():
    odd = [0, -1, -126, -126.5, -126.6, -127, -1e30, -np.inf, np.nan]
    x = np.array([*odd, *np.random.default_rng(0).uniform(-126, 0, 1024 - len(odd))], np.float32)
    found = x.copy()
    powers_of_all(found)
    assert np.isnan(found[8]) and (found[4:8] == 0).all() and (found[[0, 1, 2]] == [1, 0.5, 2.0**-126]).all()
    there = np.r_[0:4, 9 : len(x)]
    np.testing.assert_allclose(found[there], np.exp2(x[there].astype(np.float64)), rtol=1.2e-7, atol=2.0**-149)
