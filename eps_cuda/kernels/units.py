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
from typing import Any

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
    MEANS,
    Depth,
    Query,
    _add_bits,
    _columns,
    _estimate,
    _from_byte,
    _integer_sums,
    _padded_heads,
    _places,
    fill_past,
    in_halves,
    score_means,
    share_of,
)
from eps_cuda.kernels.select import select_best
from eps_cuda.kernels.write import LEAST_WIDTH

# Change speed only. Programs of one warp wait for no other; each takes so much that all of them run at once, and what
# it needs of the query is made once
PROGRAMS = 16  # of a multiprocessor
READ_ON_GROUPS = 64  # that a further pass takes at a time


# ------------------------------------------------------------------------------------------------------------- kernels


@triton.jit
def round_query(
    row, r, q, signs, halves, inverses, head_sums, integers, steps, k_pool, table, anchors, planes, sums, stride_b,
    stride_h, unit_stride, head_stride, table_units, kv_heads, inverse_root, counters,
    R: tl.constexpr, HEAD_DIM: tl.constexpr, DIM2: tl.constexpr, LOG_DIM: tl.constexpr, STEPS: tl.constexpr,
    SPREAD: tl.constexpr, PLANES: tl.constexpr, COUNTERS: tl.constexpr, COUNTERS_PADDED: tl.constexpr,
):  # fmt: skip
    """Query head r of a (sequence, kv head): `rotate` and `rounded_query`, its anchor unless `anchors` is None, and the
    integers' bit planes and their sum unless `planes` is None. The first head clears the row's counters, if any."""
    if counters is not None:  # noqa: SIM102  this is known when it is compiled
        if r == 0:
            i = tl.arange(0, COUNTERS_PADDED)
            tl.store(counters + row * COUNTERS + i, tl.zeros((COUNTERS_PADDED,), tl.int32), mask=i < COUNTERS)
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
    head = row * R + r
    high, low, inverse = in_halves(t)
    tl.store(halves + head * 2 * HEAD_DIM + d, high, mask=d < HEAD_DIM)
    tl.store(halves + (head * 2 + 1) * HEAD_DIM + d, low, mask=d < HEAD_DIM)
    tl.store(inverses + head, inverse)
    tl.store(head_sums + head, tl.sum(t, axis=0))
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


@triton.jit(do_not_specialize=["table_units"])
def _round_queries(
    q, signs, halves, inverses, head_sums, integers, steps, k_pool, table, anchors, planes, sums, stride_b, stride_h,
    unit_stride, head_stride, table_units, kv_heads, inverse_root, counters,
    R: tl.constexpr, HEAD_DIM: tl.constexpr, DIM2: tl.constexpr, LOG_DIM: tl.constexpr, STEPS: tl.constexpr,
    SPREAD: tl.constexpr, PLANES: tl.constexpr, COUNTERS: tl.constexpr, COUNTERS_PADDED: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):  # fmt: skip
    """One query head a program."""
    wait(OVERLAP)
    release(OVERLAP)
    round_query(
        tl.program_id(0), tl.program_id(1), q, signs, halves, inverses, head_sums, integers, steps, k_pool, table,
        anchors, planes, sums, stride_b, stride_h, unit_stride, head_stride, table_units, kv_heads, inverse_root,
        counters, R, HEAD_DIM, DIM2, LOG_DIM, STEPS, SPREAD, PLANES, COUNTERS, COUNTERS_PADDED,
    )  # fmt: skip


@triton.jit(do_not_specialize=["table_units", "groups", "spans"])
def _score_units(
    halves, inverses, head_sums, mean, mean_scale, anchors, integers, steps, bases, codes, second, scale, valid, table,
    lengths, estimate, table_units, groups, spans, kv_heads, R: tl.constexpr, D: tl.constexpr,
    ROW: tl.constexpr, MEAN_RP: tl.constexpr, RP: tl.constexpr, DP: tl.constexpr, DK: tl.constexpr,
    SUBNORMAL: tl.constexpr, SPU: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, S: tl.constexpr,
    LOG_S: tl.constexpr, BLOCK: tl.constexpr, LARGEST: tl.constexpr, SUM: tl.constexpr, FILL: tl.constexpr,
    ASM: tl.constexpr, OVERLAP: tl.constexpr = False,
):  # fmt: skip
    """A share of the units of one (sequence, kv head): first their `bases`, then their estimates by the first D of ROW
    dimensions; by all of them and their rescoring bits where there is `second`."""
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
    first, last = share_of(length, spans, N * S)
    score_means(
        first, last, row, halves, inverses, head_sums, mean, mean_scale, anchors, table, lengths, bases, table_units,
        spans, kv_heads, R, ROW, MEAN_RP, DK, SUBNORMAL, SPU, N * S, LOG_S, BLOCK,
    )  # fmt: skip
    tl.debug_barrier()  # its lanes read what others of them wrote
    for span in range(first, last):
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
    if FILL:
        fill_past(estimate + row.to(tl.int64) * groups, length, spans, N, S, NP)
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


def rounding(
    q: Tensor, signs: Tensor, kv_heads: int, first: tuple[Tensor, Tensor] | None = None, with_planes: bool = False,
    counters: Tensor | None = None,
) -> tuple[Query, dict[str, Any]]:  # fmt: skip
    """Return where `round_query` leaves the heads of q [B, Hq, D], unscaled, and its arguments; signs [2, D] float32 of
    the rotation. `first`: K [P, Hkv, U, D] and the table [B, M] int32 of the units whose first token anchors the query
    heads. `counters` [B * Hkv, N] int32 are cleared on the way."""
    batch, heads, head_dim = q.shape
    assert q.stride(-1) == 1 and signs.is_contiguous()
    shape = batch, kv_heads, heads // kv_heads, head_dim
    integers = torch.empty(shape, dtype=torch.float16, device=q.device)
    halves = integers.new_empty((*shape[:3], 2, head_dim))
    steps, inverses, head_sums = torch.empty((3, *shape[:3]), dtype=torch.float32, device=q.device)
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
    query = Query(halves, inverses, head_sums, integers, steps, anchors, planes, sums)
    num_counters = 1 if counters is None else counters.shape[1]
    assert counters is None or (counters.is_contiguous() and counters.dtype == torch.int32)
    return query, vars(query) | {
        "q": q, "signs": signs, "k_pool": k_pool, "table": table, "stride_b": q.stride(0), "stride_h": q.stride(1),
        **dict(zip(("unit_stride", "head_stride", "table_units"), strides, strict=True)), "kv_heads": kv_heads,
        "inverse_root": 1 / math.sqrt(head_dim), "R": shape[2], "HEAD_DIM": head_dim, "DIM2": padded,
        "LOG_DIM": padded.bit_length() - 1, "STEPS": QUERY_STEPS, "SPREAD": ANCHOR_SPREAD, "PLANES": bits.PLANES,
        "counters": counters, "COUNTERS": num_counters, "COUNTERS_PADDED": triton.next_power_of_2(num_counters),
    }  # fmt: skip


def round_queries(q: Tensor, signs: Tensor, kv_heads: int, **more: Any) -> Query:
    """The query heads by a launch of their own: see `rounding`."""
    query, arguments = rounding(q, signs, kv_heads, **more)
    _round_queries[(q.shape[0] * kv_heads, q.shape[1] // kv_heads)](
        **arguments, num_warps=1, enable_fp_fusion=False, **overlap(q.device)
    )
    return query


def _programs(rows: int, pieces: int, device: torch.device, programs: int = PROGRAMS) -> int:
    """Return how many programs share the pieces of each row, of `programs` of a multiprocessor."""
    return triton.cdiv(pieces, triton.cdiv(pieces, max(programs * processors(device) // rows, 1)))


def reads_bits(depth: Depth, groups_per_span: int, repeat: int, head_dim: int, device: torch.device) -> bool:
    """Return whether `score_bits` makes the estimates: of whole codes of whole words."""
    whole = depth.at_once and not depth.cascaded and groups_per_span == bits.GROUPS and head_dim % 32 == 0
    return whole and repeat <= bits.MOST_HEADS and bits.multiplies_bits(device)


def integer_columns(repeat: int) -> int:
    """Columns of a product with integers, one a query head: no fewer than a device multiplies at least."""
    return max(triton.next_power_of_2(repeat), 16 if torch.version.hip else 8)


def score_units(
    query: Query, summary: dict[str, Tensor], valid: Tensor, table: Tensor, lengths: Tensor, depth: Depth,
    *, group_size: int, dims: tuple[int, ...], subnormal: bool = not torch.version.hip, fill: bool = True,
) -> Tensor:  # fmt: skip
    """Estimates [B, Hkv, G] float32 of log A_p, +inf inside the sequence without a valid summary (a partial group too),
    -inf past its end (in units past it, without `fill`, anything), each by as much of its code as `depth` lets be read.
    Where the query heads have anchors, the masses of each are divided by exp of its anchor, and their sum takes the
    place of the most in what is read last. `summary` has the pools [P, Hkv, SPU, ..] of `eps_core.summaries.rq` by
    name, `valid` [P * SPU] uint8, table [B, M] and lengths [B] int32; `dims` of each part of a code (`part_dims`)."""
    batch, kv_heads, repeat, head_dim = query.integers.shape
    per_unit, together = summary["scale"].shape[2:]
    spans, rows = table.shape[1] * per_unit, batch * kv_heads
    groups = spans * together
    whole = query.halves, query.integers, query.steps, *summary.values(), valid, table, lengths
    assert all(one.is_contiguous() for one in whole), "pools, tables and outputs of an earlier kernel are whole"
    assert summary["codes"].shape[3:] == (-(-dims[0] // 8), together) and sum(dims) == head_dim
    assert len(depth.cascaded) == len(dims) - 1, "a count for each part after the first"
    assert summary["mean"].shape[3] == head_dim
    estimate = torch.empty((batch, kv_heads, groups), dtype=torch.float32, device=table.device)
    if query.planes is not None and query.sums is not None:
        assert reads_bits(depth, together, repeat, head_dim, table.device)
        bits.score_bits(
            query, summary, valid, table, lengths, estimate, group_size=group_size, fill=fill,
            programs=_programs(rows, spans, table.device, bits.PROGRAMS),
        )  # fmt: skip
        return estimate
    bases = torch.empty((batch, kv_heads, spans, repeat), dtype=torch.float32, device=table.device)
    padded = triton.next_power_of_2(head_dim)
    shared: dict[str, Any] = {
        "R": repeat, "SUBNORMAL": subnormal, "SPU": per_unit, "D": dims[0], "ROW": head_dim, "DP": padded,
        "N": together, "LARGEST": LARGEST_ESTIMATE, "ASM": table.is_cuda and not torch.version.hip, "num_warps": 1,
        **overlap(table.device),
    }  # fmt: skip
    # of each further pass: how many groups it reads, which parts, and whether rescoring bits
    names = PARTS[len(dims)]
    passes = [(*some, names[: at + 2], False) for at, some in enumerate(depth.cascaded)]
    if depth.rescored[1] and not depth.at_once:
        passes.append((*depth.rescored, names, True))
    sums = query.anchors is not None  # in what is read last
    second, by = (summary["second"], summary["second_scale"]) if depth.at_once else (None, summary["scale"])
    _score_units[(_programs(rows, spans, table.device), rows)](
        query.halves, query.inverses, query.head_sums, summary["mean"], summary["mean_scale"], query.anchors,
        query.integers, query.steps, bases, summary["codes"], second, by, valid, table, lengths, estimate,
        table.shape[1], groups, spans, kv_heads, **shared, MEAN_RP=_padded_heads(repeat),
        RP=integer_columns(repeat), DK=max(padded, 16), S=group_size, LOG_S=math.log(group_size), BLOCK=MEANS,
        NP=max(triton.next_power_of_2(together), 16), SUM=sums and not passes, FILL=fill or bool(passes),
    )  # fmt: skip

    held = dict(zip(names, dims, strict=True))
    through: Tensor | None = None
    row: Tensor = estimate  # of what the next pass chooses from, which `through` names
    for at, (counts, most, parts, twice) in enumerate(passes, start=1):
        width = min(max(most, 1), row.shape[2])
        listed, found = select_best(row, counts, width=width)
        left = torch.empty(listed.shape, dtype=torch.float32, device=table.device) if at < len(passes) else None
        named = None if through is None or left is None else torch.empty_like(listed)
        blocks = triton.cdiv(width, READ_ON_GROUPS)
        programs = _programs(rows, blocks, table.device)
        each = triton.cdiv(blocks, programs) * READ_ON_GROUPS
        _read_on[(programs, rows)](
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
