"""Dense attention of several rows of several sequences in one pass, and writes that may be taken back: every backend
and kernel against the float64 oracle, which goes row by row."""

from typing import Any

import numpy as np
import pytest
from kernel_scenes import Case, Filled, check_state, query, slack

from eps_core import reference
from eps_core.attention.layer import attend_prefill
from eps_core.backend import attention
from eps_core.config.cache import CacheSpec
from eps_core.config.eps import EpsConfig
from eps_core.cpu import kernels
from eps_core.kv_cache.rows import Rows
from eps_core.kv_cache.step_plan import StepPlan

pytestmark = pytest.mark.kernels("numba", "triton", "metal")

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
    Case((700,), (4,), num_heads=16, num_kv_heads=1, head_dim=96, group_size=16, scale_q=8.0),
    Case((64, 128), (1, 8), group_size=64, block_size=64),
    Case((300, 290), (17, 2), num_heads=8, num_kv_heads=2, head_dim=64, dtype="bfloat16", bits=(8, 4)),
    Case((150, 37), (5, 1), head_dim=34, bits=(4, 16)),
    Case((100,), (33,), num_heads=16, num_kv_heads=1, head_dim=80, dtype="bfloat16", group_size=16, block_size=64),
    Case((130, 256), (3, 17), num_heads=2, head_dim=256, dtype="bfloat16", group_size=128, block_size=128),
    Case((600, 17), (2, 1), num_heads=3, num_kv_heads=1, head_dim=33, group_size=1),  # several splits
    Case((77,), (5,), num_heads=34, head_dim=20, dtype="bfloat16", group_size=5, block_size=20),
    Case((60,), (3,), num_heads=8, head_dim=64, dtype="bfloat16", block_size=64, scale_q=0.1),
    Case((100,), (9,), num_heads=8, head_dim=128, dtype="float16", group_size=16, block_size=64, bits=(4, 8)),
    Case((90, 17), (2, 1), num_heads=3, num_kv_heads=1, head_dim=34, group_size=1, bits=(4, 4)),
    Case((100,), (5,), num_heads=2, head_dim=80, dtype="bfloat16", group_size=16, block_size=64, bits=(16, 8)),
]
ALONE = [
    Case((1111, 530, 40), (9, 4, 17), num_heads=4, num_kv_heads=1, head_dim=32, group_size=3, block_size=48),
    Case(
        (1030, 515), (17, 9), num_heads=8, num_kv_heads=1, head_dim=64, dtype="bfloat16", group_size=16, block_size=64
    ),
    Case((515, 70), (9, 4), num_heads=2, num_kv_heads=1, head_dim=64, dtype="bfloat16", group_size=16, bits=(8, 4)),
]


# queries of float32, and as short as the cache's dtype
ASKED = [(case, dtype) for case in CASES for dtype in sorted({"float32", case.dtype})]


@pytest.mark.parametrize(("case", "dtype"), ASKED, ids=str)
def test_rows_are_what_the_reference_says(target, case, dtype) -> None:
    check_rows(*target, case, dtype)


def check_rows(backend, device, case: Case, dtype: str) -> None:
    """Values; each tile of K and V read once for all rows, by kernels alone and nothing beside them."""
    filled = Filled(backend, device, case, np.random.default_rng(1))
    q, rows, rng = query(case, filled.rng, dtype=dtype), filled.rows(), filled.rng
    groups = rows.table.shape[1] * filled.config.cache_config.groups_per_unit
    selected_mask = rng.random((rows.total, case.num_kv_heads, groups)) < 0.3
    selected_mask[0] = False  # a row of which nothing was visited
    if filled.cache.kernels != "arrays":
        filled.hide(np.repeat(filled.plan.inside[:, None], case.num_kv_heads, axis=1))
    listed = backend.from_numpy(selected_mask, "float32", device) > 0
    got = backend.attend_rows(filled.cache, 0, backend.from_numpy(q, dtype, device), rows, listed)
    want = reference.attend_rows(filled.judge, 0, q.astype(np.float64), rows, selected_mask)
    out, lse, selected = (backend.to_numpy(x) for x in (got.out, got.lse, got.selected_lse))
    check_state(case, q, dtype, (out, lse), (want.out, want.lse))
    np.testing.assert_array_equal(np.isneginf(selected), np.isneginf(want.selected_lse))
    there = ~np.isneginf(want.selected_lse)
    assert np.abs(selected[there] - want.selected_lse[there]).max(initial=0) < slack(case, q), "visited mass differs"
    if filled.cache.kernels == "metal":
        check_fetched(filled, rows)
    plain = backend.attend_rows(filled.cache, 0, backend.from_numpy(q, dtype, device), rows)
    assert plain.selected_lse is None
    np.testing.assert_array_equal(backend.to_numpy(plain.out), out)
    np.testing.assert_array_equal(backend.to_numpy(plain.lse), lse)


def test_what_selected_nothing_left_everything_unread(target) -> None:
    """-inf of one query head, of all, of none."""
    backend, device = target
    lse = np.array([[-np.inf, 5], [-np.inf, -np.inf], [-3, 1e5]], np.float32)
    lse_all = np.array([[5, 5], [0, -80], [-3, 1e5]], np.float32)
    got = backend.unread_share(*(backend.from_numpy(x, "float32", device) for x in (lse, lse_all)), 2)
    np.testing.assert_array_equal(backend.to_numpy(got), [[1, 0], [1, 1], [0, 0]])


PREFILLED = [
    Case((300,), (300,), num_heads=14, num_kv_heads=2, head_dim=64, dtype="bfloat16", block_size=64),
    Case((530,), (217,), num_heads=9, num_kv_heads=3, head_dim=64, dtype="bfloat16", block_size=64),
    Case((900,), (400,), num_heads=2, num_kv_heads=2, head_dim=32),  # two blocks
    Case((70,), (1,)),
    Case((200,), (90,), num_heads=6, num_kv_heads=3, head_dim=33, dtype="float16"),
    Case((290,), (150,), num_heads=8, num_kv_heads=1, head_dim=64, block_size=64, bits=(8, 4)),
]


PROMPTS = [(case, dtype) for case in PREFILLED for dtype in sorted({"float32", case.dtype})]


@pytest.mark.kernels("numba", arrays=False)
@pytest.mark.parametrize(("case", "dtype"), PROMPTS, ids=str)
def test_a_chunk_of_a_prompt(target, case, dtype, monkeypatch) -> None:
    """Block by block by kernels, whose bits of a token do not depend on how the prompt is cut; in a table that goes on
    behind the prompt, in tasks that are merged."""
    backend, device = target
    monkeypatch.setattr(kernels, "PREFILL_TASK_TOKENS", 128)
    monkeypatch.setattr(kernels, "PREFILL_ROWS", 150)
    filled = Filled(backend, device, case, np.random.default_rng(1))
    (length,), (num_rows,) = case.lengths, case.num_rows
    q, table = query(case, filled.rng, dtype=dtype), np.append(filled.table[0], np.full(3, -1, np.int32))
    filled.hide(np.repeat(filled.plan.inside[:, None], case.num_kv_heads, axis=1))

    def outputs(first: int) -> np.ndarray:
        asked = backend.from_numpy(q[first:], dtype, device)
        return backend.to_numpy(attend_prefill(backend, filled.cache, 0, asked, table, length))

    got, want = outputs(0), reference.attend_rows(filled.judge, 0, q.astype(np.float64), filled.rows())
    check_state(case, q, dtype, (got, want.lse.astype(np.float32)), (want.out, want.lse))
    for first in {1, 37, num_rows // 2, num_rows - 1} & set(range(num_rows)):
        np.testing.assert_array_equal(outputs(first), got[first:])
    with pytest.raises(ValueError, match=f"{num_rows} tokens of 100000 in a table of"):
        attend_prefill(backend, filled.cache, 0, backend.from_numpy(q, dtype, device), table, 100_000)


def check_fetched(filled: Filled, rows: Rows) -> None:
    """Of Metal's kernel: the bytes of a dense step, loaded once for 64 queries."""
    from metal import shim

    (launch,) = (found for kernel, found in shim.last.items() if kernel.startswith("eps_attend_rows"))
    tokens = rows.lengths * filled.case.num_kv_heads
    times = -(-rows.num_rows * (filled.case.num_heads // filled.case.num_kv_heads) // 64)
    loaded = filled.row_bytes(int(tokens @ times))
    for name, listed in filled.row_bytes(int(tokens.sum())).items():
        assert launch.read[name] == listed, "bytes read are not those of a dense step"
        if name.endswith("pool") and filled.case.head_dim != 34:  # whose rows of 17 bytes are loaded in pieces
            assert launch.loaded[name] == loaded[name], "loaded more often than for 64 queries"


@pytest.mark.kernels("triton", "metal", arrays=False)
@pytest.mark.parametrize("case", ALONE, ids=str)
def test_the_bits_of_a_row_are_its_own(target, case) -> None:
    """Neither the batch, nor the other rows, nor the table's width, nor what else is asked for changes them."""
    backend, device = target
    one = Filled(backend, device, case, np.random.default_rng(1))
    rows, q = one.rows(), query(case, one.rng)
    groups = rows.table.shape[1] * one.config.cache_config.groups_per_unit
    listed = backend.from_numpy(one.rng.random((rows.total, case.num_kv_heads, groups)), "float32", device) < 0.3

    def read(q: np.ndarray, rows: Rows, listed: Any = None) -> list[np.ndarray]:
        found = backend.attend_rows(one.cache, 0, backend.from_numpy(q, "float32", device), rows, listed)
        return [backend.to_numpy(x) for x in (found.out, found.lse)]

    whole, order = read(q, rows, listed), np.arange(len(case.lengths))[::-1]
    back = np.concatenate([np.flatnonzero(rows.sequence == b) for b in order])
    turned = read(q[back], Rows.of(rows.table[order], rows.lengths[order], rows.num_rows[order]))
    for got, want in zip(turned, whole, strict=True):
        np.testing.assert_array_equal(got, want[back])
    for t in {0, 1, 7, 8, rows.total - 1, *rows.starts[:-1].tolist()}:
        b, needed = int(rows.sequence[t]), -(-int(rows.seen[t]) // case.block_size)
        for width in (needed, rows.table.shape[1] + 16000 // case.block_size):  # a second block of the merge
            table = np.full((1, width), -1, np.int32)
            table[0, :needed] = rows.table[b, :needed]
            for got, want in zip(read(q[t : t + 1], Rows.of(table, rows.seen[[t]], np.array([1]))), whole, strict=True):
                np.testing.assert_array_equal(got[0], want[t])


@pytest.mark.kernels("triton", "metal", arrays=False)
@pytest.mark.parametrize("bits", [(16, 16), (8, 4), (16, 8)], ids=str)
def test_no_array_operation_reads_what_kernels_read(target, bits, monkeypatch) -> None:
    backend, device = target
    one = Filled(backend, device, Case((40,), (5,), bits=bits), np.random.default_rng(1))

    def refuse(*args: Any) -> None:
        raise AssertionError("K and V are read by array operations")

    monkeypatch.setattr(attention, "read_kv", refuse)
    rows, q = one.rows(), backend.from_numpy(query(one.case, one.rng), "float32", device)
    backend.attend_rows(one.cache, 0, q, rows)
    assert {key[0] for key in rows._made} == {"device", "starts"}, "copied once a pass"
    backend.attend(one.cache, 0, q[:1], one.plan, None)


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
    estimate = backend.to_numpy(backend.score(cache, 0, rows[:1], plan).estimate)[0]
    assert np.isposinf(estimate[:, 4:7]).all() and np.isfinite(estimate[:, :4]).all()
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
