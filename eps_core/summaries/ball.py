"""TODO"""

import numpy as np

from eps_core.summaries.base import Score, Summary, _f64, key_norm, mean_codes, rounding_slack, up16


def build_ball(k: np.ndarray) -> Summary:
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


def score_ball(summary: Summary, a: np.ndarray, n: int) -> Score:
    """mu_hat.a + |a| radius >= every logit; Jensen about the true mean gives the lower bound."""
    mean, size = _f64(summary, "mean") @ a * _f64(summary, "mean_scale"), np.linalg.norm(a)
    radius, error = _f64(summary, "radius"), _f64(summary, "error")
    slack = rounding_slack(a, _f64(summary, "norm") + radius)
    return mean + size * radius, np.log(n) + mean - size * error - slack, np.log(n) + mean + size * radius + slack
