"""TODO"""

import math

import mlx.core as mx

from eps_mlx.summaries.base import Score, Summary, _dots, _per_group, _wide, logit_slack, up16


def build_box(low: mx.array, high: mx.array, norm: mx.array) -> Summary:
    """Per-channel min and max [.., D] (Quest) in int8, rounded outward; norm [..] = max |k|."""
    scale = up16(mx.maximum(mx.abs(low), mx.abs(high)).max(axis=-1) / 127)
    step = _wide(scale)[..., None]
    lo, hi = mx.floor(low / step), mx.ceil(high / step)
    # IEEE division cannot round past the code; a GPU's approximate one can
    lo = mx.where(lo * step > low, lo - 1, lo)
    hi = mx.where(hi * step < high, hi + 1, hi)
    return {
        "lo": mx.clip(lo, -128, 127).astype(mx.int8),
        "hi": mx.clip(hi, -128, 127).astype(mx.int8),
        "scale": scale,
        "norm": up16(norm),
    }


def score_box(summary: Summary, a: mx.array, n: int) -> Score:
    """sum_c max(a_c lo_c, a_c hi_c): Quest's score, an upper bound of every logit of the group. As two products:
    a.mid +- |a|.half, in code units."""
    lo, hi = _wide(summary["lo"]), _wide(summary["hi"])
    scale = _per_group(summary, "scale")
    middle = _dots((lo + hi) * 0.5, a) * scale
    half = _dots((hi - lo) * 0.5, mx.abs(a)) * scale
    slack = logit_slack(a, _per_group(summary, "norm") + 2 * scale * math.sqrt(a.shape[-1]))
    return middle + half, math.log(n) + middle - half - slack, math.log(n) + middle + half + slack
