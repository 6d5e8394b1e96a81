"""Quest's box: the least and the largest value of each channel."""

import numpy as np

from eps_core.summaries import base
from eps_core.summaries.base import Constants, Field, MethodSpec, Score, Settings, Summary

SPEC = MethodSpec(group_size=16, colour=1, follows=True)


def fields(settings: Settings, head_dim: int) -> dict[str, Field]:
    side, scalar = Field("int8", (head_dim,)), Field("float16")
    return {"lo": side, "hi": side, "scale": scalar, "norm": scalar}


def running(settings: Settings, head_dim: int) -> dict[str, Field]:
    return {"min": Field("float32", (head_dim,)), "max": Field("float32", (head_dim,)), "norm": Field("float32")}


def extend(settings: Settings, constants: Constants, earlier: Summary, k: np.ndarray, before: int) -> Summary:
    """The statistics of `before` keys (0: none) and of k [n, D]."""
    low, high, norm = k.min(axis=0), k.max(axis=0), base.key_norm(k)
    if before:
        low, high = np.minimum(low, earlier["min"]), np.maximum(high, earlier["max"])
        norm = max(norm, float(earlier["norm"]))
    return {"min": low, "max": high, "norm": norm}


def finalize(settings: Settings, statistics: Summary) -> Summary:
    """Per-channel min and max [D] (Quest, arXiv 2406.10774) in int8, rounded outward; norm = max |k|."""
    low, high = statistics["min"], statistics["max"]
    scale = base.up16(float(np.maximum(np.abs(low), np.abs(high)).max()) / 127)
    step = float(scale)
    return {
        "lo": np.clip(np.floor(low / step), -128, 127).astype(np.int8),
        "hi": np.clip(np.ceil(high / step), -128, 127).astype(np.int8),
        "scale": scale,
        "norm": base.up16(float(statistics["norm"])),
    }


def build(settings: Settings, constants: Constants, k: np.ndarray) -> Summary:
    return finalize(settings, extend(settings, constants, {}, k, 0))


def score(settings: Settings, constants: Constants, summary: Summary, a: np.ndarray) -> Score:
    """sum_c max(a_c lo_c, a_c hi_c): Quest's score, an upper bound of every logit of the group."""
    scale, log_n = base.f64(summary, "scale"), np.log(settings.S)
    low, high = (base.f64(summary, name) * scale[..., None] for name in ("lo", "hi"))
    most, least = np.maximum(a * low, a * high).sum(axis=-1), np.minimum(a * low, a * high).sum(axis=-1)
    slack = base.rounding_slack(a, base.f64(summary, "norm") + 2 * scale * np.sqrt(len(a)))
    return most, log_n + least - slack, log_n + most + slack
