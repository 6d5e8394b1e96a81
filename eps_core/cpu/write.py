"""Writes K and V and finalizes rq summaries on a CPU, compiled: those of a prompt in all threads, a decode step's in
one.

No fastmath here: the order of float32 additions is part of rq's definition (oracle: `summaries.rq.build`), so that
codes are equal bit for bit in every library.
"""

import functools
import math
from collections.abc import Callable, Sequence

import numpy as np
from numba import types
from numba.extending import overload

from eps_core.config.formats import FORMATS, LEAST
from eps_core.cpu.compile import kernel
from eps_core.cpu.threads import finish, take, wait
from eps_core.cpu.vectors import LANES, put, wide
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
            for d in range(rows.shape[1]):
                rows[half, d] = rows[count - 1, d]
        count = half + odd


@kernel()
def copy(rows, out):
    """Copy rows [N, D] to the first of out."""
    for n in range(len(rows)):
        for d in range(rows.shape[1]):
            out[n, d] = rows[n, d]


def put_row(pool, row, values):
    """Write values [D], numbers as a cache's dtype stores them, or float32 for one in bfloat16, to the row of that name
    in a pool as `calls.Host.rows` gives it. Return whether all that is stored is finite."""


def _put_numbers(pool, row, values):
    is_finite = True
    for d in range(len(values)):
        put(pool, row + d, values[d])
        is_finite &= abs(wide(pool[row + d])) < np.inf
    return is_finite


def _put_codes(most, is_packed):
    def put_codes(pool, row, values):
        """`put_row` for codes: those that `eps_core.reference.codes` makes of numbers in the cache's dtype."""
        codes, scales, numbers = pool
        head_dim, stored, largest = len(values), np.empty(1, numbers.dtype), np.float32(0)
        x = np.empty(head_dim, np.float32)
        for d in range(head_dim):
            put(stored, 0, values[d])
            x[d] = wide(stored[0])
            largest = largest if largest > abs(x[d]) or largest != largest else abs(x[d])
        bits, scale = half_above(np.float32(0) if largest < LEAST else largest / most)
        scales[row] = bits
        for d in range(head_dim):
            code = np.int64(np.rint(x[d] / scale)) if 0 < scale < np.inf else 0
            if not is_packed:
                codes[row * head_dim + d] = code
            elif d % 2 == 0:
                codes[(row * head_dim + d) // 2] = code + 8
            else:
                codes[(row * head_dim + d) // 2] |= (code + 8) << 4
        return scale < np.inf

    return put_codes


@overload(put_row, jit_options={"fastmath": False, "error_model": "numpy"})  # else those of its caller
def _put_row(pool, row, values):
    if not isinstance(pool, types.BaseTuple):
        return _put_numbers
    bits = 8 if pool.types[0].dtype == types.int8 else 4
    return _put_codes(np.float32(FORMATS[bits].most), bits == 4)


@kernel()
def half_above(x):
    """Return the bits of the least float16 that is at least x, a float32 that is not negative, and that number itself
    as float32: Inf where x is above every finite one, NaN where x is NaN."""
    if not x <= 65504:
        return (0x7E00, x) if x != x else (0x7C00, np.float32(np.inf))
    exponent = max(math.frexp(x)[1], -13) if x > 0 else -13  # below 2^-14 a step is that of the numbers above it
    steps = np.int64(math.ceil(math.ldexp(x, 11 - exponent)))  # at most 2,048, which carries into the exponent
    return ((exponent + 13) << 10) + steps, np.float32(math.ldexp(float(steps), exponent - 11))


@kernel()
def place_rows(progress, k_pool, v_pool, k_strides, v_strides, k, v, slots, unit_tokens, finite):
    """Writes k, v [N, Hkv, D] to slots [N] of pools as `put_row` takes them. finite [1] becomes False where K is not.
    One phase."""
    tokens, kv_heads, _ = k.shape
    while True:
        n = take(progress, 0)
        if n >= tokens:
            break
        is_finite, unit = True, slots[n] // unit_tokens
        offset = slots[n] - unit * unit_tokens
        for h in range(kv_heads):
            is_finite &= put_row(k_pool, unit * k_strides[0] + h * k_strides[1] + offset * k_strides[2], k[n, h])
            put_row(v_pool, unit * v_strides[0] + h * v_strides[1] + offset * v_strides[2], v[n, h])
        if not is_finite:
            finite[0] = False
        finish(progress, 0)
    wait(progress, 0, tokens)


@kernel()
def rotate(x, signs, blocks, scales):
    """`rotate` of the array backends, in place, of every column of x [D, W]: butterflies from the largest half down,
    block by block."""
    for own in range(len(signs)):
        for d in range(len(x)):
            for lane in range(x.shape[1]):
                x[d, lane] *= signs[own, d]
        start = 0
        for block in range(len(blocks)):
            size = blocks[block]
            half = size // 2
            while half:
                for first in range(start, start + size, 2 * half):
                    for i in range(first, first + half):
                        for lane in range(x.shape[1]):
                            a, b = x[i, lane], x[i + half, lane]
                            x[i, lane], x[i + half, lane] = a + b, a - b
                half //= 2
            for i in range(start, start + size):
                for lane in range(x.shape[1]):
                    x[i, lane] *= scales[block]
            start += size


@functools.cache
def rotation(head_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """The blocks of `rotate` and their scales, which nobody may write to."""
    blocks = hadamard_blocks(head_dim)
    return np.array(blocks, np.int64), np.array([1 / math.sqrt(block) for block in blocks], np.float32)


@kernel()
def _encode_columns(x, sizes, with_second, second_step, sums, bits, codes, scale, second, second_scale):
    """Fills codes and second [n, bytes] with the bits of the first n columns of x [D, LANES], and scale and
    second_scale [n]; sizes [D, LANES], sums [4, LANES] and bits [2, LANES] are overwritten. second and second_scale
    are left alone without the rescoring bit."""
    step, energy, product, finer_product = sums[0], sums[1], sums[2], sums[3]
    sums[:] = 0
    bits[:] = 0
    if with_second:
        for d in range(len(x)):
            for lane in range(LANES):
                sizes[d, lane] = abs(x[d, lane])
        _fold(sizes, len(x))
        for lane in range(LANES):
            step[lane] = sizes[0, lane] * second_step
    for d in range(len(x)):
        bit = np.int32(1 << (d % 8))
        for lane in range(LANES):
            value = x[d, lane]
            level = np.float32(1) if value >= 0 else np.float32(-1)
            energy[lane] += value * value
            product[lane] += value * level
            bits[0, lane] |= bit if value >= 0 else np.int32(0)
        if with_second:
            for lane in range(LANES):
                value = x[d, lane]
                level = np.float32(1) if value >= 0 else np.float32(-1)
                upper = (value >= step[lane]) | ((value < 0) & (value >= -step[lane]))
                finer_product[lane] += value * (level + (np.float32(0.5) if upper else np.float32(-0.5)))
                bits[1, lane] |= bit if upper else np.int32(0)
        if d % 8 == 7 or d == len(x) - 1:
            for n in range(len(scale)):
                codes[n, d // 8] = bits[0, n]
                if with_second:
                    second[n, d // 8] = bits[1, n]
            bits[:] = 0
    for n in range(len(scale)):
        scale[n] = energy[n] / product[n] if product[n] > 0 else np.float32(0)
        if with_second:
            second_scale[n] = energy[n] / finer_product[n] if finer_product[n] > 0 else np.float32(0)


@kernel()
def turn_means(progress, k, size, signs, blocks, scales, turned, mean):
    """Fill, from the keys k [F, Hkv, U, D] of F spans, turned [F, Hkv, N, D] with the rotated means of their groups of
    `size`, and mean [F, Hkv, D] with that of these. One phase."""
    spans, kv_heads, finalized, head_dim = k.shape
    groups = finalized // size
    rows, columns = np.empty((max(size, groups), head_dim), np.float32), np.zeros((head_dim, LANES), np.float32)
    inverse, inverse_groups = np.float32(1 / size), np.float32(1 / groups)
    while True:
        task = take(progress, 0)
        if task >= spans * kv_heads:
            break
        f, h = divmod(task, kv_heads)
        for begin in range(0, groups, LANES):
            end = min(begin + LANES, groups)
            for n in range(begin, end):
                copy(k[f, h, n * size : (n + 1) * size], rows)
                _fold(rows, size)
                for d in range(head_dim):
                    columns[d, n - begin] = rows[0, d] * inverse
            rotate(columns, signs, blocks, scales)
            for n in range(begin, end):
                for d in range(head_dim):
                    turned[f, h, n, d] = columns[d, n - begin]
        copy(turned[f, h], rows)
        _fold(rows, groups)
        for d in range(head_dim):
            mean[f, h, d] = rows[0, d] * inverse_groups
        finish(progress, 0)
    wait(progress, 0, spans * kv_heads)


@kernel()
def encode_units(progress, turned, stored, second_step, codes, scale, second, second_scale):
    """`_encode_columns` of what turned [F, Hkv, N, D] differs from stored [F, Hkv, D]. One phase."""
    spans, kv_heads, groups, head_dim = turned.shape
    columns, sizes = np.zeros((head_dim, LANES), np.float32), np.empty((head_dim, LANES), np.float32)
    sums, bits = np.empty((4, LANES), np.float32), np.empty((2, LANES), np.int32)
    with_second = second.shape[0] > 0
    while True:
        task = take(progress, 0)
        if task >= spans * kv_heads:
            break
        f, h = divmod(task, kv_heads)
        for begin in range(0, groups, LANES):
            end = min(begin + LANES, groups)
            for n in range(begin, end):
                for d in range(head_dim):
                    columns[d, n - begin] = turned[f, h, n, d] - stored[f, h, d]
            own, own_scale = codes[f, h, begin:end], scale[f, h, begin:end]
            _encode_columns(
                columns, sizes, with_second, second_step, sums, bits, own, own_scale,
                second[f, h, begin:end] if with_second else own,
                second_scale[f, h, begin:end] if with_second else own_scale,
            )  # fmt: skip
        finish(progress, 0)
    wait(progress, 0, spans * kv_heads)


def unit_means(k: np.ndarray, size: int, signs: np.ndarray, run: Callable[..., None]) -> tuple[np.ndarray, np.ndarray]:
    """Return, of keys k [F, Hkv, U, D] float32 that are summarised together, the rotated means [F, Hkv, N, D] of their
    groups of `size` tokens, and the means of these [F, Hkv, D], float32, as `rq.build` has them."""
    spans, kv_heads, finalized, head_dim = k.shape
    turned = np.empty((spans, kv_heads, finalized // size, head_dim), np.float32)
    mean = np.empty((spans, kv_heads, head_dim), np.float32)
    run(turn_means, 1, k, size, signs, *rotation(head_dim), turned, mean, alone=spans == 1)
    return turned, mean


def build_units(
    turned: np.ndarray, stored: np.ndarray, dims: Sequence[int], with_second: bool, run: Callable[..., None]
) -> dict[str, np.ndarray]:
    """The codes of groups with rotated means turned [F, Hkv, N, D] float32 about the stored means [F, Hkv, D] float32,
    in parts of `dims` dimensions: the fields of `rq` [F, Hkv, ..] but for the mean. Scales are float32, to be rounded
    by the caller."""
    spans, kv_heads, groups, head_dim = turned.shape
    shape, kept = (kv_heads, groups, -(-head_dim // 8)), spans if with_second else 0
    codes, scale = np.zeros((spans, *shape), np.uint8), np.empty((spans, kv_heads, groups), np.float32)
    second, second_scale = np.zeros((kept, *shape), np.uint8), np.empty((kept, kv_heads, groups), np.float32)
    step = np.float32(SECOND_STEP / head_dim)
    run(encode_units, 1, turned, stored, step, codes, scale, second, second_scale, alone=spans == 1)
    edges = [-(-edge // 8) for edge in np.cumsum((0, *dims))]
    summary = {
        name: codes[..., start:end] for name, start, end in zip(PARTS[len(dims)], edges, edges[1:], strict=False)
    }
    summary["codes"] = summary["codes"].swapaxes(-1, -2)
    summary = {name: np.ascontiguousarray(part) for name, part in summary.items()} | {"scale": scale}
    return summary | {"second": second, "second_scale": second_scale} if with_second else summary
