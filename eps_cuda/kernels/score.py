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

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

MEANS = 16  # that a program multiplies at a time: the fewest rows of a product


# ------------------------------------------------------------------------------------------------------------- kernels


@triton.jit
def _power(largest):
    """(2^n, 2^-n) float32 with largest * 2^n in [2^13, 2^14), by the exponent's bits."""
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 255
    field = tl.minimum(267 - exponent, 253)
    return (field << 23).to(tl.float32, bitcast=True), ((254 - field) << 23).to(tl.float32, bitcast=True)


@triton.jit
def in_halves(a):
    """A head [D] float32 -> two float16 arrays that add up to the head scaled by `_power`, and the inverse of that."""
    power, inverse = _power(tl.max(tl.abs(a), axis=0))
    scaled = a * power
    high = scaled.to(tl.float16)
    return high, (scaled - high.to(tl.float32)).to(tl.float16), inverse


@triton.jit
def _pairs(total, BLOCK: tl.constexpr, RP: tl.constexpr):
    """[BLOCK, 2 RP] -> [BLOCK, RP]: the two halves of each head, neighbours in one thread's registers."""
    return tl.sum(tl.reshape(total, (BLOCK, RP, 2)), axis=2)


@triton.jit
def _places(table_row, g, listed, kv_heads, h, GPU: tl.constexpr):
    """Return the index of groups g among the pool's groups of one head, and among those of all heads. int64."""
    unit = tl.maximum(tl.load(table_row + g // GPU, mask=listed, other=0), 0).to(tl.int64)
    return unit * GPU + g % GPU, (unit * kv_heads + h) * GPU + g % GPU


@triton.jit
def share_of(length, spans, SPAN: tl.constexpr):
    """Return (first, last) of the units of SPAN tokens that this program takes: those of a sequence, of at most `spans`
    in a table, are dealt evenly, however wide the table is."""
    there = tl.minimum((length + SPAN - 1) // SPAN, spans)
    each = (there + tl.num_programs(0) - 1) // tl.num_programs(0)
    first = tl.program_id(0) * each
    return first, tl.minimum(first + each, there)


@triton.jit
def fill_past(estimate_row, length, spans, N: tl.constexpr, S: tl.constexpr, NP: tl.constexpr):
    """-inf for the groups of units past a sequence's end, shared by its programs."""
    n = tl.arange(0, NP)
    there = (length + N * S - 1) // (N * S)
    for span in range(there + tl.program_id(0), spans, tl.num_programs(0)):
        tl.store(estimate_row + span * N + n, tl.full([NP], -float("inf"), tl.float32), mask=n < N)


@triton.jit
def score_means(
    first, last, row, halves, inverses, head_sums, mean, mean_scale, anchors, table, lengths, bases, table_units, spans,
    kv_heads, R: tl.constexpr, D: tl.constexpr, RP: tl.constexpr, DK: tl.constexpr, SUBNORMAL: tl.constexpr,
    SPU: tl.constexpr, SPAN: tl.constexpr, LOG_S: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the `bases` of units first to last of a row, a (sequence, kv head), BLOCK of them at a time: log S + m_hat
    . a of each query head, less its anchor unless there is none."""
    b, h = row // kv_heads, row % kv_heads
    length = tl.load(lengths + b)
    # codes times two neighbouring columns a head, and times 2^-24 where SUBNORMAL
    r, d, column = tl.arange(0, RP), tl.arange(0, DK), tl.arange(0, 2 * RP)
    used = (d < D)[:, None] & (column < 2 * R)[None, :]
    query = tl.load(halves + (row * 2 * R + column)[None, :] * D + d[:, None], mask=used, other=0.0)
    unit = tl.load(inverses + row * R + r, mask=r < R, other=0.0) * (16777216.0 if SUBNORMAL else 1.0)
    middle = 128 * tl.load(head_sums + row * R + r, mask=r < R, other=0.0)
    for start in range(first, last, BLOCK):
        span = start + tl.arange(0, BLOCK)
        inside = (span < spans) & (span < (length + SPAN - 1) // SPAN)
        _, tile = _places(table + b * table_units, span, inside, kv_heads, h, SPU)
        codes = tl.load(mean + tile[:, None] * D + d[None, :], mask=inside[:, None] & (d < D)[None, :], other=0)
        short = codes.to(tl.uint16).to(tl.float16, bitcast=True) if SUBNORMAL else codes.to(tl.float16)
        dots = _pairs(tl.dot(short, query), BLOCK, RP) * unit[None, :] - middle[None, :]
        step = tl.load(mean_scale + tile, mask=inside, other=0.0).to(tl.float32)
        base = LOG_S + dots * step[:, None]
        if anchors is not None:
            base -= tl.load(anchors + row * R + r, mask=r < R, other=0.0)[None, :]
        place = (row.to(tl.int64) * spans + span)[:, None] * R + r[None, :]
        tl.store(bases + place, base, mask=((span < spans) & (span < last))[:, None] & (r < R)[None, :])


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


@dataclass(frozen=True)
class Depth:
    """Counts of groups, per sequence and kv head, of which a step reads so much of a code: counts [B] int32 on the
    device, and the most that they can be, which the host knows before a step is captured. 0: none."""

    cascaded: tuple[tuple[Tensor, int], ...]  # each part after the first
    rescored: tuple[Tensor, int]  # the rescoring bit
    at_once: bool = False  # whole codes and rescoring bits of all groups


@dataclass(frozen=True)
class Query:
    """Query heads as kernels of codes take them: `units.round_queries`."""

    halves: Tensor  # [B, Hkv, R, 2, D] float16: rotated heads as `in_halves` leaves them
    inverses: Tensor  # [B, Hkv, R] float32: halves times these add up to the rotated heads
    head_sums: Tensor  # [B, Hkv, R] float32 of the rotated heads
    integers: Tensor  # [B, Hkv, R, D] float16: rotated heads ~ integers * steps
    steps: Tensor  # [B, Hkv, R] float32
    anchors: Tensor | None  # [B, Hkv, R] float32 (`scoring.anchors`)
    planes: Tensor | None  # [B, Hkv, R, PLANES, D / 32] int32: bits of the integers
    sums: Tensor | None  # [B, Hkv, R] float32 of the integers, where there are planes


def _padded_heads(repeat: int) -> int:
    """Query heads of a product: two columns each, at least the 8 of NVIDIA's smallest, the 16 of AMD's."""
    return max(triton.next_power_of_2(repeat), 8 if torch.version.hip else 4)
