"""The product requirements' 1PC: the keys' first principal direction and what it leaves."""

import math

import torch
from torch import Tensor

from eps_core.config.store import Store
from eps_cuda.summaries.base import (
    Score,
    Summary,
    _direction_codes,
    _dots,
    _norm,
    _per_group,
    _right_singular,
    logit_slack,
    up16,
)


def build(store: Store, constants: Summary, k: Tensor) -> Summary:
    """Top right singular direction of K in int8; lambda = |K u|^2 and the rest, both with the *quantised* u."""
    codes, scale = _direction_codes(_right_singular(k, 1)[1][..., 0, :])
    along = _norm((k @ (codes * scale[..., None])[..., None])[..., 0])
    energy = (k * k).sum(dim=(-1, -2))
    return {
        "direction": codes.to(torch.int8),
        "direction_scale": scale,
        "lam": up16(along),
        "rest": up16(torch.sqrt((energy - along * along).clamp(min=0) + 1e-6 * energy)),
    }


def score(store: Store, constants: Summary, summary: Summary, a: Tensor) -> Score:
    """B = |K u||u.a| + |K - K u uT|_F sqrt(|a|^2 - (u.a)^2) >= |K a|_2 >= every |logit| (product requirements, 1PC)."""
    log_n = math.log(store.S)
    along = (_dots(summary["direction"], a) * _per_group(summary, "direction_scale")).abs()
    energy = (a * a).sum(dim=-1)[..., None]
    across = (energy - along * along).clamp(min=0)
    lam, rest = _per_group(summary, "lam"), _per_group(summary, "rest")
    estimate = lam * along + rest * torch.sqrt(across)
    # the difference cancels in float32 where a runs along u: the bound pays for it under the root
    bound = lam * along + rest * torch.sqrt(across + (a.shape[-1] + 32) * 2.0**-22 * energy)
    slack = logit_slack(a, lam + rest)
    return estimate, log_n - bound - slack, log_n + bound + slack
