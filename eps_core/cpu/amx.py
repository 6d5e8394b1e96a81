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
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from eps_core.cpu.vectors import _FEATURES, LANES, _data, _f32, _i32, _i64, _int64, _load, _shuffle, _store, _vector

STEP = 32  # rows of B that a product adds up
_TILE_WORDS = 512  # uint16 of a register
_ARCH_PRCTL, _REQUEST, _TILE_DATA = 158, 0x1023, 18  # ARCH_REQ_XCOMP_PERM of Linux
_i8, _i16 = ir.IntType(8), ir.IntType(16)


@functools.cache
def usable() -> bool:
    """Return whether kernels may use tile registers: code is compiled for them, and Linux lets this process (it must be
    asked, once)."""
    if not {"+amx-tile", "+amx-bf16", "+avx512f"} <= set(_FEATURES) or platform.system() != "Linux":
        return False
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST, _TILE_DATA) == 0


def _tile(builder, name: str, *operands):
    """Calls an instruction of tile registers: numbers of registers are int, pointers and strides as they are."""
    values = [_i8(one) if isinstance(one, int) else one for one in operands]
    kind = ir.FunctionType(ir.VoidType(), [value.type for value in values])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), values)


def _bytes_at(builder, pointer):
    return builder.bitcast(pointer, _i8.as_pointer())


@intrinsic
def begin_tiles(typing_context):
    """Makes this thread's eight registers 16 rows of 64 bytes each; until `end_tiles`."""

    def codegen(context, builder, signature, args):
        # palette, first row, 14 reserved, columns in bytes (16 of uint16), rows (16 of uint8)
        values = [1, 0] + [0] * 14 + [64, 0] * 8 + [0] * 16 + [16] * 8 + [0] * 8
        config = ir.Constant(ir.ArrayType(_i8, 64), [_i8(value) for value in values])
        _tile(builder, "ldtilecfg", _bytes_at(builder, cgutils.alloca_once_value(builder, config)))
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def end_tiles(typing_context):
    def codegen(context, builder, signature, args):
        _tile(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), codegen


def _columns(builder, width, use):
    """Calls use(lane, columns) for the lanes in columns of sixteen: two at a time, and the last of an odd number."""
    pairs = builder.and_(width, _i64(-2 * LANES))
    for columns, begin, end in ((2, _i64(0), pairs), (1, pairs, width)):
        with cgutils.for_range_slice(builder, begin, end, _i64(columns * LANES)) as (lane, _):
            use(lane, columns)


@intrinsic
def tile_logits(typing_context, keys, first, second, stride, queries, num_parts, head_dim, lanes, logits, start):
    """logits[start + t L + l] = key t . query l over the D channels, for 32 tokens t: sixteen of keys, uint16, `stride`
    apart from `first` on, and sixteen from `second` on. queries [parts, D / 32, L / 16, 16, 16, 2] uint16 are sums of
    num_parts parts."""

    def codegen(context, builder, signature, args):
        kinds = signature.args
        key_data, query_data, logit_data = (_data(context, builder, kinds[i], args[i]) for i in (0, 4, 8))
        one, other, step, parts, dim, width, at = (
            _int64(context, builder, kinds[i], args[i]) for i in (1, 2, 3, 5, 6, 7, 9)
        )
        key_step, row_step = builder.mul(step, _i64(2)), builder.mul(width, _i64(4))
        part_words = builder.mul(dim, width)

        def block(lane, columns: int):
            for sums in range(2 * columns):
                _tile(builder, "tilezero", sums)
            with cgutils.for_range_slice(builder, _i64(0), dim, _i64(STEP)) as (channel, _):
                for half, place in enumerate((one, other)):
                    pointer = builder.gep(key_data, [builder.add(place, channel)])
                    _tile(builder, "tileloadd64", 4 + half, _bytes_at(builder, pointer), key_step)
                with cgutils.for_range(builder, parts) as part:
                    # a column of a step is 32 L / (L / 16) words
                    words = builder.add(builder.mul(part.index, part_words), builder.mul(channel, width))
                    words = builder.add(words, builder.mul(lane, _i64(STEP)))
                    for j in range(columns):
                        pointer = builder.gep(query_data, [builder.add(words, _i64(j * _TILE_WORDS))])
                        _tile(builder, "tileloadd64", 6 + j, _bytes_at(builder, pointer), _i64(64))
                    for half in range(2):
                        for j in range(columns):
                            _tile(builder, "tdpbf16ps", half * columns + j, 4 + half, 6 + j)
            for half in range(2):
                for j in range(columns):
                    place = builder.add(builder.mul(width, _i64(16 * half)), builder.add(lane, _i64(16 * j)))
                    pointer = builder.gep(logit_data, [builder.add(at, place)])
                    _tile(builder, "tilestored64", half * columns + j, _bytes_at(builder, pointer), row_step)

        _columns(builder, width, block)
        return context.get_dummy_value()

    return (
        types.void(keys, first, second, stride, queries, num_parts, head_dim, lanes, logits, start),
        codegen,
    )


@intrinsic
def tile_sums(typing_context, values, weights, num_steps, first, head_dim, lanes, sums):
    """sums[c L + l] += value of token t in channel c . weight of t in lane l, for 32 channels from `first` on, over 32
    num_steps tokens: values [steps, D, 32] uint16 as `turn_values` leaves them, weights [steps, 2, L / 16, 16, 16, 2]
    as `split_rows` does."""

    def codegen(context, builder, signature, args):
        kinds = signature.args
        value_data, weight_data, sum_data = (_data(context, builder, kinds[i], args[i]) for i in (0, 1, 6))
        steps, channel, dim, width = (_int64(context, builder, kinds[i], args[i]) for i in (2, 3, 4, 5))
        row_step, part_words = builder.mul(width, _i64(4)), builder.mul(width, _i64(STEP))

        def block(lane, columns: int):
            places = []
            for half in range(2):
                for j in range(columns):
                    row = builder.mul(builder.add(channel, _i64(16 * half)), width)
                    at = builder.add(row, builder.add(lane, _i64(16 * j)))
                    places.append(_bytes_at(builder, builder.gep(sum_data, [at])))
            for i, place in enumerate(places):
                _tile(builder, "tileloadd64", i, place, row_step)
            with cgutils.for_range(builder, steps) as step:
                words = builder.mul(builder.add(builder.mul(step.index, dim), channel), _i64(STEP))
                for half in range(2):
                    pointer = builder.gep(value_data, [builder.add(words, _i64(half * _TILE_WORDS))])
                    _tile(builder, "tileloadd64", 4 + half, _bytes_at(builder, pointer), _i64(64))
                for part in range(2):
                    words = builder.mul(builder.add(builder.mul(step.index, _i64(2)), _i64(part)), part_words)
                    words = builder.add(words, builder.mul(lane, _i64(STEP)))
                    for j in range(columns):
                        pointer = builder.gep(weight_data, [builder.add(words, _i64(j * _TILE_WORDS))])
                        _tile(builder, "tileloadd64", 6 + j, _bytes_at(builder, pointer), _i64(64))
                    for half in range(2):
                        for j in range(columns):
                            _tile(builder, "tdpbf16ps", half * columns + j, 4 + half, 6 + j)
            for i, place in enumerate(places):
                _tile(builder, "tilestored64", i, place, row_step)

        _columns(builder, width, block)
        return context.get_dummy_value()

    return types.void(values, weights, num_steps, first, head_dim, lanes, sums), codegen


def _halves(builder, words):
    """The bits of a bfloat16 no larger in size than each float32 of `words`, in the upper half, and what it left as
    float32."""
    integers = _vector(_i32)
    upper = builder.and_(words, ir.Constant(integers, [0xFFFF0000] * LANES))
    kind = _vector(_f32)
    return upper, builder.fsub(builder.bitcast(words, kind), builder.bitcast(upper, kind))


def _paired(builder, even, odd):
    """Words of the upper halves of two vectors: the first's below the second's."""
    low = builder.lshr(even, ir.Constant(_vector(_i32), [16] * LANES))
    return builder.or_(low, builder.and_(odd, ir.Constant(_vector(_i32), [0xFFFF0000] * LANES)))


@intrinsic
def split_rows(typing_context, rows, num_steps, num_parts, step_words, part_words, lanes, split):
    """Rows of 32 num_steps x L float32 as the sum of num_parts bfloat16, in pairs: what step s and part p have,
    [L / 16, 16, 16, 2] uint16, begins at split[s step_words + p part_words]. All parts but the last are cut off, the
    last is rounded: 16 bits of two, 24 of three."""

    def codegen(context, builder, signature, args):
        kinds = signature.args
        data, split_data = (_data(context, builder, kinds[i], args[i]) for i in (0, 6))
        steps, parts, by_step, by_part, width = (_int64(context, builder, kinds[i], args[i]) for i in range(1, 6))
        integers = _vector(_i32)
        kept = [cgutils.alloca_once(builder, integers) for _ in range(2)]
        last = builder.sub(parts, _i64(1))
        with cgutils.for_range(builder, steps) as step, cgutils.for_range(builder, _i64(STEP // 2)) as pair:
            first = builder.add(builder.mul(step.index, _i64(STEP)), builder.mul(pair.index, _i64(2)))
            with cgutils.for_range_slice(builder, _i64(0), width, _i64(LANES)) as (lane, _):
                for i, one in enumerate(kept):
                    at = builder.add(builder.mul(builder.add(first, _i64(i)), width), lane)
                    builder.store(_load(builder, builder.gep(data, [at]), LANES, _i32), one)
                place = builder.add(builder.mul(step.index, by_step), builder.mul(lane, _i64(STEP)))
                place = builder.add(place, builder.mul(pair.index, _i64(2 * LANES)))
                with cgutils.for_range(builder, parts) as part:
                    rounding = builder.select(builder.icmp_signed("==", part.index, last), _i32(0x8000), _i32(0))
                    rounding = builder.insert_element(ir.Constant(integers, ir.Undefined), rounding, _i32(0))
                    rounding = _shuffle(builder, rounding, rounding, [0] * LANES)
                    uppers = []
                    for one in kept:
                        upper, rest = _halves(builder, builder.add(builder.load(one), rounding))
                        builder.store(builder.bitcast(rest, integers), one)
                        uppers.append(upper)
                    at = builder.add(place, builder.mul(part.index, by_part))
                    _store(builder, _paired(builder, *uppers), builder.gep(split_data, [at]))
        return context.get_dummy_value()

    return types.void(rows, num_steps, num_parts, step_words, part_words, lanes, split), codegen


def _turned(builder, rows, side: int):
    """The 16 channels c of 32 rows of 32 uint16 with c % 8 in 4 side .. 4 side + 3: yields (c, its vector of 32)."""
    quarters = range(0, 32, 8)  # of 128 bits, as uint16
    words = [
        # words of two rows: channels 4 side .. + 3 of each quarter
        _shuffle(
            builder, rows[i], rows[i + 1],
            [start + lane + row for start in quarters for lane in range(4 * side, 4 * side + 4) for row in (0, 32)],
        )
        for i in range(0, 32, 2)
    ]  # fmt: skip
    fours = []  # [eight rows][channel % 4] -> quarters of eight rows of one channel
    for i in range(0, 16, 4):
        doubles = []
        for a in (i, i + 2):
            for low in (0, 4):
                picks = [quarter + lane + row for quarter in quarters for lane in (low, low + 2) for row in (0, 32)]
                picks = [place for pick in picks for place in (pick, pick + 1)]
                doubles.append(_shuffle(builder, words[a], words[a + 1], picks))
        own = []
        for a in range(2):
            for low in (0, 4):
                picks = [quarter + low + place + row for quarter in quarters for row in (0, 32) for place in range(4)]
                own.append(_shuffle(builder, doubles[a], doubles[2 + a], picks))
        fours.append(own)
    for channel in range(4):
        parts = [own[channel] for own in fours]
        for start in (0, 16):
            pairs = [
                _shuffle(builder, parts[a], parts[a + 1], [*range(start, start + 16), *range(32 + start, 48 + start)])
                for a in (0, 2)
            ]
            for low in (0, 8):
                picks = [first + place + row for row in (0, 32) for first in (low, low + 16) for place in range(8)]
                yield 8 * ((start + low) // 8) + 4 * side + channel, _shuffle(builder, pairs[0], pairs[1], picks)


@intrinsic
def turn_values(typing_context, values, rows, first, head_dim, turned, start):
    """turned[start + c 32 + t] = values[rows[first + t] + c], uint16, for 32 tokens t and the D channels c."""

    def codegen(context, builder, signature, args):
        kinds = signature.args
        data, row_data, turned_data = (_data(context, builder, kinds[i], args[i]) for i in (0, 1, 4))
        begin, dim, at = (_int64(context, builder, kinds[i], args[i]) for i in (2, 3, 5))
        places = [builder.load(builder.gep(row_data, [builder.add(begin, _i64(t))])) for t in range(STEP)]
        with cgutils.for_range_slice(builder, _i64(0), dim, _i64(32)) as (channel, _):
            for side in range(2):
                # loaded again for the other half: there are registers for sixteen
                vectors = [
                    _load(builder, builder.gep(data, [builder.add(place, channel)]), 32, _i16) for place in places
                ]
                for c, vector in _turned(builder, vectors, side):
                    target = builder.add(at, builder.mul(builder.add(channel, _i64(c)), _i64(STEP)))
                    _store(builder, vector, builder.gep(turned_data, [target]))
        return context.get_dummy_value()

    return types.void(values, rows, first, head_dim, turned, start), codegen
