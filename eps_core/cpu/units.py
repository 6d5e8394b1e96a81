"""Compiled scoring by codes about a unit's mean, read in stages: what `score` of the array backends computes of `rq`
with `mean_tokens`.

Letters as in `gate.protocol`; N groups share a mean and are sealed together: a seal. Summary pools are flat, the rows
of seals ((unit * Hkv + h) * seals per unit + seal) and of groups (row of the seal * N + group in it). N is a multiple
of LANES here. Stages follow each other, as each reads on where the one before estimated most.
"""

import numpy as np

from eps_core.cpu.best import keep_best, list_kept
from eps_core.cpu.compile import FAST, kernel
from eps_core.cpu.score import KNOWN, MISSING, PAST, fill_table, pad
from eps_core.cpu.threads import finish, take, wait
from eps_core.cpu.unit_vectors import (
    SCANS,
    WORD,
    WORD_TABLE,
    any_kept,
    copy_bytes,
    finer_rows,
    mean_dots,
    put_kept,
    scan_planes,
    scan_rows,
)
from eps_core.cpu.vectors import HEADS, LANES, PERMUTES, ask_for, wide
from eps_core.cpu.write import rotate
from eps_core.summaries.rq import QUERY_STEPS

CHUNK_GROUPS, FINER_GROUPS = 1024, 256  # of one task; changes speed only
SEALS_AHEAD = 6  # whose codes are asked for; changes speed only


@kernel()
def place_seals(fill, table, length, guards, kv_heads, size, sealed, per_unit, states, places):
    """Fills states [seals] uint8 of one sequence, table [M]: KNOWN; MISSING, not full in fill [P * per_unit] or at the
    sequence's end; PAST the end; and places [seals] with the row of each in the pools of kv head 0. Returns how many
    groups of the missing no guard [2] covers."""
    groups, missing = sealed // size, 0
    for m in range(len(table)):
        unit = max(table[m], 0)
        for sub in range(per_unit):
            seal = m * per_unit + sub
            first, end = seal * sealed, (seal + 1) * sealed
            places[seal] = unit * kv_heads * per_unit + sub
            if first >= length:
                states[seal] = PAST
            elif end <= length and fill[unit * per_unit + sub] == sealed:
                states[seal] = KNOWN
            else:
                states[seal] = MISSING
                missing += max(min((seal + 1) * groups, guards[1]) - max(seal * groups, guards[0]), 0)
    return missing


@kernel()
def rounded_query(turned, integers):
    """Fills integers [D] int8 within +-QUERY_STEPS and returns the float32 step of a rotated query [D] float32 ~
    integers * step. No fastmath: every library rounds the same numbers."""
    largest = np.float32(0)
    for d in range(len(turned)):
        size = abs(turned[d])
        largest = size if not size <= largest else largest  # NaN stays
    step = largest / np.float32(QUERY_STEPS)
    for d in range(len(turned)):
        whole = np.rint(turned[d] / step) if step > 0 and step < np.inf else np.float32(0)
        integers[d] = np.int8(min(max(whole, np.float32(-QUERY_STEPS)), np.float32(QUERY_STEPS)))
    return step


@kernel()
def fill_words(integers, dims, table):
    """table: what each value of each nibble of the parts of a code, of `dims` dimensions each, adds to integers
    [HEADS, D] int8 . signs: the tables of `scan_planes`."""
    word, start = 0, 0
    entries = np.empty(16, np.int8)
    for part in range(len(dims)):
        many = dims[part]
        words = (many + 8 * WORD - 1) // (8 * WORD)
        for nibble in range(2 * WORD * words):
            at, j, side = word + nibble // (2 * WORD), nibble // 2 % WORD, nibble % 2
            for r in range(HEADS):
                entries[:] = 0
                for bit in range(4):
                    dim = 4 * nibble + bit
                    one = integers[r, start + dim] if dim < many else np.int8(0)
                    for value in range(16):
                        entries[value] += one if (value >> bit) & 1 else -one
                for value in range(16):
                    if SCANS:
                        place = ((side * HEADS + r) * WORD + j) * 16 + value
                    else:
                        place = ((side * WORD + j) * 16 + value) * HEADS + r
                    table[at * WORD_TABLE + place] = entries[value]
        word, start = word + words, start + many


@kernel(fastmath=FAST)
def prepare(q, shrink, signs, blocks, block_scales, dims, mean_bits, turned, words, table, queries, factors):
    """The tables of one pass of HEADS query heads: q [HEADS, D] float32 unscaled becomes turned [HEADS, D]; words of
    `scan_planes`; table of `score_rows`; queries of `mean_dots`; factors [parts, HEADS] of `scan_planes`."""
    head_dim = q.shape[1]
    integers = np.empty((HEADS, head_dim), np.int8)
    sides = 8 // mean_bits
    mean_bytes = (head_dim + sides - 1) // sides
    for r in range(HEADS):
        for d in range(head_dim):
            turned[r, d] = q[r, d] * shrink
        rotate(turned[r], signs, blocks, block_scales)
        step, many = rounded_query(turned[r], integers[r]), 0
        for part in range(len(dims)):
            many += dims[part]
            factors[part, r] = step * np.float32(head_dim / many)
        for side in range(sides):
            for byte in range(mean_bytes):
                dim = byte * sides + side
                own = turned[r, dim] if dim < head_dim else np.float32(0)
                queries[(side * HEADS + r) * mean_bytes + byte] = own
    fill_words(integers, dims, words)
    turned[:] = integers
    num_bytes = (head_dim + 7) // 8
    fill_table(turned, 1, num_bytes, PERMUTES and num_bytes % 4 == 0, table)


@kernel(fastmath=FAST)
def score_some(
    progress, phase, first_row, some, mean, mean_scale, mean_bits, scale, codes, later, second, second_scale, lengths,
    staged, refined, dims, size, head_dim, seal_groups, per_unit, states, places, words, tables, queries, factors,
    bases, sums, keys, listed, counts, estimate,
):  # fmt: skip
    """The stages of `score_units` for `some` rows from first_row on, from a phase on; arrays of rows_at_once rows begin
    with the first of these."""
    batch, kv_heads, groups = estimate.shape
    passes, seals, parts = words.shape[1], states.shape[1], len(dims)
    log_size = np.float32(np.log(size))
    mean_bytes, num_bytes = (head_dim * mean_bits + 7) // 8, (head_dim + 7) // 8
    first_bytes = (dims[0] + 7) // 8
    # of all further parts: none has an odd number of bits (`part_dims`)
    middle_bytes, last_bytes = (dims[1] // 8 if parts > 1 else 0), (dims[2] // 8 if parts > 2 else 0)
    spare, dots = np.empty(groups + LANES, np.uint32), np.empty(HEADS, np.float32)
    fresh = np.empty(max(seal_groups, FINER_GROUPS), np.float32)
    gathered = np.empty(FINER_GROUPS * num_bytes, np.uint8)
    chosen, seal_of = np.empty(FINER_GROUPS, np.int64), np.empty(FINER_GROUPS, np.int64)
    base_rows = np.empty(FINER_GROUPS, np.int64)
    per_task = max(CHUNK_GROUPS // seal_groups, 1)
    chunks = (seals + per_task - 1) // per_task
    most_refined = 0
    for b in range(batch):
        most_refined = max(most_refined, refined[b])
    while True:
        task = take(progress, phase)
        if task >= some * chunks:
            break
        row, begin = first_row + task // chunks, task % chunks * per_task
        b, h = row // kv_heads, row % kv_heads
        own, own_keys, own_sums = estimate[b, h], keys[row - first_row], sums[row - first_row]
        for seal in range(begin, min(begin + per_task, seals)):
            group = seal * seal_groups
            if states[b, seal] != KNOWN:
                end = (lengths[b] + size - 1) // size
                for i in range(group, group + seal_groups):
                    own[i] = np.inf if i < end else -np.inf
                    own_keys[i] = 0
                continue
            place = places[b, seal] + h * per_unit
            ahead = places[b, min(seal + SEALS_AHEAD, seals - 1)] + h * per_unit
            ask_for(codes, ahead * first_bytes * seal_groups, first_bytes * seal_groups)
            ask_for(mean, ahead * mean_bytes, mean_bytes)
            ask_for(scale, ahead * seal_groups, seal_groups)
            ask_for(mean_scale, ahead, 1)
            for at in range(passes):
                mean_dots(mean, place * mean_bytes, mean_bytes, mean_bits, queries[row, at], dots)
                base_at, shift = (seal * passes + at) * HEADS, wide(mean_scale[place])
                for r in range(HEADS):
                    bases[row, base_at + r] = log_size + shift * dots[r]
                for i in range(0, seal_groups, LANES):
                    scan_planes(
                        codes, place * first_bytes * seal_groups + i, seal_groups, first_bytes, scale,
                        place * seal_groups + i, words[row, at], factors[row, at, 0], bases[row], base_at, own_sums,
                        ((group + i) * passes + at * LANES) * HEADS, at > 0, fresh[i:],
                    )  # fmt: skip
                if at == passes - 1:
                    for i in range(0, seal_groups, LANES):
                        put_kept(fresh[i:], own, own_keys, group + i, True)
        finish(progress, phase)
    wait(progress, phase, some * chunks)
    phase += 1

    first_word = (first_bytes + WORD - 1) // WORD
    for part in range(1, parts):
        part_bytes = dims[part] // 8
        while True:
            row = take(progress, phase)
            if row >= some:
                break
            row += first_row
            keep_best(keys[row - first_row], groups, staged[part - 1, row // kv_heads], spare)
            finish(progress, phase)
        wait(progress, phase, some)
        phase += 1
        while True:
            task = take(progress, phase)
            if task >= some * chunks:
                break
            row, begin = first_row + task // chunks, task % chunks * per_task
            b, h = row // kv_heads, row % kv_heads
            own, own_keys, own_sums = estimate[b, h], keys[row - first_row], sums[row - first_row]
            for seal in range(begin, min(begin + per_task, seals)):
                ahead = min(seal + SEALS_AHEAD, seals - 1)
                coming = (places[b, ahead] + h * per_unit) * seal_groups
                for i in range(0, seal_groups, LANES):
                    if any_kept(own_keys, ahead * seal_groups + i):
                        ask_for(later[part - 1], (coming + i) * part_bytes, LANES * part_bytes)
                        ask_for(scale, coming + i, LANES)
                start = places[b, seal] + h * per_unit
                for i in range(0, seal_groups, LANES):
                    group, place = seal * seal_groups + i, start * seal_groups + i
                    if not any_kept(own_keys, group):
                        continue
                    for at in range(passes):
                        scan_rows(
                            later[part - 1], place * part_bytes, part_bytes, scale, place,
                            words[row, at, first_word * WORD_TABLE :], factors[row, at, part], bases[row],
                            (seal * passes + at) * HEADS, own_sums, (group * passes + at * LANES) * HEADS, at > 0,
                            fresh,
                        )  # fmt: skip
                    put_kept(fresh, own, own_keys, group, False)
            finish(progress, phase)
        wait(progress, phase, some * chunks)
        phase += 1
        first_word += (part_bytes + WORD - 1) // WORD

    if not most_refined:
        return
    while True:
        row = take(progress, phase)
        if row >= some:
            break
        row += first_row
        own_keys = keys[row - first_row]
        keep_best(own_keys, groups, refined[row // kv_heads], spare)
        counts[row] = list_kept(own_keys, groups, listed[row - first_row])
        finish(progress, phase)
    wait(progress, phase, some)
    phase += 1
    pieces = (most_refined + FINER_GROUPS - 1) // FINER_GROUPS
    while True:
        task = take(progress, phase)
        if task >= some * pieces:
            break
        row, begin = first_row + task // pieces, task % pieces * FINER_GROUPS
        b, h = row // kv_heads, row % kv_heads
        own, count = estimate[b, h], min(counts[row] - begin, FINER_GROUPS)
        own_listed = listed[row - first_row, begin:]
        if count > 0:
            seal = 0
            end, start = 0, 0
            for i in range(count):
                group = own_listed[i]
                if group >= end:
                    seal = group // seal_groups
                    end = (seal + 1) * seal_groups
                    # of the first group of the seal, less its number
                    start = (places[b, seal] + h * per_unit) * seal_groups - seal * seal_groups
                    ask_for(codes, (start + seal * seal_groups) * first_bytes, first_bytes * seal_groups)
                place = start + group
                chosen[i], seal_of[i] = place, seal
                ask_for(second, place * num_bytes, num_bytes)
                ask_for(second_scale, place, 1)
                ask_for(later[0], place * middle_bytes, middle_bytes)
                ask_for(later[1], place * last_bytes, last_bytes)
            for i in range(count):
                place, n, to = chosen[i], own_listed[i] - seal_of[i] * seal_groups, i * num_bytes
                copy_bytes(codes, (place - n) * first_bytes + n, seal_groups, first_bytes, gathered, to)
                to += first_bytes
                copy_bytes(later[0], place * middle_bytes, 1, middle_bytes, gathered, to)
                copy_bytes(later[1], place * last_bytes, 1, last_bytes, gathered, to + middle_bytes)
            padded = pad(chosen, count)
            for at in range(passes):
                for i in range(padded):
                    base_rows[i] = (seal_of[min(i, count - 1)] * passes + at) * HEADS
                finer_rows(
                    gathered, second, chosen, padded, num_bytes, tables[row, at], second_scale, bases[row],
                    base_rows, at > 0, fresh, factors[row, at, parts - 1],
                )  # fmt: skip
            for i in range(count):
                own[own_listed[i]] = fresh[i]
        finish(progress, phase)
    wait(progress, phase, some * pieces)
    phase += 1


@kernel(fastmath=FAST)
def score_units(
    progress, rows_at_once, q, mean, mean_scale, mean_bits, scale, codes, later, second, second_scale, fill, table,
    lengths, guards, staged, refined, signs, blocks, block_scales, dims, size, sealed, per_unit, states, places, words,
    tables, queries, factors, bases, sums, keys, listed, counts, missing, estimate,
):  # fmt: skip
    """Fills estimate [B, Hkv, G], and missing [B] with how many groups lack a summary and a guard. q [B, Hq, D] float32
    unscaled. The fields of `summaries.rq` flat, `later` the second and the third part of codes; staged [parts - 1, B]
    groups are read further, refined [B] get the second bit (0: none); dims of each part; sealed tokens are summarised
    together, per_unit times a unit. blocks and block_scales of `rotate`.

    Between the phases: states [B, seals] uint8 and places [B, seals] int64; of each row (b, h) and pass of HEADS query
    heads words int8, tables, queries and factors [.., parts, HEADS] float32 of `prepare`, and bases [rows, seals *
    passes * HEADS] float32; counts [rows]; and of rows_at_once rows sums [.., G * passes * HEADS] int16, keys [.., G]
    uint32 of groups whose codes were all read so far, and listed [.., G + LANES] int32. One phase, and then
    another where rows_at_once is 0: each row is one thread's, and what is read again still lies in its caches. Else,
    for each rows_at_once rows, one of the first stage, two of every further one and two of the second bit."""
    batch, num_heads, head_dim = q.shape
    _, kv_heads, groups = estimate.shape
    repeat, rows, passes = num_heads // kv_heads, batch * kv_heads, words.shape[1]
    shrink = np.float32(1 / np.sqrt(head_dim))
    total = batch + rows * passes
    own_q, turned = np.empty((HEADS, head_dim), np.float32), np.empty((HEADS, head_dim), np.float32)
    while True:
        task = take(progress, 0)
        if task >= total:
            break
        if task < batch:
            missing[task] = place_seals(
                fill, table[task], lengths[task], guards[task], kv_heads, size, sealed, per_unit, states[task],
                places[task],
            )  # fmt: skip
        else:
            row, at = (task - batch) // passes, (task - batch) % passes
            for r in range(HEADS):
                # places without a head repeat the first: they do not change a maximum
                head = row % kv_heads * repeat + at * HEADS + (r if at * HEADS + r < repeat else 0)
                own_q[r] = q[row // kv_heads, head]
            prepare(
                own_q, shrink, signs, blocks, block_scales, dims, mean_bits, turned, words[row, at], tables[row, at],
                queries[row, at], factors[row, at],
            )  # fmt: skip
        finish(progress, 0)
    wait(progress, 0, total)

    seal_groups = sealed // size
    if rows_at_once:
        for first_row in range(0, rows, rows_at_once):
            score_some(
                progress, 1 + first_row // rows_at_once * (1 + 2 * len(dims)), first_row,
                min(rows_at_once, rows - first_row), mean, mean_scale, mean_bits, scale, codes, later, second,
                second_scale, lengths, staged, refined, dims, size, head_dim, seal_groups, per_unit, states, places,
                words, tables, queries, factors, bases, sums, keys, listed, counts, estimate,
            )  # fmt: skip
        return
    own_sums, own_keys = np.empty((1, groups * passes * HEADS), np.int16), np.empty((1, groups), np.uint32)
    own_listed = np.empty((1, groups + LANES), np.int32)
    while True:
        row = take(progress, 1)
        if row >= rows:
            break
        score_some(
            np.zeros((1 + 2 * len(dims), progress.shape[1]), np.int64), 0, row, 1, mean, mean_scale, mean_bits, scale,
            codes, later, second, second_scale, lengths, staged, refined, dims, size, head_dim, seal_groups, per_unit,
            states, places, words, tables, queries, factors, bases, own_sums, own_keys, own_listed, counts, estimate,
        )  # fmt: skip
        finish(progress, 1)
    wait(progress, 1, rows)
