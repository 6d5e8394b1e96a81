"""Finalizes rq summaries on a CPU, compiled: what a decode step pays in every layer each time that a unit is full.

No fastmath here: the order of float32 additions is part of rq's definition (oracle: `summaries.rq.build`), so that
codes are equal bit for bit in every library.
"""

import functools
import math
from collections.abc import Sequence

import numpy as np

from eps_core.cpu.compile import kernel
from eps_core.cpu.vectors import wide
from eps_core.summaries.rq import PARTS, SECOND_STEP, hadamard_blocks


@kernel()
def _fold(rows, count):
    """Sums rows [count, D] into the first as a tree of float32 additions."""
    while count > 1:
        half, odd = count // 2, count % 2
        for i in range(half):
            for d in range(rows.shape[1]):
                rows[i, d] += rows[half + i, d]
        if odd:
            rows[half] = rows[count - 1]
        count = half + odd


@kernel()
def place_rows(k_pool, v_pool, k_strides, v_strides, k, v, slots, unit_tokens):
    """Copies k, v [N, Hkv, D] to slots [N] of pools as `calls.rows_of` gives them. Returns whether K is finite."""
    tokens, kv_heads, head_dim = k.shape
    finite = True
    for n in range(tokens):
        unit = slots[n] // unit_tokens
        offset = slots[n] - unit * unit_tokens
        for h in range(kv_heads):
            k_row = unit * k_strides[0] + h * k_strides[1] + offset * k_strides[2]
            v_row = unit * v_strides[0] + h * v_strides[1] + offset * v_strides[2]
            for d in range(head_dim):
                k_pool[k_row + d], v_pool[v_row + d] = k[n, h, d], v[n, h, d]
                finite &= abs(wide(k[n, h, d])) < np.inf
    return finite


@kernel()
def rotate(x, signs, blocks, scales):
    """`rotate` of the array backends in place: butterflies from the largest half down, block by block."""
    for own in range(len(signs)):
        for d in range(len(x)):
            x[d] *= signs[own, d]
        start = 0
        for block in range(len(blocks)):
            size = blocks[block]
            half = size // 2
            while half:
                for first in range(start, start + size, 2 * half):
                    for i in range(first, first + half):
                        a, b = x[i], x[i + half]
                        x[i], x[i + half] = a + b, a - b
                half //= 2
            for i in range(start, start + size):
                x[i] *= scales[block]
            start += size


@functools.cache
def rotation(head_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """The blocks of `rotate` and their scales, which nobody may write to."""
    blocks = hadamard_blocks(head_dim)
    return np.array(blocks, np.int64), np.array([1 / math.sqrt(block) for block in blocks], np.float32)


@kernel()
def _encode(x, column, with_second, second_step, codes, second):
    """Sets the bits of one vector x [D] in codes and second [bytes], which are 0, and returns their scales; column
    [D, 1] is overwritten. Without the rescoring bit the scale of both is that of the first."""
    head_dim = len(x)
    step = np.float32(0)
    if with_second:
        for d in range(head_dim):
            column[d, 0] = abs(x[d])
        _fold(column, head_dim)
        step = column[0, 0] * second_step
    energy, product, finer_product = np.float32(0), np.float32(0), np.float32(0)
    for d in range(head_dim):
        value = x[d]
        energy += value * value
        positive = value >= 0
        level = np.float32(1) if positive else np.float32(-1)
        product += value * level
        if positive:
            codes[d // 8] |= np.uint8(1 << (d % 8))
        if with_second:
            upper = value >= step or (value < 0 and value >= -step)
            if upper:
                second[d // 8] |= np.uint8(1 << (d % 8))
            finer_product += value * (level + (np.float32(0.5) if upper else np.float32(-0.5)))
    scale = energy / product if product > 0 else np.float32(0)
    return scale, energy / finer_product if finer_product > 0 else np.float32(0)


@kernel()
def _turn_means(k, size, signs, blocks, scales, turned, mean):
    """Fill, from the keys k [F, Hkv, U, D] of F spans, turned [F, Hkv, N, D] with the rotated means of their groups of
    `size`, and mean [F, Hkv, D] with that of these."""
    spans, kv_heads, finalized, head_dim = k.shape
    groups = finalized // size
    rows = np.empty((max(size, groups), head_dim), np.float32)
    inverse, inverse_groups = np.float32(1 / size), np.float32(1 / groups)
    for f in range(spans):
        for h in range(kv_heads):
            for n in range(groups):
                rows[:size] = k[f, h, n * size : (n + 1) * size]
                _fold(rows, size)
                x = turned[f, h, n]
                for d in range(head_dim):
                    x[d] = rows[0, d] * inverse
                rotate(x, signs, blocks, scales)
            rows[:groups] = turned[f, h]
            _fold(rows, groups)
            for d in range(head_dim):
                mean[f, h, d] = rows[0, d] * inverse_groups


@kernel()
def _encode_units(turned, stored, second_step, codes, scale, second, second_scale):
    """`_encode` of what turned [F, Hkv, N, D] differs from stored [F, Hkv, D]; turned is overwritten."""
    spans, kv_heads, groups, head_dim = turned.shape
    column, unused = np.empty((head_dim, 1), np.float32), np.empty(0, np.uint8)
    with_second = second.shape[0] > 0
    for f in range(spans):
        for h in range(kv_heads):
            for n in range(groups):
                x = turned[f, h, n]
                for d in range(head_dim):
                    x[d] -= stored[f, h, d]
                own = second[f, h, n] if with_second else unused
                first, other = _encode(x, column, with_second, second_step, codes[f, h, n], own)
                scale[f, h, n] = first
                if with_second:
                    second_scale[f, h, n] = other


def unit_means(k: np.ndarray, size: int, signs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return, of keys k [F, Hkv, U, D] float32 that are summarised together, the rotated means [F, Hkv, N, D] of their
    groups of `size` tokens, and the means of these [F, Hkv, D], float32, as `rq.build` has them."""
    spans, kv_heads, finalized, head_dim = k.shape
    turned = np.empty((spans, kv_heads, finalized // size, head_dim), np.float32)
    mean = np.empty((spans, kv_heads, head_dim), np.float32)
    _turn_means(k, size, signs, *rotation(head_dim), turned, mean)
    return turned, mean


def build_units(
    turned: np.ndarray, stored: np.ndarray, dims: Sequence[int], with_second: bool
) -> dict[str, np.ndarray]:
    """The codes of groups with rotated means turned [F, Hkv, N, D] float32, which are overwritten, about the stored
    means [F, Hkv, D] float32, in parts of `dims` dimensions: the fields of `rq` [F, Hkv, ..] but for the mean. Scales
    are float32, to be rounded by the caller."""
    spans, kv_heads, groups, head_dim = turned.shape
    shape, kept = (kv_heads, groups, -(-head_dim // 8)), spans if with_second else 0
    codes, scale = np.zeros((spans, *shape), np.uint8), np.empty((spans, kv_heads, groups), np.float32)
    second, second_scale = np.zeros((kept, *shape), np.uint8), np.empty((kept, kv_heads, groups), np.float32)
    _encode_units(turned, stored, np.float32(SECOND_STEP / head_dim), codes, scale, second, second_scale)
    edges = [-(-edge // 8) for edge in np.cumsum((0, *dims))]
    summary = {
        name: codes[..., start:end] for name, start, end in zip(PARTS[len(dims)], edges, edges[1:], strict=False)
    }
    summary["codes"] = summary["codes"].swapaxes(-1, -2)
    summary = {name: np.ascontiguousarray(part) for name, part in summary.items()} | {"scale": scale}
    return summary | {"second": second, "second_scale": second_scale} if with_second else summary
