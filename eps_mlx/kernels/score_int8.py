"""Metal kernels that estimate masses from summaries of one byte a channel: `box`, `meanstd` and `ball`.

The sums are those of score_box, score_meanstd and score_ball in eps_mlx.summaries, channel by channel. Queries are
scaled as they are loaded; the rest is as in `eps_mlx.kernels.score`.
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


def _int8(
    method: str, inputs: tuple[str, ...], group: str, word: str, channel: str, added: str, store: str, extra: str = ""
) -> Kernel:
    """The kernel of a summary of one byte a channel: `group`, `word` and `channel` say what is read and decoded once
    for a group's tile, for a word of it and for channel j of the word; `added` is what channel value `a` adds."""
    body = (
        PLACE
        + LOAD_QUERY % "static_cast<float>(q[(size_t(row) * R + i % R) * D + d]) * softmax_scale[0]"
        + "    threadgroup_barrier(mem_flags::mem_threadgroup);\n"
        + extra
        + FIND_TILES
        + ZERO_DOTS
        + f"""
    for (int k = 0; k < EACH; k++) {{
        if (tile[k] >= 0) {{
            {group}
            for (int w = part; w < WORDS; w += LANES) {{
                {word}
                #pragma unroll
                for (int j = 0; j < PER_WORD; j++) {{
                    {channel}
                    #pragma unroll
                    for (int r = 0; r < R; r++) {{
                        const float a = query[(w * PER_WORD + j) * R + r];
                        dot[k][r] += {added};
                    }}
                }}
            }}
        }}
    }}
"""
        + SUM_LANES
        + STORE % store
    )
    return Kernel(f"eps_score_{method}", ("q", *inputs, *WHERE, "softmax_scale"), ("estimate",), body)


def _word(name: str) -> str:
    return f"const uint {name}_word = uint({name}[size_t(tile[k]) * WORDS + w]);"


def _signed(name: str) -> str:
    """Byte j of a word as int8: flipping its top bit adds 128."""
    return f"(float((({name}_word >> (8 * j)) & 255u) ^ 128u) - 128.0f)"


def _step(name: str) -> str:
    return f"const float {name} = static_cast<float>({name}_pool[tile[k]]);"


_KERNELS = {
    "box": _int8(
        "box",
        ("lo", "hi", "scale_pool"),
        _step("scale"),
        _word("lo") + _word("hi"),
        f"""const float lo_value = scale * {_signed("lo")}, hi_value = scale * {_signed("hi")};
                    const float along = 0.5f * (lo_value + hi_value), across = 0.5f * (hi_value - lo_value);""",
        "a * along + fabs(a) * across",
        "dot[k][r]",
    ),
    "meanstd": _int8(
        "meanstd",
        ("std", "mean", "std_scale_pool", "mean_scale_pool"),
        _step("mean_scale") + _step("std_scale"),
        _word("mean") + _word("std"),
        f"""const float along = mean_scale * {_signed("mean")};
                    const float across = std_scale * float((std_word >> (8 * j)) & 255u);""",
        "a * along + fabs(a) * across",
        "dot[k][r]",
    ),
    "ball": _int8(
        "ball",
        ("mean", "mean_scale_pool", "radius_pool"),
        _step("mean_scale"),
        _word("mean"),
        f"const float along = mean_scale * {_signed('mean')};",
        "a * along",
        "dot[k][r] + norm[r] * static_cast<float>(radius_pool[tile[k]])",
        """
    float norm[R];
    for (int r = 0; r < R; r++) {
        float energy = 0.0f;
        for (int d = tid % 32; d < D; d += 32) {
            energy += query[d * R + r] * query[d * R + r];
        }
        norm[r] = sqrt(simd_sum(energy));
    }
""",
    ),
}


def score_int8(
    method: str, q: mx.array, summary: dict[str, mx.array], valid: mx.array, table: mx.array, lengths: mx.array, *,
    group_tokens: int,
) -> mx.array:  # fmt: skip
    """Estimates [B, Hkv, G] float32 by `box`, `ball` or `meanstd`, max over the R query heads: q [B, Hq, D] unscaled,
    `summary` a layer's pools [P, Hkv, GPU, ..] by name; the rest as for `score_rq`."""
    codes = summary["lo" if method == "box" else "mean"]
    words, template = layout(codes, 8, q.shape[-1], heads_per_kv_head(q, codes.shape[1]))
    kernel = _KERNELS[method]
    pools = [summary[name.removesuffix("_pool")] for name in kernel.inputs[1 : -1 - len(WHERE)]]
    pools = [pool.view(words.dtype) if pool.ndim == 4 else pool for pool in pools]
    return estimates(
        kernel, [q, *pools, valid, table, lengths], table.shape[1] * codes.shape[2], group_tokens, template,
        [softmax_scale(q.shape[-1])],
    )  # fmt: skip
