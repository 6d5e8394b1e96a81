"""Vector instructions for the CPU kernels, as numba intrinsics written in LLVM's terms.

Sixteen float32 lanes and four query heads at a time: one AVX-512 register, two of AVX2, four of NEON (LLVM splits what
a CPU lacks). numba's own loops do not vectorise over converted 16-bit values and several accumulators; these do.

Arguments are one-dimensional C-contiguous arrays; offsets count elements. The element type of a stored array says how
it is read: float32; uint16, the bits of a bfloat16; int16, the bits of a float16; int8 and uint8, whole numbers.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from eps_core.summaries import LARGEST_ESTIMATE

HEADS = 4  # query heads at a time; the others of a kv head take another pass over what then lies in the cache
HALF_BYTES = 8  # of codes: 32 KiB of a table, what the first cache of a core holds
LANES = 16
PREFETCH_ROWS = 12  # how far ahead rows are asked for; changes speed only

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
        bits = _load(builder, pointer, lanes, ir.IntType(16))
        return builder.fpext(builder.bitcast(bits, shaped(ir.HalfType())), shaped(_f32))
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


def _prefetch(builder, pointer, num_bytes):
    """Asks for the cache lines of num_bytes at a pointer."""
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, _i32, _i32, _i32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    start = builder.bitcast(pointer, byte)
    lines = builder.udiv(builder.add(num_bytes, _i64(_LINE - 1)), _i64(_LINE))
    with cgutils.for_range(builder, lines) as line:
        at = builder.gep(start, [builder.mul(line.index, _i64(_LINE))])
        builder.call(function, [at, _i32(0), _i32(3), _i32(1)])


def _ahead(builder, rows, index, count, pool, row_bytes):
    """Prefetches the row that comes PREFETCH_ROWS after row `index` of `count`, if there is one."""
    ahead = builder.add(index, _i64(PREFETCH_ROWS))
    with builder.if_then(builder.icmp_signed("<", ahead, count)):
        _prefetch(builder, builder.gep(pool, [builder.load(builder.gep(rows, [ahead]))]), row_bytes)


def _sums_of_four(builder, parts):
    """The sums over the lanes of four vectors, as one vector of four."""
    one, other = (
        builder.fadd(
            _shuffle(builder, x, y, [*range(8), *range(16, 24)]),
            _shuffle(builder, x, y, [*range(8, 16), *range(24, 32)]),
        )
        for x, y in (parts[:2], parts[2:])
    )
    quarters = [
        _shuffle(builder, one, other, [start + 8 * part + i for part in range(4) for i in range(4)]) for start in (0, 4)
    ]
    left = builder.fadd(*quarters)
    for lanes in (8, 4):
        run = lanes // 4
        even, odd = ([2 * run * part + side * run + i for part in range(4) for i in range(run)] for side in (0, 1))
        left = builder.fadd(_shuffle(builder, left, left, even), _shuffle(builder, left, left, odd))
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


@intrinsic
def dots(typing_context, pool, rows, count, head_dim, queries, logits, most):
    """logits[4 i + r] = pool[rows[i] + c] . queries[r D + c] over the head_dim D channels c, for i < count rows and
    four heads r; most[r] (in and out) becomes the largest of these and of what it held."""

    def codegen(context, builder, signature, args):
        kinds = signature.args
        pool_data, row_data = (_data(context, builder, kinds[i], args[i]) for i in (0, 1))
        query_data, logit_data, most_data = (_data(context, builder, kinds[i], args[i]) for i in (4, 5, 6))
        num_rows, dim = (_int64(context, builder, kinds[i], args[i]) for i in (2, 3))
        whole = builder.and_(dim, _i64(-LANES))
        row_bytes = builder.mul(dim, _i64(kinds[0].dtype.bitwidth // 8))
        accumulators = [cgutils.alloca_once(builder, _vector(_f32)) for _ in range(HEADS)]
        rest = cgutils.alloca_once(builder, _vector(_f32, HEADS))
        largest = cgutils.alloca_once(builder, _vector(_f32, HEADS))
        builder.store(_load(builder, most_data, HEADS, _f32), largest)
        with cgutils.for_range(builder, num_rows) as loop:
            _ahead(builder, row_data, loop.index, num_rows, pool_data, row_bytes)
            row = builder.gep(pool_data, [builder.load(builder.gep(row_data, [loop.index]))])
            for accumulator in accumulators:
                builder.store(_splat(0.0), accumulator)
            builder.store(_splat(0.0, HEADS), rest)
            with cgutils.for_range_slice(builder, _i64(0), whole, _i64(LANES)) as (channel, _):
                key = _wide(builder, kinds[0].dtype, builder.gep(row, [channel]), LANES)
                for r, accumulator in enumerate(accumulators):
                    at = builder.add(channel, builder.mul(dim, _i64(r)))
                    query = _load(builder, builder.gep(query_data, [at]), LANES, _f32)
                    builder.store(_fma(builder, key, query, builder.load(accumulator)), accumulator)
            with cgutils.for_range_slice(builder, whole, dim, _i64(1)) as (channel, _):
                key = _broadcast(builder, _wide(builder, kinds[0].dtype, builder.gep(row, [channel]), 1), HEADS)
                query = _splat(0.0, HEADS)
                for r in range(HEADS):
                    at = builder.add(channel, builder.mul(dim, _i64(r)))
                    query = builder.insert_element(
                        query, _load(builder, builder.gep(query_data, [at]), 1, _f32), _i32(r)
                    )
                builder.store(_fma(builder, key, query, builder.load(rest)), rest)
            sums = _sums_of_four(builder, [builder.load(one) for one in accumulators])
            sums = builder.fadd(sums, builder.load(rest))
            _store(builder, sums, builder.gep(logit_data, [builder.mul(loop.index, _i64(HEADS))]))
            builder.store(_call(builder, "maxnum", builder.load(largest), sums), largest)
        _store(builder, builder.load(largest), most_data)
        return context.get_dummy_value()

    return types.void(pool, rows, count, head_dim, queries, logits, most), codegen


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
def add_weighted(typing_context, pool, rows, first, end, count, head_dim, weights, sums):
    """sums[r D + c] += sum over i in first .. end - 1 of weights[4 i + r] * pool[rows[i] + c], for four heads r and the
    head_dim D channels c. Rows up to `count` are asked for ahead."""

    def codegen(context, builder, signature, args):
        kinds = signature.args
        pool_data, row_data = (_data(context, builder, kinds[i], args[i]) for i in (0, 1))
        start, stop, num_rows, dim = (_int64(context, builder, kinds[i], args[i]) for i in (2, 3, 4, 5))
        weight_data, sum_data = (_data(context, builder, kinds[i], args[i]) for i in (6, 7))
        row_bytes = builder.mul(dim, _i64(kinds[0].dtype.bitwidth // 8))
        with cgutils.for_range_slice(builder, start, stop, _i64(1)) as (i, _):
            _ahead(builder, row_data, i, num_rows, pool_data, row_bytes)

        def block(channel, lanes: int, vectors: int):
            """All rows for lanes * vectors channels from `channel`, with the sums in registers."""

            def places():
                for r in range(HEADS):
                    for j in range(vectors):
                        at = builder.add(builder.mul(dim, _i64(r)), builder.add(channel, _i64(j * lanes)))
                        yield r, j, builder.gep(sum_data, [at])

            kept = {}
            for r, j, pointer in places():
                kept[r, j] = cgutils.alloca_once(builder, _f32 if lanes == 1 else _vector(_f32, lanes))
                builder.store(_load(builder, pointer, lanes, _f32), kept[r, j])
            with cgutils.for_range_slice(builder, start, stop, _i64(1)) as (i, _):
                row = builder.gep(pool_data, [builder.add(builder.load(builder.gep(row_data, [i])), channel)])
                own = builder.gep(weight_data, [builder.mul(i, _i64(HEADS))])
                each = [_load(builder, builder.gep(own, [_i64(r)]), 1, _f32) for r in range(HEADS)]
                if lanes > 1:
                    each = [_broadcast(builder, weight, lanes) for weight in each]
                for j in range(vectors):
                    value = _wide(builder, kinds[0].dtype, builder.gep(row, [_i64(j * lanes)]), lanes)
                    for r in range(HEADS):
                        own_sum = builder.load(kept[r, j])
                        if lanes == 1:
                            own_sum = builder.fadd(builder.fmul(value, each[r]), own_sum)
                        else:
                            own_sum = _fma(builder, value, each[r], own_sum)
                        builder.store(own_sum, kept[r, j])
            for r, j, pointer in places():
                _store(builder, builder.load(kept[r, j]), pointer)

        done = _i64(0)
        for lanes, vectors in ((LANES, 4), (LANES, 1), (1, 1)):
            width = lanes * vectors
            until = builder.and_(dim, _i64(-width))
            with cgutils.for_range_slice(builder, done, until, _i64(width)) as (channel, _):
                block(channel, lanes, vectors)
            done = until
        return context.get_dummy_value()

    return types.void(pool, rows, first, end, count, head_dim, weights, sums), codegen


def _byte_sums(builder, codes, num_bytes, table):
    """The sum over j < num_bytes of table[4 (256 j + codes[j]) ..], a vector of four; unrolled if num_bytes is a
    Python number."""

    def add(total, byte, place):
        row = builder.mul(builder.add(builder.mul(place, _i64(256)), byte), _i64(HEADS))
        return builder.fadd(total, _load(builder, builder.gep(table, [row]), HEADS, _f32))

    def add_eight(total, place):
        eight = builder.load(builder.bitcast(builder.gep(codes, [place]), _i64.as_pointer()), align=1)
        for i in range(8):  # one load of eight codes instead of eight
            byte = builder.and_(builder.lshr(eight, _i64(8 * i)), _i64(255))
            total = add(total, byte, builder.add(place, _i64(i)))
        return total

    if isinstance(num_bytes, int):
        total = _splat(0.0, HEADS)
        for place in range(0, num_bytes, 8):
            total = add_eight(total, _i64(place))
        return total
    kept = cgutils.alloca_once(builder, _vector(_f32, HEADS))
    builder.store(_splat(0.0, HEADS), kept)
    eights = builder.and_(num_bytes, _i64(-8))
    with cgutils.for_range_slice(builder, _i64(0), eights, _i64(8)) as (place, _):
        builder.store(add_eight(builder.load(kept), place), kept)
    with cgutils.for_range_slice(builder, eights, num_bytes, _i64(1)) as (place, _):
        byte = builder.zext(builder.load(builder.gep(codes, [place])), _i64)
        builder.store(add(builder.load(kept), byte, place), kept)
    return builder.load(kept)


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
def first_sums(typing_context, codes, row, count, num_bytes, table, sums, at):
    """sums[4 (at + i) ..] = sum over j < HALF_BYTES of table[4 (256 j + codes[(row + i) num_bytes + j]) ..], i < count:
    the first part of what `score_rows` then adds to, so that no more of the table than a core's first cache holds is
    used at a time."""

    def codegen(context, builder, signature, args):
        kinds = signature.args
        code_data, table_data, sum_data = (_data(context, builder, kinds[i], args[i]) for i in (0, 4, 5))
        first, number, num, place = (_int64(context, builder, kinds[i], args[i]) for i in (1, 2, 3, 6))
        with cgutils.for_range(builder, number) as each:
            start = builder.mul(builder.add(first, each.index), num)
            total = _byte_sums(builder, builder.gep(code_data, [start]), HALF_BYTES, table_data)
            _store(builder, total, builder.gep(sum_data, [builder.mul(builder.add(place, each.index), _i64(HEADS))]))
        return context.get_dummy_value()

    return types.void(codes, row, count, num_bytes, table, sums, at), codegen


@intrinsic
def score_rows(typing_context, codes, second, rows, count, num_bytes, table, scale, base, scores, sums, at):
    """scores[i] = max over four heads r of base[r] + scale[row] (sum over j < num_bytes of
    table[4 (256 j + codes[row num_bytes + j]) + r]), i < count, for row = rows[i], or rows + i where it is a number.
    Half of what the bytes of `second` add is added unless it is None. Where `sums` is not None, `first_sums` has put
    what the first HALF_BYTES add into it, from `at` on. LARGEST_ESTIMATE stands for a head's that is not finite."""

    def codegen(context, builder, signature, args):
        kinds = signature.args
        code_data, table_data, scale_data, base_data, score_data = (
            _data(context, builder, kinds[i], args[i]) for i in (0, 5, 6, 7, 8)
        )
        num_rows, num = (_int64(context, builder, kinds[i], args[i]) for i in (3, 4))
        offsets = _load(builder, base_data, HEADS, _f32)

        def row_of(index):
            if isinstance(kinds[2], types.Array):
                return builder.load(builder.gep(_data(context, builder, kinds[2], args[2]), [index]))
            return builder.add(_int64(context, builder, kinds[2], args[2]), index)

        def loop(width):
            with cgutils.for_range(builder, num_rows) as each:
                row = row_of(each.index)
                start = builder.mul(row, num)
                if isinstance(kinds[9], types.NoneType):
                    total = _byte_sums(builder, builder.gep(code_data, [start]), width, table_data)
                else:
                    rest = builder.gep(code_data, [builder.add(start, _i64(HALF_BYTES))])
                    later = builder.gep(table_data, [_i64(HALF_BYTES * 256 * HEADS)])
                    place = builder.mul(builder.add(begun, each.index), _i64(HEADS))
                    total = _load(builder, builder.gep(sum_data, [place]), HEADS, _f32)
                    total = builder.fadd(total, _byte_sums(builder, rest, width - HALF_BYTES, later))
                if not isinstance(kinds[1], types.NoneType):
                    second_data = _data(context, builder, kinds[1], args[1])
                    more = _byte_sums(builder, builder.gep(second_data, [start]), width, table_data)
                    total = _fma(builder, more, _splat(0.5, HEADS), total)
                factor = _wide(builder, kinds[6].dtype, builder.gep(scale_data, [row]), 1)
                score = _fma(builder, _broadcast(builder, factor, HEADS), total, offsets)
                finite = builder.fcmp_ordered("<", _call(builder, "fabs", score), _splat(float("inf"), HEADS))
                score = builder.select(finite, score, _splat(LARGEST_ESTIMATE, HEADS))
                for picks in ([2, 3, 0, 1], [1, 0, 3, 2]):
                    score = _call(builder, "maxnum", score, _shuffle(builder, score, score, picks))
                builder.store(builder.extract_element(score, _i32(0)), builder.gep(score_data, [each.index]))

        if not isinstance(kinds[9], types.NoneType):
            sum_data, begun = _data(context, builder, kinds[9], args[9]), _int64(context, builder, kinds[10], args[10])
            loop(2 * HALF_BYTES)
            return context.get_dummy_value()
        # unrolled for one bit of the usual head dims: half the time
        usual = [builder.icmp_signed("==", num, _i64(width)) for width in (16, 8)]
        for width, matches in zip((16, 8), usual, strict=True):
            with builder.if_then(matches):
                loop(width)
        with builder.if_then(builder.not_(builder.or_(*usual))):
            loop(num)
        return context.get_dummy_value()

    return types.void(codes, second, rows, count, num_bytes, table, scale, base, scores, sums, at), codegen


@intrinsic
def wide(typing_context, stored):
    """A stored number as float32: the bits of a float16 where it is an int16, of a bfloat16 where it is a uint16."""

    def codegen(context, builder, signature, args):
        if signature.args[0] == types.int16:
            return builder.fpext(builder.bitcast(args[0], ir.HalfType()), _f32)
        return builder.bitcast(builder.shl(builder.zext(args[0], _i32), _i32(16)), _f32)

    return types.float32(stored), codegen
