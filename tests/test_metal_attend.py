"""Metal's attention kernels against float64 sums, and the bytes that they read against what selections list.

Whatever no selection lists is NaN here, in K and in V: to read any of it shows in the output. That it is not even
fetched shows in the bytes.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest
from metal import cuda_check, shim
from metal.shim import ShimError, metal_shim  # noqa: F401

from eps_core.backend.pages import CodePool, Pool
from eps_core.reference import pages as oracle_pages
from eps_mlx.kernels import attend, correction, launch

# relative rounding of a dtype: the output is rounded to it once, sums are float32
ROUNDING = {mx.float32: 2e-6, mx.float16: 2**-11, mx.bfloat16: 2**-8}


@dataclass
class Scene:
    """Ragged sequences over scattered units, their lists, and the float64 truth. `lists[b][h]` the groups read."""

    q: mx.array
    k: Pool
    v: Pool
    table: np.ndarray
    lengths: np.ndarray
    lists: list[list[np.ndarray]]
    size: int
    dense: bool

    @classmethod
    def build(
        cls,
        dtype: mx.Dtype = mx.float32,
        D: int = 64,
        R: int = 4,
        S: int = 2,
        U: int = 64,
        lengths: tuple[int, ...] = (301, 64, 7),
        kv_heads: int = 2,
        keep: float = 0.4,
        dense: bool = False,
        seed: int = 0,
        bits: tuple[int, int] = (16, 16),
    ) -> "Scene":
        rng = np.random.default_rng(seed)
        batch, units = len(lengths), -(-max(lengths) // U) + 1
        table = np.full((batch, units), -1, np.int32)
        free = rng.permutation(batch * units + 2)
        for b, length in enumerate(lengths):
            needed = -(-length // U)
            table[b, :needed], free = free[:needed], free[needed:]
        shape = (batch * units + 2, kv_heads, U, D)
        k, v = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
        k *= rng.choice([0.3, 1.0, 3.0], (*shape[:3], 1)).astype(np.float32)  # so that maxima move while reading
        lists: list[list[np.ndarray]] = []
        unread = np.ones(shape[:3], bool)
        for b, length in enumerate(lengths):
            ends = -(-length // S)
            lists.append([])
            for h in range(kv_heads):
                chosen = rng.permutation(ends)[: max(1, round(keep * ends))] if not dense else np.arange(ends)
                if h == 0 and length % S:
                    chosen = np.append(chosen, ends - 1)  # the partial group
                if not dense and b == batch - 1 and h == kv_heads - 1:
                    chosen = chosen[:0]
                lists[-1].append(np.unique(chosen))
                tokens = _tokens(lists[-1][-1], S, length)
                unread[table[b, tokens // U], h, tokens % U] = False
        k[unread], v[unread] = np.nan, np.nan
        q = rng.standard_normal((batch, kv_heads * R, D)).astype(np.float32)
        native = [mx.array(x).astype(dtype) for x in (q, k, v)]
        return cls(
            native[0],
            held(native[1], bits[0]),
            held(native[2], bits[1]),
            table,
            np.array(lengths, np.int32),
            lists,
            S,
            dense,
        )

    def run(self) -> tuple[np.ndarray, np.ndarray]:
        batch, heads = len(self.lists), len(self.lists[0])
        counts = np.array([[len(one) for one in row] for row in self.lists], np.int32)
        groups = np.full((batch, heads, counts.max() + 3), -1, np.int32)
        for b, h in np.ndindex(batch, heads):
            groups[b, h, : counts[b, h]] = self.lists[b][h]
        out, lse = attend.attend_groups(
            self.q,
            self.k,
            self.v,
            mx.array(self.table),
            mx.array(self.lengths),
            None if self.dense else mx.array(groups),
            None if self.dense else mx.array(counts),
            group_size=self.size,
        )
        assert out.dtype == self.q.dtype and lse.dtype == mx.float32
        return _float64(out), _float64(lse)

    def truth(self) -> tuple[np.ndarray, np.ndarray]:
        q, k, v = (_float64(x) for x in (self.q, self.k, self.v))
        out, lse = np.zeros_like(q), np.full(q.shape[:2], -np.inf)
        U, heads = k.shape[2], k.shape[1]
        repeat = q.shape[1] // heads
        for b, head in np.ndindex(q.shape[:2]):
            h = head // repeat
            tokens = _tokens(self.lists[b][h], self.size, int(self.lengths[b]))
            if not len(tokens):
                continue
            at = (self.table[b, tokens // U], h, tokens % U)
            logits = k[at] @ q[b, head] / np.sqrt(q.shape[2])
            weights = np.exp(logits - logits.max())
            out[b, head], lse[b, head] = weights @ v[at] / weights.sum(), logits.max() + np.log(weights.sum())
        return out, lse

    @property
    def listed_bytes(self) -> dict[str, int]:
        """Of K, of V and of the scales of codes."""
        tokens = [_tokens(one, self.size, int(self.lengths[b])) for b, row in enumerate(self.lists) for one in row]
        return pool_bytes(self.k, self.v, sum(map(len, tokens)))

    def check(self, statistics: dict[str, shim.Statistics]) -> None:
        (out, lse), (true_out, true_lse) = self.run(), self.truth()
        _close("attention", out, true_out, ROUNDING[self.q.dtype])
        _close("log mass", lse, true_lse, ROUNDING[mx.float32])
        read = only(statistics, "eps_attend_decode").read
        for name, listed in self.listed_bytes.items():
            assert read[name] == listed, "bytes read are not what is listed"


def held(rows: mx.array, bits: int) -> Pool:
    """A pool of rows [P, Hkv, U, D], its codes made by the judge's quantiser."""
    if bits == 16:
        return rows
    with np.errstate(invalid="ignore"):
        codes, scale = oracle_pages.quantise(np.array(rows.astype(mx.float32)), bits)
    return CodePool(mx.array(codes), mx.array(scale), bits, rows.dtype)


def pool_bytes(k: Pool, v: Pool, rows: int) -> dict[str, int]:
    """Of so many rows of K and V, by the names of a kernel's inputs."""
    found = {}
    for name, pool in (("k", k), ("v", v)):
        if isinstance(pool, CodePool):
            found[f"{name}_pool"], found[f"{name}_scale"] = rows * pool.shape[3] * pool.bits // 8, 2 * rows
        else:
            found[f"{name}_pool"] = rows * pool.shape[3] * pool.dtype.size
    return found


def only(statistics: dict[str, shim.Statistics], name: str) -> shim.Statistics:
    """Of the latest launch of a kernel, whatever bits it is for."""
    found = [one for kernel, one in statistics.items() if kernel.startswith(name)]
    assert len(found) == 1
    return found[0]


def _tokens(groups: np.ndarray, size: int, length: int) -> np.ndarray:
    tokens = (groups[:, None] * size + np.arange(size)).reshape(-1)
    return tokens[tokens < length]


def _float64(array: Pool) -> np.ndarray:
    """What an array or pool is read as, of codes by the judge's definition."""
    if isinstance(array, CodePool):
        kind = ml_dtypes.bfloat16 if array.dtype == mx.bfloat16 else np.array(mx.zeros(1, array.dtype)).dtype
        codes, scale = np.array(array.codes), np.array(array.scale)
        return oracle_pages.dequantise(codes, scale, array.bits, kind).astype(np.float64)
    return np.array(array.astype(mx.float32)).astype(np.float64)


def _close(what: str, found: np.ndarray, true: np.ndarray, rounding: float) -> None:
    assert np.array_equal(np.isfinite(found), np.isfinite(true)), f"{what} differs in what is finite"
    finite = np.isfinite(true)
    error = np.abs(found[finite] - true[finite])
    assert (error <= rounding * (1 + np.abs(true[finite]))).all(), f"{what} differs by {error.max():.3g}"


CASES: dict[str, dict[str, Any]] = {
    "fp32-D64-R1-S1": dict(dtype=mx.float32, D=64, R=1, S=1),
    "fp16-D64-R4-S2": dict(dtype=mx.float16, D=64, R=4, S=2),
    "bf16-D128-R4-S2": dict(dtype=mx.bfloat16, D=128, R=4, S=2, lengths=(601, 130)),
    "bf16-D128-R8-S16": dict(dtype=mx.bfloat16, D=128, R=8, S=16),
    "fp16-D80-R3-S3": dict(dtype=mx.float16, D=80, R=3, S=3, U=48),
    "fp32-D96-R16-S2": dict(dtype=mx.float32, D=96, R=16, S=2, lengths=(131, 9)),
    "bf16-D256-R16-S128": dict(dtype=mx.bfloat16, D=256, R=16, S=128, U=128, lengths=(257, 40)),
    "fp32-D16-R4-S16": dict(dtype=mx.float32, D=16, R=4, S=16),
    "fp32-D20-R5-S5": dict(dtype=mx.float32, D=20, R=5, S=5, U=40),
    "fp16-D33-R3-S48": dict(dtype=mx.float16, D=33, R=3, S=48, U=48),
    "fp16-D64-R4-dense": dict(dtype=mx.float16, D=64, R=4, S=2, dense=True),
    "bf16-D128-R8-dense": dict(dtype=mx.bfloat16, D=128, R=8, S=128, U=128, dense=True),
    "fp32-D64-R4-S2-K8V8": dict(bits=(8, 8)),
    "bf16-D128-R8-S16-K4V4": dict(dtype=mx.bfloat16, D=128, R=8, S=16, bits=(4, 4)),
    "fp16-D64-R1-S2-K8V4": dict(dtype=mx.float16, D=64, R=1, bits=(8, 4)),
    "bf16-D80-R3-S3-K4V8": dict(dtype=mx.bfloat16, D=80, R=3, S=3, U=48, bits=(4, 8)),
    "fp32-D34-R3-S2-K4V4": dict(D=34, R=3, bits=(4, 4)),
    "fp16-D33-R3-S48-K8V16": dict(dtype=mx.float16, D=33, R=3, S=48, U=48, bits=(8, 16)),
    "bf16-D256-R4-S16-K16V4": dict(dtype=mx.bfloat16, D=256, R=4, S=16, lengths=(140, 7), bits=(16, 4)),
    "fp16-D128-R4-dense-K8V4": dict(dtype=mx.float16, D=128, S=16, dense=True, bits=(8, 4)),
    "bf16-D128-R4-S2-long": dict(dtype=mx.bfloat16, D=128, R=4, S=2, lengths=(2600,), kv_heads=1, keep=0.5),
}


@pytest.mark.parametrize("case", CASES)
def test_attention_equals_float64(metal_shim: Any, case: str) -> None:  # noqa: F811
    Scene.build(**CASES[case]).check(metal_shim)


def test_splits_follow_the_capacity_of_the_list(metal_shim: Any) -> None:  # noqa: F811
    """A list with room for much more than it holds is read by more threadgroups, most of which find nothing."""
    scene = Scene.build(mx.float16, D=64, R=4, S=2, lengths=(5000, 3), kv_heads=1, keep=0.02)
    scene.lists[0][0] = scene.lists[0][0][:40]
    assert attend.num_splits(2, 5120, 256) == 16
    scene.dense = False
    wide = scene.table.shape[1] * 64 // scene.size
    groups = np.full((2, 1, wide), -1, np.int32)
    groups[0, 0, :40] = scene.lists[0][0]
    out, _ = attend.attend_groups(
        *(scene.q, scene.k, scene.v, mx.array(scene.table), mx.array(scene.lengths), mx.array(groups)),
        mx.array(np.array([[40], [0]], np.int32)),
        group_size=2,
    )
    assert metal_shim["eps_attend_decode"].threadgroups == 2 * 16
    scene.lists[1][0] = scene.lists[1][0][:0]
    _close("attention", _float64(out), scene.truth()[0], ROUNDING[mx.float16])


@pytest.mark.parametrize("repeat, passes", [(4, 1), (8, 2)])
def test_rows_are_loaded_once_for_four_heads(metal_shim: Any, repeat: int, passes: int) -> None:  # noqa: F811
    scene = Scene.build(mx.bfloat16, D=128, R=repeat, S=2, lengths=(512,), kv_heads=1, keep=0.5)
    scene.check(metal_shim)
    decode = metal_shim["eps_attend_decode"]
    for name, listed in scene.listed_bytes.items():
        assert decode.loaded[name] == passes * listed


def test_the_grid_ignores_how_many_groups_are_listed(metal_shim: Any) -> None:  # noqa: F811
    calls = []

    def record(kernel: Any, inputs: Any, template: Any, grid: Any, *rest: Any) -> Any:
        calls.append((kernel.name, tuple(template.items()), grid))
        return shim.runner(kernel, inputs, template, grid, *rest)

    launch.runner = record
    scene = Scene.build(mx.float16, D=64)
    scene.run()
    few = [[one.copy() for one in row] for row in scene.lists]
    few[0][0], few[2][0] = few[0][0][:3], few[2][0][:0]
    first, calls[:] = list(calls), []
    width = max(len(one) for row in scene.lists for one in row)
    few[0][1] = np.arange(width)  # the list's width is a shape
    scene.lists = few
    scene.run()
    assert calls == first


BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
# name: (kernel, text, its replacement, which occurrence, what is seen)
BUGS: dict[str, tuple[str, str, str, int, str]] = {
    "no first barrier": ("decode", BARRIER, "", 0, "race"),
    "no inner barrier": ("decode", BARRIER, "", 1, "race"),
    "no last barrier": ("decode", BARRIER, "", 2, "race"),
    "barrier of a few": ("decode", "float whole = 0.0f;", f"{BARRIER} float whole = 0.0f;", 1, "divergent barrier"),
    "a token too far": ("decode", "length - last * group_size", "length + 1 - last * group_size", 0, "finite"),
    "whole last group": ("decode", "min(group_size, length - last * group_size)", "group_size", 0, "finite"),
    "unlisted group": ("decode", "const int group = DENSE ? entry", "const int group = true ? entry", 0, "finite"),
    "one group too many": ("decode", ": counts[row];", ": counts[row] + 1;", 0, "differs|finite|out of bounds"),
    "no rescale": ("decode", "sum[h][i] *= rescale;", "", 0, "attention differs"),
    "no rescale of the mass": ("decode", "mass[h] *= rescale;", "", 0, "attention differs"),
    "no rescale of rows": ("decode", "sum[h][i] *= rescale;", "", 1, "attention differs"),
    "no rescale of simdgroups": ("decode", "sum[h][i] * rescale", "sum[h][i]", 0, "attention differs"),
    "wrong kv head": ("decode", "row % kv_heads) *", "(row + 1) % kv_heads) *", 0, "finite|differs"),
    "wrong query head": ("decode", "first_head + h) * D + d]", "R - 1 - first_head - h) * D + d]", 0, "differs"),
    "repeats past the end": ("decode", "listed ? exp2(weight[j] - top) : 0.0f", "exp2(weight[j] - top)", 0, "differs"),
    "divergent sum": ("decode", "dot += simd_shuffle_xor(dot,", "if (lane < 16) dot += simd_shuffle_xor(dot,", 0,
                      "divergent simd operation"),
    "divergent shuffle": ("decode", "dot = simd_sum(dot);", "if (lane < 16) { dot = simd_sum(dot); }", 0,
                          "divergent simd operation"),
    "no rescale of splits": ("merge", "D + d] * exp2(part_mass[at * 2] - top)", "D + d]", 0, "attention differs"),
    "a split left out": ("merge", "s < splits", "s + 1 < splits", 2, "attention differs"),
}  # fmt: skip


def broken(kernel: launch.Kernel, text: str, replacement: str, occurrence: int) -> launch.Kernel:
    places = [found.start() for found in re.finditer(re.escape(text), kernel.source)]
    assert len(places) > occurrence, f"{text} is not in {kernel.name}"
    at = places[occurrence]
    return replace(kernel, source=kernel.source[:at] + replacement + kernel.source[at + len(text) :])


@pytest.mark.parametrize("name", BUGS)
def test_injected_bugs_are_seen(metal_shim: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:  # noqa: F811
    kernel, text, replacement, occurrence, seen = BUGS[name]
    monkeypatch.setattr(attend, kernel, broken(getattr(attend, kernel), text, replacement, occurrence))
    # two threadgroups of eight simdgroups for every list, all with work, the last rows of a read masked
    monkeypatch.setattr(attend, "SPLIT_ROWS", 8)
    scene = Scene.build(mx.float32, D=128 if name == "divergent shuffle" else 64, lengths=(467, 331), S=2, keep=0.6)
    with pytest.raises((AssertionError, ShimError), match=seen):
        scene.check(metal_shim)


# name: (text of a read of codes, its replacement)
CODE_BUGS = {
    "forgets V's scale": ("static_cast<float>(v_scale[place])", "1.0f"),
    "takes K's scale for V's": ("static_cast<float>(v_scale[place])", "static_cast<float>(k_scale[place])"),
    "swaps the codes of a byte": ("int((from + i) % 2)", "int((from + i + 1) % 2)"),
    "takes codes for unsigned": ("& 15) - 8", "& 15) - 0"),
    "reads the next byte": ("v_pool + from / 2)", "v_pool + from / 2 + 2)"),
    "keeps float32 values": ("static_cast<T>(HALF ? within : value)", "static_cast<T>(value * 1.004f)"),
}


@pytest.mark.parametrize("name", CODE_BUGS)
def test_injected_bugs_of_codes_are_seen(
    metal_shim: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    right, (text, replacement) = attend.reading, CODE_BUGS[name]
    monkeypatch.setattr(attend, "reading", lambda *kernel: broken(right(*kernel), text, replacement, 0))
    with pytest.raises((AssertionError, ShimError), match=r"attention differs|log mass differs|finite|bytes read"):
        Scene.build(lengths=(150, 31), bits=(8, 4)).check(metal_shim)


@pytest.mark.parametrize("bits", [8, 4])
def test_codes_stay_within_float16_and_nan_stays(metal_shim: Any, bits: int) -> None:  # noqa: F811
    """The scale of the largest float16 rounds up, and its code times that is beyond; a scale may be NaN or Inf."""
    scene = Scene.build(mx.float16, lengths=(61,), kv_heads=1, dense=True, bits=(bits, bits))
    for value in (65504.0, -65504.0, math.nan, math.inf):
        scene.v = held(mx.full(scene.k.shape, value, mx.float16), bits)
        out, _ = scene.run()
        assert np.isnan(out).all() if not math.isfinite(value) else (out == value).all()


@dataclass
class Tail:
    """Estimates, visits and correction means of ragged sequences, with the float64 truth."""

    estimate: np.ndarray
    selected_mask: np.ndarray
    lse: np.ndarray
    mean: np.ndarray
    scale: np.ndarray
    valid: np.ndarray
    table: np.ndarray
    lengths: np.ndarray
    size: int
    correction_tokens: int

    @classmethod
    def build(
        cls,
        D: int = 64,
        R: int = 4,
        S: int = 2,
        correction_tokens: int = 16,
        U: int = 64,
        lengths: tuple[int, ...] = (1301, 64, 7),
        seed: int = 0,
    ) -> "Tail":
        rng = np.random.default_rng(seed)
        batch, units, kv_heads, per_unit = len(lengths), -(-max(lengths) // U) + 1, 2, U // correction_tokens
        pool = batch * units + 1
        table = np.full((batch, units), -1, np.int32)
        free = rng.permutation(pool)
        for b, length in enumerate(lengths):
            table[b, : -(-length // U)], free = np.split(free, [-(-length // U)])
        estimate = (4 * rng.standard_normal((batch, kv_heads, units * U // S))).astype(np.float32)
        index = np.arange(estimate.shape[2])
        for b, length in enumerate(lengths):
            estimate[b, :, rng.permutation(index)[:5]] = np.inf  # no summary
            estimate[b, :, index >= -(-length // S)] = -np.inf
        selected_mask = (rng.random(estimate.shape) < 0.3) | (estimate == np.inf)
        selected_mask[0, 0, : 4 * correction_tokens // S] = (
            True  # correction groups without mass: their means are not to be read
        )
        return cls(
            estimate,
            selected_mask,
            rng.normal(8, 3, (batch, kv_heads * R)).astype(np.float32),
            rng.integers(-127, 128, (pool, kv_heads, per_unit, D)).astype(np.int8),
            rng.random((pool, kv_heads, per_unit)).astype(np.float16),
            rng.random((pool, per_unit)) < 0.9,
            table,
            np.array(lengths, np.int32),
            S,
            correction_tokens,
        )

    def check(self, statistics: dict[str, shim.Statistics]) -> None:
        out, lse = correction.attend_correction(
            *(mx.array(x) for x in (self.estimate, self.selected_mask, self.lse, self.mean, self.scale, self.valid)),
            *(mx.array(x) for x in (self.table, self.lengths)),
            group_size=self.size,
            correction_tokens=self.correction_tokens,
        )
        true_out, true_lse, rows = self.truth()
        # products of a scale up to 1 with codes up to 127
        _close("correction", _float64(out) / 127, true_out / 127, ROUNDING[mx.float32])
        _close("log mass", _float64(lse), true_lse, ROUNDING[mx.float32])
        assert statistics["eps_correction_parts"].read["mean"] == rows * self.mean.shape[3], "bytes of means read"

    def truth(self) -> tuple[np.ndarray, np.ndarray, int]:
        """(out, lse, means with mass)."""
        batch, kv_heads, _ = self.estimate.shape
        per_correction, per_unit = self.correction_tokens // self.size, self.mean.shape[2]
        repeat, rows = self.lse.shape[1] // kv_heads, 0
        out, lse = np.zeros((*self.lse.shape, self.mean.shape[3])), np.full(self.lse.shape, -np.inf)
        for b, h in np.ndindex(batch, kv_heads):
            estimate = self.estimate[b, h].astype(np.float64)
            known = np.isfinite(estimate)
            seen = np.logaddexp.reduce(estimate[known & self.selected_mask[b, h]])
            mass = (
                np.exp(np.where(known & ~self.selected_mask[b, h], estimate, -np.inf))
                .reshape(-1, per_correction)
                .sum(axis=1)
            )
            values = np.zeros((len(mass), self.mean.shape[3]))
            for t in range(len(mass)):
                at = (self.table[b, t // per_unit], t % per_unit)
                if t >= self.lengths[b] // self.correction_tokens or not self.valid[at]:
                    mass[t] = 0
                elif mass[t] > 0:
                    rows += 1
                    values[t] = self.mean[at[0], h, at[1]] * self.scale[at[0], h, at[1]].astype(np.float64)
            if mass.sum() > 0:
                for head in range(h * repeat, (h + 1) * repeat):
                    out[b, head] = mass @ values / mass.sum()
                    lse[b, head] = np.log(mass.sum()) - max(seen - self.lse[b, head], 0)
        return out, lse, rows


TAILS: dict[str, dict[str, Any]] = {
    "D64-S2": dict(),
    "D128-S1-R1": dict(D=128, S=1, R=1, correction_tokens=64, lengths=(3000,)),
    "D80-S16-R16": dict(D=80, S=16, R=16, correction_tokens=16, lengths=(700, 129)),
    "D33-S3": dict(D=33, R=3, S=3, correction_tokens=6, U=12, lengths=(311, 13)),
    "D256-S64": dict(D=256, R=2, S=64, correction_tokens=128, U=128, lengths=(1000,)),
}


@pytest.mark.parametrize("case", TAILS)
def test_tail_equals_float64(metal_shim: Any, case: str) -> None:  # noqa: F811
    Tail.build(**TAILS[case]).check(metal_shim)


TAIL_BUGS: dict[str, tuple[str, str, str, int, str]] = {
    "no barrier": ("parts", BARRIER, "", 0, "race"),
    "counts the open correction group": ("parts", "lengths[b] / correction_tokens",
                                   "(lengths[b] + correction_tokens - 1) / correction_tokens", 0, "differs"),
    "ignores validity": ("parts", "if (!valid)", "if (false)", 0, "differs|out of bounds"),
    "reads means without mass": ("parts", "if (factor[j] != 0.0f)", "if (true)", 0, "bytes of means"),
    "no rescale": ("parts", "sum[i] *= rescale;", "", 0, "correction differs"),
    "no rescale of what was read": ("parts", "seen *= exp(seen_largest - seen_top);", "", 0, "log mass differs"),
    "wrong kv head": ("parts", "row % kv_heads) *", "0) *", 0, "correction differs|bytes"),
    "divergent maximum": ("parts", "simd_max(seen_largest)", "(lane < 9 ? simd_max(seen_largest) : NONE)", 0,
                          "divergent simd operation"),
    "raises what is lower": ("merge", "max(seen_top + log(seen) - lse[head], 0.0f)",
                             "(seen_top + log(seen) - lse[head])", 0, "log mass differs"),
}  # fmt: skip


@pytest.mark.parametrize("name", TAIL_BUGS)
def test_injected_bugs_of_the_tail_are_seen(
    metal_shim: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    kernel, text, replacement, occurrence, seen = TAIL_BUGS[name]
    monkeypatch.setattr(correction, kernel, broken(getattr(correction, kernel), text, replacement, occurrence))
    with pytest.raises((AssertionError, ShimError), match=seen):
        Tail.build(correction_tokens=4, S=2, lengths=(1301, 61)).check(metal_shim)


def generated() -> list[tuple[launch.Kernel, dict[str, Any], list[mx.array], list[mx.Dtype], str]]:
    """Every launch of a few calls: kernel, template, inputs, output dtypes and the text that MLX generates."""
    calls: list[Any] = []

    def record(
        kernel: Any, inputs: Any, template: Any, grid: Any, threadgroup: Any, shapes: Any, dtypes: Any
    ) -> list[mx.array]:
        text = shim.generated_text(kernel, inputs, template, dtypes)
        calls.append((kernel, template, inputs, dtypes, text))
        return [mx.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]

    with shim.installed():
        launch.runner = record
        for dtype, dim, repeat, lengths, dense, bits in (
            (mx.float32, 64, 4, (65,), False, (16, 16)),
            (mx.bfloat16, 128, 8, (65,) * 9, False, (16, 16)),
            (mx.float16, 33, 1, (65,), True, (16, 16)),
            (mx.float32, 64, 4, (65,), False, (8, 4)),
            (mx.bfloat16, 128, 8, (65,) * 9, False, (4, 8)),
            (mx.float16, 34, 1, (65,), True, (16, 4)),
        ):
            Scene.build(dtype, D=dim, R=repeat, lengths=lengths, dense=dense, bits=bits).run()
            # a batch of nine makes of the tables and lengths what `device` is, a batch of one `constant`
            scene = Tail.build(D=dim, lengths=lengths)
            correction.attend_correction(
                *(
                    mx.array(x)
                    for x in (scene.estimate, scene.selected_mask, scene.lse, scene.mean, scene.scale, scene.valid)
                ),
                *(mx.array(x) for x in (scene.table, scene.lengths)),
                group_size=scene.size,
                correction_tokens=scene.correction_tokens,
            )
    assert {kernel.name for kernel, *_ in calls} == {
        "eps_attend_decode", "eps_attend_decode_k8_v4", "eps_attend_decode_k4_v8", "eps_attend_decode_v4",
        "eps_attend_merge", "eps_correction_parts", "eps_correction_merge",
    }  # fmt: skip
    return calls


def test_clang_accepts_every_text() -> None:
    clang_check = pytest.importorskip("metal.clang_check", reason="libclang is absent", exc_type=ImportError)
    for kernel, template, *_, text in generated():
        assert clang_check.diagnostics(text) == [], (kernel.name, template)


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
    text = next(text for kernel, *_, text in generated() if kernel.name == "eps_attend_decode")
    break_it, message = CONTROLS[name]
    assert break_it(text) != text
    found = clang_check.diagnostics(break_it(text))
    assert any(message in one for one in found), found


@cuda_check.needs_nvcc
def test_nvcc_compiles_every_body(tmp_path: Path) -> None:
    assert not cuda_check.errors([(kernel, *launched) for kernel, *launched, _ in generated()], tmp_path)
