"""AETHER's ball: the mean, and the radius about it."""

import numpy as np

from eps_core.summaries.base import (
    Constants,
    Facts,
    Field,
    Score,
    Settings,
    Summary,
    _f64,
    key_norm,
    mean_codes,
    rounding_slack,
    up16,
)

FACTS = Facts(group_tokens=8, colour=3)


def fields(settings: Settings, head_dim: int) -> dict[str, Field]:
    scalars = dict.fromkeys(("mean_scale", "error", "radius", "norm"), Field("float16"))
    return {"mean": Field("int8", (head_dim,))} | scalars


def build(settings: Settings, constants: Constants, k: np.ndarray) -> Summary:
    """Mean in int8 and the radius about the *rounded* mean (AETHER's ball bound)."""
    mean = k.mean(axis=0)
    codes, scale = mean_codes(mean)
    rounded = codes * np.float64(scale)
    return {
        "mean": codes,
        "mean_scale": scale,
        "error": up16(float(np.linalg.norm(mean - rounded))),
        "radius": up16(key_norm(k - rounded)),
        "norm": up16(key_norm(k)),
    }


def score(settings: Settings, constants: Constants, summary: Summary, a: np.ndarray) -> Score:
    """mu_hat.a + |a| radius >= every logit; Jensen about the true mean gives the lower bound."""
    mean, size = _f64(summary, "mean") @ a * _f64(summary, "mean_scale"), np.linalg.norm(a)
    radius, error = _f64(summary, "radius"), _f64(summary, "error")
    slack, log_n = rounding_slack(a, _f64(summary, "norm") + radius), np.log(settings.S)
    return mean + size * radius, log_n + mean - size * error - slack, log_n + mean + size * radius + slack
