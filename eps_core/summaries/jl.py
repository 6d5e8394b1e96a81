"""TODO"""

import numpy as np

from eps_core.summaries.base import Score, Summary, _f64

# ---------------------------------------------------------------- constants shared with the backends (values, not code)


def jl_projection(seed: int, layer: int, num_kv_heads: int, head_dim: int, dim: int) -> np.ndarray:
    """Phi [Hkv, D, m] float32 of +-1/sqrt(m), seeded per layer (Achlioptas 2003). The 1/sqrt(m) makes
    E[(PhiT k).(PhiT a)] = k.a; without it every comparison is off by m."""
    signs = np.random.default_rng([seed, 1, layer]).integers(0, 2, (num_kv_heads, head_dim, dim)) * 2 - 1
    return (signs / np.sqrt(dim)).astype(np.float32)


# ------------------------------------------------------------------------------------------------------------- building


def build_jl(k: np.ndarray, phi: np.ndarray) -> Summary:
    """Upper triangle, row by row, of sum y yT with y = PhiT k (product requirements, EPS-JL). phi [D, m]."""
    y = k @ phi.astype(np.float64)
    gram = y.T @ y
    return {"gram": gram[np.triu_indices(len(gram))].astype(np.float32)}


def score_jl(summary: Summary, a: np.ndarray, phi: np.ndarray) -> Score:
    """sqrt(zT G z), z = PhiT a: an estimate of |K a|_2, unsigned and no bound (the null space of Phi gives 0)."""
    m = phi.shape[1]
    rows, columns = np.triu_indices(m)
    z = phi.T.astype(np.float64) @ a
    weights = np.where(rows == columns, 1.0, 2.0) * z[rows] * z[columns]
    return np.sqrt(np.maximum(_f64(summary, "gram") @ weights, 0)), None, None
