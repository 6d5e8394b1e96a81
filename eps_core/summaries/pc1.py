"""1PC: the keys' first principal direction and what it leaves."""

import numpy as np

from eps_core.summaries.base import Constants, Field, MethodSpec, Score, Settings, Summary, f64, rounding_slack, up16

SPEC = MethodSpec(group_size=None, colour=6, norm_estimate=True)


def fields(settings: Settings, head_dim: int) -> dict[str, Field]:
    return {
        "direction": Field("int8", (head_dim,)),
        "direction_scale": Field("float32"),
        "lam": Field("float16"),
        "rest": Field("float16"),
    }


def build(settings: Settings, constants: Constants, k: np.ndarray) -> Summary:
    """Top right singular direction of K in int8; lambda = |K u|^2 and the rest, both with the *quantised* u."""
    direction = np.linalg.svd(k, full_matrices=False)[2][0]
    codes = (
        np.round(direction / np.abs(direction).max() * 127).astype(np.int8)
        if k.any()
        else np.zeros(k.shape[1], np.int8)
    )
    length = float(np.linalg.norm(codes.astype(np.float64)))
    scale = np.float32(1 / length) if length else np.float32(0)
    along = float(np.linalg.norm(k @ (codes * np.float64(scale))))
    energy = float((k**2).sum())
    return {
        "direction": codes,
        "direction_scale": scale,
        "lam": up16(along),
        "rest": up16(np.sqrt(max(energy - along**2, 0) + 1e-6 * energy)),
    }


def score(settings: Settings, constants: Constants, summary: Summary, a: np.ndarray) -> Score:
    """B = |K u||u.a| + |K - K u uT|_F sqrt(|a|^2 - (u.a)^2) >= |K a|_2 >= every |logit|."""
    along = np.abs(f64(summary, "direction") @ a * f64(summary, "direction_scale"))
    across = np.maximum(a @ a - along**2, 0)
    lam, rest = f64(summary, "lam"), f64(summary, "rest")
    estimate = lam * along + rest * np.sqrt(across)
    # the difference cancels in float32 where a runs along u: the bound pays for it under the root
    bound = lam * along + rest * np.sqrt(across + (len(a) + 32) * 2.0**-22 * (a @ a))
    slack, log_n = rounding_slack(a, lam + rest), np.log(settings.S)
    return estimate, log_n - bound - slack, log_n + bound + slack
