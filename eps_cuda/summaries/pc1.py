"""1PC: the keys' first principal direction and what it leaves."""

import math

import torch
from torch import Tensor

from eps_core.config.cache import CacheConfig
from eps_cuda.summaries import base
from eps_cuda.summaries.base import Score, Summary


def build(cache_config: CacheConfig, constants: Summary, k: Tensor) -> Summary:
    """Top right singular direction of K in int8; lambda = |K u|^2 and the rest, both with the *quantised* u."""
    codes, scale = base.direction_codes(base.right_singular(k, 1)[1][..., 0, :])
    along = base.norms((k @ (codes * scale[..., None])[..., None])[..., 0])
    energy = (k * k).sum(dim=(-1, -2))
    return {
        "direction": codes.to(torch.int8),
        "direction_scale": scale,
        "lam": base.up16(along),
        "rest": base.up16(torch.sqrt((energy - along * along).clamp(min=0) + 1e-6 * energy)),
    }


def score(cache_config: CacheConfig, constants: Summary, summary: Summary, a: Tensor) -> Score:
    """B = |K u||u.a| + |K - K u uT|_F sqrt(|a|^2 - (u.a)^2) >= |K a|_2 >= every |logit|."""
    log_n = math.log(cache_config.S)
    along = (base.all_dots(summary["direction"], a) * base.per_group(summary, "direction_scale")).abs()
    energy = (a * a).sum(dim=-1)[..., None]
    across = (energy - along * along).clamp(min=0)
    lam, rest = base.per_group(summary, "lam"), base.per_group(summary, "rest")
    estimate = lam * along + rest * torch.sqrt(across)
    # the difference cancels in float32 where a runs along u: the bound pays for it under the root
    bound = lam * along + rest * torch.sqrt(across + (a.shape[-1] + 32) * 2.0**-22 * energy)
    slack = base.logit_slack(a, lam + rest)
    return estimate, log_n - bound - slack, log_n + bound + slack
