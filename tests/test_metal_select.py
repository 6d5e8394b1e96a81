"""The Metal kernels that score and select, as the text that MLX would compile, run on this machine by the shim.

Estimates are judged by the float64 oracle, lists by the oracle's selection and by the array path, to the last group.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable
from types import ModuleType

import mlx.core as mx
import numpy as np
import pytest
from metal import shim
from places import place

from eps_core.attention.protocol import Scores
from eps_core.config.eps import EpsConfig
from eps_core.reference import selection as oracle_selection
from eps_core.reference.selection import best_first
from eps_core.summaries import base as oracle_base
from eps_mlx import arrays
from eps_mlx.kernels import launch, score, select

SEED = 3
metal_shim = shim.metal_shim


# ------------------------------------------------------------------------------------------------------------ selection


def estimates(kind: str, shape: tuple[int, int, int], ends: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """[B, Hkv, G] float32 as `score` gives them: some +inf inside, all -inf past the end."""
    estimate = rng.normal(0, 4, shape).astype(np.float32)
    if kind == "ties":
        estimate = np.round(estimate / 2)
        estimate[rng.random(shape) < 0.2] *= -1  # zeros of both signs
    if kind == "equal":
        estimate[:] = 1.5
    if kind == "large":
        estimate[rng.random(shape) < 0.1] = oracle_base.LARGEST_ESTIMATE
        estimate[rng.random(shape) < 0.1] = -oracle_base.LARGEST_ESTIMATE
        estimate[rng.random(shape) < 0.1] *= 1e-42  # subnormal
    if kind == "near":  # differ in the last bits only
        estimate = (1 + rng.integers(0, 40, shape) * 2.0**-23).astype(np.float32)
    if kind != "equal":
        estimate[np.broadcast_to(rng.random((shape[0], 1, shape[2])) < 0.02, shape)] = math.inf
    estimate[np.broadcast_to(np.arange(shape[2]) >= ends[:, None, None], shape)] = -math.inf
    return estimate


def everything_written(kernel: str, **outputs: np.ndarray) -> None:
    """Each byte once: what nobody writes may look right here by chance."""
    assert {name: shim.last[kernel].stored[name] for name in outputs} == {n: x.nbytes for n, x in outputs.items()}


def check_topk(
    lengths=(701, 400), kv_heads=2, size=2, kind="gauss", share=0.1, first=4, last=64, min_context=0, spare=0, seed=0
) -> None:
    rng = np.random.default_rng(seed)
    lengths = np.array(lengths, np.int64)
    config = EpsConfig.of(
        method="box", group_size=size, block_size=size if 16 % size else 16, correction_tokens=0, budget=share,
        num_sink_tokens=first, num_recent_tokens=last, min_context=min_context,
    )  # fmt: skip
    ends = -(-lengths // size)
    groups = int(ends.max()) + spare
    estimate = estimates(kind, (len(lengths), kv_heads, groups), ends, rng)
    plan = place(config, lengths, groups)
    missing = (np.isposinf(estimate[:, 0]) & ~plan.always_selected).sum(axis=1)
    scores = Scores(mx.array(estimate), None, None, missing)
    want = arrays.select(scores, plan)
    uniform = plan.budget(plan.num_always_selected + missing)
    listed, counts, selected_mask = (
        np.array(part)
        for part in select.select_topk(
            mx.array(estimate), mx.array(uniform.astype(np.int32)), mx.array(lengths.astype(np.int32)),
            group_size=size, num_sink_tokens=config.selection_config.num_sink_tokens,
            num_recent_tokens=config.selection_config.num_recent_tokens, min_context=min_context,
            width=want.groups.shape[2],
        )
    )  # fmt: skip
    assert np.array_equal(counts, np.broadcast_to(uniform[:, None], counts.shape))
    assert np.array_equal(listed, np.array(want.groups))
    for b, length in enumerate(lengths.tolist()):
        for head in range(kv_heads):
            inside = estimate[b, head, : ends[b]].astype(np.float64)
            judged, _ = oracle_selection.selected(config, inside, length)
            assert np.array_equal(np.flatnonzero(selected_mask[b, head]), np.flatnonzero(judged))
            assert np.array_equal(listed[b, head, : counts[b, head]], np.flatnonzero(judged))
            assert (listed[b, head, counts[b, head] :] == -1).all()
    assert set(np.unique(selected_mask)) <= {0, 1}
    everything_written("eps_select_topk", groups=listed, counts=counts, visit=selected_mask)


TOPK = {
    "usual": {},
    "one group": {"lengths": (1, 2), "kv_heads": 3},
    "one token of many": {"lengths": (1, 999), "first": 0, "last": 0},
    "no sink and recent tokens": {"first": 0, "last": 0, "lengths": (640, 640)},
    "sink and recent tokens overlap": {"lengths": (100, 60), "first": 50, "last": 90, "share": 0.3},
    "sink and recent tokens past the end": {"lengths": (37, 300), "first": 10**6, "last": 10**10},
    "everything": {"share": 1.0},
    "a number of tokens": {"share": 100, "lengths": (701, 90, 400)},
    "min context": {"lengths": (701, 400, 69), "min_context": 500},
    "groups past the end": {"spare": 70},
    "odd groups": {"size": 3, "lengths": (997, 5, 3)},
    "pages": {"size": 48, "lengths": (4097, 47)},
    "long": {"lengths": (5901,), "size": 2, "kv_heads": 1},
    "longer than a batch of loads": {"lengths": (9001,), "size": 1, "kv_heads": 1},
    "ties": {"kind": "ties", "lengths": (1400, 399)},
    "ties at a row's end": {"kind": "ties", "lengths": (2600,), "last": 0, "share": 0.9},
    "all equal": {"kind": "equal", "lengths": (1400, 399)},
    "all equal, no sink and recent tokens": {"kind": "equal", "first": 0, "last": 0, "share": 0.5, "lengths": (1401,)},
    "large": {"kind": "large", "lengths": (1400, 399), "share": 0.3},
    "last bits": {"kind": "near", "lengths": (1400, 399), "share": 0.3},
}


@pytest.mark.parametrize("case", TOPK.values(), ids=TOPK)
def test_topk_lists_what_the_oracle_and_the_array_path_list(case, metal_shim):
    check_topk(**case)


def check_best(lengths=(700, 333), kv_heads=2, kind="gauss", wanted=(40, 3), width=None, seed=0) -> None:
    rng = np.random.default_rng(seed)
    ends = np.array(lengths)
    estimate = estimates(kind, (len(lengths), kv_heads, max(lengths)), ends, rng)
    width = max(max(wanted), 1) if width is None else width
    listed, counts = (
        np.array(part) for part in select.select_best(mx.array(estimate), mx.array(list(wanted), mx.int32), width=width)
    )
    for b, head in np.ndindex(len(lengths), kv_heads):
        known = np.flatnonzero(np.isfinite(estimate[b, head]))
        want = np.sort(known[best_first(estimate[b, head, known])[: wanted[b]]])
        assert counts[b, head] == len(want)
        assert np.array_equal(listed[b, head, : len(want)], want) and (listed[b, head, len(want) :] == -1).all()
    everything_written("eps_select_best", groups=listed, counts=counts)


BEST = {
    "usual": {},
    "none": {"wanted": (0, 5)},
    "all": {"wanted": (700, 333)},
    "more than finite": {"wanted": (640, 640), "lengths": (650, 40)},
    "ties": {"kind": "ties", "wanted": (400, 30)},
    "all equal": {"kind": "equal", "wanted": (77, 1)},
    "last bits": {"kind": "near", "wanted": (200, 111)},
    "large": {"kind": "large", "wanted": (300, 300)},
    "one group": {"lengths": (1,), "wanted": (1,)},
}


@pytest.mark.parametrize("case", BEST.values(), ids=BEST)
def test_best_are_finite_and_the_lower_index_first(case, metal_shim):
    check_best(**case)


def check_compact(groups=1000, share=0.3, width=None, dtype=bool, seed=0) -> None:
    selected_mask = np.random.default_rng(seed).random((2, 3, groups)) < share
    width = groups if width is None else width
    listed, counts = (np.array(part) for part in select.compact(mx.array(selected_mask.astype(dtype)), width=width))
    for row in np.ndindex(2, 3):
        want = np.flatnonzero(selected_mask[row])[:width]
        assert counts[row] == len(want)
        assert np.array_equal(listed[row][: len(want)], want) and (listed[row][len(want) :] == -1).all()
    everything_written("eps_compact", groups=listed, counts=counts)


@pytest.mark.parametrize("share", [0, 0.3, 1])
@pytest.mark.parametrize("groups", [1, 33, 1500])
def test_masks_become_ascending_lists(groups, share, metal_shim):
    check_compact(groups, share)
    check_compact(groups, share, width=7, dtype=np.uint8)


# -------------------------------------------------------------------------------------------------------------- scoring


@dataclasses.dataclass
class Pool:
    """Random summaries of a paged cache and queries; `summary` by name, [P, Hkv, GPU, ..]."""

    lengths: tuple[int, ...]
    kv_heads: int
    repeat: int
    head_dim: int
    size: int
    per_unit: int
    rng: np.random.Generator

    def __post_init__(self) -> None:
        unit = self.size * self.per_unit
        units = [-(-length // unit) for length in self.lengths]
        self.num_units = sum(units) + 3
        free = self.rng.permutation(self.num_units)
        self.table = np.full((len(self.lengths), max(units) + 1), -1, np.int32)
        for b, number in enumerate(units):
            self.table[b, :number], free = free[:number], free[number:]
        self.valid = (self.rng.random(self.num_units * self.per_unit) < 0.95).astype(np.uint8)
        shape = (len(self.lengths), self.kv_heads * self.repeat, self.head_dim)
        self.q = (3 * self.rng.normal(size=shape)).astype(np.float32)
        self.summary: dict[str, np.ndarray] = {}

    @property
    def pool(self) -> tuple[int, int, int]:
        return self.num_units, self.kv_heads, self.per_unit

    def bytes_of(self, number: int, dtype: type = np.uint8) -> np.ndarray:
        return self.rng.integers(0, 256, (*self.pool, number)).astype(np.uint8).view(dtype)

    def scalars(self) -> np.ndarray:
        return (0.05 + self.rng.random(self.pool)).astype(np.float16)

    def spoil(self, name: str) -> None:
        """The first group's scalar past float16."""
        self.summary[name][self.table[0, 0], 0, 0] = np.inf
        self.valid[self.table[0, 0] * self.per_unit] = 1

    def arrays(self) -> list[mx.array]:
        """valid, table and lengths on the device."""
        return [mx.array(self.valid), mx.array(self.table), mx.array(np.array(self.lengths, np.int32))]

    def judged(self, estimate: Callable[[dict[str, np.ndarray], np.ndarray, int], np.ndarray]) -> np.ndarray:
        """[B, Hkv, G] float64: `estimate` of one query head's groups, with what is known before any score."""
        groups = self.table.shape[1] * self.per_unit
        judged = np.full((len(self.lengths), self.kv_heads, groups), -np.inf)
        for b, head in np.ndindex(*judged.shape[:2]):
            tiles = np.maximum(self.table[b], 0)
            summary = {name: pool[tiles, head].reshape(groups, *pool.shape[3:]) for name, pool in self.summary.items()}
            a = self.q[b].astype(np.float64) / math.sqrt(self.head_dim)
            with np.errstate(all="ignore"):
                each = [estimate(summary, a[head * self.repeat + r], head) for r in range(self.repeat)]
            best = np.max([np.where(np.isfinite(one), one, oracle_base.LARGEST_ESTIMATE) for one in each], axis=0)
            known = self.valid.reshape(-1, self.per_unit)[tiles].reshape(-1).astype(bool)
            index, length = np.arange(groups), self.lengths[b]
            best = np.where(known & (index < length // self.size), best, np.inf)
            judged[b, head] = np.where(index < -(-length // self.size), best, -np.inf)
        return judged


def pool_of(lengths=(301, 64, 150), kv_heads=2, repeat=3, head_dim=64, size=2, per_unit=8, seed=0) -> Pool:
    return Pool(lengths, kv_heads, repeat, head_dim, size, per_unit, np.random.default_rng(seed))


def same(got: mx.array, want: np.ndarray, rounding: float) -> None:
    found = np.array(got).astype(np.float64)
    unknown = ~np.isfinite(want)
    assert np.array_equal(found[unknown], want[unknown])
    large = want == oracle_base.LARGEST_ESTIMATE
    np.testing.assert_allclose(found[large], want[large], rtol=1e-6)
    assert np.isfinite(found[~unknown]).all()
    error = np.abs(np.where(unknown | large, 0, found - np.where(unknown, 0, want)))
    assert error.max() <= rounding, error.max()


def rounding_of(one: Pool, levels: float, scale: float) -> float:
    """float32 additions of D products in one order and float64 ones in another, of the largest query."""
    a = np.abs(one.q).sum(axis=-1).max() / math.sqrt(one.head_dim)
    return 2.0**-22 * (math.sqrt(one.head_dim) + 8) * (a * levels * scale + 5 * a + 1)


# --------------------------------------------------------------------------------------------------------- what is read


def test_selection_stops_early_on_distinct_estimates(metal_shim):
    """Two digits decide: two passes of counting, one of places, one that lists."""
    check_topk(kind="gauss", lengths=(1400,), size=1, first=0, last=0, kv_heads=1)
    seen = metal_shim["eps_select_topk"]
    assert seen.loaded["image"] <= 4 * seen.read["image"] == 4 * 1400 * 4


def test_more_query_heads_than_threadgroup_memory_holds_are_refused():
    pool = mx.zeros((1, 1, 8, 64), mx.uint8)
    with pytest.raises(ValueError, match="threadgroup memory"):
        score.layout(pool, 1, 512, 17)
    with pytest.raises(ValueError, match="another number"):
        score.layout(pool, 8, 32, 1)


# ----------------------------------------------------------------------------------------------------- wrong on purpose

BARRIER = "threadgroup_barrier("
WRONG = {
    "ties to the higher index": (
        "_topk", "equal && rank < room", "equal && rank >= all_tied - room", dict(kind="ties", share=0.5),
    ),
    "ties to the higher index of the best": (
        "_best", "equal && rank < room", "equal && rank >= all_tied - room", dict(kind="equal"),
    ),
    "zeros of two signs differ": (
        "_topk", "? bits[k] : ~bits[k]", "? ~bits[k] : ~bits[k]",
        dict(kind="ties", share=0.5, lengths=(3000, 3000), first=0, last=0),
    ),
    "first tokens, one group more": ("_topk", "length) + group_size - 1", "length) + group_size", {}),
    "last tokens, one group less": ("_topk", "- rules[2], 0)", "- rules[2] + group_size, 0)", {}),
    "partial group forgotten": (
        "_topk", "- rules[2], 0) / group_size", "- rules[2], 0) / group_size + (rules[2] == 0 ? 1 : 0)",
        dict(last=0, lengths=(701, 701), share=0.05),
    ),
    "min context one token off": (
        "_topk", "length < rules[3]", "length <= rules[3]", dict(min_context=701),
    ),
    "past the end": (
        "_topk", "min((length + group_size - 1) / group_size, num_groups)", "num_groups",
        dict(share=1.0),
    ),
    "stale lists": ("_topk", "for (int i = count + tid", "for (int i = count + 1 + tid", {}),
    "stale mask": ("_topk", "for (int g = limit + tid", "for (int g = limit + 1 + tid", dict(spare=9)),
    "last digit forgotten": ("_topk", "pass < 3", "pass < 2", dict(kind="near", share=0.3)),
    "infinities refined": (
        "_best", "== 0x7f800000u ? 0u : key", "== 0x7f800000u ? key : key", {},
    ),
}  # fmt: skip
CHECKS: dict[str, Callable[..., None]] = {
    "_topk": check_topk, "_best": check_best, "_compact": check_compact,
}  # fmt: skip


def module_of(name: str) -> ModuleType:
    return select


def kernel_of(name: str) -> launch.Kernel:
    return getattr(module_of(name), name)


def caught(monkeypatch, name: str, source: str, settings: dict) -> None:
    """The check of a kernel must fail with `source` in place of its own."""
    monkeypatch.setattr(module_of(name), name, dataclasses.replace(kernel_of(name), source=source))
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
    settings = {"_topk": {"kind": "ties", "lengths": (3000,)}, "_best": {"kind": "ties"}, "_compact": {"groups": 1500}}
    caught(monkeypatch, name, BARRIER.join(parts), settings.get(name, {}))


def test_texts_keep_the_front_end_rules_of_metal(monkeypatch):
    """Of every kernel, for inputs of fewer than 8 elements and more."""
    found, texts = [], set()

    def record(kernel, inputs, template, grid, threadgroup, shapes, dtypes):
        text = shim.generated_text(kernel, inputs, template, dtypes)
        if text not in texts:
            texts.add(text)
            found.extend(f"{kernel.name} {line}" for line in clang_check.diagnostics(text))
        return [mx.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]

    clang_check = pytest.importorskip("metal.clang_check")
    monkeypatch.setattr(launch, "runner", record)
    for lengths in ((3,), (301, 64, 150)):
        for check in (check_topk, check_best):
            with contextlib.suppress(AssertionError):
                check(lengths=lengths, **({"wanted": lengths} if check is check_best else {}))
    with contextlib.suppress(AssertionError):
        check_compact()
    assert not found and len(texts) >= 5, found
