"""Triton: what scores groups from their codes, each read once for all query heads (see `units`).

Integers times a query are a matrix product with as many columns as there are query heads, so it goes to the tensor
cores (`tl.dot`): rows are groups, columns query heads. 16-bit factors would cost a float32 query half of its digits.
So each head is scaled by a power of two to a largest entry in [2^13, 2^14) and split into its float16 and the float16
of what that leaves, two neighbouring columns (R <= 4: 8 columns, which the smallest product has anyway): 22 bits of the
largest entry, sums in float32. Codes are small integers, exact in float16.

Bits are never shifted to a place. The byte with all but one code masked away is an integer code * 2^shift, and an
integer below 1,024 *is* the bit pattern of that integer times 2^-24 in float16 (a subnormal number, which NVIDIA's
tensor cores multiply exactly): one AND for two codes. The 2^-shift goes to the query, the 2^24 to the sum, and levels
are codes less their middle: sum level * a = sum code * a - middle * sum a. Which dimensions share a product is free:
one product takes one code of every byte. AMD's matrix cores flush subnormals on some devices: there integers are
converted.

The array operations of the same formulas are in `eps_core.backend.summaries.rq`. Tile sizes change speed only; they
follow from compiled instruction counts.
"""

import torch
import triton
import triton.language as tl

CODE_BYTES = 16384  # of codes that one program decodes at most
BLOCK_GROUPS = 512  # that one program scores at most
FULL_PROGRAMS = 2048  # fewer groups a program rather than fewer programs than this
SMALLEST_BLOCK = 64  # groups; what Hopper's matrix instructions take at least


# ------------------------------------------------------------------------------------------------------------- kernels


@triton.jit
def _power(largest):
    """(2^n, 2^-n) float32 with largest * 2^n in [2^13, 2^14), by the exponent's bits."""
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 255
    field = tl.minimum(267 - exponent, 253)
    return (field << 23).to(tl.float32, bitcast=True), ((254 - field) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _halves(a, n):
    """float32 [K, 2 RP] scaled by `_power`, each head in the columns n = 2 r and 2 r + 1 -> float16: the two add up to
    a. (No join of two arrays: where a reshape feeds a product, Triton 3.9 fails to compile for Hopper.)"""
    high = a.to(tl.float16)
    low = (a - high.to(tl.float32)).to(tl.float16)
    return tl.where((n % 2 == 0)[None, :], high, low)


@triton.jit
def _pairs(total, BLOCK: tl.constexpr, RP: tl.constexpr):
    """[BLOCK, 2 RP] -> [BLOCK, RP]: the two halves of each head, neighbours in one thread's registers."""
    return tl.sum(tl.reshape(total, (BLOCK, RP, 2)), axis=2)


@triton.jit
def _once(twice, RP: tl.constexpr):
    """[2 RP] with each head's value twice -> [RP]."""
    return tl.max(tl.reshape(twice, (RP, 2)), axis=1)


@triton.jit
def _places(table_row, g, listed, kv_heads, h, GPU: tl.constexpr):
    """Return the index of groups g among the pool's groups of one head, and among those of all heads. int64."""
    unit = tl.maximum(tl.load(table_row + g // GPU, mask=listed, other=0), 0).to(tl.int64)
    return unit * GPU + g % GPU, (unit * kv_heads + h) * GPU + g % GPU


@triton.jit
def _query(turned_row, R: tl.constexpr, D: tl.constexpr, RP: tl.constexpr, DP: tl.constexpr):
    """Return each head's power of two that scales it [2 RP], its inverse [RP], and the sum of its entries [RP]."""
    r, d = tl.arange(0, 2 * RP) // 2, tl.arange(0, DP)
    a = tl.load(turned_row + r[:, None] * D + d[None, :], mask=(r < R)[:, None] & (d < D)[None, :], other=0.0)
    power, inverse = _power(tl.max(tl.abs(a), axis=1))
    return power, _once(inverse, RP), _once(tl.sum(a, axis=1), RP)


@triton.jit
def _from_byte(stored):
    """The float32 numbers that `_to_byte` stored."""
    return (stored.to(tl.uint16) << 7).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _columns(
    integers_row, head, WEIGHT: tl.constexpr, D: tl.constexpr, ROW: tl.constexpr, BYTES: tl.constexpr,
    BP: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """Return what the bits of D dimensions are multiplied with, a head [RP] a column: for each of the products
    float16 [BP * FOLD, RP], WEIGHT times an integer over the power of two that stands for a one in its place."""
    k = tl.arange(0, BP * FOLD)
    byte, fold = k % BP, k // BP
    columns = ()
    for step in tl.static_range((7 + FOLD) // FOLD):
        bit = step * FOLD + fold
        d = byte * 8 + bit
        used = (byte < BYTES) & (bit < 8) & (d < D)
        a = tl.load(integers_row + head[None, :] * ROW + d[:, None], mask=used[:, None], other=0.0).to(tl.float32)
        unshift = ((127 - bit) << 23).to(tl.float32, bitcast=True) * WEIGHT
        columns = columns + ((a * unshift[:, None]).to(tl.float16),)  # type: ignore[assignment]  # noqa: RUF005
    return columns


@triton.jit
def _add_bits(total, packed, columns, BP: tl.constexpr, FOLD: tl.constexpr, SUBNORMAL: tl.constexpr):
    """total [M, RP] and the products of the bits of packed [M, BP * FOLD] with `_columns`, times 2^-24 where
    SUBNORMAL."""
    for step in tl.static_range((7 + FOLD) // FOLD):
        if FOLD == 1:
            masked = packed & (1 << step)
        else:
            masked = packed & (1 << (step * FOLD + tl.arange(0, BP * FOLD) // BP)).to(tl.uint8)[None, :]
        if SUBNORMAL:
            total = tl.dot(masked.to(tl.uint16).to(tl.float16, bitcast=True), columns[step], total)
        else:
            total = tl.dot(masked.to(tl.float16), columns[step], total)
    return total


@triton.jit
def _integer_sums(integers_row, head, D: tl.constexpr, ROW: tl.constexpr, DP: tl.constexpr):
    """The sum of the first D integers of each head [RP]: float32."""
    d = tl.arange(0, DP)
    a = tl.load(integers_row + head[:, None] * ROW + d[None, :], mask=(d < D)[None, :], other=0.0)
    return tl.sum(a.to(tl.float32), axis=1)


@triton.jit
def _larger(a, b):
    """The larger of two, NaN if either is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _log(x, ASM: tl.constexpr):
    """The natural logarithm of x from 1 on: a single instruction on NVIDIA, 2^-22 off; the library's takes twenty."""
    if ASM:
        log2 = tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
        return log2 * 0.6931471805599453
    return tl.log(x)


@triton.jit
def _estimate(
    total, sums, step, shift, scale, R: tl.constexpr, RP: tl.constexpr, SUBNORMAL: tl.constexpr,
    LARGEST: tl.constexpr, SUM: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """[M] of what bits add up to [M, RP], where `sums` [RP] stand for zero: the most of all heads, or the log of the
    sum of their masses; LARGEST where one is not finite. Columns past R are of the same heads again."""
    ones = total * 16777216.0 if SUBNORMAL else total
    # a scale times these is exact
    estimate = shift + scale[:, None] * (ones - sums[None, :]) * step[None, :]
    best = tl.reduce(estimate, 1, _larger)
    if SUM:
        mass = tl.exp2((estimate - best[:, None]) * 1.4426950408889634)
        if RP % R == 0:
            mass = tl.sum(mass, axis=1) * (R / RP)
        else:
            mass = tl.sum(tl.where((tl.arange(0, RP) < R)[None, :], mass, 0.0), axis=1)
        best += _log(mass, ASM)
    return tl.where(tl.abs(best) < float("inf"), best, LARGEST)


# ----------------------------------------------------------------------------------------------------------- launchers


def _padded_heads(repeat: int) -> int:
    """Query heads of a product: two columns each, at least the 8 of NVIDIA's smallest, the 16 of AMD's."""
    return max(triton.next_power_of_2(repeat), 8 if torch.version.hip else 4)


def _block(rows: int, groups: int, row_bytes: int) -> int:
    """Groups that one program scores: as many as its registers hold, but enough programs to fill a GPU."""
    block = min(BLOCK_GROUPS, max(CODE_BYTES // row_bytes, SMALLEST_BLOCK))
    while block > SMALLEST_BLOCK and rows * groups < block * FULL_PROGRAMS:
        block //= 2
    return block
