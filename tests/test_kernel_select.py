"""The kernels that choose groups: lists by topk against the reference's rule, to the last group, for estimates as no
cache makes them; the best of what is finite; and masks made into lists."""

import importlib
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kernel_scenes import like
from places import place

from eps_core import reference
from eps_core.attention.protocol import Scores
from eps_core.config.cache import CacheSpec
from eps_core.config.eps import EpsConfig
from eps_core.reference.selection import best_first
from eps_core.summaries.base import LARGEST_ESTIMATE

pytestmark = pytest.mark.kernels("numba", "triton", "metal", arrays=False)
SHIM_ORDERS = ("forward", "backward")


def estimates(kind: str, shape: tuple[int, int, int], ends: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """[B, Hkv, G] float32 as `score` gives them: some groups +inf for all heads, all -inf past the end."""
    estimate = rng.normal(0, 4, shape).astype(np.float32)
    if kind == "ties":
        estimate = np.round(estimate / 2)
        estimate[rng.random(shape) < 0.2] *= -1  # zeros of both signs
    elif kind == "equal":
        estimate[:] = -1.5
    elif kind == "missing":
        estimate[:] = np.inf
    elif kind == "wide":
        estimate = (estimate * np.float32(10.0) ** rng.integers(-30, 30, shape)).astype(np.float32)
        estimate[rng.random(shape) < 0.05] = LARGEST_ESTIMATE
        estimate[rng.random(shape) < 0.05] = -LARGEST_ESTIMATE
        estimate[rng.random(shape) < 0.05] *= 1e-42  # subnormal
    elif kind == "near":  # differ in the last bits only
        estimate = (1 + rng.integers(0, 40, shape) * 2.0**-23).astype(np.float32)
    if kind != "equal":
        estimate[np.broadcast_to(rng.random((shape[0], 1, shape[2])) < 0.02, shape)] = math.inf
    estimate[np.broadcast_to(np.arange(shape[2]) >= ends[:, None, None], shape)] = -math.inf
    return estimate


TOPK: dict[str, dict[str, Any]] = {
    "usual": {},
    "one group": {"lengths": (1, 2), "kv_heads": 3},
    "one token of many": {"lengths": (1, 999), "first": 0, "last": 0},
    "no sink and recent tokens": {"first": 0, "last": 0, "lengths": (640, 640), "kind": "ties", "share": 0.25},
    "sink and recent tokens overlap": {"lengths": (100, 60), "first": 50, "last": 90, "share": 0.3},
    "sink and recent tokens past the end": {"lengths": (37, 300), "first": 10**6, "last": 10**10},
    "everything": {"share": 1.0, "kind": "ties"},
    "a number of tokens": {"share": 100, "lengths": (701, 90, 400), "kind": "ties"},
    "min context": {"lengths": (701, 400, 69), "min_context": 500},
    "groups past the end": {"spare": 70},
    "odd groups": {"size": 3, "lengths": (997, 5, 3), "kind": "wide", "share": 0.3},
    "pages": {"size": 48, "lengths": (4097, 47)},
    "a group longer than the sequence": {"size": 256, "lengths": (100,)},
    "longer than a batch of loads": {"lengths": (9001,), "size": 1, "kv_heads": 1},
    "nothing has a summary": {"kind": "missing", "size": 48, "lengths": (1000, 480), "first": 200, "last": 300},
    "partial group alone": {"last": 0, "lengths": (701, 701), "share": 0.05},
    "half of many ties": {"kind": "ties", "lengths": (3000, 3000), "first": 0, "last": 0, "share": 0.5},
    "ties": {"kind": "ties", "lengths": (1400, 399)},
    "ties at a row's end": {"kind": "ties", "lengths": (2600,), "last": 0, "share": 0.9},
    "all equal": {"kind": "equal", "lengths": (1400, 399)},
    "all equal, no sink and recent tokens": {"kind": "equal", "first": 0, "last": 0, "share": 0.5, "lengths": (1401,)},
    "last bits": {"kind": "near", "lengths": (1400, 399), "share": 0.3},
}


def check_topk(
    backend, device, lengths=(701, 400), kv_heads=2, size=2, kind="gauss", share=0.1, first=4, last=64, min_context=0,
    spare=0,
) -> None:  # fmt: skip
    lengths, block = np.array(lengths, np.int64), next(b for b in (16, size, size * 2) if b % size == 0)
    config = EpsConfig.of(
        method="box", group_size=size, block_size=block, budget=share, num_sink_tokens=first,
        num_recent_tokens=last, min_context=min_context,
    )  # fmt: skip
    one = backend.new_cache(CacheSpec(1, 1, 16, 1), EpsConfig.of(method="box").cache_config, device)
    ends = -(-lengths // size)
    groups = int(ends.max()) + spare
    estimate = estimates(kind, (len(lengths), kv_heads, groups), ends, np.random.default_rng(size))
    plan = place(config, lengths, groups)
    missing = (np.isposinf(estimate[:, 0]) & ~plan.always_selected).sum(axis=1)
    scores = Scores(like(one.k[0], estimate), None, None, missing, kernels=one.kernels)
    found = backend.select(scores, plan)
    want = reference.select(Scores(estimate.astype(np.float64), None, None, missing), plan)
    listed, counts, selected_mask = (backend.to_numpy(x) for x in (found.groups, found.counts, found.selected_mask))
    assert np.array_equal(counts, want.counts) and np.array_equal(found.common_counts, counts[:, 0])
    assert np.array_equal(found.always_selected, want.always_selected)
    for b, h in np.ndindex(counts.shape):
        inside = want.groups[b, h, : counts[b, h]].tolist()
        assert listed[b, h].tolist() == inside + [-1] * (listed.shape[2] - len(inside))
        assert np.flatnonzero(selected_mask[b, h]).tolist() == inside
    written_once(one.kernels, "eps_select_topk", groups=listed, counts=counts, visit=selected_mask)


def written_once(kernels: str, kernel: str, **outputs: np.ndarray) -> None:
    """Each byte that Metal's kernel puts out: what nobody writes may look right here by chance."""
    if kernels == "metal":
        from metal import shim

        stored = shim.last[kernel].stored
        assert {name: stored[name] for name in outputs} == {name: array.nbytes for name, array in outputs.items()}


@pytest.mark.parametrize("settings", TOPK.values(), ids=TOPK)
def test_topk_lists_what_the_reference_lists(target, settings) -> None:
    check_topk(*target, **settings)


# Triton's and Metal's launches, which have the same names and arguments


@pytest.fixture
def launches(target) -> SimpleNamespace:
    """The functions of a family's kernels over host arrays."""
    backend, device = target
    one = backend.new_cache(CacheSpec(1, 1, 16, 1), EpsConfig.of(method="box").cache_config, device)
    module = importlib.import_module(f"{backend.__name__}.kernels.select")

    def call(name: str, *arrays: np.ndarray, **numbers: int) -> list[np.ndarray]:
        return [backend.to_numpy(x) for x in getattr(module, name)(*(like(one.k[0], x) for x in arrays), **numbers)]

    return SimpleNamespace(call=call, kernels=one.kernels)


GPU = pytest.mark.kernels("triton", "metal", arrays=False)


@GPU
@pytest.mark.parametrize("kind", ["gauss", "ties", "equal", "missing", "wide", "near"])
def test_best_are_finite_and_the_lower_index_first(launches, kind) -> None:
    for groups in (1, 7, 700):
        ends = np.array([groups, max(groups * 3 // 4, 1)])
        estimate = estimates(kind, (2, 2, groups), ends, np.random.default_rng(groups))
        for wanted in ([0, 1], [groups // 2, groups * 5 // 8], [groups // 8 + 1, groups]):
            listed, counts = launches.call("select_best", estimate, np.array(wanted, np.int32), width=max(*wanted, 1))
            for b, h in np.ndindex(2, 2):
                known = np.flatnonzero(np.isfinite(estimate[b, h]))
                want = np.sort(known[best_first(estimate[b, h, known])[: wanted[b]]]).tolist()
                assert counts[b, h] == len(want)
                assert listed[b, h].tolist() == want + [-1] * (listed.shape[2] - len(want)), (groups, wanted)
            written_once(launches.kernels, "eps_select_best", groups=listed, counts=counts)


@GPU
def test_topk_counts_none_fewer_than_always_selected_and_more_than_all(launches) -> None:
    """Which no budget asks for."""
    estimate = np.array([[[5.0, np.inf, 1.0, np.inf, 9.0, -np.inf]]], np.float32)
    lengths = np.array([5], np.int32)

    def listed(count: int, first: int, least: int) -> list[int]:
        groups, counts, selected_mask, *_ = launches.call(
            "select_topk", estimate, np.array([count], np.int32), lengths, group_size=1, num_sink_tokens=first,
            num_recent_tokens=0, min_context=least, width=6,
        )  # fmt: skip
        found: list[int] = groups[0, 0, : counts[0, 0]].tolist()
        assert np.flatnonzero(selected_mask[0, 0]).tolist() == found
        return found

    for count, expected in ((0, []), (1, [0]), (2, [0, 1]), (3, [0, 1, 3]), (4, [0, 1, 3, 4]), (9, [0, 1, 2, 3, 4])):
        if launches.kernels == "triton" or 0 < count < 9:  # Metal's lists have a place for each that is asked for
            assert listed(count, 1, 0) == expected
    assert listed(3, 0, 5) == [1, 3, 4] and listed(3, 0, 6) == [0, 1, 2]


@GPU
def test_masks_become_ascending_lists(launches) -> None:
    rng = np.random.default_rng(0)
    for groups in (1, 3, 64, 5000):
        selected_mask = rng.random((2, 3, groups)) < 0.3
        selected_mask[1, 2], selected_mask[0, 0] = True, False
        for mask in (selected_mask, selected_mask.astype(np.uint8)):
            listed, counts = launches.call("compact", mask, width=groups)
            for row in np.ndindex(2, 3):
                want = np.flatnonzero(selected_mask[row]).tolist()
                assert counts[row] == len(want) and listed[row].tolist() == want + [-1] * (groups - len(want))
            written_once(launches.kernels, "eps_compact", groups=listed, counts=counts)
