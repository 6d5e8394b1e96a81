"""Triton: what a captured sparse step does before it scores, in one launch: a token of each sequence is written, its
query heads are rounded, and the counters of the choice are cleared."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from eps_cuda.kernels.overlap import overlap, release, wait
from eps_cuda.kernels.units import round_query
from eps_cuda.kernels.write import write_token


@triton.jit
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
    """Program (b * Hkv + h, part): a query head of a kv head, or past these what else there is to do."""
    wait(OVERLAP)
    release(OVERLAP)
    row, part = tl.program_id(0), tl.program_id(1)
    if part < R:
        round_query(
            row, part, q, signs, halves, inverses, head_sums, integers, steps, k_pool, table, anchors, planes, sums,
            stride_b, stride_h, unit_stride, head_stride, table_units, kv_heads, inverse_root, R, HEAD_DIM, DIM2,
            LOG_DIM, STEPS, SPREAD, PLANES,
        )  # fmt: skip
    else:
        i = tl.arange(0, COUNTERS_PADDED)
        tl.store(counters + row * COUNTERS + i, tl.zeros((COUNTERS_PADDED,), tl.int32), mask=i < COUNTERS)
        write_token(
            (row // KV_HEADS).to(tl.int64), row % KV_HEADS, k, v, slots, k_pool, v_pool, finite, valid, codes, scale,
            second, second_scale, signs, unit_mean, unit_mean_scale, more, rest, k_token, k_head, v_token, v_head,
            KV_HEADS, HEAD_DIM, DIM2, LOG_DIM, UNIT, SPAN, LOG_SPAN, LOG_GROUP, SECOND, CODES, MORE, REST,
            UNIT_STRIDE, HEAD_STRIDE, TOKEN_STRIDE,
        )  # fmt: skip


def prepare(written: dict[str, Any], num_warps: int, rounded: dict[str, Any], counters: Tensor) -> None:
    """Launches what `writing` and `rounding` gave arguments for, and clears counters [B * Hkv, N] int32. The token that
    anchors a query head, the first of its sequence, is not the one that is written."""
    rows, repeat = len(counters), rounded["R"]
    assert counters.is_contiguous() and counters.dtype == torch.int32
    _prepare[(rows, repeat + 1)](
        **(rounded | written | {"signs": rounded["signs"]}), counters=counters, COUNTERS=counters.shape[1],
        COUNTERS_PADDED=triton.next_power_of_2(counters.shape[1]), num_warps=num_warps, enable_fp_fusion=False,
        **overlap(counters.device),
    )  # fmt: skip
