"""Vector instructions for codes about a unit's mean, as numba intrinsics written in LLVM's terms (see `vectors`).

Fast scan (Andre et al., VLDB 2015; FAISS): what each nibble of a code adds to a rounded query is a whole number within
int8, looked up in a register. Here four bytes of a group's code are one 32-bit lane, whose four low (or high) nibbles
look up four tables of sixteen at once (vpermb) and are summed by one instruction (vpdpbusd): all sums are exact, so
every CPU has the same. A CPU without these looks the same tables up in memory.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from eps_core.cpu.vectors import (
    _FEATURES,
    HEADS,
    LANES,
    PERMUTES,
    _broadcast,
    _call,
    _data,
    _f32,
    _fma,
    _from_half,
    _i32,
    _i64,
    _int64,
    _load,
    _over_rows,
    _permuted_sums,
    _row_sums,
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
# whether one instruction looks 64 bytes up in a table of 64 (vpermb) and another adds them four by four
SCANS = PERMUTES and {"+avx512vbmi", "+avx512vnni"} <= set(_FEATURES)
_i8, _i16 = ir.IntType(8), ir.IntType(16)


def _repeated(value: int):
    return ir.Constant(_vector(_i32), [value] * LANES)


def _byte_scale(builder, stored):
    """Scales kept in one byte (`to_byte` of the summaries), a scalar or a vector of i8, as float32."""
    lanes = stored.type.count if isinstance(stored.type, ir.VectorType) else 1
    kind = _i16 if lanes == 1 else _vector(_i16, lanes)
    seven = ir.Constant(_i16, 7) if lanes == 1 else ir.Constant(kind, [7] * lanes)
    return _from_half(builder, builder.shl(builder.zext(stored, kind), seven))


def _or_largest(builder, score, lanes: int):
    finite = builder.fcmp_ordered("<", _call(builder, "fabs", score), _splat(float("inf"), lanes))
    return builder.select(finite, score, _splat(LARGEST_ESTIMATE, lanes))


# ----------------------------------------------------------------------------------------------- rounded queries, exact


def _add_word(builder, word, table, sums):
    """Adds to four heads' sums what a word of four bytes of sixteen groups adds."""
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
        for r, kept in enumerate(sums):
            place = builder.gep(table, [_i64((side * HEADS + r) * 16 * WORD)])
            entries = builder.call(look_up, [_load(builder, place, 64, _i8), index])
            entries = builder.bitcast(entries, _vector(_i32))
            builder.store(builder.call(add_four, [builder.load(kept), _repeated(0x01010101), entries]), kept)


def _in_words(builder, vectors):
    """Vectors of sixteen words that hold as many consecutive words of each of sixteen groups, a power of two, as
    vectors of one word of all sixteen."""
    if len(vectors) == 1:
        return vectors
    even, odd = ([*range(side, 2 * LANES, 2)] for side in (0, 1))
    pairs = list(zip(vectors[::2], vectors[1::2], strict=True))
    first, second = (_in_words(builder, [_shuffle(builder, x, y, picks) for x, y in pairs]) for picks in (even, odd))
    return [word for pair in zip(first, second, strict=True) for word in pair]


def _add_planes(builder, data, stride, num_planes, table, sums):
    """Bytes that lie byte by byte: plane j of sixteen groups begins at data + j stride."""
    wide = _vector(_i32)
    last, whole = builder.sub(num_planes, _i64(1)), builder.and_(num_planes, _i64(-WORD))

    def add(first, clipped: bool):
        word = None
        for j in range(WORD):
            plane = builder.add(first, _i64(j))
            if clipped:  # past the last plane entries are 0
                plane = builder.select(builder.icmp_signed("<", plane, num_planes), plane, last)
            own = _load(builder, builder.gep(data, [builder.mul(plane, stride)]), LANES, _i8)
            own = builder.shl(builder.zext(own, wide), _repeated(8 * j))
            word = own if word is None else builder.or_(word, own)
        at = builder.mul(builder.udiv(first, _i64(WORD)), _i64(WORD_TABLE))
        _add_word(builder, word, builder.gep(table, [at]), sums)

    with cgutils.for_range_slice(builder, _i64(0), whole, _i64(WORD)) as (first, _):
        add(first, clipped=False)
    with builder.if_then(builder.icmp_signed("<", whole, num_planes)):
        add(whole, clipped=True)


def _add_rows(builder, data, num_bytes, table, sums):
    """Bytes that lie group by group, num_bytes each, a power of two."""
    wide = _vector(_i32)
    for size, kind in ((1, _i8), (2, _i16)):
        with builder.if_then(builder.icmp_signed("==", num_bytes, _i64(size))):
            _add_word(builder, builder.zext(_load(builder, data, LANES, kind), wide), table, sums)
    all_words = builder.udiv(num_bytes, _i64(WORD))
    for words in (4, 2, 1):  # a longer code is one of several fours
        fits = builder.icmp_signed(">=" if words == 4 else "==", all_words, _i64(words))
        with builder.if_then(fits), cgutils.for_range_slice(builder, _i64(0), all_words, _i64(words)) as (word, _):
            if words == 4:
                # of codes of more than four words, four words of each group at a time
                rows = [
                    builder.gep(data, [builder.add(builder.mul(num_bytes, _i64(lane)), builder.mul(word, _i64(4)))])
                    for lane in range(LANES)
                ]
                quads = [_load(builder, row, 4, _i32) for row in rows]
                vectors = [_joined(builder, quads[at : at + 4]) for at in range(0, LANES, 4)]
            else:
                vectors = [
                    _load(builder, builder.gep(data, [_i64(4 * LANES * at)]), LANES, _i32) for at in range(words)
                ]
            for j, column in enumerate(_in_words(builder, vectors)):
                at = builder.mul(builder.add(word, _i64(j)), _i64(WORD_TABLE))
                _add_word(builder, column, builder.gep(table, [at]), sums)


def _joined(builder, quads):
    """Four vectors of four as one of sixteen."""
    low, high = (_shuffle(builder, x, y, [*range(8)]) for x, y in (quads[:2], quads[2:]))
    return _shuffle(builder, low, high, [*range(16)])


def _add_bytes(builder, data, stride, num_bytes, table, kept):
    """Of one group, by tables in memory: `num_bytes` bytes `stride` apart; kept: a vector of four heads."""
    four = _vector(_i32, HEADS)
    with cgutils.for_range(builder, num_bytes) as each:
        byte = builder.zext(builder.load(builder.gep(data, [builder.mul(each.index, stride)])), _i64)
        word, j = builder.udiv(each.index, _i64(WORD)), builder.urem(each.index, _i64(WORD))
        for side in range(2):
            value = builder.and_(builder.lshr(byte, _i64(4 * side)), _i64(15))
            place = builder.add(builder.mul(j, _i64(16)), value)
            place = builder.add(builder.mul(place, _i64(HEADS)), _i64(side * HEADS * 16 * WORD))
            place = builder.add(place, builder.mul(word, _i64(WORD_TABLE)))
            entry = builder.sext(_load(builder, builder.gep(table, [place]), HEADS, _i8), four)
            builder.store(builder.add(builder.load(kept), entry), kept)


def _scan(kinds, args, context, builder, add_vectors, add_bytes, seen: bool):
    """The code of `scan_planes` and `scan_rows` behind their codes: args from `scale` on."""
    scale_data, table_data, factor_data, base_data, sum_data, score_data = (
        _data(context, builder, kinds[i], args[i]) for i in (0, 2, 3, 4, 6, 9)
    )
    scale_first, base_first, sum_first = (_int64(context, builder, kinds[i], args[i]) for i in (1, 5, 7))
    scale_data, sum_data = builder.gep(scale_data, [scale_first]), builder.gep(sum_data, [sum_first])
    factors = _load(builder, factor_data, HEADS, _f32)
    offsets = _load(builder, builder.gep(base_data, [base_first]), HEADS, _f32)
    places = [builder.gep(sum_data, [_i64(LANES * r)]) for r in range(HEADS)]

    def number(r: int):
        return builder.sext(_load(builder, places[r], LANES, _i16), _vector(_i32))

    if SCANS:
        kept = [cgutils.alloca_once(builder, _vector(_i32)) for _ in range(HEADS)]
        for r, one in enumerate(kept):
            builder.store(number(r) if seen else _repeated(0), one)
        add_vectors(table_data, kept)
        sums = [builder.load(one) for one in kept]
        for one, place in zip(sums, places, strict=True):
            builder.store(
                builder.trunc(one, _vector(_i16)), builder.bitcast(place, _vector(_i16).as_pointer()), align=2
            )
    else:
        with cgutils.for_range(builder, _i64(LANES)) as each:
            lanes = [builder.gep(place, [each.index]) for place in places]
            one = cgutils.alloca_once(builder, _vector(_i32, HEADS))
            builder.store(ir.Constant(_vector(_i32, HEADS), [0] * HEADS), one)
            add_bytes(table_data, each.index, one)
            for r, lane in enumerate(lanes):
                new = builder.trunc(builder.extract_element(builder.load(one), _i32(r)), _i16)
                builder.store(builder.add(new, builder.load(lane)) if seen else new, lane)
        sums = [number(r) for r in range(HEADS)]

    scales, best, all_of = _byte_scale(builder, _load(builder, scale_data, LANES, _i8)), None, None
    each_score = []
    for r, one in enumerate(sums):
        factor, base = (_broadcast(builder, builder.extract_element(part, _i32(r))) for part in (factors, offsets))
        # a scale of four bits times a whole number is exact
        product = builder.fmul(builder.fmul(scales, builder.sitofp(one, scales.type)), factor)
        each_score.append(builder.fadd(base, product))
    # one that is not finite makes the sum of all so, which hardly ever happens
    for score in each_score:
        all_of = score if all_of is None else builder.fadd(all_of, score)
        best = score if best is None else _call(builder, "maxnum", best, score)
    before = _load(builder, score_data, LANES, _f32)
    more = context.is_true(builder, kinds[8], args[8])
    finite = builder.fcmp_ordered("<", _call(builder, "fabs", all_of), _splat(float("inf")))
    slow = builder.icmp_unsigned("!=", builder.bitcast(finite, _i16), ir.Constant(_i16, 0xFFFF))
    result = cgutils.alloca_once_value(builder, best)
    with builder.if_then(slow, likely=False):
        best = None
        for score in each_score:
            score = _or_largest(builder, score, LANES)
            best = score if best is None else _call(builder, "maxnum", best, score)
        builder.store(best, result)
    best = builder.load(result)
    _store(builder, builder.select(more, _call(builder, "maxnum", best, before), best), score_data)


@intrinsic
def scan_planes(typing_context, planes, at, stride, num_planes, scale, scale_at, table, factors, bases, base_at, sums,
                sums_at, again, scores):  # fmt: skip
    """scores[i] = max over four heads r of bases[base_at + r] + scale[scale_at + i] factors[r] n, for sixteen groups i,
    where n = sums[sums_at + 16 r + i], int16, becomes the whole number that table says their codes add for head r.
    Codes are `num_planes` bytes at planes[at + j stride + i]. table: WORD_TABLE bytes a word of four bytes: entry
    [side, r, j, value] where SCANS, else [side, j, value, r]. LARGEST_ESTIMATE stands for what is not finite. With
    `again`, the larger of that and what scores held."""

    def codegen(context, builder, signature, args):
        kinds = signature.args
        data = _data(context, builder, kinds[0], args[0])
        first, step, number = (_int64(context, builder, kinds[i], args[i]) for i in (1, 2, 3))
        data = builder.gep(data, [first])
        _scan(
            kinds[4:], args[4:], context, builder,
            lambda table, kept: _add_planes(builder, data, step, number, table, kept),
            lambda table, i, kept: _add_bytes(builder, builder.gep(data, [i]), step, number, table, kept), False,
        )  # fmt: skip
        return context.get_dummy_value()

    return (
        types.void(planes, at, stride, num_planes, scale, scale_at, table, factors, bases, base_at, sums, sums_at,
                   again, scores),
        codegen,
    )  # fmt: skip


@intrinsic
def scan_rows(typing_context, rows, at, num_bytes, scale, scale_at, table, factors, bases, base_at, sums, sums_at,
              again, scores):  # fmt: skip
    """`scan_planes` of one more part of codes, which adds to `sums`: num_bytes bytes at rows[at + i num_bytes ..], a
    power of two."""

    def codegen(context, builder, signature, args):
        kinds = signature.args
        data = _data(context, builder, kinds[0], args[0])
        first, number = (_int64(context, builder, kinds[i], args[i]) for i in (1, 2))
        data = builder.gep(data, [first])

        def add_bytes(table, i, kept):
            _add_bytes(builder, builder.gep(data, [builder.mul(i, number)]), _i64(1), number, table, kept)

        _scan(
            kinds[3:], args[3:], context, builder,
            lambda table, kept: _add_rows(builder, data, number, table, kept), add_bytes, True,
        )  # fmt: skip
        return context.get_dummy_value()

    return (
        types.void(rows, at, num_bytes, scale, scale_at, table, factors, bases, base_at, sums, sums_at, again, scores),
        codegen,
    )


# -------------------------------------------------------------------------------------------------- queries as they are


@intrinsic
def mean_dots(typing_context, means, start, num_bytes, bits, queries, dots):
    """dots[r] = sum over the codes c of a unit's mean, num_bytes at means[start ..] of 4 or 8 `bits`, of (c - 2^(bits -
    1)) queries[side, r, byte] for four heads r: `side` 1 is the high nibble of a byte of two codes."""

    def codegen(context, builder, signature, args):
        kinds = signature.args
        mean_data, query_data, dot_data = (_data(context, builder, kinds[i], args[i]) for i in (0, 4, 5))
        first, number, width = (_int64(context, builder, kinds[i], args[i]) for i in (1, 2, 3))
        mean_data = builder.gep(mean_data, [first])
        whole = builder.and_(number, _i64(-LANES))
        sums = [cgutils.alloca_once(builder, _vector(_f32)) for _ in range(HEADS)]
        rest = cgutils.alloca_once(builder, _vector(_f32, HEADS))

        def query(side: int, r: int, byte, lanes: int):
            at = builder.add(builder.mul(number, _i64(side * HEADS + r)), byte)
            return _load(builder, builder.gep(query_data, [at]), lanes, _f32)

        def number_of(code, middle: int):
            kind = code.type
            less = ir.Constant(kind, middle) if kind == _i32 else _repeated(middle)
            return builder.sitofp(builder.sub(code, less), _f32 if kind == _i32 else _vector(_f32))

        def codes_of(stored, sides: int):
            if sides == 1:
                return [number_of(stored, 128)]
            kind = stored.type
            if PERMUTES and kind != _i32:
                look_up = cgutils.get_or_insert_function(
                    builder.module, ir.FunctionType(_vector(_f32), [_vector(_f32), kind]),
                    "llvm.x86.avx512.permvar.sf.512",
                )  # fmt: skip
                values = ir.Constant(_vector(_f32), [ir.Constant(_f32, float(x - 8)) for x in range(LANES)])
                # only the lowest four bits of a lane count
                return [builder.call(look_up, [values, x]) for x in (stored, builder.lshr(stored, _repeated(4)))]
            low, four = (ir.Constant(kind, x) if kind == _i32 else _repeated(x) for x in (15, 4))
            return [number_of(builder.and_(stored, low), 8), number_of(builder.lshr(stored, four), 8)]

        def add(sides: int):
            with cgutils.for_range_slice(builder, _i64(0), whole, _i64(LANES)) as (byte, _):
                stored = builder.zext(_load(builder, builder.gep(mean_data, [byte]), LANES, _i8), _vector(_i32))
                for side, values in enumerate(codes_of(stored, sides)):
                    for r, kept in enumerate(sums):
                        own = query(side, r, byte, LANES)
                        builder.store(_fma(builder, values, own, builder.load(kept)), kept)
            with cgutils.for_range_slice(builder, whole, number, _i64(1)) as (byte, _):
                stored = builder.zext(builder.load(builder.gep(mean_data, [byte])), _i32)
                for side, value in enumerate(codes_of(stored, sides)):
                    own = ir.Constant(_vector(_f32, HEADS), ir.Undefined)
                    for r in range(HEADS):
                        own = builder.insert_element(own, query(side, r, byte, 1), _i32(r))
                    builder.store(_fma(builder, _broadcast(builder, value, HEADS), own, builder.load(rest)), rest)

        for kept in sums:
            builder.store(_splat(0.0), kept)
        builder.store(_splat(0.0, HEADS), rest)
        with builder.if_else(builder.icmp_signed("==", width, _i64(4))) as (halves, bytes_alone):
            with halves:
                add(2)
            with bytes_alone:
                add(1)
        total = builder.fadd(_sums(builder, [builder.load(kept) for kept in sums]), builder.load(rest))
        _store(builder, total, dot_data)
        return context.get_dummy_value()

    return types.void(means, start, num_bytes, bits, queries, dots), codegen


@intrinsic
def copy_bytes(typing_context, source, at, stride, count, target, to):
    """target[to + j] = source[at + j stride] for j < count: no index is checked or wrapped."""

    def codegen(context, builder, signature, args):
        kinds = signature.args
        first, step, number, start = (_int64(context, builder, kinds[i], args[i]) for i in (1, 2, 3, 5))
        read = builder.gep(_data(context, builder, kinds[0], args[0]), [first])
        write = builder.gep(_data(context, builder, kinds[4], args[4]), [start])
        with cgutils.for_range(builder, number) as each:
            one = builder.load(builder.gep(read, [builder.mul(each.index, step)]))
            builder.store(one, builder.gep(write, [each.index]))
        return context.get_dummy_value()

    return types.void(source, at, stride, count, target, to), codegen


@intrinsic
def finer_rows(
    typing_context, signs, second, rows, count, num_bytes, table, scale, bases, base_rows, again, scores, steps
):
    """scores[i] = max over four heads r of bases[base_rows[i] + r] + scale[rows[i]] steps[r] (the sum of what num_bytes codes at
    signs[i num_bytes ..] add and half of those at second[rows[i] num_bytes ..]), for i < count, a multiple of 16, by
    the tables of `score_rows`. LARGEST_ESTIMATE stands for what is not finite. With `again`, the larger of that and
    what scores held."""

    def codegen(context, builder, signature, args):
        kinds = signature.args
        sign_data, second_data, row_data, table_data, scale_data, base_data, score_data = (
            _data(context, builder, kinds[i], args[i]) for i in (0, 1, 2, 5, 6, 7, 10)
        )
        place_data, step_data = (_data(context, builder, kinds[i], args[i]) for i in (8, 11))
        num_rows, num = (_int64(context, builder, kinds[i], args[i]) for i in (3, 4))
        more = context.is_true(builder, kinds[9], args[9])

        def row_of(index):
            return builder.load(builder.gep(row_data, [index]))

        def base_of(index):
            return builder.gep(base_data, [builder.load(builder.gep(place_data, [index]))])

        def sixteen(start):
            lanes = [builder.add(start, _i64(lane)) for lane in range(LANES)]
            places = [row_of(lane) for lane in lanes]
            sums = _permuted_sums(builder, sign_data, [builder.mul(lane, num) for lane in lanes], num, table_data)
            finer = _permuted_sums(builder, second_data, [builder.mul(row, num) for row in places], num, table_data)
            stored = ir.Constant(_vector(_i8), ir.Undefined)
            for lane, row in enumerate(places):
                stored = builder.insert_element(stored, builder.load(builder.gep(scale_data, [row])), _i32(lane))
            factor, best = _byte_scale(builder, stored), None
            offsets = _transposed(builder, [base_of(lane) for lane in lanes], HEADS)
            for r in range(HEADS):
                total = _fma(builder, finer[r], _splat(0.5), sums[r])
                step = _broadcast(builder, builder.load(builder.gep(step_data, [_i64(r)])))
                score = _fma(builder, builder.fmul(factor, total), step, builder.bitcast(offsets[r], total.type))
                score = _or_largest(builder, score, LANES)
                best = score if best is None else _call(builder, "maxnum", best, score)
            pointer = builder.gep(score_data, [start])
            before = _load(builder, pointer, LANES, _f32)
            _store(builder, builder.select(more, _call(builder, "maxnum", best, before), best), pointer)

        def single(index):
            row = row_of(index)
            total = _row_sums(builder, builder.gep(sign_data, [builder.mul(index, num)]), num, table_data)
            finer = _row_sums(builder, builder.gep(second_data, [builder.mul(row, num)]), num, table_data)
            total = _fma(builder, finer, _splat(0.5, HEADS), total)
            factor = _broadcast(builder, _byte_scale(builder, builder.load(builder.gep(scale_data, [row]))), HEADS)
            base = _load(builder, base_of(index), HEADS, _f32)
            step = _load(builder, step_data, HEADS, _f32)
            score = _or_largest(builder, _fma(builder, builder.fmul(factor, total), step, base), HEADS)
            for picks in ([2, 3, 0, 1], [1, 0, 3, 2]):
                score = _call(builder, "maxnum", score, _shuffle(builder, score, score, picks))
            pointer = builder.gep(score_data, [index])
            best, before = builder.extract_element(score, _i32(0)), builder.load(pointer)
            larger = builder.and_(more, builder.fcmp_ordered(">", before, best))
            builder.store(builder.select(larger, before, best), pointer)

        _over_rows(builder, num_rows, num, sixteen, single)
        return context.get_dummy_value()

    return types.void(
        signs, second, rows, count, num_bytes, table, scale, bases, base_rows, again, scores, steps
    ), codegen


# ------------------------------------------------------------------------------------------------------------ selection


@intrinsic
def any_kept(typing_context, keys, start):
    """Whether any of the sixteen keys from `start` on is not 0."""

    def codegen(context, builder, signature, args):
        pointer = builder.gep(
            _data(context, builder, signature.args[0], args[0]), [_int64(context, builder, signature.args[1], args[1])]
        )
        kept = builder.icmp_unsigned("!=", _load(builder, pointer, LANES, _i32), _repeated(0))
        return builder.icmp_unsigned("!=", builder.bitcast(kept, _i16), ir.Constant(_i16, 0))

    return types.boolean(keys, start), codegen


@intrinsic
def put_kept(typing_context, fresh, scores, keys, start, every):
    """Of sixteen groups from `start` on, those with a key, or `every` one, take fresh [16] as their score, and its key
    (`best.order`)."""

    def codegen(context, builder, signature, args):
        kinds = signature.args
        fresh_data, score_data, key_data = (_data(context, builder, kinds[i], args[i]) for i in (0, 1, 2))
        first = _int64(context, builder, kinds[3], args[3])
        every = context.is_true(builder, kinds[4], args[4])
        at, key_at = builder.gep(score_data, [first]), builder.gep(key_data, [first])
        value, before = _load(builder, fresh_data, LANES, _f32), _load(builder, at, LANES, _f32)
        keys = _load(builder, key_at, LANES, _i32)
        taken = builder.icmp_unsigned("!=", builder.select(every, _repeated(1), keys), _repeated(0))
        _store(builder, builder.select(taken, value, before), at)
        _store(builder, builder.select(taken, _ordered(builder, value), _repeated(0)), key_at)
        return context.get_dummy_value()

    return types.void(fresh, scores, keys, start, every), codegen


def _ordered(builder, values):
    """Sixteen float32 as uint32 in their order, -0 as 0."""
    bits, sign = builder.bitcast(values, _vector(_i32)), _repeated(0x80000000)
    negative = builder.icmp_unsigned(">", bits, sign)
    return builder.select(negative, builder.xor(bits, _repeated(0xFFFFFFFF)), builder.or_(bits, sign))


@intrinsic
def count_above(typing_context, keys, count, most):
    """How many of the first `count` keys, uint32, are above `most`."""

    def codegen(context, builder, signature, args):
        data, num = _data(context, builder, signature.args[0], args[0]), _int64(context, builder, types.int64, args[1])
        high = context.cast(builder, args[2], signature.args[2], types.uint32)
        held = cgutils.alloca_once_value(builder, _i64(0))
        one = builder.insert_element(ir.Constant(_vector(_i32), ir.Undefined), high, _i32(0))
        spread, whole = _shuffle(builder, one, one, [0] * LANES), builder.and_(num, _i64(-LANES))

        def add(above):
            builder.store(builder.add(builder.load(held), builder.zext(above, _i64)), held)

        with cgutils.for_range_slice(builder, _i64(0), whole, _i64(LANES)) as (at, _):
            own = _load(builder, builder.gep(data, [at]), LANES, _i32)
            add(builder.ctpop(builder.bitcast(builder.icmp_unsigned(">", own, spread), _i16)))
        with cgutils.for_range_slice(builder, whole, num, _i64(1)) as (at, _):
            add(builder.icmp_unsigned(">", builder.load(builder.gep(data, [at])), high))
        return builder.load(held)

    return types.int64(keys, types.int64, most), codegen


@intrinsic
def squeeze(typing_context, keys, first, end, least, most, values, target, taken):
    """Appends to target, which holds `taken`, values[i] (i itself where values is None) of every i from `first` to `end
    - 1` with least <= keys[i] <= most, in order; returns how many it then holds. keys, least and most are uint32;
    target has room for LANES more than it takes."""

    def codegen(context, builder, signature, args):
        kinds = signature.args
        key_data, target_data = (_data(context, builder, kinds[i], args[i]) for i in (0, 6))
        start, stop, already = (_int64(context, builder, kinds[i], args[i]) for i in (1, 2, 7))
        low, high = (context.cast(builder, args[i], kinds[i], types.uint32) for i in (3, 4))
        indexed = isinstance(kinds[5], types.NoneType)
        value_data = None if indexed else _data(context, builder, kinds[5], args[5])
        span = builder.sub(high, low)
        held = cgutils.alloca_once_value(builder, already)
        whole = builder.add(start, builder.and_(builder.sub(stop, start), _i64(-LANES)))
        if PERMUTES:
            words = _vector(_i32)

            def spread(scalar):
                one = builder.insert_element(ir.Constant(words, ir.Undefined), scalar, _i32(0))
                return _shuffle(builder, one, one, [0] * LANES)

            pack = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(words, [words, words, _vector(ir.IntType(1))]),
                "llvm.x86.avx512.mask.compress.v16i32",
            )  # fmt: skip
            lows, spans = spread(low), spread(span)
            with cgutils.for_range_slice(builder, start, whole, _i64(LANES)) as (at, _):
                own = _load(builder, builder.gep(key_data, [at]), LANES, _i32)
                inside = builder.icmp_unsigned("<=", builder.sub(own, lows), spans)
                if indexed:
                    value = builder.add(spread(builder.trunc(at, _i32)), ir.Constant(words, [*range(LANES)]))
                else:
                    value = _load(builder, builder.gep(value_data, [at]), LANES, _i32)
                packed = builder.call(pack, [value, _repeated(0), inside])
                now = builder.load(held)
                _store(builder, packed, builder.gep(target_data, [now]))
                number = builder.ctpop(builder.bitcast(inside, _i16))
                builder.store(builder.add(now, builder.zext(number, _i64)), held)
        else:
            whole = start
        with cgutils.for_range_slice(builder, whole, stop, _i64(1)) as (at, _):
            own = builder.load(builder.gep(key_data, [at]))
            inside = builder.icmp_unsigned("<=", builder.sub(own, low), span)
            value = builder.trunc(at, _i32) if indexed else _load(builder, builder.gep(value_data, [at]), 1, _i32)
            now = builder.load(held)
            pointer = builder.bitcast(builder.gep(target_data, [now]), _i32.as_pointer())
            builder.store(value, pointer)
            builder.store(builder.add(now, builder.zext(inside, _i64)), held)
        return builder.load(held)

    return types.int64(keys, first, end, least, most, values, target, taken), codegen
