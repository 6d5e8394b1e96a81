"""The Metal kernel that turns and rounds the queries of codes about units' means (`eps_core.summaries.rq`).

Rounded queries are equal to the bit in every library: the rotation adds in the order of `rotate`, each level through
threadgroup memory, where no compiler fuses it with the next.
"""

import math
from functools import cache
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from eps_core.summaries.rq import QUERY_STEPS, hadamard_blocks
from eps_mlx.kernels.launch import Kernel, launch

THREADS = 256  # of a threadgroup, at most; changes speed only

# each d's block is the power of two of D that it lies in, as `hadamard_blocks` has them
_TURN = f"""
    const int tid = int(thread_index_in_threadgroup);
    const int row = int(threadgroup_position_in_grid.y);
    threadgroup float x[2][D];
    threadgroup float largest[1];
    for (int d = tid; d < D; d += THREADS) {{
        x[0][d] = (static_cast<float>(q[size_t(row) * D + d]) * softmax_scale[0]) * signs[d];
    }}
    threadgroup_barrier(mem_flags::mem_threadgroup);
    int from = 0;
    for (int round = 0; round < 2; ++round) {{
        for (int apart = TOP / 2; apart > 0; apart /= 2) {{
            for (int d = tid; d < D; d += THREADS) {{
                int start = 0;
                int block = TOP;
                while (d >= start + block || (D & block) == 0) {{
                    start += D & block;
                    block /= 2;
                }}
                const float own = x[from][d];
                const float other = block > apart ? x[from][d ^ apart] : 0.0f;
                x[1 - from][d] = (d & apart) != 0 ? other - own : own + other;
            }}
            from = 1 - from;
            threadgroup_barrier(mem_flags::mem_threadgroup);
        }}
        for (int d = tid; d < D; d += THREADS) {{
            const float scaled = x[from][d] * inverse[d];
            x[1 - from][d] = round == 0 ? scaled * signs[D + d] : scaled;
        }}
        from = 1 - from;
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }}
    if (tid < 32) {{
        float most = 0.0f;
        for (int d = tid; d < D; d += 32) {{
            most = max(most, fabs(x[from][d]));
        }}
        most = simd_max(most);
        if (tid == 0) {{
            largest[0] = most / {QUERY_STEPS}.0f;
            step[row] = most / {QUERY_STEPS}.0f;
        }}
    }}
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const bool usable = largest[0] > 0.0f && isfinite(largest[0]);
    for (int d = tid; d < D; d += THREADS) {{
        const float mine = x[from][d];
        turned[size_t(row) * D + d] = mine;
        rounded[size_t(row) * D + d] = usable ? rint(mine / largest[0]) : 0.0f;
    }}
"""

_turn_units = Kernel("eps_turn_units", ("q", "signs", "inverse", "softmax_scale"), ("turned", "rounded", "step"), _TURN)


class Query(NamedTuple):
    """Query as codes about units' means are asked it."""

    turned: mx.array  # [B, Hkv, R, D] float32: `rotate` of q / sqrt(D)
    rounded: mx.array  # [B, Hkv, R, D] float32, whole numbers within +-QUERY_STEPS: turned ~ rounded * step
    step: mx.array  # [B, Hkv, R] float32


def turn_units(q: mx.array, signs: mx.array, kv_heads: int) -> Query:
    """The query [B, Hq, D] unscaled as stages ask it: signs [2, D] float32, of the rotation."""
    batch, num_heads, head_dim = q.shape
    assert num_heads % kv_heads == 0, f"{num_heads} query heads are no multiple of {kv_heads} kv heads"
    shape = batch, kv_heads, num_heads // kv_heads, head_dim
    threads = min(THREADS, -(-head_dim // 32) * 32)
    turned, rounded, step = launch(
        _turn_units,
        [q, signs, *_factors(head_dim)],
        {"D": head_dim, "TOP": hadamard_blocks(head_dim)[0], "THREADS": threads},
        grid=(threads, batch * num_heads, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[shape, shape, shape[:3]],
        output_dtypes=[mx.float32] * 3,
    )
    return Query(turned, rounded, step)


@cache
def _factors(head_dim: int) -> tuple[mx.array, mx.array]:
    """Return what `rotate` multiplies each dimension by at its end, [D] float32, and 1 / sqrt(D), [1]."""
    blocks = hadamard_blocks(head_dim)
    ends = np.concatenate([np.full(size, 1 / math.sqrt(size), np.float32) for size in blocks])
    return mx.array(ends), mx.array([1 / math.sqrt(head_dim)], mx.float32)
