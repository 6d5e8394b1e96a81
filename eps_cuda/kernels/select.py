"""Triton: the best groups of each (sequence, kv head) as ascending lists, in one launch and without synchronisation.

One program holds one row of estimates as order-preserving int32 keys in registers and halves the interval of keys in
which the K-th largest lies: count how many reach its middle. It ends as soon as exactly K reach the lower end, after 15
to 24 counts of 32k random scores (choosing the middle by interpolation took no fewer), or with one key left, after at
most 32, whose ties go to the lower index. A second pass over the row (in cache by then) writes the list, each block
behind those before it.

A row keeps one multiprocessor busy and leaves others idle where rows are few. Spreading rows over programs takes a
launch per digit of a radix search and one for the list, as programs cannot wait for each other; at a microsecond or two
each that is no less than the counts of a row of 32k groups are assumed to take. Not timed on a GPU.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

# groups; longer rows are read again for each count, so many at a time. Both change speed only
ROW_IN_REGISTERS, READ_AGAIN = 32768, 8192
LIST_BLOCK = 4096  # groups that the list is written in at a time; at most 2^15 (two counts share an int32)
THREADS = 512  # of a program at most: twice as many leave too few registers for the longest row


@dataclass(frozen=True)
class Depth:
    """Counts of groups, per sequence and kv head, of which a step reads so much of a code: counts [B] int32 on the
    device, and the most that they can be, which the host knows before a step is captured. 0: none."""

    cascaded: tuple[tuple[Tensor, int], ...]  # each part after the first
    rescored: tuple[Tensor, int]  # the rescoring bit


# ------------------------------------------------------------------------------------------------------------- kernels


@triton.jit
def _keys(
    estimate_row, g, groups, length, num_sink_tokens, num_recent_tokens, min_context,
    S: tl.constexpr, SINK_RECENT: tl.constexpr,
):  # fmt: skip
    """int32 keys in the estimates' order: INFINITE of always selected groups, LOWEST of those never taken. With
    SINK_RECENT the former are sink and recent tokens and +inf inside the sequence; without it there are none, and +inf
    is never taken."""
    INFINITE: tl.constexpr = 0x7F800000
    LOWEST: tl.constexpr = -0x80000000
    estimate = tl.load(estimate_row + g, mask=g < groups, other=-float("inf"))
    # one zero, as ties compare values
    bits = tl.where(estimate == 0, 0.0, estimate).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    if SINK_RECENT:
        ends = (length + S - 1) // S
        inside = (g < ends) & (g < groups)
        first = g < (tl.minimum(num_sink_tokens, length) + S - 1) // S
        last = g >= tl.maximum(length - num_recent_tokens, 0) // S
        is_open = (g == ends - 1) & (length % S != 0)
        key = tl.where(first | last | is_open | (length < min_context), INFINITE, key)
        # -inf inside is taken last of all, past the end never
        return tl.where(inside, key, LOWEST)
    return tl.where(tl.abs(estimate) < float("inf"), key, LOWEST)


@triton.jit
def _extent(keys):
    """Forced keys, keys that may be taken, the smallest of these, the largest that is not forced."""
    INFINITE: tl.constexpr = 0x7F800000
    LOWEST: tl.constexpr = -0x80000000
    HIGHEST: tl.constexpr = 0x7FFFFFFF
    always_selected, eligible = (
        tl.sum((keys >= INFINITE).to(tl.int32), axis=0),
        tl.sum((keys > LOWEST).to(tl.int32), axis=0),
    )
    smallest = tl.min(tl.where(keys > LOWEST, keys, HIGHEST), axis=0)
    return always_selected, eligible, smallest, tl.max(tl.where(keys < INFINITE, keys, LOWEST), axis=0)


@triton.jit
def _select(
    estimate, lengths, wanted, out_groups, out_counts, selected_mask, groups, kv_heads, width,
    num_sink_tokens, num_recent_tokens, min_context, S: tl.constexpr, SINK_RECENT: tl.constexpr, VISIT: tl.constexpr,
    BLOCK: tl.constexpr, RESIDENT: tl.constexpr, LIST: tl.constexpr,
):  # fmt: skip
    """One (sequence, kv head): the `wanted` largest keys."""
    INFINITE: tl.constexpr = 0x7F800000
    row = tl.program_id(0)
    length = tl.load(lengths + row // kv_heads) if SINK_RECENT else 0
    estimate_row = estimate + row.to(tl.int64) * groups
    index = tl.arange(0, BLOCK)

    keys = _keys(estimate_row, index, groups, length, num_sink_tokens, num_recent_tokens, min_context, S, SINK_RECENT)
    above, least, lowest, highest = _extent(keys)
    if not RESIDENT:
        for start in range(BLOCK, groups, BLOCK):
            part = _keys(
                estimate_row,
                start + index,
                groups,
                length,
                num_sink_tokens,
                num_recent_tokens,
                min_context,
                S,
                SINK_RECENT,
            )
            always_selected, eligible, smallest, largest = _extent(part)
            above += always_selected
            least += eligible
            lowest, highest = tl.minimum(lowest, smallest), tl.maximum(highest, largest)
    want = tl.minimum(tl.minimum(tl.maximum(tl.load(wanted + row // kv_heads), 0), least), width)

    # keys >= low: `least` >= want of them; keys >= high: `above` < want. int64, as differences pass int32
    low, high = lowest.to(tl.int64), highest.to(tl.int64) + 1
    if above >= want:
        low, high = low * 0 + INFINITE, high * 0 + INFINITE + 1
        least, above = above, above * 0
    while (high - low > 1) & (least != want):
        at = low + (high - low) // 2
        count = tl.sum((keys >= at.to(tl.int32)).to(tl.int32), axis=0)
        if not RESIDENT:
            for start in range(BLOCK, groups, BLOCK):
                part = _keys(
                    estimate_row,
                    start + index,
                    groups,
                    length,
                    num_sink_tokens,
                    num_recent_tokens,
                    min_context,
                    S,
                    SINK_RECENT,
                )
                count += tl.sum((part >= at.to(tl.int32)).to(tl.int32), axis=0)
        enough = count >= want
        low, least = tl.where(enough, at, low), tl.where(enough, count, least)
        high, above = tl.where(enough, high, at), tl.where(enough, above, count)

    # all from high on, and of those between low and high the first `room`: all of them, or ties
    room = want - above
    low_key, high_key = low.to(tl.int32), high.to(tl.int32)
    list_index = tl.arange(0, LIST)
    sure_before, between_before = want * 0, want * 0
    out_row = out_groups + row.to(tl.int64) * width
    for start in range(0, groups, LIST):
        g = start + list_index
        key = _keys(estimate_row, g, groups, length, num_sink_tokens, num_recent_tokens, min_context, S, SINK_RECENT)
        sure, between = key >= high_key, (key >= low_key) & (key < high_key)
        # both counts in one scan
        both = sure.to(tl.int32) + (between.to(tl.int32) << 16)
        ranks = tl.cumsum(both, axis=0)
        rank = between_before + (ranks >> 16)
        taken = sure | (between & (rank <= room))
        place = sure_before + (ranks & 0xFFFF) + tl.minimum(rank, room) - 1
        tl.store(out_row + place, g, mask=taken)
        if VISIT:
            tl.store(selected_mask + row.to(tl.int64) * groups + g, taken.to(tl.uint8), mask=g < groups)
        ends = tl.sum(both, axis=0)
        sure_before += ends & 0xFFFF
        between_before += ends >> 16
    for start in range(0, width, LIST):
        w = start + list_index
        tl.store(out_row + w, tl.full((LIST,), -1, tl.int32), mask=(w >= want) & (w < width))
    tl.store(out_counts + row, want)


@triton.jit
def _compact(selected_mask, out_groups, out_counts, groups, width, LIST: tl.constexpr):
    """One (sequence, kv head): the indices of what is set."""
    row = tl.program_id(0)
    index = tl.arange(0, LIST)
    before = tl.program_id(0) * 0
    out_row = out_groups + row.to(tl.int64) * width
    for start in range(0, groups, LIST):
        g = start + index
        taken = (tl.load(selected_mask + row.to(tl.int64) * groups + g, mask=g < groups, other=0) != 0).to(tl.int32)
        place = before + tl.cumsum(taken, axis=0) - 1
        tl.store(out_row + place, g, mask=(taken != 0) & (place < width))
        before += tl.sum(taken, axis=0)
    for start in range(0, width, LIST):
        w = start + index
        tl.store(out_row + w, tl.full((LIST,), -1, tl.int32), mask=(w >= before) & (w < width))
    tl.store(out_counts + row, tl.minimum(before, width))


# ----------------------------------------------------------------------------------------------------------- launchers


def _warps(elements: int) -> int:
    """Eight elements a thread, up to THREADS."""
    lanes = 64 if torch.version.hip else 32
    return min(max(elements // (8 * lanes), 1), THREADS // lanes)


def _power_of_two(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


def _launch(
    estimate: Tensor, lengths: Tensor, wanted: Tensor, selected_mask: Tensor | None, width: int, row_groups: int,
    selectable: tuple[int, int, int, int] | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    batch, kv_heads, groups = estimate.shape
    assert estimate.is_contiguous() and lengths.is_contiguous() and wanted.is_contiguous()
    listed = torch.empty((batch, kv_heads, width), dtype=torch.int32, device=estimate.device)
    counts = torch.empty((batch, kv_heads), dtype=torch.int32, device=estimate.device)
    group_size, first, last, least = selectable or (1, 0, 0, 0)
    block = _power_of_two(groups) if groups <= row_groups else min(row_groups, READ_AGAIN)
    _select[(batch * kv_heads,)](
        estimate, lengths, wanted, listed, counts, counts if selected_mask is None else selected_mask, groups, kv_heads,
        width, first, last, least, S=group_size, SINK_RECENT=selectable is not None, VISIT=selected_mask is not None,
        BLOCK=block, RESIDENT=groups <= block, LIST=min(block, LIST_BLOCK), num_warps=_warps(block),
    )  # fmt: skip
    return listed, counts


def select_topk(
    estimate: Tensor, counts_wanted: Tensor, lengths: Tensor, *, group_size: int, num_sink_tokens: int,
    num_recent_tokens: int, min_context: int, width: int, row_groups: int = ROW_IN_REGISTERS,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(groups [B, Hkv, width] int32 ascending then -1, counts [B, Hkv] int32, visit [B, Hkv, G] uint8) of policy topk:
    of estimate [B, Hkv, G] float32, natural logs of masses, the `counts_wanted` [B] int32 best (at most width), forced
    groups first, the lower index first among equals, none past the end of lengths [B] int32 tokens. Forced: the groups
    of `eps_core.kv_cache.step_plan.always_selected_groups` and those at +inf."""
    selected_mask = torch.empty(estimate.shape, dtype=torch.uint8, device=estimate.device)
    selectable = group_size, num_sink_tokens, num_recent_tokens, min_context
    listed, counts = _launch(estimate, lengths, counts_wanted, selected_mask, width, row_groups, selectable)
    return listed, counts, selected_mask


def select_best(
    estimate: Tensor, counts_wanted: Tensor, *, width: int, row_groups: int = ROW_IN_REGISTERS
) -> tuple[Tensor, Tensor]:
    """(groups [B, Hkv, width] int32 ascending then -1, counts [B, Hkv] int32) of the `counts_wanted` [B] int32 best
    finite estimates, the lower index first among equals; +inf and -inf are never taken. For refinement."""
    return _launch(estimate, counts_wanted, counts_wanted, None, width, row_groups, None)


def compact(selected_mask: Tensor, *, width: int) -> tuple[Tensor, Tensor]:
    """(groups [B, Hkv, width] int32 ascending then -1, counts [B, Hkv] int32) of what is set in
    selected_mask [B, Hkv, G], uint8 or bool; the first `width` where more is set."""
    batch, kv_heads, groups = selected_mask.shape
    assert selected_mask.is_contiguous()
    listed = torch.empty((batch, kv_heads, width), dtype=torch.int32, device=selected_mask.device)
    counts = torch.empty((batch, kv_heads), dtype=torch.int32, device=selected_mask.device)
    block = min(_power_of_two(groups), LIST_BLOCK)
    _compact[(batch * kv_heads,)](
        selected_mask.view(torch.uint8), listed, counts, groups, width, LIST=block, num_warps=_warps(block)
    )
    return listed, counts
