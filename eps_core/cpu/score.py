"""Compiled scoring over numpy views of a cache: what `score` of the array backends computes.

Letters as in `attention.protocol`. Float16 arrays come as the int16 of their bits. Summary pools are flat: group row
((unit * Hkv + h) * GPU + g % GPU) of a table's group g, GPU = U / S groups per unit. `estimate [B, Hkv, G]` float32 is
+inf without a valid summary and -inf past the end. Sink and recent tokens are `selectable [B, 2]`: groups below the
first and from the second on are always selected.
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


# -------------------------------------------------------------------------------------------------------------- meanstd


@kernel(fastmath=FAST)
def score_codes(progress, q, mean, std, mean_scale, std_scale, fill, table, lengths, size, per_unit, states, estimate):
    """Fills estimate [B, Hkv, G] of meanstd with the largest of the query heads' a.mean + |a|.std, a = q / sqrt(D).
    mean, std: flat code pools [P * Hkv * GPU, D]; mean_scale, std_scale [P * Hkv * GPU] int16. states [B, G] uint8
    between the two phases."""
    batch, num_heads, head_dim = q.shape
    kv_heads = estimate.shape[1]
    repeat, units = num_heads // kv_heads, table.shape[1]
    passes = (repeat + HEADS - 1) // HEADS
    shrink = np.float32(1 / np.sqrt(head_dim))
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
    parts = np.zeros((2, HEADS * head_dim), np.float32)  # of four heads: scaled queries, and their absolute values
    most_rows = CODE_GROUPS + per_unit + DOT_ROWS
    sums, most = np.empty((2, most_rows * HEADS), np.float32), np.empty(HEADS, np.float32)
    rows = np.empty(most_rows + PREFETCH_ROWS, np.int64)
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
                for c in range(head_dim):
                    a = q[b, head, c] * shrink
                    parts[0, r * head_dim + c] = a
                    parts[1, r * head_dim + c] = abs(a)
            dots(mean, rows, padded, head_dim, parts[0], sums[0], most)
            dots(std, rows, padded, head_dim, parts[1], sums[1], most)
            for i in range(count):
                group, place = begin * per_unit + i, rows[i] // head_dim
                if at == 0:
                    own[group] = np.inf if states[b, group] == MISSING else -np.inf
                if states[b, group] != KNOWN:
                    continue
                mean_step, std_step = wide(mean_scale[place]), wide(std_scale[place])
                for r in range(min(HEADS, repeat - at * HEADS)):
                    best = sums[0, i * HEADS + r] * mean_step + sums[1, i * HEADS + r] * std_step
                    if not abs(best) < np.inf:
                        best = np.float32(LARGEST_ESTIMATE)
                    own[group] = max(own[group], best)
        finish(progress, 1)
    wait(progress, 1, total)
