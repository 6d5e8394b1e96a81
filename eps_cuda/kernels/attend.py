"""Sparse split-KV decode attention in Triton: one query token a sequence, over the listed groups or all tokens.

Split-KV is FlashDecoding (Dao, Haziza, Massa, Sizov 2023): a (sequence, kv head) alone cannot fill a GPU, so its tokens
are dealt to several programs and their partial results merged by log-sum-exp. Within a program it is the online softmax
of Milakov and Gimelshein (2018). Different here: the tokens of a program come from a list of small groups, each row by
its own address (token t of the list is row t % S of entry t // S), so groups of any S fill whole blocks and every row
of D elements is one coalesced run; and the deal follows the counts on the device, so no program idles because the
static list is longer than the true one.

Every tile of K and V is read once for all R query heads of its kv head. Nothing but listed rows inside the sequence is
read: masked loads touch no memory. Logits, softmax and sums are float32. A 16-bit cache goes through the tensor cores:
products are exact in float32, and the softmax weights are rounded to V's dtype first, as in FlashAttention, which moves
an output by at most u sum_i p_i |v_i|, u = 2^-8 for bfloat16 and 2^-11 for float16, the rounding of such an output
itself. Where q is wider than the cache, q and the weights go in as the sum of two such numbers, which leaves u^2. A
float32 cache is multiplied in true float32 (no TF32).

Codes of 8 and 4 bits (`eps_core.reference.pages`) become values in registers, `code * scale` in float32 rounded to the
cache's dtype as everywhere, and are attended as such: only their bytes come from memory.

D that is no power of two is padded to the next one under masks: masked lanes cost no memory traffic, and a second
pipeline for the rest (80 = 64 + 16) would double the instructions of a loop that waits for memory.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from eps_core.backend.pages import Pool
from eps_cuda.kernels.arguments import check_layout, check_shapes, held_as_codes, pool_arrays, pool_constants
from eps_cuda.kernels.overlap import overlap, release, wait

State = tuple[Tensor, Tensor]

DEFAULT_PROCESSORS = 132  # multiprocessors to fill where no GPU can be asked
MERGE_SPLITS, MERGE_CHANNELS = 32, 64  # block of the merge; change speed only
# of three stages two lie in shared memory, on AMD too: one is what its 64 KiB hold
STAGES = {"cuda": 3, "hip": 2}
HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Plan:
    """Changes speed only, but for the order of float32 sums. Made from static sizes alone."""

    block_tokens: int  # tokens of one iteration
    num_splits: int  # programs of one (sequence, kv head)
    num_warps: int
    num_stages: int


# ------------------------------------------------------------------------------------------------------------- kernels


@triton.jit
def load_groups(groups, token, last, S: tl.constexpr, SPARSE: tl.constexpr):
    """The group of each token [N] of a list, or of a sequence where not SPARSE; -1 from `last` on."""
    if SPARSE:
        return tl.load(groups + token // S, mask=token < last, other=-1)
    return token // S


@triton.jit
def positions(group, token, last, length, S: tl.constexpr):
    """Return where tokens [N] of groups [N] lie in the sequence; negative for none."""
    position = group * S + token % S
    # the partial group may be listed: what lies past the end may be anything, NaN too
    return tl.where((token < last) & (position < length), position, -1)


@triton.jit
def load_units(table, position, U: tl.constexpr):
    """The pool unit of each position [N]; 0 where there is none."""
    return tl.load(table + position // U, mask=position >= 0, other=0)


@triton.jit
def places(
    unit, position, h, U: tl.constexpr, UNIT_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr, TOKEN_STRIDE: tl.constexpr
):
    """Return where the rows of positions [N] in units [N] begin, for kv head h: [N] int64."""
    return unit.to(tl.int64) * UNIT_STRIDE + h * HEAD_STRIDE + position % U * TOKEN_STRIDE


@triton.jit
def load_rows(pool, start, d, live, D: tl.constexpr, D_PAD: tl.constexpr):
    """The rows of D elements from start [N] int64 on as [N, D_PAD]: zeros, unread, where not `live` [N] or past D."""
    offset = start[:, None] + d[None, :]
    mask = live[:, None]
    if D != D_PAD:
        mask = mask & (d < D)[None, :]
    return tl.load(pool + offset, mask=mask, other=0.0)


@triton.jit
def load_scales(scale, row, live, BITS: tl.constexpr):
    """Return the scales of the codes of rows [N], [N] float32: 0 where not `live`. Of 16 bits nothing is read."""
    if BITS == 16:
        return tl.zeros(row.shape, tl.float32)
    else:
        return tl.load(scale + row, mask=live, other=0.0).to(tl.float32)


@triton.jit
def load_values(
    pool, row, scale, d, live, BITS: tl.constexpr, VALUES: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr
):
    """`load_rows` of the rows [N] of a contiguous pool, of 16 bits or of codes of 8 or 4 with their scales [N] float32:
    [N, D_PAD] of VALUES. Past D of 4-bit codes it is not zeros."""
    if BITS == 16:
        return load_rows(pool, row * D, d, live, D, D_PAD)
    else:
        if BITS == 8:
            codes = load_rows(pool, row * D, d, live, D, D_PAD).to(tl.float32)
        else:
            pairs = load_rows(pool, row * (D // 2), tl.arange(0, D_PAD // 2), live, D // 2, D_PAD // 2)
            codes = tl.interleave(pairs & 15, pairs >> 4).to(tl.float32) - 8.0
        values = codes * scale[:, None]
        if tl.float16 == VALUES:  # whose largest number's code can round past it; NaN stays
            values = tl.where(values > 65504.0, 65504.0, tl.where(values < -65504.0, -65504.0, values))
        return values.to(VALUES)


@triton.jit
def split_two(x, dtype: tl.constexpr):
    """x float32 as the sum of two numbers of a 16-bit dtype, the larger one first."""
    high = x.to(dtype)
    return high, (x - high.to(tl.float32)).to(dtype)


@triton.jit
def attend_tokens(
    q, k, v, k_scale, v_scale, table, groups, pair, h, length, first, last, scale,
    R: tl.constexpr, D: tl.constexpr, U: tl.constexpr, S: tl.constexpr, SPARSE: tl.constexpr, WIDE_Q: tl.constexpr,
    R_PAD: tl.constexpr, D_PAD: tl.constexpr, BLOCK_N: tl.constexpr, UNIT_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr, TOKEN_STRIDE: tl.constexpr, K_BITS: tl.constexpr, V_BITS: tl.constexpr,
    VALUES: tl.constexpr,
):  # fmt: skip
    """Tokens first to last of a list, or of a sequence where not SPARSE, of kv head h for its R query heads, table and
    groups those of the pair b * HKV + h: the largest logits [R_PAD] times log2 e, and of exp2 of all less that the sum
    [R_PAD] and the sum of values [R_PAD, D_PAD]."""
    CODES: tl.constexpr = K_BITS != 16 or V_BITS != 16
    r, d = tl.arange(0, R_PAD), tl.arange(0, D_PAD)
    head = pair.to(tl.int64) * R + r  # of all B * Hq: query head h * R + r of sequence b
    in_head = (r < R)[:, None] & (d < D)[None, :]
    query = tl.load(q + head[:, None] * D + d[None, :], mask=in_head, other=0.0)
    if WIDE_Q:
        query, query_low = split_two(query.to(tl.float32), VALUES)
    else:
        query = query.to(VALUES)

    # finite, so that a block without a live token leaves no NaN behind
    largest = tl.full([R_PAD], -3.0e38, tl.float32)
    total = tl.zeros([R_PAD], tl.float32)
    acc = tl.zeros([R_PAD, D_PAD], tl.float32)
    # the way to a row is list, table, row: each step runs one iteration ahead of the next, so that none is waited for
    token = first + tl.arange(0, BLOCK_N)
    position = positions(load_groups(groups, token, last, S, SPARSE), token, last, length, S)
    unit = load_units(table, position, U)
    if CODES:  # scales, two bytes each, are too narrow for asynchronous copies: they are loaded a block early
        row = places(unit, position, h, U, UNIT_STRIDE, HEAD_STRIDE, TOKEN_STRIDE)
        key_scale = load_scales(k_scale, row, position >= 0, K_BITS)
        value_scale = load_scales(v_scale, row, position >= 0, V_BITS)
    group = load_groups(groups, token + BLOCK_N, last, S, SPARSE)
    for start in range(first, last, BLOCK_N):
        live = position >= 0
        row = places(unit, position, h, U, UNIT_STRIDE, HEAD_STRIDE, TOKEN_STRIDE)
        token = start + BLOCK_N + tl.arange(0, BLOCK_N)
        position = positions(group, token, last, length, S)
        unit = load_units(table, position, U)
        group = load_groups(groups, token + BLOCK_N, last, S, SPARSE)
        if CODES:
            key = load_values(k, row, key_scale, d, live, K_BITS, VALUES, D, D_PAD)
        else:
            key = load_rows(k, row, d, live, D, D_PAD)
        logits = tl.dot(query, tl.trans(key), input_precision="ieee")
        if WIDE_Q:
            logits = tl.dot(query_low, tl.trans(key), logits)
        logits = tl.where(live[None, :], logits * scale, float("-inf"))
        new = tl.maximum(largest, tl.max(logits, axis=1))
        shrink, weight = tl.exp2(largest - new), tl.exp2(logits - new[:, None])
        total = total * shrink + tl.sum(weight, axis=1)
        if CODES:
            value = load_values(v, row, value_scale, d, live, V_BITS, VALUES, D, D_PAD)
            row = places(unit, position, h, U, UNIT_STRIDE, HEAD_STRIDE, TOKEN_STRIDE)
            key_scale = load_scales(k_scale, row, position >= 0, K_BITS)
            value_scale = load_scales(v_scale, row, position >= 0, V_BITS)
        else:
            value = load_rows(v, row, d, live, D, D_PAD)
        acc = acc * shrink[:, None]
        if WIDE_Q:
            weight_high, weight_low = split_two(weight, VALUES)
            acc = tl.dot(weight_high, value, acc)
            acc = tl.dot(weight_low, value, acc)
        else:
            acc = tl.dot(weight.to(VALUES), value, acc, input_precision="ieee")
        largest = new
    return largest, total, acc


@triton.jit
def store_part(
    part_out, part_lse, largest, total, acc, pair, split, num_splits, any_token,
    R: tl.constexpr, D: tl.constexpr, R_PAD: tl.constexpr, D_PAD: tl.constexpr,
):  # fmt: skip
    """Part of a pair's output, normalised, and its log mass. A merge gives a part without tokens no weight and needs no
    zeros of it."""
    r, d = tl.arange(0, R_PAD), tl.arange(0, D_PAD)
    place = (pair.to(tl.int64) * R + r) * num_splits + split
    empty = total == 0
    total = tl.where(empty, 1.0, total)
    lse = tl.where(empty, float("-inf"), (largest + tl.log2(total)) * 0.6931471805599453)
    tl.store(part_lse + place, lse, mask=r < R)
    if any_token:
        in_head = (r < R)[:, None] & (d < D)[None, :]
        tl.store(part_out + place[:, None] * D + d[None, :], acc / total[:, None], mask=in_head)


@triton.jit(do_not_specialize=["list_width", "table_width"])
def attend_split_kernel(
    q, k, v, k_scale, v_scale, table, lengths, groups, counts, part_out, part_lse,
    scale, list_width, table_width,
    HKV: tl.constexpr, R: tl.constexpr, D: tl.constexpr, U: tl.constexpr, S: tl.constexpr, SPARSE: tl.constexpr,
    WIDE_Q: tl.constexpr, R_PAD: tl.constexpr, D_PAD: tl.constexpr, BLOCK_N: tl.constexpr,
    UNIT_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr, TOKEN_STRIDE: tl.constexpr,
    K_BITS: tl.constexpr, V_BITS: tl.constexpr, VALUES: tl.constexpr, OVERLAP: tl.constexpr = False,
):  # fmt: skip
    """Program (b * HKV + h, split): its share of the tokens of kv head h of sequence b, for the R query heads at once.
    Writes part_out [B, Hq, splits, D] float32, normalised, and part_lse [B, Hq, splits] float32, natural log. Strides
    are in elements, but where K or V are codes in rows, of contiguous pools."""
    wait(OVERLAP)
    pair, split, num_splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    b, h = pair // HKV, pair % HKV
    length = tl.load(lengths + b)
    num_tokens = length
    if SPARSE:
        num_tokens = tl.minimum(tl.load(counts + pair), list_width) * S
        groups += pair.to(tl.int64) * list_width
    table += b.to(tl.int64) * table_width
    num_blocks = tl.cdiv(num_tokens, BLOCK_N)
    first = num_blocks * split // num_splits * BLOCK_N
    last = tl.minimum(num_blocks * (split + 1) // num_splits * BLOCK_N, num_tokens)

    largest, total, acc = attend_tokens(
        q, k, v, k_scale, v_scale, table, groups, pair, h, length, first, last, scale, R, D, U, S, SPARSE, WIDE_Q,
        R_PAD, D_PAD, BLOCK_N, UNIT_STRIDE, HEAD_STRIDE, TOKEN_STRIDE, K_BITS, V_BITS, VALUES,
    )  # fmt: skip
    release(OVERLAP)
    store_part(part_out, part_lse, largest, total, acc, pair, split, num_splits, first < last, R, D, R_PAD, D_PAD)


@triton.jit(do_not_specialize=["num_splits"])
def merge_kernel(
    part_out, part_lse, out, lse, num_splits, D: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):  # fmt: skip
    """Program (b * Hq + head, block of channels): merges the splits of one query head, 0 and -inf where all are empty.
    An empty split's part_out may be anything."""
    wait(OVERLAP)
    head = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    largest, total, acc = -3.0e38, 0.0, tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, num_splits, BLOCK_S):
        split = start + tl.arange(0, BLOCK_S)
        inside, place = split < num_splits, head * num_splits + split
        part = tl.load(part_lse + place, mask=inside, other=float("-inf"))
        value = tl.load(
            part_out + place[:, None] * D + d[None, :], mask=inside[:, None] & (d < D)[None, :], other=0.0
        )  # fmt: skip
        new = tl.maximum(largest, tl.max(part, axis=0))
        shrink, weight = tl.exp(largest - new), tl.exp(part - new)
        total = total * shrink + tl.sum(weight, axis=0)
        acc = acc * shrink + tl.sum(tl.where(weight[:, None] > 0, weight[:, None] * value, 0.0), axis=0)
        largest = new
    empty = total == 0
    total = tl.where(empty, 1.0, total)
    release(OVERLAP)
    tl.store(out + head * D + d, (acc / total).to(out.dtype.element_ty), mask=d < D)
    if tl.program_id(1) == 0:
        tl.store(lse + head, tl.where(empty, float("-inf"), largest + tl.log(total)))


# ----------------------------------------------------------------------------------------------------------- launchers


def attend_groups(
    q: Tensor, k_pool: Pool, v_pool: Pool, table: Tensor, lengths: Tensor, groups: Tensor | None,
    counts: Tensor | None, *, group_size: int, num_splits: int | None = None,
) -> State:  # fmt: skip
    """(out [B, Hq, D] in q's dtype, lse [B, Hq] float32: natural log of the softmax mass read) of q [B, Hq, D],
    unscaled, over the first counts [B, Hkv] int32 of groups [B, Hkv, W] int32, or over all tokens where both are None.
    k_pool, v_pool [P, Hkv, U, D], as they are or codes, table [B, M] int32, lengths [B] int32. Out 0 and lse -inf where
    nothing is listed. Two launches, no synchronisation; `num_splits` (see `plan`) changes speed only."""
    check_layout(table=table, lengths=lengths)
    batch, num_heads, head_dim = q.shape
    _, kv_heads, unit_tokens, _ = k_pool.shape
    check_shapes(q, k_pool, v_pool, group_size)
    width = 0 if groups is None else groups.shape[2]
    most_tokens = table.shape[1] * unit_tokens if groups is None else width * group_size
    chosen = plan(batch * kv_heads, most_tokens, head_dim, k_pool.dtype, processors(q.device), num_splits,
        codes=held_as_codes(k_pool, v_pool),
    )  # fmt: skip
    repeat = num_heads // kv_heads
    part_out = torch.empty((batch, num_heads, chosen.num_splits, head_dim), dtype=torch.float32, device=q.device)
    part_lse = part_out.new_empty(part_out.shape[:3])
    attend_split_kernel[(batch * kv_heads, chosen.num_splits)](
        q.contiguous(), *pool_arrays(k_pool, v_pool), table, lengths, None if groups is None else groups.contiguous(),
        None if counts is None else counts.contiguous(), part_out, part_lse,
        math.log2(math.e) / math.sqrt(head_dim), width, table.shape[1],
        HKV=kv_heads, R=repeat, D=head_dim, U=unit_tokens, S=group_size, SPARSE=groups is not None,
        WIDE_Q=k_pool.dtype in HALVES and q.dtype != k_pool.dtype, **padding(repeat, head_dim),
        BLOCK_N=chosen.block_tokens, **pool_constants(k_pool, v_pool), num_warps=chosen.num_warps,
        num_stages=chosen.num_stages, **overlap(q.device),
    )  # fmt: skip
    out, lse = torch.empty(q.shape, dtype=q.dtype, device=q.device), part_lse.new_empty((batch, num_heads))
    block_d = merge_channels(head_dim)
    merge_kernel[(batch * num_heads, triton.cdiv(head_dim, block_d))](
        part_out, part_lse, out, lse, chosen.num_splits, D=head_dim, BLOCK_S=MERGE_SPLITS, BLOCK_D=block_d,
        **overlap(q.device),
    )  # fmt: skip
    return out, lse


def plan(
    num_pairs: int, most_tokens: int, head_dim: int, dtype: torch.dtype, num_processors: int, num_splits: int | None,
    codes: bool = False,
) -> Plan:  # fmt: skip
    """Launch sizes for `num_pairs` (sequence, kv head) pairs that read at most `most_tokens` tokens each, of K and V of
    a dtype, which they have or get in registers, of `codes`. Two programs a multiprocessor hide each other's waits;
    more only lengthen the merge. No split is planned below one block."""
    row_bytes = triton.next_power_of_2(head_dim) * dtype.itemsize
    # at most 16 KiB of K and as much of V an iteration: two programs with two of them in flight fit into the shared
    # memory of a multiprocessor
    block_tokens = min(max(16 * 1024 // row_bytes, 16), 64)
    if codes and dtype == torch.float32:
        block_tokens = 16  # tiles of float32 that are made in registers spill
    if num_splits is None:
        num_splits = min(triton.cdiv(2 * num_processors, num_pairs), triton.cdiv(most_tokens, block_tokens))
    # float32 has no tensor cores here: its products need the registers of more warps (4 spill)
    num_warps = 8 if dtype == torch.float32 and head_dim > 64 else 4
    return Plan(block_tokens, max(num_splits, 1), num_warps, STAGES["hip" if torch.version.hip else "cuda"])


def padding(repeat: int, head_dim: int) -> dict[str, int]:
    """Sizes of the blocks that tl.dot takes: powers of two, 16 at least."""
    return {"R_PAD": max(16, triton.next_power_of_2(repeat)), "D_PAD": max(16, triton.next_power_of_2(head_dim))}


def merge_channels(head_dim: int) -> int:
    """Channels that one program of a merge takes."""
    return min(MERGE_CHANNELS, triton.next_power_of_2(head_dim))


@lru_cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    if device.type != "cuda":
        return DEFAULT_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count
