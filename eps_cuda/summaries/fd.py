"""Frequent Directions, as the product requirements name it."""

import math

import torch
from torch import Tensor

from eps_core.config.store import Store
from eps_cuda.summaries.base import (
    Score,
    Summary,
    _dots,
    _norm,
    _per_group,
    _right_singular,
    logit_slack,
    mean_codes,
    up16,
)


def build(store: Store, constants: Summary, k: Tensor) -> Summary:
    """Frequent Directions of the whole group at once: |F a|^2 <= |K a|^2 <= |F a|^2 + Delta |a|^2."""
    rows = store.dim or 0
    energies, directions = _right_singular(k, rows + 1)
    shrinkage = energies[..., rows]
    lengths = torch.sqrt((energies[..., :rows] - shrinkage[..., None]).clamp(min=0))
    sketch = lengths[..., None] * directions[..., :rows, :]
    codes, scales = mean_codes(sketch)
    rounding = sketch - codes.float() * scales.float()[..., None]
    return {
        "rows": codes,
        "row_scale": scales,
        "error": up16(torch.linalg.vector_norm(rounding, dim=(-1, -2))),
        "delta": up16(torch.sqrt(shrinkage + 1e-5 * energies[..., 0])),
    }


def score(store: Store, constants: Summary, summary: Summary, a: Tensor) -> Score:
    """|F a| estimates |K a|_2 from below; the bound adds the codes' rounding and the shrinkage Delta |a|^2."""
    log_n = math.log(store.S)
    scales = summary["row_scale"].float()
    rows, head_dim = summary["rows"].shape[-2:]
    parts = _dots(summary["rows"].flatten(2, 3), a).unflatten(-1, (-1, rows)) * scales[..., None, :, :]
    estimate, size = _norm(parts), _norm(a)[..., None]
    error, delta = _per_group(summary, "error"), _per_group(summary, "delta")
    bound = torch.hypot(estimate + error * size, delta * size)
    slack = logit_slack(a, error + delta + scales.sum(dim=-1)[..., None, :] * (127 * math.sqrt(head_dim)))
    return estimate, log_n - bound - slack, log_n + bound + slack
