"""What is Metal's own in its kernels: grids, bytes that are loaded, rounded queries to the bit, and whether Metal's
front end takes every text. Values are tested with all kernels, in test_kernel_*.py and test_rows.py."""

from collections.abc import Callable
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from conftest import bound
from kernel_scenes import Case, Filled, query, selection_of
from metal import shim
from metal.shim import metal_shim  # noqa: F401
from test_conformance import Case as CacheCase
from test_conformance import FilledCase, eps
from test_kernel_scores import CASES as SCORES
from test_kernel_scores import KV_HEADS
from test_kernel_scores import Case as ScoreCase
from test_kernel_scores import Filled as Summaries
from test_kernel_select import check_topk, written_once

from eps_core.summaries import rq as oracle
from eps_mlx.kernels import attend, launch, select, turn_units, units, write

METAL = bound("mlx", "metal")
SEED = 3


def attended(case: Case, listed: np.ndarray | None = None) -> Filled:
    one = Filled(METAL, "cpu", case, np.random.default_rng(1))
    q = mx.array(query(case, one.rng, len(case.lengths))).astype(mx.float16)
    METAL.attend(one.cache, 0, q, one.plan, selection_of(q, one.listed() if listed is None else listed))
    return one


# Grids and bytes


def test_splits_follow_the_capacity_of_the_list(metal_shim: Any) -> None:  # noqa: F811
    """A list with room for much more than it holds is read by more threadgroups, most of which find nothing."""
    case = Case((5000, 3), num_heads=4, num_kv_heads=1, head_dim=64, dtype="float16", block_size=64)
    one = Filled(METAL, "cpu", case, np.random.default_rng(1))
    q = mx.array(query(case, one.rng, 2)).astype(mx.float16)
    groups = np.full((2, 1, one.plan.num_groups), -1, np.int32)
    groups[0, 0, :40] = np.arange(40) * 50
    counts, table, lengths = (np.array(x, np.int32) for x in ([[40], [0]], one.table, one.lengths))
    out, _ = attend.attend_groups(
        q, one.cache.k[0], one.cache.v[0], *(mx.array(x) for x in (table, lengths, groups, counts)), group_size=2
    )
    splits = metal_shim["eps_attend_decode"].threadgroups // 2
    assert splits == attend.num_splits(2, one.plan.num_groups * 2, 256) > 1
    listed = groups[:, :, :40] >= 0
    short = selection_of(q, np.stack([np.isin(np.arange(one.plan.num_groups), groups[b])[None] for b in range(2)]))
    again, _ = METAL.attend(one.cache, 0, q, one.plan, short)
    assert listed.any() and metal_shim["eps_attend_decode"].threadgroups < 2 * splits
    assert np.abs(np.array(out) - np.array(again)).max() < 2e-3 and not np.array(out)[1].any()


@pytest.mark.parametrize("repeat, passes", [(4, 1), (8, 2)])
def test_rows_are_loaded_once_for_four_heads(metal_shim: Any, repeat: int, passes: int) -> None:  # noqa: F811
    case = Case((512,), num_heads=repeat, num_kv_heads=1, head_dim=128, dtype="bfloat16", block_size=64)
    one = attended(case, np.arange(256)[None, None] < 100)
    decode = metal_shim["eps_attend_decode"]
    for name, listed in one.row_bytes(200).items():
        assert decode.read[name] == listed and decode.loaded[name] == passes * listed


def test_the_grid_ignores_how_many_groups_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    case, grids = Case((301, 64, 7), num_heads=8, head_dim=64, block_size=64), []
    for count in (3, 150):
        calls = record(monkeypatch)
        listed = np.arange(320)[None, None] < np.array([[150, count], [32, 1], [1, 0]])[..., None]
        attended(case, listed)
        grids.append([(kernel.name, tuple(template.items()), grid) for kernel, template, *_, grid in calls])
    assert grids[0] == grids[1]


def test_selection_stops_early_on_distinct_estimates(metal_shim: Any) -> None:  # noqa: F811
    """Two digits decide: two passes of counting, one of places, one that lists."""
    check_topk(METAL, "cpu", lengths=(1400,), size=1, first=0, last=0, kv_heads=1)
    seen = metal_shim["eps_select_topk"]
    assert seen.loaded["image"] <= 4 * seen.read["image"] == 4 * 1400 * 4


@pytest.mark.parametrize("cascade", [(), (0.25,), (0.5, 0.2)], ids=str)
def test_codes_are_read_once_and_further_parts_of_listed_groups_only(cascade, metal_shim) -> None:  # noqa: F811
    one = Summaries(ScoreCase(128, 4, mean_tokens=64, cascade=cascade, num_units=7))
    one.estimate(METAL, "cpu")
    groups = int(np.isfinite(one.expected()).sum())
    seen, part = metal_shim["eps_score_units"], 16 >> len(cascade)
    assert seen.read["codes"] == seen.loaded["codes"] == groups * part and groups
    assert seen.read["mean"] == seen.loaded["mean"] == groups // 32 * 128
    assert seen.read["scale"] == groups and seen.read["mean_scale"] == groups // 32 * 2
    listed, seen = KV_HEADS * int(one.plan.rescored.sum()), metal_shim["eps_read_on"]
    assert seen.read["second"] == seen.loaded["second"] == listed * 16 and seen.read["scale"] == listed
    if cascade:
        one = Summaries(ScoreCase(128, 4, mean_tokens=64, cascade=cascade, rescore=0.0, num_units=7))
        one.estimate(METAL, "cpu")
        listed, seen = KV_HEADS * int(one.plan.cascaded(128)[-1].sum()), metal_shim["eps_read_on"]
        assert seen.read["rest"] == seen.loaded["rest"] == listed * 8 and seen.read["codes"] == listed * part


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32], ids=str)
@pytest.mark.parametrize("head_dim", [16, 20, 33, 80, 96, 128, 256])
def test_queries_are_turned_and_rounded_to_the_bit(dtype: mx.Dtype, head_dim: int, metal_shim: Any) -> None:  # noqa: F811
    repeat = 1 if head_dim > 100 else 2
    q = (3 * np.random.default_rng(0).normal(size=(2, KV_HEADS * repeat, head_dim))).astype(np.float32)
    q[0, 0] = 0
    found = turn_units.turn_units(mx.array(q).astype(dtype), mx.array(oracle.rq_signs(SEED, head_dim)), KV_HEADS)
    held = np.array(mx.array(q).astype(dtype).astype(mx.float32))
    parts = {name: np.array(part) for name, part in found._asdict().items() if part is not None}
    for b, row in np.ndindex(*held.shape[:2]):
        place = b, row // repeat, row % repeat
        turned = oracle.rotate_query(held[b, row] * np.float32(head_dim**-0.5), SEED)
        rounded, step = oracle.rounded_query(turned)
        assert np.array_equal(parts["turned"][place], turned)
        assert np.array_equal(parts["rounded"][place], rounded) and parts["step"][place] == step
    assert np.abs(parts["rounded"]).max() == oracle.QUERY_STEPS
    written_once("metal", "eps_turn_units", **parts)


def test_more_query_heads_than_threadgroup_memory_holds_are_refused() -> None:
    shape, places = (1, KV_HEADS, 24, 256), [mx.zeros((1, 1), mx.int32)] * 3
    asked = turn_units.Query(mx.zeros(shape), mx.zeros(shape), mx.zeros(shape[:3]))
    summary = {name: mx.array(x) for name, x in Summaries(ScoreCase(256, 24, cascade=(), num_units=1)).pools.items()}
    with pytest.raises(ValueError, match="49152 bytes of threadgroup memory"):
        units.score_units(asked, summary, *places, group_size=2, sums=False)


# Texts


def record(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """(kernel, template, inputs, dtypes of outputs, grid) of every launch from now on, which computes zeros."""
    calls: list[tuple] = []

    def run(kernel: Any, inputs: Any, template: Any, grid: Any, group: Any, shapes: Any, dtypes: Any) -> list[mx.array]:
        calls.append((kernel, template, inputs, list(dtypes), grid))
        return [mx.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]

    monkeypatch.setattr(launch, "runner", run)
    return calls


@cache
def launched() -> list[tuple]:
    """Every kernel, for inputs of fewer than 8 elements, which are `constant`, and more, which are `device`."""
    with pytest.MonkeyPatch.context() as patch:
        calls = record(patch)
        for batch, heads, head_dim, dtype, bits in (
            (1, 8, 64, "float32", (16, 16)),
            (9, 16, 128, "bfloat16", (16, 16)),
            (1, 2, 33, "float16", (16, 16)),
            (1, 8, 64, "float32", (8, 4)),
            (9, 16, 128, "bfloat16", (4, 8)),
            (1, 2, 34, "float16", (16, 4)),
        ):
            case = Case((65,) * batch, (3,) * batch, heads, head_dim=head_dim, dtype=dtype, block_size=64, bits=bits)
            one = Filled(METAL, "cpu", case, np.random.default_rng(1))
            q = METAL.from_numpy(query(case, one.rng), dtype, "cpu")
            for selection in (selection_of(q, one.listed()), None):
                METAL.attend(one.cache, 0, q[:batch], one.plan, selection)
            rows, groups = one.rows(), one.plan.num_groups
            for listed in (None, mx.zeros((rows.total, case.num_kv_heads, groups), mx.bool_)):
                METAL.attend_rows(one.cache, 0, q, rows, listed)
        for name in ("one unit", "usual", "odd head dim", "three parts", "two groups a unit", "summed", "whole codes"):
            Summaries(SCORES[name]).estimate(METAL, "cpu")
        turn_units.turn_units(mx.zeros((1, 2, 64), mx.bfloat16), mx.zeros(64), 1)
        for lengths, scope in (((65, 40), "union"), ((65,), "kv-head"), ((65,) * 9, "kv-head")):
            full = FilledCase(METAL, "cpu", CacheCase(lengths, eps("meanstd", group_size=2, scope=scope)))
            METAL.select(METAL.score(full.cache, 0, full.native, full.plan), full.plan)
    return [call[:4] for call in calls]


def texts() -> dict[str, str]:
    """Text -> its kernel's name."""
    return {shim.generated_text(kernel, inputs, template, dtypes): kernel.name
            for kernel, template, inputs, dtypes in launched()}  # fmt: skip


def test_clang_accepts_every_text() -> None:
    clang_check = pytest.importorskip("metal.clang_check", reason="libclang is absent", exc_type=ImportError)
    found = texts()
    assert {name.split("_k")[0].split("_v")[0] for name in found.values()} == {
        "eps_attend_decode", "eps_attend_rows", "eps_attend_merge", "eps_score_units", "eps_read_on",
        "eps_turn_units", "eps_select_topk", "eps_select_best", "eps_compact", "eps_write",
    }  # fmt: skip
    assert [f"{name} {line}" for text, name in found.items() for line in clang_check.diagnostics(text)] == []


BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
# name: (what Metal refuses, what clang says of it)
CONTROLS: dict[str, tuple[Callable[[str], str], str]] = {
    "undeclared": (lambda text: text.replace("part_mass[at] = top;", "part_max[at] = top;"), "undeclared identifier"),
    "device-from-constant": (
        lambda text: text.replace("const int length = lengths[b];", "const device int* at_b = lengths + b;"),
        "'const __constant int",
    ),
    "thread-from-threadgroup": (
        lambda text: text.replace(BARRIER, "float* all = shared_mass; " + BARRIER, 1),
        "'__local float",
    ),
    "min-of-two-types": (
        lambda text: text.replace("min(base + lane, end - 1)", "min(base + lane, uint(end - 1))"),
        "ambiguous",
    ),
}


@pytest.mark.parametrize("name", CONTROLS)
def test_clang_refuses_what_metal_would(name: str) -> None:
    clang_check = pytest.importorskip("metal.clang_check", reason="libclang is absent", exc_type=ImportError)
    text = next(text for text, kernel in texts().items() if kernel == "eps_attend_decode")
    break_it, message = CONTROLS[name]
    assert break_it(text) != text
    found = clang_check.diagnostics(break_it(text))
    assert any(message in one for one in found), found


# Threadgroups


@pytest.mark.parametrize("most", [1024, 300, 64])
def test_a_gpu_that_refuses_threads_gets_fewer(most: int, metal_shim: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """As MLX refuses them, when it computes and not before; what was refused is not asked for again, and nothing else
    is lost with it: what the kernel reads was computed by itself."""
    runner, evaluate, asked, computed = launch.runner, mx.eval, [], []

    def run(kernel: Any, inputs: Any, template: Any, grid: Any, threadgroup: Any, *given: Any) -> list[mx.array]:
        asked.append((kernel.name, threadgroup[0]))
        if computed[-1] is inputs:  # before this kernel is there
            computed.append("inputs")
        return runner(kernel, inputs, template, grid, threadgroup, *given)

    def compute(*arrays: Any) -> None:
        name, threads = asked[-1] if computed[-1:] == ["inputs"] else ("", 0)
        computed.append(arrays[0])
        if threads > most and name in whole:
            text = (
                f"Thread group size ({threads}) is greater than  the maximum allowed threads per threadgroup ({most})."
            )
            raise ValueError(text)
        evaluate(*arrays)

    case = Case((150, 70), (20, 3), num_heads=8, num_kv_heads=2, head_dim=64, block_size=64)
    one = Filled(METAL, "cpu", case, np.random.default_rng(1))
    q = METAL.from_numpy(query(case, one.rng), case.dtype, "cpu")
    listed = selection_of(q, one.listed())
    mask = mx.array(one.rng.random((2, 2, 700)) < 0.3)
    held, drawn = (mx.array(one.rng.random((1, 2, n, 64), np.float32)) for n in (64, 1))

    def found() -> list[np.ndarray]:
        states = [METAL.attend(one.cache, 0, q[:2], one.plan, listed)]
        read = METAL.attend_rows(one.cache, 0, q, one.rows())
        token, place, finite = drawn[:, :, 0], mx.array([3], mx.int32), mx.array(True)
        wrote = write.write_tokens(token, token, held, held, place, finite)
        return [np.array(x) for x in (*states[0], read.out, read.lse, *select.compact(mask, width=300), *wrote)]

    want = found()
    whole = {"eps_attend_decode": 256, "eps_attend_rows": 512, "eps_compact": 512, "eps_write": 256}
    for name in ("_refused", "_computed"):
        monkeypatch.setattr(launch, name, set())
    monkeypatch.setattr(launch, "runner", run)
    monkeypatch.setattr(mx, "eval", compute)
    for got in (found(), found()):
        for x, y in zip(got, want, strict=True):
            np.testing.assert_allclose(x, y, atol=1e-5)
    sizes = {name: [threads for kernel, threads in asked if kernel == name] for name, _ in asked}
    for name, threads in whole.items():
        halves = [threads >> i for i in range(5) if threads >> i > most]
        fits = next(threads >> i for i in range(5) if threads >> i <= most)
        assert sizes[name] == [*halves, fits, fits]
    most = 16  # of which no simdgroup is made
    launch._computed.clear()
    with pytest.raises(ValueError, match="is greater than"):
        select.compact(mask, width=300)
