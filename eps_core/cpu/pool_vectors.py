"""Rows of K and V, of correction means and of summaries that are multiplied or added up, as numba intrinsics.

A pool is a flat array whose element type says how it is read (`vectors`), and a row of it is named by the element that
it begins with. Or it is a pool of codes, a tuple: flat codes, int8 of 8 bits or uint8 of two of 4 bits, flat scales
int16 (the bits of a float16), and an empty array of the element type that values are rounded to; a row is named by its
number. Values of codes are the oracle's to the last bit (`eps_core.reference.pages`): code * scale in float32, rounded
to that type.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from eps_core.cpu.vectors import (
    _LINE,
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
    _look_up,
    _prefetch,
    _prefetch_line,
    _shuffle,
    _splat,
    _store,
    _sums,
    _vector,
    _wide,
)

DOT_ROWS = 4 if PERMUTES else 1  # rows that share a load of the queries: as many as there are registers for
PREFETCH_ROWS = 32  # how far ahead rows are asked for; changes speed only
_i8, _i16 = ir.IntType(8), ir.IntType(16)
_LARGEST_HALF = 65504.0


def _rounded(builder, value, kind):
    """Vectors of code * scale, of at most 18 significant bits and 0 or at least 2^-24, as numbers of a stored type.

    x 2^n + x, rounded to float32's 24 bits, less x 2^n is x rounded to 24 - n bits, ties to even: x 2^n is a multiple
    of the step of that sum, an even one at a tie, as x has bits to spare. What float16 holds as a denormal number is a
    multiple of its least one already. NaN stays."""
    if kind == types.float32:
        return value
    lanes, power = value.type.count, 2.0 ** (16 if kind == types.uint16 else 13)
    larger = _fma(builder, value, _splat(power, lanes), value)
    value = _fma(builder, value, _splat(-power, lanes), larger)
    if kind == types.int16:  # whose largest number's code can round past it
        for most, beyond in ((_LARGEST_HALF, ">"), (-_LARGEST_HALF, "<")):
            most = _splat(most, lanes)
            value = builder.select(builder.fcmp_ordered(beyond, value, most), most, value)
    return value


class _Numbers:
    """A row of stored numbers."""

    def __init__(self, builder, kind, pointer) -> None:
        self.builder, self.kind, self.pointer = builder, kind, pointer

    def values(self, channel, lanes: int):
        """`lanes` channels as float32: a vector, or a scalar for one lane."""
        return _wide(self.builder, self.kind, self.builder.gep(self.pointer, [channel]), lanes)


class _Codes:
    """A row of codes of 8 or 4 bits."""

    def __init__(self, builder, bits: int, kind, pointer, scale) -> None:
        self.builder, self.bits, self.kind, self.pointer, self.scale = builder, bits, kind, pointer, scale
        self.table = None  # the value of each of sixteen codes
        if bits == 4 and PERMUTES:
            codes = ir.Constant(_vector(_f32), [ir.Constant(_f32, float(code - 8)) for code in range(16)])
            self.table = self._of(codes)

    def _of(self, codes):
        """The values of codes, a vector of float32."""
        scale = _broadcast(self.builder, self.scale, codes.type.count)
        return _rounded(self.builder, self.builder.fmul(codes, scale), self.kind)

    def values(self, channel, lanes: int):
        """As of `_Numbers`; a channel is a multiple of `lanes`."""
        builder = self.builder
        if self.bits == 8:
            codes = _wide(builder, types.int8, builder.gep(self.pointer, [channel]), lanes)
        else:
            nibbles = self._nibbles(channel, lanes)
            if self.table is not None and lanes == LANES:
                return _look_up(builder, self.table, nibbles)
            four, eight = ((_i32(n) if lanes == 1 else ir.Constant(_vector(_i32, lanes), [n] * lanes)) for n in (15, 8))
            codes = builder.sub(builder.and_(nibbles, four), eight)
            codes = builder.sitofp(codes, _f32 if lanes == 1 else _vector(_f32, lanes))
        if lanes > 1:
            return self._of(codes)
        return builder.extract_element(self._of(_broadcast(builder, codes, 1)), _i32(0))

    def _nibbles(self, channel, lanes: int):
        """The codes + 8 of `lanes` channels, in the lowest four bits of int32; what is above is of no meaning."""
        builder = self.builder
        pointer = builder.gep(self.pointer, [builder.lshr(channel, _i64(1))])
        if lanes == 1:
            odd = builder.trunc(builder.and_(channel, _i64(1)), _i32)
            return builder.lshr(builder.zext(builder.load(pointer), _i32), builder.mul(odd, _i32(4)))
        pairs = builder.zext(_load(builder, pointer, lanes // 2, _i8), _vector(_i16, lanes // 2))
        # the upper four bits of a byte become the lowest of the next
        pairs = builder.or_(pairs, builder.shl(pairs, ir.Constant(pairs.type, [4] * (lanes // 2))))
        return builder.zext(builder.bitcast(pairs, _vector(_i8, lanes)), _vector(_i32, lanes))


class Reader:
    """A pool of rows of `dim` channels, in the code of an intrinsic that was given it."""

    def __init__(self, context, builder, kind, value, dim) -> None:
        self.builder, self.dim, self.coded = builder, dim, isinstance(kind, types.BaseTuple)
        if not self.coded:
            self.kind, self.bits, self.data = kind.dtype, kind.dtype.bitwidth, _data(context, builder, kind, value)
            return
        codes, scales, of = kind.types
        self.kind, self.bits = of.dtype, 8 if codes.dtype == types.int8 else 4
        self.data, self.scales = (
            _data(context, builder, one, builder.extract_value(value, i)) for i, one in enumerate((codes, scales))
        )

    def _pointer(self, row, channel):
        """Return where a channel, even where two make a byte, of a row lies."""
        builder = self.builder
        if self.coded:
            row = builder.mul(row, self.dim)
        place = builder.add(row, channel)
        return builder.gep(self.data, [builder.lshr(place, _i64(1)) if self.bits == 4 else place])

    def row(self, row):
        """Return the reader of the row of that name."""
        builder, pointer = self.builder, self._pointer(row, _i64(0))
        if not self.coded:
            return _Numbers(builder, self.kind, pointer)
        scale = _from_half(builder, builder.load(builder.gep(self.scales, [row])))
        return _Codes(builder, self.bits, self.kind, pointer, scale)

    def ask_for(self, row, channel, count) -> None:
        """Asks for the cache lines of `count` channels of a row, an int where it is known, and of its scale."""
        builder, pointer = self.builder, self._pointer(row, channel)
        if isinstance(count, int):
            line_elements = _LINE * 8 // max(self.bits, 8)
            for line in range(-(-count * self.bits // (8 * _LINE))):
                _prefetch_line(builder, builder.gep(pointer, [_i64(line * line_elements)]))
        else:
            _prefetch(builder, pointer, builder.udiv(builder.mul(count, _i64(self.bits)), _i64(8)))
        if self.coded:
            _prefetch_line(builder, builder.gep(self.scales, [row]))


@intrinsic
def dots(typing_context, pool, rows, count, head_dim, queries, logits, most):
    """logits[4 i + r] = channel c of row rows[i] . queries[r D + c] over the head_dim D channels c of a pool, for i <
    count rows, a multiple of DOT_ROWS, and four heads r; most[r] (in and out) becomes the largest of these and of what
    it held. PREFETCH_ROWS more of `rows` are asked for ahead."""

    def codegen(context, builder, signature, args):
        kinds = signature.args
        row_data, query_data, logit_data, most_data = (_data(context, builder, kinds[i], args[i]) for i in (1, 4, 5, 6))
        num_rows, dim = (_int64(context, builder, kinds[i], args[i]) for i in (2, 3))
        reader = Reader(context, builder, kinds[0], args[0], dim)
        whole = builder.and_(dim, _i64(-LANES))
        width = HEADS * DOT_ROWS
        accumulators = [cgutils.alloca_once(builder, _vector(_f32)) for _ in range(width)]
        rest = cgutils.alloca_once(builder, _vector(_f32, width))
        largest = cgutils.alloca_once(builder, _vector(_f32, width))
        four = _load(builder, most_data, HEADS, _f32)
        builder.store(_shuffle(builder, four, four, [*range(HEADS)] * DOT_ROWS), largest)
        with cgutils.for_range_slice(builder, _i64(0), num_rows, _i64(DOT_ROWS)) as (first, _):
            places = []
            for i in range(DOT_ROWS):
                index = builder.add(first, _i64(i))
                places.append(reader.row(builder.load(builder.gep(row_data, [index]))))
                ahead = builder.load(builder.gep(row_data, [builder.add(index, _i64(PREFETCH_ROWS))]))
                reader.ask_for(ahead, _i64(0), dim)
            for accumulator in accumulators:
                builder.store(_splat(0.0), accumulator)
            builder.store(_splat(0.0, width), rest)
            with cgutils.for_range_slice(builder, _i64(0), whole, _i64(LANES)) as (channel, _):
                keys = [row.values(channel, LANES) for row in places]
                for r in range(HEADS):
                    at = builder.add(channel, builder.mul(dim, _i64(r)))
                    query = _load(builder, builder.gep(query_data, [at]), LANES, _f32)
                    for key, accumulator in zip(keys, accumulators[r::HEADS], strict=True):
                        builder.store(_fma(builder, key, query, builder.load(accumulator)), accumulator)
            with cgutils.for_range_slice(builder, whole, dim, _i64(1)) as (channel, _):
                key = query = _splat(0.0, width)
                for r in range(HEADS):
                    at = builder.add(channel, builder.mul(dim, _i64(r)))
                    one = _load(builder, builder.gep(query_data, [at]), 1, _f32)
                    for i, row in enumerate(places):
                        other = row.values(channel, 1)
                        query = builder.insert_element(query, one, _i32(i * HEADS + r))
                        key = builder.insert_element(key, other, _i32(i * HEADS + r))
                builder.store(_fma(builder, key, query, builder.load(rest)), rest)
            sums = _sums(builder, [builder.load(one) for one in accumulators])
            sums = builder.fadd(sums, builder.load(rest))
            _store(builder, sums, builder.gep(logit_data, [builder.mul(first, _i64(HEADS))]))
            builder.store(_call(builder, "maxnum", builder.load(largest), sums), largest)
        left, rows_left = builder.load(largest), DOT_ROWS
        while rows_left > 1:
            rows_left //= 2
            low, high = ([*range(start, start + rows_left * HEADS)] for start in (0, rows_left * HEADS))
            left = _call(builder, "maxnum", _shuffle(builder, left, left, low), _shuffle(builder, left, left, high))
        _store(builder, left, most_data)
        return context.get_dummy_value()

    return types.void(pool, rows, count, head_dim, queries, logits, most), codegen


def _adds_rows(heads: int):
    """The code of `add_weighted` for as many heads."""

    def codegen(context, builder, signature, args):
        kinds = signature.args
        start, stop, dim = (_int64(context, builder, kinds[i], args[i]) for i in (2, 3, 4))
        row_data, weight_data, sum_data = (_data(context, builder, kinds[i], args[i]) for i in (1, 5, 6))
        reader = Reader(context, builder, kinds[0], args[0], dim)

        def block(channel, lanes: int, vectors: int):
            """Return all rows for lanes * vectors channels from `channel`, with the sums in registers."""

            def places():
                for r in range(heads):
                    for j in range(vectors):
                        at = builder.add(builder.mul(dim, _i64(r)), builder.add(channel, _i64(j * lanes)))
                        yield r, j, builder.gep(sum_data, [at])

            kept = {}
            for r, j, pointer in places():
                kept[r, j] = cgutils.alloca_once(builder, _f32 if lanes == 1 else _vector(_f32, lanes))
                builder.store(_load(builder, pointer, lanes, _f32), kept[r, j])
            with cgutils.for_range_slice(builder, start, stop, _i64(1)) as (i, _):
                name, ahead = (
                    builder.load(builder.gep(row_data, [index])) for index in (i, builder.add(i, _i64(PREFETCH_ROWS)))
                )
                reader.ask_for(ahead, channel, lanes * vectors)
                row = reader.row(name)
                own = builder.gep(weight_data, [builder.mul(i, _i64(heads))])
                each = [_load(builder, builder.gep(own, [_i64(r)]), 1, _f32) for r in range(heads)]
                if lanes > 1:
                    each = [_broadcast(builder, weight, lanes) for weight in each]
                for j in range(vectors):
                    value = row.values(builder.add(channel, _i64(j * lanes)), lanes)
                    for r in range(heads):
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

    return codegen


@intrinsic
def add_weighted(typing_context, pool, rows, first, end, head_dim, weights, sums):
    """sums[r D + c] += sum over i in first .. end - 1 of weights[4 i + r] * channel c of row rows[i] of the pool, for
    four heads r and the head_dim D channels c. PREFETCH_ROWS more of `rows` are asked for ahead."""
    return types.void(pool, rows, first, end, head_dim, weights, sums), _adds_rows(HEADS)


@intrinsic
def add_scaled(typing_context, pool, rows, first, end, head_dim, weights, sums):
    """`add_weighted` for one head: sums[c] += sum over i of weights[i] * channel c of row rows[i]."""
    return types.void(pool, rows, first, end, head_dim, weights, sums), _adds_rows(1)


@intrinsic
def widen_rows(typing_context, pool, rows, first, count, head_dim, wide):
    """wide[i D + c] = channel c of row rows[first + i] of the pool as float32, for i < count and the head_dim D
    channels c."""

    def codegen(context, builder, signature, args):
        kinds = signature.args
        row_data, wide_data = (_data(context, builder, kinds[i], args[i]) for i in (1, 5))
        start, num, dim = (_int64(context, builder, kinds[i], args[i]) for i in (2, 3, 4))
        reader, whole = Reader(context, builder, kinds[0], args[0], dim), builder.and_(dim, _i64(-LANES))
        with cgutils.for_range(builder, num) as each:
            row = reader.row(builder.load(builder.gep(row_data, [builder.add(start, each.index)])))
            target = builder.gep(wide_data, [builder.mul(each.index, dim)])
            for begin, end, lanes in ((_i64(0), whole, LANES), (whole, dim, 1)):
                with cgutils.for_range_slice(builder, begin, end, _i64(lanes)) as (channel, _):
                    _store(builder, row.values(channel, lanes), builder.gep(target, [channel]))
        return context.get_dummy_value()

    return types.void(pool, rows, first, count, head_dim, wide), codegen


@intrinsic
def ask_for_row(typing_context, pool, row, head_dim):
    """Prefetches a row of the pool."""

    def codegen(context, builder, signature, args):
        row, dim = (_int64(context, builder, signature.args[i], args[i]) for i in (1, 2))
        Reader(context, builder, signature.args[0], args[0], dim).ask_for(row, _i64(0), dim)
        return context.get_dummy_value()

    return types.void(pool, row, head_dim), codegen
