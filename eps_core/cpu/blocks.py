"""Products and softmax sums over many lanes at once, as numba intrinsics: what several query rows of one kv head need.

A lane is one query row. Logits and weights lie as [tokens, lanes] and sums as [channels, lanes], so that all arithmetic
of a row stays in its own lane, in one order, whatever the other lanes hold and however many there are: the bits of a
row depend on nothing else. Kernels that call these must not be compiled with `reassoc`.

Arguments are one-dimensional C-contiguous arrays; offsets count elements; numbers of lanes are multiples of 16.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils

from eps_core.cpu.vectors import LANES, PERMUTES, emits, f32, i64, splat, vector_of

# a block of sums that stays in registers: 24 of 32 vectors of AVX-512, 8 of 16 (two to a sum) of AVX2
BLOCK_ROWS, BLOCK_VECTORS = (8, 3) if PERMUTES else (4, 1)
LOWEST = -126.5  # below it a power of two counts as 0
_MAGIC = 12582912.0  # 1.5 * 2^23: what is added to it is rounded to a whole number, in its lowest bits


def powers_of(builder, x):
    """2^x of vectors of sixteen float32 no larger than 0; 0 below -126.5; NaN stays. Relative error below 1e-7 (Cephes
    exp2f)."""
    counts = builder.fcmp_unordered(">=", x, splat(LOWEST))
    x = builder.larger(splat(LOWEST), x)
    shifted = builder.fadd(x, splat(_MAGIC))
    whole = builder.fsub(shifted, splat(_MAGIC))
    rest, value = builder.fsub(x, whole), splat(1.535336188319500e-4)
    for term in (1.33988744e-3, 9.61843736e-3, 5.55033247e-2, 2.40226479e-1, 6.93147203e-1, 1.0):
        value = builder.fma(value, rest, splat(term))
    return builder.times_power(value, whole, counts)


def base_of(builder, largest, scale):
    """Return the number that logits are lowered by: largest * scale, 0 where nothing was seen."""
    seen = builder.fcmp_ordered(">", largest, splat(float("-inf")))
    return builder.select(seen, builder.fmul(largest, scale), splat(0.0))


@emits()
def add_products(builder, a, a_start, row_step, step, num_rows, b, num_terms, lanes, factors, c, c_start):
    """c[c_start + i L + l] = factors[l] * c[..] + sum over k < num_terms of a[a_start + i row_step + k step] b[k L + l]
    for i < num_rows and the L lanes l; with None for factors, the sum alone."""

    def block(lane, row, num_vectors: int, height: int):
        place = builder.at(a, a_start, (row, row_step))
        own = builder.at(b, lane)
        results = [
            [
                builder.at(c, c_start, builder.total((builder.total(row, i), lanes), builder.total(lane, LANES * j)))
                for j in range(num_vectors)
            ]
            for i in range(height)
        ]
        sums = [[cgutils.alloca_once(builder, vector_of(f32)) for _ in range(num_vectors)] for _ in range(height)]
        for j in range(num_vectors):
            factor = None if factors is None else builder.load_lanes(builder.at(factors, lane, LANES * j))
            for i in range(height):
                before = splat(0.0)
                if factor is not None:
                    before = builder.fmul(builder.load_lanes(results[i][j]), factor)
                builder.store(before, sums[i][j])
        with cgutils.for_range(builder, num_terms) as term:
            at = builder.mul(term.index, lanes)
            vectors = [builder.load_lanes(builder.at(own, at, LANES * j)) for j in range(num_vectors)]
            along = builder.at(place, (term.index, step))
            for i in range(height):
                spread = builder.broadcast(builder.load(builder.at(along, (row_step, i))))
                for j in range(num_vectors):
                    kept = sums[i][j]
                    builder.store(builder.fma(spread, vectors[j], builder.load(kept)), kept)
        for i in range(height):
            for j in range(num_vectors):
                builder.store_lanes(builder.load(sums[i][j]), results[i][j])

    lane_done = i64(0)
    for num_vectors in range(BLOCK_VECTORS, 0, -1):
        left = builder.sub(lanes, lane_done)
        size = num_vectors * LANES
        lane_end = builder.add(lane_done, builder.sub(left, builder.urem(left, i64(size))))
        with builder.steps(lane_done, lane_end, size) as lane:
            row_done = i64(0)
            for height in (BLOCK_ROWS, 1):
                row_end = builder.and_(num_rows, i64(-height))
                with builder.steps(row_done, row_end, height) as row:
                    block(lane, row, num_vectors, height)
                row_done = row_end
        lane_done = lane_end


@emits()
def raise_most(builder, logits, count, lanes, scale, most, totals, factors):
    """A step of a softmax that runs over tiles of tokens, lane by lane: most[l] becomes the largest of itself and of
    logits[t L + l] over t < count; factors[l] what sums relative to the former most are multiplied by, as totals[l]
    is."""
    by = builder.broadcast(scale)
    largest = cgutils.alloca_once(builder, vector_of(f32))
    with builder.steps(0, lanes, LANES) as lane:
        most_at, total_at, factor_at = (builder.at(one, lane) for one in (most, totals, factors))
        before = builder.load_lanes(most_at)
        builder.store(before, largest)
        with cgutils.for_range(builder, count) as each:
            pointer = builder.at(logits, (each.index, lanes), lane)
            new, old = builder.load_lanes(pointer), builder.load(largest)
            builder.store(builder.larger(new, old), largest)
        now = builder.load(largest)
        factor = powers_of(builder, builder.fsub(base_of(builder, before, by), base_of(builder, now, by)))
        # a former most of -inf stands for sums of 0
        factor = builder.select(builder.fcmp_ordered(">", before, splat(float("-inf"))), factor, splat(0.0))
        builder.store_lanes(now, most_at)
        builder.store_lanes(factor, factor_at)
        builder.store_lanes(builder.fmul(builder.load_lanes(total_at), factor), total_at)


@emits()
def weigh_lanes(builder, logits, first, end, lanes, scale, most, totals):
    """logits[t L + l] become weights 2^((logit - most[l]) scale) for tokens first .. end - 1, and totals[l] grows by
    them in their order. -inf weighs nothing; a lane that has seen nothing else keeps a total of 0."""
    by = builder.broadcast(scale)
    total = cgutils.alloca_once(builder, vector_of(f32))
    with builder.steps(0, lanes, LANES) as lane:
        most_at, total_at = (builder.at(one, lane) for one in (most, totals))
        lowered = builder.fneg(base_of(builder, builder.load_lanes(most_at), by))
        builder.store(builder.load_lanes(total_at), total)
        with builder.steps(first, end) as token:
            pointer = builder.at(logits, (token, lanes), lane)
            weight = powers_of(builder, builder.fma(builder.load_lanes(pointer), by, lowered))
            builder.store_lanes(weight, pointer)
            builder.store(builder.fadd(builder.load(total), weight), total)
        builder.store_lanes(builder.load(total), total_at)


@emits()
def powers(builder, x, count):
    """x[i] becomes 2^x[i], x no larger than 0, for i < count, a multiple of 16; 0 below -126.5."""
    with builder.steps(0, count, LANES) as start:
        pointer = builder.at(x, start)
        builder.store_lanes(powers_of(builder, builder.load_lanes(pointer)), pointer)


@emits(types.uint64)
def set_bits(builder, array, start):
    """Bit i of the result says whether array[start + i], of 64 uint8, is not 0."""
    bytes_there = builder.load_lanes(builder.at(array, start), 64)
    return builder.bitcast(builder.icmp_unsigned("!=", bytes_there, bytes_there.type(None)), i64)


@emits(types.int64)
def lowest_bit(builder, word):
    """Which bit of a uint64 that is not 0 is its lowest."""
    return builder.cttz(word, ir.IntType(1)(1))
