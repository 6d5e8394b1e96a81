"""Attention over the best groups where they lie, in one launch once their thresholds are known: no list is made.

Each program looks through pieces of a row's groups, lists those that are taken (see `thresholds`), attends to their
tokens as `attend` does, and stores its part. The program of a (sequence, kv head) that comes last merges all parts.
What is taken lies in clusters, recent tokens above all, so neighbouring pieces go to different programs: with 8,000
tokens of SmolLM2 the busiest of 8 then attends to 1.15 times the mean, where one of 8 parts in a row attends to 4.0
times it.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from eps_cuda.kernels.arguments import check_layout, check_shapes, pool_constants
from eps_cuda.kernels.attend import HALVES, attend_tokens, padding, plan, processors, store_part
from eps_cuda.kernels.overlap import release, wait
from eps_cuda.kernels.thresholds import SIZES, Thresholds, barrier, groups_of, is_last, is_taken, values_of

# Change speed only
RUN_GROUPS = 1024  # that are looked at at a time
PIECE_GROUPS = 32  # of these that lie side by side
PROGRAMS = 8  # of a multiprocessor
MOST_SPLITS = 64  # of a row: one program merges them
MERGED = 4096  # numbers of parts that it takes at a time
MERGED_RUNS = 128  # runs whose masses it takes at a time


@triton.jit
def store_masses(masses, estimate_row, g, groups, taken):
    """The largest finite estimate of groups g [N], and the sums of the exponentials of all less that, and of those
    that are not taken."""
    finite = tl.load(estimate_row + g, mask=g < groups, other=-float("inf"))
    finite = tl.where(tl.abs(finite) < float("inf"), finite, -float("inf"))
    most = tl.maximum(tl.max(finite, axis=0), -3.0e38)
    mass = tl.exp(finite - most)
    tl.store(masses, most)
    tl.store(masses + 1, tl.sum(mass, axis=0))
    tl.store(masses + 2, tl.sum(tl.where(taken, 0.0, mass), axis=0))


@triton.jit(do_not_specialize=["runs_each", "table_width", *SIZES[:4]])
def attend_best_kernel(
    q, k, v, table, lengths, estimate, counters, state, scales, own_groups, masses,
    part_out, part_lse, out, lse, skipped, scale, groups, runs_each, table_width, num_sink_tokens, num_recent_tokens,
    min_context,
    HKV: tl.constexpr, R: tl.constexpr, D: tl.constexpr, U: tl.constexpr, S: tl.constexpr, WIDE_Q: tl.constexpr,
    R_PAD: tl.constexpr, D_PAD: tl.constexpr, BLOCK_N: tl.constexpr, UNIT_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr, TOKEN_STRIDE: tl.constexpr, K_BITS: tl.constexpr, V_BITS: tl.constexpr,
    VALUES: tl.constexpr, RUN: tl.constexpr, PIECE: tl.constexpr, BINS: tl.constexpr, COUNTERS: tl.constexpr,
    STATE: tl.constexpr, SCALES: tl.constexpr, SINK_RECENT: tl.constexpr, R_POWER: tl.constexpr,
    BLOCK_S: tl.constexpr, RUNS: tl.constexpr, HIP: tl.constexpr, OVERLAP: tl.constexpr = False,
):  # fmt: skip
    """Program (b * HKV + h, split): at most `runs_each` runs of pieces of a row, every `splits`th, where so many of the
    programs share what the sequence has. It lists their groups in its part of `own_groups` [B, Hkv, programs, runs_each
    * RUN]. A row's last program stores out, lse and skipped."""
    wait(OVERLAP)
    pair, split, num_splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    b, h = pair // HKV, pair % HKV
    length = tl.load(lengths + b)
    all_groups = groups_of(length, groups, S, SINK_RECENT)
    splits = tl.minimum(tl.maximum((all_groups + RUN - 1) // RUN, 1), num_splits)
    if split >= splits:
        return
    own_runs = (all_groups + RUN * splits - 1) // (RUN * splits)
    estimate_row = estimate + pair.to(tl.int64) * groups
    counters += pair * (BINS + COUNTERS)
    last = tl.load(state + pair * STATE + 3)
    low, high = tl.load(scales + pair * SCALES + 4), tl.load(scales + pair * SCALES + 5)

    masses += pair * num_splits * runs_each * 3
    own_groups += (pair.to(tl.int64) * num_splits + split) * runs_each * RUN
    count = last * 0
    i = tl.arange(0, RUN)
    for run in range(own_runs):
        first = (run * (RUN // PIECE) * splits + split) * PIECE
        g = first + i // PIECE * splits * PIECE + i % PIECE
        value = values_of(
            estimate_row, g, first, first + (RUN // PIECE - 1) * splits * PIECE + PIECE - 1, all_groups, length,
            num_sink_tokens, num_recent_tokens, min_context, S, SINK_RECENT,
        )  # fmt: skip
        taken = is_taken(value, g, low, high, last)
        ranks = tl.cumsum(taken.to(tl.int32), axis=0)
        tl.store(own_groups + count + ranks - 1, g, mask=taken)
        store_masses(masses + (split * own_runs + run) * 3, estimate_row, g, all_groups, taken)
        count += tl.sum(taken.to(tl.int32), axis=0)
    barrier(HIP)  # threads read what others stored

    largest, total, acc = attend_tokens(
        q, k, v, None, None, table + b.to(tl.int64) * table_width, own_groups, pair, h, length, 0, count * S, scale,
        R, D, U, S, True, WIDE_Q, R_PAD, D_PAD, BLOCK_N, UNIT_STRIDE, HEAD_STRIDE, TOKEN_STRIDE, K_BITS, V_BITS, VALUES,
    )  # fmt: skip
    store_part(part_out, part_lse, largest, total, acc, pair, split, num_splits, count > 0, R, D, R_PAD, D_PAD)
    release(OVERLAP)
    if is_last(counters + BINS + 4, splits, HIP):
        r, d = tl.arange(0, R_POWER), tl.arange(0, D_PAD)
        most = tl.full([R_POWER], -3.0e38, tl.float32)
        mass = tl.zeros([R_POWER], tl.float32)
        merged = tl.zeros([R_POWER, D_PAD], tl.float32)
        for start in range(0, splits, BLOCK_S):
            s = start + tl.arange(0, BLOCK_S)
            place = (pair.to(tl.int64) * R + r)[:, None] * num_splits + s[None, :]
            inside = (r < R)[:, None] & (s < splits)[None, :]
            logs = tl.load(part_lse + place, mask=inside, other=float("-inf"), cache_modifier=".cg")
            part = tl.load(
                part_out + place[:, :, None] * D + d[None, None, :], mask=inside[:, :, None] & (d < D)[None, None, :],
                other=0.0, cache_modifier=".cg",
            )  # fmt: skip
            new = tl.maximum(most, tl.max(logs, axis=1))
            shrink, weight = tl.exp(most - new), tl.exp(logs - new[:, None])
            mass = mass * shrink + tl.sum(weight, axis=1)
            # the part of a program without tokens may be anything
            weighted = tl.where(weight[:, :, None] > 0, weight[:, :, None] * part, 0.0)
            merged = merged * shrink[:, None] + tl.sum(weighted, axis=1)
            most = new
        merged = merged / tl.where(mass == 0, 1.0, mass)[:, None]
        head = pair.to(tl.int64) * R + r
        tl.store(
            out + head[:, None] * D + d[None, :], merged.to(out.dtype.element_ty),
            mask=(r < R)[:, None] & (d < D)[None, :],
        )  # fmt: skip
        if lse is not None:
            tl.store(lse + head, tl.where(mass == 0, float("-inf"), most + tl.log(mass)), mask=r < R)
        # of all runs, the masses less the largest
        largest_mass, all_of_it, unread = -3.0e38, 0.0, 0.0
        for start in range(0, splits * own_runs, RUNS):
            each = start + tl.arange(0, RUNS)
            of_run, known = masses + each * 3, each < splits * own_runs
            largest_each = tl.load(of_run, mask=known, other=-3.0e38, cache_modifier=".cg")
            new_mass = tl.maximum(largest_mass, tl.max(largest_each, axis=0))
            share, shrunk = tl.exp(largest_each - new_mass), tl.exp(largest_mass - new_mass)
            whole = tl.load(of_run + 1, mask=known, other=0.0, cache_modifier=".cg")
            rest = tl.load(of_run + 2, mask=known, other=0.0, cache_modifier=".cg")
            all_of_it = all_of_it * shrunk + tl.sum(share * whole, axis=0)
            unread = unread * shrunk + tl.sum(share * rest, axis=0)
            largest_mass = new_mass
        tl.store(skipped + pair, unread / tl.maximum(all_of_it, 1e-30))


def num_runs(groups: int) -> int:
    """Runs of a row of so many groups."""
    return triton.cdiv(groups, RUN_GROUPS)


def attend_best(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor, estimate: Tensor, found: Thresholds,
    with_lse: bool = False, out: Tensor | None = None, skipped: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    """(out [B, Hq, D] in q's dtype, lse [B, Hq] float32 or None, skipped [B, Hkv] float32) of q [B, Hq, D], unscaled,
    over the groups of estimate [B, Hkv, G] that `found` takes: attention (0 and -inf where there are none), the natural
    log of the softmax mass read, and `selection.skipped_mass`. K and V [P, Hkv, U, D] as they are, table [B, M] and
    lengths [B] int32. `out` of any dtype and `skipped`: where these go, unless to new arrays."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    check_layout(table=table, lengths=lengths, estimate=estimate, out=out)
    batch, num_heads, head_dim = q.shape
    _, kv_heads, unit_tokens, _ = k_pool.shape
    size, groups, rows = found.constants["S"], estimate.shape[2], batch * kv_heads
    check_shapes(q, k_pool, v_pool, size)
    runs_each, num_splits = _split(rows, groups, processors(q.device))
    repeat = num_heads // kv_heads
    launch = plan(rows, groups * size, head_dim, k_pool.dtype, processors(q.device), num_splits)
    own_groups = torch.empty((rows, num_splits * runs_each * RUN_GROUPS), dtype=torch.int32, device=q.device)
    part_out = torch.empty((batch, num_heads, num_splits, head_dim), dtype=torch.float32, device=q.device)
    part_lse, masses = part_out.new_empty(part_out.shape[:3]), part_out.new_empty((rows, num_splits * runs_each, 3))
    skipped = part_out.new_empty((batch, kv_heads)) if skipped is None else skipped
    lse = part_out.new_empty((batch, num_heads)) if with_lse else None
    padded = padding(repeat, head_dim)
    heads = triton.next_power_of_2(repeat)
    constants: dict[str, Any] = found.constants | padded | pool_constants(k_pool, v_pool)
    attend_best_kernel[(rows, num_splits)](
        q.contiguous(), k_pool, v_pool, table, lengths, estimate, found.counters, found.state, found.scales,
        own_groups, masses, part_out, part_lse, out, lse, skipped,
        math.log2(math.e) / math.sqrt(head_dim), groups, runs_each, table.shape[1], *found.selectable,
        HKV=kv_heads, R=repeat, D=head_dim, U=unit_tokens, WIDE_Q=k_pool.dtype in HALVES and q.dtype != k_pool.dtype,
        BLOCK_N=launch.block_tokens, RUN=RUN_GROUPS, PIECE=PIECE_GROUPS, R_POWER=heads,
        BLOCK_S=max(MERGED // (heads * padded["D_PAD"]), 1), RUNS=MERGED_RUNS, num_warps=launch.num_warps,
        num_stages=launch.num_stages, **constants,
    )  # fmt: skip
    return out, lse, skipped


def _split(rows: int, groups: int, num_processors: int) -> tuple[int, int]:
    """(runs of a program, programs of a row)."""
    runs = num_runs(groups)
    splits = min(triton.cdiv(PROGRAMS * num_processors, rows), runs, MOST_SPLITS)
    runs_each = triton.cdiv(runs, splits)
    return runs_each, triton.cdiv(runs, runs_each)
