"""AETHER's ball: the mean, and the radius about it."""

import numpy as np

from eps_core.summaries import base
from eps_core.summaries.base import Constants, Field, MethodSpec, Score, Settings, Summary

SPEC = MethodSpec(group_size=8, colour=3)


def fields(settings: Settings, head_dim: int) -> dict[str, Field]:
    scalars = dict.fromkeys(("mean_scale", "error", "radius", "norm"), Field("float16"))
    return {"mean": Field("int8", (head_dim,))} | scalars


def build(settings: Settings, constants: Constants, k: np.ndarray) -> Summary:
    """Mean in int8 and the radius about the *rounded* mean (AETHER's ball bound)."""
    mean = k.mean(axis=0)
    codes, scale = base.mean_codes(mean)
    rounded = codes * np.float64(scale)
    return {
        "mean": codes,
        "mean_scale": scale,
        "error": base.up16(float(np.linalg.norm(mean - rounded))),
        "radius": base.up16(base.key_norm(k - rounded)),
        "norm": base.up16(base.key_norm(k)),
    }


def score(settings: Settings, constants: Constants, summary: Summary, a: np.ndarray) -> Score:
    """mu_hat.a + |a| radius >= every logit; Jensen about the true mean gives the lower bound."""
    mean, size = base.f64(summary, "mean") @ a * base.f64(summary, "mean_scale"), np.linalg.norm(a)
    radius, error = base.f64(summary, "radius"), base.f64(summary, "error")
    slack, log_n = base.rounding_slack(a, base.f64(summary, "norm") + radius), np.log(settings.S)
    return mean + size * radius, log_n + mean - size * error - slack, log_n + mean + size * radius + slack
