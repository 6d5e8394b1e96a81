"""TODO"""

import torch
from torch import Tensor

from eps_cuda.summaries.base import Score, Summary, _codes, _dots, _per_group, near16


def build_meanstd(mean: Tensor, std: Tensor) -> Summary:
    """Per-channel mean (int8) and population standard deviation (uint8) [.., D] (UNIQUE)."""
    mean_scale = near16(mean.abs().amax(dim=-1) / 127)
    std_scale = near16(std.amax(dim=-1) / 255)
    return {
        "mean": _codes(mean, mean_scale, 127).to(torch.int8),
        "mean_scale": mean_scale,
        "std": _codes(std, std_scale, 255).to(torch.uint8),
        "std_scale": std_scale,
    }


def score_meanstd(summary: Summary, a: Tensor) -> Score:
    """mu.a + sum_c |a_c| sd_c (UNIQUE): at least mean + one standard deviation of the logits; no bound."""
    mean = _dots(summary["mean"], a) * _per_group(summary, "mean_scale")
    return mean + _dots(summary["std"], a.abs()) * _per_group(summary, "std_scale"), None, None
