"""Dense split-KV attention of several new tokens (rows) of each sequence at once, in Triton: what a verify pass reads.

`attend` with many queries a kv head. The rows of a sequence times the R query heads of a kv head are the queries of one
product, so a tile of K and V is loaded once for all of them: a program serves BLOCK_M queries, 64 of a 16-bit cache up
to D = 128. Further queries are a further program on the fastest axis of the grid, which reads the same tiles while they
are in the second-level cache.

A row's bits are its own. Tokens are cut at fixed places, counted from token 0: into splits of SPLIT_TOKENS, these into
blocks of whole groups. BLOCK_M depends on R and D, not on how many rows there are; a block, or a split, of which a row
sees nothing adds exact zeros to it. So neither the batch, nor the number of rows, nor what the other rows are, nor the
table's width changes `out` or `lse` of a row.

What a row does not see does not reach it. Its weights there are zeros, which 0 x NaN would undo: in blocks of which
some row does not see all, elements of V that are not finite are taken out and the rows that see them made NaN.

A group of S tokens fills S_PAD lanes of a block, the next power of two, so that its mass is a sum over an axis; lanes
past S touch no memory. Of the precision see `attend`.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from eps_core.backend.pages import Pool
from eps_cuda.kernels.arguments import check_layout, check_shapes, pool_arrays, pool_constants
from eps_cuda.kernels.attend import (
    HALVES,
    MERGE_SPLITS,
    STAGES,
    load_rows,
    load_scales,
    load_units,
    load_values,
    merge_channels,
    merge_kernel,
    padding,
    places,
    plan,
    split_two,
)

SPLIT_TOKENS = 512  # of one program; changes speed and the order of float32 sums
NUM_WARPS = 8


# ------------------------------------------------------------------------------------------------------------- kernels


@triton.jit
def block_positions(block, first, last, S: tl.constexpr, S_PAD: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return where the tokens of a block [BLOCK_N] of a split lie in the sequence; negative for none."""
    lane = block * BLOCK_N + tl.arange(0, BLOCK_N)
    position = first + lane // S_PAD * S + lane % S_PAD
    return tl.where((lane % S_PAD < S) & (position < last), position, -1)


@triton.jit
def add_mass(largest, total, other_largest, other_total):
    """Base-2 masses, total x 2^largest each, of which neither `largest` is infinite: their sum."""
    new = tl.maximum(largest, other_largest)
    return new, total * tl.exp2(largest - new) + other_total * tl.exp2(other_largest - new)


@triton.jit
def natural_log(largest, total):
    """Return the natural log of the base-2 mass total x 2^largest; -inf of none."""
    empty = total == 0
    return tl.where(empty, float("-inf"), (largest + tl.log2(tl.where(empty, 1.0, total))) * 0.6931471805599453)


@triton.jit(do_not_specialize=["table_width", "num_groups"])
def rows_split_kernel(
    q, k, v, k_scale, v_scale, table, lengths, starts, selected_mask, part_out, part_lse, part_selected,
    scale, table_width, num_groups,
    HKV: tl.constexpr, R: tl.constexpr, D: tl.constexpr, U: tl.constexpr, S: tl.constexpr,
    WIDE_Q: tl.constexpr, VISIT: tl.constexpr,
    R_PAD: tl.constexpr, D_PAD: tl.constexpr, S_PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr, SPAN: tl.constexpr, SPLIT_GROUPS: tl.constexpr,
    UNIT_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr, TOKEN_STRIDE: tl.constexpr,
    K_BITS: tl.constexpr, V_BITS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Program (tile of queries, b * HKV + h, split): the tokens of one split, for BLOCK_M / R_PAD rows of sequence b
    and the R query heads of kv head h. Writes part_out [T, Hq, splits, D] float32, normalised, part_lse and
    part_selected [T, Hq, splits] float32, natural log. Strides as in `attend_split_kernel`."""
    CODES: tl.constexpr = K_BITS != 16 or V_BITS != 16
    tile, pair, split, num_splits = tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    b, h = pair // HKV, pair % HKV
    length, first_row = tl.load(lengths + b), tl.load(starts + b)
    num_rows = tl.load(starts + b + 1) - first_row
    first_in_tile = tile * (BLOCK_M // R_PAD)
    if first_in_tile >= num_rows:
        return
    first = split * (SPLIT_GROUPS * S)
    last = tl.minimum(first + SPLIT_GROUPS * S, length)
    table += b.to(tl.int64) * table_width
    num_blocks = tl.cdiv(tl.maximum(last - first, 0), GROUPS * S) * SPAN
    # blocks of which every row sees every token
    num_shared = tl.maximum(length - num_rows + 1 - first, 0) // (GROUPS * S) * SPAN
    num_shared = tl.minimum(num_shared, num_blocks)

    m, d = tl.arange(0, BLOCK_M), tl.arange(0, D_PAD)
    row, r = first_in_tile + m // R_PAD, m % R_PAD
    exists = (row < num_rows) & (r < R)
    seen = tl.where(exists, length - num_rows + row + 1, 0)  # tokens of each query
    pair_row = (first_row + row).to(tl.int64) * HKV + h  # of all T * HKV
    head = pair_row * R + r  # of all T * Hq
    in_head = exists[:, None] & (d < D)[None, :]
    query = tl.load(q + head[:, None] * D + d[None, :], mask=in_head, other=0.0)
    if WIDE_Q:
        query, query_low = split_two(query.to(tl.float32), VALUES)
    else:
        query = query.to(VALUES)

    # finite, so that a block of which a row sees nothing leaves no NaN behind
    largest = tl.full([BLOCK_M], -3.0e38, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    broken = tl.zeros([BLOCK_M], tl.int32)
    selected_largest, selected_total = largest, total
    # the way to a token is table, row: the first step runs one iteration ahead, so that it is not waited for
    position = block_positions(0, first, last, S, S_PAD, BLOCK_N)
    unit = load_units(table, position, U)
    for guarded in tl.static_range(2):  # blocks that every row sees whole, then the others
        for block in range(num_shared * guarded, num_shared + (num_blocks - num_shared) * guarded):
            here = position
            live = here >= 0
            place = places(unit, here, h, U, UNIT_STRIDE, HEAD_STRIDE, TOKEN_STRIDE)
            position = block_positions(block + 1, first, last, S, S_PAD, BLOCK_N)
            unit = load_units(table, position, U)
            if CODES:
                key_scale = load_scales(k_scale, place, live, K_BITS)
                value_scale = load_scales(v_scale, place, live, V_BITS)
                key = load_values(k, place, key_scale, d, live, K_BITS, VALUES, D, D_PAD)
            else:
                key = load_rows(k, place, d, live, D, D_PAD)
            logits = tl.dot(query, tl.trans(key), input_precision="ieee")
            if WIDE_Q:
                logits = tl.dot(query_low, tl.trans(key), logits)
            visible = live[None, :] & (here[None, :] < seen[:, None])
            logits = tl.where(visible, logits * scale, float("-inf"))
            new = tl.maximum(largest, tl.max(logits, axis=1))
            shrink, weight = tl.exp2(largest - new), tl.exp2(logits - new[:, None])
            total = total * shrink + tl.sum(weight, axis=1)
            if CODES:
                value = load_values(v, place, value_scale, d, live, V_BITS, VALUES, D, D_PAD)
            else:
                value = load_rows(v, place, d, live, D, D_PAD)
            if guarded == 1:
                finite = tl.abs(value.to(tl.float32)) < float("inf")
                value = tl.where(finite, value, 0.0).to(VALUES)
                spoilt = tl.min(finite.to(tl.int32), axis=1) == 0
                broken = tl.maximum(broken, tl.max((visible & spoilt[None, :]).to(tl.int32), axis=1))
            acc = acc * shrink[:, None]
            if WIDE_Q:
                weight_high, weight_low = split_two(weight, VALUES)
                acc = tl.dot(weight_high, value, acc)
                acc = tl.dot(weight_low, value, acc)
            else:
                acc = tl.dot(weight.to(VALUES), value, acc, input_precision="ieee")
            largest = new
            if VISIT:
                by_group = tl.reshape(logits, [BLOCK_M, GROUPS, BLOCK_N // GROUPS])
                top = tl.maximum(tl.max(by_group, axis=2), -3.0e38)
                mass = tl.sum(tl.exp2(by_group - top[:, :, None]), axis=2)
                group = split * SPLIT_GROUPS + block // SPAN * GROUPS + tl.arange(0, GROUPS)
                inside = (group < num_groups)[None, :]
                asked = tl.load(
                    selected_mask + pair_row[:, None] * num_groups + group[None, :],
                    mask=exists[:, None] & inside,
                    other=0,
                )
                listed = asked != 0
                listed_top = tl.where(listed, top, -3.0e38)
                new = tl.max(listed_top, axis=1)
                mass_listed = tl.where(listed, mass * tl.exp2(listed_top - new[:, None]), 0.0)
                selected_largest, selected_total = add_mass(
                    selected_largest, selected_total, new, tl.sum(mass_listed, axis=1)
                )

    part = head * num_splits + split
    tl.store(part_lse + part, natural_log(largest, total), mask=exists)
    if VISIT:
        tl.store(part_selected + part, natural_log(selected_largest, selected_total), mask=exists)
    if first < last:  # the merge gives a split without tokens no weight and needs no zeros of it
        out = tl.where((broken > 0)[:, None], float("nan"), acc / tl.where(total == 0, 1.0, total)[:, None])
        tl.store(part_out + part[:, None] * D + d[None, :], out, mask=in_head)


# ----------------------------------------------------------------------------------------------------------- launchers


def attend_rows(
    q: Tensor, k_pool: Pool, v_pool: Pool, table: Tensor, lengths: Tensor, starts: Tensor, *, most_rows: int,
    group_size: int, selected_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """(out [T, Hq, D] in q's dtype, lse, selected_lse) of `RowsRead` for q [T, Hq, D], unscaled, over k_pool,
    v_pool [P, Hkv, U, D], as they are or codes. Rows starts[b] to starts[b + 1] - 1 are the last tokens of sequence b,
    starts [B + 1] int32, at most `most_rows`; table [B, M] int32, lengths [B] int32, `selected_mask`
    [T, Hkv, M * U / S] bool. Two launches besides what that asks for; shapes are static, and nothing waits."""
    check_layout(table=table, lengths=lengths, starts=starts)
    check_shapes(q, k_pool, v_pool, group_size)
    num_rows, num_heads, head_dim = q.shape
    _, kv_heads, unit_tokens, _ = k_pool.shape
    batch, width = table.shape
    repeat, num_groups = num_heads // kv_heads, width * (unit_tokens // group_size)
    blocks = block_constants(repeat, head_dim, group_size, k_pool.dtype, q.dtype)
    num_splits = max(triton.cdiv(num_groups, blocks["SPLIT_GROUPS"]), 1)
    part_out = torch.empty((num_rows, num_heads, num_splits, head_dim), dtype=torch.float32, device=q.device)
    part_lse = part_out.new_empty(part_out.shape[:3])
    part_selected = None if selected_mask is None else torch.empty_like(part_lse)
    tiles = triton.cdiv(most_rows * blocks["R_PAD"], blocks["BLOCK_M"])
    rows_split_kernel[(tiles, batch * kv_heads, num_splits)](
        q.contiguous(), *pool_arrays(k_pool, v_pool), table, lengths, starts,
        None if selected_mask is None else selected_mask.to(torch.uint8).contiguous(),
        part_out, part_lse, part_selected, math.log2(math.e) / math.sqrt(head_dim), width, num_groups,
        HKV=kv_heads, R=repeat, D=head_dim, U=unit_tokens, S=group_size,
        WIDE_Q=k_pool.dtype in HALVES and q.dtype != k_pool.dtype, VISIT=selected_mask is not None,
        **blocks, **pool_constants(k_pool, v_pool), num_warps=NUM_WARPS,
        num_stages=STAGES["hip" if torch.version.hip else "cuda"],
    )  # fmt: skip
    out, lse = torch.empty(q.shape, dtype=q.dtype, device=q.device), part_lse.new_empty((num_rows, num_heads))
    block_d = merge_channels(head_dim)
    merge_kernel[(num_rows * num_heads, triton.cdiv(head_dim, block_d))](
        part_out, part_lse, out, lse, num_splits, D=head_dim, BLOCK_S=MERGE_SPLITS, BLOCK_D=block_d
    )
    return out, lse, None if part_selected is None else torch.logsumexp(part_selected, dim=2)


def block_constants(
    repeat: int, head_dim: int, group_size: int, dtype: torch.dtype, q_dtype: torch.dtype
) -> dict[str, int]:
    """Return what `rows_split_kernel` is compiled for besides the model's shape, for the dtypes of the cache and of q:
    BLOCK_M rows x query heads of one program, BLOCK_N lanes of one iteration, its GROUPS, whole ones or 1 where a group
    needs SPAN of them, and the SPLIT_GROUPS of one program. They change speed and the order of float32 sums, and do not
    depend on how many rows or sequences there are: their bits would follow."""
    # half of what the few queries of one step have room for: more spills
    tokens = max(plan(1, 0, head_dim, dtype, 1, 1).block_tokens // 2, 16)
    repeat_pad, group_lanes = triton.next_power_of_2(repeat), triton.next_power_of_2(group_size)
    groups = max(tokens // group_lanes, 1)
    queries = 64 if q_dtype == dtype and head_dim <= 128 else 32
    if dtype not in HALVES:
        queries = 16  # no tensor cores: the products' registers bound the tile
    return {
        "R_PAD": repeat_pad, "D_PAD": padding(repeat, head_dim)["D_PAD"], "S_PAD": group_lanes,
        "BLOCK_M": max(queries, repeat_pad), "BLOCK_N": tokens, "GROUPS": groups,
        "SPAN": max(group_lanes // tokens, 1),
        "SPLIT_GROUPS": max(SPLIT_TOKENS // (groups * group_size), 1) * groups,
    }  # fmt: skip
