"""Vector instructions for choosing the best of many, as numba intrinsics written in LLVM's terms (see `vectors`)."""

from llvmlite import ir
from numba import types
from numba.core import cgutils

from eps_core.cpu.vectors import COUNT, LANES, PERMUTES, PERMUTES_EIGHT, emits, i8, i16, i32, i64, repeated, vector_of


def _packing_places(builder):
    """A constant of 256 rows of eight bytes: where the lanes that a byte's bits name stand, one behind the other."""
    kind = ir.ArrayType(vector_of(i8, 8), 256)
    rows = [[lane for lane in range(8) if value >> lane & 1] for value in range(256)]
    rows = [ir.Constant(kind.element, row + [0] * (8 - len(row))) for row in rows]
    name = "eps_packing_places"
    held = builder.module.globals.get(name)
    if held is None:
        held = cgutils.global_constant(builder.module, name, ir.Constant(kind, rows))
    return held


def _append(builder, values, taken, pointer):
    """Stores those of sixteen words that are `taken`, sixteen bits, side by side; what lies behind them is lost."""
    if PERMUTES:
        mask, name = builder.bitcast(taken, vector_of(ir.IntType(1))), "llvm.x86.avx512.mask.compress.v16i32"
        builder.store_lanes(builder.call_named(name, values.type, values, repeated(0), mask), pointer)
        return
    if PERMUTES_EIGHT:
        eight = vector_of(i32, 8)
        target, table = builder.bitcast(pointer, i32.as_pointer()), _packing_places(builder)
        for half in (0, 8):
            bits = builder.and_(builder.lshr(taken, ir.Constant(i16, half)), ir.Constant(i16, 255))
            places = builder.load(builder.gep(table, [i64(0), builder.zext(bits, i64)]), align=8)
            own = builder.shuffle(values, values, [*range(half, half + 8)])
            packed = builder.call_named("llvm.x86.avx2.permd", eight, own, builder.zext(places, eight))
            builder.store_lanes(packed, target)
            target = builder.at(target, builder.zext(builder.ctpop(bits), i64))
        return
    held, next_place = (cgutils.alloca_once_value(builder, one) for one in (values, i64(0)))
    each_word, target = builder.bitcast(held, i32.as_pointer()), builder.bitcast(pointer, i32.as_pointer())
    with cgutils.for_range(builder, i64(LANES)) as each:
        place = builder.load(next_place)
        builder.store(builder.load(builder.at(each_word, each.index)), builder.at(target, place))
        bit = builder.and_(builder.lshr(builder.zext(taken, i64), each.index), i64(1))
        builder.store(builder.add(place, bit), next_place)


def _ordered(builder, values):
    """Sixteen float32 as uint32 in their order, -0 as 0."""
    bits, sign = builder.bitcast(values, vector_of(i32)), repeated(0x80000000)
    negative = builder.icmp_unsigned(">", bits, sign)
    return builder.select(negative, builder.xor(bits, repeated(0xFFFFFFFF)), builder.or_(bits, sign))


@emits(types.int64)
def mark(builder, keys, first, end, key, before, marks):
    """Bit i % 16 of marks[i // 16], uint16, says whether keys[i] is above `key`, or equals it and i < before; for i
    from `first` to `end` - 1, multiples of 16. Returns how many are."""
    limit = builder.broadcast(builder.trunc(key, i32))
    before = builder.broadcast(builder.trunc(before, i32))
    held = cgutils.alloca_once_value(builder, i64(0))
    with builder.steps(first, end, LANES) as at:
        own = builder.load_lanes(builder.at(keys, at))
        index = builder.add(builder.broadcast(builder.trunc(at, i32)), COUNT)
        equal = builder.and_(builder.icmp_unsigned("==", own, limit), builder.icmp_signed("<", index, before))
        taken = builder.bitcast(builder.or_(builder.icmp_unsigned(">", own, limit), equal), i16)
        builder.store(taken, builder.at(marks, builder.udiv(at, i64(LANES))))
        builder.store(builder.add(builder.load(held), builder.zext(builder.ctpop(taken), i64)), held)
    return builder.load(held)


@emits(types.int64)
def count_above(builder, keys, count, most):
    """Return how many of the first `count` keys, uint32, are above `most`."""
    high = builder.trunc(most, i32)
    spread, whole = builder.broadcast(high), builder.and_(count, i64(-LANES))
    counts = cgutils.alloca_once_value(builder, repeated(0))
    with builder.steps(0, whole, LANES) as at:
        above = builder.icmp_unsigned(">", builder.load_lanes(builder.at(keys, at)), spread)
        builder.store(builder.add(builder.load(counts), builder.zext(above, vector_of(i32))), counts)
    counted = builder.call_named(f"llvm.vector.reduce.add.v{LANES}i32", i32, builder.load(counts))
    found = cgutils.alloca_once_value(builder, builder.zext(counted, i64))
    with builder.steps(whole, count) as at:
        above = builder.icmp_unsigned(">", builder.load(builder.at(keys, at)), high)
        builder.store(builder.add(builder.load(found), builder.zext(above, i64)), found)
    return builder.load(found)


@emits(types.int64)
def squeeze(builder, keys, first, end, least, most, values, target, taken):
    """Appends to target, which holds `taken`, values[i] (i itself where values is None) of every i from `first` to `end
    - 1` with least <= keys[i] <= most, in order; returns how many it then holds. keys, least and most are uint32;
    target has room for LANES more than it takes."""
    low = builder.trunc(least, i32)
    span = builder.sub(builder.trunc(most, i32), low)
    held = cgutils.alloca_once_value(builder, taken)
    whole = builder.add(first, builder.and_(builder.sub(end, first), i64(-LANES)))
    if PERMUTES or PERMUTES_EIGHT:
        lows, spans = builder.broadcast(low), builder.broadcast(span)
        with builder.steps(first, whole, LANES) as at:
            own = builder.load_lanes(builder.at(keys, at))
            inside = builder.icmp_unsigned("<=", builder.sub(own, lows), spans)
            if values is None:
                value = builder.add(builder.broadcast(builder.trunc(at, i32)), COUNT)
            else:
                value = builder.load_lanes(builder.at(values, at), LANES, i32)
            now, chosen = builder.load(held), builder.bitcast(inside, i16)
            _append(builder, value, chosen, builder.at(target, now))
            builder.store(builder.add(now, builder.zext(builder.ctpop(chosen), i64)), held)
    else:
        whole = first
    with builder.steps(whole, end) as at:
        own = builder.load(builder.at(keys, at))
        inside = builder.icmp_unsigned("<=", builder.sub(own, low), span)
        value = builder.trunc(at, i32) if values is None else builder.load(builder.at(values, at))
        now = builder.load(held)
        builder.store_lanes(value, builder.at(target, now))
        builder.store(builder.add(now, builder.zext(inside, i64)), held)
    return builder.load(held)


@emits(types.UniTuple(types.int64, 2))
def squeeze_between(builder, keys, count, least, most, target):
    """Puts those of the first `count` keys that lie from `least` to `most` side by side into target, which has room for
    LANES more; returns how many they are, and how many keys lie above `most`. All uint32."""
    low, high = (builder.trunc(one, i32) for one in (least, most))
    found, above = (cgutils.alloca_once_value(builder, i64(0)) for _ in range(2))
    lows, highs = builder.broadcast(low), builder.broadcast(high)
    whole = builder.and_(count, i64(-LANES))

    def add(kept, bits):
        builder.store(builder.add(builder.load(kept), builder.zext(builder.ctpop(bits), i64)), kept)

    with builder.steps(0, whole, LANES) as at:
        own = builder.load_lanes(builder.at(keys, at))
        larger = builder.icmp_unsigned(">", own, highs)
        inside = builder.and_(builder.icmp_unsigned(">=", own, lows), builder.not_(larger))
        inside, larger = builder.bitcast(inside, i16), builder.bitcast(larger, i16)
        with builder.if_then(builder.icmp_unsigned("!=", inside, ir.Constant(i16, 0))):
            _append(builder, own, inside, builder.at(target, builder.load(found)))
        add(found, inside)
        add(above, larger)
    with builder.steps(whole, count) as at:
        own = builder.load(builder.at(keys, at))
        larger = builder.icmp_unsigned(">", own, high)
        inside = builder.and_(builder.icmp_unsigned(">=", own, low), builder.not_(larger))
        builder.store_lanes(own, builder.at(target, builder.load(found)))
        for kept, bit in ((found, inside), (above, larger)):
            builder.store(builder.add(builder.load(kept), builder.zext(bit, i64)), kept)
    return [builder.load(found), builder.load(above)]
