"""Vector instructions for codes about a unit's mean, as numba intrinsics written in LLVM's terms (see `vectors`).

Fast scan (Andre et al., VLDB 2015; FAISS): what each nibble of a code adds to a rounded query is a whole number within
int8, looked up in a register. Here four bytes of a group's code are one 32-bit lane, whose four low (or high) nibbles
look up four tables of sixteen at once (vpermb) and are summed by one instruction (vpdpbusd). With AVX2 alone the same
bytes of sixteen groups look one table up (pshufb) and are added in pairs (pmaddubsw). A CPU without these looks the
same tables up in memory. All these sums are exact, so every CPU has the same; the products with means are floats'.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from eps_core.cpu.best_vectors import _repeated
from eps_core.cpu.vectors import (
    _FEATURES,
    HEADS,
    LANES,
    PERMUTES,
    PERMUTES_EIGHT,
    _broadcast,
    _call,
    _data,
    _exp,
    _f32,
    _fma,
    _from_half,
    _i32,
    _i64,
    _int64,
    _load,
    _log,
    _look_up,
    _shuffle,
    _splat,
    _store,
    _sums,
    _transposed,
    _vector,
)
from eps_core.summaries.base import LARGEST_ESTIMATE

WORD = 4  # bytes of a code that are looked up together
WORD_TABLE = 2 * HEADS * 16 * WORD  # bytes of the tables of a word: both nibbles of each byte, for four heads
SPANS = 4  # whose means are multiplied together
# spans and lanes of a mean that a pass takes: their sums with four heads fill the registers; changes speed, and a float
# sum's last bits
MEAN_SPANS, MEAN_LANES = (4, LANES) if PERMUTES else (2, LANES // 2)
# whether one instruction looks 64 bytes up in a table of 64 (vpermb) and another adds them four by four
SCANS = PERMUTES and {"+avx512vbmi", "+avx512vnni"} <= set(_FEATURES)
# whether one looks 32 up in two tables of 16 (pshufb) and another adds them two by two, where it cannot look up 64
SHUFFLES = PERMUTES_EIGHT and not SCANS
_i8, _i16 = ir.IntType(8), ir.IntType(16)


# ---------------------------------------------------------------------------------------------------- sums of look-ups


def _new_sums(builder):
    """Sums of four heads for each of sixteen groups, all 0: a vector a head; two, the first of groups below eight, of
    bytes 0 and 2 in one half and of 1 and 3 in the other, the second of the others; or the heads of a group side by
    side."""
    if SHUFFLES:
        kept = [cgutils.alloca_once(builder, _vector(_i16)) for _ in range(2 * HEADS)]
        for one in kept:
            builder.store(ir.Constant(_vector(_i16), [0] * LANES), one)
        return kept
    if SCANS:
        kept = [cgutils.alloca_once(builder, _vector(_i32)) for _ in range(HEADS)]
        for one in kept:
            builder.store(_repeated(0), one)
        return kept
    held = cgutils.alloca_once(builder, _vector(_i32, HEADS), size=_i64(LANES))
    for lane in range(LANES):
        builder.store(ir.Constant(_vector(_i32, HEADS), [0] * HEADS), builder.gep(held, [_i64(lane)]))
    return [held]


def _add_word(builder, word, table, kept):
    """Adds what a word of four bytes of sixteen groups adds: table as `scan_planes` says."""
    if SHUFFLES:
        _add_planes(builder, word, table, kept)
        return
    if not SCANS:
        four, held = _vector(_i32, HEADS), cgutils.alloca_once(builder, word.type)
        builder.store(word, held)
        with cgutils.for_range(builder, _i64(LANES)) as each:
            own = builder.gep(kept[0], [each.index])
            bits = builder.load(builder.gep(builder.bitcast(held, _i32.as_pointer()), [each.index]))
            total = builder.load(own)
            for nibble in range(2 * WORD):
                value = builder.and_(builder.lshr(bits, _i32(4 * nibble)), _i32(15))
                row = builder.add(builder.zext(value, _i64), _i64((nibble % 2 * WORD + nibble // 2) * 16))
                entry = _load(builder, builder.gep(table, [builder.mul(row, _i64(HEADS))]), HEADS, _i8)
                total = builder.add(total, builder.sext(entry, four))
            builder.store(total, own)
        return
    bytes_type = _vector(_i8, 64)
    look_up = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(bytes_type, [bytes_type] * 2), "llvm.x86.avx512.permvar.qi.512"
    )
    add_four = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_vector(_i32), [_vector(_i32)] * 3), "llvm.x86.avx512.vpdpbusd.512"
    )
    for side in range(2):
        nibbles = builder.lshr(word, _repeated(4)) if side else word
        # byte j of a word looks in the j-th sixteen
        index = builder.or_(builder.and_(nibbles, _repeated(0x0F0F0F0F)), _repeated(0x30201000))
        index = builder.bitcast(index, bytes_type)
        for r, one in enumerate(kept):
            place = builder.gep(table, [_i64((side * HEADS + r) * 16 * WORD)])
            entries = builder.call(look_up, [_load(builder, place, 64, _i8), index])
            entries = builder.bitcast(entries, _vector(_i32))
            builder.store(builder.call(add_four, [builder.load(one), _repeated(0x01010101), entries]), one)


def _add_planes(builder, word, table, kept):
    """`_add_word` where SHUFFLES: a byte of sixteen groups is half a register."""
    half, sums = _vector(_i8, 2 * LANES), _vector(_i16)
    look_up = cgutils.get_or_insert_function(builder.module, ir.FunctionType(half, [half] * 2), "llvm.x86.avx2.pshuf.b")
    add_two = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(sums, [half] * 2), "llvm.x86.avx2.pmadd.ub.sw"
    )
    ones, low_bits = (ir.Constant(half, [value] * 2 * LANES) for value in (1, 15))
    stored = builder.bitcast(word, _vector(_i8, 4 * LANES))
    planes = [
        _shuffle(builder, stored, stored, [WORD * group + j for j in pair for group in range(LANES)])
        for pair in ((0, 1), (2, 3))
    ]
    # of two vectors, half by half, the first (last) eight bytes of each, taken in turns
    turns = [[at + side for at in (*range(first, first + 8), *range(LANES + first, LANES + first + 8))
              for side in (0, 2 * LANES)] for first in (0, 8)]  # fmt: skip
    for side in range(2):
        if side:
            pairs = (builder.bitcast(plane, sums) for plane in planes)
            planes = [builder.bitcast(builder.lshr(pair, ir.Constant(sums, [4] * LANES)), half) for pair in pairs]
        indices = [builder.and_(plane, low_bits) for plane in planes]
        for r in range(HEADS):
            entries = []
            for pair, index in enumerate(indices):
                place = builder.gep(table, [_i64(((side * HEADS + r) * WORD + 2 * pair) * 16)])
                entries.append(builder.call(look_up, [_load(builder, place, 2 * LANES, _i8), index]))
            for one, turn in zip(kept[2 * r : 2 * r + 2], turns, strict=True):
                more = builder.call(add_two, [ones, _shuffle(builder, entries[0], entries[1], turn)])
                builder.store(builder.add(builder.load(one), more), one)


def _by_head(builder, kept):
    """The sums as a vector of sixteen groups for each of four heads."""
    if SHUFFLES:
        sums, halves = [], ([*range(8), *range(LANES, LANES + 8)], [*range(8, LANES), *range(LANES + 8, 2 * LANES)])
        for r in range(HEADS):
            below, above = (builder.load(one) for one in kept[2 * r : 2 * r + 2])
            total = builder.add(*(_shuffle(builder, below, above, half) for half in halves))
            sums.append(builder.sext(total, _vector(_i32)))
        return sums
    if SCANS:
        return [builder.load(one) for one in kept]
    sums = [ir.Constant(_vector(_i32), ir.Undefined) for _ in range(HEADS)]
    for lane in range(LANES):
        own = builder.load(builder.gep(kept[0], [_i64(lane)]))
        for r in range(HEADS):
            sums[r] = builder.insert_element(sums[r], builder.extract_element(own, _i32(r)), _i32(lane))
    return sums


# --------------------------------------------------------------------------------------------- the words of a code


def _plane_word(builder, data, stride, num_planes, first, clipped: bool):
    """Bytes first .. first + 3 of sixteen groups as their words: plane j begins at data + j stride."""
    held = cgutils.alloca_once(builder, _vector(_i8, 64))

    def apart():
        planes = []
        for j in range(WORD):
            plane = builder.add(first, _i64(j))
            if clipped:  # past the last plane entries are 0
                last = builder.sub(num_planes, _i64(1))
                plane = builder.select(builder.icmp_signed("<", plane, num_planes), plane, last)
            planes.append(_load(builder, builder.gep(data, [builder.mul(plane, stride)]), LANES, _i8))
        low, high = (_shuffle(builder, x, y, [*range(2 * LANES)]) for x, y in (planes[:2], planes[2:]))
        builder.store(_shuffle(builder, low, high, [*range(4 * LANES)]), held)

    if clipped:
        apart()
    else:
        with builder.if_else(builder.icmp_signed("==", stride, _i64(LANES))) as (together, otherwise):
            with together:
                whole = builder.gep(data, [builder.mul(first, stride)])
                builder.store(_load(builder, whole, 4 * LANES, _i8), held)
            with otherwise:
                apart()
    planes = builder.load(held)
    picks = [LANES * (byte % WORD) + byte // WORD for byte in range(4 * LANES)]
    return builder.bitcast(_shuffle(builder, planes, planes, picks), _vector(_i32))


def _over_planes(builder, data, stride, num_planes, use):
    """use(number, word) for the words of sixteen groups whose bytes lie byte by byte."""
    whole = builder.and_(num_planes, _i64(-WORD))
    with cgutils.for_range_slice(builder, _i64(0), whole, _i64(WORD)) as (first, _):
        use(builder.udiv(first, _i64(WORD)), _plane_word(builder, data, stride, num_planes, first, False))
    with builder.if_then(builder.icmp_signed("<", whole, num_planes), likely=False):
        use(builder.udiv(whole, _i64(WORD)), _plane_word(builder, data, stride, num_planes, whole, True))


def _in_words(builder, vectors):
    """Vectors of sixteen words that hold as many consecutive words of each of sixteen groups, a power of two, as
    vectors of one word of all sixteen."""
    if len(vectors) == 1:
        return vectors
    even, odd = ([*range(side, 2 * LANES, 2)] for side in (0, 1))
    pairs = list(zip(vectors[::2], vectors[1::2], strict=True))
    first, second = (_in_words(builder, [_shuffle(builder, x, y, picks) for x, y in pairs]) for picks in (even, odd))
    return [word for pair in zip(first, second, strict=True) for word in pair]


def _over_rows(builder, data, num_bytes, use):
    """use(number, word) for the words of sixteen groups whose bytes lie group by group, num_bytes each, a power of
    two."""
    for size, kind in ((1, _i8), (2, _i16)):
        with builder.if_then(builder.icmp_signed("==", num_bytes, _i64(size)), likely=False):
            use(_i64(0), builder.zext(_load(builder, data, LANES, kind), _vector(_i32)))
    all_words = builder.udiv(num_bytes, _i64(WORD))
    for words in (1, 2):
        with builder.if_then(builder.icmp_signed("==", all_words, _i64(words))):
            vectors = [_load(builder, builder.gep(data, [_i64(4 * LANES * at)]), LANES, _i32) for at in range(words)]
            for j, word in enumerate(_in_words(builder, vectors)):
                use(_i64(j), word)
    fours = builder.and_(all_words, _i64(-4))
    with cgutils.for_range_slice(builder, _i64(0), fours, _i64(4)) as (first, _):
        here = builder.mul(first, _i64(WORD))
        rows = [builder.gep(data, [builder.add(builder.mul(num_bytes, _i64(lane)), here)]) for lane in range(LANES)]
        for j, word in enumerate(_transposed(builder, rows, 4)):
            use(builder.add(first, _i64(j)), word)


def _over_listed(builder, rows, num_bytes, use):
    """use(number, word) for the words of sixteen groups whose num_bytes bytes begin at sixteen pointers."""
    all_words = builder.udiv(num_bytes, _i64(WORD))
    fours, twos = builder.and_(all_words, _i64(-4)), builder.and_(all_words, _i64(-2))
    rest = builder.and_(num_bytes, _i64(WORD - 1))
    for words, first, end in ((4, _i64(0), fours), (2, fours, twos), (1, twos, all_words)):
        with cgutils.for_range_slice(builder, first, end, _i64(words)) as (word, _):
            here = builder.mul(word, _i64(WORD))
            columns = _transposed(builder, [builder.gep(row, [here]) for row in rows], words)
            for j, column in enumerate(columns):
                use(builder.add(word, _i64(j)), column)
    with builder.if_then(builder.icmp_signed("!=", rest, _i64(0)), likely=False):
        held = cgutils.alloca_once_value(builder, _repeated(0))
        lanes, start = builder.bitcast(held, _i8.as_pointer()), builder.mul(all_words, _i64(WORD))
        for lane, row in enumerate(rows):
            with cgutils.for_range(builder, rest) as each:
                byte = builder.load(builder.gep(row, [builder.add(start, each.index)]))
                builder.store(byte, builder.gep(lanes, [builder.add(each.index, _i64(lane * WORD))]))
        use(all_words, builder.load(held))


# ------------------------------------------------------------------------------------------------------------ estimates


def _byte_scale(builder, stored):
    """Scales kept in one byte (`to_byte` of the summaries), sixteen words, as float32."""
    shifted = builder.shl(builder.trunc(stored, _vector(_i16)), ir.Constant(_vector(_i16), [7] * LANES))
    return _from_half(builder, shifted)


def _larger(builder, first, second):
    """The larger of numbers that are none of them NaN."""
    return builder.select(builder.fcmp_ordered(">", first, second), first, second)


def _log_sum(builder, each_score):
    """log sum exp of sixteen scores of each head, finite ones."""
    most = each_score[0]
    for score in each_score[1:]:
        most = _larger(builder, most, score)
    total = _splat(0.0)
    for score in each_score:
        total = builder.fadd(total, _exp(builder, builder.fsub(score, most)))
    return builder.fadd(most, _log(builder, total))


def _estimates(builder, sums, scales, factor_data, offsets, more, adds, score_data):
    """Sixteen scores: max over four heads r of offsets[r] + (scales sums[r]) factors[r], LARGEST_ESTIMATE for what is
    not finite, or log sum exp over them where it `adds`; with `more`, of what stands at score_data, too, where they are
    stored."""
    factors, best, all_of, each_score = _load(builder, factor_data, HEADS, _f32), None, None, []
    for r, one in enumerate(sums):
        factor = _broadcast(builder, builder.extract_element(factors, _i32(r)))
        # a scale of four bits times a whole number is exact
        each_score.append(_fma(builder, builder.fmul(scales, builder.sitofp(one, scales.type)), factor, offsets[r]))
    # one that is not finite makes the sum of all so, which hardly ever happens
    for score in each_score:
        all_of = score if all_of is None else builder.fadd(all_of, score)
        best = score if best is None else _larger(builder, best, score)
    finite = builder.fcmp_ordered("<", _call(builder, "fabs", all_of), _splat(float("inf")))
    slow = builder.icmp_unsigned("!=", builder.bitcast(finite, _i16), ir.Constant(_i16, 0xFFFF))
    result = cgutils.alloca_once_value(builder, best)
    held = [cgutils.alloca_once_value(builder, score) for score in each_score]
    with builder.if_then(slow, likely=False):
        best = None
        for score, kept in zip(each_score, held, strict=True):
            finite = builder.fcmp_ordered("<", _call(builder, "fabs", score), _splat(float("inf")))
            score = builder.select(finite, score, _splat(LARGEST_ESTIMATE))
            builder.store(score, kept)
            best = score if best is None else _larger(builder, best, score)
        builder.store(best, result)
    with builder.if_then(adds):
        builder.store(_log_sum(builder, [builder.load(kept) for kept in held]), result)
    with builder.if_then(more, likely=False):
        before, now = _load(builder, score_data, LANES, _f32), builder.load(result)
        builder.store(_larger(builder, now, before), result)
        with builder.if_then(adds):
            builder.store(_log_sum(builder, [before, now]), result)
    _store(builder, builder.load(result), score_data)


@intrinsic
def scan_planes(typing_context, planes, at, stride, num_planes, scale, scale_at, table, factors, bases, base_at,
                base_stride, again, adds, scores, scores_at):  # fmt: skip
    """scores[scores_at + i] = max over four heads r of bases[base_at + r base_stride] + scale[scale_at + i] n
    factors[r], for sixteen groups i, where n is the whole number that table says their codes add for head r. Codes are
    `num_planes` bytes at planes[at + j stride + i]. table: WORD_TABLE bytes a word of four bytes: entry [side, r, j,
    value] where SCANS or SHUFFLES, else [side, j, value, r]. LARGEST_ESTIMATE stands for what is not finite. Where it
    `adds`, log sum exp takes the place of max. With `again`, of what scores held, too."""

    def codegen(context, builder, signature, args):
        kinds = signature.args
        plane_data, scale_data, table_data, factor_data, base_data, score_data = (
            _data(context, builder, kinds[i], args[i]) for i in (0, 4, 6, 7, 8, 13)
        )
        first, step, number, scale_first, base_first, base_step, score_first = (
            _int64(context, builder, kinds[i], args[i]) for i in (1, 2, 3, 5, 9, 10, 14)
        )
        kept = _new_sums(builder)

        def add(number, word):
            _add_word(builder, word, builder.gep(table_data, [builder.mul(number, _i64(WORD_TABLE))]), kept)

        _over_planes(builder, builder.gep(plane_data, [first]), step, number, add)
        offsets = []
        for r in range(HEADS):
            place = builder.add(base_first, builder.mul(base_step, _i64(r)))
            offsets.append(_broadcast(builder, builder.load(builder.gep(base_data, [place]))))
        stored = builder.zext(_load(builder, builder.gep(scale_data, [scale_first]), LANES, _i8), _vector(_i32))
        _estimates(
            builder, _by_head(builder, kept), _byte_scale(builder, stored), factor_data, offsets,
            context.is_true(builder, kinds[11], args[11]), context.is_true(builder, kinds[12], args[12]),
            builder.gep(score_data, [score_first]),
        )  # fmt: skip
        return context.get_dummy_value()

    return (
        types.void(planes, at, stride, num_planes, scale, scale_at, table, factors, bases, base_at, base_stride, again,
                   adds, scores, scores_at),
        codegen,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------- means


@intrinsic
def mean_bases(typing_context, means, mean_scale, first, second, third, fourth, num_bytes, bits, queries, shifts,
               bases, base_at, base_stride):  # fmt: skip
    """bases[base_at + r base_stride + i] = shifts[r] + mean_scale[s_i] sum over the codes c of a unit's mean, num_bytes
    at means[s_i num_bytes ..] of 4 or 8 `bits`, of (c - 2^(bits - 1)) queries[side, r, byte] for four spans s_i,
    `first` to `fourth`, and four heads r: `side` 1 is the high nibble of a byte of two codes."""

    def codegen(context, builder, signature, args):
        kinds = signature.args
        mean_data, scale_data, query_data, base_data = (
            _data(context, builder, kinds[i], args[i]) for i in (0, 1, 8, 10)
        )
        number, width, base_first, base_step = (_int64(context, builder, kinds[i], args[i]) for i in (6, 7, 11, 12))
        spans = [_int64(context, builder, kinds[i], args[i]) for i in range(2, 2 + SPANS)]
        rows = [builder.gep(mean_data, [builder.mul(span, number)]) for span in spans]
        whole = builder.and_(number, _i64(-MEAN_LANES))
        floats = _vector(_f32, MEAN_LANES)
        # of each span and head; the rest of a mean that fills no register in the first lane
        sums = [[cgutils.alloca_once(builder, floats) for _ in range(SPANS)] for _ in range(HEADS)]
        for kept in (one for each in sums for one in each):
            builder.store(_splat(0.0, MEAN_LANES), kept)

        def repeated(value: int):
            return ir.Constant(_vector(_i32, MEAN_LANES), [value] * MEAN_LANES)

        def codes_of(stored, sides: int):
            if sides == 1:
                return [builder.sitofp(builder.sub(stored, repeated(128)), floats)]
            if PERMUTES:
                values = ir.Constant(_vector(_f32), [ir.Constant(_f32, float(x - 8)) for x in range(LANES)])
                return [_look_up(builder, values, x) for x in (stored, builder.lshr(stored, _repeated(4)))]
            halves = builder.and_(stored, repeated(15)), builder.lshr(stored, repeated(4))
            return [builder.sitofp(builder.sub(half, repeated(8)), floats) for half in halves]

        def add(first_span: int, stored, byte, sides: int, lanes: int):
            """stored: words of each of MEAN_SPANS spans, of which the first `lanes` count."""
            codes = [codes_of(one, sides) for one in stored]
            for side in range(sides):
                for r in range(HEADS):
                    at = builder.gep(query_data, [builder.add(builder.mul(number, _i64(side * HEADS + r)), byte)])
                    own = _load(builder, at, lanes, _f32)
                    if lanes == 1:
                        own = builder.insert_element(_splat(0.0, MEAN_LANES), own, _i32(0))
                    for i in range(MEAN_SPANS):
                        kept = sums[r][first_span + i]
                        builder.store(_fma(builder, codes[i][side], own, builder.load(kept)), kept)

        def over(sides: int):
            for first_span in range(0, SPANS, MEAN_SPANS):
                some = rows[first_span : first_span + MEAN_SPANS]
                with cgutils.for_range_slice(builder, _i64(0), whole, _i64(MEAN_LANES)) as (byte, _):
                    stored = [_load(builder, builder.gep(row, [byte]), MEAN_LANES, _i8) for row in some]
                    stored = [builder.zext(one, repeated(0).type) for one in stored]
                    add(first_span, stored, byte, sides, MEAN_LANES)
                with cgutils.for_range_slice(builder, whole, number, _i64(1)) as (byte, _):
                    stored = [builder.zext(builder.load(builder.gep(row, [byte])), _i32) for row in some]
                    stored = [builder.insert_element(repeated(0), one, _i32(0)) for one in stored]
                    add(first_span, stored, byte, sides, 1)

        with builder.if_else(builder.icmp_signed("==", width, _i64(4))) as (halves, bytes_alone):
            with halves:
                over(2)
            with bytes_alone:
                over(1)
        total = _sums(builder, [builder.load(one) for each in sums for one in each])
        scales = ir.Constant(_vector(_i16, SPANS), ir.Undefined)
        for i, span in enumerate(spans):
            scales = builder.insert_element(scales, builder.load(builder.gep(scale_data, [span])), _i32(i))
        scales = _from_half(builder, scales)
        scales = _shuffle(builder, scales, scales, [*range(SPANS)] * HEADS)
        by = _load(builder, _data(context, builder, kinds[9], args[9]), HEADS, _f32)
        by = _shuffle(builder, by, by, [r for r in range(HEADS) for _ in range(SPANS)])
        total = _fma(builder, total, scales, by)
        for r in range(HEADS):
            place = builder.add(base_first, builder.mul(base_step, _i64(r)))
            own = _shuffle(builder, total, total, [*range(r * SPANS, (r + 1) * SPANS)])
            _store(builder, own, builder.gep(base_data, [place]))
        return context.get_dummy_value()

    return (
        types.void(means, mean_scale, first, second, third, fourth, num_bytes, bits, queries, shifts, bases, base_at,
                   base_stride),
        codegen,
    )  # fmt: skip
