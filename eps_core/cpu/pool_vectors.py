"""Rows of K and V that are multiplied or added up, as numba intrinsics.

A pool is a flat array whose element type says how it is read (`vectors`), and a row of it is named by the element that
it begins with. Or it is a pool of codes, a tuple: flat codes, int8 of 8 bits or uint8 of two of 4 bits, flat scales
int16 (the bits of a float16), and an empty array of the element type that values are rounded to; a row is named by its
number. Values of codes are the oracle's to the last bit (`eps_core.reference.pages`): code * scale in float32, rounded
to that type.
"""

from functools import partial

from llvmlite import ir
from numba import types
from numba.core import cgutils

from eps_core.cpu.vectors import HEADS, LANES, LINE, PERMUTES, emits, f32, i8, i16, i32, i64, repeated, splat, vector_of

DOT_ROWS = 4 if PERMUTES else 1  # rows that share a load of the queries: as many as there are registers for
PREFETCH_ROWS = 32  # how far ahead rows are asked for; changes speed only
_LARGEST_HALF = 65504.0


def _rounded(builder, value, kind):
    """Vectors of code * scale, of at most 18 significant bits and 0 or at least 2^-24, as numbers of a stored type.

    x 2^n + x, rounded to float32's 24 bits, less x 2^n is x rounded to 24 - n bits, ties to even: x 2^n is a multiple
    of the step of that sum, an even one at a tie, as x has bits to spare. What float16 holds as a denormal number is a
    multiple of its least one already. NaN stays."""
    if kind == types.float32:
        return value
    lanes, power = value.type.count, 2.0 ** (16 if kind == types.uint16 else 13)
    larger = builder.fma(value, splat(power, lanes), value)
    value = builder.fma(value, splat(-power, lanes), larger)
    if kind == types.int16:  # whose largest number's code can round past it
        for most, beyond in ((_LARGEST_HALF, ">"), (-_LARGEST_HALF, "<")):
            most = splat(most, lanes)
            value = builder.select(builder.fcmp_ordered(beyond, value, most), most, value)
    return value


class _Numbers:
    """A row of stored numbers."""

    def __init__(self, builder, kind, pointer) -> None:
        self.builder, self.kind, self.pointer = builder, kind, pointer

    def values(self, channel, lanes: int):
        """`lanes` channels as float32: a vector, or a scalar for one lane."""
        stored = self.builder.load_lanes(self.builder.at(self.pointer, channel), lanes)
        return self.builder.widened(self.kind, stored)


class _Codes:
    """A row of codes of 8 or 4 bits."""

    def __init__(self, builder, bits: int, kind, pointer, scale) -> None:
        self.builder, self.bits, self.kind, self.pointer, self.scale = builder, bits, kind, pointer, scale
        self.table = None  # the value of each of sixteen codes
        if bits == 4 and PERMUTES:
            codes = ir.Constant(vector_of(f32), [float(code - 8) for code in range(16)])
            self.table = self._of(codes)

    def _of(self, codes):
        """The values of codes, a vector of float32."""
        scale = self.builder.broadcast(self.scale, codes.type.count)
        return _rounded(self.builder, self.builder.fmul(codes, scale), self.kind)

    def values(self, channel, lanes: int):
        """As of `_Numbers`; a channel is a multiple of `lanes`."""
        builder = self.builder
        if self.bits == 8:
            codes = builder.widened(types.int8, builder.load_lanes(builder.at(self.pointer, channel), lanes))
        else:
            nibbles = self._nibbles(channel, lanes)
            if self.table is not None and lanes == LANES:
                return builder.look_up(self.table, nibbles)
            four, eight = (i32(n) if lanes == 1 else repeated(n, lanes) for n in (15, 8))
            codes = builder.sub(builder.and_(nibbles, four), eight)
            codes = builder.sitofp(codes, f32 if lanes == 1 else vector_of(f32, lanes))
        if lanes > 1:
            return self._of(codes)
        return builder.extract_element(self._of(builder.broadcast(codes, 1)), i32(0))

    def _nibbles(self, channel, lanes: int):
        """The codes + 8 of `lanes` channels, in the lowest four bits of int32; what is above is of no meaning."""
        builder = self.builder
        pointer = builder.at(self.pointer, builder.lshr(channel, i64(1)))
        if lanes == 1:
            odd = builder.trunc(builder.and_(channel, i64(1)), i32)
            return builder.lshr(builder.zext(builder.load(pointer), i32), builder.mul(odd, i32(4)))
        pairs = builder.zext(builder.load_lanes(pointer, lanes // 2), vector_of(i16, lanes // 2))
        # the upper four bits of a byte become the lowest of the next
        pairs = builder.or_(pairs, builder.shl(pairs, repeated(4, lanes // 2, i16)))
        return builder.zext(builder.bitcast(pairs, vector_of(i8, lanes)), vector_of(i32, lanes))


class Reader:
    """A pool of rows of `dim` channels, in the code of an intrinsic that was given it."""

    def __init__(self, builder, kind, pool, dim) -> None:
        self.builder, self.dim, self.coded = builder, dim, isinstance(kind, types.BaseTuple)
        if self.coded:
            codes, _, of = kind.types
            self.kind, self.bits = of.dtype, 8 if codes.dtype == types.int8 else 4
            self.data, self.scales, _ = pool
        else:
            self.kind, self.bits, self.data = kind.dtype, kind.dtype.bitwidth, pool

    def _pointer(self, row, channel):
        """Return where a channel, even where two make a byte, of a row lies."""
        builder = self.builder
        if self.coded:
            row = builder.mul(row, self.dim)
        place = builder.add(row, channel)
        return builder.at(self.data, builder.lshr(place, i64(1)) if self.bits == 4 else place)

    def row(self, row):
        """Return the reader of the row of that name."""
        builder, pointer = self.builder, self._pointer(row, i64(0))
        if not self.coded:
            return _Numbers(builder, self.kind, pointer)
        scale = builder.from_half(builder.load(builder.at(self.scales, row)))
        return _Codes(builder, self.bits, self.kind, pointer, scale)

    def ask_for(self, row, channel, count) -> None:
        """Asks for the cache lines of `count` channels of a row, an int where it is known, and of its scale."""
        builder, pointer = self.builder, self._pointer(row, channel)
        if isinstance(count, int):
            line_elements = LINE * 8 // max(self.bits, 8)
            for line in range(-(-count * self.bits // (8 * LINE))):
                builder.prefetch_line(builder.at(pointer, line * line_elements))
        else:
            builder.prefetch(pointer, builder.udiv(builder.mul(count, i64(self.bits)), i64(8)))
        if self.coded:
            builder.prefetch_line(builder.at(self.scales, row))


@emits()
def dots(builder, kinds, pool, rows, count, head_dim, queries, logits, most):
    """logits[4 i + r] = channel c of row rows[i] . queries[r D + c] over the head_dim D channels c of a pool, for i <
    count rows, a multiple of DOT_ROWS, and four heads r; most[r] (in and out) becomes the largest of these and of what
    it held. PREFETCH_ROWS more of `rows` are asked for ahead."""
    reader = Reader(builder, kinds[0], pool, head_dim)
    whole = builder.and_(head_dim, i64(-LANES))
    width = HEADS * DOT_ROWS
    accumulators = [cgutils.alloca_once(builder, vector_of(f32)) for _ in range(width)]
    rest = cgutils.alloca_once(builder, vector_of(f32, width))
    largest = cgutils.alloca_once(builder, vector_of(f32, width))
    four = builder.load_lanes(most, HEADS)
    builder.store(builder.shuffle(four, four, [*range(HEADS)] * DOT_ROWS), largest)
    with builder.steps(0, count, DOT_ROWS) as first:
        places = []
        for i in range(DOT_ROWS):
            index = builder.total(first, i)
            places.append(reader.row(builder.load(builder.at(rows, index))))
            ahead = builder.load(builder.at(rows, index, PREFETCH_ROWS))
            reader.ask_for(ahead, i64(0), head_dim)
        for accumulator in accumulators:
            builder.store(splat(0.0), accumulator)
        builder.store(splat(0.0, width), rest)
        with builder.steps(0, whole, LANES) as channel:
            keys = [row.values(channel, LANES) for row in places]
            for r in range(HEADS):
                query = builder.load_lanes(builder.at(queries, channel, (head_dim, r)))
                for key, accumulator in zip(keys, accumulators[r::HEADS], strict=True):
                    builder.store(builder.fma(key, query, builder.load(accumulator)), accumulator)
        with builder.steps(whole, head_dim) as channel:
            key = query = splat(0.0, width)
            for r in range(HEADS):
                one = builder.load(builder.at(queries, channel, (head_dim, r)))
                for i, row in enumerate(places):
                    other = row.values(channel, 1)
                    query = builder.insert_element(query, one, i32(i * HEADS + r))
                    key = builder.insert_element(key, other, i32(i * HEADS + r))
            builder.store(builder.fma(key, query, builder.load(rest)), rest)
        sums = builder.sums([builder.load(one) for one in accumulators])
        sums = builder.fadd(sums, builder.load(rest))
        builder.store_lanes(sums, builder.at(logits, (first, HEADS)))
        builder.store(builder.call_floats("maxnum", builder.load(largest), sums), largest)
    most_of_two = partial(builder.call_floats, "maxnum")
    builder.store_lanes(builder.folded(builder.load(largest), HEADS, most_of_two), most)


@emits()
def add_weighted(builder, kinds, pool, rows, first, end, head_dim, weights, sums):
    """sums[r D + c] += sum over i in first .. end - 1 of weights[4 i + r] * channel c of row rows[i] of the pool, for
    four heads r and the head_dim D channels c. PREFETCH_ROWS more of `rows` are asked for ahead."""
    reader = Reader(builder, kinds[0], pool, head_dim)

    def block(channel, lanes: int, vectors: int):
        """Return all rows for lanes * vectors channels from `channel`, with the sums in registers."""

        def places():
            for r in range(HEADS):
                for j in range(vectors):
                    yield r, j, builder.at(sums, (head_dim, r), builder.total(channel, j * lanes))

        kept = {}
        for r, j, pointer in places():
            kept[r, j] = cgutils.alloca_once(builder, f32 if lanes == 1 else vector_of(f32, lanes))
            builder.store(builder.load_lanes(pointer, lanes), kept[r, j])
        with builder.steps(first, end) as i:
            name, ahead = (builder.load(builder.at(rows, index)) for index in (i, builder.total(i, PREFETCH_ROWS)))
            reader.ask_for(ahead, channel, lanes * vectors)
            row = reader.row(name)
            own = builder.at(weights, (i, HEADS))
            each = [builder.load_lanes(builder.at(own, r), 1) for r in range(HEADS)]
            if lanes > 1:
                each = [builder.broadcast(weight, lanes) for weight in each]
            for j in range(vectors):
                value = row.values(builder.total(channel, j * lanes), lanes)
                for r in range(HEADS):
                    own_sum = builder.load(kept[r, j])
                    if lanes == 1:
                        own_sum = builder.fadd(builder.fmul(value, each[r]), own_sum)
                    else:
                        own_sum = builder.fma(value, each[r], own_sum)
                    builder.store(own_sum, kept[r, j])
        for r, j, pointer in places():
            builder.store_lanes(builder.load(kept[r, j]), pointer)

    done = i64(0)
    for lanes, vectors in ((LANES, 4), (LANES, 1), (1, 1)):
        width = lanes * vectors
        until = builder.and_(head_dim, i64(-width))
        with builder.steps(done, until, width) as channel:
            block(channel, lanes, vectors)
        done = until


@emits()
def widen_rows(builder, kinds, pool, rows, first, count, head_dim, wide):
    """wide[i D + c] = channel c of row rows[first + i] of the pool as float32, for i < count and the head_dim D
    channels c."""
    reader, whole = Reader(builder, kinds[0], pool, head_dim), builder.and_(head_dim, i64(-LANES))
    with cgutils.for_range(builder, count) as each:
        row = reader.row(builder.load(builder.at(rows, first, each.index)))
        target = builder.at(wide, (each.index, head_dim))
        for begin, end, lanes in ((i64(0), whole, LANES), (whole, head_dim, 1)):
            with builder.steps(begin, end, lanes) as channel:
                builder.store_lanes(row.values(channel, lanes), builder.at(target, channel))


@emits()
def ask_for_row(builder, kinds, pool, row, head_dim):
    """Prefetches a row of the pool."""
    Reader(builder, kinds[0], pool, head_dim).ask_for(row, i64(0), head_dim)
