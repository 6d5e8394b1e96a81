"""TODO"""

import torch
from torch import Tensor

from eps_cuda.summaries.base import Score, Summary, _dots

# ------------------------------------------------------------------------------------------------------------- building


def gram_indices(dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows and columns of the upper triangle, row by row: the order of jl's packed Gram matrix."""
    rows, columns = torch.triu_indices(dim, dim, device=device)
    return rows, columns


def build_jl(k: Tensor, phi: Tensor) -> Summary:
    """Packed upper triangle of sum y yT, y = PhiT k (product requirements, EPS-JL). Additive over keys; a key of zeros
    adds nothing."""
    y = k @ phi
    gram = y.mT @ y
    rows, columns = gram_indices(phi.shape[-1], k.device)
    return {"gram": gram[..., rows, columns]}


def score_jl(summary: Summary, a: Tensor, constants: Summary) -> Score:
    """sqrt(zT G z), z = PhiT a: an estimate of |K a|_2, unsigned and no bound (the null space of Phi gives 0)."""
    phi = constants["phi"]
    rows, columns = gram_indices(phi.shape[-1], a.device)
    z = a @ phi
    products = torch.where(rows == columns, 1.0, 2.0) * z[..., rows] * z[..., columns]
    return torch.sqrt(_dots(summary["gram"], products).clamp(min=0)), None, None
