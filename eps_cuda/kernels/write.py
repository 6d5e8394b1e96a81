"""Store one token's K and V per sequence and finalize the summaries of what it fills, in one Triton launch.

Equals `eps_core.backend.cache.write_kv` for tokens that each touch a group of their own: decode. One program per
(token, kv head) holds its rows in registers, so nothing that it stores is read back; the other rows of a group were
written by earlier launches. How summaries are made, and what of them equals the array path's bit for bit: `finalize`.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from eps_core.summaries.rq import SECOND_STEP
from eps_cuda.kernels.arguments import stride_constants
from eps_cuda.kernels.finalize import _finalize_unit
from eps_cuda.kernels.overlap import overlap, release, wait

# of a span, the elements that one warp takes; changes speed only. AMD's warps are twice as wide, and 16 of them would
# leave each thread 128 registers
WARP_ELEMENTS = {"cuda": 512, "hip": 1024}
LEAST_WIDTH = 8  # dimensions that a program handles at least: one byte of sign codes


class UnitPools(NamedTuple):
    """rq's summaries of one layer, written in place, and what building them needs, of units of N groups of
    `group_size` each. A cache that keeps error, radius and norm (`rq_bounds`) writes through the array path."""

    summary: dict[str, Tensor]  # pools [P, Hkv, SPU, ..] by the names of `eps_core.summaries.rq`
    signs: Tensor  # [2, D] float32, +-1
    group_size: int

    @property
    def part_bytes(self) -> tuple[int, int, int]:
        """Bytes of a group's codes in `codes`, `more` and `rest`."""
        more, rest = (self.summary[name].shape[-1] if name in self.summary else 0 for name in ("more", "rest"))
        return self.summary["codes"].shape[-2], more, rest


@triton.jit
def write_token(
    token, head, k, v, slots, k_pool, v_pool, finite, valid,
    codes, scale, second, second_scale, signs, unit_mean, unit_mean_scale, more, rest,
    k_token, k_head, v_token, v_head,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM2: tl.constexpr, LOG_DIM: tl.constexpr,
    UNIT: tl.constexpr, SPAN: tl.constexpr, LOG_SPAN: tl.constexpr, LOG_GROUP: tl.constexpr,
    SECOND: tl.constexpr, CODES: tl.constexpr, MORE: tl.constexpr, REST: tl.constexpr, UNIT_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr, TOKEN_STRIDE: tl.constexpr,
):  # fmt: skip
    """One token (int64) of one kv head. Pointers that are None are left out; `finite` uint8."""
    slot = tl.load(slots + token)
    if slot >= 0:
        unit = (slot // UNIT).to(tl.int64)
        offset = slot % UNIT
        d = tl.arange(0, DIM2)
        inside = d < HEAD_DIM
        key = tl.load(k + token * k_token + head * k_head + d, mask=inside, other=0).to(k_pool.dtype.element_ty)
        value = tl.load(v + token * v_token + head * v_head + d, mask=inside, other=0).to(v_pool.dtype.element_ty)
        start = unit * UNIT_STRIDE + head * HEAD_STRIDE  # of the unit's first token
        at = start + offset * TOKEN_STRIDE + d
        tl.store(k_pool + at, key, mask=inside)
        tl.store(v_pool + at, value, mask=inside)
        is_finite = tl.abs(key.to(tl.float32)) < float("inf")
        tl.store(finite, 0, mask=tl.min(is_finite.to(tl.int32)) == 0)

        spans = offset % SPAN == SPAN - 1
        if valid is not None:
            tl.store(valid + unit * (UNIT // SPAN) + offset // SPAN, spans.to(tl.uint8), mask=head == 0)
        if codes is not None:
            group = (unit * KV_HEADS + head) * (UNIT // SPAN) + offset // SPAN
            if spans:
                rows = k_pool + start + (offset - (SPAN - 1)) * TOKEN_STRIDE
                _finalize_unit(
                    rows, key, signs, group, unit_mean, unit_mean_scale, codes, more, rest, scale, second,
                    second_scale, SPAN, SPAN >> LOG_GROUP, LOG_SPAN - LOG_GROUP, LOG_GROUP, HEAD_DIM, DIM2, LOG_DIM,
                    CODES, MORE, REST, SECOND, TOKEN_STRIDE,
                )  # fmt: skip


@triton.jit
def write_kernel(
    k, v, slots, k_pool, v_pool, finite, valid,
    codes, scale, second, second_scale, signs, unit_mean, unit_mean_scale, more, rest,
    k_token, k_head, v_token, v_head,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM2: tl.constexpr, LOG_DIM: tl.constexpr,
    UNIT: tl.constexpr, SPAN: tl.constexpr, LOG_SPAN: tl.constexpr, LOG_GROUP: tl.constexpr,
    SECOND: tl.constexpr, CODES: tl.constexpr, MORE: tl.constexpr, REST: tl.constexpr, UNIT_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr, TOKEN_STRIDE: tl.constexpr, OVERLAP: tl.constexpr = False,
):  # fmt: skip
    """One program per (token, kv head)."""
    wait(OVERLAP)
    release(OVERLAP)
    write_token(
        tl.program_id(0).to(tl.int64), tl.program_id(1), k, v, slots, k_pool, v_pool, finite, valid,
        codes, scale, second, second_scale, signs, unit_mean, unit_mean_scale, more, rest,
        k_token, k_head, v_token, v_head, KV_HEADS, HEAD_DIM, DIM2, LOG_DIM, UNIT, SPAN, LOG_SPAN, LOG_GROUP, SECOND,
        CODES, MORE, REST, UNIT_STRIDE, HEAD_STRIDE, TOKEN_STRIDE,
    )  # fmt: skip


def _log2_up(number: int) -> int:
    """The least n with 2^n >= number."""
    return (number - 1).bit_length()


def launch_constants(
    kv_heads: int, head_dim: int, unit_tokens: int, span_tokens: int, group_size: int = 0,
    part_bytes: tuple[int, int, int] = (0, 0, 0), vendor: str = "hip" if torch.version.hip else "cuda",
) -> tuple[dict[str, int | float], int]:  # fmt: skip
    """(constexpr arguments of `write_kernel`, warps). Of rq `group_size`, and the bytes of a group's codes in
    `codes`, `more` and `rest`."""
    log_dim = _log2_up(max(head_dim, LEAST_WIDTH))
    constants = {
        "KV_HEADS": kv_heads, "HEAD_DIM": head_dim, "DIM2": 1 << log_dim, "LOG_DIM": log_dim,
        "UNIT": unit_tokens, "SPAN": span_tokens, "LOG_SPAN": _log2_up(span_tokens),
        "LOG_GROUP": _log2_up(group_size or span_tokens),
        "SECOND": float(np.float32(SECOND_STEP / head_dim)),
        **dict(zip(("CODES", "MORE", "REST"), part_bytes, strict=True)),
    }  # fmt: skip
    # all groups of a mean are in hand at once, several times
    at_once = span_tokens // group_size << log_dim if group_size else 0
    return constants, min(max(at_once // WARP_ELEMENTS[vendor], 4), 16) if group_size else 1


def writing(
    k: Tensor, v: Tensor, slots: Tensor, k_pool: Tensor, v_pool: Tensor, finite: Tensor, valid: Tensor | None, *,
    span_tokens: int, rq: UnitPools | None,
) -> tuple[dict[str, Any], int]:  # fmt: skip
    """(arguments of `write_token`, warps) for `write_tokens` with the same arguments."""
    num_tokens, kv_heads, head_dim = k.shape
    num_units, pool_heads, unit_tokens, pool_dim = k_pool.shape
    assert v.shape == k.shape and v_pool.shape == k_pool.shape and (pool_heads, pool_dim) == (kv_heads, head_dim)
    assert slots.shape == (num_tokens,) and slots.dtype in (torch.int32, torch.int64) and slots.is_contiguous()
    assert k.stride(2) == v.stride(2) == 1 or head_dim == 1, "a row of k or v is not contiguous"
    assert unit_tokens % span_tokens == 0, "groups do not divide a unit"
    assert finite.dtype in (torch.bool, torch.uint8) and finite.numel() == 1
    assert valid is None or (valid.dtype == torch.uint8 and valid.numel() == num_units * (unit_tokens // span_tokens))
    assert valid is None or valid.is_contiguous()
    constants, num_warps = launch_constants(
        kv_heads, head_dim, unit_tokens, span_tokens, *((rq.group_size, rq.part_bytes) if rq else ())
    )  # fmt: skip
    names = "codes", "scale", "second", "second_scale", "mean", "mean_scale", "more", "rest"
    pools = {("unit_" if "mean" in name else "") + name: rq and rq.summary.get(name) for name in names}
    return {
        "k": k, "v": v, "slots": slots, "k_pool": k_pool, "v_pool": v_pool, "finite": finite.view(torch.uint8),
        "valid": valid, **pools, "signs": rq and rq.signs, "k_token": k.stride(0), "k_head": k.stride(1),
        "v_token": v.stride(0), "v_head": v.stride(1), **constants, **stride_constants(k_pool, v_pool),
    }, num_warps  # fmt: skip


def write_tokens(
    k: Tensor, v: Tensor, slots: Tensor, k_pool: Tensor, v_pool: Tensor, finite: Tensor, valid: Tensor | None, *,
    span_tokens: int, rq: UnitPools | None,
) -> None:  # fmt: skip
    """Write k, v [N, Hkv, D] to slots [N] int32 or int64 (device) of k_pool, v_pool [P, Hkv, U, D]; finalize what they
    fill.

    A slot is unit * U + offset, or -1: nothing is written. No two slots of a call share a group, here what is
    summarised together, `span_tokens` of them, and none is past the pool: neither is checked, the host never sees
    them. `finite` [] bool or uint8 becomes 0 where a stored key is NaN or Inf. `valid` [P * U/span_tokens] uint8
    becomes 1 for a group whose last slot is written and 0 for one with another slot written, whether or not `rq` is
    given. `rq` gets the summaries of groups that became full. All on one device, without synchronisation: fit for a
    CUDA graph.
    """
    arguments, num_warps = writing(k, v, slots, k_pool, v_pool, finite, valid, span_tokens=span_tokens, rq=rq)
    if len(k):
        write_kernel[k.shape[:2]](**arguments, num_warps=num_warps, enable_fp_fusion=False, **overlap(k.device))
