"""Compiled attention over listed groups of a paged cache, and the estimated share of the softmax left out.

K and V pools come as `pool_vectors` reads them, with the strides of a unit, of a kv head in it and of a token in what
names a row: elements of which a token's D lie together, or rows of codes. Logits, softmax and sums are float32 whatever
the cache holds. Lists are cut into tasks of about as many tokens, whose partial results (largest logit, sum of
exponentials, weighted sum of values) are merged at the end: heads may list different numbers of groups, and one
sequence with few kv heads still keeps every core busy.
"""

import numpy as np

from eps_core.cpu.compile import FAST, kernel
from eps_core.cpu.pool_vectors import DOT_ROWS, PREFETCH_ROWS, add_weighted, dots
from eps_core.cpu.threads import FAILED, finish, owner, take, wait
from eps_core.cpu.vectors import HEADS, masses_by_mask, weigh

ROWS_AT_A_TIME = 32  # values between a load and a store of the sums; changes speed only


@kernel(fastmath=FAST)
def attend(
    progress, ready, q, k, v, k_strides, v_strides, table, lengths, groups, counts, size, per_unit, per_task, starts,
    largest, masses, sums, out, lse,
):  # fmt: skip
    """Fills out [B, Hq, D] and lse [B, Hq] float32 with attention of q [B, Hq, D] float32 unscaled over the first
    counts [B, Hkv] of groups [B, Hkv, W], ascending; 0 and -inf where none is listed. Tokens from lengths [B] on are
    never read. Two phases: tasks starts[row] to starts[row + 1] - 1 of row (b, h) take `per_task` groups each and leave
    largest and masses [tasks, passes * HEADS] and sums [tasks, passes * HEADS * D]. `ready` is a progress of a phase
    a row that says when its groups are listed, or of none where all are."""
    batch, num_heads, head_dim = q.shape
    kv_heads = counts.shape[1]
    repeat = num_heads // kv_heads
    shrink = np.float32(1 / np.sqrt(head_dim))
    total = starts[-1]
    queries = np.empty(HEADS * head_dim, np.float32)
    k_rows = np.empty(per_task * size + 3 + PREFETCH_ROWS, np.int64)
    v_rows = np.empty_like(k_rows)
    logits = np.empty((per_task * size + 3) * HEADS, np.float32)
    while True:
        task = take(progress, 0)
        if task >= total:
            break
        row = owner(starts, task)
        if len(ready):
            wait(ready, row, 1)
            if ready[0, FAILED]:
                return
        b, h = row // kv_heads, row % kv_heads
        first = (task - starts[row]) * per_task
        count, unit_end, k_start, v_start = 0, 0, 0, 0
        for i in range(first, min(first + per_task, counts[b, h])):
            group = groups[b, h, i]
            if group >= unit_end:  # they ascend
                m = group // per_unit
                unit_end = (m + 1) * per_unit
                k_start = table[b, m] * k_strides[0] + h * k_strides[1]
                v_start = table[b, m] * v_strides[0] + h * v_strides[1]
            begin = (group - unit_end + per_unit) * size
            for offset in range(begin, begin + min(size, lengths[b] - group * size)):
                k_rows[count], v_rows[count] = k_start + offset * k_strides[2], v_start + offset * v_strides[2]
                count += 1
        padded = (count + 3) // 4 * 4
        for rows in (k_rows, v_rows):
            rows[count : padded + PREFETCH_ROWS] = rows[count - 1] if count else 0
        for at in range(0, repeat, HEADS):
            heads = min(HEADS, repeat - at)
            for r in range(HEADS):
                for c in range(head_dim):
                    one = q[b, h * repeat + at + r, c] * shrink if r < heads else np.float32(0)
                    queries[r * head_dim + c] = one
            most = largest[task, at : at + HEADS]
            most[:] = -np.inf
            dots(k, k_rows, (count + DOT_ROWS - 1) // DOT_ROWS * DOT_ROWS, head_dim, queries, logits, most)
            logits[count * HEADS : padded * HEADS] = -np.inf
            weigh(logits, padded, most, masses[task, at : at + HEADS])
            own = sums[task, at * head_dim : (at + HEADS) * head_dim]
            own[:] = 0
            for begin in range(0, count, ROWS_AT_A_TIME):
                end = min(begin + ROWS_AT_A_TIME, count)
                add_weighted(v, v_rows, begin, end, head_dim, logits, own)
        finish(progress, 0)
    wait(progress, 0, total)

    while True:
        part = take(progress, 1)
        if part >= batch * num_heads:
            break
        b, head = part // num_heads, part % num_heads
        row, r = b * kv_heads + head // repeat, head % repeat
        if len(ready):  # a row that lists nothing has no task, which would have waited
            wait(ready, row, 1)
        most, mass = np.float32(-np.inf), np.float32(0)
        for task in range(starts[row], starts[row + 1]):
            most = max(most, largest[task, r])
        result = out[b, head]
        result[:] = 0
        for task in range(starts[row], starts[row + 1]):
            weight = np.exp(largest[task, r] - most)
            mass += weight * masses[task, r]
            for c in range(head_dim):
                result[c] += weight * sums[task, r * head_dim + c]
        if starts[row] < starts[row + 1]:
            result /= mass
        lse[b, head] = most + np.log(mass) if starts[row] < starts[row + 1] else -np.inf
        finish(progress, 1)
    wait(progress, 1, batch * num_heads)


@kernel(fastmath=FAST)
def skipped_mass(progress, estimate, selected_mask, shares):
    """Fills shares [B, Hkv] with the estimated share of the softmax outside visit [B, Hkv, G] uint8; groups without an
    estimate are left out of both sides. One phase."""
    batch, kv_heads, num_groups = estimate.shape
    while True:
        row = take(progress, 0)
        if row >= batch * kv_heads:
            break
        b, h = row // kv_heads, row % kv_heads
        read, left = masses_by_mask(estimate[b, h], selected_mask[b, h], num_groups)
        total = read + left
        shares[b, h] = left / total if total > 0 else np.float32(0)
        finish(progress, 0)
    wait(progress, 0, batch * kv_heads)
