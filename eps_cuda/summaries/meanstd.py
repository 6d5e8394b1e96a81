"""Mean and standard deviation of each channel: not UNIQUE (arXiv 2605.27740), which has one deviation a page."""

import torch
from torch import Tensor

from eps_core.config.cache import CacheConfig
from eps_cuda.summaries.base import Part, Score, Summary, all_dots, near16, per_group, rounded_codes


def extend(cache_config: CacheConfig, constants: Summary, earlier: Summary, part: Part) -> Summary:
    before, count = part.before, part.number
    mean = torch.where(part.present, part.keys, 0).sum(dim=-2) / count
    m2 = (torch.where(part.present, part.keys - mean[..., None, :], 0) ** 2).sum(dim=-2)
    # Chan et al. 1979; with nothing before it, the new part stands alone
    gap = mean - torch.where(before > 0, earlier["mean"], mean)
    m2 = m2 + torch.where(before > 0, earlier["m2"], 0) + gap * gap * (before * count / (before + count))
    return {"mean": mean - gap * (before / (before + count)), "m2": m2}


def finalize(cache_config: CacheConfig, statistics: Summary) -> Summary:
    return _stored(statistics["mean"], torch.sqrt(statistics["m2"] / cache_config.S))


def build(cache_config: CacheConfig, constants: Summary, k: Tensor) -> Summary:
    return _stored(k.mean(dim=-2), torch.sqrt(k.var(dim=-2, correction=0)))


def _stored(mean: Tensor, std: Tensor) -> Summary:
    """Per-channel mean (int8) and population standard deviation (uint8) [.., D]."""
    mean_scale = near16(mean.abs().amax(dim=-1) / 127)
    std_scale = near16(std.amax(dim=-1) / 255)
    return {
        "mean": rounded_codes(mean, mean_scale, 127).to(torch.int8),
        "mean_scale": mean_scale,
        "std": rounded_codes(std, std_scale, 255).to(torch.uint8),
        "std_scale": std_scale,
    }


def score(cache_config: CacheConfig, constants: Summary, summary: Summary, a: Tensor) -> Score:
    """mu.a + sum_c |a_c| sd_c: at least mean + one standard deviation of the logits; no bound."""
    mean = all_dots(summary["mean"], a) * per_group(summary, "mean_scale")
    return mean + all_dots(summary["std"], a.abs()) * per_group(summary, "std_scale"), None, None
