"""EPS-JL: a random sketch of the keys' Gram matrix."""

import mlx.core as mx
import numpy as np

from eps_core.config.cache import CacheConfig
from eps_mlx.summaries.base import Part, Score, Summary


def gram_indices(dim: int) -> tuple[mx.array, mx.array]:
    """Rows and columns of the upper triangle, row by row: the order of jl's packed Gram matrix."""
    rows, columns = np.triu_indices(dim)
    return mx.array(rows.astype(np.int32)), mx.array(columns.astype(np.int32))


def extend(cache_config: CacheConfig, constants: Summary, earlier: Summary, part: Part) -> Summary:
    added = build(cache_config, constants, mx.where(part.present, part.keys, 0))
    return {"gram": added["gram"] + mx.where(part.before > 0, earlier["gram"], 0)}


def build(cache_config: CacheConfig, constants: Summary, k: mx.array) -> Summary:
    """Packed upper triangle of sum y yT, y = PhiT k. Additive over keys; a key of zeros adds nothing."""
    phi = constants["phi"]
    y = k @ phi
    gram = y.swapaxes(-1, -2) @ y
    rows, columns = gram_indices(phi.shape[-1])
    return {"gram": gram[..., rows, columns]}


def score(cache_config: CacheConfig, constants: Summary, summary: Summary, a: mx.array) -> Score:
    """sqrt(zT G z), z = PhiT a: an estimate of |K a|_2, unsigned and no bound (the null space of Phi gives 0)."""
    phi = constants["phi"]
    rows, columns = gram_indices(phi.shape[-1])
    z = a @ phi
    products = mx.where(rows == columns, 1.0, 2.0) * z[..., rows] * z[..., columns]
    return mx.sqrt(mx.maximum(products @ summary["gram"].swapaxes(-1, -2), 0)), None, None
