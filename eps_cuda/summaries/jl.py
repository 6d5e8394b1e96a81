"""EPS-JL: a random sketch of the keys' Gram matrix."""

import torch
from torch import Tensor

from eps_core.config.cache import CacheConfig
from eps_cuda.summaries.base import Part, Score, Summary, all_dots


def gram_indices(dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows and columns of the upper triangle, row by row: the order of jl's packed Gram matrix."""
    rows, columns = torch.triu_indices(dim, dim, device=device)
    return rows, columns


def extend(cache_config: CacheConfig, constants: Summary, earlier: Summary, part: Part) -> Summary:
    added = build(cache_config, constants, torch.where(part.present, part.keys, 0))
    return {"gram": added["gram"] + torch.where(part.before > 0, earlier["gram"], 0)}


def build(cache_config: CacheConfig, constants: Summary, k: Tensor) -> Summary:
    """Packed upper triangle of sum y yT, y = PhiT k. Additive over keys; a key of zeros adds nothing."""
    phi = constants["phi"]
    y = k @ phi
    gram = y.mT @ y
    rows, columns = gram_indices(phi.shape[-1], k.device)
    return {"gram": gram[..., rows, columns]}


def score(cache_config: CacheConfig, constants: Summary, summary: Summary, a: Tensor) -> Score:
    """sqrt(zT G z), z = PhiT a: an estimate of |K a|_2, unsigned and no bound (the null space of Phi gives 0)."""
    phi = constants["phi"]
    rows, columns = gram_indices(phi.shape[-1], a.device)
    z = a @ phi
    products = torch.where(rows == columns, 1.0, 2.0) * z[..., rows] * z[..., columns]
    return torch.sqrt(all_dots(summary["gram"], products).clamp(min=0)), None, None
