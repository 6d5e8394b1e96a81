"""Seals 1-bit rq summaries on a CPU, compiled: what a decode step pays every S tokens in every layer.

No fastmath here: the order of float32 additions is part of rq's definition (oracle: `summaries.rq.build_rq`), so that
codes are equal bit for bit in every library.
"""

import functools
import math
from collections.abc import Mapping

import numpy as np

from eps_core.cpu.compile import kernel
from eps_core.summaries.rq import SECOND_STEP, hadamard_blocks


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
def rotate(x, signs, blocks, scales):
    """H diag(signs) x in place: butterflies from the largest half down, block by block."""
    for d in range(len(x)):
        x[d] *= signs[d]
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
def _seal(k, centre, signs, blocks, scales, inverse, second_step, codes, scale, second, second_scale):
    groups, kv_heads, size, head_dim = k.shape
    rows, column = np.empty((size, head_dim), np.float32), np.empty((head_dim, 1), np.float32)
    x = np.empty(head_dim, np.float32)
    for g in range(groups):
        for h in range(kv_heads):
            rows[:] = k[g, h]
            _fold(rows, size)
            for d in range(head_dim):
                x[d] = rows[0, d] * inverse - centre[h, d]
            rotate(x, signs, blocks, scales)
            step = np.float32(0)
            if second.shape[0]:
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
                    codes[g, h, d // 8] |= np.uint8(1 << (d % 8))
                if second.shape[0]:
                    upper = value >= step or (value < 0 and value >= -step)
                    if upper:
                        second[g, h, d // 8] |= np.uint8(1 << (d % 8))
                    finer_product += value * (level + (np.float32(0.5) if upper else np.float32(-0.5)))
            scale[g, h] = energy / product if product > 0 else 0
            if second.shape[0]:
                second_scale[g, h] = energy / finer_product if finer_product > 0 else 0


def build_rq(k: np.ndarray, centre: np.ndarray, signs: np.ndarray, with_second: bool) -> Mapping[str, np.ndarray]:
    """Summaries [F, Hkv, ..] of keys k [F, Hkv, S, D] float32, as `rq.build_rq` of one bit makes them: centre [Hkv, D],
    signs [D] float32. Scales are float32, to be rounded by the caller."""
    groups, kv_heads, size, head_dim = k.shape
    blocks, scales = rotation(head_dim)
    packed, kept = (groups, kv_heads, -(-head_dim // 8)), groups if with_second else 0
    codes, scale = np.zeros(packed, np.uint8), np.zeros(packed[:2], np.float32)
    second, second_scale = np.zeros((kept, *packed[1:]), np.uint8), np.zeros((kept, kv_heads), np.float32)
    _seal(
        k, centre, signs, blocks, scales, np.float32(1 / size), np.float32(SECOND_STEP / head_dim), codes, scale,
        second, second_scale,
    )  # fmt: skip
    summary = {"codes": codes, "scale": scale}
    return summary | {"second": second, "second_scale": second_scale} if with_second else summary
