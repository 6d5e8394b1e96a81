"""Products and softmax sums over many lanes at once, as numba intrinsics: what several query rows of one kv head need.

A lane is one query row. Logits and weights lie as [tokens, lanes] and sums as [channels, lanes], so that all arithmetic
of a row stays in its own lane, in one order, whatever the other lanes hold and however many there are: the bits of a
row depend on nothing else. Kernels that call these must not be compiled with `reassoc`.

Arguments are one-dimensional C-contiguous arrays; offsets count elements; numbers of lanes are multiples of 16.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from eps_core.cpu.vectors import (
    LANES,
    PERMUTES,
    _broadcast,
    _data,
    _f32,
    _fma,
    _i32,
    _i64,
    _int64,
    _load,
    _splat,
    _store,
    _vector,
)

# a block of sums that stays in registers: 24 of 32 vectors of AVX-512, 8 of 16 (two to a sum) of AVX2
BLOCK_ROWS, BLOCK_VECTORS = (8, 3) if PERMUTES else (4, 1)
LOWEST = -127.0  # of a power of two that is not 0
_MAGIC = 12582912.0  # 1.5 * 2^23: what is added to it is rounded to a whole number, in its lowest bits


def _powers(builder, x):
    """2^x of vectors of sixteen float32 no larger than 0; 0 below -126.5; NaN stays. Relative error below 1e-7 (Cephes
    exp2f)."""
    integers = _vector(_i32)
    x = builder.select(builder.fcmp_ordered("<", x, _splat(LOWEST)), _splat(LOWEST), x)
    shifted = builder.fadd(x, _splat(_MAGIC))
    rest = builder.fsub(x, builder.fsub(shifted, _splat(_MAGIC)))
    value = _splat(1.535336188319500e-4)
    for term in (1.33988744e-3, 9.61843736e-3, 5.55033247e-2, 2.40226479e-1, 6.93147203e-1, 1.0):
        value = _fma(builder, value, rest, _splat(term))
    exponent = builder.shl(builder.bitcast(shifted, integers), ir.Constant(integers, [23] * LANES))
    power = builder.add(exponent, ir.Constant(integers, [127 << 23] * LANES))
    return builder.fmul(value, builder.bitcast(power, _vector(_f32)))


def _greater(builder, new, old):
    """The greater of two vectors; old where new is NaN."""
    return builder.select(builder.fcmp_ordered(">", new, old), new, old)


def _base(builder, largest, scale):
    """Return the number that logits are lowered by: largest * scale, 0 where nothing was seen."""
    seen = builder.fcmp_ordered(">", largest, _splat(float("-inf")))
    return builder.select(seen, builder.fmul(largest, scale), _splat(0.0))


@intrinsic
def add_products(typing_context, a, a_start, row_step, step, num_rows, b, num_terms, lanes, factors, c, c_start):
    """c[c_start + i L + l] = factors[l] * c[..] + sum over k < num_terms of a[a_start + i row_step + k step] b[k L + l]
    for i < num_rows and the L lanes l; with None for factors, the sum alone."""

    def codegen(context, builder, signature, args):
        kinds = signature.args
        a_data, b_data, c_data = (_data(context, builder, kinds[i], args[i]) for i in (0, 5, 9))
        start, row_stride, stride, rows, terms, width, c_first = (
            _int64(context, builder, kinds[i], args[i]) for i in (1, 2, 3, 4, 6, 7, 10)
        )
        carried = not isinstance(kinds[8], types.NoneType)

        def block(lane, row, num_vectors: int, height: int):
            place = builder.gep(a_data, [builder.add(start, builder.mul(row, row_stride))])
            own = builder.gep(b_data, [lane])
            results = [
                [
                    builder.gep(
                        c_data,
                        [
                            builder.add(
                                c_first,
                                builder.add(
                                    builder.mul(builder.add(row, _i64(i)), width), builder.add(lane, _i64(LANES * j))
                                ),
                            )
                        ],
                    )
                    for j in range(num_vectors)
                ]
                for i in range(height)
            ]
            sums = [[cgutils.alloca_once(builder, _vector(_f32)) for _ in range(num_vectors)] for _ in range(height)]
            for j in range(num_vectors):
                factor = None
                if carried:
                    factor_data = _data(context, builder, kinds[8], args[8])
                    at = builder.add(lane, _i64(LANES * j))
                    factor = _load(builder, builder.gep(factor_data, [at]), LANES, _f32)
                for i in range(height):
                    before = _splat(0.0)
                    if carried:
                        before = builder.fmul(_load(builder, results[i][j], LANES, _f32), factor)
                    builder.store(before, sums[i][j])
            with cgutils.for_range(builder, terms) as term:
                at = builder.mul(term.index, width)
                vectors = [
                    _load(builder, builder.gep(own, [builder.add(at, _i64(LANES * j))]), LANES, _f32)
                    for j in range(num_vectors)
                ]
                along = builder.gep(place, [builder.mul(term.index, stride)])
                for i in range(height):
                    one = builder.load(builder.gep(along, [builder.mul(row_stride, _i64(i))]))
                    spread = _broadcast(builder, one)
                    for j in range(num_vectors):
                        kept = sums[i][j]
                        builder.store(_fma(builder, spread, vectors[j], builder.load(kept)), kept)
            for i in range(height):
                for j in range(num_vectors):
                    _store(builder, builder.load(sums[i][j]), results[i][j])

        lane_done = _i64(0)
        for num_vectors in range(BLOCK_VECTORS, 0, -1):
            left = builder.sub(width, lane_done)
            size = _i64(num_vectors * LANES)
            lane_end = builder.add(lane_done, builder.sub(left, builder.urem(left, size)))
            with cgutils.for_range_slice(builder, lane_done, lane_end, size) as (lane, _):
                row_done = _i64(0)
                for height in (BLOCK_ROWS, 1):
                    row_end = builder.and_(rows, _i64(-height))
                    with cgutils.for_range_slice(builder, row_done, row_end, _i64(height)) as (row, _):
                        block(lane, row, num_vectors, height)
                    row_done = row_end
            lane_done = lane_end
        return context.get_dummy_value()

    return (
        types.void(a, a_start, row_step, step, num_rows, b, num_terms, lanes, factors, c, c_start),
        codegen,
    )


@intrinsic
def raise_most(typing_context, logits, count, lanes, scale, most, totals, factors):
    """A step of a softmax that runs over tiles of tokens, lane by lane: most[l] becomes the largest of itself and of
    logits[t L + l] over t < count; factors[l] what sums relative to the former most are multiplied by, as totals[l]
    is."""

    def codegen(context, builder, signature, args):
        kinds = signature.args
        data, most_data, total_data, factor_data = (_data(context, builder, kinds[i], args[i]) for i in (0, 4, 5, 6))
        num, width = (_int64(context, builder, kinds[i], args[i]) for i in (1, 2))
        by = _broadcast(builder, context.cast(builder, args[3], kinds[3], types.float32))
        largest = cgutils.alloca_once(builder, _vector(_f32))
        with cgutils.for_range_slice(builder, _i64(0), width, _i64(LANES)) as (lane, _):
            most_at, total_at, factor_at = (builder.gep(one, [lane]) for one in (most_data, total_data, factor_data))
            before = _load(builder, most_at, LANES, _f32)
            builder.store(before, largest)
            with cgutils.for_range(builder, num) as each:
                pointer = builder.gep(data, [builder.add(builder.mul(each.index, width), lane)])
                builder.store(_greater(builder, _load(builder, pointer, LANES, _f32), builder.load(largest)), largest)
            now = builder.load(largest)
            factor = _powers(builder, builder.fsub(_base(builder, before, by), _base(builder, now, by)))
            # a former most of -inf stands for sums of 0
            factor = builder.select(builder.fcmp_ordered(">", before, _splat(float("-inf"))), factor, _splat(0.0))
            _store(builder, now, most_at)
            _store(builder, factor, factor_at)
            _store(builder, builder.fmul(_load(builder, total_at, LANES, _f32), factor), total_at)
        return context.get_dummy_value()

    return types.void(logits, count, lanes, scale, most, totals, factors), codegen


@intrinsic
def weigh_lanes(typing_context, logits, first, end, lanes, scale, most, totals):
    """logits[t L + l] become weights 2^((logit - most[l]) scale) for tokens first .. end - 1, and totals[l] grows by
    them in their order. -inf weighs nothing; a lane that has seen nothing else keeps a total of 0."""

    def codegen(context, builder, signature, args):
        kinds = signature.args
        data, most_data, total_data = (_data(context, builder, kinds[i], args[i]) for i in (0, 5, 6))
        start, stop, width = (_int64(context, builder, kinds[i], args[i]) for i in (1, 2, 3))
        by = _broadcast(builder, context.cast(builder, args[4], kinds[4], types.float32))
        total = cgutils.alloca_once(builder, _vector(_f32))
        with cgutils.for_range_slice(builder, _i64(0), width, _i64(LANES)) as (lane, _):
            most_at, total_at = (builder.gep(one, [lane]) for one in (most_data, total_data))
            lowered = builder.fneg(_base(builder, _load(builder, most_at, LANES, _f32), by))
            builder.store(_load(builder, total_at, LANES, _f32), total)
            with cgutils.for_range_slice(builder, start, stop, _i64(1)) as (token, _):
                pointer = builder.gep(data, [builder.add(builder.mul(token, width), lane)])
                weight = _powers(builder, _fma(builder, _load(builder, pointer, LANES, _f32), by, lowered))
                _store(builder, weight, pointer)
                builder.store(builder.fadd(builder.load(total), weight), total)
            _store(builder, builder.load(total), total_at)
        return context.get_dummy_value()

    return types.void(logits, first, end, lanes, scale, most, totals), codegen


@intrinsic
def powers(typing_context, x, count):
    """x[i] becomes 2^x[i], x no larger than 0, for i < count, a multiple of 16; 0 below -126.5."""

    def codegen(context, builder, signature, args):
        data = _data(context, builder, signature.args[0], args[0])
        num = _int64(context, builder, signature.args[1], args[1])
        with cgutils.for_range_slice(builder, _i64(0), num, _i64(LANES)) as (start, _):
            pointer = builder.gep(data, [start])
            _store(builder, _powers(builder, _load(builder, pointer, LANES, _f32)), pointer)
        return context.get_dummy_value()

    return types.void(x, count), codegen


@intrinsic
def set_bits(typing_context, array, start):
    """Bit i of the result says whether array[start + i], of 64 uint8, is not 0."""

    def codegen(context, builder, signature, args):
        data = _data(context, builder, signature.args[0], args[0])
        pointer = builder.gep(data, [_int64(context, builder, signature.args[1], args[1])])
        bytes_there = _load(builder, pointer, 64, ir.IntType(8))
        zeros = ir.Constant(bytes_there.type, [0] * 64)
        return builder.bitcast(builder.icmp_unsigned("!=", bytes_there, zeros), _i64)

    return types.uint64(array, start), codegen


@intrinsic
def lowest_bit(typing_context, word):
    """Which bit of a uint64 that is not 0 is its lowest."""

    def codegen(context, builder, signature, args):
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), codegen
