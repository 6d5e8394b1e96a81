"""Parts shared by Metal kernels that estimate the masses of groups straight from the paged summaries: nothing is
gathered or unpacked.

Estimates are the array path's (`eps_core.backend.summaries.rq`) up to float32 rounding: +inf for a group inside the
sequence without a valid summary, -inf past its end. A group's codes are read once for all R query heads of its kv head,
and not at all where it is open, past the end or without a valid summary. Groups with equal codes and scales get equal
estimates to the bit: every group's sum is added in the same order.

Why no tables of what a byte or nibble adds, which serve a CPU best: at D = 128, R = 4 a simdgroup of 32 groups costs 32
reads of 16 bytes a lane of threadgroup memory, 4 to 8 clocks each and more where banks collide; selecting signs costs
128 * (R + 2) instructions at four a clock, as much, and needs none of the 8 to 64 KiB such tables take of the 32 KiB
that a threadgroup has.

Bodies follow one rule so that a short header of macros can make CUDA of them: `threadgroup` is the only address space
named, and pointers are indexed, never declared. Letters as in `attention.protocol`.
"""

import math
from functools import cache

import mlx.core as mx

THREADS = 256  # of a threadgroup; changes speed only
THREADGROUP_BYTES = 32 * 1024  # what Apple GPUs have

_WORDS = {4: mx.uint32, 2: mx.uint16, 1: mx.uint8}


def layout(codes: mx.array, bits: int, head_dim: int, repeat: int) -> tuple[mx.array, dict]:
    """The codes [P, Hkv, GPU, bytes] in the widest words that their rows are whole numbers of (the same buffer), and
    what kernels must know of them."""
    num_bytes = codes.shape[-1]
    if num_bytes != -(-head_dim * bits // 8):
        raise ValueError(f"codes of {num_bytes} bytes a group: {bits} bits of {head_dim} dimensions are another number")
    size = next(size for size in _WORDS if num_bytes % size == 0)
    if num_bytes * 8 // bits * repeat * 4 > THREADGROUP_BYTES:
        raise ValueError(
            f"{repeat} query heads of {head_dim} dimensions per kv head need more than {THREADGROUP_BYTES} bytes of "
            "threadgroup memory: use the array path"
        )
    return codes.view(_WORDS[size]), {"WORD": _WORDS[size], "BITS": bits}


def heads_per_kv_head(q: mx.array, kv_heads: int) -> int:
    """R of q [B, Hq, D]."""
    if q.shape[1] % kv_heads:
        raise ValueError(f"{q.shape[1]} query heads are no multiple of {kv_heads} kv heads")
    return q.shape[1] // kv_heads


@cache
def softmax_scale(head_dim: int) -> mx.array:
    return mx.array([1 / math.sqrt(head_dim)], mx.float32)
