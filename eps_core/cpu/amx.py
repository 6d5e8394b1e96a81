"""Products of bfloat16 matrices on the tile registers of x86's AMX, as numba intrinsics; sums are float32.

A register holds 16 rows of 64 bytes. TDPBF16PS adds A B to C [16, 16] float32 for A [16, 32] bfloat16 and B [32, 16],
which lies as pairs of rows: word (p, l) holds B[2 p, l] and B[2 p + 1, l]. Denormal numbers count as zeros.

Of the lanes of `blocks`, sixteen are a column of registers. Here they lie as [lanes / 16, 16 pairs, 16 words] a step of
32 rows, each word a uint16 for the even row and one for the odd one. Head dims are multiples of 32.
"""

import ctypes
import functools
import platform

from llvmlite import ir
from numba.core import cgutils

from eps_core.cpu.blocks import base_of, powers_of
from eps_core.cpu.vectors import FEATURES, LANES, emits, f32, i8, i32, i64, repeated, vector_of

STEP = 32  # rows of B that a product adds up
_TILE_WORDS = 512  # uint16 of a register
_ARCH_PRCTL, _REQUEST, _TILE_DATA = 158, 0x1023, 18  # ARCH_REQ_XCOMP_PERM of Linux


@functools.cache
def usable() -> bool:
    """Return whether kernels may use tile registers: code is compiled for them, and Linux lets this process (it must be
    asked, once)."""
    if not {"+amx-tile", "+amx-bf16", "+avx512f"} <= set(FEATURES) or platform.system() != "Linux":
        return False
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST, _TILE_DATA) == 0


def _tile(builder, name: str, *operands):
    """Calls an instruction of tile registers: numbers of registers are int, pointers as they are, and strides."""
    values = [i8(one) if isinstance(one, int) else one for one in operands]
    values = [builder.bitcast(one, i8.as_pointer()) if one.type.is_pointer else one for one in values]
    builder.call_named(f"llvm.x86.{name}", ir.VoidType(), *values)


@emits()
def begin_tiles(builder):
    """Makes this thread's eight registers 16 rows of 64 bytes each; until `end_tiles`."""
    # palette, first row, 14 reserved, columns in bytes (16 of uint16), rows (16 of uint8)
    values = [1, 0] + [0] * 14 + [64, 0] * 8 + [0] * 16 + [16] * 8 + [0] * 8
    config = ir.Constant(ir.ArrayType(i8, 64), [i8(value) for value in values])
    _tile(builder, "ldtilecfg", cgutils.alloca_once_value(builder, config))


@emits()
def end_tiles(builder):
    _tile(builder, "tilerelease")


def _columns(builder, width, use):
    """Calls use(lane, columns) for the lanes in columns of sixteen: two at a time, and the last of an odd number."""
    pairs = builder.and_(width, i64(-2 * LANES))
    for columns, begin, end in ((2, i64(0), pairs), (1, pairs, width)):
        with builder.steps(begin, end, columns * LANES) as lane:
            use(lane, columns)


@emits()
def tile_logits(builder, keys, first, second, stride, queries, num_parts, head_dim, lanes, logits, start):
    """logits[start + t L + l] = key t . query l over the D channels, for 32 tokens t: sixteen of keys, uint16, `stride`
    apart from `first` on, and sixteen from `second` on. queries [parts, D / 32, L / 16, 16, 16, 2] uint16 are sums of
    num_parts parts."""
    key_step, row_step = builder.mul(stride, i64(2)), builder.mul(lanes, i64(4))
    part_words = builder.mul(head_dim, lanes)

    def block(lane, columns: int):
        for sums in range(2 * columns):
            _tile(builder, "tilezero", sums)
        with builder.steps(0, head_dim, STEP) as channel:
            for half, place in enumerate((first, second)):
                _tile(builder, "tileloadd64", 4 + half, builder.at(keys, place, channel), key_step)
            with cgutils.for_range(builder, num_parts) as part:
                # a column of a step is 32 L / (L / 16) words
                words = builder.total((part.index, part_words), (channel, lanes), (lane, STEP))
                for j in range(columns):
                    pointer = builder.at(queries, words, j * _TILE_WORDS)
                    _tile(builder, "tileloadd64", 6 + j, pointer, i64(64))
                for half in range(2):
                    for j in range(columns):
                        _tile(builder, "tdpbf16ps", half * columns + j, 4 + half, 6 + j)
        for half in range(2):
            for j in range(columns):
                place = builder.total((lanes, 16 * half), lane, 16 * j)
                pointer = builder.at(logits, start, place)
                _tile(builder, "tilestored64", half * columns + j, pointer, row_step)

    _columns(builder, lanes, block)


@emits()
def tile_sums(builder, values, weights, num_parts, num_steps, first, head_dim, lanes, sums):
    """sums[c L + l] += value of token t in channel c . weight of t in lane l, for 32 channels from `first` on, over 32
    num_steps tokens: values [steps, D, 32] uint16 as `turn_values` leaves them, weights [steps, 2, L / 16, 16, 16, 2]
    as `weigh_pairs` does."""
    row_step, part_words = builder.mul(lanes, i64(4)), builder.mul(lanes, i64(STEP))

    def block(lane, columns: int):
        places = []
        for half in range(2):
            for j in range(columns):
                row = builder.mul(builder.total(first, 16 * half), lanes)
                places.append(builder.at(sums, row, lane, 16 * j))
        for i, place in enumerate(places):
            _tile(builder, "tileloadd64", i, place, row_step)
        with cgutils.for_range(builder, num_steps) as step:
            words = builder.mul(builder.total((step.index, head_dim), first), i64(STEP))
            for half in range(2):
                pointer = builder.at(values, words, half * _TILE_WORDS)
                _tile(builder, "tileloadd64", 4 + half, pointer, i64(64))
            with cgutils.for_range(builder, num_parts) as part:
                words = builder.mul(builder.total((step.index, 2), part.index), part_words)
                words = builder.total(words, (lane, STEP))
                for j in range(columns):
                    pointer = builder.at(weights, words, j * _TILE_WORDS)
                    _tile(builder, "tileloadd64", 6 + j, pointer, i64(64))
                for half in range(2):
                    for j in range(columns):
                        _tile(builder, "tdpbf16ps", half * columns + j, 4 + half, 6 + j)
        for i, place in enumerate(places):
            _tile(builder, "tilestored64", i, place, row_step)

    _columns(builder, lanes, block)


def _cut(builder, both, rounding):
    """Return (pairs, rests) of two vectors of words of float32: their upper 16 bits, after `rounding` is added, side by
    side, and the words of what a bfloat16 no larger in size leaves of each."""
    uppers, rests = [], []
    for one in both:
        words = builder.add(one, rounding)
        upper = builder.and_(words, repeated(0xFFFF0000))
        rest = builder.fsub(*(builder.bitcast(x, vector_of(f32)) for x in (words, upper)))
        uppers.append(upper)
        rests.append(builder.bitcast(rest, upper.type))
    return builder.or_(builder.lshr(uppers[0], repeated(16)), uppers[1]), rests


@emits()
def split_rows(builder, rows, num_steps, num_parts, step_words, part_words, lanes, split):
    """Rows of 32 num_steps x L float32 as the sum of num_parts bfloat16, in pairs: what step s and part p have,
    [L / 16, 16, 16, 2] uint16, begins at split[s step_words + p part_words]. All parts but the last are cut off, the
    last is rounded: 16 bits of two, 24 of three."""
    kept = [cgutils.alloca_once(builder, vector_of(i32)) for _ in range(2)]
    last = builder.sub(num_parts, i64(1))
    with cgutils.for_range(builder, num_steps) as step, cgutils.for_range(builder, i64(STEP // 2)) as pair:
        first = builder.total((step.index, STEP), (pair.index, 2))
        with builder.steps(0, lanes, LANES) as lane:
            for i, one in enumerate(kept):
                row = builder.at(rows, (builder.total(first, i), lanes), lane)
                builder.store(builder.load_lanes(row, LANES, i32), one)
            place = builder.total((step.index, step_words), (lane, STEP), (pair.index, 2 * LANES))
            with cgutils.for_range(builder, num_parts) as part:
                rounding = builder.select(builder.icmp_signed("==", part.index, last), i32(0x8000), i32(0))
                pairs, rests = _cut(builder, [builder.load(one) for one in kept], builder.broadcast(rounding))
                for one, rest in zip(kept, rests, strict=True):
                    builder.store(rest, one)
                builder.store_lanes(pairs, builder.at(split, place, (part.index, part_words)))


@emits()
def weigh_pairs(builder, logits, first, lanes, scale, most, totals, keeps, num_parts, weights, start):
    """`blocks.weigh_lanes` of 32 tokens from `first` on, whose weights go, as the sum of one bfloat16 or of two, to
    weights [2, L / 16, 16, 16, 2] uint16 from `start` on (`split_rows`), and where it `keeps` them also to logits."""
    by, part_words = builder.broadcast(scale), builder.mul(lanes, i64(STEP))
    total = cgutils.alloca_once(builder, vector_of(f32))
    is_split = builder.icmp_signed("==", num_parts, i64(2))
    first_rounding = builder.select(is_split, i32(0), i32(0x8000))
    with builder.steps(0, lanes, LANES) as lane:
        most_at, total_at = (builder.at(one, lane) for one in (most, totals))
        lowered = builder.fneg(base_of(builder, builder.load_lanes(most_at), by))
        builder.store(builder.load_lanes(total_at), total)
        with cgutils.for_range(builder, i64(STEP // 2)) as pair:
            both = []
            for i in range(2):
                token = builder.total(first, (pair.index, 2), i)
                pointer = builder.at(logits, (token, lanes), lane)
                weight = powers_of(builder, builder.fma(builder.load_lanes(pointer), by, lowered))
                with builder.if_then(keeps):
                    builder.store_lanes(weight, pointer)
                builder.store(builder.fadd(builder.load(total), weight), total)
                both.append(builder.bitcast(weight, vector_of(i32)))
            place = builder.at(weights, builder.total(start, (lane, STEP), (pair.index, 2 * LANES)))
            pairs, rests = _cut(builder, both, builder.broadcast(first_rounding))
            builder.store_lanes(pairs, place)
            with builder.if_then(is_split):
                pairs, _ = _cut(builder, rests, repeated(0x8000))
                builder.store_lanes(pairs, builder.at(place, part_words))
        builder.store_lanes(builder.load(total), total_at)


def _turned(builder, rows, side: int):
    """The 16 channels c of 32 rows of 32 uint16 with c % 8 in 4 side .. 4 side + 3: yields (c, its vector of 32)."""
    quarters = range(0, 32, 8)  # of 128 bits, as uint16
    # words of two rows: channels 4 side .. + 3 of each quarter
    picks = [start + lane + row for start in quarters for lane in range(4 * side, 4 * side + 4) for row in (0, 32)]
    words = [builder.shuffle(rows[i], rows[i + 1], picks) for i in range(0, 32, 2)]
    fours = []  # [eight rows][channel % 4] -> quarters of eight rows of one channel
    for i in range(0, 16, 4):
        doubles = []
        for a in (i, i + 2):
            for low in (0, 4):
                picks = [quarter + lane + row for quarter in quarters for lane in (low, low + 2) for row in (0, 32)]
                picks = [place for pick in picks for place in (pick, pick + 1)]
                doubles.append(builder.shuffle(words[a], words[a + 1], picks))
        own = []
        for a in range(2):
            for low in (0, 4):
                picks = [quarter + low + place + row for quarter in quarters for row in (0, 32) for place in range(4)]
                own.append(builder.shuffle(doubles[a], doubles[2 + a], picks))
        fours.append(own)
    for channel in range(4):
        parts = [own[channel] for own in fours]
        for start in (0, 16):
            pairs = [
                builder.shuffle(parts[a], parts[a + 1], [*range(start, start + 16), *range(32 + start, 48 + start)])
                for a in (0, 2)
            ]
            for low in (0, 8):
                picks = [first + place + row for row in (0, 32) for first in (low, low + 16) for place in range(8)]
                yield 8 * ((start + low) // 8) + 4 * side + channel, builder.shuffle(pairs[0], pairs[1], picks)


@emits()
def turn_values(builder, values, rows, first, head_dim, turned, start):
    """turned[start + c 32 + t] = values[rows[first + t] + c], uint16, for 32 tokens t and the D channels c."""
    places = [builder.load(builder.at(rows, first, t)) for t in range(STEP)]
    with builder.steps(0, head_dim, 32) as channel:
        for side in range(2):
            # loaded again for the other half: there are registers for sixteen
            vectors = [builder.load_lanes(builder.at(values, place, channel), 32) for place in places]
            for c, vector in _turned(builder, vectors, side):
                builder.store_lanes(vector, builder.at(turned, start, (builder.total(channel, c), STEP)))
