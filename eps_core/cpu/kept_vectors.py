"""Vector instructions for what is read on of codes about a unit's mean: of the groups that were kept alone, sixteen of
them at a time wherever they lie. Numba intrinsics written in LLVM's terms (see `vectors` and `unit_vectors`)."""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from eps_core.cpu.best_vectors import _append, _ordered, _repeated, _spread
from eps_core.cpu.unit_vectors import (
    WORD_TABLE,
    _add_word,
    _by_head,
    _byte_scale,
    _estimates,
    _i8,
    _new_sums,
    _over_listed,
    _over_planes,
    _over_rows,
)
from eps_core.cpu.vectors import (
    HEADS,
    LANES,
    PERMUTES,
    PERMUTES_EIGHT,
    _data,
    _f32,
    _i32,
    _i64,
    _int64,
    _load,
    _look_up,
    _shuffle,
    _store,
    _vector,
)

NAME = 0xFFFF  # of a packed word: the number of a group; its scale lies above


def _places(builder, data, room, taken):
    """Return where `_append` puts the words of row `number` of an array [.., room] that holds `taken` of each."""
    return lambda number: builder.gep(data, [builder.add(builder.mul(number, room), taken)])


@intrinsic
def pack_scales(typing_context, marks, mark_at, scale, at, first, packed, taken):
    """Appends to packed, which holds `taken` words, first + i + 65536 scale[at + i] of each of sixteen groups i that
    bit i of marks[mark_at] names. Returns how many it then holds."""

    def codegen(context, builder, signature, args):
        kinds = signature.args
        mark_data, scale_data, data = (_data(context, builder, kinds[i], args[i]) for i in (0, 2, 5))
        mark_first, start, number, already = (_int64(context, builder, kinds[i], args[i]) for i in (1, 3, 4, 6))
        kept = builder.load(builder.gep(mark_data, [mark_first]))
        stored = builder.zext(_load(builder, builder.gep(scale_data, [start]), LANES, _i8), _vector(_i32))
        names = builder.add(_spread(builder, builder.trunc(number, _i32)), ir.Constant(_vector(_i32), [*range(LANES)]))
        words = builder.or_(builder.shl(stored, _repeated(16)), names)
        _append(builder, words, kept, builder.gep(data, [already]))
        return builder.add(already, builder.zext(builder.ctpop(kept), _i64))

    return types.int64(marks, mark_at, scale, at, first, packed, taken), codegen


@intrinsic
def pack_planes(typing_context, marks, mark_at, planes, at, stride, num_planes, packed, room, number, taken):
    """Appends to the rows of packed [.., room] from row `number` on, which hold `taken` words each, the words of those
    of sixteen groups that marks[mark_at] names: a row for each four bytes. Codes as of `scan_planes`."""

    def codegen(context, builder, signature, args):
        kinds = signature.args
        mark_data, plane_data, data = (_data(context, builder, kinds[i], args[i]) for i in (0, 2, 6))
        mark_first, first, step, count, width, row, already = (
            _int64(context, builder, kinds[i], args[i]) for i in (1, 3, 4, 5, 7, 8, 9)
        )
        kept = builder.load(builder.gep(mark_data, [mark_first]))
        place = _places(builder, data, width, already)
        _over_planes(
            builder, builder.gep(plane_data, [first]), step, count,
            lambda word_number, word: _append(builder, word, kept, place(builder.add(row, word_number))),
        )  # fmt: skip
        return context.get_dummy_value()

    return types.void(marks, mark_at, planes, at, stride, num_planes, packed, room, number, taken), codegen


@intrinsic
def pack_rows(typing_context, marks, mark_at, rows, at, num_bytes, packed, room, number, taken):
    """`pack_planes` of num_bytes bytes a group, a power of two, at rows[at + i num_bytes ..]."""

    def codegen(context, builder, signature, args):
        kinds = signature.args
        mark_data, row_data, data = (_data(context, builder, kinds[i], args[i]) for i in (0, 2, 5))
        mark_first, first, count, width, row, already = (
            _int64(context, builder, kinds[i], args[i]) for i in (1, 3, 4, 6, 7, 8)
        )
        kept = builder.load(builder.gep(mark_data, [mark_first]))
        place = _places(builder, data, width, already)
        _over_rows(
            builder, builder.gep(row_data, [first]), count,
            lambda word_number, word: _append(builder, word, kept, place(builder.add(row, word_number))),
        )  # fmt: skip
        return context.get_dummy_value()

    return types.void(marks, mark_at, rows, at, num_bytes, packed, room, number, taken), codegen


def _offsets(builder, base_data, base_step, spans):
    """Return for four heads the bases of sixteen spans, which ascend: base_data[r base_step + span]."""
    first, last = (builder.extract_element(spans, _i32(lane)) for lane in (0, LANES - 1))
    held = [cgutils.alloca_once(builder, _vector(_f32)) for _ in range(HEADS)]
    starts = [builder.gep(base_data, [builder.mul(base_step, _i64(r))]) for r in range(HEADS)]

    def one_by_one():
        for start, kept in zip(starts, held, strict=True):
            own = ir.Constant(_vector(_f32), ir.Undefined)
            for lane in range(LANES):
                place = builder.zext(builder.extract_element(spans, _i32(lane)), _i64)
                own = builder.insert_element(own, builder.load(builder.gep(start, [place])), _i32(lane))
            builder.store(own, kept)

    if not (PERMUTES or PERMUTES_EIGHT):
        one_by_one()
        return [builder.load(kept) for kept in held]
    near = builder.icmp_unsigned("<", builder.sub(last, first), _i32(LANES))
    with builder.if_else(near, likely=True) as (together, otherwise):
        with together:
            which = builder.sub(spans, _spread(builder, first))
            for start, kept in zip(starts, held, strict=True):
                entries = _load(builder, builder.gep(start, [builder.zext(first, _i64)]), LANES, _f32)
                builder.store(_look_up(builder, entries, which), kept)
        with otherwise:
            one_by_one()
    return [builder.load(kept) for kept in held]


@intrinsic
def score_packed(typing_context, packed, room, at, num_words, table, factors, bases, base_at, base_stride, log_groups,
                 again, adds, scores, sums, sums_at, sums_stride):  # fmt: skip
    """`scan_planes` of sixteen groups i that were packed [1 + num_words, room]: words at + i, the first as of
    `pack_scales`, whose numbers ascend; bases of span number >> log_groups at bases[base_at + r base_stride + span].
    What the codes add for head r goes to sums[sums_at + i sums_stride + r], int16."""

    def codegen(context, builder, signature, args):
        kinds = signature.args
        data, table_data, factor_data, base_data, score_data, sum_data = (
            _data(context, builder, kinds[i], args[i]) for i in (0, 4, 5, 6, 12, 13)
        )
        width, first, words, base_first, base_step, shift, sum_first, sum_step = (
            _int64(context, builder, kinds[i], args[i]) for i in (1, 2, 3, 7, 8, 9, 14, 15)
        )
        here, kept = builder.gep(data, [first]), _new_sums(builder)
        with cgutils.for_range(builder, words) as each:
            row = builder.mul(builder.add(each.index, _i64(1)), width)
            word = _load(builder, builder.gep(here, [row]), LANES, _i32)
            _add_word(builder, word, builder.gep(table_data, [builder.mul(each.index, _i64(WORD_TABLE))]), kept)
        names = _load(builder, here, LANES, _i32)
        local = builder.and_(names, _repeated(NAME))
        spans = builder.lshr(local, _spread(builder, builder.trunc(shift, _i32)))
        offsets = _offsets(builder, builder.gep(base_data, [base_first]), base_step, spans)
        numbers = _by_head(builder, kept)
        _put_sums(builder, numbers, builder.gep(sum_data, [sum_first]), sum_step)
        _estimates(
            builder, numbers, _byte_scale(builder, builder.lshr(names, _repeated(16))), factor_data, offsets,
            context.is_true(builder, kinds[10], args[10]), context.is_true(builder, kinds[11], args[11]), score_data,
        )  # fmt: skip
        return context.get_dummy_value()

    return (
        types.void(packed, room, at, num_words, table, factors, bases, base_at, base_stride, log_groups, again, adds,
                   scores, sums, sums_at, sums_stride),
        codegen,
    )  # fmt: skip


def _put_sums(builder, sums, data, stride):
    """Sums of four heads of sixteen groups as int16, the heads of a group side by side, groups `stride` apart."""
    low = [builder.and_(one, _repeated(0xFFFF)) for one in sums[::2]]
    pairs = [builder.or_(x, builder.shl(y, _repeated(16))) for x, y in zip(low, sums[1::2], strict=True)]
    halves = [
        _shuffle(builder, pairs[0], pairs[1], [lane + side for lane in range(start, start + 8) for side in (0, LANES)])
        for start in (0, 8)
    ]
    together = builder.icmp_signed("==", stride, _i64(HEADS))
    with builder.if_else(together, likely=True) as (side_by_side, apart):
        with side_by_side:
            for j, half in enumerate(halves):
                _store_words(builder, half, builder.gep(data, [_i64(j * 2 * LANES)]))
        with apart:
            for lane in range(LANES):
                own = builder.bitcast(halves[lane // 8], _vector(_i64, 8))
                own = builder.extract_element(own, _i32(lane % 8))
                place = builder.gep(data, [builder.mul(stride, _i64(lane))])
                builder.store(own, builder.bitcast(place, _i64.as_pointer()), align=2)


def _store_words(builder, value, pointer):
    builder.store(value, builder.bitcast(pointer, value.type.as_pointer()), align=2)


def _get_sums(builder, data, places):
    """Return for four heads sixteen sums, each group's at data[place]: `_put_sums`."""
    halves = [ir.Constant(_vector(_i64, 8), ir.Undefined) for _ in range(2)]
    for lane, place in enumerate(places):
        own = builder.load(builder.bitcast(builder.gep(data, [place]), _i64.as_pointer()), align=2)
        halves[lane // 8] = builder.insert_element(halves[lane // 8], own, _i32(lane % 8))
    words = [builder.bitcast(half, _vector(_i32)) for half in halves]
    sums = []
    for side in (0, 1):
        pair = _shuffle(builder, words[0], words[1], [*range(side, 2 * LANES, 2)])
        sums += [builder.ashr(builder.shl(pair, _repeated(16)), _repeated(16)), builder.ashr(pair, _repeated(16))]
    return sums


@intrinsic
def score_listed(typing_context, rows, places, at, num_bytes, scale, spans, table, doubled, factors, bases, base_at,
                 base_stride, again, adds, scores, sums, sums_at, sums_stride, listed, fresh):  # fmt: skip
    """scores of sixteen groups i = at .., as of `scan_planes`, by what is already known, sums[sums_at + listed[i]
    sums_stride + r] for head r, or twice that where it is `doubled`, and by what num_bytes more bytes at rows[places[i]
    num_bytes ..] add; scale[places[i]]; bases of spans[i], which ascend. The new sums go to fresh [16, HEADS] int16."""

    def codegen(context, builder, signature, args):
        kinds = signature.args
        row_data, place_data, scale_data, span_data, table_data, factor_data, base_data, score_data, sum_data = (
            _data(context, builder, kinds[i], args[i]) for i in (0, 1, 4, 5, 6, 8, 9, 14, 15)
        )
        list_data, fresh_data = (_data(context, builder, kinds[i], args[i]) for i in (18, 19))
        first, num, base_first, base_step, sum_first, sum_step = (
            _int64(context, builder, kinds[i], args[i]) for i in (2, 3, 10, 11, 16, 17)
        )
        lanes = [builder.add(first, _i64(lane)) for lane in range(LANES)]
        own_places = [builder.load(builder.gep(place_data, [lane])) for lane in lanes]
        kept = _new_sums(builder)

        def add(number, word):
            _add_word(builder, word, builder.gep(table_data, [builder.mul(number, _i64(WORD_TABLE))]), kept)

        _over_listed(builder, [builder.gep(row_data, [builder.mul(place, num)]) for place in own_places], num, add)
        known = []
        for lane in lanes:
            entry = builder.sext(builder.load(builder.gep(list_data, [lane])), _i64)
            known.append(builder.add(sum_first, builder.mul(entry, sum_step)))
        times = builder.select(context.is_true(builder, kinds[7], args[7]), _repeated(1), _repeated(0))
        before, now = _get_sums(builder, sum_data, known), _by_head(builder, kept)
        numbers = [builder.add(builder.shl(x, times), y) for x, y in zip(before, now, strict=True)]
        _put_sums(builder, numbers, fresh_data, _i64(HEADS))
        stored = ir.Constant(_vector(_i8), ir.Undefined)
        for lane, place in enumerate(own_places):
            stored = builder.insert_element(stored, builder.load(builder.gep(scale_data, [place])), _i32(lane))
        own_spans = _load(builder, builder.gep(span_data, [first]), LANES, _i32)
        offsets = _offsets(builder, builder.gep(base_data, [base_first]), base_step, own_spans)
        _estimates(
            builder, numbers, _byte_scale(builder, builder.zext(stored, _vector(_i32))), factor_data, offsets,
            context.is_true(builder, kinds[12], args[12]), context.is_true(builder, kinds[13], args[13]), score_data,
        )  # fmt: skip
        return context.get_dummy_value()

    return (
        types.void(rows, places, at, num_bytes, scale, spans, table, doubled, factors, bases, base_at, base_stride,
                   again, adds, scores, sums, sums_at, sums_stride, listed, fresh),
        codegen,
    )  # fmt: skip


@intrinsic
def put_scores(typing_context, scores, count, names, at, mask, base, target):
    """target[base + (names[at + i] & mask)] = scores[i] for i < count <= 16: names int32, mask and base of whole
    numbers."""

    def codegen(context, builder, signature, args):
        kinds = signature.args
        score_data, name_data, target_data = (_data(context, builder, kinds[i], args[i]) for i in (0, 2, 6))
        number, first, low, start = (_int64(context, builder, kinds[i], args[i]) for i in (1, 3, 4, 5))
        target, own = builder.gep(target_data, [start]), builder.gep(name_data, [first])
        if PERMUTES:
            index = builder.and_(_load(builder, own, LANES, _i32), _spread(builder, builder.trunc(low, _i32)))
            lanes = ir.Constant(_vector(_i32), [*range(LANES)])
            inside = builder.icmp_signed("<", lanes, _spread(builder, builder.trunc(number, _i32)))
            pointer = builder.bitcast(target, _i8.as_pointer())
            kind = ir.FunctionType(ir.VoidType(), [pointer.type, inside.type, index.type, _vector(_f32), _i32])
            scatter = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.mask.scatter.dps.512")
            builder.call(scatter, [pointer, inside, index, _load(builder, score_data, LANES, _f32), _i32(4)])
            return context.get_dummy_value()
        with cgutils.for_range(builder, number) as each:
            name = builder.zext(_load(builder, builder.gep(own, [each.index]), 1, _i32), _i64)
            value = builder.load(builder.gep(score_data, [each.index]))
            builder.store(value, builder.gep(target, [builder.and_(name, low)]))
        return context.get_dummy_value()

    return types.void(scores, count, names, at, mask, base, target), codegen


@intrinsic
def put_names(typing_context, packed, at, mask, base, kept, kept_at):
    """kept[kept_at + i] = base + (packed[at + i] & mask) for sixteen i: int32."""

    def codegen(context, builder, signature, args):
        kinds = signature.args
        data, kept_data = (_data(context, builder, kinds[i], args[i]) for i in (0, 4))
        first, low, start, to = (_int64(context, builder, kinds[i], args[i]) for i in (1, 2, 3, 5))
        low, start = (_spread(builder, builder.trunc(one, _i32)) for one in (low, start))
        own = builder.and_(_load(builder, builder.gep(data, [first]), LANES, _i32), low)
        _store(builder, builder.add(own, start), builder.gep(kept_data, [to]))
        return context.get_dummy_value()

    return types.void(packed, at, mask, base, kept, kept_at), codegen


@intrinsic
def put_keys(typing_context, scores, at, count, keys, key_at):
    """keys[key_at + i] becomes the key (`best.order`) of scores[at + i] for i < count, and 0 up to the next sixteen."""

    def codegen(context, builder, signature, args):
        kinds = signature.args
        score_data, key_data = (_data(context, builder, kinds[i], args[i]) for i in (0, 3))
        first, number, key_first = (_int64(context, builder, kinds[i], args[i]) for i in (1, 2, 4))
        scores, target = builder.gep(score_data, [first]), builder.gep(key_data, [key_first])
        with cgutils.for_range_slice(builder, _i64(0), number, _i64(LANES)) as (start, _):
            own = _ordered(builder, _load(builder, builder.gep(scores, [start]), LANES, _f32))
            left = _spread(builder, builder.trunc(builder.sub(number, start), _i32))
            inside = builder.icmp_signed("<", ir.Constant(_vector(_i32), [*range(LANES)]), left)
            _store(builder, builder.select(inside, own, _repeated(0)), builder.gep(target, [start]))
        return context.get_dummy_value()

    return types.void(scores, at, count, keys, key_at), codegen
