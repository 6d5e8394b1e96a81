"""Triton: the best groups of each (sequence, kv head) as ascending lists. A third round behind those of `thresholds`:
each program writes what its run has behind what the runs before it have. And lists of masks."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eps_cuda.kernels import thresholds
from eps_cuda.kernels.overlap import release, wait
from eps_cuda.kernels.thresholds import SIZES, Thresholds, groups_of, is_taken, num_chunks, values_of, warps

LIST_BLOCK = 4096  # groups that `compact` takes at a time


# ------------------------------------------------------------------------------------------------------------- kernels


@triton.jit(do_not_specialize=SIZES)
def _list(
    estimate, lengths, counters, state, scales, candidates, candidate_groups, chunk_counts, out_groups, out_counts,
    selected_mask, groups, kv_heads, width, chunks,
    num_sink_tokens, num_recent_tokens, min_context, S: tl.constexpr, SINK_RECENT: tl.constexpr,
    CHUNK: tl.constexpr, BINS: tl.constexpr, COUNTERS: tl.constexpr, STATE: tl.constexpr, SCALES: tl.constexpr,
    CANDIDATES: tl.constexpr, HIP: tl.constexpr, OVERLAP: tl.constexpr = False,
):  # fmt: skip
    """Writes a run's part of the list, and unless it is None of the mask."""
    wait(OVERLAP)
    chunk, row = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths + row // kv_heads) if SINK_RECENT else 0
    count = groups_of(length, groups, S, SINK_RECENT)
    estimate_row = estimate + row.to(tl.int64) * groups
    state += row * STATE
    want, last = tl.load(state + 2), tl.load(state + 3)
    low, high = tl.load(scales + row * SCALES + 4), tl.load(scales + row * SCALES + 5)
    number = tl.load(counters + row * (BINS + COUNTERS) + BINS + 1)

    # what the runs before this one have: above the interval, and in it
    i, run_start = tl.arange(0, CANDIDATES), chunk * CHUNK
    earlier = tl.zeros((CANDIDATES,), tl.int32)
    counted = tl.minimum(chunk, (count + CHUNK - 1) // CHUNK)  # chunks past a sequence's end have none
    for begin in range(0, counted, CANDIDATES):
        earlier += tl.load(chunk_counts + row * chunks + begin + i, mask=begin + i < counted, other=0)
    for begin in range(0, number, CANDIDATES):
        place = row.to(tl.int64) * groups + begin + i
        inside = begin + i < number
        group = tl.load(candidate_groups + place, mask=inside, other=0x7FFFFFFF)
        value = tl.load(candidates + place, mask=inside, other=float("nan"))
        earlier += ((group < run_start) & is_taken(value, group, low, high, last)).to(tl.int32)

    g = run_start + tl.arange(0, CHUNK)
    value = values_of(
        estimate_row, g, run_start, run_start + CHUNK - 1, count, length, num_sink_tokens, num_recent_tokens,
        min_context, S, SINK_RECENT,
    )  # fmt: skip
    taken = is_taken(value, g, low, high, last)
    rank = tl.sum(earlier, axis=0) + tl.cumsum(taken.to(tl.int32), axis=0)
    out_row = out_groups + row.to(tl.int64) * width
    tl.store(out_row + rank - 1, g, mask=taken)
    if selected_mask is not None:
        tl.store(selected_mask + row.to(tl.int64) * groups + g, taken.to(tl.uint8), mask=g < groups)
    release(OVERLAP)
    # each run fills as much of what no group takes
    share = (width + chunks - 1) // chunks
    end = tl.minimum(chunk * share + share, width)
    for begin in range(tl.maximum(chunk * share, want // CANDIDATES * CANDIDATES), end, CANDIDATES):
        w = begin + i
        tl.store(out_row + w, tl.full((CANDIDATES,), -1, tl.int32), mask=(w >= want) & (w < end))
    if chunk == 0:
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


def listed(
    estimate: Tensor, lengths: Tensor, found: Thresholds, width: int, selected_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(groups [B, Hkv, width] int32 ascending then -1, counts [B, Hkv] int32) that `found` takes, by the third round.
    Fills `selected_mask` [B, Hkv, G] uint8."""
    batch, kv_heads, groups = estimate.shape
    rows, chunks = batch * kv_heads, num_chunks(groups)
    out = torch.empty((batch, kv_heads, width), dtype=torch.int32, device=estimate.device)
    counts = out.new_empty((batch, kv_heads))
    _list[(chunks, rows)](
        estimate, lengths, found.counters, found.state, found.scales, found.candidates, found.candidate_groups,
        found.chunk_counts, out, counts, selected_mask, groups, kv_heads, width, chunks, *found.selectable,
        CHUNK=thresholds.CHUNK, CANDIDATES=thresholds.CANDIDATES, num_warps=warps(chunks * rows), **found.constants,
    )  # fmt: skip
    return out, counts


def select_topk(
    estimate: Tensor, counts_wanted: Tensor, lengths: Tensor, *, group_size: int, num_sink_tokens: int,
    num_recent_tokens: int, min_context: int, width: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(groups [B, Hkv, width] int32 ascending then -1, counts [B, Hkv] int32, visit [B, Hkv, G] uint8) of policy topk:
    of estimate [B, Hkv, G] float32, natural logs of masses, the `counts_wanted` [B] int32 best (at most width), forced
    groups first, the lower index first among equals, none past the end of lengths [B] int32 tokens. Forced: the groups
    of `eps_core.kv_cache.step_plan.always_selected_groups` and those at +inf."""
    selected_mask = torch.empty(estimate.shape, dtype=torch.uint8, device=estimate.device)
    selectable = group_size, num_sink_tokens, num_recent_tokens, min_context
    found = thresholds.find_thresholds(estimate, lengths, counts_wanted, width, selectable)
    return *listed(estimate, lengths, found, width, selected_mask), selected_mask


def select_best(estimate: Tensor, counts_wanted: Tensor, *, width: int) -> tuple[Tensor, Tensor]:
    """(groups [B, Hkv, width] int32 ascending then -1, counts [B, Hkv] int32) of the `counts_wanted` [B] int32 best
    finite estimates, the lower index first among equals; +inf and -inf are never taken. For refinement."""
    found = thresholds.find_thresholds(estimate, counts_wanted, counts_wanted, width, None)
    return listed(estimate, counts_wanted, found, width)


def compact(selected_mask: Tensor, *, width: int) -> tuple[Tensor, Tensor]:
    """(groups [B, Hkv, width] int32 ascending then -1, counts [B, Hkv] int32) of what is set in
    selected_mask [B, Hkv, G], uint8 or bool; the first `width` where more is set."""
    batch, kv_heads, groups = selected_mask.shape
    listed = torch.empty((batch, kv_heads, width), dtype=torch.int32, device=selected_mask.device)
    counts = torch.empty((batch, kv_heads), dtype=torch.int32, device=selected_mask.device)
    block = min(triton.next_power_of_2(groups), LIST_BLOCK)
    _compact[(batch * kv_heads,)](
        selected_mask.contiguous().view(torch.uint8), listed, counts, groups, width, LIST=block
    )
    return listed, counts
