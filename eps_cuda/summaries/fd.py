"""Frequent Directions: a sketch of few rows of the keys' Gram matrix."""

import math

import torch
from torch import Tensor

from eps_core.config.cache import CacheConfig
from eps_cuda.summaries import base
from eps_cuda.summaries.base import Score, Summary


def build(cache_config: CacheConfig, constants: Summary, k: Tensor) -> Summary:
    """Frequent Directions of the whole group at once: |F a|^2 <= |K a|^2 <= |F a|^2 + Delta |a|^2."""
    rows = cache_config.dim or 0
    energies, directions = base.right_singular(k, rows + 1)
    shrinkage = energies[..., rows]
    lengths = torch.sqrt((energies[..., :rows] - shrinkage[..., None]).clamp(min=0))
    sketch = lengths[..., None] * directions[..., :rows, :]
    codes, scales = base.mean_codes(sketch)
    rounding = sketch - codes.float() * scales.float()[..., None]
    return {
        "rows": codes,
        "row_scale": scales,
        "error": base.up16(torch.linalg.vector_norm(rounding, dim=(-1, -2))),
        "delta": base.up16(torch.sqrt(shrinkage + 1e-5 * energies[..., 0])),
    }


def score(cache_config: CacheConfig, constants: Summary, summary: Summary, a: Tensor) -> Score:
    """|F a| estimates |K a|_2 from below; the bound adds the codes' rounding and the shrinkage Delta |a|^2."""
    log_n = math.log(cache_config.S)
    scales = summary["row_scale"].float()
    rows, head_dim = summary["rows"].shape[-2:]
    parts = base.all_dots(summary["rows"].flatten(2, 3), a).unflatten(-1, (-1, rows)) * scales[..., None, :, :]
    estimate, size = base.norms(parts), base.norms(a)[..., None]
    error, delta = base.per_group(summary, "error"), base.per_group(summary, "delta")
    bound = torch.hypot(estimate + error * size, delta * size)
    slack = base.logit_slack(a, error + delta + scales.sum(dim=-1)[..., None, :] * (127 * math.sqrt(head_dim)))
    return estimate, log_n - bound - slack, log_n + bound + slack
