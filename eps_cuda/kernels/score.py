"""Triton: estimates of all groups from the codes of `meanstd`, each read once for all query heads, and what `units`
shares with it.

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

The array operations of the same formulas are in `eps_cuda/summaries/`. Tile sizes change speed only; they follow
from compiled instruction counts and have not been timed on a GPU.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from eps_core.summaries.base import LARGEST_ESTIMATE

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
def _settle(estimate, R: tl.constexpr, RP: tl.constexpr, LARGEST: tl.constexpr, SUM: tl.constexpr = False):
    """[BLOCK, RP] of each head -> [BLOCK]: what is not finite becomes LARGEST, then the most of R heads, or the log of
    the sum of their masses."""
    estimate = tl.where(tl.abs(estimate) < float("inf"), estimate, LARGEST)
    estimate = tl.where((tl.arange(0, RP) < R)[None, :], estimate, -float("inf"))
    most = tl.max(estimate, axis=1)
    return most + tl.log(tl.sum(tl.exp(estimate - most[:, None]), axis=1)) if SUM else most


@triton.jit
def _store_estimate(
    best, estimate, valid, place, span, g, row, length, groups, inside, SPAN: tl.constexpr,
):  # fmt: skip
    """+inf inside the sequence without a valid summary, -inf past its end. `span`: the run of SPAN tokens that is
    summarised together in which group g lies; `place`: its own among those of the pool."""
    is_open = (span == (length + SPAN - 1) // SPAN - 1) & (length % SPAN != 0)
    known = inside & ~is_open & (tl.load(valid + place, mask=inside, other=0) != 0)
    best = tl.where(known, best, tl.where(inside, float("inf"), -float("inf")))
    tl.store(estimate + row.to(tl.int64) * groups + g, best, mask=g < groups)


@triton.jit
def _query(turned_row, R: tl.constexpr, D: tl.constexpr, RP: tl.constexpr, DP: tl.constexpr):
    """Return each head's power of two that scales it [2 RP], its inverse [RP], and the sum of its entries [RP]."""
    r, d = tl.arange(0, 2 * RP) // 2, tl.arange(0, DP)
    a = tl.load(turned_row + r[:, None] * D + d[None, :], mask=(r < R)[:, None] & (d < D)[None, :], other=0.0)
    power, inverse = _power(tl.max(tl.abs(a), axis=1))
    return power, _once(inverse, RP), _once(tl.sum(a, axis=1), RP)


@triton.jit
def _add_codes(
    total, codes, at, listed, query_row, power, WEIGHT: tl.constexpr, R: tl.constexpr, D: tl.constexpr,
    ROW: tl.constexpr, RP: tl.constexpr, BITS: tl.constexpr, BYTES: tl.constexpr, STRIDE: tl.constexpr,
    BP: tl.constexpr, FOLD: tl.constexpr, SUBNORMAL: tl.constexpr,
):  # fmt: skip
    """total [BLOCK, n] + WEIGHT * sum over D dimensions of code * query, times 2^-24 where SUBNORMAL. Bytes of a group
    lie STRIDE apart from `at` on, entries of a head's query ROW from those of the next. With `power` [2 RP] the query
    is scaled by it and in halves, n = 2 RP; without it is of integers, exact in float16, n = RP. Where a group has
    fewer bytes than the 16 that one product adds up, FOLD codes of each byte share it."""
    PER_BYTE: tl.constexpr = 8 // BITS
    MASK: tl.constexpr = (1 << BITS) - 1
    HALVES: tl.constexpr = 1 if power is None else 2
    k, n = tl.arange(0, BP * FOLD), tl.arange(0, HALVES * RP)
    r = n // HALVES
    byte, fold = k % BP, k // BP
    packed = tl.load(
        codes + at[:, None] + byte[None, :] * STRIDE, mask=listed[:, None] & (byte < BYTES)[None, :], other=0
    )
    for step in tl.static_range((PER_BYTE + FOLD - 1) // FOLD):
        if FOLD == 1:
            masked = packed & (MASK << (step * BITS))
        else:
            masked = packed & (MASK << ((step * FOLD + fold) * BITS)).to(tl.uint8)[None, :]
        part = step * FOLD + fold
        d = byte * PER_BYTE + part
        used = (byte < BYTES) & (part < PER_BYTE) & (d < D)
        a = tl.load(query_row + r[None, :] * ROW + d[:, None], mask=used[:, None] & (r < R)[None, :], other=0.0)
        unshift = ((127 - part * BITS) << 23).to(tl.float32, bitcast=True) * WEIGHT
        if power is None:
            columns = (a * unshift[:, None]).to(tl.float16)
        else:
            columns = _halves(a * power[None, :] * unshift[:, None], n)
        if SUBNORMAL:
            total = tl.dot(masked.to(tl.uint16).to(tl.float16, bitcast=True), columns, total)
        else:
            total = tl.dot(masked.to(tl.float16), columns, total)
    return total


@triton.jit
def _byte_dots(codes, tile, inside, columns, D: tl.constexpr, RP: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr):
    """int8 or uint8 codes [BLOCK, D] times columns [D, 2 RP] of `_halves`: [BLOCK, RP]."""
    d = tl.arange(0, DP)
    c = tl.load(codes + tile[:, None] * D + d[None, :], mask=inside[:, None] & (d < D)[None, :], other=0)
    return _pairs(tl.dot(c.to(tl.float16), columns), BLOCK, RP)


@triton.jit
def _score_meanstd(
    q, mean, mean_scale, std, std_scale, valid, table, lengths, estimate, stride_b, stride_h, inverse_root,
    table_units, groups, kv_heads, R: tl.constexpr, D: tl.constexpr, RP: tl.constexpr, DP: tl.constexpr,
    GPU: tl.constexpr, S: tl.constexpr, LARGEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK groups of one (sequence, kv head): mean . a + std . |a|."""
    row = tl.program_id(1)
    b, h = row // kv_heads, row % kv_heads
    g = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    length = tl.load(lengths + b)
    inside = (g < groups) & (g < (length + S - 1) // S)
    place, tile = _places(table + b * table_units, g, inside, kv_heads, h, GPU)
    d, n = tl.arange(0, DP), tl.arange(0, 2 * RP)
    r = n // 2
    start = q + b.to(tl.int64) * stride_b + h * R * stride_h
    a = tl.load(start + r[None, :] * stride_h + d[:, None], mask=(d < D)[:, None] & (r < R)[None, :], other=0.0)
    a = a.to(tl.float32) * inverse_root
    power, inverse = _power(tl.max(tl.abs(a), axis=0))
    a = a * power[None, :]
    along = _byte_dots(mean, tile, inside, _halves(a, n), D, RP, DP, BLOCK)
    across = _byte_dots(std, tile, inside, _halves(tl.abs(a), n), D, RP, DP, BLOCK)
    along_step = tl.load(mean_scale + tile, mask=inside, other=0.0).to(tl.float32)
    across_step = tl.load(std_scale + tile, mask=inside, other=0.0).to(tl.float32)
    value = (along * along_step[:, None] + across * across_step[:, None]) * _once(inverse, RP)[None, :]
    best = _settle(value, R, RP, LARGEST)
    _store_estimate(best, estimate, valid, place, g, g, row, length, groups, inside, S)


# ----------------------------------------------------------------------------------------------------------- launchers


def _power_of_two(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


def _padded_heads(repeat: int) -> int:
    """Query heads of a product: two columns each, at least the 8 of NVIDIA's smallest, the 16 of AMD's."""
    return max(_power_of_two(repeat), 8 if torch.version.hip else 4)


def _block(rows: int, groups: int, row_bytes: int) -> int:
    """Groups that one program scores: as many as its registers hold, but enough programs to fill a GPU."""
    block = min(BLOCK_GROUPS, max(CODE_BYTES // row_bytes, SMALLEST_BLOCK))
    while block > SMALLEST_BLOCK and rows * groups < block * FULL_PROGRAMS:
        block //= 2
    return block


def code_shape(head_dim: int, bits: int) -> dict[str, int]:
    """Return how a group's codes lie in a product: BYTES of them, padded to BP, FOLD codes of a byte at once."""
    num_bytes = -(-head_dim * bits // 8)
    padded = _power_of_two(num_bytes)
    # at least 16 rows in all; codes past a byte's last multiply zeros
    return {"BITS": bits, "BYTES": num_bytes, "BP": padded, "FOLD": max(16 // padded, 1)}


def _check_layout(*arrays: Tensor) -> None:
    assert all(array.is_contiguous() for array in arrays), "pools, tables and outputs of an earlier kernel are whole"


def score_meanstd(
    q: Tensor, summary: dict[str, Tensor], valid: Tensor, table: Tensor, lengths: Tensor, *, group_size: int
) -> Tensor:
    """Estimates [B, Hkv, G] float32 of log A_p of method `meanstd`, the most of R query heads: +inf inside the sequence
    without a valid summary (a partial group too), -inf past its end. q [B, Hq, D] unscaled, summary a layer's pools by
    name: mean [P, Hkv, GPU, D] int8 and std uint8, each with its scale [P, Hkv, GPU] float16; valid [P * GPU] uint8,
    table [B, M] and lengths [B] int32."""
    pools = [summary[name] for name in ("mean", "mean_scale", "std", "std_scale")]
    batch, heads, head_dim = q.shape
    kv_heads, per_unit = pools[0].shape[1:3]
    groups, padded = table.shape[1] * per_unit, max(_power_of_two(head_dim), 16)
    _check_layout(*pools, valid, table, lengths)
    assert q.stride(-1) == 1
    estimate = torch.empty((batch, kv_heads, groups), dtype=torch.float32, device=q.device)
    block = _block(batch * kv_heads, groups, padded)
    _score_meanstd[(triton.cdiv(groups, block), batch * kv_heads)](
        q, *pools, valid, table, lengths, estimate, q.stride(0), q.stride(1), 1 / math.sqrt(head_dim), table.shape[1],
        groups, kv_heads, R=heads // kv_heads, D=head_dim, RP=_padded_heads(heads // kv_heads), DP=padded, GPU=per_unit,
        S=group_size, LARGEST=LARGEST_ESTIMATE, BLOCK=block,
    )  # fmt: skip
    return estimate
