"""Vector instructions for the CPU kernels, as numba intrinsics written in LLVM's terms: functions that `emits` makes
intrinsics of, and what they are written with.

Sixteen float32 lanes and four query heads at a time: one AVX-512 register, two of AVX2, four of NEON (LLVM splits what
a CPU lacks). numba's own loops do not vectorise over converted 16-bit values and several accumulators; these do.

Arguments are one-dimensional C-contiguous arrays; offsets count elements. The element type of a stored array says how
it is read: float32; uint16, the bits of a bfloat16; int16, the bits of a float16; int8 and uint8, whole numbers.
"""

import functools
import inspect
import platform
from contextlib import contextmanager

from llvmlite import ir
from numba import config, types
from numba.core import cgutils
from numba.core.codegen import get_host_cpu_features
from numba.extending import intrinsic

HEADS = 4  # query heads at a time; the others of a kv head take another pass over what then lies in the cache
LANES = 16
# as numba decides: "" are no features, and what is kept is kept by them
FEATURES = (get_host_cpu_features() if config.CPU_FEATURES is None else config.CPU_FEATURES).split(",")
PERMUTES = "+avx512f" in FEATURES  # whether one instruction looks sixteen numbers up in a table of sixteen (vpermps)
PERMUTES_EIGHT = "+avx2" in FEATURES  # whether one looks eight up in a table of eight
# whether the CPU converts float16; where it does not, LLVM would call a function that numba's process may lack
CONVERTS_HALF = "+f16c" in FEATURES or platform.machine().lower() not in ("x86_64", "amd64", "i686", "x86")

f32 = ir.FloatType()
i8, i16, i32, i64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
LINE = 64  # bytes of a cache line


def vector_of(element: ir.Type, lanes: int = LANES) -> ir.VectorType:
    return ir.VectorType(element, lanes)


def _shaped(element: ir.Type, like) -> ir.Type:
    """`element`, or a vector of as many as a value has lanes."""
    return vector_of(element, like.type.count) if isinstance(like.type, ir.VectorType) else element


def _filled(kind: ir.Type, value: float) -> ir.Constant:
    """A constant of a type; of a vector, in every lane."""
    return ir.Constant(kind, [value] * kind.count if isinstance(kind, ir.VectorType) else value)


def splat(value: float, lanes: int = LANES) -> ir.Constant:
    return _filled(vector_of(f32, lanes), value)


def repeated(value: int, lanes: int = LANES, element: ir.Type = i32) -> ir.Constant:
    return _filled(vector_of(element, lanes), value)


COUNT = ir.Constant(vector_of(i32), [*range(LANES)])  # the number of each lane


class Code(ir.IRBuilder):
    """numba's builder of the code of an intrinsic, where it stands, with what is made of several instructions."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.__dict__ = builder.__dict__

    def call_named(self, name: str, result: ir.Type, *operands):
        """Calls an intrinsic of LLVM's or a function of C's."""
        kind = ir.FunctionType(result, [operand.type for operand in operands])
        return self.call(cgutils.get_or_insert_function(self.module, kind, name), operands)

    def call_floats(self, name: str, *operands):
        """An LLVM intrinsic whose operands and result are float32 vectors of one length."""
        kind = operands[0].type
        return self.call_named(f"llvm.{name}.v{kind.count}f32", kind, *operands)

    def fma(self, first, second, third):
        """first * second + third, of vectors rounded once."""
        return self.call_floats("fma", first, second, third)

    def number(self, term):
        """An int64: an int, a value, or the product of a tuple of two."""
        if isinstance(term, tuple):
            return self.mul(*map(self.number, term))
        return i64(term) if isinstance(term, int) else term

    def total(self, *terms):
        """The sum of terms as of `number`."""
        return functools.reduce(self.add, map(self.number, terms))

    def at(self, pointer, *terms):
        """The pointer to the element of that total."""
        return self.gep(pointer, [self.total(*terms)])

    @contextmanager
    def steps(self, begin, end, step: int = 1):
        """A loop over begin, begin + step, .. below end."""
        with cgutils.for_range_slice(self, *map(self.number, (begin, end, step))) as (index, _):
            yield index

    def broadcast(self, scalar, lanes: int = LANES):
        one = self.insert_element(ir.Constant(vector_of(scalar.type, lanes), ir.Undefined), scalar, i32(0))
        return self.shuffle(one, one, [0] * lanes)

    def shuffle(self, first, second, picks: list[int]):
        return self.shuffle_vector(first, second, ir.Constant(vector_of(i32, len(picks)), picks))

    def load_lanes(self, pointer, lanes: int = LANES, element: ir.Type | None = None):
        """`lanes` elements at a pointer to the first, aligned as one of them."""
        element = element or pointer.type.pointee
        kind = element if lanes == 1 else vector_of(element, lanes)
        return self.load(self.bitcast(pointer, kind.as_pointer()), align={i8: 1, i16: 2}.get(element, 4))

    def store_lanes(self, value, pointer):
        self.store(value, self.bitcast(pointer, value.type.as_pointer()), align=4)

    def from_half(self, bits):
        """The bits of float16, a scalar or a vector of int16, as float32."""
        half, words, floats = (_shaped(one, bits) for one in (ir.HalfType(), i32, f32))
        if CONVERTS_HALF:
            return self.fpext(self.bitcast(bits, half), floats)
        wide = self.zext(bits, words)
        size = self.shl(self.and_(wide, _filled(words, 0x7FFF)), _filled(words, 13))
        # float16's bias is 112 less than float32's; the product is exact, of denormals too
        finite = self.bitcast(self.fmul(self.bitcast(size, floats), _filled(floats, 2.0**112)), words)
        special = self.icmp_unsigned(">=", size, _filled(words, 0x7C00 << 13))
        size = self.select(special, self.or_(size, _filled(words, 0x7F800000)), finite)
        sign = self.shl(self.and_(wide, _filled(words, 0x8000)), _filled(words, 16))
        return self.bitcast(self.or_(size, sign), floats)

    def widened(self, dtype, stored):
        """Numbers stored as `dtype`, a scalar or a vector, as float32."""
        if dtype == types.float32:
            return stored
        words, floats = _shaped(i32, stored), _shaped(f32, stored)
        if dtype == types.uint16:
            return self.bitcast(self.shl(self.zext(stored, words), _filled(words, 16)), floats)
        if dtype == types.int16:
            return self.from_half(stored)
        return (self.sitofp if dtype == types.int8 else self.uitofp)(stored, floats)

    def larger(self, first, second):
        """The larger of two, lane by lane; the second where one is NaN."""
        return self.select(self.fcmp_ordered(">", first, second), first, second)

    def look_up(self, table, index):
        """Return for each of sixteen lanes the number of `table` that the lowest four bits of its index name, where
        PERMUTES or PERMUTES_EIGHT."""
        if PERMUTES:
            return self.call_named("llvm.x86.avx512.permvar.sf.512", table.type, table, index)
        halves = [[*range(8)], [*range(8, LANES)]]
        tables, indices = ([self.shuffle(each, each, half) for half in halves] for each in (table, index))
        found = [[self.call_named("llvm.x86.avx2.permps", own.type, own, one) for one in indices] for own in tables]
        low, high = (self.shuffle(one, other, [*range(LANES)]) for one, other in found)
        return self.select(self.icmp_unsigned("!=", self.and_(index, repeated(8)), repeated(0)), high, low)

    def prefetch_line(self, pointer):
        """Asks for the cache line that a pointer is in, as far as the second cache: what streams through the first has
        no room to wait there (a dense pass over float32 keys took twice the time)."""
        pointer = self.bitcast(pointer, i8.as_pointer())
        self.call_named("llvm.prefetch.p0", ir.VoidType(), pointer, i32(0), i32(2), i32(1))

    def prefetch(self, pointer, num_bytes):
        """Asks for the cache lines of num_bytes at a pointer."""
        start = self.bitcast(pointer, i8.as_pointer())
        lines = self.udiv(self.total(num_bytes, LINE - 1), i64(LINE))
        with cgutils.for_range(self, lines) as line:
            self.prefetch_line(self.at(start, (line.index, LINE)))

    def folded(self, vector, lanes: int, combine):
        """The lanes of a vector, combined half by half until `lanes` are left."""
        while (left := vector.type.count // 2) >= lanes:
            low, high = (self.shuffle(vector, vector, [*range(start, start + left)]) for start in (0, left))
            vector = combine(low, high)
        return vector

    def sums(self, vectors):
        """The sums over the lanes, sixteen or eight, of each of some vectors, a power of two of them, as one vector of
        as many."""

        def halves(width: int, block: int):
            """The lanes of the first half of each block, and of the second."""
            starts = range(0, width, block)
            return ([at + i for at in starts for i in range(first, first + block // 2)] for first in (0, block // 2))

        num = len(vectors)
        if vectors[0].type.count == LANES // 2:
            vectors = [self.shuffle(x, y, [*range(LANES)]) for x, y in zip(vectors[::2], vectors[1::2], strict=True)]
        while len(vectors) > 1:
            # a vector holds the partial sums of several in blocks: halve the blocks, put two vectors into one
            low, high = halves(2 * LANES, LANES * len(vectors) // num)
            vectors = [
                self.fadd(self.shuffle(x, y, low), self.shuffle(x, y, high))
                for x, y in zip(vectors[::2], vectors[1::2], strict=True)
            ]
        (left,), block = vectors, LANES // num
        while block > 1:
            low, high = halves(num * block, block)
            left, block = self.fadd(self.shuffle(left, left, low), self.shuffle(left, left, high)), block // 2
        return left

    def exp(self, x):
        """exp of sixteen float32, 0 below -87 (and -inf); NaN stays. Relative error below 2e-7 (Cephes expf)."""
        whole = self.call_floats("floor", self.fma(x, splat(1.4426950408889634), splat(0.5)))
        whole = self.larger(splat(-126.0), whole)
        whole = self.select(self.fcmp_ordered("<", splat(127.0), whole), splat(127.0), whole)
        rest = self.fma(whole, splat(-0.693359375), x)
        rest = self.fma(whole, splat(2.12194440e-4), rest)
        value = splat(1.9875691500e-4)
        for term in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
            value = self.fma(value, rest, splat(term))
        value = self.fma(value, self.fmul(rest, rest), self.fadd(rest, splat(1.0)))
        return self.times_power(value, whole, self.fcmp_unordered(">=", x, splat(-87.0)))

    def times_power(self, value, whole, counts):
        """value * 2^whole, sixteen float32, whole numbers from -126 to 127; 0 where it does not count."""
        if PERMUTES:
            operands = value, whole, splat(0.0), self.bitcast(counts, i16), i32(4)  # rounded as everything else
            return self.call_named("llvm.x86.avx512.mask.scalef.ps.512", value.type, *operands)
        exponent = self.add(self.fptosi(whole, vector_of(i32)), repeated(127))
        power = self.bitcast(self.shl(exponent, repeated(23)), vector_of(f32))
        return self.select(counts, self.fmul(value, power), splat(0.0))

    def log(self, x):
        """log of sixteen float32 from 1 on. Error below 2e-7 (Cephes logf)."""
        bits = self.bitcast(x, vector_of(i32))
        # the mantissa within [sqrt 1/2, sqrt 2)
        shifted = self.sub(bits, repeated(0x3F3504F3))
        whole = self.sitofp(self.ashr(shifted, repeated(23)), x.type)
        rest = self.add(self.and_(shifted, repeated(0x7FFFFF)), repeated(0x3F3504F3))
        rest = self.fsub(self.bitcast(rest, x.type), splat(1.0))
        value = splat(7.0376836292e-2)
        for term in (-1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1,
                     2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1):  # fmt: skip
            value = self.fma(value, rest, splat(term))
        square = self.fmul(rest, rest)
        value = self.fmul(self.fmul(value, rest), square)
        value = self.fma(whole, splat(-2.12194440e-4), value)
        value = self.fma(square, splat(-0.5), value)
        return self.fma(whole, splat(0.693359375), self.fadd(rest, value))

    def largest_lane(self, most):
        """The largest of sixteen float32, none of them NaN."""
        return self.extract_element(self.folded(most, 1, self.larger), i32(0))

    def gathered(self, scalars):
        """A vector of scalars."""
        vector = None
        for lane, scalar in enumerate(scalars):
            vector = ir.Constant(vector_of(scalar.type, len(scalars)), ir.Undefined) if vector is None else vector
            vector = self.insert_element(vector, scalar, i32(lane))
        return vector

    def transposed(self, pointers, words: int):
        """`words` vectors of sixteen 32-bit words: word j of each of sixteen rows, for words 1, 2 or 4."""
        if words == 1:
            return [self.gathered([self.load_lanes(pointer, 1, i32) for pointer in pointers])]
        if words == 2:
            pairs = [self.load(self.bitcast(pointer, i64.as_pointer()), align=1) for pointer in pointers]
            low, high = (self.bitcast(self.gathered(half), vector_of(i32)) for half in (pairs[:8], pairs[8:]))
            return [self.shuffle(low, high, [*range(side, 2 * LANES, 2)]) for side in (0, 1)]
        rows = [self.load_lanes(pointer, 4, i32) for pointer in pointers]
        # row 4 l + a in the l-th quarter of the a-th vector; then four by four within the quarters
        quads = []
        for a in range(4):
            pairs = [self.shuffle(rows[4 * first + a], rows[4 * first + 4 + a], [*range(8)]) for first in (0, 2)]
            quads.append(self.shuffle(pairs[0], pairs[1], [*range(16)]))
        low, high = ([lane + part for lane in range(0, 16, 4) for part in (side, 16 + side, side + 1, 17 + side)]
                     for side in (0, 2))  # fmt: skip
        even, odd = ([self.shuffle(quads[i], quads[i + 1], picks) for picks in (low, high)] for i in (0, 2))
        first, second = ([lane + part for lane in range(0, 16, 4) for part in (side, side + 1, 16 + side, 17 + side)]
                         for side in (0, 2))  # fmt: skip
        return [self.shuffle(even[i], odd[i], picks) for i in (0, 1) for picks in (first, second)]


def emits(returns: types.Type = types.void):
    """Makes an intrinsic of a function of a `Code` and of the intrinsic's arguments: arrays as pointers to their first
    elements, whole numbers as int64, other numbers as float32, bool as one bit, tuples as tuples, None as itself. One
    that asks for `kinds` is given the numba types, too."""

    def argument(context, builder, kind, value):
        if isinstance(kind, types.Array):
            return context.make_array(kind)(context, builder, value).data
        if isinstance(kind, types.BaseTuple):
            parts = enumerate(kind.types)
            return tuple(argument(context, builder, one, builder.extract_value(value, i)) for i, one in parts)
        if isinstance(kind, types.NoneType):
            return None
        if isinstance(kind, types.Boolean):
            return context.is_true(builder, kind, value)
        return context.cast(builder, value, kind, types.int64 if isinstance(kind, types.Integer) else types.float32)

    def decorate(write):
        parameters = inspect.signature(write).parameters

        @functools.wraps(write)
        def typed(typing_context, *given):
            def codegen(context, builder, signature, args):
                builder = Code(builder)
                values = (argument(context, builder, *one) for one in zip(signature.args, args, strict=True))
                result = write(builder, *((signature.args,) if "kinds" in parameters else ()), *values)
                if isinstance(returns, types.BaseTuple):
                    return context.make_tuple(builder, returns, result)
                return context.get_dummy_value() if result is None else result

            return returns(*given), codegen

        shown = [one for name, one in parameters.items() if name != "kinds"]
        typed.__dict__["__signature__"] = inspect.Signature(shown)
        return intrinsic(typed)

    return decorate


@emits()
def weigh(builder, logits, count, most, totals):
    """logits[4 i + r] becomes exp(logits[4 i + r] - most[r]) for i < count, a multiple of 4; totals[r] its sum over
    i."""
    num = builder.mul(count, i64(HEADS))
    four = builder.load_lanes(most, HEADS)
    each_most = builder.shuffle(four, four, [*range(HEADS)] * (LANES // HEADS))
    total = cgutils.alloca_once_value(builder, splat(0.0))
    with builder.steps(0, num, LANES) as start:
        pointer = builder.at(logits, start)
        weights = builder.exp(builder.fsub(builder.load_lanes(pointer), each_most))
        builder.store_lanes(weights, pointer)
        builder.store(builder.fadd(builder.load(total), weights), total)
    builder.store_lanes(builder.folded(builder.load(total), HEADS, builder.fadd), totals)


@emits(types.UniTuple(types.float32, 2))
def masses_by_mask(builder, x, mask, count):
    """The sums of exp(x[i] - largest) over the i < count of which mask[i], uint8, is not 0, and over the others: x
    float32 of which what is not finite counts nothing, largest the largest that counts."""
    whole, least, zeros = builder.and_(count, i64(-LANES)), splat(float("-inf")), repeated(0, element=i8)

    def each(use):
        """use(x, mask) for sixteen at a time, and for the rest one by one, each beside fifteen -inf."""
        with builder.steps(0, whole, LANES) as at:
            use(*(builder.load_lanes(builder.at(pointer, at)) for pointer in (x, mask)))
        with builder.steps(whole, count) as at:
            one, listed = (builder.load(builder.at(pointer, at)) for pointer in (x, mask))
            use(builder.insert_element(least, one, i32(0)), builder.insert_element(zeros, listed, i32(0)))

    def finite(own):
        return builder.select(
            builder.fcmp_ordered("<", builder.call_floats("fabs", own), splat(float("inf"))), own, least
        )

    most, read, left = (cgutils.alloca_once_value(builder, one) for one in (least, splat(0.0), splat(0.0)))
    each(lambda own, _: builder.store(builder.call_floats("maxnum", finite(own), builder.load(most)), most))
    largest = builder.largest_lane(builder.load(most))
    none = builder.fcmp_ordered("==", largest, ir.Constant(f32, float("-inf")))
    by = builder.broadcast(builder.select(none, ir.Constant(f32, 0.0), largest))

    def add(own, listed):
        mass = builder.exp(builder.fsub(finite(own), by))
        is_read = builder.icmp_unsigned("!=", listed, zeros)
        for kept, part in ((read, (mass, splat(0.0))), (left, (splat(0.0), mass))):
            builder.store(builder.fadd(builder.load(kept), builder.select(is_read, *part)), kept)

    each(add)
    return [builder.extract_element(builder.sums([builder.load(kept)]), i32(0)) for kept in (read, left)]


def item_bytes(pointer) -> int:
    """Return the bytes of what a pointer points to."""
    return getattr(pointer.type.pointee, "width", 32) // 8  # float32 has none


@emits()
def ask_for(builder, array, start, count):
    """Prefetches array[start : start + count], which may lie anywhere."""
    builder.prefetch(builder.at(array, start), builder.mul(count, i64(item_bytes(array))))


@emits(types.float32)
def wide(builder, kinds, stored):
    """A stored number as float32: the bits of a float16 where it is an int16, of a bfloat16 where it is a uint16."""
    return builder.widened(kinds[0], stored if stored.type == f32 else builder.trunc(stored, i16))


@emits()
def put(builder, kinds, pool, at, value):
    """pool[at] = value, a number as it is stored there, or a float32 that is rounded to the nearest bfloat16, of two to
    the even one; NaN is one of them."""
    target = builder.at(pool, at)
    if value.type == f32 and kinds[0].dtype != types.float32:
        bits = builder.bitcast(value, i32)
        odd = builder.and_(builder.lshr(bits, i32(16)), i32(1))
        rounded = builder.lshr(builder.add(bits, builder.add(odd, i32(0x7FFF))), i32(16))
        value = builder.select(builder.fcmp_unordered("uno", value, value), i32(0x7FC0), rounded)
    builder.store(value if value.type == f32 else builder.trunc(value, target.type.pointee), target)
