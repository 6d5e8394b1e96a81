"""Vector instructions for codes about a unit's mean, as numba intrinsics written in LLVM's terms (see `vectors`).

Fast scan (Andre et al., VLDB 2015; FAISS): what each nibble of a code adds to a rounded query is a whole number within
int8, looked up in a register. Here four bytes of a group's code are one 32-bit lane, whose four low (or high) nibbles
look up four tables of sixteen at once (vpermb) and are summed by one instruction (vpdpbusd). With AVX2 alone the same
bytes of sixteen groups look one table up (pshufb) and are added in pairs (pmaddubsw). A CPU without these looks the
same tables up in memory. All these sums are exact, so every CPU has the same; the products with means are floats'.
"""

from functools import partial, reduce

from llvmlite import ir
from numba import types
from numba.core import cgutils

from eps_core.cpu.best_vectors import _append, _ordered
from eps_core.cpu.vectors import (
    COUNT,
    FEATURES,
    HEADS,
    LANES,
    PERMUTES,
    PERMUTES_EIGHT,
    emits,
    f32,
    i8,
    i16,
    i32,
    i64,
    repeated,
    splat,
    vector_of,
)
from eps_core.summaries.base import LARGEST_ESTIMATE, MEAN_MOST

WORD = 4  # bytes of a code that are looked up together
WORD_TABLE = 2 * HEADS * 16 * WORD  # bytes of the tables of a word: both nibbles of each byte, for four heads
NAME = 0xFFFF  # of a packed word: the number of a group; its scale lies above
SPANS = 4  # whose means are multiplied together
# spans and lanes of a mean that a pass takes: their sums with four heads fill the registers; changes speed, and a float
# sum's last bits
MEAN_SPANS, MEAN_LANES = (4, LANES) if PERMUTES else (2, LANES // 2)
# whether one instruction looks 64 bytes up in a table of 64 (vpermb) and another adds them four by four
SCANS = PERMUTES and {"+avx512vbmi", "+avx512vnni"} <= set(FEATURES)
# whether one looks 32 up in two tables of 16 (pshufb) and another adds them two by two, where it cannot look up 64
SHUFFLES = PERMUTES_EIGHT and not SCANS


# ---------------------------------------------------------------------------------------------------- sums of look-ups


def _new_sums(builder):
    """Sums of four heads for each of sixteen groups, all 0: a vector a head; two, the first of groups below eight, of
    bytes 0 and 2 in one half and of 1 and 3 in the other, the second of the others; or the heads of a group side by
    side."""
    if SHUFFLES:
        return [cgutils.alloca_once_value(builder, repeated(0, element=i16)) for _ in range(2 * HEADS)]
    if SCANS:
        return [cgutils.alloca_once_value(builder, repeated(0)) for _ in range(HEADS)]
    held = cgutils.alloca_once(builder, vector_of(i32, HEADS), size=i64(LANES))
    for lane in range(LANES):
        builder.store(repeated(0, HEADS), builder.at(held, lane))
    return [held]


def _add_word(builder, word, table, kept):
    """Adds what a word of four bytes of sixteen groups adds: table as `scan_planes` says."""
    if SHUFFLES:
        _add_planes(builder, word, table, kept)
        return
    if not SCANS:
        four, held = vector_of(i32, HEADS), cgutils.alloca_once(builder, word.type)
        builder.store(word, held)
        with cgutils.for_range(builder, i64(LANES)) as each:
            own = builder.at(kept[0], each.index)
            bits = builder.load(builder.at(builder.bitcast(held, i32.as_pointer()), each.index))
            total = builder.load(own)
            for nibble in range(2 * WORD):
                value = builder.and_(builder.lshr(bits, i32(4 * nibble)), i32(15))
                row = builder.total(builder.zext(value, i64), (nibble % 2 * WORD + nibble // 2) * 16)
                entry = builder.load_lanes(builder.at(table, (row, HEADS)), HEADS)
                total = builder.add(total, builder.sext(entry, four))
            builder.store(total, own)
        return
    for side in range(2):
        nibbles = builder.lshr(word, repeated(4)) if side else word
        # byte j of a word looks in the j-th sixteen
        index = builder.or_(builder.and_(nibbles, repeated(0x0F0F0F0F)), repeated(0x30201000))
        index = builder.bitcast(index, vector_of(i8, 64))
        for r, one in enumerate(kept):
            place = builder.at(table, (side * HEADS + r) * 16 * WORD)
            entries = builder.load_lanes(place, 64)
            entries = builder.call_named("llvm.x86.avx512.permvar.qi.512", entries.type, entries, index)
            four = builder.load(one), repeated(0x01010101), builder.bitcast(entries, word.type)
            builder.store(builder.call_named("llvm.x86.avx512.vpdpbusd.512", word.type, *four), one)


def _add_planes(builder, word, table, kept):
    """`_add_word` where SHUFFLES: a byte of sixteen groups is half a register."""
    half, sums = vector_of(i8, 2 * LANES), vector_of(i16)
    ones, low_bits = (repeated(value, 2 * LANES, i8) for value in (1, 15))
    stored = builder.bitcast(word, vector_of(i8, 4 * LANES))
    planes = [
        builder.shuffle(stored, stored, [WORD * group + j for j in pair for group in range(LANES)])
        for pair in ((0, 1), (2, 3))
    ]
    # of two vectors, half by half, the first (last) eight bytes of each, taken in turns
    turns = [[at + side for at in (*range(first, first + 8), *range(LANES + first, LANES + first + 8))
              for side in (0, 2 * LANES)] for first in (0, 8)]  # fmt: skip
    for side in range(2):
        if side:
            pairs = (builder.bitcast(plane, sums) for plane in planes)
            planes = [builder.bitcast(builder.lshr(pair, repeated(4, element=i16)), half) for pair in pairs]
        indices = [builder.and_(plane, low_bits) for plane in planes]
        for r in range(HEADS):
            entries = []
            for pair, index in enumerate(indices):
                place = builder.at(table, ((side * HEADS + r) * WORD + 2 * pair) * 16)
                table_of_two = builder.load_lanes(place, 2 * LANES)
                entries.append(builder.call_named("llvm.x86.avx2.pshuf.b", half, table_of_two, index))
            for one, turn in zip(kept[2 * r : 2 * r + 2], turns, strict=True):
                more = builder.call_named("llvm.x86.avx2.pmadd.ub.sw", sums, ones, builder.shuffle(*entries, turn))
                builder.store(builder.add(builder.load(one), more), one)


def _by_head(builder, kept):
    """The sums as a vector of sixteen groups for each of four heads."""
    if SHUFFLES:
        sums, halves = [], ([*range(8), *range(LANES, LANES + 8)], [*range(8, LANES), *range(LANES + 8, 2 * LANES)])
        for r in range(HEADS):
            below, above = (builder.load(one) for one in kept[2 * r : 2 * r + 2])
            total = builder.add(*(builder.shuffle(below, above, half) for half in halves))
            sums.append(builder.sext(total, vector_of(i32)))
        return sums
    if SCANS:
        return [builder.load(one) for one in kept]
    each = [builder.load(builder.at(kept[0], lane)) for lane in range(LANES)]
    return [builder.gathered([builder.extract_element(own, i32(r)) for own in each]) for r in range(HEADS)]


# --------------------------------------------------------------------------------------------- the words of a code


def _plane_word(builder, data, stride, num_planes, first, clipped: bool):
    """Bytes first .. first + 3 of sixteen groups as their words: plane j begins at data + j stride."""
    held = cgutils.alloca_once(builder, vector_of(i8, 64))

    def apart():
        planes = []
        for j in range(WORD):
            plane = builder.total(first, j)
            if clipped:  # past the last plane entries are 0
                last = builder.sub(num_planes, i64(1))
                plane = builder.select(builder.icmp_signed("<", plane, num_planes), plane, last)
            planes.append(builder.load_lanes(builder.at(data, (plane, stride))))
        low, high = (builder.shuffle(x, y, [*range(2 * LANES)]) for x, y in (planes[:2], planes[2:]))
        builder.store(builder.shuffle(low, high, [*range(4 * LANES)]), held)

    if clipped:
        apart()
    else:
        with builder.if_else(builder.icmp_signed("==", stride, i64(LANES))) as (together, otherwise):
            with together:
                whole = builder.at(data, (first, stride))
                builder.store(builder.load_lanes(whole, 4 * LANES), held)
            with otherwise:
                apart()
    planes = builder.load(held)
    picks = [LANES * (byte % WORD) + byte // WORD for byte in range(4 * LANES)]
    return builder.bitcast(builder.shuffle(planes, planes, picks), vector_of(i32))


def _over_planes(builder, data, stride, num_planes, use):
    """use(number, word) for the words of sixteen groups whose bytes lie byte by byte."""
    whole = builder.and_(num_planes, i64(-WORD))
    with builder.steps(0, whole, WORD) as first:
        use(builder.udiv(first, i64(WORD)), _plane_word(builder, data, stride, num_planes, first, False))
    with builder.if_then(builder.icmp_signed("<", whole, num_planes), likely=False):
        use(builder.udiv(whole, i64(WORD)), _plane_word(builder, data, stride, num_planes, whole, True))


def _in_words(builder, vectors):
    """Vectors of sixteen words that hold as many consecutive words of each of sixteen groups, a power of two, as
    vectors of one word of all sixteen."""
    if len(vectors) == 1:
        return vectors
    even, odd = ([*range(side, 2 * LANES, 2)] for side in (0, 1))
    pairs = list(zip(vectors[::2], vectors[1::2], strict=True))
    first, second = (_in_words(builder, [builder.shuffle(x, y, picks) for x, y in pairs]) for picks in (even, odd))
    return [word for pair in zip(first, second, strict=True) for word in pair]


def _over_rows(builder, data, num_bytes, use):
    """use(number, word) for the words of sixteen groups whose bytes lie group by group, num_bytes each, a power of
    two."""
    for size, kind in ((1, i8), (2, i16)):
        with builder.if_then(builder.icmp_signed("==", num_bytes, i64(size)), likely=False):
            use(i64(0), builder.zext(builder.load_lanes(data, LANES, kind), vector_of(i32)))
    all_words = builder.udiv(num_bytes, i64(WORD))
    for words in (1, 2):
        with builder.if_then(builder.icmp_signed("==", all_words, i64(words))):
            vectors = [builder.load_lanes(builder.at(data, 4 * LANES * at), LANES, i32) for at in range(words)]
            for j, word in enumerate(_in_words(builder, vectors)):
                use(i64(j), word)
    fours = builder.and_(all_words, i64(-4))
    with builder.steps(0, fours, 4) as first:
        here = builder.mul(first, i64(WORD))
        rows = [builder.at(data, (num_bytes, lane), here) for lane in range(LANES)]
        for j, word in enumerate(builder.transposed(rows, 4)):
            use(builder.total(first, j), word)


def _over_listed(builder, rows, num_bytes, use):
    """use(number, word) for the words of sixteen groups whose num_bytes bytes begin at sixteen pointers."""
    all_words = builder.udiv(num_bytes, i64(WORD))
    fours, twos = builder.and_(all_words, i64(-4)), builder.and_(all_words, i64(-2))
    rest = builder.and_(num_bytes, i64(WORD - 1))
    for words, first, end in ((4, i64(0), fours), (2, fours, twos), (1, twos, all_words)):
        with builder.steps(first, end, words) as word:
            here = builder.mul(word, i64(WORD))
            columns = builder.transposed([builder.at(row, here) for row in rows], words)
            for j, column in enumerate(columns):
                use(builder.total(word, j), column)
    with builder.if_then(builder.icmp_signed("!=", rest, i64(0)), likely=False):
        held = cgutils.alloca_once_value(builder, repeated(0))
        lanes, start = builder.bitcast(held, i8.as_pointer()), builder.mul(all_words, i64(WORD))
        for lane, row in enumerate(rows):
            with cgutils.for_range(builder, rest) as each:
                byte = builder.load(builder.at(row, start, each.index))
                builder.store(byte, builder.at(lanes, each.index, lane * WORD))
        use(all_words, builder.load(held))


# ------------------------------------------------------------------------------------------------------------ estimates


def _byte_scale(builder, stored):
    """Scales kept in one byte (`to_byte` of the summaries), sixteen words, as float32."""
    return builder.from_half(builder.shl(builder.trunc(stored, vector_of(i16)), repeated(7, element=i16)))


def _log_sum(builder, each_score):
    """log sum exp of sixteen scores of each head, finite ones."""
    most = reduce(builder.larger, each_score)
    masses = (builder.exp(builder.fsub(score, most)) for score in each_score)
    return builder.fadd(most, builder.log(reduce(builder.fadd, masses, splat(0.0))))


def _estimates(builder, sums, scales, factor_data, offsets, more, adds, score_data):
    """Sixteen scores: max over four heads r of offsets[r] + (scales sums[r]) factors[r], LARGEST_ESTIMATE for what is
    not finite, or log sum exp over them where it `adds`; with `more`, of what stands at score_data, too, where they are
    stored."""
    factors, each_score = builder.load_lanes(factor_data, HEADS), []
    for r, one in enumerate(sums):
        factor = builder.broadcast(builder.extract_element(factors, i32(r)))
        # a scale of four bits times a whole number is exact
        each_score.append(builder.fma(builder.fmul(scales, builder.sitofp(one, scales.type)), factor, offsets[r]))
    # one that is not finite makes the sum of all so, which hardly ever happens
    all_of, best = (reduce(join, each_score) for join in (builder.fadd, builder.larger))
    finite = builder.fcmp_ordered("<", builder.call_floats("fabs", all_of), splat(float("inf")))
    slow = builder.icmp_unsigned("!=", builder.bitcast(finite, i16), ir.Constant(i16, 0xFFFF))
    result = cgutils.alloca_once_value(builder, best)
    held = [cgutils.alloca_once_value(builder, score) for score in each_score]
    with builder.if_then(slow, likely=False):
        for score, kept in zip(each_score, held, strict=True):
            finite = builder.fcmp_ordered("<", builder.call_floats("fabs", score), splat(float("inf")))
            builder.store(builder.select(finite, score, splat(LARGEST_ESTIMATE)), kept)
        finite_scores = (builder.load(kept) for kept in held)
        builder.store(reduce(builder.larger, finite_scores), result)
    with builder.if_then(adds):
        builder.store(_log_sum(builder, [builder.load(kept) for kept in held]), result)
    with builder.if_then(more, likely=False):
        before, now = builder.load_lanes(score_data), builder.load(result)
        builder.store(builder.larger(now, before), result)
        with builder.if_then(adds):
            builder.store(_log_sum(builder, [before, now]), result)
    builder.store_lanes(builder.load(result), score_data)


@emits()
def scan_planes(builder, planes, at, stride, num_planes, scale, scale_at, table, factors, bases, base_at,
                base_stride, again, adds, scores, scores_at):  # fmt: skip
    """scores[scores_at + i] = max over four heads r of bases[base_at + r base_stride] + scale[scale_at + i] n
    factors[r], for sixteen groups i, where n is the whole number that table says their codes add for head r. Codes are
    `num_planes` bytes at planes[at + j stride + i]. table: WORD_TABLE bytes a word of four bytes: entry [side, r, j,
    value] where SCANS or SHUFFLES, else [side, j, value, r]. LARGEST_ESTIMATE stands for what is not finite. Where it
    `adds`, log sum exp takes the place of max. With `again`, of what scores held, too."""
    kept = _new_sums(builder)

    def add(number, word):
        _add_word(builder, word, builder.at(table, (number, WORD_TABLE)), kept)

    _over_planes(builder, builder.at(planes, at), stride, num_planes, add)
    offsets = []
    for r in range(HEADS):
        offsets.append(builder.broadcast(builder.load(builder.at(bases, base_at, (base_stride, r)))))
    stored = builder.zext(builder.load_lanes(builder.at(scale, scale_at)), vector_of(i32))
    sums, scales, place = _by_head(builder, kept), _byte_scale(builder, stored), builder.at(scores, scores_at)
    _estimates(builder, sums, scales, factors, offsets, again, adds, place)


# ---------------------------------------------------------------------------------------------------------------- means


@emits()
def mean_bases(builder, means, mean_scale, first, second, third, fourth, head_dim, queries, shifts, bases, base_at,
               base_stride):  # fmt: skip
    """bases[base_at + r base_stride + i] = shifts[r] + mean_scale[s_i] sum over the D codes c of a unit's mean, a byte
    each at means[s_i D ..], of (c - 128) queries[r D + d], for four spans s_i, `first` to `fourth`, and four heads
    r."""
    spans = first, second, third, fourth
    rows = [builder.at(means, (span, head_dim)) for span in spans]
    whole = builder.and_(head_dim, i64(-MEAN_LANES))
    floats = vector_of(f32, MEAN_LANES)
    # of each span and head; the rest of a mean that fills no register in the first lane
    zeros, words = splat(0.0, MEAN_LANES), partial(repeated, lanes=MEAN_LANES)
    sums = [[cgutils.alloca_once(builder, floats) for _ in range(SPANS)] for _ in range(HEADS)]
    for kept in (one for each in sums for one in each):
        builder.store(zeros, kept)

    def add(first_span: int, stored, dim, lanes: int):
        """stored: words of each of MEAN_SPANS spans, of which the first `lanes` count."""
        codes = [builder.sitofp(builder.sub(one, words(MEAN_MOST + 1)), floats) for one in stored]
        for r in range(HEADS):
            own = builder.load_lanes(builder.at(queries, (head_dim, r), dim), lanes)
            if lanes == 1:
                own = builder.insert_element(zeros, own, i32(0))
            for i in range(MEAN_SPANS):
                kept = sums[r][first_span + i]
                builder.store(builder.fma(codes[i], own, builder.load(kept)), kept)

    for first_span in range(0, SPANS, MEAN_SPANS):
        some = rows[first_span : first_span + MEAN_SPANS]
        with builder.steps(0, whole, MEAN_LANES) as dim:
            stored = [builder.load_lanes(builder.at(row, dim), MEAN_LANES) for row in some]
            add(first_span, [builder.zext(one, words(0).type) for one in stored], dim, MEAN_LANES)
        with builder.steps(whole, head_dim) as dim:
            stored = [builder.zext(builder.load(builder.at(row, dim)), i32) for row in some]
            add(first_span, [builder.insert_element(words(0), one, i32(0)) for one in stored], dim, 1)
    total = builder.sums([builder.load(one) for each in sums for one in each])
    scales = builder.from_half(builder.gathered([builder.load(builder.at(mean_scale, span)) for span in spans]))
    scales = builder.shuffle(scales, scales, [*range(SPANS)] * HEADS)
    by = builder.load_lanes(shifts, HEADS)
    by = builder.shuffle(by, by, [r for r in range(HEADS) for _ in range(SPANS)])
    total = builder.fma(total, scales, by)
    for r in range(HEADS):
        own = builder.shuffle(total, total, [*range(r * SPANS, (r + 1) * SPANS)])
        builder.store_lanes(own, builder.at(bases, base_at, (base_stride, r)))


# ---------------------------------------------- of the groups that were kept alone, sixteen at a time wherever they lie


def _appends(builder, marks, mark_at, packed, room, number, taken):
    """Return the `use` that appends a word of what marks[mark_at] names to its row of packed [.., room], of `taken`
    words: rows from `number` on."""
    kept = builder.load(builder.at(marks, mark_at))
    return lambda word_number, word: _append(
        builder, word, kept, builder.at(packed, builder.total((builder.add(number, word_number), room), taken))
    )


@emits(types.int64)
def pack_scales(builder, marks, mark_at, scale, at, first, packed, taken):
    """Appends to packed, which holds `taken` words, first + i + 65536 scale[at + i] of each of sixteen groups i that
    bit i of marks[mark_at] names. Returns how many it then holds."""
    kept = builder.load(builder.at(marks, mark_at))
    stored = builder.zext(builder.load_lanes(builder.at(scale, at)), vector_of(i32))
    names = builder.add(builder.broadcast(builder.trunc(first, i32)), COUNT)
    words = builder.or_(builder.shl(stored, repeated(16)), names)
    _append(builder, words, kept, builder.at(packed, taken))
    return builder.add(taken, builder.zext(builder.ctpop(kept), i64))


@emits()
def pack_planes(builder, marks, mark_at, planes, at, stride, num_planes, packed, room, number, taken):
    """Appends to the rows of packed [.., room] from row `number` on, which hold `taken` words each, the words of those
    of sixteen groups that marks[mark_at] names: a row for each four bytes. Codes as of `scan_planes`."""
    use = _appends(builder, marks, mark_at, packed, room, number, taken)
    _over_planes(builder, builder.at(planes, at), stride, num_planes, use)


@emits()
def pack_rows(builder, marks, mark_at, rows, at, num_bytes, packed, room, number, taken):
    """`pack_planes` of num_bytes bytes a group, a power of two, at rows[at + i num_bytes ..]."""
    use = _appends(builder, marks, mark_at, packed, room, number, taken)
    _over_rows(builder, builder.at(rows, at), num_bytes, use)


def _offsets(builder, base_data, base_step, spans):
    """Return for four heads the bases of sixteen spans, which ascend: base_data[r base_step + span]."""
    first, last = (builder.extract_element(spans, i32(lane)) for lane in (0, LANES - 1))
    held = [cgutils.alloca_once(builder, vector_of(f32)) for _ in range(HEADS)]
    starts = [builder.at(base_data, (base_step, r)) for r in range(HEADS)]

    def one_by_one():
        for start, kept in zip(starts, held, strict=True):
            places = (builder.zext(builder.extract_element(spans, i32(lane)), i64) for lane in range(LANES))
            builder.store(builder.gathered([builder.load(builder.at(start, place)) for place in places]), kept)

    if not (PERMUTES or PERMUTES_EIGHT):
        one_by_one()
        return [builder.load(kept) for kept in held]
    near = builder.icmp_unsigned("<", builder.sub(last, first), i32(LANES))
    with builder.if_else(near, likely=True) as (together, otherwise):
        with together:
            which = builder.sub(spans, builder.broadcast(first))
            for start, kept in zip(starts, held, strict=True):
                entries = builder.load_lanes(builder.at(start, builder.zext(first, i64)))
                builder.store(builder.look_up(entries, which), kept)
        with otherwise:
            one_by_one()
    return [builder.load(kept) for kept in held]


@emits()
def score_packed(builder, packed, room, at, num_words, table, factors, bases, base_at, base_stride, log_groups,
                 again, adds, scores, sums, sums_at, sums_stride):  # fmt: skip
    """`scan_planes` of sixteen groups i that were packed [1 + num_words, room]: words at + i, the first as of
    `pack_scales`, whose numbers ascend; bases of span number >> log_groups at bases[base_at + r base_stride + span].
    What the codes add for head r goes to sums[sums_at + i sums_stride + r], int16."""
    here, kept = builder.at(packed, at), _new_sums(builder)
    with cgutils.for_range(builder, num_words) as each:
        row = builder.mul(builder.total(each.index, 1), room)
        word = builder.load_lanes(builder.at(here, row))
        _add_word(builder, word, builder.at(table, (each.index, WORD_TABLE)), kept)
    names = builder.load_lanes(here)
    spans = builder.lshr(builder.and_(names, repeated(NAME)), builder.broadcast(builder.trunc(log_groups, i32)))
    offsets = _offsets(builder, builder.at(bases, base_at), base_stride, spans)
    numbers = _by_head(builder, kept)
    _put_sums(builder, numbers, builder.at(sums, sums_at), sums_stride)
    scales = _byte_scale(builder, builder.lshr(names, repeated(16)))
    _estimates(builder, numbers, scales, factors, offsets, again, adds, scores)


def _put_sums(builder, sums, data, stride):
    """Sums of four heads of sixteen groups as int16, the heads of a group side by side, groups `stride` apart."""
    low = [builder.and_(one, repeated(0xFFFF)) for one in sums[::2]]
    pairs = [builder.or_(x, builder.shl(y, repeated(16))) for x, y in zip(low, sums[1::2], strict=True)]
    halves = [
        builder.shuffle(pairs[0], pairs[1], [lane + side for lane in range(start, start + 8) for side in (0, LANES)])
        for start in (0, 8)
    ]
    together = builder.icmp_signed("==", stride, i64(HEADS))
    with builder.if_else(together, likely=True) as (side_by_side, apart):
        with side_by_side:
            for j, half in enumerate(halves):
                place = builder.at(data, j * 2 * LANES)
                builder.store(half, builder.bitcast(place, half.type.as_pointer()), align=2)
        with apart:
            for lane in range(LANES):
                own = builder.bitcast(halves[lane // 8], vector_of(i64, 8))
                own = builder.extract_element(own, i32(lane % 8))
                place = builder.at(data, (stride, lane))
                builder.store(own, builder.bitcast(place, i64.as_pointer()), align=2)


def _get_sums(builder, data, places):
    """Return for four heads sixteen sums, each group's at data[place]: `_put_sums`."""
    each = [builder.load(builder.bitcast(builder.at(data, place), i64.as_pointer()), align=2) for place in places]
    words = [builder.bitcast(builder.gathered(half), vector_of(i32)) for half in (each[:8], each[8:])]
    sums = []
    for side in (0, 1):
        pair = builder.shuffle(words[0], words[1], [*range(side, 2 * LANES, 2)])
        sums += [builder.ashr(builder.shl(pair, repeated(16)), repeated(16)), builder.ashr(pair, repeated(16))]
    return sums


@emits()
def score_listed(builder, rows, places, at, num_bytes, scale, spans, table, doubled, factors, bases, base_at,
                 base_stride, again, adds, scores, sums, sums_at, sums_stride, listed, fresh):  # fmt: skip
    """scores of sixteen groups i = at .., as of `scan_planes`, by what is already known, sums[sums_at + listed[i]
    sums_stride + r] for head r, or twice that where it is `doubled`, and by what num_bytes more bytes at rows[places[i]
    num_bytes ..] add; scale[places[i]]; bases of spans[i], which ascend. The new sums go to fresh [16, HEADS] int16."""
    lanes = [builder.total(at, lane) for lane in range(LANES)]
    own_places = [builder.load(builder.at(places, lane)) for lane in lanes]
    kept = _new_sums(builder)

    def add(number, word):
        _add_word(builder, word, builder.at(table, (number, WORD_TABLE)), kept)

    _over_listed(builder, [builder.at(rows, (place, num_bytes)) for place in own_places], num_bytes, add)
    known = []
    for lane in lanes:
        entry = builder.sext(builder.load(builder.at(listed, lane)), i64)
        known.append(builder.total(sums_at, (entry, sums_stride)))
    times = builder.select(doubled, repeated(1), repeated(0))
    before, now = _get_sums(builder, sums, known), _by_head(builder, kept)
    numbers = [builder.add(builder.shl(x, times), y) for x, y in zip(before, now, strict=True)]
    _put_sums(builder, numbers, fresh, i64(HEADS))
    stored = builder.gathered([builder.load(builder.at(scale, place)) for place in own_places])
    scales = _byte_scale(builder, builder.zext(stored, vector_of(i32)))
    offsets = _offsets(builder, builder.at(bases, base_at), base_stride, builder.load_lanes(builder.at(spans, at)))
    _estimates(builder, numbers, scales, factors, offsets, again, adds, scores)


@emits()
def put_scores(builder, scores, count, names, at, mask, base, target):
    """target[base + (names[at + i] & mask)] = scores[i] for i < count <= 16: names int32, mask and base of whole
    numbers."""
    target, own = builder.at(target, base), builder.at(names, at)
    if PERMUTES:
        index = builder.and_(builder.load_lanes(own), builder.broadcast(builder.trunc(mask, i32)))
        inside = builder.icmp_signed("<", COUNT, builder.broadcast(builder.trunc(count, i32)))
        builder.call_named(
            "llvm.x86.avx512.mask.scatter.dps.512", ir.VoidType(), builder.bitcast(target, i8.as_pointer()), inside,
            index, builder.load_lanes(scores), i32(4),
        )  # fmt: skip
        return
    with cgutils.for_range(builder, count) as each:
        name = builder.zext(builder.load(builder.at(own, each.index)), i64)
        value = builder.load(builder.at(scores, each.index))
        builder.store(value, builder.at(target, builder.and_(name, mask)))


@emits()
def put_names(builder, packed, at, mask, base, kept, kept_at):
    """kept[kept_at + i] = base + (packed[at + i] & mask) for sixteen i: int32."""
    mask, base = (builder.broadcast(builder.trunc(one, i32)) for one in (mask, base))
    own = builder.and_(builder.load_lanes(builder.at(packed, at)), mask)
    builder.store_lanes(builder.add(own, base), builder.at(kept, kept_at))


@emits()
def put_keys(builder, scores, at, count, keys, key_at):
    """keys[key_at + i] becomes the key (`best.order`) of scores[at + i] for i < count, and 0 up to the next sixteen."""
    scores, target = builder.at(scores, at), builder.at(keys, key_at)
    with builder.steps(0, count, LANES) as start:
        own = _ordered(builder, builder.load_lanes(builder.at(scores, start)))
        left = builder.broadcast(builder.trunc(builder.sub(count, start), i32))
        inside = builder.icmp_signed("<", COUNT, left)
        builder.store_lanes(builder.select(inside, own, repeated(0)), builder.at(target, start))
