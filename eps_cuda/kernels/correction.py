"""The stand-in for the groups that attention left out, in Triton: their estimated masses and the mean values around
them, summed over the whole sequence by split programs and merged with what was read.

Split and merge are those of attention itself (FlashDecoding, Dao et al. 2023, over the online softmax of Milakov and
Gimelshein 2018), with groups for tokens, estimates for logits and int8 means of V for values. All query heads of a
kv head share the estimates, so the sums are taken once; only the final correction is per query head.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eps_core.backend.pages import Pool
from eps_cuda.kernels.arguments import CorrectionPools, check_layout
from eps_cuda.kernels.attend import MERGE_SPLITS, State, attend_splits, merge_channels, merge_splits, processors

BLOCK_ESTIMATES = 1024  # of one iteration; changes speed only

# ------------------------------------------------------------------------------------------------------------- kernels


@triton.jit
def log_mass(largest, total):
    """log(total) + largest, -inf where `total` is 0."""
    empty = total == 0
    return tl.where(empty, float("-inf"), largest + tl.log(tl.where(empty, 1.0, total)))


@triton.jit(do_not_specialize=["num_corrections", "table_width"])
def correction_split_kernel(
    estimate, selected_mask, mean, mean_scale, correction_valid, table, lengths, part_out, part_lse, part_seen,
    num_corrections, table_width,
    HKV: tl.constexpr, D: tl.constexpr, TAIL: tl.constexpr, PER_UNIT: tl.constexpr,
    PER_CORRECTION: tl.constexpr, GROUPS_PAD: tl.constexpr, D_PAD: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Program (b * HKV + h, split): its share of the correction groups of kv head h of sequence b. Writes part_out
    [B, Hkv, splits, D], the weighted mean of their means, and the natural logs of the estimated masses of the groups
    skipped in them, part_lse, and of all selected ones, part_seen [B, Hkv, splits]; float32."""
    pair, split, num_splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    b, h = pair // HKV, pair % HKV
    length = tl.load(lengths + b)
    first = tl.cdiv(num_corrections, BLOCK_T) * split // num_splits * BLOCK_T
    last = tl.minimum(tl.cdiv(num_corrections, BLOCK_T) * (split + 1) // num_splits * BLOCK_T, num_corrections)
    estimates = pair.to(tl.int64) * num_corrections * PER_CORRECTION
    table += b.to(tl.int64) * table_width

    i, d = tl.arange(0, GROUPS_PAD), tl.arange(0, D_PAD)
    largest, largest_seen = -3.0e38, -3.0e38
    total, total_seen = 0.0, 0.0
    acc = tl.zeros([D_PAD], tl.float32)
    for start in range(first, last, BLOCK_T):
        correction = start + tl.arange(0, BLOCK_T)
        inside = (correction < last)[:, None] & (i < PER_CORRECTION)[None, :]
        place = estimates + correction[:, None] * PER_CORRECTION + i[None, :]
        value = tl.load(estimate + place, mask=inside, other=float("-inf"))
        selected = tl.load(selected_mask + place, mask=inside, other=0) != 0
        # a group without a summary or past the end has no estimate; NaN is none either
        known = tl.abs(value) < float("inf")
        # means before their estimates are known: both loads are in flight at once
        usable = (correction < last) & ((correction + 1) * TAIL <= length)
        unit = tl.load(table + correction // PER_UNIT, mask=usable, other=0).to(tl.int64)
        usable = usable & (
            tl.load(correction_valid + unit * PER_UNIT + correction % PER_UNIT, mask=usable, other=0) != 0
        )
        row = (unit * HKV + h) * PER_UNIT + correction % PER_UNIT
        code = tl.load(
            mean + row[:, None] * D + d[None, :], mask=usable[:, None] & (d < D)[None, :], other=0
        ).to(tl.float32)  # fmt: skip
        scale = tl.load(mean_scale + row, mask=usable, other=0.0).to(tl.float32)

        seen = tl.where(known & selected, value, float("-inf"))
        new_seen = tl.maximum(largest_seen, tl.max(tl.max(seen, axis=1), axis=0))
        gained = tl.sum(tl.sum(tl.exp(seen - new_seen), axis=1), axis=0)
        total_seen = total_seen * tl.exp(largest_seen - new_seen) + gained
        largest_seen = new_seen
        skipped = tl.where(known & (selected == 0) & usable[:, None], value, float("-inf"))
        new = tl.maximum(largest, tl.max(tl.max(skipped, axis=1), axis=0))
        weight, shrink = tl.sum(tl.exp(skipped - new), axis=1), tl.exp(largest - new)
        total = total * shrink + tl.sum(weight, axis=0)
        acc = acc * shrink + tl.sum((weight * scale)[:, None] * code, axis=0)
        largest = new

    place = pair.to(tl.int64) * num_splits + split
    tl.store(part_lse + place, log_mass(largest, total))
    tl.store(part_seen + place, log_mass(largest_seen, total_seen))
    tl.store(part_out + place * D + d, acc / tl.where(total == 0, 1.0, total), mask=d < D)


@triton.jit
def merge_seen(part_seen, first, num_splits, BLOCK_S: tl.constexpr):
    """Log-sum-exp of part_seen[first : first + num_splits]."""
    largest, total = -3.0e38, 0.0
    for start in range(0, num_splits, BLOCK_S):
        split = start + tl.arange(0, BLOCK_S)
        seen = tl.load(part_seen + first + split, mask=split < num_splits, other=float("-inf"))
        new = tl.maximum(largest, tl.max(seen, axis=0))
        total = total * tl.exp(largest - new) + tl.sum(tl.exp(seen - new), axis=0)
        largest = new
    return log_mass(largest, total)


@triton.jit(do_not_specialize=["num_splits", "num_correction_splits"])
def finish_kernel(
    part_out, part_lse, part_tail, part_tail_lse, part_seen, out, lse, correction_lse,
    num_splits, num_correction_splits,
    R: tl.constexpr, D: tl.constexpr, ALONE: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program (b * Hq + head, block of channels). Merges the splits of what was read and of the correction: `out` is of
    both, `lse` of what was read. ALONE: `lse` is given, `out` and `correction_lse` are of the correction."""
    head = tl.program_id(0).to(tl.int64)
    pair = head // R
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    merged, mass = merge_splits(
        part_tail, part_tail_lse, pair * num_correction_splits, num_correction_splits, d, D, BLOCK_S, BLOCK_D
    )
    seen = merge_seen(part_seen, pair * num_correction_splits, num_correction_splits, BLOCK_S)
    if ALONE:
        read_mass = tl.load(lse + head)
    else:
        read, read_mass = merge_splits(part_out, part_lse, head * num_splits, num_splits, d, D, BLOCK_S, BLOCK_D)
    # estimates that were too high for what was read are lowered as much for what was not
    mass -= tl.where(seen > read_mass, seen - read_mass, 0.0)
    if ALONE:
        if tl.program_id(1) == 0:
            tl.store(correction_lse + head, mass)
    else:
        largest = tl.maximum(tl.maximum(mass, read_mass), -3.0e38)
        weight, weight_read = tl.exp(mass - largest), tl.exp(read_mass - largest)
        total = weight + weight_read
        total = tl.where(total == 0, 1.0, total)
        merged = merged * (weight / total) + read * (weight_read / total)
        if tl.program_id(1) == 0:
            tl.store(lse + head, read_mass)
    tl.store(out + head * D + d, merged.to(out.dtype.element_ty), mask=d < D)


# ----------------------------------------------------------------------------------------------------------- launchers


def attend_correction(
    estimate: Tensor, selected_mask: Tensor, lse: Tensor, mean: Tensor, mean_scale: Tensor, correction_valid: Tensor,
    table: Tensor, lengths: Tensor, *, group_size: int, correction_tokens: int,
) -> State:  # fmt: skip
    """(out [B, Hq, D] float32, lse [B, Hq] float32): an estimate, no bound, of attention over the groups that
    selected_mask [B, Hkv, G] uint8 or bool leaves out, to be merged with what was read: log mass lse [B, Hq] float32.
    estimate [B, Hkv, G] float32: log masses, infinite where unknown; mean, mean_scale and correction_valid as in
    `CorrectionPools`; table [B, M] and lengths [B] int32. A correction group adds the masses of its skipped groups,
    with its mean, where it is full and valid."""
    means = CorrectionPools(mean, mean_scale, correction_valid, correction_tokens)
    parts, seen = correction_splits(estimate, selected_mask, means, table, lengths, group_size, None)
    out = parts[0].new_empty((*lse.shape, mean.shape[3]))
    correction_lse = lse.new_empty(lse.shape)
    _finish(None, parts, seen, out, lse.contiguous(), correction_lse)
    return out, correction_lse


def attend_with_correction(
    q: Tensor, k_pool: Pool, v_pool: Pool, table: Tensor, lengths: Tensor, groups: Tensor, counts: Tensor,
    estimate: Tensor, selected_mask: Tensor, means: CorrectionPools, *, group_size: int, num_splits: int | None = None,
) -> State:  # fmt: skip
    """(out [B, Hq, D] in q's dtype: the listed groups and the correction of the others, lse [B, Hq] float32 of the
    listed groups alone), as `attend_groups`, `attend_correction` and a merge would give, in three launches and without
    rounding what was read to q's dtype first. `selected_mask` must mark the listed groups."""
    read = attend_splits(q, k_pool, v_pool, table, lengths, groups, counts, group_size, num_splits)
    parts, seen = correction_splits(estimate, selected_mask, means, table, lengths, group_size, num_splits)
    out, lse = torch.empty(q.shape, dtype=q.dtype, device=q.device), seen.new_empty(q.shape[:2])
    _finish(read, parts, seen, out, lse, None)
    return out, lse


def correction_splits(
    estimate: Tensor, selected_mask: Tensor, means: CorrectionPools, table: Tensor, lengths: Tensor, group_size: int,
    num_splits: int | None,
) -> tuple[State, Tensor]:  # fmt: skip
    """Partial results of the correction: ((out [B, Hkv, splits, D], lse [B, Hkv, splits]), log masses of what was
    selected [B, Hkv, splits]), all float32."""
    check_layout(mean=means.mean, mean_scale=means.mean_scale, correction_valid=means.valid, table=table,
        lengths=lengths,
    )  # fmt: skip
    batch, kv_heads, num_groups = estimate.shape
    per_unit, head_dim = means.mean.shape[2:]
    num_corrections, per_correction = table.shape[1] * per_unit, means.tokens // group_size
    if (
        means.tokens % group_size
        or num_corrections * per_correction != num_groups
        or selected_mask.shape != estimate.shape
    ):
        raise ValueError(
            f"estimate {list(estimate.shape)} and visit {list(selected_mask.shape)} must cover {num_corrections} "
            f"correction groups of {means.tokens} tokens in groups of {group_size}"
        )
    groups_pad, block_corrections = correction_blocks(per_correction)
    if num_splits is None:
        wanted = triton.cdiv(2 * processors(estimate.device), batch * kv_heads)
        num_splits = max(min(wanted, triton.cdiv(num_corrections, block_corrections)), 1)
    part_out = estimate.new_empty((batch, kv_heads, num_splits, head_dim))
    part_lse, part_seen = (estimate.new_empty((batch, kv_heads, num_splits)) for _ in range(2))
    correction_split_kernel[(batch * kv_heads, num_splits)](
        estimate.contiguous(), selected_mask.contiguous().view(torch.uint8), *means[:3], table, lengths, part_out,
        part_lse, part_seen, num_corrections, table.shape[1],
        HKV=kv_heads, D=head_dim, TAIL=means.tokens, PER_UNIT=per_unit, PER_CORRECTION=per_correction,
        GROUPS_PAD=groups_pad, D_PAD=triton.next_power_of_2(head_dim), BLOCK_T=block_corrections,
    )  # fmt: skip
    return (part_out, part_lse), part_seen


def correction_blocks(groups_per_correction: int) -> tuple[int, int]:
    """(groups that a correction group is padded to, correction groups of one iteration): small, as there are few of
    them to deal to a whole GPU."""
    groups_pad = triton.next_power_of_2(groups_per_correction)
    return groups_pad, min(max(BLOCK_ESTIMATES // groups_pad, 1), 16)


def _finish(
    read: State | None, correction: State, seen: Tensor, out: Tensor, lse: Tensor, correction_lse: Tensor | None
) -> None:
    """Launches `finish_kernel` over the partial results; fills `out` and `lse`, or `out` and `correction_lse`."""
    batch, num_heads, head_dim = out.shape
    part_out, part_lse = read if read is not None else (None, None)
    block_d = merge_channels(head_dim)
    finish_kernel[(batch * num_heads, triton.cdiv(head_dim, block_d))](
        part_out, part_lse, *correction, seen, out, lse, correction_lse, 0 if part_lse is None else part_lse.shape[2],
        seen.shape[2], R=num_heads // seen.shape[1], D=head_dim, ALONE=read is None, BLOCK_S=MERGE_SPLITS,
        BLOCK_D=block_d,
    )  # fmt: skip
