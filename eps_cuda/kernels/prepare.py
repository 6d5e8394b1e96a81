"""Triton: what a captured sparse step does before it scores, in one launch: a token of each sequence is written, and
its query heads are rounded."""

from typing import Any

import triton
import triton.language as tl

from eps_cuda.kernels.overlap import overlap, release, wait
from eps_cuda.kernels.units import round_query
from eps_cuda.kernels.write import write_token


@triton.jit(do_not_specialize=["table_units"])
def _prepare(
    k, v, slots, k_pool, v_pool, finite, valid, codes, scale, second, second_scale, unit_mean, unit_mean_scale, more,
    rest, k_token, k_head, v_token, v_head, q, signs, halves, inverses, head_sums, integers, steps, table, anchors,
    planes, sums, stride_b, stride_h, unit_stride, head_stride, table_units, kv_heads, inverse_root, counters,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM2: tl.constexpr, LOG_DIM: tl.constexpr, UNIT: tl.constexpr,
    SPAN: tl.constexpr, LOG_SPAN: tl.constexpr, LOG_GROUP: tl.constexpr, SECOND: tl.constexpr, CODES: tl.constexpr,
    MORE: tl.constexpr, REST: tl.constexpr, UNIT_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr, R: tl.constexpr, STEPS: tl.constexpr, SPREAD: tl.constexpr, PLANES: tl.constexpr,
    COUNTERS: tl.constexpr, COUNTERS_PADDED: tl.constexpr, OVERLAP: tl.constexpr = False,
):  # fmt: skip
    """Program (b * Hkv + h, part): a query head of a kv head, or past these its token."""
    wait(OVERLAP)
    release(OVERLAP)
    row, part = tl.program_id(0), tl.program_id(1)
    if part < R:
        round_query(
            row, part, q, signs, halves, inverses, head_sums, integers, steps, k_pool, table, anchors, planes, sums,
            stride_b, stride_h, unit_stride, head_stride, table_units, kv_heads, inverse_root, counters, R, HEAD_DIM,
            DIM2, LOG_DIM, STEPS, SPREAD, PLANES, COUNTERS, COUNTERS_PADDED,
        )  # fmt: skip
    else:
        write_token(
            (row // KV_HEADS).to(tl.int64), row % KV_HEADS, k, v, slots, k_pool, v_pool, finite, valid, codes, scale,
            second, second_scale, signs, unit_mean, unit_mean_scale, more, rest, k_token, k_head, v_token, v_head,
            KV_HEADS, HEAD_DIM, DIM2, LOG_DIM, UNIT, SPAN, LOG_SPAN, LOG_GROUP, SECOND, CODES, MORE, REST,
            UNIT_STRIDE, HEAD_STRIDE, TOKEN_STRIDE,
        )  # fmt: skip


def prepare(written: dict[str, Any], num_warps: int, rounded: dict[str, Any]) -> None:
    """Launches what `writing` and `rounding` gave arguments for. The token that anchors a query head, the first of its
    sequence, is not the one that is written."""
    q = rounded["q"]
    _prepare[(q.shape[0] * rounded["kv_heads"], rounded["R"] + 1)](
        **(rounded | written | {"signs": rounded["signs"]}), num_warps=num_warps, enable_fp_fusion=False,
        **overlap(q.device),
    )  # fmt: skip
