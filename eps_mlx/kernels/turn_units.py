"""The Metal kernel that turns and rounds the queries of codes about units' means (`eps_core.summaries.rq`), and finds
their anchors (`scoring.anchors`).

Rounded queries are equal to the bit in every library: the rotation adds in the order of `rotate`, each level through
threadgroup memory, where no compiler fuses it with the next.
"""

import math
from functools import cache
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from eps_core.backend.pages import Pool
from eps_core.config.selection import ANCHOR_SPREAD
from eps_core.summaries.rq import QUERY_STEPS, hadamard_blocks
from eps_mlx.kernels.launch import Kernel, integers, launch
from eps_mlx.kernels.values import beside, elements_of, rows_of

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
    if (ANCHORED && tid < 32) {{
        const int pair = row / R;  // of a sequence and a kv head
        const int kv_heads = sizes[0];
        const int unit = max(table[pair / kv_heads * sizes[1]], 0);
        const int place = (unit * kv_heads + pair % kv_heads) * sizes[2];
        const int pool_rows = sizes[3];
        float total = 0.0f;
        float own = 0.0f;
        for (int r = 0; r < R; r++) {{
            float dot = 0.0f;
            for (int d = tid; d < D; d += 32) {{
                const auto key = place < pool_rows ? k_pool[size_t(place) * D + d]
                                                   : k_open[size_t(place - pool_rows) * D + d];
                dot += static_cast<float>(q[size_t(pair * R + r) * D + d]) * static_cast<float>(key);
            }}
            dot = simd_sum(dot) * softmax_scale[0];
            total += dot;
            own = r == row % R ? dot : own;
        }}
        const float mean = total / float(R);
        if (tid == 0) {{
            anchor[row] = mean + min(max(own - mean, -{ANCHOR_SPREAD!r}f), {ANCHOR_SPREAD!r}f);
        }}
    }}
"""

_turn_units = Kernel(
    "eps_turn_units",
    ("q", "signs", "inverse", "softmax_scale", "k_pool", "k_open", "table", "sizes"),
    ("turned", "rounded", "step", "anchor"),
    _TURN,
)


class Query(NamedTuple):
    """Query as codes about units' means are asked it."""

    turned: mx.array  # [B, Hkv, R, D] float32: `rotate` of q / sqrt(D)
    rounded: mx.array  # [B, Hkv, R, D] float32, whole numbers within +-QUERY_STEPS: turned ~ rounded * step
    step: mx.array  # [B, Hkv, R] float32
    anchor: mx.array | None = None  # [B, Hkv, R] float32, where query heads are summed


def turn_units(q: mx.array, signs: mx.array, kv_heads: int, first: tuple[Pool, mx.array] | None = None) -> Query:
    """The query [B, Hq, D] unscaled as stages ask it: signs [2, D] float32, of the rotation; with anchors where K and a
    table are given, the `first` token of whose sequences they are of (K as it is)."""
    batch, num_heads, head_dim = q.shape
    assert num_heads % kv_heads == 0, f"{num_heads} query heads are no multiple of {kv_heads} kv heads"
    shape = batch, kv_heads, num_heads // kv_heads, head_dim
    threads = min(THREADS, -(-head_dim // 32) * 32)
    keys = [q, q, integers(0), integers(0)]  # stand for what there is not
    if first is not None:
        pool, table = first
        sizes = integers(kv_heads, table.shape[1], pool.shape[2], rows_of(pool))
        keys = [elements_of(pool), *beside(pool), table, sizes]
    turned, rounded, step, anchor = launch(
        _turn_units,
        [q, signs, *_factors(head_dim), *keys],
        {
            "D": head_dim, "R": shape[2], "TOP": hadamard_blocks(head_dim)[0], "THREADS": threads,
            "ANCHORED": first is not None,
        },
        grid=(threads, batch * num_heads, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[shape, shape, shape[:3], (1,) if first is None else shape[:3]],
        output_dtypes=[mx.float32] * 4,
    )  # fmt: skip
    return Query(turned, rounded, step, None if first is None else anchor)


@cache
def _factors(head_dim: int) -> tuple[mx.array, mx.array]:
    """Return what `rotate` multiplies each dimension by at its end, [D] float32, and 1 / sqrt(D), [1]."""
    blocks = hadamard_blocks(head_dim)
    ends = np.concatenate([np.full(size, 1 / math.sqrt(size), np.float32) for size in blocks])
    return mx.array(ends), mx.array([1 / math.sqrt(head_dim)], mx.float32)
