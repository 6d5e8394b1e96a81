"""Vector instructions for the CPU kernels, as numba intrinsics written in LLVM's terms.

Sixteen float32 lanes and four query heads at a time: one AVX-512 register, two of AVX2, four of NEON (LLVM splits what
a CPU lacks). numba's own loops do not vectorise over converted 16-bit values and several accumulators; these do.

Arguments are one-dimensional C-contiguous arrays; offsets count elements. The element type of a stored array says how
it is read: float32; uint16, the bits of a bfloat16; int16, the bits of a float16; int8 and uint8, whole numbers.
"""

import platform

from llvmlite import ir
from numba import config, types
from numba.core import cgutils
from numba.core.codegen import get_host_cpu_features
from numba.extending import intrinsic

HEADS = 4  # query heads at a time; the others of a kv head take another pass over what then lies in the cache
LANES = 16
# as numba decides: "" are no features, and what is kept is kept by them
_FEATURES = (get_host_cpu_features() if config.CPU_FEATURES is None else config.CPU_FEATURES).split(",")
PERMUTES = "+avx512f" in _FEATURES  # whether one instruction looks sixteen numbers up in a table of sixteen (vpermps)
PERMUTES_EIGHT = "+avx2" in _FEATURES  # whether one looks eight up in a table of eight
# whether the CPU converts float16; where it does not, LLVM would call a function that numba's process may lack
CONVERTS_HALF = "+f16c" in _FEATURES or platform.machine().lower() not in ("x86_64", "amd64", "i686", "x86")

_f32, _i32, _i64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_LINE = 64  # bytes of a cache line


def _vector(element: ir.Type, lanes: int = LANES) -> ir.VectorType:
    return ir.VectorType(element, lanes)


def _splat(value: float, lanes: int = LANES) -> ir.Constant:
    return ir.Constant(_vector(_f32, lanes), [ir.Constant(_f32, value)] * lanes)


def _broadcast(builder, scalar, lanes: int = LANES):
    one = builder.insert_element(ir.Constant(_vector(_f32, lanes), ir.Undefined), scalar, ir.Constant(_i32, 0))
    return _shuffle(builder, one, one, [0] * lanes)


def _shuffle(builder, first, second, picks: list[int]):
    return builder.shuffle_vector(first, second, ir.Constant(_vector(_i32, len(picks)), picks))


def _data(context, builder, array_type, array):
    return context.make_array(array_type)(context, builder, array).data


def _int64(context, builder, number_type, number):
    return context.cast(builder, number, number_type, types.int64)


def _load(builder, pointer, lanes: int, element: ir.Type):
    """`lanes` elements at a pointer to the first, aligned as one of them."""
    size = {ir.IntType(8): 1, ir.IntType(16): 2}.get(element, 4)
    if lanes == 1:
        return builder.load(builder.bitcast(pointer, element.as_pointer()), align=size)
    return builder.load(builder.bitcast(pointer, _vector(element, lanes).as_pointer()), align=size)


def _store(builder, value, pointer):
    builder.store(value, builder.bitcast(pointer, value.type.as_pointer()), align=4)


def _from_half(builder, bits):
    """The bits of float16, a scalar or a vector of int16, as float32."""
    lanes = bits.type.count if isinstance(bits.type, ir.VectorType) else 1

    def shaped(element: ir.Type):
        return element if lanes == 1 else _vector(element, lanes)

    if CONVERTS_HALF:
        return builder.fpext(builder.bitcast(bits, shaped(ir.HalfType())), shaped(_f32))

    def constant(element: ir.Type, value: float):
        return ir.Constant(element, value) if lanes == 1 else ir.Constant(_vector(element, lanes), [value] * lanes)

    wide = builder.zext(bits, shaped(_i32))
    size = builder.shl(builder.and_(wide, constant(_i32, 0x7FFF)), constant(_i32, 13))
    # float16's bias is 112 less than float32's; the product is exact, of denormals too
    finite = builder.bitcast(builder.fmul(builder.bitcast(size, shaped(_f32)), constant(_f32, 2.0**112)), shaped(_i32))
    special = builder.icmp_unsigned(">=", size, constant(_i32, 0x7C00 << 13))
    size = builder.select(special, builder.or_(size, constant(_i32, 0x7F800000)), finite)
    sign = builder.shl(builder.and_(wide, constant(_i32, 0x8000)), constant(_i32, 16))
    return builder.bitcast(builder.or_(size, sign), shaped(_f32))


def _wide(builder, dtype, pointer, lanes: int):
    """`lanes` stored numbers as float32: a vector, or a scalar for one lane."""

    def shaped(element: ir.Type):
        return element if lanes == 1 else _vector(element, lanes)

    if dtype == types.float32:
        return _load(builder, pointer, lanes, _f32)
    if dtype == types.uint16:
        bits = builder.zext(_load(builder, pointer, lanes, ir.IntType(16)), shaped(_i32))
        sixteen = ir.Constant(_i32, 16) if lanes == 1 else ir.Constant(_vector(_i32, lanes), [16] * lanes)
        return builder.bitcast(builder.shl(bits, sixteen), shaped(_f32))
    if dtype == types.int16:
        return _from_half(builder, _load(builder, pointer, lanes, ir.IntType(16)))
    whole = _load(builder, pointer, lanes, ir.IntType(8))
    return builder.sitofp(whole, shaped(_f32)) if dtype == types.int8 else builder.uitofp(whole, shaped(_f32))


def _call(builder, name: str, *operands):
    """An LLVM intrinsic whose operands and result are float32 vectors of one length."""
    kind = operands[0].type
    signature = ir.FunctionType(kind, [kind] * len(operands))
    return builder.call(
        cgutils.get_or_insert_function(builder.module, signature, f"llvm.{name}.v{kind.count}f32"), operands
    )


def _fma(builder, first, second, third):
    """first * second + third, of vectors rounded once."""
    return _call(builder, "fma", first, second, third)


def _look_up(builder, table, index):
    """Return for each of sixteen lanes the number of `table` that the lowest four bits of its index name, where
    PERMUTES or PERMUTES_EIGHT."""
    if not PERMUTES:
        eight = _vector(_f32, 8)
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(eight, [eight, _vector(_i32, 8)]), "llvm.x86.avx2.permps"
        )
        halves = [[*range(8)], [*range(8, LANES)]]
        tables, indices = ([_shuffle(builder, each, each, half) for half in halves] for each in (table, index))
        found = [[builder.call(function, [own, one]) for one in indices] for own in tables]
        low, high = (_shuffle(builder, one, other, [*range(LANES)]) for one, other in found)
        bit = builder.and_(index, ir.Constant(_vector(_i32), [8] * LANES))
        return builder.select(builder.icmp_unsigned("!=", bit, ir.Constant(_vector(_i32), [0] * LANES)), high, low)
    kind = ir.FunctionType(_vector(_f32), [_vector(_f32), _vector(_i32)])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.permvar.sf.512")
    return builder.call(function, [table, index])


def _prefetch_line(builder, pointer):
    """Asks for the cache line that a pointer is in, as far as the second cache: what streams through the first has no
    room to wait there (a dense pass over float32 keys took twice the time)."""
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, _i32, _i32, _i32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(function, [builder.bitcast(pointer, byte), _i32(0), _i32(2), _i32(1)])


def _prefetch(builder, pointer, num_bytes):
    """Asks for the cache lines of num_bytes at a pointer."""
    start = builder.bitcast(pointer, ir.IntType(8).as_pointer())
    lines = builder.udiv(builder.add(num_bytes, _i64(_LINE - 1)), _i64(_LINE))
    with cgutils.for_range(builder, lines) as line:
        _prefetch_line(builder, builder.gep(start, [builder.mul(line.index, _i64(_LINE))]))


def _sums(builder, vectors):
    """The sums over the lanes, sixteen or eight, of each of some vectors, a power of two of them, as one vector of as
    many."""
    num = len(vectors)
    if vectors[0].type.count == LANES // 2:
        vectors = [_shuffle(builder, x, y, [*range(LANES)]) for x, y in zip(vectors[::2], vectors[1::2], strict=True)]
    while len(vectors) > 1:
        # a vector holds the partial sums of several in blocks: halve the blocks, put two vectors into one
        block = LANES * len(vectors) // num
        low, high = ([lane + side for lane in range(0, 2 * LANES, block) for side in range(start, start + block // 2)]
                     for start in (0, block // 2))  # fmt: skip
        vectors = [
            builder.fadd(_shuffle(builder, x, y, low), _shuffle(builder, x, y, high))
            for x, y in zip(vectors[::2], vectors[1::2], strict=True)
        ]
    (left,), block = vectors, LANES // num
    while block > 1:
        low, high = ([lane + side for lane in range(0, num * block, block) for side in range(start, start + block // 2)]
                     for start in (0, block // 2))  # fmt: skip
        left, block = builder.fadd(_shuffle(builder, left, left, low), _shuffle(builder, left, left, high)), block // 2
    return left


def _exp(builder, x):
    """exp of sixteen float32, 0 below -87 (and -inf); NaN stays. Relative error below 2e-7 (Cephes expf)."""

    whole = _call(builder, "floor", _fma(builder, x, _splat(1.4426950408889634), _splat(0.5)))
    whole = _call(builder, "maxnum", whole, _splat(-126.0))
    whole = _call(builder, "minnum", whole, _splat(127.0))
    rest = _fma(builder, whole, _splat(-0.693359375), x)
    rest = _fma(builder, whole, _splat(2.12194440e-4), rest)
    value = _splat(1.9875691500e-4)
    for term in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        value = _fma(builder, value, rest, _splat(term))
    value = _fma(builder, value, builder.fmul(rest, rest), builder.fadd(rest, _splat(1.0)))
    integers = _vector(_i32)
    exponent = builder.add(builder.fptosi(whole, integers), ir.Constant(integers, [127] * LANES))
    power = builder.bitcast(builder.shl(exponent, ir.Constant(integers, [23] * LANES)), _vector(_f32))
    vanishes = builder.fcmp_ordered("<", x, _splat(-87.0))
    return builder.select(vanishes, _splat(0.0), builder.fmul(value, power))


def _log(builder, x):
    """log of sixteen float32 from 1 on. Error below 2e-7 (Cephes logf)."""
    integers = _vector(_i32)

    def repeated(value):
        return ir.Constant(integers, [value] * LANES)

    bits = builder.bitcast(x, integers)
    # the mantissa within [sqrt 1/2, sqrt 2)
    shifted = builder.sub(bits, repeated(0x3F3504F3))
    whole = builder.sitofp(builder.ashr(shifted, repeated(23)), x.type)
    rest = builder.add(builder.and_(shifted, repeated(0x7FFFFF)), repeated(0x3F3504F3))
    rest = builder.fsub(builder.bitcast(rest, x.type), _splat(1.0))
    value = _splat(7.0376836292e-2)
    for term in (-1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1,
                 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1):  # fmt: skip
        value = _fma(builder, value, rest, _splat(term))
    square = builder.fmul(rest, rest)
    value = builder.fmul(builder.fmul(value, rest), square)
    value = _fma(builder, whole, _splat(-2.12194440e-4), value)
    value = _fma(builder, square, _splat(-0.5), value)
    return _fma(builder, whole, _splat(0.693359375), builder.fadd(rest, value))


@intrinsic
def weigh(typing_context, logits, count, most, totals):
    """logits[4 i + r] becomes exp(logits[4 i + r] - most[r]) for i < count, a multiple of 4; totals[r] its sum over
    i."""

    def codegen(context, builder, signature, args):
        data, most_data, total_data = (_data(context, builder, signature.args[i], args[i]) for i in (0, 2, 3))
        num = builder.mul(_int64(context, builder, signature.args[1], args[1]), _i64(HEADS))
        four = _load(builder, most_data, HEADS, _f32)
        repeated = _shuffle(builder, four, four, [*range(HEADS)] * (LANES // HEADS))
        total = cgutils.alloca_once_value(builder, _splat(0.0))
        with cgutils.for_range_slice(builder, _i64(0), num, _i64(LANES)) as (start, _):
            pointer = builder.gep(data, [start])
            weights = _exp(builder, builder.fsub(_load(builder, pointer, LANES, _f32), repeated))
            _store(builder, weights, pointer)
            builder.store(builder.fadd(builder.load(total), weights), total)
        left, lanes = builder.load(total), LANES
        while lanes > HEADS:
            lanes //= 2
            low, high = ([*range(start, start + lanes)] for start in (0, lanes))
            left = builder.fadd(_shuffle(builder, left, left, low), _shuffle(builder, left, left, high))
        _store(builder, left, total_data)
        return context.get_dummy_value()

    return types.void(logits, count, most, totals), codegen


@intrinsic
def exp_all(typing_context, x, count):
    """x[i] becomes exp(x[i]), 0 below -87, for i < count, a multiple of 16."""

    def codegen(context, builder, signature, args):
        data = _data(context, builder, signature.args[0], args[0])
        num = _int64(context, builder, signature.args[1], args[1])
        with cgutils.for_range_slice(builder, _i64(0), num, _i64(LANES)) as (start, _):
            pointer = builder.gep(data, [start])
            _store(builder, _exp(builder, _load(builder, pointer, LANES, _f32)), pointer)
        return context.get_dummy_value()

    return types.void(x, count), codegen


@intrinsic
def largest_of(typing_context, x, count):
    """The largest of x[i] without NaN, i < count, a multiple of 16; -inf where there is none."""

    def codegen(context, builder, signature, args):
        data, num = _data(context, builder, signature.args[0], args[0]), _int64(context, builder, types.int64, args[1])
        largest = [cgutils.alloca_once_value(builder, _splat(float("-inf"))) for _ in range(4)]
        fours = builder.and_(num, _i64(-4 * LANES))

        def take(at, kept):
            own = _load(builder, builder.gep(data, [at]), LANES, _f32)
            before = builder.load(kept)
            builder.store(builder.select(builder.fcmp_ordered(">", own, before), own, before), kept)

        with cgutils.for_range_slice(builder, _i64(0), fours, _i64(4 * LANES)) as (at, _):
            for j, kept in enumerate(largest):
                take(builder.add(at, _i64(LANES * j)), kept)
        with cgutils.for_range_slice(builder, fours, num, _i64(LANES)) as (at, _):
            take(at, largest[0])
        most = builder.load(largest[0])
        for kept in largest[1:]:
            most = _call(builder, "maxnum", most, builder.load(kept))
        return _largest_lane(builder, most)

    return types.float32(x, types.int64), codegen


def _largest_lane(builder, most):
    """The largest of sixteen float32, none of them NaN."""
    lanes = LANES
    while lanes > 1:
        lanes //= 2
        low, high = ([*range(start, start + lanes)] for start in (0, lanes))
        sides = [_shuffle(builder, most, most, picks) for picks in (low, high)]
        most = builder.select(builder.fcmp_ordered(">", *sides), *sides)
    return builder.extract_element(most, _i32(0))


@intrinsic
def masses_by_mask(typing_context, x, mask):
    """The sums of exp(x[i] - largest) over the i of which mask[i], uint8, is not 0, and over the others: x float32 of
    which what is not finite counts nothing, largest the largest that counts."""

    def codegen(context, builder, signature, args):
        data, mask_data = (_data(context, builder, signature.args[i], args[i]) for i in (0, 1))
        num = context.make_array(signature.args[0])(context, builder, args[0]).nitems
        whole, least = builder.and_(num, _i64(-LANES)), _splat(float("-inf"))
        bytes_type = _vector(ir.IntType(8))

        def each(use):
            """use(x, mask) for sixteen at a time, and for the rest one by one, each beside fifteen -inf."""
            with cgutils.for_range_slice(builder, _i64(0), whole, _i64(LANES)) as (at, _):
                use(_load(builder, builder.gep(data, [at]), LANES, _f32),
                    _load(builder, builder.gep(mask_data, [at]), LANES, ir.IntType(8)))  # fmt: skip
            with cgutils.for_range_slice(builder, whole, num, _i64(1)) as (at, _):
                one, listed = (builder.load(builder.gep(pointer, [at])) for pointer in (data, mask_data))
                zeros = ir.Constant(bytes_type, [0] * LANES)
                use(builder.insert_element(least, one, _i32(0)), builder.insert_element(zeros, listed, _i32(0)))

        def finite(own):
            return builder.select(
                builder.fcmp_ordered("<", _call(builder, "fabs", own), _splat(float("inf"))), own, least
            )

        most, read, left = (cgutils.alloca_once_value(builder, one) for one in (least, _splat(0.0), _splat(0.0)))
        each(lambda own, _: builder.store(_call(builder, "maxnum", finite(own), builder.load(most)), most))
        largest = _largest_lane(builder, builder.load(most))
        none = builder.fcmp_ordered("==", largest, ir.Constant(_f32, float("-inf")))
        by = _broadcast(builder, builder.select(none, ir.Constant(_f32, 0.0), largest))

        def add(own, listed):
            mass = _exp(builder, builder.fsub(finite(own), by))
            is_read = builder.icmp_unsigned("!=", listed, ir.Constant(bytes_type, [0] * LANES))
            for kept, part in ((read, (mass, _splat(0.0))), (left, (_splat(0.0), mass))):
                builder.store(builder.fadd(builder.load(kept), builder.select(is_read, *part)), kept)

        each(add)
        sums = (builder.extract_element(_sums(builder, [builder.load(kept)]), _i32(0)) for kept in (read, left))
        return context.make_tuple(builder, signature.return_type, list(sums))

    return types.UniTuple(types.float32, 2)(x, mask), codegen


@intrinsic
def exp_sum(typing_context, x, start, count, largest):
    """The sum of exp(x[start + i] - largest), 0 below -87, over i < count, a multiple of 16."""

    def codegen(context, builder, signature, args):
        data = _data(context, builder, signature.args[0], args[0])
        first, num = (_int64(context, builder, signature.args[i], args[i]) for i in (1, 2))
        by = _broadcast(builder, context.cast(builder, args[3], signature.args[3], types.float32))
        total = cgutils.alloca_once_value(builder, _splat(0.0))
        with cgutils.for_range_slice(builder, _i64(0), num, _i64(LANES)) as (at, _):
            own = _load(builder, builder.gep(data, [builder.add(first, at)]), LANES, _f32)
            builder.store(builder.fadd(builder.load(total), _exp(builder, builder.fsub(own, by))), total)
        return builder.extract_element(_sums(builder, [builder.load(total)]), _i32(0))

    return types.float32(x, start, count, largest), codegen


def _transposed(builder, pointers, words: int):
    """`words` vectors of sixteen 32-bit words: word j of each of sixteen rows, for words 1, 2 or 4."""
    if words == 2:
        halves = [ir.Constant(_vector(_i64, LANES // 2), ir.Undefined) for _ in range(2)]
        for lane, pointer in enumerate(pointers):
            pair = builder.load(builder.bitcast(pointer, _i64.as_pointer()), align=1)
            halves[lane // 8] = builder.insert_element(halves[lane // 8], pair, _i32(lane % 8))
        low, high = (builder.bitcast(half, _vector(_i32)) for half in halves)
        return [_shuffle(builder, low, high, [*range(side, 2 * LANES, 2)]) for side in (0, 1)]
    if words == 1:
        column = ir.Constant(_vector(_i32), ir.Undefined)
        for lane, pointer in enumerate(pointers):
            column = builder.insert_element(column, _load(builder, pointer, 1, _i32), _i32(lane))
        return [column]
    rows = [_load(builder, pointer, 4, _i32) for pointer in pointers]
    # row 4 l + a in the l-th quarter of the a-th vector; then four by four within the quarters
    quads = []
    for a in range(4):
        pairs = [_shuffle(builder, rows[4 * first + a], rows[4 * first + 4 + a], [*range(8)]) for first in (0, 2)]
        quads.append(_shuffle(builder, pairs[0], pairs[1], [*range(16)]))
    low, high = ([lane + part for lane in range(0, 16, 4) for part in (side, 16 + side, side + 1, 17 + side)]
                 for side in (0, 2))  # fmt: skip
    even = [_shuffle(builder, quads[0], quads[1], picks) for picks in (low, high)]
    odd = [_shuffle(builder, quads[2], quads[3], picks) for picks in (low, high)]
    first, second = ([lane + part for lane in range(0, 16, 4) for part in (side, side + 1, 16 + side, 17 + side)]
                     for side in (0, 2))  # fmt: skip
    return [_shuffle(builder, even[i], odd[i], picks) for i in (0, 1) for picks in (first, second)]


@intrinsic
def ask_for(typing_context, array, start, count):
    """Prefetches array[start : start + count], which may lie anywhere."""

    def codegen(context, builder, signature, args):
        pointer = _data(context, builder, signature.args[0], args[0])
        first, number = (_int64(context, builder, signature.args[i], args[i]) for i in (1, 2))
        size = _i64(signature.args[0].dtype.bitwidth // 8)
        _prefetch(builder, builder.gep(pointer, [first]), builder.mul(number, size))
        return context.get_dummy_value()

    return types.void(array, start, count), codegen


@intrinsic
def wide(typing_context, stored):
    """A stored number as float32: the bits of a float16 where it is an int16, of a bfloat16 where it is a uint16."""

    def codegen(context, builder, signature, args):
        if signature.args[0] == types.float32:
            return args[0]
        if signature.args[0] == types.int16:
            return _from_half(builder, args[0])
        return builder.bitcast(builder.shl(builder.zext(args[0], _i32), _i32(16)), _f32)

    return types.float32(stored), codegen
