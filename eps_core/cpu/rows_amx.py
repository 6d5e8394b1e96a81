"""`rows.attend_rows` on tile registers (`amx`), for bfloat16 pools, head dims of whole steps and units of whole tiles.

Keys are multiplied where they lie, values are turned once a tile for all lanes. Queries are the sum of as many bfloat16
parts as hold them (three for float32), softmax weights of two (16 bits), so that results are as near to exact ones as
float32's. Prompts in bfloat16 ask for one part of a weight, as Torch's own attention has it: their results are rounded
to bfloat16 anyway. As there, tasks and tiles lie at fixed places and lanes are their own: so are a row's bits.
"""

import numpy as np

from eps_core.cpu.amx import STEP, begin_tiles, end_tiles, split_rows, tile_logits, tile_sums, turn_values, weigh_pairs
from eps_core.cpu.blocks import raise_most
from eps_core.cpu.compile import kernel
from eps_core.cpu.rows import (
    add_selected,
    aligned,
    find_rows,
    find_seen,
    hide,
    lanes_of,
    merge_pairs,
    place_queries,
    scale_of,
    widest_of,
)
from eps_core.cpu.threads import finish, owner, take, wait
from eps_core.cpu.vectors import ask_for

TILE_TOKENS = 128  # whose logits are weighed together
UNIT_TOKENS = 16  # units of as many tokens, or multiples, can be multiplied where they lie


@kernel()
def aligned_bits(count):
    """count uint16 that begin with a cache line."""
    return aligned((count + 1) // 2).view(np.uint16)


@kernel()
def ask_ahead(k, v, rows, at, asked_for, count, head_dim):
    """Asks for `count` more rows of the tile behind that of rows[at], K and V in turns, `asked_for` of which were;
    returns how many were then. A few at a time: what finds the queue of the second cache full is dropped."""
    end = min(asked_for + count, 2 * TILE_TOKENS)
    for i in range(asked_for, end):
        row = rows[at + TILE_TOKENS + i // 2]
        if i % 2:
            ask_for(v, row, head_dim)
        else:
            ask_for(k, row, head_dim)
    return end


@kernel()
def copy_clean(v, rows, at, count, padded, first, first_hidden, head_dim, seen, sums, copy):
    """copy [padded, D] becomes `count` rows of v from rows[at] on and zeros: tokens from `first` on, zeros also for
    what is not finite of those that some lane does not see; NaN for the sums [D, L] of lanes that see them."""
    lanes = len(seen)
    copy[: padded * head_dim] = 0
    for i in range(count):
        broken = False
        for c in range(head_dim):
            bits = v[rows[at + i] + c]
            if first + i >= first_hidden and bits & 0x7F80 == 0x7F80:
                broken = True
            else:
                copy[i * head_dim + c] = bits
        if broken:
            for lane in range(lanes):
                if first + i < seen[lane]:
                    for c in range(head_dim):
                        sums[c * lanes + lane] = np.nan


@kernel()
def scale_sums(sums, factors):
    """sums [D, L] *= factors [L], unless all of them are 1."""
    lanes = len(factors)
    for lane in range(lanes):
        if factors[lane] != 1:
            for c in range(len(sums) // lanes):
                for one in range(lanes):
                    sums[c * lanes + one] *= factors[one]
            return


@kernel()
def attend_rows(
    progress, q, parts, weight_parts, k, v, strides, table, lengths, first_rows, unit_tokens, size, per_task, starts,
    slots, places, selected_mask, queries, largest, totals, selected, sums, out, lse, selected_lse,
):  # fmt: skip
    """`rows.attend_rows`, with k, v uint16, queries uint16 of `parts` times the size, `parts` of a query and
    weight_parts, one or two, of a weight."""
    num_heads, head_dim = q.shape[1:]
    pairs, kv_heads = len(starts) - 1, (len(starts) - 1) // len(lengths)
    repeat = num_heads // kv_heads
    scale = scale_of(head_dim)
    listing = selected_mask.size > 0
    flat_selected, num_groups = selected_mask.reshape(-1), selected_mask.shape[2]
    widest = widest_of(first_rows, repeat)
    wide = aligned(head_dim * widest)
    while True:
        pair = take(progress, 0)
        if pair >= pairs:
            break
        b, h = pair // kv_heads, pair % kv_heads
        num_rows = first_rows[b + 1] - first_rows[b]
        words = lanes_of(num_rows, repeat) * head_dim
        own = queries[places[pair] * head_dim * parts :]
        place_queries(q[first_rows[b] : first_rows[b + 1]], num_rows, repeat, h, wide[:words])
        split_rows(wide, head_dim // STEP, parts, words * STEP // head_dim, words, words // head_dim, own)
        finish(progress, 0)
    wait(progress, 0, pairs)

    logits = aligned(TILE_TOKENS * widest)
    turned, copy, copy_rows = (
        aligned_bits(TILE_TOKENS * head_dim),
        aligned_bits(TILE_TOKENS * head_dim),
        np.arange(TILE_TOKENS) * head_dim,
    )
    weights = aligned_bits(2 * TILE_TOKENS * widest)
    all_factors = aligned(widest)
    all_seen = np.empty(widest, np.int64)
    rows = np.empty(per_task + 2 * TILE_TOKENS, np.int64)
    # rows asked for at a time: of literal numbers a function is compiled for each
    zero, few, some, many = np.int64(0), np.int64(12), np.int64(16), np.int64(24)
    begin_tiles()
    while True:
        task = take(progress, 1)
        if task >= starts[-1]:
            break
        pair = owner(starts, task)
        b, h = pair // kv_heads, pair % kv_heads
        length, num_rows, first_row = lengths[b], first_rows[b + 1] - first_rows[b], first_rows[b]
        lanes = lanes_of(num_rows, repeat)
        seen, factors = all_seen[:lanes], all_factors[:lanes]
        find_seen(length, num_rows, repeat, seen)
        begin = (task - starts[pair]) * per_task
        end = min(begin + per_task, length)
        find_rows(table[b], unit_tokens, strides, h, begin, end, 2 * TILE_TOKENS, rows)
        slot = slots[pair] + (task - starts[pair]) * lanes
        most, total = largest[slot : slot + lanes], totals[slot : slot + lanes]
        share, own = selected[slot : slot + lanes], sums[slot * head_dim : (slot + lanes) * head_dim]
        most[:], total[:], share[:], own[:] = -np.inf, 0, 0, 0
        asked = queries[places[pair] * head_dim * parts :]
        visits = (np.arange(first_row, first_row + num_rows) * kv_heads + h) * num_groups
        first_hidden = length - num_rows + 1
        for at in range(0, end - begin, TILE_TOKENS):
            count, first = min(TILE_TOKENS, end - begin - at), begin + at
            padded, asked_for = (count + STEP - 1) // STEP * STEP, zero
            for i in range(0, padded, STEP):
                asked_for = ask_ahead(k, v, rows, at, asked_for, few, head_dim)
                # sixteen tokens of a unit lie `strides` apart, past the end too; there may be no second sixteen
                other = rows[at + i + 16] if i + 16 < count else rows[at + i]
                tile_logits(
                    k, rows[at + i], other, strides[2], asked, parts, head_dim, lanes, logits, i * lanes
                )  # fmt: skip
            if first + count > first_hidden:
                hide(logits, first, count, seen)
            raise_most(logits, count, lanes, scale, most, total, factors)
            logits[count * lanes : padded * lanes] = -np.inf
            for i in range(0, padded, STEP):
                asked_for = ask_ahead(k, v, rows, at, asked_for, many, head_dim)
                weigh_pairs(
                    logits, i, lanes, scale, most, total, listing, weight_parts, weights, i * 2 * lanes
                )  # fmt: skip
            if listing:
                add_selected(
                    logits, first, count, size, num_rows, repeat, lanes, flat_selected, visits, factors, share
                )  # fmt: skip
            whole = count == padded and first + count <= first_hidden
            if not whole:
                copy_clean(v, rows, at, count, padded, first, first_hidden, head_dim, seen, own, copy)
            for i in range(0, padded, STEP):
                asked_for = ask_ahead(k, v, rows, at, asked_for, few, head_dim)
                if whole:
                    turn_values(v, rows, at + i, head_dim, turned, i * head_dim)
                else:
                    turn_values(copy, copy_rows, i, head_dim, turned, i * head_dim)
            scale_sums(own, factors)
            for c in range(0, head_dim, STEP):
                asked_for = ask_ahead(k, v, rows, at, asked_for, some, head_dim)
                tile_sums(turned, weights, weight_parts, padded // STEP, c, head_dim, lanes, own)
        finish(progress, 1)
    end_tiles()
    wait(progress, 1, starts[-1])
    merge_pairs(
        progress, 2, kv_heads, first_rows, starts, slots, largest, totals, selected, sums, out, lse, selected_lse
    )  # fmt: skip
