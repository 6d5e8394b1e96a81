"""Compiled dense attention of several rows of several sequences: K and V are read once for all rows of a sequence.

Pools come as in `attend`. The query rows of a kv head, heads times rows, are lanes: row n of query head r of a kv head
with N rows is lane r N + n of L, a multiple of 16; lanes past the last repeat nothing and are not used. All arithmetic
of a lane is its own (`blocks`), and the tokens are cut into tasks and tiles at fixed places counted from the first one:
the bits of a row's result depend on its query and on the tokens that it sees alone, not on the other rows, the batch or
the number of threads. Hence no `reassoc` here.
"""

import math

import numpy as np

from eps_core.cpu.blocks import BLOCK_ROWS, add_products, lowest_bit, powers, raise_most, set_bits, weigh_lanes
from eps_core.cpu.compile import call_by_name, kernel
from eps_core.cpu.pool_vectors import ask_for_row, widen_rows
from eps_core.cpu.threads import finish, owner, take, wait
from eps_core.cpu.vectors import LANES

TILE_TOKENS = 64  # whose logits are weighed together, as many as K in float32 leaves room for in the first cache
LOG2_E, LN_2 = np.float32(math.log2(math.e)), np.float32(math.log(2))


@kernel()
def lanes_of(num_rows, repeat):
    return (num_rows * repeat + LANES - 1) // LANES * LANES


@kernel()
def scale_of(head_dim):
    """Return the factor from products of queries and keys to logits in base two."""
    return np.float32(LOG2_E / math.sqrt(head_dim))


@kernel()
def aligned(count):
    """count float32 that begin with a cache line."""
    whole = np.empty(count + 16, np.float32)
    skip = (-whole.ctypes.data % 64) // 4
    return whole[skip : skip + count]


@kernel()
def find_rows(table, unit_tokens, strides, h, begin, end, ahead, rows):
    """rows[i] becomes where token begin + i of kv head h lies, up to `end`, and of the last token for `ahead` more."""
    at, token = 0, begin
    while token < end:
        offset = token % unit_tokens
        start = table[token // unit_tokens] * strides[0] + h * strides[1]
        for inner in range(offset, min(unit_tokens, offset + end - token)):
            rows[at] = start + inner * strides[2]
            at += 1
        token = begin + at
    rows[at : at + ahead] = rows[at - 1]


@kernel()
def find_seen(length, num_rows, repeat, seen):
    """seen[lane] becomes how many tokens a lane sees: unused ones all."""
    seen[:] = length
    for r in range(repeat):
        for n in range(num_rows):
            seen[r * num_rows + n] = length - num_rows + n + 1


@kernel()
def hide(logits, first, count, seen):
    """-inf for the logits [count, L] of tokens from `first` on that a lane does not see."""
    lanes = len(seen)
    for i in range(count):
        for lane in range(lanes):
            if first + i >= seen[lane]:
                logits[i * lanes + lane] = -np.inf


@kernel()
def add_selected(weights, first, count, size, num_rows, repeat, lanes, selected_mask, starts, factors, totals):
    """totals [L] become totals * factors and the weights [count, L], of tokens from `first` on, of those in groups that
    a row selects: row n's groups are visit[starts[n] + group], flat uint8."""
    for lane in range(lanes):
        totals[lane] *= factors[lane]
    last = (first + count + size - 1) // size
    for n in range(num_rows):
        for group in range(first // size, last, 64):
            word, start = np.uint64(0), starts[n] + group
            if start + 64 <= len(selected_mask):
                word = set_bits(selected_mask, start)
            else:
                for one in range(len(selected_mask) - start):
                    word |= np.uint64(selected_mask[start + one] != 0) << np.uint64(one)
            if last - group < 64:
                word &= (np.uint64(1) << np.uint64(last - group)) - np.uint64(1)
            while word:
                begin = (group + lowest_bit(word)) * size - first
                word &= word - np.uint64(1)
                for i in range(max(begin, 0), min(begin + size, count)):
                    for r in range(repeat):
                        totals[r * num_rows + n] += weights[i * lanes + r * num_rows + n]


@kernel()
def clean(wide, first, count, head_dim, seen, sums):
    """Zeros for tokens of V, wide [count, D] from `first` on, that are not finite, and NaN for the sums [D, L] of lanes
    that see them."""
    lanes = len(seen)
    for i in range(count):
        broken = False
        for c in range(i * head_dim, (i + 1) * head_dim):
            if not abs(wide[c]) < np.inf:
                wide[c] = 0
                broken = True
        if broken:
            for lane in range(lanes):
                if first + i < seen[lane]:
                    for c in range(head_dim):
                        sums[c * lanes + lane] = np.nan


@kernel()
def merge_tasks(
    num_tasks, lanes, num_rows, repeat, scale, largest, totals, selected, sums, out, lse, selected_lse
):  # fmt: skip
    """Fills out [N, R, D], lse and selected_lse [N, R] of one kv head of a sequence with what its tasks left: largest,
    totals, selected [tasks L] and sums [tasks D L]. In the order of the tokens."""
    head_dim = out.shape[2]
    most, mass, share, weight = np.full(lanes, -np.inf, np.float32), aligned(lanes), aligned(lanes), aligned(lanes)
    whole = aligned(head_dim * lanes)
    mass[:], share[:], whole[:] = 0, 0, 0
    for task in range(num_tasks):
        for lane in range(lanes):
            most[lane] = max(most[lane], largest[task * lanes + lane])
    for task in range(num_tasks):
        for lane in range(lanes):
            other = largest[task * lanes + lane]
            weight[lane] = (other - most[lane]) * scale if other > -np.inf else np.float32(-np.inf)
        powers(weight, lanes)
        for lane in range(lanes):
            mass[lane] += weight[lane] * totals[task * lanes + lane]
            share[lane] += weight[lane] * selected[task * lanes + lane]
        own = sums[task * head_dim * lanes : (task + 1) * head_dim * lanes]
        for c in range(head_dim):
            for lane in range(lanes):
                whole[c * lanes + lane] += weight[lane] * own[c * lanes + lane]
    for n in range(num_rows):
        for r in range(repeat):
            lane = r * num_rows + n
            base = most[lane] * (scale * LN_2) if most[lane] > -np.inf else np.float32(0)
            for c in range(head_dim):
                out[n, r, c] = whole[c * lanes + lane] / mass[lane]
            lse[n, r] = base + np.log(mass[lane])
            selected_lse[n, r] = base + np.log(share[lane])


@kernel()
def place_queries(q, num_rows, repeat, h, queries):
    """queries [D, L] become the rows of q [N, Hq, D] of kv head h, zeros in the lanes that are not used."""
    head_dim = q.shape[2]
    lanes = len(queries) // head_dim
    queries[:] = 0
    for r in range(repeat):
        for n in range(num_rows):
            for c in range(head_dim):
                queries[c * lanes + r * num_rows + n] = q[n, h * repeat + r, c]


@kernel()
def merge_pairs(
    progress, phase, kv_heads, first_rows, starts, slots, largest, totals, selected, sums, out, lse, selected_lse
):  # fmt: skip
    """The last phase of `attend_rows`."""
    num_heads, head_dim = out.shape[1:]
    pairs, repeat = len(starts) - 1, num_heads // kv_heads
    while True:
        pair = take(progress, phase)
        if pair >= pairs:
            break
        b, h = pair // kv_heads, pair % kv_heads
        here, own = slice(first_rows[b], first_rows[b + 1]), slice(h * repeat, (h + 1) * repeat)
        num_rows, slot = first_rows[b + 1] - first_rows[b], slots[pair]
        call_by_name(merge_tasks, (
            starts[pair + 1] - starts[pair], lanes_of(num_rows, repeat), num_rows, repeat, scale_of(head_dim),
            largest[slot:], totals[slot:], selected[slot:], sums[slot * head_dim :], out[here, own], lse[here, own],
            selected_lse[here, own],
        ))  # fmt: skip
        finish(progress, phase)
    wait(progress, phase, pairs)


@kernel()
def widest_of(first_rows, repeat):
    """The most lanes of a sequence."""
    widest = 0
    for b in range(len(first_rows) - 1):
        widest = max(widest, lanes_of(first_rows[b + 1] - first_rows[b], repeat))
    return widest


@kernel()
def attend_rows(
    progress, q, k, v, k_strides, v_strides, table, lengths, first_rows, unit_tokens, size, per_task, starts, slots,
    places, selected_mask, queries, largest, totals, selected, sums, out, lse, selected_lse,
):  # fmt: skip
    """Fills out [T, Hq, D], lse and selected_lse [T, Hq] float32 as `RowsRead` says, of q [T, Hq, D] float32
    unscaled: rows first_rows[b] to first_rows[b + 1] - 1 are the last of the lengths[b] tokens of sequence b. visit
    [T, Hkv, G] uint8; where it is empty selected_lse is not defined.

    Three phases, of (b, h) pairs, of tasks, of pairs. Tasks starts[pair] to starts[pair + 1] - 1 take `per_task` tokens
    each, a multiple of unit_tokens, and leave largest, totals and selected, L each from slots[pair] on, and sums
    [D, L]. The pair's queries [D, L] lie from places[pair] D on."""
    num_heads, head_dim = q.shape[1:]
    pairs, kv_heads = len(starts) - 1, (len(starts) - 1) // len(lengths)
    repeat = num_heads // kv_heads
    scale = scale_of(head_dim)
    listing = selected_mask.size > 0
    flat_selected, num_groups = selected_mask.reshape(-1), selected_mask.shape[2]
    while True:
        pair = take(progress, 0)
        if pair >= pairs:
            break
        b, h = pair // kv_heads, pair % kv_heads
        rows_here = first_rows[b + 1] - first_rows[b]
        lanes = lanes_of(rows_here, repeat)
        own = queries[places[pair] * head_dim : (places[pair] + lanes) * head_dim]
        place_queries(q[first_rows[b] : first_rows[b + 1]], rows_here, repeat, h, own)
        finish(progress, 0)
    wait(progress, 0, pairs)

    widest = widest_of(first_rows, repeat)
    wide, logits = aligned(TILE_TOKENS * head_dim), aligned(TILE_TOKENS * widest)
    all_factors = aligned(widest)
    all_seen = np.empty(widest, np.int64)
    k_rows, v_rows = np.empty(per_task + 2 * TILE_TOKENS, np.int64), np.empty(per_task + 2 * TILE_TOKENS, np.int64)
    while True:
        task = take(progress, 1)
        if task >= starts[-1]:
            break
        pair = owner(starts, task)
        b, h = pair // kv_heads, pair % kv_heads
        length, rows_here, first_row = lengths[b], first_rows[b + 1] - first_rows[b], first_rows[b]
        lanes = lanes_of(rows_here, repeat)
        seen, factors = all_seen[:lanes], all_factors[:lanes]
        find_seen(length, rows_here, repeat, seen)
        begin = (task - starts[pair]) * per_task
        end = min(begin + per_task, length)
        find_rows(table[b], unit_tokens, k_strides, h, begin, end, 2 * TILE_TOKENS, k_rows)
        find_rows(table[b], unit_tokens, v_strides, h, begin, end, 2 * TILE_TOKENS, v_rows)
        slot = slots[pair] + (task - starts[pair]) * lanes
        most, total = largest[slot : slot + lanes], totals[slot : slot + lanes]
        share, own = selected[slot : slot + lanes], sums[slot * head_dim : (slot + lanes) * head_dim]
        most[:], total[:], share[:], own[:] = -np.inf, 0, 0, 0
        asked = queries[places[pair] * head_dim : (places[pair] + lanes) * head_dim]
        visits = (np.arange(first_row, first_row + rows_here) * kv_heads + h) * num_groups
        first_hidden = length - rows_here + 1
        for at in range(0, end - begin, TILE_TOKENS):
            count, first = min(TILE_TOKENS, end - begin - at), begin + at
            widen_rows(k, k_rows, at, count, head_dim, wide)
            for i in range(0, count, BLOCK_ROWS):
                height = min(BLOCK_ROWS, count - i)
                for ahead in range(at + i + TILE_TOKENS, at + i + TILE_TOKENS + height):
                    ask_for_row(k, k_rows[ahead], head_dim)
                add_products(
                    wide, i * head_dim, head_dim, 1, height, asked, head_dim, lanes, None, logits, i * lanes
                )  # fmt: skip
            if first + count > first_hidden:
                hide(logits, first, count, seen)
            raise_most(logits, count, lanes, scale, most, total, factors)
            weigh_lanes(logits, 0, count, lanes, scale, most, total)
            if listing:
                add_selected(
                    logits, first, count, size, rows_here, repeat, lanes, flat_selected, visits, factors, share
                )  # fmt: skip
            widen_rows(v, v_rows, at, count, head_dim, wide)
            if first + count > first_hidden:
                skip = max(first_hidden - first, 0)
                clean(wide[skip * head_dim :], first + skip, count - skip, head_dim, seen, own)
            for c in range(0, head_dim, BLOCK_ROWS):
                ahead = at + TILE_TOKENS + c * TILE_TOKENS // head_dim
                until = at + TILE_TOKENS + min(c + BLOCK_ROWS, head_dim) * TILE_TOKENS // head_dim
                for one in range(ahead, until):
                    ask_for_row(v, v_rows[one], head_dim)
                height = min(BLOCK_ROWS, head_dim - c)
                add_products(
                    wide, c, 1, head_dim, height, logits, count, lanes, factors, own, c * lanes
                )  # fmt: skip
        finish(progress, 1)
    wait(progress, 1, starts[-1])

    merge_pairs(
        progress, 2, kv_heads, first_rows, starts, slots, largest, totals, selected, sums, out, lse, selected_lse
    )  # fmt: skip
