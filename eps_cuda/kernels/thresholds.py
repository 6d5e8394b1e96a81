"""Triton: which estimates of each (sequence, kv head) are the best, by many programs a row and without
synchronisation.

The K-th largest of a row is found in two rounds, as a radix selection finds it, but with digits that fit the numbers at
hand. The program of a round that comes last (a ticket tells) does what needs all the others.

1. `_count_bins`: each program counts a run of CHUNK estimates into BINS intervals between the least and the greatest of
   a sample of the row, a quarter of them below its mean. The last one finds the interval of the K-th largest.
2. `_find_threshold`: each program copies what its run has in that interval, half a percent of a row as a rule, to a
   list of candidates in any order. The last one halves the interval of keys in which the K-th largest of them lies
   until exactly as many reach its lower end as are still needed, or one key is left, whose ties go to the lower index:
   then it halves the groups until the last of them that is taken is found.

What is taken is exact whatever the intervals were: if all estimates lie in one of them (they are equal, or a few are
huge), the second round's last program reads a whole row again and again, which costs time alone.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from eps_cuda.kernels.overlap import overlap, release, wait

CHUNK = 2048  # groups that one program takes
SAMPLE = 512  # of a row, for the intervals, in runs of 8 that lie together
BINS = 128
CANDIDATES = 2048  # that are taken at a time: half a percent of a row of 262,144 estimates is 1,300
COUNTERS = 5  # of a row behind the bins: always selected groups, candidates, tickets of two rounds and of attention
# numbers of a row that a round leaves the next: its interval, what lies above it, how many are taken, the last group at
# the lower threshold, how many are always selected
STATE = 5
SCALES = 6  # the sample's least, mean, intervals a unit below and above it, and the two thresholds
FEW_PROGRAMS = 512  # so few of them do not fill a GPU: each then has twice the warps, which the last ones wait for less
SIZES = ["groups", "num_sink_tokens", "num_recent_tokens", "min_context", "width", "chunks"]


# ------------------------------------------------------------------------------------------------------------- kernels


@triton.jit
def groups_of(length, groups, S: tl.constexpr, SINK_RECENT: tl.constexpr):
    """Return how many groups of a row count, from the first on: with SINK_RECENT those of the sequence."""
    return tl.minimum((length + S - 1) // S, groups) if SINK_RECENT else groups


@triton.jit
def values_of(
    estimate_row, g, first_g, last_g, groups, length, num_sink_tokens, num_recent_tokens, min_context,
    S: tl.constexpr, SINK_RECENT: tl.constexpr,
):  # fmt: skip
    """Return what estimates [N] of groups g, from first_g to last_g, are chosen by: +inf of always selected groups, NaN
    of those never taken. With SINK_RECENT the former are sink and recent tokens and +inf inside the sequence, and -inf
    inside is taken last of all; without it there are none, and nothing infinite is taken."""
    value = tl.load(estimate_row + g, mask=g < groups, other=float("nan"))
    if SINK_RECENT:
        first = (tl.minimum(num_sink_tokens, length) + S - 1) // S
        # the partial group is among the last
        last = tl.minimum(tl.maximum(length - num_recent_tokens, 0) // S, length // S)
        last = tl.where(length < min_context, 0, last)
        ends = (length + S - 1) // S
        value = tl.where(value == value, value, float("inf"))
        if (first_g < first) | (last_g >= tl.minimum(last, ends)):
            value = tl.where((g < first) | (g >= last), float("inf"), value)
            value = tl.where(g < tl.minimum(ends, groups), value, float("nan"))
        return value
    return tl.where(tl.abs(value) < float("inf"), value, float("nan"))


@triton.jit
def _bins(value, least, mean, below, above, BINS: tl.constexpr):
    """Return the interval of each value: one that is larger is never in a lower one, and NaN is in the first."""
    LOWER: tl.constexpr = BINS // 4
    low = tl.minimum((value - least) * below, LOWER - 1.0)
    high = LOWER + tl.minimum((value - mean) * above, BINS - LOWER - 1.0)
    place = tl.where(value >= mean, high, low)
    return tl.where(place > 0, place, 0.0).to(tl.int32)


@triton.jit
def _keys(value):
    """int32 in the order of finite and infinite values, -0 as 0."""
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _of_key(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _join(least, most, total, number, other_least, other_most, other_total, other_number):
    """Return the least, the greatest, the sum and the number of two samples."""
    return tl.minimum(least, other_least), tl.maximum(most, other_most), total + other_total, number + other_number


@triton.jit
def is_taken(value, g, low, high, last):
    """Return which of the values of groups g are chosen, by a row's two thresholds and its last group at the lower."""
    return (value >= high) | ((value >= low) & (g <= last))


@triton.jit
def barrier(HIP: tl.constexpr):
    """All threads of a program come here before any goes on, and what they stored is in memory: AMD's barrier alone
    does not wait for that."""
    if HIP:
        tl.inline_asm_elementwise(
            "s_waitcnt vmcnt(0)\nv_mov_b32 $0, $1", "=v,v,~{memory}", [tl.zeros((1,), tl.int32)], dtype=tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip
    tl.debug_barrier()


@triton.jit
def is_last(ticket, programs, HIP: tl.constexpr):
    """Return whether all other programs of a row have come here, after what they wrote."""
    barrier(HIP)
    return tl.atomic_add(ticket, 1, sem="acq_rel") == programs - 1


@triton.jit(do_not_specialize=SIZES)
def _count_bins(
    estimate, lengths, wanted, counters, state, scales, groups, kv_heads, width,
    num_sink_tokens, num_recent_tokens, min_context, S: tl.constexpr, SINK_RECENT: tl.constexpr,
    CHUNK: tl.constexpr, SAMPLE: tl.constexpr, BINS: tl.constexpr, COUNTERS: tl.constexpr, STATE: tl.constexpr,
    SCALES: tl.constexpr, ALWAYS: tl.constexpr, HIP: tl.constexpr, OVERLAP: tl.constexpr = False,
):  # fmt: skip
    """Leaves in `state` the interval of the K-th largest (BINS: among the always selected), how many lie above it and
    how many are taken, and in `scales` what `_bins` needs. With ALWAYS all always selected groups are taken, be they
    more than `wanted`."""
    wait(OVERLAP)
    chunk, row = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths + row // kv_heads) if SINK_RECENT else 0
    count = groups_of(length, groups, S, SINK_RECENT)
    chunks = tl.maximum((count + CHUNK - 1) // CHUNK, 1)
    if chunk >= chunks:
        return
    estimate_row = estimate + row.to(tl.int64) * groups
    counters += row * (BINS + COUNTERS)
    bin_index = tl.arange(0, BINS)

    start = chunk * CHUNK
    value = values_of(
        estimate_row, start + tl.arange(0, CHUNK), start, start + CHUNK - 1, count, length, num_sink_tokens,
        num_recent_tokens, min_context, S, SINK_RECENT,
    )  # fmt: skip
    i = tl.arange(0, SAMPLE)
    sample = i // 8 * (tl.maximum(count // SAMPLE, 1) * 8) + i % 8
    some = tl.load(estimate_row + sample, mask=sample < count, other=float("inf"))
    usual = tl.abs(some) < 1e30
    one = tl.where(usual, 1.0, 0.0)
    least, most, total, number = tl.reduce(
        (tl.where(usual, some, 1e30), tl.where(usual, some, -1e30), tl.where(usual, some, 0.0), one), 0, _join
    )  # fmt: skip
    mean = tl.minimum(tl.maximum(total / tl.maximum(number, 1.0), least), most)
    below = (BINS // 4) / tl.maximum(mean - least, 1e-30)
    above = (BINS - BINS // 4) / tl.maximum(most - mean, 1e-30)

    # what is not counted goes to the first interval, and is taken off again
    counted = value < float("inf")
    found = tl.histogram(tl.where(counted, _bins(value, least, mean, below, above, BINS), 0), BINS)
    found -= tl.where(bin_index == 0, CHUNK - tl.sum(counted.to(tl.int32), axis=0), 0)
    tl.atomic_add(counters + bin_index, found, mask=found > 0, sem="relaxed")
    if SINK_RECENT:
        tl.atomic_add(counters + BINS, tl.sum((value == float("inf")).to(tl.int32), axis=0), sem="relaxed")
    release(OVERLAP)
    if is_last(counters + BINS + 2, chunks, HIP):
        counts = tl.load(counters + bin_index, cache_modifier=".cg")
        always_selected = tl.load(counters + BINS, cache_modifier=".cg")
        at_least = tl.cumsum(counts, axis=0, reverse=True) + always_selected
        all_of_them = tl.max(at_least, axis=0)
        want = tl.maximum(tl.load(wanted + row // kv_heads), always_selected if ALWAYS else 0)
        want = tl.minimum(tl.minimum(want, all_of_them), width)
        at = tl.sum((at_least >= want).to(tl.int32), axis=0) - 1
        higher = tl.sum(tl.where(bin_index == at, at_least - counts, 0), axis=0)
        state += row * STATE
        tl.store(state, tl.where(always_selected >= want, BINS, at))
        tl.store(state + 1, tl.where(always_selected >= want, 0, higher))
        tl.store(state + 2, want)
        tl.store(state + 4, always_selected)
        scales += row * SCALES
        tl.store(scales, least)
        tl.store(scales + 1, mean)
        tl.store(scales + 2, below)
        tl.store(scales + 3, above)


@triton.jit(do_not_specialize=SIZES)
def _find_threshold(
    estimate, lengths, counters, state, scales, candidates, candidate_groups, chunk_counts, groups, kv_heads, chunks,
    num_sink_tokens, num_recent_tokens, min_context, S: tl.constexpr, SINK_RECENT: tl.constexpr,
    CHUNK: tl.constexpr, BINS: tl.constexpr, COUNTERS: tl.constexpr, STATE: tl.constexpr, SCALES: tl.constexpr,
    CANDIDATES: tl.constexpr, HIP: tl.constexpr, OVERLAP: tl.constexpr = False,
):  # fmt: skip
    """Leaves in `chunk_counts` how many of each run lie above the interval, and in `scales` two values: what reaches
    the higher is taken, and of what reaches the lower alone the groups up to the one that `state` says."""
    wait(OVERLAP)
    INFINITE: tl.constexpr = 0x7F800000
    LOWEST: tl.constexpr = -0x80000000
    chunk, row = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths + row // kv_heads) if SINK_RECENT else 0
    count = groups_of(length, groups, S, SINK_RECENT)
    programs = tl.maximum((count + CHUNK - 1) // CHUNK, 1)
    if chunk >= programs:
        return
    counters += row * (BINS + COUNTERS)
    state += row * STATE
    scales += row * SCALES
    candidates += row.to(tl.int64) * groups
    candidate_groups += row.to(tl.int64) * groups
    at = tl.load(state)
    least, mean, below, above = (
        tl.load(scales), tl.load(scales + 1), tl.load(scales + 2), tl.load(scales + 3)
    )  # fmt: skip

    start = chunk * CHUNK
    g = start + tl.arange(0, CHUNK)
    value = values_of(
        estimate + row.to(tl.int64) * groups, g, start, start + CHUNK - 1, count, length, num_sink_tokens,
        num_recent_tokens, min_context, S, SINK_RECENT,
    )  # fmt: skip
    own = tl.where(value < float("inf"), _bins(value, least, mean, below, above, BINS), BINS)
    own = tl.where(value == value, own, -1)
    is_candidate = own == at
    place = tl.atomic_add(
        counters + BINS + 1 + tl.zeros((CHUNK,), tl.int32), 1, mask=is_candidate, sem="relaxed"
    )  # fmt: skip
    tl.store(candidates + place, value, mask=is_candidate)
    tl.store(candidate_groups + place, g, mask=is_candidate)
    tl.store(chunk_counts + row * chunks + chunk, tl.sum((own > at).to(tl.int32), axis=0))
    release(OVERLAP)
    if is_last(counters + BINS + 3, programs, HIP):
        number = tl.load(counters + BINS + 1, cache_modifier=".cg")
        want = tl.load(state + 2) - tl.load(state + 1)
        i = tl.arange(0, CANDIDATES)
        # of few candidates all are in registers; of many these are the first, and the others are read for each count
        some = _keys(tl.load(candidates + i, mask=i < number, other=0.0, cache_modifier=".cg"))
        some = tl.where(i < number, some, LOWEST)
        lowest = tl.min(tl.where(i < number, some, INFINITE), axis=0)
        highest = tl.max(some, axis=0)
        for begin in range(CANDIDATES, number, CANDIDATES):
            inside = begin + i < number
            more = _keys(tl.load(candidates + begin + i, mask=inside, other=0.0, cache_modifier=".cg"))
            lowest = tl.minimum(lowest, tl.min(tl.where(inside, more, INFINITE), axis=0))
            highest = tl.maximum(highest, tl.max(tl.where(inside, more, LOWEST), axis=0))
        # keys >= low: `reach` >= want of them; keys >= high: `taken` < want. int64, as differences pass int32
        low, high = lowest.to(tl.int64), tl.maximum(highest, lowest).to(tl.int64) + 1
        reach, taken = number, number * 0
        while (high - low > 1) & (reach != want):
            middle = low + (high - low) // 2
            reaching = tl.sum((some >= middle.to(tl.int32)).to(tl.int32), axis=0)
            for begin in range(CANDIDATES, number, CANDIDATES):
                inside = begin + i < number
                more = _keys(tl.load(candidates + begin + i, mask=inside, other=0.0, cache_modifier=".cg"))
                reaching += tl.sum((inside & (more >= middle.to(tl.int32))).to(tl.int32), axis=0)
            enough = reaching >= want
            low, reach = tl.where(enough, middle, low), tl.where(enough, reaching, reach)
            high, taken = tl.where(enough, high, middle), tl.where(enough, taken, reaching)
        # past +inf is NaN, which nothing reaches
        tl.store(scales + 4, _of_key(low.to(tl.int32)))
        tl.store(scales + 5, _of_key(high.to(tl.int32)))
        # the last of those that reach the lower one alone: all of them, or as many as are wanted of equal ones
        need = want - taken
        before, last = groups * 0 - 1, groups + 0
        if reach != want:
            last = tl.where(need > 0, count - 1, -1)
            while last - before > 1:
                middle = before + (last - before) // 2
                ties = need * 0
                for begin in range(0, number, CANDIDATES):
                    inside = begin + i < number
                    key = _keys(tl.load(candidates + begin + i, mask=inside, other=0.0, cache_modifier=".cg"))
                    group = tl.load(candidate_groups + begin + i, mask=inside, other=0, cache_modifier=".cg")
                    tie = inside & (key >= low.to(tl.int32)) & (key.to(tl.int64) < high) & (group <= middle)
                    ties += tl.sum(tie.to(tl.int32), axis=0)
                enough = ties >= need
                last = tl.where(enough, middle, last)
                before = tl.where(enough, before, middle)
        tl.store(state + 3, last)


# ----------------------------------------------------------------------------------------------------------- launchers


def num_chunks(groups: int) -> int:
    """Programs of a row of so many groups."""
    return triton.cdiv(groups, CHUNK)


@dataclass(frozen=True)
class Thresholds:
    """The best of each row's estimates, as two rounds find them: arrays of the device."""

    counters: Tensor  # [B * Hkv, BINS + COUNTERS] int32
    state: Tensor  # [B * Hkv, STATE] int32
    scales: Tensor  # [B * Hkv, SCALES] float32
    candidates: Tensor  # [B, Hkv, G] float32
    candidate_groups: Tensor  # [B * Hkv, G] int32
    chunk_counts: Tensor  # [B * Hkv, chunks] int32
    selectable: tuple[int, int, int]  # sink tokens, recent tokens, min_context
    constants: dict[str, Any]


def new_counters(rows: int, device: torch.device) -> Tensor:
    """Counters of so many rows, which `find_thresholds` wants to be 0."""
    return torch.empty((rows, BINS + COUNTERS), dtype=torch.int32, device=device)


def find_thresholds(
    estimate: Tensor, lengths: Tensor, wanted: Tensor, width: int, selectable: tuple[int, int, int, int] | None,
    counters: Tensor | None = None, state: Tensor | None = None, always: bool = False,
) -> Thresholds:  # fmt: skip
    """The first two rounds: of `wanted` groups of each row, at most `width`, or with `always` of all that are always
    selected, be they more. `selectable`: group size, sink and recent tokens and min_context, or None: of finite
    estimates alone. `counters`: cleared ones; `state`: where it goes, unless to a new array."""
    batch, kv_heads, groups = estimate.shape
    assert estimate.is_contiguous() and lengths.is_contiguous() and wanted.is_contiguous()
    rows, chunks = batch * kv_heads, num_chunks(groups)

    def integers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=estimate.device)

    group_size, *selectable_tokens = selectable or (1, 0, 0, 0)
    found = Thresholds(
        new_counters(rows, estimate.device).zero_() if counters is None else counters,
        integers(rows, STATE) if state is None else state,
        estimate.new_empty((rows, SCALES)), torch.empty_like(estimate), integers(rows, groups),
        integers(rows, chunks), (selectable_tokens[0], selectable_tokens[1], selectable_tokens[2]),
        {
            "S": group_size, "SINK_RECENT": selectable is not None, "BINS": BINS, "COUNTERS": COUNTERS, "STATE": STATE,
            "SCALES": SCALES, "HIP": bool(torch.version.hip), **overlap(estimate.device),
        },
    )  # fmt: skip
    launch = found.constants | {"CHUNK": CHUNK, "num_warps": warps(chunks * rows)}
    _count_bins[(chunks, rows)](
        estimate, lengths, wanted, found.counters, found.state, found.scales, groups, kv_heads, width,
        *found.selectable, SAMPLE=SAMPLE, ALWAYS=always, **launch,
    )  # fmt: skip
    _find_threshold[(chunks, rows)](
        estimate, lengths, found.counters, found.state, found.scales, found.candidates, found.candidate_groups,
        found.chunk_counts, groups, kv_heads, chunks, *found.selectable, CANDIDATES=CANDIDATES, **launch,
    )  # fmt: skip
    return found


def warps(programs: int) -> int:
    """Warps of each of so many programs."""
    return 8 if programs <= FEW_PROGRAMS else 4
