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
from numba.core import cgutils
from numba.extending import overload

from eps_core.config.formats import FORMATS, LEAST
from eps_core.cpu.compile import kernel
from eps_core.cpu.threads import finish, take, wait
from eps_core.cpu.vectors import LANES, emits, i8, i32, i64, put, repeated, splat, vector_of, wide
from eps_core.summaries.base import MEAN_MOST
from eps_core.summaries.rq import PARTS, SECOND_STEP, hadamard_blocks


@kernel()
def _fold(rows, count, width):
    """Sums rows [count width] into the first as a tree of float32 additions."""
    while count > 1:
        half, odd = count // 2, count % 2
        for i in range(half * width):
            rows[i] += rows[half * width + i]
        if odd:
            for i in range(width):
                rows[half * width + i] = rows[(count - 1) * width + i]
        count = half + odd


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
        bits, scale = half_of(np.float32(0) if largest < LEAST else largest / most, True)
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
def half_of(x, rounds_up):
    """Return the bits of a float16, and the number itself as float32, for x, a float32 that is not negative: of the
    least that is at least x where it `rounds_up`, else of the nearest, of two the even one. Inf where x is above every
    finite one, NaN where x is."""
    if not x < 65520:  # where the nearest is no longer the largest
        return (0x7E00, x) if x != x else (0x7C00, np.float32(np.inf))
    if x < 2.0**-14:  # multiples of the least one
        steps = np.float32(x * 2.0**24)
        steps = np.float32(math.ceil(steps)) if rounds_up else np.rint(steps)
        return np.int64(steps), steps * np.float32(2.0**-24)
    bits = np.int64(np.float32(x).view(np.int32))
    bits = (bits + (0x1FFF if rounds_up else 0xFFF + (bits >> 13 & 1))) >> 13  # which may carry into the exponent
    number = np.int32(bits << 13).view(np.float32)
    bits -= 112 << 10  # float32's bias is so much more
    return bits, number if bits < 0x7C00 else np.float32(np.inf)


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


@emits()
def turn_rows(builder, rows, places, target, start, count, step):
    """target[start + c step + r] = rows[places[r] + c], float32, for sixteen rows r, places [16], and `count` columns
    c, a multiple of four."""
    own = [builder.at(rows, builder.load(builder.at(places, r))) for r in range(LANES)]
    with builder.steps(0, count, 4) as column:
        turned = builder.transposed([builder.at(row, column) for row in own], 4)
        for j, vector in enumerate(turned):
            place = builder.total(start, (builder.total(column, j), step))
            builder.store_lanes(vector, builder.at(target, place))


@emits()
def _add_and_subtract(builder, x, first, second):
    """The sum and the difference of sixteen lanes of x at two places, in their places."""
    pointers = [builder.at(x, place) for place in (first, second)]
    a, b = (builder.load_lanes(pointer) for pointer in pointers)
    for value, pointer in zip((builder.fadd(a, b), builder.fsub(a, b)), pointers, strict=True):
        builder.store_lanes(value, pointer)


@emits()
def _multiply(builder, x, place, factor):
    """Sixteen lanes of x at a place times a factor."""
    pointer = builder.at(x, place)
    builder.store_lanes(builder.fmul(builder.load_lanes(pointer), builder.broadcast(factor)), pointer)


@kernel()
def rotate(x, signs, blocks, scales):
    """`rotate` of the array backends, in place, of every column of x [D LANES]: butterflies from the largest half down,
    block by block."""
    for own in range(len(signs)):
        for d in range(signs.shape[1]):
            _multiply(x, d * LANES, signs[own, d])
        start = 0
        for block in range(len(blocks)):
            size = blocks[block]
            half = size // 2
            while half:
                for first in range(start, start + size, 2 * half):
                    for i in range(first, first + half):
                        _add_and_subtract(x, i * LANES, (i + half) * LANES)
                half //= 2
            for i in range(start, start + size):
                _multiply(x, i * LANES, scales[block])
            start += size


@functools.cache
def rotation(head_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """The blocks of `rotate` and their scales, which nobody may write to."""
    blocks = hadamard_blocks(head_dim)
    return np.array(blocks, np.int64), np.array([1 / math.sqrt(block) for block in blocks], np.float32)


@emits()
def _subtract(builder, x, place, value, sizes):
    """Sixteen lanes of x at a place less a value, and their sizes at the same place."""
    pointer = builder.at(x, place)
    left = builder.fsub(builder.load_lanes(pointer), builder.broadcast(value))
    builder.store_lanes(left, pointer)
    builder.store_lanes(builder.call_floats("fabs", left), builder.at(sizes, place))


@emits()
def _encode_lanes(builder, x, head_dim, step, with_second, codes, sums):
    """Codes of the sixteen columns of x [D LANES]: codes[j LANES + l] becomes byte j of the signs of lane l and, behind
    all of these, of its rescoring bits by step [LANES]; sums [3 LANES] energy, product of x and signs, and product of x
    and the finer levels."""
    zero, one, half = splat(0.0), splat(1.0), splat(0.5)
    upper_from = builder.load_lanes(step)
    energy, product, finer = (cgutils.alloca_once_value(builder, zero) for _ in range(3))
    bits = [cgutils.alloca_once(builder, vector_of(i32)) for _ in range(2)]
    num_bytes = builder.udiv(builder.total(head_dim, 7), i64(8))

    def signed(size, is_positive):
        return builder.select(is_positive, size, builder.fneg(size))

    def add(kept, value):
        builder.store(builder.fadd(builder.load(kept), value), kept)

    with builder.steps(0, num_bytes) as byte:
        for kept in bits:
            builder.store(repeated(0), kept)
        first = builder.mul(byte, i64(8))
        left = builder.sub(head_dim, first)
        with builder.steps(0, builder.select(builder.icmp_signed("<", left, i64(8)), left, i64(8))) as d:
            bit = builder.broadcast(builder.shl(i32(1), builder.trunc(d, i32)))
            value = builder.load_lanes(builder.at(x, (builder.total(first, d), LANES)))
            positive = builder.fcmp_ordered(">=", value, zero)
            # of what is negative, that nearer to zero; of what is not a number, neither
            threshold = builder.select(builder.fcmp_ordered("<", value, zero), builder.fneg(upper_from), upper_from)
            upper = builder.fcmp_ordered(">=", value, threshold)
            level = signed(one, positive)
            add(energy, builder.fmul(value, value))
            add(product, builder.fmul(value, level))
            with builder.if_then(with_second):
                add(finer, builder.fmul(value, builder.fadd(level, signed(half, upper))))
            for kept, is_set in zip(bits, (positive, upper), strict=True):
                builder.store(builder.or_(builder.load(kept), builder.select(is_set, bit, repeated(0))), kept)
        for kept, start in zip(bits, (i64(0), num_bytes), strict=True):
            stored = builder.trunc(builder.load(kept), vector_of(i8))
            place = builder.at(codes, (builder.total(start, byte), i64(LANES)))
            builder.store(stored, builder.bitcast(place, stored.type.as_pointer()), align=1)
    for i, kept in enumerate((energy, product, finer)):
        builder.store_lanes(builder.load(kept), builder.at(sums, i * LANES))


@kernel()
def largest_size(x):
    """Return the largest |x|, NaN where one is."""
    largest = np.float32(0)
    for d in range(len(x)):
        size = abs(x[d])
        largest = largest if largest > size or largest != largest else size
    return largest


@kernel()
def _mean_codes(mu, codes, stored):
    """Fills codes [D] with the bytes of `mean_codes` of mu [D], and stored [D] with the numbers that they stand for.
    Returns the bits of the float16 scale."""
    largest, most = largest_size(mu), np.float32(MEAN_MOST)
    bits, scale = half_of(largest / most * np.float32(1 + 2.0**-10) + np.float32(2.0**-24), False)
    if not (largest > 0 and scale < np.inf):
        bits, scale = 0, np.float32(0)
    for d in range(len(mu)):
        code = min(max(np.rint(mu[d] / scale), -most), most) if scale > 0 else np.float32(0)
        codes[d] = np.int64(code) + (MEAN_MOST + 1)
        stored[d] = code * scale
    return bits


@kernel()
def _scale_byte(energy, product):
    """Return `to_byte` of the scale of codes: energy over product, 0 where the product is not positive. What is not
    finite counts as the largest scale."""
    if not product > 0:
        return 0
    scale = energy / product
    bits, _ = half_of(np.float32(65504) if scale > 65504 else scale, False)
    return min((bits + 64) >> 7, 0xF7)


@kernel()
def build_units(
    progress, keys, size, signs, blocks, scales, second_step, parts, mean, mean_scale, scale, second, second_scale
):  # fmt: skip
    """Fills the fields of `rq` of F spans with keys [F U Hkv D] float32, in N groups of `size` tokens: the parts of
    the codes, three, [F, Hkv, bytes, N] of the first and [F, Hkv, N, bytes] of the others; mean [F, Hkv, D]; mean_scale
    [F, Hkv], bits; scale [F, Hkv, N]; second [F, Hkv, N, bytes] and second_scale [F, Hkv, N], unless they are empty.
    Head dims are filled up with zeros to a multiple of LANES. One phase."""
    spans, kv_heads, head_dim = mean.shape
    groups, num_bytes, with_second = scale.shape[2], (head_dim + 7) // 8, len(second) > 0
    passes, width = (groups + LANES - 1) // LANES, (head_dim + LANES - 1) // LANES * LANES
    rows = np.zeros(passes * LANES * width, np.float32)  # a group each, then rotated
    columns, sizes = np.empty((passes, width * LANES), np.float32), np.empty(width * LANES, np.float32)
    fold = np.empty(max(size, groups) * width, np.float32)
    stored, step = np.empty(head_dim, np.float32), np.zeros(LANES, np.float32)
    codes, sums = np.empty(2 * num_bytes * LANES, np.uint8), np.empty(3 * LANES, np.float32)
    inverse, inverse_groups = np.float32(1 / size), np.float32(1 / groups)
    group_places, dim_places = np.arange(passes * LANES) * width, np.arange(width) * LANES
    first, more, rest = parts
    split, last = first.shape[2], first.shape[2] + more.shape[3]
    while True:
        task = take(progress, 0)
        if task >= spans * kv_heads:
            break
        f, h = divmod(task, kv_heads)
        for n in range(groups):
            for i in range(size):
                start = (((f * groups + n) * size + i) * kv_heads + h) * head_dim
                for d in range(head_dim):
                    fold[i * head_dim + d] = keys[start + d]
            _fold(fold, size, head_dim)
            for d in range(head_dim):
                rows[n * width + d] = fold[d] * inverse
        for number in range(passes):
            x = columns[number]
            turn_rows(rows, group_places[number * LANES :], x, 0, width, LANES)
            rotate(x, signs, blocks, scales)
            for d in range(0, width, LANES):
                turn_rows(x, dim_places[d:], rows, number * LANES * width + d, LANES, width)
        for i in range(groups * width):
            fold[i] = rows[i]
        _fold(fold, groups, width)
        for d in range(head_dim):
            fold[d] *= inverse_groups
        mean_scale[f, h] = _mean_codes(fold[:head_dim], mean[f, h], stored)
        for number in range(passes):
            x, begin = columns[number], number * LANES
            for d in range(head_dim):
                _subtract(x, d * LANES, stored[d], sizes)
            if with_second:
                _fold(sizes, head_dim, np.int64(LANES))
                for lane in range(LANES):
                    step[lane] = sizes[lane] * second_step
            _encode_lanes(x, head_dim, step, with_second, codes, sums)
            for lane in range(min(groups - begin, LANES)):
                n = begin + lane
                scale[f, h, n] = _scale_byte(sums[lane], sums[LANES + lane])
                for byte in range(num_bytes):
                    code = codes[byte * LANES + lane]
                    if byte < split:
                        first[f, h, byte, n] = code
                    elif byte < last:
                        more[f, h, n, byte - split] = code
                    else:
                        rest[f, h, n, byte - last] = code
                if with_second:
                    second_scale[f, h, n] = _scale_byte(sums[lane], sums[2 * LANES + lane])
                    for byte in range(num_bytes):
                        second[f, h, n, byte] = codes[(num_bytes + byte) * LANES + lane]
        finish(progress, 0)
    wait(progress, 0, spans * kv_heads)


def build(
    k: np.ndarray, size: int, signs: np.ndarray, dims: Sequence[int], with_second: bool, run: Callable[..., None]
) -> dict[str, np.ndarray]:
    """Return the fields of `rq` [F, Hkv, ..] of keys k [F, U, Hkv, D] float32 that are summarised together, in groups
    of `size` tokens and with codes in parts of `dims` dimensions."""
    spans, unit_tokens, kv_heads, head_dim = k.shape
    lead, groups, kept = (spans, kv_heads), unit_tokens // size, spans if with_second else 0
    split, *others = (-(-one // 8) for one in dims)
    parts = [np.empty((*lead, split, groups), np.uint8), *(np.empty((*lead, groups, one), np.uint8) for one in others)]
    # of two parts the second is the rest; a kernel is given three
    empty = [np.empty((*lead, groups, 0), np.uint8)] * (3 - len(parts))
    fields: dict[str, np.ndarray] = {
        "mean": np.empty((*lead, head_dim), np.uint8),
        "mean_scale": np.empty(lead, np.uint16),
        "scale": np.empty((*lead, groups), np.uint8),
        "second": np.empty((kept, kv_heads, groups, -(-head_dim // 8)), np.uint8),
        "second_scale": np.empty((kept, kv_heads, groups), np.uint8),
    }
    step = np.float32(SECOND_STEP / head_dim)
    keys, given = np.ascontiguousarray(k).reshape(-1), (parts[0], *empty, *parts[1:])
    constants = size, signs, *rotation(head_dim), step
    run(build_units, 1, keys, *constants, given, *fields.values(), alone=spans == 1)
    fields["mean_scale"] = fields["mean_scale"].view(np.float16)
    return {name: field for name, field in fields.items() if len(field)} | dict(
        zip(PARTS[len(parts)], parts, strict=True)
    )
