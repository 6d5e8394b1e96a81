"""EPS-JL: a random sketch of the keys' Gram matrix."""

import numpy as np

from eps_core.attention.protocol import Array
from eps_core.backend.ops import Ops, Score, Summary
from eps_core.backend.summaries.base import Part
from eps_core.config.cache import CacheConfig


def gram_indices(ops: Ops, phi: Array) -> tuple[Array, Array]:
    """Rows and columns of the upper triangle, row by row: the order of jl's packed Gram matrix."""
    rows, columns = (ops.on(phi, part.astype(np.int32)) for part in np.triu_indices(phi.shape[-1]))
    return rows, columns


def extend(ops: Ops, cache_config: CacheConfig, constants: Summary, earlier: Summary, part: Part) -> Summary:
    added = build(ops, cache_config, constants, ops.where(part.present, part.keys, 0))
    return {"gram": added["gram"] + ops.where(part.before > 0, earlier["gram"], 0)}


def build(ops: Ops, cache_config: CacheConfig, constants: Summary, k: Array) -> Summary:
    """Packed upper triangle of sum y yT, y = PhiT k. Additive over keys; a key of zeros adds nothing."""
    phi = constants["phi"]
    y = k @ phi
    gram = y.swapaxes(-1, -2) @ y
    rows, columns = gram_indices(ops, phi)
    return {"gram": gram[..., rows, columns]}


def score(ops: Ops, cache_config: CacheConfig, constants: Summary, summary: Summary, a: Array) -> Score:
    """sqrt(zT G z), z = PhiT a: an estimate of |K a|_2, unsigned and no bound (the null space of Phi gives 0)."""
    phi = constants["phi"]
    rows, columns = gram_indices(ops, phi)
    z = a @ phi
    products = ops.where(rows == columns, 1.0, 2.0) * z[..., rows] * z[..., columns]
    return ops.sqrt(ops.clip(ops.all_dots(summary["gram"], products), 0, None)), None, None
