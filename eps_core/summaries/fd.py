"""Frequent Directions: a sketch of few rows of the keys' Gram matrix."""

import numpy as np

from eps_core.summaries import base
from eps_core.summaries.base import Constants, Field, MethodSpec, Score, Settings, Summary

# 8 rows would need 522 MiB at 32 x 32 x 64k, 2 need 132 MiB
SPEC = MethodSpec(group_size=None, colour=7, dim=2, dim_means="l", norm_estimate=True)


def fields(settings: Settings, head_dim: int) -> dict[str, Field]:
    rows = settings.dim or 0
    return {
        "rows": Field("int8", (rows, head_dim)),
        "row_scale": Field("float16", (rows,)),
        "error": Field("float16"),
        "delta": Field("float16"),
    }


def build(settings: Settings, constants: Constants, k: np.ndarray) -> Summary:
    """Frequent Directions (Liberty 2013; Ghashami et al. 2016) of the whole group at once: F = `dim` shrunken singular
    rows and Delta = the square of the next singular value, so |F a|^2 <= |K a|^2 <= |F a|^2 + Delta |a|^2."""
    rows = settings.dim or 0
    _, s, vt = np.linalg.svd(k, full_matrices=False)
    s, vt = np.pad(s, (0, rows + 1)), np.pad(vt, ((0, rows + 1), (0, 0)))
    delta = s[rows] ** 2
    sketch = np.sqrt(np.maximum(s[:rows, None] ** 2 - delta, 0)) * vt[:rows]
    quantised = [base.mean_codes(row) for row in sketch]
    codes, scales = np.stack([c for c, _ in quantised]), np.array([x for _, x in quantised], np.float16)
    return {
        "rows": codes,
        "row_scale": scales,
        "error": base.up16(float(np.linalg.norm(sketch - codes * scales.astype(np.float64)[:, None]))),
        "delta": base.up16(float(np.sqrt(delta + 1e-5 * s[0] ** 2))),
    }


def score(settings: Settings, constants: Constants, summary: Summary, a: np.ndarray) -> Score:
    """|F a| estimates |K a|_2 from below; the bound adds the codes' rounding and the shrinkage Delta |a|^2."""
    scales, log_n = base.f64(summary, "row_scale"), np.log(settings.S)
    estimate = np.linalg.norm(base.f64(summary, "rows") @ a * scales, axis=-1)
    size = np.linalg.norm(a)
    error, delta = base.f64(summary, "error"), base.f64(summary, "delta")
    bound = np.hypot(estimate + error * size, delta * size)
    slack = base.rounding_slack(a, error + delta + scales.sum(axis=-1) * 127 * np.sqrt(len(a)))
    return estimate, log_n - bound - slack, log_n + bound + slack
