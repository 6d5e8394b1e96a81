"""Compiled attention over listed groups of a paged cache, and over the mean values of what was left out.

K and V pools come as `pool_vectors` reads them, with the strides of a unit, of a kv head in it and of a token in what
names a row: elements of which a token's D lie together, or rows of codes. Logits, softmax and sums are float32 whatever
the cache holds. Lists are cut into tasks of about as many tokens, whose partial results (largest logit, sum of
exponentials, weighted sum of values) are merged at the end: heads may list different numbers of groups, and one
sequence with few kv heads still keeps every core busy.
"""

import numpy as np

from eps_core.cpu.compile import FAST, kernel
from eps_core.cpu.pool_vectors import DOT_ROWS, PREFETCH_ROWS, add_scaled, add_weighted, dots
from eps_core.cpu.threads import FAILED, finish, take, wait
from eps_core.cpu.vectors import HEADS, LANES, exp_all, exp_sum, largest_of, masses_by_mask, weigh, wide

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
        row = np.searchsorted(starts, task, side="right") - 1
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


@kernel(fastmath=FAST | {"nnan"})
def exp_from_largest(x):
    """x [n] without NaN, n a multiple of 16, becomes exp(x - largest); returns (largest, sum). 0 and a sum of 0 where
    all are -inf."""
    largest, total = largest_of(x, len(x)), np.float32(0)
    if largest > -np.inf:
        for i in range(len(x)):
            x[i] -= largest
    exp_all(x, len(x))
    for i in range(len(x)):
        total += x[i]
    return largest, total


@kernel(fastmath=FAST)
def masses_by_correction(masses, largest, weights):
    """Fills weights [corrections] with the sums of exp(masses - largest) over the groups of each: masses [G]."""
    per_correction = len(masses) // len(weights)
    if per_correction % LANES == 0:
        for t in range(len(weights)):
            weights[t] = exp_sum(masses, t * per_correction, per_correction, largest)
        return
    for t in range(len(weights)):
        weights[t] = 0
        for group in range(t * per_correction, (t + 1) * per_correction):
            weights[t] += np.exp(masses[group] - largest)


@kernel(fastmath=FAST)
def attend_correction(
    progress, estimate, groups, counts, lse, means, scale, fill, table, lengths, size, corrections_per_unit, out,
    correction, shares
):  # fmt: skip
    """Fills out [B, Hq, D] and correction [B, Hq] float32 with what `attend_correction` of the array backends returns,
    and shares [B, Hkv] with the share of the softmax outside the selection, as `skipped_mass` does: estimate [B, Hkv,
    G], the selection's groups [B, Hkv, W] and counts [B, Hkv], lse [B, Hq]; means flat int8 and scale int16 of
    correction groups of `size` tokens, fill their state. One phase."""
    batch, kv_heads, num_groups = estimate.shape
    num_heads, head_dim = out.shape[1:]
    repeat, num_corrections = num_heads // kv_heads, table.shape[1] * corrections_per_unit
    held = np.full((num_groups + LANES - 1) // LANES * LANES, -np.inf, np.float32)
    masses, weights = held[:num_groups], np.empty(num_corrections, np.float32)
    places, mean = np.empty(num_corrections + PREFETCH_ROWS, np.int64), np.empty(head_dim, np.float32)
    seen_masses = np.empty(groups.shape[2] + LANES, np.float32)
    while True:
        row = take(progress, 0)
        if row >= batch * kv_heads:
            break
        b, h = row // kv_heads, row % kv_heads
        own, own_groups, num_listed = estimate[b, h], groups[b, h], counts[b, h]
        for group in range(num_groups):
            masses[group] = own[group] if abs(own[group]) < np.inf else -np.inf
        padded = (num_listed + LANES - 1) // LANES * LANES
        seen_masses[:padded] = -np.inf
        for i in range(num_listed):
            seen_masses[i] = masses[own_groups[i]]
            masses[own_groups[i]] = -np.inf
        read, seen = exp_from_largest(seen_masses[:padded])
        left, total, rest = largest_of(held, len(held)), np.float32(0), np.float32(0)
        if left > -np.inf:
            masses_by_correction(masses, left, weights)
        else:
            weights[:] = 0
        for m in range(table.shape[1]):
            unit, start = table[b, m], m * corrections_per_unit
            for t in range(start, start + corrections_per_unit):
                place = (max(unit, 0) * kv_heads + h) * corrections_per_unit + t - start
                places[t] = place * head_dim
                usable = (t + 1) * size <= lengths[b] and fill[unit * corrections_per_unit + t - start] == size
                if usable and weights[t] > 0:
                    total += weights[t]
                    weights[t] *= wide(scale[place])
                else:  # an unused place may hold any scale
                    rest += weights[t]
                    weights[t] = 0
        places[num_corrections:] = places[num_corrections - 1]
        mean[:] = 0
        add_scaled(means, places, 0, num_corrections, head_dim, weights, mean)
        seen_lse = read + np.log(seen) if seen > 0 else np.float32(-np.inf)
        for head in range(h * repeat, (h + 1) * repeat):
            over = seen_lse - lse[b, head]  # NaN where nothing was read: nothing is lowered
            for c in range(head_dim):
                out[b, head, c] = mean[c] / total if total > 0 else np.float32(0)
            correction[b, head] = left + np.log(total) - (over if over > 0 else 0) if total > 0 else np.float32(-np.inf)
        most, skipped = max(left, read), total + rest
        if skipped > 0:
            skipped *= np.exp(left - most)
        whole = skipped + (seen * np.exp(read - most) if seen > 0 else np.float32(0))
        shares[b, h] = skipped / whole if whole > 0 else np.float32(0)
        finish(progress, 0)
    wait(progress, 0, batch * kv_heads)


@kernel(fastmath=FAST)
def merge(out, lse, other_out, other_lse, whole, whole_lse):
    """Fills whole [N, D] and whole_lse [N] float32 with the merge of attention over two disjoint sets of keys, out and
    other_out [N, D] float32 with lse and other_lse [N]; -inf: no keys."""
    for n in range(len(lse)):
        largest = max(lse[n], other_lse[n])
        base = largest if largest > -np.inf else np.float32(0)
        weight, other = np.exp(lse[n] - base), np.exp(other_lse[n] - base)
        total = weight + other
        shrink = np.float32(1) / total if total > 0 else np.float32(0)
        for d in range(out.shape[1]):
            whole[n, d] = (out[n, d] * weight + other_out[n, d] * other) * shrink
        whole_lse[n] = base + np.log(total) if total > 0 else np.float32(-np.inf)


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
