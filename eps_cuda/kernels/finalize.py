"""Summaries of what a write fills, from keys in registers and pools: the parts of `write.write_kernel`.

rq's sign codes and rescoring bits are the array path's bit for bit (on a CPU, where `rq.build` rounds every operation):
additions run in `tree_sum`'s and `rotate`'s order, division and square root round to nearest, and the launch forbids
to contract a product and a sum (`enable_fp_fusion`), which would else round once, not twice. Scales, whose sums' order
torch leaves open, may differ by one step of what they are stored in, and that only beside a rounding boundary.
"""

import triton
import triton.language as tl

from eps_core.summaries.base import MEAN_MOST

UP = tl.constexpr(1 + 2.0**-10)  # see `up16`
UP_TINY = tl.constexpr(2.0**-24)
MOST = tl.constexpr(MEAN_MOST)
HALF_MOST = tl.constexpr(65504.0)
ROOT_HALF = tl.constexpr(0.7071067811865476)
TO_INTEGER = tl.constexpr(1.5 * 2.0**23)  # x + this - this is x rounded to the nearest integer, ties to even


@triton.jit
def _near16(x):
    return tl.where(x > HALF_MOST, HALF_MOST, tl.where(x < -HALF_MOST, -HALF_MOST, x)).to(tl.float16)


@triton.jit
def _tree_row(leaf, ROWS: tl.constexpr, LOG: tl.constexpr):
    """(row, whether there is one) of each leaf of `tree_sum`'s tree over ROWS rows, drawn as a full binary tree of
    2^LOG leaves whose children differ in the leaf's lowest bit at the root and in its highest at the bottom: adding
    leaf i and i + 2^LOG / 2, and so on, is `tree_sum`. An odd row out is paired with no row, that is with 0; where
    ROWS is a power of two, row = leaf."""
    row = tl.zeros_like(leaf)
    there = leaf < (1 << LOG)
    for bit in tl.static_range(LOG):
        # of the ceil(ROWS / 2^..) sums one level below, row i is i and i + half, and the last, if odd, one alone
        half = ((ROWS + (1 << (LOG - 1 - bit)) - 1) >> (LOG - 1 - bit)) // 2
        branch = (leaf >> bit) & 1
        there = there & ((row < half) | (branch == 0))
        row = tl.where(row < half, row + branch * half, 2 * half)
    return row, there


@triton.jit
def _add_halves(x, ROWS: tl.constexpr, DIM2: tl.constexpr, LOG: tl.constexpr):
    """[ROWS, DIM2] -> [DIM2], ROWS = 2^LOG: rows i and i + ROWS / 2, then i and i + ROWS / 4, and so on."""
    for level in tl.static_range(LOG):
        low, high = tl.split(tl.permute(tl.reshape(x, (2, ROWS >> (level + 1), DIM2)), (1, 2, 0)))
        x = low + high
    return tl.reshape(x, (DIM2,))


@triton.jit
def _butterfly(x, HALF: tl.constexpr, SIZE: tl.constexpr):
    """[SIZE]: of each run of 2 * HALF, (first + second, first - second) of its halves."""
    first, second = tl.split(tl.permute(tl.reshape(x, (SIZE // (2 * HALF), 2, HALF)), (0, 2, 1)))
    return tl.reshape(tl.permute(tl.join(first + second, first - second), (0, 2, 1)), (SIZE,))


@triton.jit
def _rotate(x, signs, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM2: tl.constexpr, LOG_DIM: tl.constexpr):
    """`rotate` over each row of [ROWS * DIM2], signs [2, HEAD_DIM]: each Hadamard block, a power of two, starts at a
    multiple of its size."""
    d = tl.arange(0, ROWS * DIM2) % DIM2
    size = tl.zeros((ROWS * DIM2,), tl.int32)
    factor = tl.zeros((ROWS * DIM2,), tl.float32)
    for log in tl.static_range(LOG_DIM + 1):
        if (HEAD_DIM >> log) % 2 == 1:
            inside = (d >> log) == ((HEAD_DIM >> log) - 1)
            size = tl.where(inside, 1 << log, size)
            # float32(1 / sqrt(2^log)): powers of two are exact
            factor = tl.where(inside, 0.5 ** (log // 2) * (ROOT_HALF if log % 2 == 1 else 1.0), factor)
    for own in tl.static_range(2):
        x *= tl.load(signs + own * HEAD_DIM + d, mask=d < HEAD_DIM, other=0.0)
        for level in tl.static_range(LOG_DIM):
            if DIM2 >> level <= HEAD_DIM:
                x = tl.where(size >= DIM2 >> level, _butterfly(x, DIM2 >> (level + 1), ROWS * DIM2), x)
        x *= factor
    return x


@triton.jit
def _pack(bits, SIZE: tl.constexpr):
    """`pack_codes` of one bit: int32 [SIZE] -> [SIZE / 8] bytes."""
    return tl.sum(tl.reshape(bits, (SIZE // 8, 8)) << tl.arange(0, 8)[None, :], axis=1).to(tl.uint8)


@triton.jit
def _unbiased_scale(energy, product):
    """near16 of |x|^2 / <x, levels>, 0 where the product is not positive."""
    return _near16(tl.where(product > 0, tl.div_rn(energy, tl.where(product > 0, product, 1.0)), 0.0))


@triton.jit
def _to_byte(scale):
    """`base.to_byte` of float16 numbers that are not negative."""
    bits = scale.to(tl.uint16, bitcast=True).to(tl.int32)
    return tl.minimum((bits + 64) >> 7, 0xF7).to(tl.uint8)


@triton.jit
def _mean_codes(mu):
    """`mean_codes`: integers within +-MOST as float32 [DIM2], and their float16 scale."""
    largest = tl.max(tl.abs(mu))
    up = (tl.div_rn(largest, MOST * 1.0) * UP + UP_TINY).to(tl.float16)
    # tl.max may pass over NaN
    has_nan = tl.max((mu != mu).to(tl.int32)) > 0
    usable = (largest > 0) & (up.to(tl.float32) < float("inf")) & (has_nan == 0)
    step = tl.where(usable, up.to(tl.float32), 1.0)
    nearest = (tl.div_rn(tl.where(usable, mu, 0.0), step) + TO_INTEGER) - TO_INTEGER
    codes = tl.where(nearest > MOST, MOST * 1.0, tl.where(nearest < -MOST, -MOST * 1.0, nearest))
    return codes, tl.where(usable, up, 0.0)


@triton.jit
def _store_part(
    part, packed, at, FIRST: tl.constexpr, BYTES: tl.constexpr, BY_PLANE: tl.constexpr, GROUPS: tl.constexpr,
    ROW: tl.constexpr,
):  # fmt: skip
    """Bytes FIRST to FIRST + BYTES of each group's ROW ones, packed [GROUPS * ROW], to the place `at` of `part`."""
    i = tl.arange(0, GROUPS * ROW)
    group, byte = i // ROW, i % ROW - FIRST
    place = byte * GROUPS + group if BY_PLANE else group * BYTES + byte
    tl.store(part + at * (GROUPS * BYTES) + place, packed, mask=(byte >= 0) & (byte < BYTES))


@triton.jit
def _finalize_unit(
    rows, new, signs, at, mean, mean_scale, codes, more, rest, scale, second, second_scale,
    TOKENS: tl.constexpr, GROUPS: tl.constexpr, LOG_GROUPS: tl.constexpr, LOG_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM2: tl.constexpr, LOG_DIM: tl.constexpr,
    CODES: tl.constexpr, MORE: tl.constexpr, REST: tl.constexpr, SECOND: tl.constexpr, TOKEN_STRIDE: tl.constexpr,
):  # fmt: skip
    """`rq.build` of the TOKENS keys at `rows` about their mean, in GROUPS groups of 2^LOG_SIZE, stored at `at`; the
    last key is `new` [DIM2], in registers. CODES, MORE and REST: bytes of each part of the code."""
    d = tl.arange(0, DIM2)
    inside = d < HEAD_DIM
    # the first keys of all groups, then the second ones: halves of these rows are halves of every group
    i = tl.arange(0, TOKENS)
    token = (i % GROUPS << LOG_SIZE) + i // GROUPS
    stored = (token < TOKENS - 1)[:, None] & inside[None, :]
    k = tl.load(rows + token[:, None] * TOKEN_STRIDE + d[None, :], mask=stored, other=0)
    k = tl.where((token == TOKENS - 1)[:, None], new[None, :], k).to(tl.float32)
    total = _add_halves(tl.reshape(k, (1 << LOG_SIZE, GROUPS * DIM2)), 1 << LOG_SIZE, GROUPS * DIM2, LOG_SIZE)
    y = _rotate(total * (1.0 / (1 << LOG_SIZE)), signs, GROUPS, HEAD_DIM, DIM2, LOG_DIM)
    y = tl.reshape(y, (GROUPS, DIM2))

    integers, step = _mean_codes(_add_halves(y, GROUPS, DIM2, LOG_GROUPS) * (1.0 / GROUPS))
    tl.store(mean + at * HEAD_DIM + d, (integers.to(tl.int32) + (MOST + 1)).to(tl.uint8), mask=inside)
    tl.store(mean_scale + at, step)

    x = y - (integers * step.to(tl.float32))[None, :]
    positive = (inside[None, :] & (x >= 0)).to(tl.int32)
    levels = 2.0 * positive.to(tl.float32) - 1.0
    energy = tl.sum(x * x, axis=1)
    group = at * GROUPS + tl.arange(0, GROUPS)
    tl.store(scale + group, _to_byte(_unbiased_scale(energy, tl.sum(tl.abs(x), axis=1))))
    ROW: tl.constexpr = DIM2 // 8
    packed = _pack(tl.reshape(positive, (GROUPS * DIM2,)), GROUPS * DIM2)
    _store_part(codes, packed, at, 0, CODES, True, GROUPS, ROW)
    if more is not None:
        _store_part(more, packed, at, CODES, MORE, False, GROUPS, ROW)
    if rest is not None:
        _store_part(rest, packed, at, CODES + MORE, REST, False, GROUPS, ROW)
    if second is not None:
        size = tl.abs(x)
        if HEAD_DIM != DIM2:
            leaf_row, there = _tree_row(d, HEAD_DIM, LOG_DIM)
            leaf_row = tl.broadcast_to(leaf_row[None, :], (GROUPS, DIM2))
            size = tl.where(there[None, :], tl.gather(size, leaf_row, 1), 0.0)
        step = (_add_halves(tl.trans(size), DIM2, GROUPS, LOG_DIM) * SECOND)[:, None]
        finer = (inside[None, :] & ((x >= step) | ((x < 0) & (x >= -step)))).to(tl.int32)
        packed = _pack(tl.reshape(finer, (GROUPS * DIM2,)), GROUPS * DIM2)
        _store_part(second, packed, at, 0, (HEAD_DIM + 7) // 8, False, GROUPS, ROW)
        finer_levels = levels + 0.5 * (2.0 * finer.to(tl.float32) - 1.0)
        tl.store(second_scale + group, _to_byte(_unbiased_scale(energy, tl.sum(x * finer_levels, axis=1))))
