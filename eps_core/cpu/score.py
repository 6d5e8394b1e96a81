"""Compiled scoring over numpy views of a cache: what `score` of the array backends computes.

Letters as in `gate.protocol`. Float16 arrays come as the int16 of their bits. Summary pools are flat: group row
((unit * Hkv + h) * GPU + g % GPU) of a table's group g, GPU = U / S groups per unit. `estimate [B, Hkv, G]` float32 is
+inf without a valid summary and -inf past the end. Guards are `guards [B, 2]`: groups below the first and from the
second on are always visited.
"""

import numpy as np

from eps_core.cpu.compile import FAST, kernel
from eps_core.cpu.pool_vectors import DOT_ROWS, PREFETCH_ROWS, dots
from eps_core.cpu.threads import finish, take, wait
from eps_core.cpu.vectors import HEADS, wide
from eps_core.summaries.base import LARGEST_ESTIMATE

# nothing raises in a kernel: a thread that left between `take` and `finish` would keep the others waiting
CODE_GROUPS = 64  # of one scoring task of int8 codes; changes speed only


# ---------------------------------------------------------------------------------------------------------------- state


KNOWN, MISSING, PAST = 0, 1, 2


@kernel(fastmath=FAST)
def group_states(fill, table, length, size, per_unit, states):
    """Fills states [G] uint8 of one sequence, table [M]: KNOWN; MISSING, without a valid summary: open, or not full in
    fill [P * GPU]; PAST the end."""
    num_full, ends = length // size, (length + size - 1) // size
    states[ends:] = PAST
    for m in range((ends + per_unit - 1) // per_unit):
        own = fill[table[m] * per_unit : (table[m] + 1) * per_unit]
        start = m * per_unit
        for sub in range(min(per_unit, ends - start)):
            known = own[sub] == size and start + sub < num_full
            states[start + sub] = KNOWN if known else MISSING


# --------------------------------------------------------------------------------------------------- box, ball, meanstd


@kernel(fastmath=FAST)
def slack_of(head_dim, length, norm):
    """What float32 arithmetic may add to a sum of D products of size length * norm: `logit_slack` of the arrays."""
    return np.float32((head_dim + 32) * 2.0**-21) * (length * norm + np.float32(1))


@kernel(fastmath=FAST)
def score_codes(
    progress, method, q, first, second, scalars, fill, table, lengths, size, per_unit, states, estimate, lower, upper
):
    """Fills estimate [B, Hkv, G], and lower and upper [B, Hkv, R, G] unless they are empty. first, second: flat code
    pools [P * Hkv * GPU, D] of method 0, box: lo, hi; 1, ball: mean (twice); 2, meanstd: mean, std. scalars: four pools
    [P * Hkv * GPU] int16: box: scale, norm; ball: mean_scale, radius, error, norm; meanstd: mean_scale, std_scale; the
    others are not read. states [B, G] uint8 between the two phases."""
    batch, num_heads, head_dim = q.shape
    kv_heads = estimate.shape[1]
    repeat, units, bounded = num_heads // kv_heads, table.shape[1], lower.shape[3] > 0
    passes = (repeat + HEADS - 1) // HEADS
    shrink, log_size = np.float32(1 / np.sqrt(head_dim)), np.float32(np.log(size))
    while True:
        b = take(progress, 0)
        if b >= batch:
            break
        group_states(fill, table[b], lengths[b], size, per_unit, states[b])
        finish(progress, 0)
    wait(progress, 0, batch)
    per_task = max(CODE_GROUPS // per_unit, 1)
    chunks = (units + per_task - 1) // per_task
    total = batch * kv_heads * chunks
    # of four heads: scaled queries, and their positive and negative parts (box) or sizes (meanstd)
    parts = np.zeros((3, HEADS * head_dim), np.float32)
    most_rows = CODE_GROUPS + per_unit + DOT_ROWS
    sums, most = np.empty((4, most_rows * HEADS), np.float32), np.empty(HEADS, np.float32)
    rows = np.empty(most_rows + PREFETCH_ROWS, np.int64)
    lengths_of = np.empty(HEADS, np.float32)
    while True:
        task = take(progress, 1)
        if task >= total:
            break
        row, begin = task // chunks, task % chunks * per_task
        b, h = row // kv_heads, row % kv_heads
        own, count = estimate[b, h], 0
        ending = min(begin + per_task, units)
        for m in range(begin, ending):
            start = (max(table[b, m], 0) * kv_heads + h) * per_unit
            for sub in range(per_unit):
                rows[count] = (start + sub) * head_dim
                count += 1
        padded = (count + DOT_ROWS - 1) // DOT_ROWS * DOT_ROWS
        rows[count : padded + PREFETCH_ROWS] = rows[count - 1]
        for at in range(passes):
            for r in range(HEADS):
                head = h * repeat + (at * HEADS + r if at * HEADS + r < repeat else 0)
                energy = np.float32(0)
                for c in range(head_dim):
                    a = q[b, head, c] * shrink
                    energy += a * a
                    parts[0, r * head_dim + c] = a
                    parts[1, r * head_dim + c] = max(a, np.float32(0)) if method == 0 else abs(a)
                    parts[2, r * head_dim + c] = min(a, np.float32(0))
                lengths_of[r] = np.sqrt(energy)
            if method == 0:
                dots(first, rows, padded, head_dim, parts[1], sums[0], most)
                dots(first, rows, padded, head_dim, parts[2], sums[1], most)
                dots(second, rows, padded, head_dim, parts[1], sums[2], most)
                dots(second, rows, padded, head_dim, parts[2], sums[3], most)
            else:
                dots(first, rows, padded, head_dim, parts[0], sums[0], most)
                if method == 2:
                    dots(second, rows, padded, head_dim, parts[1], sums[1], most)
            for i in range(count):
                group, place = begin * per_unit + i, rows[i] // head_dim
                known, past = states[b, group] == KNOWN, states[b, group] == PAST
                if at == 0:
                    own[group] = np.inf if states[b, group] == MISSING else -np.inf
                scale = wide(scalars[0][place])
                for r in range(min(HEADS, repeat - at * HEADS)):
                    here = i * HEADS + r
                    if not known:
                        if bounded:
                            lower[b, h, at * HEADS + r, group] = -np.inf
                            upper[b, h, at * HEADS + r, group] = -np.inf if past else np.inf
                        continue
                    if method == 0:
                        best = (sums[2, here] + sums[1, here]) * scale
                        least = (sums[0, here] + sums[3, here]) * scale
                        norm = wide(scalars[1][place]) + np.float32(2 * np.sqrt(head_dim)) * scale
                    elif method == 1:
                        middle, radius = sums[0, here] * scale, wide(scalars[1][place])
                        best = middle + lengths_of[r] * radius
                        least = middle - lengths_of[r] * wide(scalars[2][place])
                        norm = wide(scalars[3][place]) + radius
                    else:
                        best = sums[0, here] * scale + sums[1, here] * wide(scalars[1][place])
                        least, norm = best, np.float32(0)
                    if bounded:
                        slack = slack_of(head_dim, lengths_of[r], norm)
                        low, high = log_size + least - slack, log_size + best + slack
                        # an infinite stored scalar must loosen a bound, never turn it into NaN
                        lower[b, h, at * HEADS + r, group] = low if abs(low) < np.inf else -np.inf
                        upper[b, h, at * HEADS + r, group] = high if abs(high) < np.inf else np.inf
                    if not abs(best) < np.inf:
                        best = np.float32(LARGEST_ESTIMATE)
                    own[group] = max(own[group], best)
        finish(progress, 1)
    wait(progress, 1, total)


@kernel(fastmath=FAST)
def score_slack(q, largest_key, slack):
    """Fills slack [B, Hkv, R]: `slack_of` the largest key of each kv head."""
    batch, kv_heads, repeat = slack.shape
    for b in range(batch):
        for head in range(kv_heads * repeat):
            energy = np.float32(0)
            for c in range(q.shape[2]):
                energy += q[b, head, c] * q[b, head, c]
            length = np.sqrt(energy) * np.float32(1 / np.sqrt(q.shape[2]))
            slack[b, head // repeat, head % repeat] = slack_of(q.shape[2], length, largest_key[head // repeat])
