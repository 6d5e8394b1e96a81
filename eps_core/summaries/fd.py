"""TODO"""

import numpy as np

from eps_core.summaries.base import Score, Summary, _f64, mean_codes, rounding_slack, up16


def build_fd(k: np.ndarray, rows: int) -> Summary:
    """Frequent Directions (Liberty 2013; Ghashami et al. 2016) of the whole group at once: F = `rows` shrunken
    singular rows and Delta = the square of the next singular value, so |F a|^2 <= |K a|^2 <= |F a|^2 + Delta |a|^2."""
    _, s, vt = np.linalg.svd(k, full_matrices=False)
    s, vt = np.pad(s, (0, rows + 1)), np.pad(vt, ((0, rows + 1), (0, 0)))
    delta = s[rows] ** 2
    sketch = np.sqrt(np.maximum(s[:rows, None] ** 2 - delta, 0)) * vt[:rows]
    quantised = [mean_codes(row) for row in sketch]
    codes, scales = np.stack([c for c, _ in quantised]), np.array([x for _, x in quantised], np.float16)
    return {
        "rows": codes,
        "row_scale": scales,
        "error": up16(float(np.linalg.norm(sketch - codes * scales.astype(np.float64)[:, None]))),
        "delta": up16(float(np.sqrt(delta + 1e-5 * s[0] ** 2))),
    }


def score_fd(summary: Summary, a: np.ndarray, n: int) -> Score:
    """|F a| estimates |K a|_2 from below; the bound adds the codes' rounding and the shrinkage Delta |a|^2."""
    scales = _f64(summary, "row_scale")
    estimate = np.linalg.norm(_f64(summary, "rows") @ a * scales, axis=-1)
    size = np.linalg.norm(a)
    error, delta = _f64(summary, "error"), _f64(summary, "delta")
    bound = np.hypot(estimate + error * size, delta * size)
    slack = rounding_slack(a, error + delta + scales.sum(axis=-1) * 127 * np.sqrt(len(a)))
    return estimate, np.log(n) - bound - slack, np.log(n) + bound + slack
