"""Vector instructions for choosing the best of many, as numba intrinsics written in LLVM's terms (see `vectors`)."""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from eps_core.cpu.vectors import (
    LANES,
    PERMUTES,
    PERMUTES_EIGHT,
    _data,
    _i32,
    _i64,
    _int64,
    _load,
    _shuffle,
    _store,
    _vector,
)

_i16 = ir.IntType(16)


def _repeated(value: int):
    return ir.Constant(_vector(_i32), [value] * LANES)


def _spread(builder, scalar):
    one = builder.insert_element(ir.Constant(_vector(_i32), ir.Undefined), scalar, _i32(0))
    return _shuffle(builder, one, one, [0] * LANES)


def _packing_places(builder):
    """A constant of 256 rows of eight bytes: where the lanes that a byte's bits name stand, one behind the other."""
    kind = ir.ArrayType(_vector(ir.IntType(8), 8), 256)
    rows = [[lane for lane in range(8) if value >> lane & 1] for value in range(256)]
    rows = [ir.Constant(kind.element, row + [0] * (8 - len(row))) for row in rows]
    name = "eps_packing_places"
    held = builder.module.globals.get(name)
    if held is None:
        held = cgutils.global_constant(builder.module, name, ir.Constant(kind, rows))
    return held


def _append(builder, values, taken, pointer):
    """Stores those of sixteen words that are `taken`, sixteen bits, side by side; what lies behind them is lost."""
    words = _vector(_i32)
    if PERMUTES:
        kind = ir.FunctionType(words, [words, words, _vector(ir.IntType(1))])
        pack = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.mask.compress.v16i32")
        mask = builder.bitcast(taken, _vector(ir.IntType(1)))
        _store(builder, builder.call(pack, [values, _repeated(0), mask]), pointer)
        return
    if PERMUTES_EIGHT:
        eight = _vector(_i32, 8)
        pack = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(eight, [eight, eight]), "llvm.x86.avx2.permd"
        )
        target, table = builder.bitcast(pointer, _i32.as_pointer()), _packing_places(builder)
        for half in (0, 8):
            bits = builder.and_(builder.lshr(taken, ir.Constant(_i16, half)), ir.Constant(_i16, 255))
            places = builder.load(builder.gep(table, [_i64(0), builder.zext(bits, _i64)]), align=8)
            own = _shuffle(builder, values, values, [*range(half, half + 8)])
            packed = builder.call(pack, [own, builder.zext(places, eight)])
            _store(builder, packed, builder.bitcast(target, eight.as_pointer()))
            target = builder.gep(target, [builder.zext(builder.ctpop(bits), _i64)])
        return
    held, next_place = cgutils.alloca_once(builder, words), cgutils.alloca_once_value(builder, _i64(0))
    builder.store(values, held)
    each_word, target = builder.bitcast(held, _i32.as_pointer()), builder.bitcast(pointer, _i32.as_pointer())
    with cgutils.for_range(builder, _i64(LANES)) as each:
        place = builder.load(next_place)
        builder.store(builder.load(builder.gep(each_word, [each.index])), builder.gep(target, [place]))
        bit = builder.and_(builder.lshr(builder.zext(taken, _i64), each.index), _i64(1))
        builder.store(builder.add(place, bit), next_place)


def _ordered(builder, values):
    """Sixteen float32 as uint32 in their order, -0 as 0."""
    bits, sign = builder.bitcast(values, _vector(_i32)), _repeated(0x80000000)
    negative = builder.icmp_unsigned(">", bits, sign)
    return builder.select(negative, builder.xor(bits, _repeated(0xFFFFFFFF)), builder.or_(bits, sign))


@intrinsic
def mark(typing_context, keys, first, end, key, before, marks):
    """Bit i % 16 of marks[i // 16], uint16, says whether keys[i] is above `key`, or equals it and i < before; for i
    from `first` to `end` - 1, multiples of 16. Returns how many are."""

    def codegen(context, builder, signature, args):
        kinds = signature.args
        key_data, mark_data = (_data(context, builder, kinds[i], args[i]) for i in (0, 5))
        start, stop, early = (_int64(context, builder, kinds[i], args[i]) for i in (1, 2, 4))
        limit = _spread(builder, context.cast(builder, args[3], kinds[3], types.uint32))
        early = _spread(builder, builder.trunc(early, _i32))
        held = cgutils.alloca_once_value(builder, _i64(0))
        with cgutils.for_range_slice(builder, start, stop, _i64(LANES)) as (at, _):
            own = _load(builder, builder.gep(key_data, [at]), LANES, _i32)
            index = builder.add(_spread(builder, builder.trunc(at, _i32)), ir.Constant(_vector(_i32), [*range(LANES)]))
            equal = builder.and_(builder.icmp_unsigned("==", own, limit), builder.icmp_signed("<", index, early))
            taken = builder.bitcast(builder.or_(builder.icmp_unsigned(">", own, limit), equal), _i16)
            builder.store(taken, builder.gep(mark_data, [builder.udiv(at, _i64(LANES))]))
            builder.store(builder.add(builder.load(held), builder.zext(builder.ctpop(taken), _i64)), held)
        return builder.load(held)

    return types.int64(keys, first, end, key, before, marks), codegen


@intrinsic
def count_above(typing_context, keys, count, most):
    """Return how many of the first `count` keys, uint32, are above `most`."""

    def codegen(context, builder, signature, args):
        data, num = _data(context, builder, signature.args[0], args[0]), _int64(context, builder, types.int64, args[1])
        high = context.cast(builder, args[2], signature.args[2], types.uint32)
        spread, whole = _spread(builder, high), builder.and_(num, _i64(-LANES))
        counts = cgutils.alloca_once_value(builder, _repeated(0))
        with cgutils.for_range_slice(builder, _i64(0), whole, _i64(LANES)) as (at, _):
            above = builder.icmp_unsigned(">", _load(builder, builder.gep(data, [at]), LANES, _i32), spread)
            builder.store(builder.add(builder.load(counts), builder.zext(above, _vector(_i32))), counts)
        kind = ir.FunctionType(_i32, [_vector(_i32)])
        add = cgutils.get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.add.v{LANES}i32")
        found = cgutils.alloca_once_value(builder, builder.zext(builder.call(add, [builder.load(counts)]), _i64))
        with cgutils.for_range_slice(builder, whole, num, _i64(1)) as (at, _):
            above = builder.icmp_unsigned(">", builder.load(builder.gep(data, [at])), high)
            builder.store(builder.add(builder.load(found), builder.zext(above, _i64)), found)
        return builder.load(found)

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
        if PERMUTES or PERMUTES_EIGHT:
            lows, spans = _spread(builder, low), _spread(builder, span)
            with cgutils.for_range_slice(builder, start, whole, _i64(LANES)) as (at, _):
                own = _load(builder, builder.gep(key_data, [at]), LANES, _i32)
                inside = builder.icmp_unsigned("<=", builder.sub(own, lows), spans)
                if indexed:
                    first_index = _spread(builder, builder.trunc(at, _i32))
                    value = builder.add(first_index, ir.Constant(_vector(_i32), [*range(LANES)]))
                else:
                    value = _load(builder, builder.gep(value_data, [at]), LANES, _i32)
                now, taken = builder.load(held), builder.bitcast(inside, _i16)
                _append(builder, value, taken, builder.gep(target_data, [now]))
                builder.store(builder.add(now, builder.zext(builder.ctpop(taken), _i64)), held)
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


@intrinsic
def squeeze_between(typing_context, keys, count, least, most, target):
    """Puts those of the first `count` keys that lie from `least` to `most` side by side into target, which has room for
    LANES more; returns how many they are, and how many keys lie above `most`. All uint32."""

    def codegen(context, builder, signature, args):
        kinds = signature.args
        key_data, target_data = (_data(context, builder, kinds[i], args[i]) for i in (0, 4))
        num = _int64(context, builder, kinds[1], args[1])
        low, high = (context.cast(builder, args[i], kinds[i], types.uint32) for i in (2, 3))
        found, above = (cgutils.alloca_once_value(builder, _i64(0)) for _ in range(2))
        lows, highs = _spread(builder, low), _spread(builder, high)
        whole = builder.and_(num, _i64(-LANES))

        def add(kept, bits):
            builder.store(builder.add(builder.load(kept), builder.zext(builder.ctpop(bits), _i64)), kept)

        with cgutils.for_range_slice(builder, _i64(0), whole, _i64(LANES)) as (at, _):
            own = _load(builder, builder.gep(key_data, [at]), LANES, _i32)
            larger = builder.icmp_unsigned(">", own, highs)
            inside = builder.and_(builder.icmp_unsigned(">=", own, lows), builder.not_(larger))
            inside, larger = builder.bitcast(inside, _i16), builder.bitcast(larger, _i16)
            with builder.if_then(builder.icmp_unsigned("!=", inside, ir.Constant(_i16, 0))):
                _append(builder, own, inside, builder.gep(target_data, [builder.load(found)]))
            add(found, inside)
            add(above, larger)
        with cgutils.for_range_slice(builder, whole, num, _i64(1)) as (at, _):
            own = builder.load(builder.gep(key_data, [at]))
            larger = builder.icmp_unsigned(">", own, high)
            inside = builder.and_(builder.icmp_unsigned(">=", own, low), builder.not_(larger))
            place = builder.gep(target_data, [builder.load(found)])
            builder.store(own, builder.bitcast(place, _i32.as_pointer()))
            for kept, bit in ((found, inside), (above, larger)):
                builder.store(builder.add(builder.load(kept), builder.zext(bit, _i64)), kept)
        return context.make_tuple(builder, signature.return_type, [builder.load(found), builder.load(above)])

    return types.UniTuple(types.int64, 2)(keys, count, least, most, target), codegen
