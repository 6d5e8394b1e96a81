"""Compiled scoring by codes about a unit's mean, read in stages: what `score` of the array backends computes of `rq`
with `mean_tokens`.

Letters as in `attention.protocol`; N groups share a mean and are finalized together: a span. Summary pools are flat,
the rows of spans ((unit * Hkv + h) * spans per unit + span) and of groups (row of the span * N + group in it). N is a
multiple of LANES here. Stages follow each other, as each reads on where the one before estimated most.
"""

import numpy as np

from eps_core.config.selection import ANCHOR_SPREAD
from eps_core.cpu.best import limit, list_best, room_of_rows, select_row
from eps_core.cpu.best_vectors import mark
from eps_core.cpu.compile import call_by_name, kernel
from eps_core.cpu.pool_vectors import DOT_ROWS, PREFETCH_ROWS, dots
from eps_core.cpu.threads import FAILED, finish, take, wait
from eps_core.cpu.unit_queries import prepare
from eps_core.cpu.unit_vectors import (
    NAME,
    SPANS,
    WORD,
    WORD_TABLE,
    mean_bases,
    pack_planes,
    pack_rows,
    pack_scales,
    put_keys,
    put_names,
    put_scores,
    scan_planes,
    score_listed,
    score_packed,
)
from eps_core.cpu.vectors import HEADS, LANES, ask_for

CHUNK_GROUPS, LISTED_GROUPS = 1024, 256  # of one task; changes speed only
SEALS_AHEAD, LISTED_AHEAD = 8, 128  # what is asked for ahead; changes speed only
MOST_PHASES = 7  # of `score_some`
NEAR = np.float32(ANCHOR_SPREAD)
KNOWN, MISSING, PAST = 0, 1, 2  # states of a span
ALL_BITS = -1
NO_HEAD = np.float32(-1e30)  # a score whose mass is nothing beside any other


@kernel()
def place_spans(fill, table, length, kv_heads, finalized, per_unit, states, places):
    """Fills states [spans] uint8 of one sequence, table [M]: KNOWN; MISSING, not full in fill [P * per_unit] or at the
    sequence's end; PAST the end; and places [spans] with the row of each in the pools of kv head 0."""
    for m in range(len(table)):
        unit = max(table[m], 0)
        for sub in range(per_unit):
            span = m * per_unit + sub
            first, end = span * finalized, (span + 1) * finalized
            places[span] = unit * kv_heads * per_unit + sub
            if first >= length:
                states[span] = PAST
            elif end <= length and fill[unit * per_unit + sub] == finalized:
                states[span] = KNOWN
            else:
                states[span] = MISSING


@kernel()
def score_first(
    begin, end, mean, mean_scale, scale, codes, first_bytes, finalize_groups, states, places, shift, words,
    queries, factors, shifts, adds, end_group, bases, own, own_keys,
):  # fmt: skip
    """The first stage of spans begin .. end - 1 of one row: bases, estimates `own` and their keys."""
    passes, spans = words.shape[0], len(places)
    room, head_dim = len(bases) // (passes * HEADS), queries.shape[2]
    turned = queries.reshape(passes, -1)
    for four in range(begin, end, SPANS):
        first, second = places[four] + shift, places[min(four + 1, end - 1)] + shift
        third, fourth = places[min(four + 2, end - 1)] + shift, places[min(four + 3, end - 1)] + shift
        for span in range(min(four + SEALS_AHEAD, spans), min(four + SEALS_AHEAD + SPANS, spans)):
            place = places[span] + shift
            ask_for(codes, place * first_bytes * finalize_groups, first_bytes * finalize_groups)
            ask_for(mean, place * head_dim, head_dim)
            ask_for(scale, place * finalize_groups, 1)
        for at in range(passes):
            mean_bases(
                mean, mean_scale, first, second, third, fourth, head_dim, turned[at], shifts[at], bases,
                at * HEADS * room + four, room,
            )  # fmt: skip
        for span in range(four, min(four + SPANS, end)):
            place = (places[span] + shift) * finalize_groups
            for at in range(passes):
                for i in range(0, finalize_groups, LANES):
                    scan_planes(
                        codes, place * first_bytes + i, finalize_groups, first_bytes, scale, place + i, words[at],
                        factors[at], bases, at * HEADS * room + span, room, at > 0, adds, own,
                        span * finalize_groups + i,
                    )  # fmt: skip
    put_keys(own, begin * finalize_groups, (end - begin) * finalize_groups, own_keys, begin * finalize_groups)
    for span in range(begin, end):
        if states[span] != KNOWN:
            for group in range(span * finalize_groups, (span + 1) * finalize_groups):
                own[group] = np.inf if group < end_group else -np.inf
                own_keys[group] = 0


@kernel()
def choose_first(keys, count, marks, starts, per_chunk, spare):
    """Marks the `count` best of keys (`best_vectors.mark`); starts [chunks + 1]: where those of each chunk of per_chunk
    groups begin in the lists of `read_kept`, whose runs are multiples of LANES."""
    groups, taken = len(keys), 0
    key, before = limit(keys, groups, count, spare)
    for chunk in range(len(starts) - 1):
        starts[chunk] = taken
        taken += mark(keys, chunk * per_chunk, min((chunk + 1) * per_chunk, groups), key, before, marks)
        taken = (taken + LANES - 1) // LANES * LANES
    starts[len(starts) - 1] = taken


@kernel()
def read_kept(
    begin, end, start, scale, codes, first_bytes, later, later_bytes, finalize_groups, places, shift, words, factors,
    bases, adds, marks, packed, fresh, own, kept, kept_keys, kept_sums,
):  # fmt: skip
    """The first parts of the codes again and the next, if later_bytes, of those groups of spans begin .. end - 1 of one
    row that are marked: their estimates in `own`, and from `start` on in kept their numbers, 0 or more, in kept_keys
    their keys, in kept_sums [.., passes, HEADS] what the codes add."""
    passes = words.shape[0]
    room, first_words = len(bases) // (passes * HEADS), (first_bytes + WORD - 1) // WORD
    all_words = first_words + (later_bytes + WORD - 1) // WORD
    width, taken, log_groups = packed.shape[1], 0, log2(finalize_groups)
    flat = packed.reshape(-1)
    for span in range(begin, end):
        place = (places[span] + shift) * finalize_groups
        ahead = places[min(span + SEALS_AHEAD, len(places) - 1)] + shift
        ask_for(later, ahead * finalize_groups * later_bytes, finalize_groups * later_bytes)
        ask_for(scale, ahead * finalize_groups, 1)
        for i in range(0, finalize_groups, LANES):
            at = (span * finalize_groups + i) // LANES
            if marks[at] == 0:
                continue
            pack_planes(marks, at, codes, place * first_bytes + i, finalize_groups, first_bytes, flat, width, 1, taken)
            if later_bytes:
                pack_rows(marks, at, later, (place + i) * later_bytes, later_bytes, flat, width, 1 + first_words, taken)
            taken = pack_scales(marks, at, scale, place + i, (span - begin) * finalize_groups + i, flat, taken)
    for i in range(taken, (taken + LANES - 1) // LANES * LANES):
        packed[0, i] = packed[0, taken - 1]
    for i in range(0, taken, LANES):
        for at in range(passes):
            score_packed(
                flat, width, i, all_words, words[at], factors[at], bases, at * HEADS * room + begin, room,
                log_groups, at > 0, adds, fresh, kept_sums, ((start + i) * passes + at) * HEADS, passes * HEADS,
            )  # fmt: skip
        count = min(taken - i, LANES)
        put_keys(fresh, 0, count, kept_keys, start + i)
        put_names(flat, i, NAME, begin * finalize_groups, kept, start + i)
        put_scores(fresh, count, flat, i, NAME, begin * finalize_groups, own)


@kernel()
def log2(power):
    """Return the logarithm of a power of two."""
    log = 0
    while 1 << log < power:
        log += 1
    return log


@kernel()
def locate(listed, count, kept, finalize_groups, places, shift, groups, chosen, span_of):
    """Fills groups, chosen and span_of with the numbers, the places in pools and the spans of the first `count` listed
    entries of `kept`; the last stands for what is missing to a multiple of LANES, in `listed`, too."""
    log_groups = log2(finalize_groups)
    for i in range(count):
        group = kept[listed[i]]
        span = group >> log_groups
        groups[i], span_of[i] = group, span
        chosen[i] = ((places[span] + shift - span) << log_groups) + group
    for i in range(count, (count + LANES - 1) // LANES * LANES):
        listed[i], groups[i], chosen[i], span_of[i] = (
            listed[count - 1], groups[count - 1], chosen[count - 1], span_of[count - 1]
        )  # fmt: skip


@kernel()
def read_listed(
    begin, end, count, pool, num_bytes, scale, words, doubled, factors, bases, adds, listed, groups, chosen, span_of,
    fresh, own, kept_keys, kept_sums,
):  # fmt: skip
    """Score entries begin .. end - 1 of `count` that are listed and located by num_bytes more bytes of `pool`: as
    `read_kept`, in its lists, or where it is `doubled`, the last that is read, in `own` alone."""
    passes = words.shape[0]
    room, stride = len(bases) // (passes * HEADS), passes * HEADS
    sums, keys = np.empty(LANES * HEADS, np.int16), np.empty(LANES, np.uint32)
    for i in range(begin, end, LANES):
        for ahead in range(min(i + LISTED_AHEAD, count), min(i + LISTED_AHEAD + LANES, count)):
            ask_for(pool, chosen[ahead] * num_bytes, num_bytes)
            ask_for(scale, chosen[ahead], 1)
        number = min(end - i, LANES)
        for at in range(passes):
            score_listed(
                pool, chosen, i, num_bytes, scale, span_of, words[at], doubled, factors[at], bases, at * HEADS * room,
                room, at > 0, adds, fresh, kept_sums, at * HEADS, stride, listed, sums,
            )  # fmt: skip
            if not doubled:
                for lane in range(number):
                    for r in range(HEADS):
                        kept_sums[listed[i + lane] * stride + at * HEADS + r] = sums[lane * HEADS + r]
        put_scores(fresh, number, groups, i, ALL_BITS, 0, own)
        if not doubled:
            put_keys(fresh, 0, number, keys, 0)
            for lane in range(number):
                kept_keys[listed[i + lane]] = keys[lane]


@kernel()
def new_lists(rows, groups, chunks, passes):
    """Return the lists that the stages of some rows leave for the next: keys uint32 of all groups, 0 where there is
    nothing to choose; `marks` and `starts` of `choose_first`, and the last start of what is listed; kept, kept_keys and
    kept_sums of `read_kept`; listed, groups, chosen and span_of of `locate`."""
    room = groups + LANES * chunks
    return (
        np.empty((rows, groups), np.uint32), np.empty((rows, groups // LANES), np.uint16),
        np.empty((rows, chunks + 2), np.int64), np.empty((rows, room), np.int32), np.empty((rows, room), np.uint32),
        np.empty((rows, room * passes * HEADS), np.int16), np.empty((rows, room + LANES), np.int32),
        np.empty((rows, room + LANES), np.int32), np.empty((rows, room + LANES), np.int64),
        np.empty((rows, room + LANES), np.int32),
    )  # fmt: skip


@kernel()
def score_some(
    progress, phase, first_row, some, mean, mean_scale, scale, codes, later, second, second_scale, lengths,
    cascaded, rescored, dims, size, head_dim, finalize_groups, per_unit, states, places, words, queries, factors,
    shifts, adds, bases, lists, estimate,
):  # fmt: skip
    """The stages of `score_units` for `some` rows from first_row on, from a phase on; lists (`new_lists`) begin with
    the first of these."""
    kv_heads = estimate.shape[1]
    spans, parts, any_rescored = states.shape[1], len(dims), rescored.max() > 0
    first_bytes = (dims[0] + 7) // 8
    per_task = max(CHUNK_GROUPS // finalize_groups, 1)
    chunks = (spans + per_task - 1) // per_task
    keys, marks, starts, kept, kept_keys, kept_sums, listed, groups, chosen, span_of = lists
    spare, fresh = np.empty(kept.shape[1] + LANES, np.uint32), np.empty(LANES, np.float32)
    packed = np.empty((head_dim // 16 + 3, per_task * finalize_groups + LANES), np.int32)
    while True:
        task = take(progress, phase)
        if task >= some * chunks:
            break
        row, begin = first_row + task // chunks, task % chunks * per_task
        b, h = row // kv_heads, row % kv_heads
        call_by_name(score_first, (
            begin, min(begin + per_task, spans), mean, mean_scale, scale, codes, first_bytes,
            finalize_groups, states[b], places[b], h * per_unit, words[row], queries[row], factors[row, :, 0],
            shifts[row], adds and parts == 1 and not any_rescored, (lengths[b] + size - 1) // size, bases[row],
            estimate[b, h], keys[row - first_row],
        ))  # fmt: skip
        finish(progress, phase)
    wait(progress, phase, some * chunks)
    phase += 1
    if parts == 1 and not any_rescored:
        return

    # the second part of codes; where there is but one, a rescoring bit alone, of which the sums are found here
    later_bytes, last = (dims[1] // 8 if parts > 1 else 0), min(parts - 1, 1)
    while True:
        task = take(progress, phase)
        if task >= some:
            break
        row = first_row + task
        number = cascaded[0, row // kv_heads] if parts > 1 else rescored[row // kv_heads]
        call_by_name(choose_first, (
            keys[task], number, marks[task], starts[task, : chunks + 1], per_task * finalize_groups, spare,
        ))  # fmt: skip
        finish(progress, phase)
    wait(progress, phase, some)
    if progress[0, FAILED]:  # nor marks
        return
    phase += 1
    while True:
        task = take(progress, phase)
        if task >= some * chunks:
            break
        place, begin = task // chunks, task % chunks * per_task
        row = first_row + place
        b, h = row // kv_heads, row % kv_heads
        call_by_name(read_kept, (
            begin, min(begin + per_task, spans), starts[place, task % chunks], scale, codes, first_bytes, later[0],
            later_bytes, finalize_groups, places[b], h * per_unit, words[row], factors[row, :, last], bases[row],
            adds and parts == 2 and not any_rescored, marks[place], packed, fresh, estimate[b, h],
            kept[place], kept_keys[place], kept_sums[place],
        ))  # fmt: skip
        finish(progress, phase)
    wait(progress, phase, some * chunks)
    phase += 1

    # a third part, and the rescoring bit, of what is listed of these
    first_word, whole_word = 0, 0
    for part in range(parts):
        first_word = whole_word
        whole_word += (dims[part] + 8 * WORD - 1) // (8 * WORD)
    for level in range(2 if parts == 3 else 3, 4 if any_rescored else 3):
        doubled = level == 3
        pool, own_scale = (second, second_scale) if doubled else (later[1], scale)
        num_bytes, word = ((head_dim + 7) // 8, whole_word) if doubled else (dims[2] // 8, first_word)
        numbers = rescored if doubled else cascaded[1]
        while True:
            task = take(progress, phase)
            if task >= some:
                break
            row = first_row + task
            total = starts[task, chunks]
            count = list_best(kept_keys[task], total, numbers[row // kv_heads], spare, listed[task])
            if not doubled:
                kept_keys[task, :total] = 0  # those of what is listed follow, and rescoring chooses among these alone
            starts[task, chunks + 1] = count
            locate(
                listed[task], count, kept[task], finalize_groups, places[row // kv_heads], row % kv_heads * per_unit,
                groups[task], chosen[task], span_of[task],
            )  # fmt: skip
            for i in range(min(LISTED_AHEAD, count)):
                ask_for(pool, chosen[task, i] * num_bytes, num_bytes)
                ask_for(own_scale, chosen[task, i], 1)
            finish(progress, phase)
        wait(progress, phase, some)
        if progress[0, FAILED]:  # nor lists
            return
        phase += 1
        pieces = (max(numbers.max(), 1) + LISTED_GROUPS - 1) // LISTED_GROUPS
        while True:
            task = take(progress, phase)
            if task >= some * pieces:
                break
            place, begin = task // pieces, task % pieces * LISTED_GROUPS
            row = first_row + place
            count = starts[place, chunks + 1]
            call_by_name(read_listed, (
                begin, min(begin + LISTED_GROUPS, count), count, pool, num_bytes, own_scale,
                words[row, :, word * WORD_TABLE :], doubled, factors[row, :, parts if doubled else 2], bases[row],
                adds and doubled == any_rescored, listed[place], groups[place], chosen[place], span_of[place], fresh,
                estimate[row // kv_heads, row % kv_heads], kept_keys[place], kept_sums[place],
            ))  # fmt: skip
            finish(progress, phase)
        wait(progress, phase, some * pieces)
        phase += 1


@kernel()
def take_heads(q, row, kv_heads, repeat, at, own_q):
    """Copies the query heads of pass `at` over row (b, h) to own_q [HEADS, D]; places without a head repeat the first,
    and a sum forgets them."""
    for r in range(HEADS):
        head = row % kv_heads * repeat + at * HEADS + (r if at * HEADS + r < repeat else 0)
        for d in range(q.shape[2]):
            own_q[r, d] = q[row // kv_heads, head, d]


@kernel()
def score_units(
    progress, together, q, k, k_strides, adds, mean, mean_scale, scale, codes, later, second, second_scale,
    fill, table, lengths, cascaded, rescored, signs, blocks, block_scales, dims, size, finalized, per_unit, states,
    places, words, queries, factors, shifts, bases, lists, estimate, chosen,
):  # fmt: skip
    """Fills estimate [B, Hkv, G] for q [B, Hq, D] float32 unscaled. The fields of `summaries.rq` flat, `later` the
    second and the third part of codes; cascaded [parts - 1, B] groups are read further, rescored [B] get the rescoring
    bit (0: none); dims of each part; `finalized` tokens are summarised together, per_unit times a unit. Where it `adds`
    (`SelectionConfig.combine` of a sum), k and k_strides, K as of `attend`, are asked for the logits of first tokens.
    blocks and block_scales of `rotate`.

    Between the phases: states [B, spans] uint8 and places [B, spans] int64; of each row (b, h) and pass of HEADS query
    heads words int8, queries [.., HEADS, D] and factors [.., parts + 1, HEADS] float32 of `prepare`, shifts [.., HEADS]
    float32, which are added to all scores of a head, and bases [rows, passes * HEADS * (spans + LANES)] float32. One
    phase, and then another: each row is one thread's, and what is read again still lies in its caches. Or, `together`,
    all threads take each stage of all rows, whose lists (`new_lists`) follow: one phase of the first stage, two of the
    second (or of what the rescoring bit needs of a code of one part), of the third and of the rescoring bit.

    chosen, the arguments of `select_topk` after estimate and a progress of a phase a row: unless `together`, a row is
    selected once it is scored, its phase says when, and this returns before all are. Nothing is selected where the
    first of them is empty."""
    batch, num_heads, head_dim = q.shape
    _, kv_heads, groups = estimate.shape
    repeat, rows, passes = num_heads // kv_heads, batch * kv_heads, words.shape[1]
    shrink = np.float32(1 / np.sqrt(head_dim))
    total = batch + rows * passes
    own_q = np.empty((HEADS, head_dim), np.float32)
    k_row, most = np.empty(DOT_ROWS + PREFETCH_ROWS, np.int64), np.zeros(HEADS, np.float32)
    # one query head a lane of a pass
    anchors = np.empty((passes, DOT_ROWS * HEADS), np.float32)
    while True:
        task = take(progress, 0)
        if task >= total:
            break
        if task < batch:
            place_spans(fill, table[task], lengths[task], kv_heads, finalized, per_unit, states[task], places[task])
        else:
            row, at = (task - batch) // passes, (task - batch) % passes
            shifts[row, at] = np.float32(np.log(size))
            if adds:
                k_row[:] = table[row // kv_heads, 0] * k_strides[0] + row % kv_heads * k_strides[1]
                middle = np.float32(0)
                for every in range(passes):
                    take_heads(q, row, kv_heads, repeat, every, own_q)
                    dots(k, k_row, DOT_ROWS, head_dim, own_q.reshape(-1), anchors[every], most)
                    for r in range(min(repeat - every * HEADS, HEADS)):
                        anchors[every, r] *= shrink
                        middle += anchors[every, r] / np.float32(repeat)
                for r in range(HEADS):
                    apart = min(max(anchors[at, r] - middle, -NEAR), NEAR)
                    shifts[row, at, r] = shifts[row, at, r] - middle - apart if at * HEADS + r < repeat else NO_HEAD
            take_heads(q, row, kv_heads, repeat, at, own_q)
            call_by_name(prepare, (
                own_q, shrink, signs, blocks, block_scales, dims, words[row, at], queries[row, at], factors[row, at],
            ))  # fmt: skip
        finish(progress, 0)
    wait(progress, 0, total)
    if progress[0, FAILED]:  # places may not be filled
        return

    finalize_groups = finalized // size
    # of literal numbers a function is compiled for each
    zero, one, selects = np.int64(0), np.int64(1), len(chosen[0]) > 0
    if together:
        call_by_name(score_some, (
            progress, one, zero, rows, mean, mean_scale, scale, codes, later, second, second_scale, lengths,
            cascaded, rescored, dims, size, head_dim, finalize_groups, per_unit, states, places, words, queries,
            factors, shifts, adds, bases, lists, estimate,
        ))  # fmt: skip
        return
    own = new_lists(one, groups, lists[2].shape[1] - 2, passes)
    room = room_of_rows(groups if selects else zero)
    while True:
        row = take(progress, 1)
        if row >= rows:
            break
        call_by_name(score_some, (
            np.zeros((MOST_PHASES, progress.shape[1]), np.int64), zero, row, one, mean, mean_scale, scale,
            codes, later, second, second_scale, lengths, cascaded, rescored, dims, size, head_dim, finalize_groups,
            per_unit, states, places, words, queries, factors, shifts, adds, bases, own, estimate,
        ))  # fmt: skip
        if selects:
            call_by_name(select_row, (row, estimate, *chosen[:-1], *room))
            finish(chosen[-1], row)
        finish(progress, 1)
    if not selects:
        wait(progress, 1, rows)
