"""The Metal kernel that estimates masses from summaries of two bytes a channel, a mean and a deviation: `meanstd`.

The sums are those of score_meanstd in eps_mlx.summaries, channel by channel. Queries are scaled as they are loaded; the
rest is as in `eps_mlx.kernels.score`.
"""

import mlx.core as mx

from eps_mlx.kernels.launch import Kernel
from eps_mlx.kernels.score import (
    FIND_TILES,
    LOAD_QUERY,
    PLACE,
    STORE,
    SUM_LANES,
    WHERE,
    ZERO_DOTS,
    estimates,
    heads_per_kv_head,
    layout,
    softmax_scale,
)

_SCORE_MEANSTD = (
    PLACE
    + LOAD_QUERY % "static_cast<float>(q[(size_t(row) * R + i % R) * D + d]) * softmax_scale[0]"
    + "    threadgroup_barrier(mem_flags::mem_threadgroup);\n"
    + FIND_TILES
    + ZERO_DOTS
    + """
    for (int k = 0; k < EACH; k++) {
        if (tile[k] >= 0) {
            const float mean_step = static_cast<float>(mean_scale[tile[k]]);
            const float deviation_step = static_cast<float>(deviation_scale[tile[k]]);
            for (int w = part; w < WORDS; w += LANES) {
                const uint means = uint(mean[size_t(tile[k]) * WORDS + w]);
                const uint deviations = uint(deviation[size_t(tile[k]) * WORDS + w]);
                #pragma unroll
                for (int j = 0; j < PER_WORD; j++) {
                    // flipping the top bit of an int8 adds 128
                    const float along = mean_step * (float(((means >> (8 * j)) & 255u) ^ 128u) - 128.0f);
                    const float across = deviation_step * float((deviations >> (8 * j)) & 255u);
                    #pragma unroll
                    for (int r = 0; r < R; r++) {
                        const float a = query[(w * PER_WORD + j) * R + r];
                        dot[k][r] += a * along + fabs(a) * across;
                    }
                }
            }
        }
    }
"""
    + SUM_LANES
    + STORE % "dot[k][r]"
)

_score_meanstd = Kernel(
    "eps_score_meanstd",
    ("q", "mean", "mean_scale", "deviation", "deviation_scale", *WHERE, "softmax_scale"),
    ("estimate",),
    _SCORE_MEANSTD,
)


def score_meanstd(
    q: mx.array, summary: dict[str, mx.array], valid: mx.array, table: mx.array, lengths: mx.array, *, group_size: int
) -> mx.array:
    """Estimates [B, Hkv, G] float32 by `meanstd`, max over the R query heads: q [B, Hq, D] unscaled, `summary` a
    layer's pools by name: mean [P, Hkv, GPU, D] int8 and std uint8, each with its scale [P, Hkv, GPU] float16; valid
    [P * GPU] uint8 (0: no valid summary), table [B, M] int32, lengths [B] int32."""
    mean, head_dim = summary["mean"], q.shape[-1]
    words, template = layout(mean, 8, head_dim, heads_per_kv_head(q, mean.shape[1]))
    pools = [words, summary["mean_scale"], summary["std"].view(words.dtype), summary["std_scale"]]
    return estimates(
        _score_meanstd, [q, *pools, valid, table, lengths], table.shape[1] * mean.shape[2], group_size, template,
        [softmax_scale(head_dim)],
    )  # fmt: skip
