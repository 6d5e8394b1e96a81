"""Triton: estimates of all groups from codes about the means of units, read at once or in stages (`rq`).

A query is rounded to integers (`rounded_query`), in the order of additions that all libraries share. What the bits of
a group add up to with them is then an exact number, whatever device adds: integers are exact in float16, one column a
query head, and go to the tensor cores as in `score`. Means ask the query as it is, in two columns.

The first pass reads the first part of all codes, which lies byte by byte, neighbouring groups side by side. Each
further pass reads one part more of the best of those that the pass before read: it writes their estimates to their
places and, in a row of their own, side by side, so that the next choice reads no other groups. Bytes that an earlier
pass has read are read again, of the best alone, which takes less than to keep what all groups added up to.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from eps_core.config.selection import ANCHOR_SPREAD
from eps_core.summaries.base import LARGEST_ESTIMATE
from eps_core.summaries.rq import PARTS, QUERY_STEPS
from eps_cuda.kernels import bits
from eps_cuda.kernels.attend import processors
from eps_cuda.kernels.finalize import TO_INTEGER, _rotate
from eps_cuda.kernels.overlap import overlap, release, wait
from eps_cuda.kernels.score import (
    _add_bits,
    _block,
    _columns,
    _estimate,
    _from_byte,
    _halves,
    _integer_sums,
    _padded_heads,
    _pairs,
    _places,
    _query,
)
from eps_cuda.kernels.select import Depth, select_best
from eps_cuda.kernels.write import LEAST_WIDTH

# Change speed only. Programs of one warp wait for no other; each takes so much that all of them run at once, and what
# it needs of the query is made once
PROGRAMS = 16  # of a multiprocessor
READ_ON_GROUPS = 64  # that a further pass takes at a time


# ------------------------------------------------------------------------------------------------------------- kernels


@triton.jit
def _round_queries(
    q, signs, turned, integers, steps, k_pool, table, anchors, planes, sums, stride_b, stride_h, unit_stride,
    head_stride, table_units, kv_heads, inverse_root, R: tl.constexpr, HEAD_DIM: tl.constexpr, DIM2: tl.constexpr,
    LOG_DIM: tl.constexpr, STEPS: tl.constexpr, SPREAD: tl.constexpr, PLANES: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):  # fmt: skip
    """One query head: `rotate` and `rounded_query`, its anchor unless `anchors` is None, and the integers' bit planes
    and their sum unless `planes` is None."""
    wait(OVERLAP)
    row, r = tl.program_id(0), tl.program_id(1)
    b, h = row // kv_heads, row % kv_heads
    d = tl.arange(0, DIM2)
    heads = q + b.to(tl.int64) * stride_b + h * R * stride_h
    a = tl.load(heads + r * stride_h + d, mask=d < HEAD_DIM, other=0.0).to(tl.float32) * inverse_root
    if anchors is not None:
        unit = tl.load(table + b * table_units).to(tl.int64)
        key = tl.load(k_pool + unit * unit_stride + h * head_stride + d, mask=d < HEAD_DIM, other=0.0).to(tl.float32)
        mean = 0.0
        for other in range(R):
            one = tl.load(heads + other * stride_h + d, mask=d < HEAD_DIM, other=0.0).to(tl.float32)
            mean += tl.sum(one * key, axis=0) * inverse_root
        mean = tl.div_rn(mean, R * 1.0)
        apart = tl.sum(a * key, axis=0) - mean
        tl.store(anchors + row * R + r, mean + tl.maximum(tl.minimum(apart, SPREAD), -SPREAD))
    t = _rotate(a, signs, 1, HEAD_DIM, DIM2, LOG_DIM)
    step = tl.div_rn(tl.max(tl.abs(t)), STEPS * 1.0)
    usable = (step > 0) & (step < float("inf"))
    nearest = (tl.div_rn(t, tl.where(usable, step, 1.0)) + TO_INTEGER) - TO_INTEGER
    release(OVERLAP)
    head = row * R + r
    tl.store(turned + head * HEAD_DIM + d, t, mask=d < HEAD_DIM)
    nearest = tl.where(usable, nearest, 0.0)
    tl.store(integers + head * HEAD_DIM + d, nearest.to(tl.float16), mask=d < HEAD_DIM)
    if planes is not None:
        tl.store(sums + head, tl.sum(nearest, axis=0))
        word = tl.arange(0, DIM2 // 32)
        for plane in tl.static_range(PLANES):
            ones = ((nearest.to(tl.int32) >> plane) & 1) << (d % 32)
            words = tl.xor_sum(tl.reshape(ones, (DIM2 // 32, 32)), axis=1)
            tl.store(planes + (head * PLANES + plane) * (HEAD_DIM // 32) + word, words, mask=word < HEAD_DIM // 32)
    # what is not finite makes no head the largest by chance: NaN is in all that it touches
    tl.store(steps + head, tl.where(step < float("inf"), step, float("nan")))


@triton.jit
def _score_means(
    turned, mean, mean_scale, anchors, table, lengths, bases, table_units, spans, kv_heads,
    R: tl.constexpr, D: tl.constexpr, RP: tl.constexpr, DP: tl.constexpr, DK: tl.constexpr, SUBNORMAL: tl.constexpr,
    SPU: tl.constexpr, SPAN: tl.constexpr, LOG_S: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr = False,
):  # fmt: skip
    """BLOCK units' means of one (sequence, kv head): log S + m_hat . a of each query head, less its anchor unless there
    is none."""
    wait(OVERLAP)
    row = tl.program_id(1)
    b, h = row // kv_heads, row % kv_heads
    span = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (span < spans) & (span < (tl.load(lengths + b) + SPAN - 1) // SPAN)
    _, tile = _places(table + b * table_units, span, inside, kv_heads, h, SPU)
    turned_row, r = turned + row * R * D, tl.arange(0, RP)
    power, inverse, sums = _query(turned_row, R, D, RP, DP)
    # codes times the query of each head, scaled by its power and in halves; times 2^-24 where SUBNORMAL
    d, column = tl.arange(0, DK), tl.arange(0, 2 * RP)
    codes = tl.load(mean + tile[:, None] * D + d[None, :], mask=inside[:, None] & (d < D)[None, :], other=0)
    used = (d < D)[:, None] & (column < 2 * R)[None, :]
    a = tl.load(turned_row + column[None, :] // 2 * D + d[:, None], mask=used, other=0.0)
    short = codes.to(tl.uint16).to(tl.float16, bitcast=True) if SUBNORMAL else codes.to(tl.float16)
    total = tl.dot(short, _halves(a * power[None, :], column))
    unit = inverse * 16777216.0 if SUBNORMAL else inverse
    dots = _pairs(total, BLOCK, RP) * unit[None, :] - (128 * sums)[None, :]
    step = tl.load(mean_scale + tile, mask=inside, other=0.0).to(tl.float32)
    place = (row.to(tl.int64) * spans + span)[:, None] * R + r[None, :]
    base = LOG_S + dots * step[:, None]
    if anchors is not None:
        base -= tl.load(anchors + row * R + r, mask=r < R, other=0.0)[None, :]
    release(OVERLAP)
    tl.store(bases + place, base, mask=(span < spans)[:, None] & (r < R)[None, :])


@triton.jit(do_not_specialize=["table_units", "groups", "spans", "spans_each"])
def _score_units(
    integers, steps, bases, codes, second, scale, valid, table, lengths, estimate, table_units, groups, spans,
    kv_heads, spans_each, R: tl.constexpr, D: tl.constexpr, ROW: tl.constexpr, RP: tl.constexpr, DP: tl.constexpr,
    SUBNORMAL: tl.constexpr, SPU: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, S: tl.constexpr,
    LARGEST: tl.constexpr, SUM: tl.constexpr, ASM: tl.constexpr, OVERLAP: tl.constexpr = False,
):  # fmt: skip
    """`spans_each` units of one (sequence, kv head), by the first D of ROW dimensions; by all of them and their
    rescoring bits where there is `second`."""
    wait(OVERLAP)
    BYTES: tl.constexpr = (D + 7) // 8
    BP: tl.constexpr = (DP + 7) // 8 if D == ROW else BYTES
    FOLD: tl.constexpr = 16 // BP if BP < 16 else 1
    MIDDLE: tl.constexpr = 1.0 if second is None else 1.5
    row = tl.program_id(1)
    b, h = row // kv_heads, row % kv_heads
    length = tl.load(lengths + b)
    n, head, byte = tl.arange(0, NP), tl.arange(0, RP) % R, tl.arange(0, BP * FOLD) % BP
    integers_row = integers + row * R * ROW
    columns = _columns(integers_row, head, 2, D, ROW, BYTES, BP, FOLD)
    if second is not None:
        of_second = _columns(integers_row, head, 1, D, ROW, BYTES, BP, FOLD)
    sums = MIDDLE * _integer_sums(integers_row, head, D, ROW, DP)
    step = tl.load(steps + row * R + head) * (ROW / D)
    first = tl.program_id(0) * spans_each
    for span in range(first, tl.minimum(first + spans_each, spans)):
        unit = tl.maximum(tl.load(table + b * table_units + span // SPU), 0).to(tl.int64)
        tile, g = (unit * kv_heads + h) * SPU + span % SPU, span * N + n
        known = ((span + 1) * (N * S) <= length) & (tl.load(valid + unit * SPU + span % SPU) != 0)
        packed = tl.load(
            codes + tile * (BYTES * N) + byte[None, :] * N + n[:, None],
            mask=((n < N) & known)[:, None] & (byte < BYTES)[None, :], other=0,
        )  # fmt: skip
        by = _from_byte(tl.load(scale + tile * N + n, mask=(n < N) & known, other=0))
        shift = tl.load(bases + (row.to(tl.int64) * spans + span) * R + head)
        total = _add_bits(tl.zeros((NP, RP), tl.float32), packed, columns, BP, FOLD, SUBNORMAL)
        if second is not None:
            packed = tl.load(
                second + ((tile * N + n) * BYTES)[:, None] + byte[None, :],
                mask=((n < N) & known)[:, None] & (byte < BYTES)[None, :], other=0,
            )  # fmt: skip
            total = _add_bits(total, packed, of_second, BP, FOLD, SUBNORMAL)
        best = _estimate(total, sums, step, shift[None, :], by, R, RP, SUBNORMAL, LARGEST, SUM, ASM)
        best = tl.where(known, best, tl.where(g * S < length, float("inf"), -float("inf")))
        tl.store(estimate + row.to(tl.int64) * groups + g, best, mask=n < N)
    release(OVERLAP)


@triton.jit(do_not_specialize=["table_units", "groups", "spans", "width", "through_width", "each"])
def _read_on(
    integers, steps, bases, codes, more, rest, second, scale, table, estimate, left, listed_groups, through, named,
    counts, table_units, groups, spans, kv_heads, width, through_width, each,
    R: tl.constexpr, D: tl.constexpr, MORE: tl.constexpr, REST: tl.constexpr, ROW: tl.constexpr, RP: tl.constexpr,
    DP: tl.constexpr, SUBNORMAL: tl.constexpr, SPU: tl.constexpr, N: tl.constexpr, LARGEST: tl.constexpr,
    SUM: tl.constexpr, ASM: tl.constexpr, M: tl.constexpr, OVERLAP: tl.constexpr = False,
):  # fmt: skip
    """`each` listed groups of one (sequence, kv head), by the parts that are given, of D, MORE and REST dimensions, and
    with `second` by their rescoring bits, too. Lists name entries of `through`, or groups where that is None. Estimates
    go to `left` [B, Hkv, width] too, and groups to `named`, unless these are None."""
    wait(OVERLAP)
    BYTES: tl.constexpr = (D + 7) // 8
    WHOLE: tl.constexpr = (ROW + 7) // 8
    WHOLE_P: tl.constexpr = (DP + 7) // 8
    BP: tl.constexpr = WHOLE_P if D == ROW else BYTES
    FOLD: tl.constexpr = 16 // BP if BP < 16 else 1
    MORE_FOLD: tl.constexpr = 16 // (MORE // 8) if (MORE > 0) and (MORE < 128) else 1
    REST_FOLD: tl.constexpr = 16 // (REST // 8) if (REST > 0) and (REST < 128) else 1
    WHOLE_FOLD: tl.constexpr = 16 // WHOLE_P if WHOLE_P < 16 else 1
    KNOWN: tl.constexpr = D + MORE + REST
    row = tl.program_id(1)
    b, h = row // kv_heads, row % kv_heads
    start, count = tl.program_id(0) * each, tl.load(counts + row)
    m, head = tl.arange(0, M), tl.arange(0, RP) % R
    listed_groups += row.to(tl.int64) * width
    if left is not None:
        left += row.to(tl.int64) * width
        for past in range(tl.maximum(start, count // M * M), tl.minimum(start + each, width), M):
            tl.store(left + past + m, -float("inf"), mask=(past + m >= count) & (past + m < width))
    # lists are as wide as the longest sequence needs
    if start < count:
        integers_row = integers + row * R * ROW
        columns = _columns(integers_row, head, 2, D, ROW, BYTES, BP, FOLD)
        if more is not None:
            of_more = _columns(integers_row + D, head, 2, MORE, ROW, MORE // 8, MORE // 8, MORE_FOLD)
        if rest is not None:
            of_rest = _columns(integers_row + D + MORE, head, 2, REST, ROW, REST // 8, REST // 8, REST_FOLD)
        if second is not None:
            of_second = _columns(integers_row, head, 1, ROW, ROW, WHOLE, WHOLE_P, WHOLE_FOLD)
        MIDDLE: tl.constexpr = 1.0 if second is None else 1.5
        sums = MIDDLE * _integer_sums(integers_row, head, KNOWN, ROW, DP)
        step = tl.load(steps + row * R + head) * (ROW / KNOWN)
        for first in range(start, tl.minimum(start + each, count), M):
            w = first + m
            listed = w < count
            g = tl.load(listed_groups + w, mask=listed, other=0)
            if through is not None:
                g = tl.load(through + row.to(tl.int64) * through_width + g, mask=listed, other=0)
            if named is not None:
                # not in place: of a narrow block several threads read each entry, and one of them writes
                tl.store(named + row.to(tl.int64) * width + w, g, mask=listed)
            span = g // N
            _, tile = _places(table + b * table_units, span, listed, kv_heads, h, SPU)
            place = tile * N + g % N
            byte = tl.arange(0, BP * FOLD) % BP
            packed = tl.load(
                codes + (tile * (BYTES * N) + g % N)[:, None] + byte[None, :] * N,
                mask=listed[:, None] & (byte < BYTES)[None, :], other=0,
            )  # fmt: skip
            total = _add_bits(tl.zeros((M, RP), tl.float32), packed, columns, BP, FOLD, SUBNORMAL)
            if more is not None:
                byte = tl.arange(0, MORE // 8 * MORE_FOLD) % (MORE // 8)
                packed = tl.load(more + (place * (MORE // 8))[:, None] + byte[None, :], mask=listed[:, None], other=0)
                total = _add_bits(total, packed, of_more, MORE // 8, MORE_FOLD, SUBNORMAL)
            if rest is not None:
                byte = tl.arange(0, REST // 8 * REST_FOLD) % (REST // 8)
                packed = tl.load(rest + (place * (REST // 8))[:, None] + byte[None, :], mask=listed[:, None], other=0)
                total = _add_bits(total, packed, of_rest, REST // 8, REST_FOLD, SUBNORMAL)
            if second is not None:
                byte = tl.arange(0, WHOLE_P * WHOLE_FOLD) % WHOLE_P
                packed = tl.load(
                    second + (place * WHOLE)[:, None] + byte[None, :],
                    mask=listed[:, None] & (byte < WHOLE)[None, :], other=0,
                )  # fmt: skip
                total = _add_bits(total, packed, of_second, WHOLE_P, WHOLE_FOLD, SUBNORMAL)
            at = (row.to(tl.int64) * spans + span)[:, None] * R + head[None, :]
            shift = tl.load(bases + at, mask=listed[:, None], other=0.0)
            by = _from_byte(tl.load(scale + place, mask=listed, other=0))
            best = _estimate(total, sums, step, shift, by, R, RP, SUBNORMAL, LARGEST, SUM, ASM)
            tl.store(estimate + row.to(tl.int64) * groups + g, best, mask=listed)
            if left is not None:
                tl.store(left + w, best, mask=listed)
    release(OVERLAP)


# ----------------------------------------------------------------------------------------------------------- launchers


@dataclass(frozen=True)
class Query:
    """Result of `round_queries`."""

    turned: Tensor  # [B, Hkv, R, D] float32
    integers: Tensor  # [B, Hkv, R, D] float16: turned ~ integers * steps
    steps: Tensor  # [B, Hkv, R] float32
    anchors: Tensor | None  # [B, Hkv, R] float32 (`scoring.anchors`)
    planes: Tensor | None  # [B, Hkv, R, PLANES, D / 32] int32: bits of the integers
    sums: Tensor | None  # [B, Hkv, R] float32 of the integers, where there are planes


def round_queries(
    q: Tensor, signs: Tensor, kv_heads: int, first: tuple[Tensor, Tensor] | None = None, with_planes: bool = False
) -> Query:
    """q [B, Hq, D] unscaled, signs [2, D] float32 of the rotation. `first`: K [P, Hkv, U, D] and the table [B, M] int32
    of the units whose first token anchors the query heads."""
    batch, heads, head_dim = q.shape
    assert q.stride(-1) == 1 and signs.is_contiguous()
    shape = batch, kv_heads, heads // kv_heads, head_dim
    turned = torch.empty(shape, dtype=torch.float32, device=q.device)
    integers = torch.empty(shape, dtype=torch.float16, device=q.device)
    steps = torch.empty(shape[:3], dtype=torch.float32, device=q.device)
    padded = max(triton.next_power_of_2(head_dim), LEAST_WIDTH)
    anchors, k_pool, table = None, None, None
    strides: tuple[int, ...] = (0, 0, 0)
    if first is not None:
        k_pool, table = first
        assert k_pool.stride(-1) == 1 and table.is_contiguous()
        anchors, strides = torch.empty_like(steps), (*k_pool.stride()[:2], table.shape[1])
    planes, sums = None, None
    if with_planes:
        planes = torch.empty((*shape[:3], bits.PLANES, head_dim // 32), dtype=torch.int32, device=q.device)
        sums = torch.empty_like(steps)
    _round_queries[(batch * kv_heads, shape[2])](
        q, signs, turned, integers, steps, k_pool, table, anchors, planes, sums, q.stride(0), q.stride(1), *strides,
        kv_heads, 1 / math.sqrt(head_dim), R=shape[2], HEAD_DIM=head_dim, DIM2=padded,
        LOG_DIM=padded.bit_length() - 1, STEPS=QUERY_STEPS, SPREAD=ANCHOR_SPREAD, PLANES=bits.PLANES, num_warps=1,
        enable_fp_fusion=False, **overlap(q.device),
    )  # fmt: skip
    return Query(turned, integers, steps, anchors, planes, sums)


def _each(rows: int, pieces: int, device: torch.device, programs: int = PROGRAMS) -> int:
    """Return how many of the pieces of each row one of `programs` of a multiprocessor takes."""
    return triton.cdiv(pieces, max(programs * processors(device) // rows, 1))


def reads_bits(depth: Depth, groups_per_span: int, repeat: int, head_dim: int, device: torch.device) -> bool:
    """Return whether `score_bits` makes the estimates: of whole codes of whole words."""
    whole = depth.at_once and not depth.cascaded and groups_per_span == bits.GROUPS and head_dim % 32 == 0
    return whole and repeat <= bits.MOST_HEADS and bits.multiplies_bits(device)


def integer_columns(repeat: int) -> int:
    """Columns of a product with integers, one a query head: no fewer than a device multiplies at least."""
    return max(triton.next_power_of_2(repeat), 16 if torch.version.hip else 8)


def _bases(
    query: Query, summary: dict[str, Tensor], table: Tensor, lengths: Tensor,
    shared: dict[str, float], group_size: int,
) -> Tensor:  # fmt: skip
    """log S + m_hat . a [B, Hkv, units, R] of all units, less the anchors."""
    batch, kv_heads, repeat, head_dim = query.turned.shape
    per_unit, together = summary["scale"].shape[2:]
    spans, padded = table.shape[1] * per_unit, max(triton.next_power_of_2(head_dim), 16)  # what one product adds up
    assert summary["mean"].shape[3] == head_dim
    bases = torch.empty((batch, kv_heads, spans, repeat), dtype=torch.float32, device=table.device)
    block = _block(batch * kv_heads, spans, padded)
    _score_means[(triton.cdiv(spans, block), batch * kv_heads)](
        query.turned, summary["mean"], summary["mean_scale"], query.anchors, table, lengths, bases, table.shape[1],
        spans, kv_heads, D=head_dim, RP=_padded_heads(repeat), DK=padded, **shared, SPAN=together * group_size,
        LOG_S=math.log(group_size), BLOCK=block, **overlap(table.device),
    )  # fmt: skip
    return bases


def score_units(
    query: Query, summary: dict[str, Tensor], valid: Tensor, table: Tensor, lengths: Tensor, depth: Depth,
    *, group_size: int, dims: tuple[int, ...], subnormal: bool = not torch.version.hip,
) -> Tensor:  # fmt: skip
    """Estimates [B, Hkv, G] float32 of log A_p, +inf inside the sequence without a valid summary (a partial group too),
    -inf past its end, each by as much of its code as `depth` lets be read. Where the query heads have anchors, the
    masses of each are divided by exp of its anchor, and their sum takes the place of the most in what is read last.
    `summary` has the pools [P, Hkv, SPU, ..] of `eps_core.summaries.rq` by name, `valid` [P * SPU] uint8, table [B, M]
    and lengths [B] int32; `dims` of each part of a code (`part_dims`)."""
    batch, kv_heads, repeat, head_dim = query.turned.shape
    per_unit, together = summary["scale"].shape[2:]
    spans, rows = table.shape[1] * per_unit, batch * kv_heads
    groups = spans * together
    whole = query.turned, query.integers, query.steps, *summary.values(), valid, table, lengths
    assert all(one.is_contiguous() for one in whole), "pools, tables and outputs of an earlier kernel are whole"
    assert summary["codes"].shape[3:] == (-(-dims[0] // 8), together) and sum(dims) == head_dim
    assert len(depth.cascaded) == len(dims) - 1, "a count for each part after the first"
    shared: dict[str, float] = {
        "R": repeat,
        "DP": triton.next_power_of_2(head_dim),
        "SUBNORMAL": subnormal,
        "SPU": per_unit,
    }
    bases = _bases(query, summary, table, lengths, shared, group_size)
    estimate = torch.empty((batch, kv_heads, groups), dtype=torch.float32, device=table.device)
    shared |= {"D": dims[0], "ROW": head_dim, "N": together, "LARGEST": LARGEST_ESTIMATE, "num_warps": 1}
    shared["ASM"] = table.is_cuda and not torch.version.hip
    shared |= overlap(table.device)
    # of each further pass: how many groups it reads, which parts, and whether rescoring bits
    names = PARTS[len(dims)]
    passes = [(*some, names[: at + 2], False) for at, some in enumerate(depth.cascaded)]
    if depth.rescored[1] and not depth.at_once:
        passes.append((*depth.rescored, names, True))
    sums = query.anchors is not None  # in what is read last
    if query.planes is not None and query.sums is not None:
        assert reads_bits(depth, together, repeat, head_dim, table.device)
        bits.score_bits(
            query.planes, query.sums, query.steps, bases, summary, valid, table, lengths, estimate,
            group_size=group_size, spans_each=_each(rows, spans, table.device, bits.PROGRAMS), together=sums,
        )  # fmt: skip
        return estimate
    spans_each = _each(rows, spans, table.device)
    second, by = (summary["second"], summary["second_scale"]) if depth.at_once else (None, summary["scale"])
    _score_units[(triton.cdiv(spans, spans_each), rows)](
        query.integers, query.steps, bases, summary["codes"], second, by, valid, table, lengths, estimate,
        table.shape[1], groups, spans, kv_heads, spans_each, **shared, RP=integer_columns(repeat), S=group_size,
        NP=max(triton.next_power_of_2(together), 16), SUM=sums and not passes,
    )  # fmt: skip

    held = dict(zip(names, dims, strict=True))
    through: Tensor | None = None
    row: Tensor = estimate  # of what the next pass chooses from, which `through` names
    for at, (counts, most, parts, twice) in enumerate(passes, start=1):
        width = min(max(most, 1), row.shape[2])
        listed, found = select_best(row, counts, width=width)
        left = torch.empty(listed.shape, dtype=torch.float32, device=table.device) if at < len(passes) else None
        named = None if through is None or left is None else torch.empty_like(listed)
        each = _each(rows, triton.cdiv(width, READ_ON_GROUPS), table.device) * READ_ON_GROUPS
        _read_on[(triton.cdiv(width, each), rows)](
            query.integers, query.steps, bases, summary["codes"],
            *(summary[name] if name in parts else None for name in ("more", "rest")),
            summary["second"] if twice else None, summary["second_scale" if twice else "scale"], table, estimate,
            left, listed, through, named, found, table.shape[1], groups, spans, kv_heads, width,
            1 if through is None else through.shape[2], each, **shared,
            **{name.upper(): held[name] if name in parts else 0 for name in ("more", "rest")},
            RP=integer_columns(repeat), SUM=sums and at == len(passes), M=READ_ON_GROUPS,
        )  # fmt: skip
        if left is not None:
            through, row = listed if named is None else named, left
    return estimate
