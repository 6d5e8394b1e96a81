"""Store one token's K and V per sequence and seal the summaries of what it fills, in one Triton launch.

Equals `eps_cuda.cache.write_kv` for tokens that each touch a group of their own: decode. One program per (token, kv
head) holds its rows in registers, so nothing that it stores is read back; the other rows of a group were written by
earlier launches.

rq's sign codes and second bits are the array path's bit for bit (on a CPU, where `build_rq` rounds every operation):
additions run in `_tree_sum`'s and `rotate`'s order, division and square root round to nearest, and the launch forbids
to contract a product and a sum (`enable_fp_fusion`): `sum * (1/S) - centre` would else round once, not twice, where S
is no power of two. Sums whose order torch leaves open (scales, the steps of codes of several bits, the mean of V) may
differ in their last bits: scales by one float16 step, mean codes of V and codes of 2, 4 and 8 bits by one, and that
only beside a rounding boundary.
"""

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from eps_core.summaries.rq import RQ_STEP, SECOND_STEP
from eps_cuda.kernels.attend import stride_constants

# most elements of a group or tail that a program sums at once, and the most that one warp is given: its butterflies
# need no barrier, and it still fits its registers. Changes speed only
TILE = 8192
LEAST_WIDTH = 8  # dimensions that a program handles at least: one byte of sign codes

UP = tl.constexpr(1 + 2.0**-10)  # see `up16`
UP_TINY = tl.constexpr(2.0**-24)
NORM_UP = tl.constexpr(1 + 2.0**-16)  # a float32 norm is short by less than 2^-16 of itself
HALF_MOST = tl.constexpr(65504.0)
ROOT_HALF = tl.constexpr(0.7071067811865476)
TO_INTEGER = tl.constexpr(1.5 * 2.0**23)  # x + this - this is x rounded to the nearest integer, ties to even


@dataclass(frozen=True)
class RqPools:
    """rq's summaries of one layer, written in place, and what building them needs. Without the fields of `rq_bounds`:
    a cache that keeps error, radius and norm writes through the array path."""

    codes: Tensor  # [P, Hkv, GPU, ceil(D * bits / 8)] uint8
    scale: Tensor  # [P, Hkv, GPU] float16
    second: Tensor | None  # [P, Hkv, GPU, ceil(D / 8)] uint8, with bits 1 only
    second_scale: Tensor | None  # [P, Hkv, GPU] float16
    centre: Tensor  # [Hkv, D] float16
    signs: Tensor  # [D] float32, +-1
    bits: int


@dataclass(frozen=True)
class TailPools:
    """The mean values of one layer, written in place."""

    mean: Tensor  # [P, Hkv, U / tokens, D] int8
    mean_scale: Tensor  # [P, Hkv, U / tokens] float16
    valid: Tensor | None  # [P * U / tokens] uint8
    tokens: int


@triton.jit
def _near16(x):
    return tl.where(x > HALF_MOST, HALF_MOST, tl.where(x < -HALF_MOST, -HALF_MOST, x)).to(tl.float16)


@triton.jit
def _tree_row(leaf, ROWS: tl.constexpr, LOG: tl.constexpr):
    """(row, whether there is one) of each leaf of `_tree_sum`'s tree over ROWS rows, drawn as a full binary tree of
    2^LOG leaves whose children differ in the leaf's lowest bit at the root and in its highest at the bottom: adding
    leaf i and i + 2^LOG / 2, and so on, is `_tree_sum`. An odd row out is paired with no row, that is with 0; where
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
def _sum_rows(
    rows, new, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM2: tl.constexpr, LOG: tl.constexpr,
    LOG_MOST: tl.constexpr, TOKEN_STRIDE: tl.constexpr,
):  # fmt: skip
    """`_tree_sum` of the ROWS rows at `rows`, float32 [DIM2]; the last of them is `new` [DIM2], in registers. At most
    2^LOG_MOST rows are in hand at once."""
    LOG_TILE: tl.constexpr = LOG if LOG < LOG_MOST else LOG_MOST
    LOG_PARTS: tl.constexpr = LOG - LOG_TILE
    d = tl.arange(0, DIM2)
    parts = tl.zeros((1 << LOG_PARTS, DIM2), tl.float32)
    for part in range(1 << LOG_PARTS):
        # leaves alike in their low bits are a whole branch of the tree
        row, there = _tree_row(part + (tl.arange(0, 1 << LOG_TILE) << LOG_PARTS), ROWS, LOG)
        stored = there & (row != ROWS - 1)
        inside = stored[:, None] & (d < HEAD_DIM)[None, :]
        x = tl.load(rows + row[:, None] * TOKEN_STRIDE + d[None, :], mask=inside, other=0)
        x = tl.where((there & (row == ROWS - 1))[:, None], new[None, :], x).to(tl.float32)
        branch = _add_halves(x, 1 << LOG_TILE, DIM2, LOG_TILE)
        parts = tl.where((tl.arange(0, 1 << LOG_PARTS) == part)[:, None], branch[None, :], parts)
    return _add_halves(parts, 1 << LOG_PARTS, DIM2, LOG_PARTS)


@triton.jit
def _butterfly(x, HALF: tl.constexpr, DIM2: tl.constexpr):
    """[DIM2]: of each run of 2 * HALF, (first + second, first - second) of its halves."""
    first, second = tl.split(tl.permute(tl.reshape(x, (DIM2 // (2 * HALF), 2, HALF)), (0, 2, 1)))
    return tl.reshape(tl.permute(tl.join(first + second, first - second), (0, 2, 1)), (DIM2,))


@triton.jit
def _rotate(x, HEAD_DIM: tl.constexpr, DIM2: tl.constexpr, LOG_DIM: tl.constexpr):
    """The Hadamard blocks of `rotate` over [DIM2]: each of them, a power of two, starts at a multiple of its size."""
    d = tl.arange(0, DIM2)
    size = tl.zeros((DIM2,), tl.int32)
    factor = tl.zeros((DIM2,), tl.float32)
    for log in tl.static_range(LOG_DIM + 1):
        if (HEAD_DIM >> log) % 2 == 1:
            inside = (d >> log) == ((HEAD_DIM >> log) - 1)
            size = tl.where(inside, 1 << log, size)
            # float32(1 / sqrt(2^log)): powers of two are exact
            factor = tl.where(inside, 0.5 ** (log // 2) * (ROOT_HALF if log % 2 == 1 else 1.0), factor)
    for level in tl.static_range(LOG_DIM):
        if DIM2 >> level <= HEAD_DIM:
            x = tl.where(size >= DIM2 >> level, _butterfly(x, DIM2 >> (level + 1), DIM2), x)
    return x * factor


@triton.jit
def _pack(codes, DIM2: tl.constexpr, BITS: tl.constexpr):
    """`pack_codes`: int32 [DIM2] -> [DIM2 * BITS / 8] bytes."""
    shift = tl.arange(0, 8 // BITS) * BITS
    return tl.sum(tl.reshape(codes, (DIM2 * BITS // 8, 8 // BITS)) << shift[None, :], axis=1).to(tl.uint8)


@triton.jit
def _unbiased_scale(x, levels):
    """near16 of |x|^2 / <x, levels>, 0 where the product is not positive."""
    product = tl.sum(x * levels)
    energy = tl.sum(x * x)
    return _near16(tl.where(product > 0, tl.div_rn(energy, tl.where(product > 0, product, 1.0)), 0.0))


@triton.jit
def _seal_keys(
    total, centre, signs, group, codes, scale, second, second_scale,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM2: tl.constexpr, LOG_DIM: tl.constexpr, BITS: tl.constexpr,
    STEP: tl.constexpr, SECOND: tl.constexpr,
):  # fmt: skip
    """`build_rq` of the sum [DIM2] of ROWS keys, stored at `group`. `centre`: of this kv head."""
    d = tl.arange(0, DIM2)
    inside = d < HEAD_DIM
    mean = total * (1.0 / ROWS) - tl.load(centre + d, mask=inside, other=0).to(tl.float32)
    x = _rotate(mean * tl.load(signs + d, mask=inside, other=0), HEAD_DIM, DIM2, LOG_DIM)
    if BITS == 1:
        code = (inside & (x >= 0)).to(tl.int32)
        levels = 2.0 * code.to(tl.float32) - 1.0
    else:
        step = STEP * tl.sqrt_rn(tl.div_rn(tl.sum(x * x), HEAD_DIM * 1.0))
        level = tl.floor(tl.div_rn(x, tl.where(step > 0, step, 1.0))) + (1 << (BITS - 1))
        # NaN becomes 0
        level = tl.where(level > 0, tl.where(level < (1 << BITS) - 1, level, (1 << BITS) - 1), 0.0)
        code = tl.where(inside, level.to(tl.int32), 0)
        levels = code.to(tl.float32) - ((1 << (BITS - 1)) - 0.5)
    BYTES: tl.constexpr = (HEAD_DIM * BITS + 7) // 8
    byte = tl.arange(0, DIM2 * BITS // 8)
    tl.store(codes + group * BYTES + byte, _pack(code, DIM2, BITS), mask=byte < BYTES)
    tl.store(scale + group, _unbiased_scale(x, levels))
    if second is not None:
        size = tl.abs(x)
        if HEAD_DIM != DIM2:
            leaf_row, there = _tree_row(d, HEAD_DIM, LOG_DIM)
            size = tl.where(there, tl.gather(size, leaf_row, 0), 0.0)
        step = tl.sum(_add_halves(tl.reshape(size, (DIM2, 1)), DIM2, 1, LOG_DIM)) * SECOND
        finer = (inside & ((x >= step) | ((x < 0) & (x >= -step)))).to(tl.int32)
        FINER_BYTES: tl.constexpr = (HEAD_DIM + 7) // 8
        finer_byte = tl.arange(0, DIM2 // 8)
        tl.store(second + group * FINER_BYTES + finer_byte, _pack(finer, DIM2, 1), mask=finer_byte < FINER_BYTES)
        tl.store(second_scale + group, _unbiased_scale(x, levels + 0.5 * (2.0 * finer.to(tl.float32) - 1.0)))


@triton.jit
def _seal_values(total, run, mean, mean_scale, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM2: tl.constexpr):
    """`mean_codes` of the sum [DIM2] of ROWS values, stored at `run`."""
    d = tl.arange(0, DIM2)
    mu = tl.div_rn(total, ROWS * 1.0)
    largest = tl.max(tl.abs(mu))
    up = (tl.div_rn(largest, 127.0) * UP + UP_TINY).to(tl.float16)
    # tl.max may pass over NaN
    has_nan = tl.max((mu != mu).to(tl.int32)) > 0
    usable = (largest > 0) & (up.to(tl.float32) < float("inf")) & (has_nan == 0)
    step = tl.where(usable, up.to(tl.float32), 1.0)
    nearest = (tl.div_rn(tl.where(usable, mu, 0.0), step) + TO_INTEGER) - TO_INTEGER
    code = tl.where(nearest > 127.0, 127.0, tl.where(nearest < -127.0, -127.0, nearest))
    tl.store(mean + run * HEAD_DIM + d, code.to(tl.int8), mask=d < HEAD_DIM)
    tl.store(mean_scale + run, tl.where(usable, up, 0.0))


@triton.jit
def _raise_norm(largest, row):
    """largest = max(largest, |row| * NORM_UP), NaN as infinity. Numbers that are not negative order as their bits."""
    x = row.to(tl.float32)
    norm = tl.sqrt_rn(tl.sum(x * x)) * NORM_UP
    norm = tl.where(norm == norm, norm, float("inf"))
    tl.atomic_max(largest, norm.to(tl.int32, bitcast=True))


@triton.jit
def write_kernel(
    k, v, slots, k_pool, v_pool, finite, valid,
    codes, scale, second, second_scale, centre, signs,
    mean, mean_scale, tail_valid, largest_key, largest_value,
    k_token, k_head, v_token, v_head,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM2: tl.constexpr, LOG_DIM: tl.constexpr,
    UNIT: tl.constexpr, GROUP: tl.constexpr, LOG_GROUP: tl.constexpr, TAIL: tl.constexpr, LOG_TAIL: tl.constexpr,
    LOG_TILE: tl.constexpr, BITS: tl.constexpr, STEP: tl.constexpr, SECOND: tl.constexpr,
    UNIT_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr, TOKEN_STRIDE: tl.constexpr,
):  # fmt: skip
    """One program per (token, kv head). Pointers that are None are left out; `finite` uint8; `largest_*` as int32."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    unit = (slot // UNIT).to(tl.int64)
    offset = slot % UNIT
    d = tl.arange(0, DIM2)
    inside = d < HEAD_DIM
    key = tl.load(k + token * k_token + head * k_head + d, mask=inside, other=0).to(k_pool.dtype.element_ty)
    value = tl.load(v + token * v_token + head * v_head + d, mask=inside, other=0).to(v_pool.dtype.element_ty)
    start = unit * UNIT_STRIDE + head * HEAD_STRIDE  # of the unit's first token
    at = start + offset * TOKEN_STRIDE + d
    tl.store(k_pool + at, key, mask=inside)
    tl.store(v_pool + at, value, mask=inside)
    is_finite = tl.abs(key.to(tl.float32)) < float("inf")
    tl.store(finite, 0, mask=tl.min(is_finite.to(tl.int32)) == 0)

    seals = offset % GROUP == GROUP - 1
    if valid is not None:
        tl.store(valid + unit * (UNIT // GROUP) + offset // GROUP, seals.to(tl.uint8), mask=head == 0)
    if codes is not None:
        group = (unit * KV_HEADS + head) * (UNIT // GROUP) + offset // GROUP
        if seals:
            rows = k_pool + start + (offset - (GROUP - 1)) * TOKEN_STRIDE
            total = _sum_rows(rows, key, GROUP, HEAD_DIM, DIM2, LOG_GROUP, LOG_TILE, TOKEN_STRIDE)
            _seal_keys(
                total, centre + head * HEAD_DIM, signs, group, codes, scale, second, second_scale,
                GROUP, HEAD_DIM, DIM2, LOG_DIM, BITS, STEP, SECOND,
            )  # fmt: skip
    if mean is not None:
        ends = offset % TAIL == TAIL - 1
        if tail_valid is not None:
            tl.store(tail_valid + unit * (UNIT // TAIL) + offset // TAIL, ends.to(tl.uint8), mask=head == 0)
        if ends:
            rows = v_pool + start + (offset - (TAIL - 1)) * TOKEN_STRIDE
            total = _sum_rows(rows, value, TAIL, HEAD_DIM, DIM2, LOG_TAIL, LOG_TILE, TOKEN_STRIDE)
            run = (unit * KV_HEADS + head) * (UNIT // TAIL) + offset // TAIL
            _seal_values(total, run, mean, mean_scale, TAIL, HEAD_DIM, DIM2)
    if largest_key is not None:
        _raise_norm(largest_key + head, key)
    if largest_value is not None:
        _raise_norm(largest_value + head, value)


def _log2_up(number: int) -> int:
    """The least n with 2^n >= number."""
    return (number - 1).bit_length()


def launch_constants(
    kv_heads: int, head_dim: int, unit_tokens: int, group_tokens: int, tail_tokens: int, bits: int
) -> tuple[dict[str, int | float], int]:
    """(constexpr arguments of `write_kernel`, warps); `tail_tokens` 0 without a tail."""
    log_dim = _log2_up(max(head_dim, LEAST_WIDTH))
    log_group, log_tail = _log2_up(group_tokens), _log2_up(max(tail_tokens, 1))
    constants = {
        "KV_HEADS": kv_heads, "HEAD_DIM": head_dim, "DIM2": 1 << log_dim, "LOG_DIM": log_dim,
        "UNIT": unit_tokens, "GROUP": group_tokens, "LOG_GROUP": log_group,
        "TAIL": max(tail_tokens, 1), "LOG_TAIL": log_tail, "LOG_TILE": max(_log2_up(TILE) - log_dim, 0),
        "BITS": bits, "STEP": RQ_STEP.get(bits, 0.0), "SECOND": float(np.float32(SECOND_STEP / head_dim)),
    }  # fmt: skip
    return constants, 1 if 1 << (log_dim + max(log_group, log_tail)) <= TILE else 4


def write_tokens(
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    finite: Tensor,
    valid: Tensor | None,
    *,
    group_tokens: int,
    rq: RqPools | None,
    tail: TailPools | None,
    largest_key: Tensor | None,
    largest_value: Tensor | None,
) -> None:
    """Writes k, v [N, Hkv, D] to slots [N] int32 (device) of k_pool, v_pool [P, Hkv, U, D] and seals what they fill.

    A slot is unit * U + offset, or -1: nothing is written. No two slots of a call share a group or a run of
    `tail.tokens`, and none is past the pool: neither is checked, the host never sees them. `finite` [] bool or uint8
    becomes 0 where a stored key is NaN or Inf. `valid` [P * U/S] uint8 becomes 1 for a group whose last slot is
    written and 0 for one with another slot written, whether or not `rq` is given: before rq's centre exists, pass None.
    `rq` and `tail` get the summaries of groups and runs that became full. `largest_key`, `largest_value` [Hkv] float32,
    not negative, become at least every norm stored. Summaries with own bounds (`rq_bounds`) are not built here: use
    the array path. All on one device, without synchronisation: fit for a CUDA graph.
    """
    num_tokens, kv_heads, head_dim = k.shape
    num_units, pool_heads, unit_tokens, pool_dim = k_pool.shape
    assert v.shape == k.shape and v_pool.shape == k_pool.shape and (pool_heads, pool_dim) == (kv_heads, head_dim)
    assert slots.shape == (num_tokens,) and slots.dtype == torch.int32 and slots.is_contiguous()
    assert k.stride(2) == v.stride(2) == 1 or head_dim == 1, "a row of k or v is not contiguous"
    assert unit_tokens % group_tokens == 0, "groups do not divide a unit"
    assert finite.dtype in (torch.bool, torch.uint8) and finite.numel() == 1
    flat = []
    per_unit = unit_tokens // group_tokens
    if valid is not None:
        assert valid.dtype == torch.uint8 and valid.shape == (num_units * per_unit,)
        flat.append(valid)
    if rq is not None:
        groups = (num_units, kv_heads, per_unit)
        assert rq.codes.shape == (*groups, -(-head_dim * rq.bits // 8)) and rq.scale.shape == groups
        assert rq.centre.shape == (kv_heads, head_dim) and rq.signs.shape == (head_dim,)
        assert (rq.second is None) == (rq.second_scale is None) and (rq.second is None or rq.bits == 1)
        flat += [rq.codes, rq.scale, rq.centre, rq.signs]
        if rq.second is not None and rq.second_scale is not None:
            assert rq.second.shape == (*groups, -(-head_dim // 8)) and rq.second_scale.shape == groups
            flat += [rq.second, rq.second_scale]
    if tail is not None:
        assert unit_tokens % tail.tokens == 0, "tails do not divide a unit"
        runs = (num_units, kv_heads, unit_tokens // tail.tokens)
        assert tail.mean.shape == (*runs, head_dim) and tail.mean_scale.shape == runs
        flat += [tail.mean, tail.mean_scale]
        if tail.valid is not None:
            assert tail.valid.dtype == torch.uint8 and tail.valid.shape == (num_units * runs[2],)
            flat.append(tail.valid)
    largest = [None if one is None else one.view(torch.int32) for one in (largest_key, largest_value)]
    flat += [one for one in largest if one is not None]
    assert all(one.is_contiguous() for one in flat), "a pool is not contiguous"
    if not num_tokens:
        return
    constants, num_warps = launch_constants(
        kv_heads, head_dim, unit_tokens, group_tokens, tail.tokens if tail else 0, rq.bits if rq else 1
    )
    write_kernel[(num_tokens, kv_heads)](
        k, v, slots, k_pool, v_pool, finite.view(torch.uint8), valid,
        *((rq.codes, rq.scale, rq.second, rq.second_scale, rq.centre, rq.signs) if rq else (None,) * 6),
        *((tail.mean, tail.mean_scale, tail.valid) if tail else (None,) * 3),
        *largest,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        **constants, **stride_constants(k_pool, v_pool), num_warps=num_warps, enable_fp_fusion=False,
    )  # fmt: skip
