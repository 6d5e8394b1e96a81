"""EPS-JL: a random sketch of the keys' Gram matrix."""

import numpy as np

from eps_core.summaries.base import Constants, Field, MethodSpec, Score, Settings, Summary, f64

SPEC = MethodSpec(
    group_size=None,
    colour=5,
    dim=8,
    dim_means="m",
    norm_estimate=True,
    follows=True,
    no_bounds="none: a random projection can miss a key entirely; add --eps-bound-bits 8",
)


def fields(settings: Settings, head_dim: int) -> dict[str, Field]:
    m = settings.dim or 0
    return {"gram": Field("float32", (m * (m + 1) // 2,))}


def jl_projection(seed: int, layer: int, num_kv_heads: int, head_dim: int, dim: int) -> np.ndarray:
    """Phi [Hkv, D, m] float32 of +-1/sqrt(m), seeded per layer (Achlioptas 2003). The 1/sqrt(m) makes
    E[(PhiT k).(PhiT a)] = k.a; without it every comparison is off by m."""
    signs = np.random.default_rng([seed, 1, layer]).integers(0, 2, (num_kv_heads, head_dim, dim)) * 2 - 1
    return (signs / np.sqrt(dim)).astype(np.float32)


def constants(settings: Settings, layer: int, num_kv_heads: int, head_dim: int) -> Constants:
    return {"phi": jl_projection(settings.seed, layer, num_kv_heads, head_dim, settings.dim or 0)}


def extend(settings: Settings, constants: Constants, earlier: Summary, k: np.ndarray, before: int) -> Summary:
    """The sketch is additive: it is its own running statistic."""
    added = build(settings, constants, k)
    return {"gram": added["gram"] + earlier["gram"]} if before else added


def build(settings: Settings, constants: Constants, k: np.ndarray) -> Summary:
    """Upper triangle, row by row, of sum y yT with y = PhiT k."""
    y = k @ constants["phi"].astype(np.float64)
    gram = y.T @ y
    return {"gram": gram[np.triu_indices(len(gram))].astype(np.float32)}


def score(settings: Settings, constants: Constants, summary: Summary, a: np.ndarray) -> Score:
    """sqrt(zT G z), z = PhiT a: an estimate of |K a|_2, unsigned and no bound (the null space of Phi gives 0)."""
    phi = constants["phi"]
    rows, columns = np.triu_indices(phi.shape[1])
    z = phi.T.astype(np.float64) @ a
    weights = np.where(rows == columns, 1.0, 2.0) * z[rows] * z[columns]
    return np.sqrt(np.maximum(f64(summary, "gram") @ weights, 0)), None, None
