"""TODO"""

import numpy as np

from eps_core.summaries.base import Score, Summary, _f64, rounding_slack, up16


def build_box(low: np.ndarray, high: np.ndarray, norm: float) -> Summary:
    """Per-channel min and max [D] (Quest, arXiv 2406.10774) in int8, rounded outward; norm = max |k|."""
    scale = up16(float(np.maximum(np.abs(low), np.abs(high)).max()) / 127)
    step = float(scale)
    return {
        "lo": np.clip(np.floor(low / step), -128, 127).astype(np.int8),
        "hi": np.clip(np.ceil(high / step), -128, 127).astype(np.int8),
        "scale": scale,
        "norm": up16(norm),
    }


def score_box(summary: Summary, a: np.ndarray, n: int) -> Score:
    """sum_c max(a_c lo_c, a_c hi_c): Quest's score, an upper bound of every logit of the group."""
    scale = _f64(summary, "scale")
    low, high = (_f64(summary, name) * scale[..., None] for name in ("lo", "hi"))
    most, least = np.maximum(a * low, a * high).sum(axis=-1), np.minimum(a * low, a * high).sum(axis=-1)
    slack = rounding_slack(a, _f64(summary, "norm") + 2 * scale * np.sqrt(len(a)))
    return most, np.log(n) + least - slack, np.log(n) + most + slack
