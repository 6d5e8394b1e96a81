"""Triton: estimates of all groups from whole codes and rescoring bits by products of bits, which NVIDIA's tensor cores
of compute capability 8 and 9 have: 16 groups' words and 8 columns of words give the number of ones that each pair
shares. So no bit of a code is ever unpacked.

A rounded query is an integer of PLANES bits in two's complement, and its bit planes are the columns: a product takes
two planes of four query heads. With ones_p the ones that a code shares with plane p, code . query is
sum_p 2^p ones_p - 2^5 ones_5 (its last plane is the sign): exact numbers, as in `units`, whose formulas these are.

One warp takes 64 groups, a unit. Lane 4 g + q holds word q of codes (and of groups of four words each, when there are
more) for groups 8 g to 8 g + 7, and gets their sums with query head q.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from eps_core.summaries.base import LARGEST_ESTIMATE
from eps_cuda.kernels.overlap import overlap, release, wait
from eps_cuda.kernels.score import (
    MEANS,
    Query,
    _from_byte,
    _larger,
    _log,
    _padded_heads,
    fill_past,
    score_means,
    share_of,
)  # fmt: skip

PLANES = 6  # of an integer within +-QUERY_STEPS
GROUPS = 64  # of a unit
PROGRAMS = 24  # of one warp, that a multiprocessor has room for at once; changes speed only
CAPABILITIES = (8, 9)  # major; earlier ones cannot AND, and later ones are untested
MOST_HEADS = 16  # query heads of a kv head: more would not fit into registers

# Four groups' sums with four query heads: $0 to $3. In: four words of codes, each of one byte of all four groups; four
# words of rescoring bits, one a group; three words of planes. A code counts twice. `+ 1.5 * 2^23` makes floats.
_PAIR = """
mma.sync.aligned.m16n8k128.row.col.s32.b1.b1.s32.and.popc {{c0, c1, c2, c3}}, {{{a}, {b}}}, {{$12}}, {{z, z, z, z}};
mma.sync.aligned.m16n8k128.row.col.s32.b1.b1.s32.and.popc {{c4, c5, c6, c7}}, {{{a}, {b}}}, {{$13}}, {{z, z, z, z}};
mma.sync.aligned.m16n8k128.row.col.s32.b1.b1.s32.and.popc {{c8, c9, c10, c11}}, {{{a}, {b}}}, {{$14}}, {{z, z, z, z}};
"""
_ADD = """
mad.lo.s32 {t}, c{5}, -2, c{4};
mad.lo.s32 {t}, {t}, 2, c{3};
mad.lo.s32 {t}, {t}, 2, c{2};
mad.lo.s32 {t}, {t}, 2, c{1};
mad.lo.s32 {t}, {t}, 2, c{0};
"""
_ROWS = (0, 1, 4, 5, 8, 9), (2, 3, 6, 7, 10, 11)  # the planes of the product's rows g and g + 8


def _assembly() -> str:
    lines = [
        ".reg .b32 p<4>, w<4>, c<12>, z, first<2>, then; .reg .f32 f;", "mov.b32 z, 0;",
        "prmt.b32 p0, $4, $5, 0x5140;", "prmt.b32 p1, $6, $7, 0x5140;",
        "prmt.b32 p2, $4, $5, 0x7362;", "prmt.b32 p3, $6, $7, 0x7362;",
        "prmt.b32 w0, p0, p1, 0x5410;", "prmt.b32 w1, p0, p1, 0x7632;",
        "prmt.b32 w2, p2, p3, 0x5410;", "prmt.b32 w3, p2, p3, 0x7632;",
    ]  # fmt: skip
    for pair in (0, 2):
        lines.append(_PAIR.format(a=f"w{pair}", b=f"w{pair + 1}"))
        lines += [_ADD.format(*places, t=f"first{row}") for row, places in enumerate(_ROWS)]
        lines.append(_PAIR.format(a=f"${8 + pair}", b=f"${9 + pair}"))
        for row, places in enumerate(_ROWS):
            lines += [
                _ADD.format(*places, t="then"), f"mad.lo.s32 then, first{row}, 2, then;",
                "add.s32 then, then, 0x4B400000;", "mov.b32 f, then;", f"sub.f32 ${pair + row}, f, 0f4B400000;",
            ]  # fmt: skip
    return "{\n" + "\n".join(lines) + "\n}"


ASSEMBLY = tl.constexpr(_assembly())


# ------------------------------------------------------------------------------------------------------------- kernels


@triton.jit
def _ones(words):
    """The number of ones of each word: int32."""
    words = words.to(tl.uint32, bitcast=True)
    words = words - ((words >> 1) & 0x55555555)
    words = (words & 0x33333333) + ((words >> 2) & 0x33333333)
    words = (words + (words >> 4)) & 0x0F0F0F0F
    return ((words * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _product(rows, columns, SIGN: tl.constexpr):
    """Return what a product of bits leaves in each lane 4 g + q [32]: the ones that row g shares with column 2 q, and 2
    times (with SIGN -2 times) those that it shares with column 2 q + 1."""
    shared = tl.reshape(rows, (8, 1, 4)) & tl.reshape(columns, (1, 8, 4))
    ones = tl.reshape(tl.sum(_ones(shared), axis=2), (8, 4, 2))
    weight = tl.where(tl.arange(0, 2) == 0, 1, -2 if SIGN else 2)
    return tl.reshape(tl.sum(ones * weight[None, None, :], axis=2), (32,))


@triton.jit
def _sums(x0, x1, x2, x3, s0, s1, s2, s3, b0, b1, b2, ASM: tl.constexpr):
    """Four groups' sums with four query heads, float32 [32] each: see ASSEMBLY, which does the same."""
    if ASM:
        return tl.inline_asm_elementwise(
            ASSEMBLY, "=f,=f,=f,=f,r,r,r,r,r,r,r,r,r,r,r", [x0, x1, x2, x3, s0, s1, s2, s3, b0, b1, b2],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        second = (s0, s1, s2, s3)
        totals = ()
        for j in tl.static_range(4):
            code = ((x0 >> (8 * j)) & 255) | (((x1 >> (8 * j)) & 255) << 8)
            code = code | (((x2 >> (8 * j)) & 255) << 16) | (((x3 >> (8 * j)) & 255) << 24)
            first = _product(code, b0, False) + 4 * _product(code, b1, False) + 16 * _product(code, b2, True)
            bits = second[j]
            then = _product(bits, b0, False) + 4 * _product(bits, b1, False) + 16 * _product(bits, b2, True)
            totals = totals + ((2 * first + then).to(tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
        return totals


@triton.jit
def _load(
    span, last, codes, second, scale, valid, table_row, length, kv_heads, h, eight, q, WORDS: tl.constexpr,
    SPU: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Load a lane's part of a unit, zeros from `last` on: for each four words 4 of codes and 8 of rescoring bits, the
    scales of eight groups, and whether there is a summary."""
    unit = tl.maximum(tl.load(table_row + span // SPU, mask=span < last, other=0), 0).to(tl.int64)
    tile = (unit * kv_heads + h) * SPU + span % SPU
    known = (span < last) & ((span + 1) * (64 * S) <= length)
    known = known & (tl.load(valid + unit * SPU + span % SPU, mask=span < last, other=0) != 0)
    loaded = ()
    for part in tl.static_range((WORDS + 3) // 4):
        word = part * 4 + q
        there = known & (word < WORDS)
        for byte in tl.static_range(4):
            code = tl.load(codes + (tile * WORDS + word) * 32 + byte * 8 + eight, mask=there, other=0)
            loaded = loaded + (code,)  # type: ignore[assignment]  # noqa: RUF005
        for j in tl.static_range(8):
            bits = tl.load(second + (tile * 64 + eight * 8 + j) * WORDS + word, mask=there, other=0)
            loaded = loaded + (bits,)  # type: ignore[assignment]  # noqa: RUF005
    return loaded + (tl.load(scale + tile * 8 + eight, mask=known & (eight < 8), other=0), known)  # noqa: RUF005


@triton.jit(do_not_specialize=["table_units", "groups", "spans"])
def _score_bits(
    halves, inverses, head_sums, mean, mean_scale, anchors, planes, sums, steps, bases, codes, second, scale, valid,
    table, lengths, estimate, table_units, groups, spans, kv_heads, R: tl.constexpr, D: tl.constexpr,
    RP: tl.constexpr, DK: tl.constexpr, WORDS: tl.constexpr, SPU: tl.constexpr, S: tl.constexpr, LOG_S: tl.constexpr,
    PLANES: tl.constexpr, BLOCK: tl.constexpr, LARGEST: tl.constexpr, SUM: tl.constexpr, FILL: tl.constexpr,
    ASM: tl.constexpr, OVERLAP: tl.constexpr = False,
):  # fmt: skip
    """A share of the units of one (sequence, kv head): first their bases, which go through `bases`, then their
    estimates. `codes` and `scale` are int64, `second` int32."""
    wait(OVERLAP)
    CHUNKS: tl.constexpr = (R + 3) // 4  # of four query heads
    PARTS: tl.constexpr = (WORDS + 3) // 4  # of four words
    row = tl.program_id(1)
    b, h = row // kv_heads, row % kv_heads
    length = tl.load(lengths + b)
    lane = tl.arange(0, 32)
    eight, q = lane // 4, lane % 4
    first, last = share_of(length, spans, 64 * S)
    score_means(
        first, last, row, halves, inverses, head_sums, mean, mean_scale, anchors, table, lengths, bases, table_units,
        spans, kv_heads, R, D, RP, DK, True, SPU, 64 * S, LOG_S, BLOCK,
    )  # fmt: skip
    tl.debug_barrier()  # its lanes read what others of them wrote
    bases += row.to(tl.int64) * spans * R
    table += b * table_units
    # a unit's are on their way while the one before it is worked on
    following = _load(first, last, codes, second, scale, valid, table, length, kv_heads, h, eight, q, WORDS, SPU, S)
    columns, step, middle = (), (), ()
    for chunk in tl.static_range(CHUNKS):
        own = row * R + (chunk * 4 + q) % R
        step = step + (tl.load(steps + own),)  # type: ignore[assignment]  # noqa: RUF005
        middle = middle + (1.5 * tl.load(sums + own),)  # type: ignore[assignment]  # noqa: RUF005
        place = row * R + (chunk * 4 + eight // 2) % R
        for part in tl.static_range(PARTS):
            for two in tl.static_range(PLANES // 2):
                plane = tl.load(
                    planes + (place * PLANES + two * 2 + eight % 2) * WORDS + part * 4 + q,
                    mask=part * 4 + q < WORDS, other=0,
                )  # fmt: skip
                columns = columns + (plane,)  # type: ignore[assignment]  # noqa: RUF005
    for span in range(first, last):
        now, base = following, ()
        for chunk in tl.static_range(CHUNKS):
            base = base + (tl.load(bases + span * R + (chunk * 4 + q) % R),)  # type: ignore[assignment]  # noqa: RUF005
        following = _load(
            span + 1, last, codes, second, scale, valid, table, length, kv_heads, h, eight, q, WORDS, SPU, S
        )
        by, known = now[12 * PARTS], now[12 * PARTS + 1]
        for half in tl.static_range(2):
            totals = ()
            for part in tl.static_range(PARTS):
                x0 = (now[12 * part] >> (32 * half)).to(tl.int32)
                x1 = (now[12 * part + 1] >> (32 * half)).to(tl.int32)
                x2 = (now[12 * part + 2] >> (32 * half)).to(tl.int32)
                x3 = (now[12 * part + 3] >> (32 * half)).to(tl.int32)
                for chunk in tl.static_range(CHUNKS):
                    totals = totals + _sums(  # type: ignore[assignment]
                        x0, x1, x2, x3, now[12 * part + 4 * half + 4], now[12 * part + 4 * half + 5],
                        now[12 * part + 4 * half + 6], now[12 * part + 4 * half + 7],
                        columns[(chunk * PARTS + part) * 3], columns[(chunk * PARTS + part) * 3 + 1],
                        columns[(chunk * PARTS + part) * 3 + 2], ASM,
                    )  # fmt: skip
            # of each lane's own group among the four
            best, mass = tl.zeros((32,), tl.float32), tl.zeros((32,), tl.float32) + 1
            for j in tl.static_range(4):
                scaled = _from_byte((by >> (32 * half + 8 * j)).to(tl.uint8))
                values = ()
                for chunk in tl.static_range(CHUNKS):
                    total = totals[chunk * 4 + j]  # type: ignore[misc, var-annotated]
                    for part in tl.static_range(1, PARTS):
                        total += totals[(part * CHUNKS + chunk) * 4 + j]
                    value = base[chunk] + scaled * (total - middle[chunk]) * step[chunk]
                    values = values + (value,)  # type: ignore[assignment]  # noqa: RUF005
                top = values[0]  # type: ignore[misc]
                for chunk in tl.static_range(1, CHUNKS):
                    top = _larger(top, values[chunk])
                top = tl.reduce(tl.reshape(top, (8, 4)), 1, _larger)
                best = tl.where(q == j, tl.reshape(tl.broadcast_to(top[:, None], (8, 4)), (32,)), best)
                if SUM:
                    of_all = tl.zeros((8, 4), tl.float32)
                    for chunk in tl.static_range(CHUNKS):
                        one = tl.exp2((tl.reshape(values[chunk], (8, 4)) - top[:, None]) * 1.4426950408889634)
                        of_all += tl.where((chunk * 4 + tl.arange(0, 4) < R)[None, :], one, 0.0)
                    of_heads = tl.sum(of_all, axis=1)
                    mass = tl.where(q == j, tl.reshape(tl.broadcast_to(of_heads[:, None], (8, 4)), (32,)), mass)
            if SUM:
                best += _log(mass, ASM)
            g = span * 64 + eight * 8 + half * 4 + q
            best = tl.where(tl.abs(best) < float("inf"), best, LARGEST)
            best = tl.where(known, best, tl.where(g * S < length, float("inf"), -float("inf")))
            tl.store(estimate + row.to(tl.int64) * groups + g, best)
    if FILL:
        fill_past(estimate + row.to(tl.int64) * groups, length, spans, 64, S, 64)
    release(OVERLAP)


# ----------------------------------------------------------------------------------------------------------- launchers


def multiplies_bits(device: torch.device) -> bool:
    """Return whether a device has these products; on a CPU, Triton's interpreter does what they do."""
    if device.type != "cuda":
        return True
    return not torch.version.hip and torch.cuda.get_device_capability(device)[0] in CAPABILITIES


def score_bits(
    query: Query, summary: dict[str, Tensor], valid: Tensor, table: Tensor, lengths: Tensor, estimate: Tensor, *,
    group_size: int, programs: int, fill: bool,
) -> None:  # fmt: skip
    """Fills estimate [B, Hkv, G] (see `units.score_units`) for a query with planes, by so many programs a row."""
    batch, kv_heads, repeat, head_dim = query.integers.shape
    assert query.planes is not None
    per_unit = summary["scale"].shape[2]
    spans = table.shape[1] * per_unit
    bases = torch.empty((batch, kv_heads, spans, repeat), dtype=torch.float32, device=table.device)
    _score_bits[(programs, batch * kv_heads)](
        query.halves, query.inverses, query.head_sums, summary["mean"], summary["mean_scale"], query.anchors,
        query.planes, query.sums, query.steps, bases, summary["codes"].view(torch.int64),
        summary["second"].view(torch.int32), summary["second_scale"].view(torch.int64), valid, table, lengths,
        estimate, table.shape[1], estimate.shape[2], spans, kv_heads, R=repeat, D=head_dim,
        RP=_padded_heads(repeat), DK=max(triton.next_power_of_2(head_dim), 16), WORDS=query.planes.shape[-1],
        SPU=per_unit, S=group_size, LOG_S=math.log(group_size), PLANES=PLANES, BLOCK=MEANS,
        LARGEST=LARGEST_ESTIMATE, SUM=query.anchors is not None, FILL=fill, ASM=table.is_cuda,
        num_warps=1, **overlap(table.device),
    )  # fmt: skip
