"""Quest's box: the least and the largest value of each channel."""

import math

import torch
from torch import Tensor

from eps_core.config.cache import CacheConfig
from eps_cuda.summaries.base import Part, Score, Summary, all_dots, key_norm, logit_slack, per_group, up16


def extend(cache_config: CacheConfig, constants: Summary, earlier: Summary, part: Part) -> Summary:
    low = torch.where(part.present, part.keys, torch.inf).amin(dim=-2)
    high = torch.where(part.present, part.keys, -torch.inf).amax(dim=-2)
    norm, continues = key_norm(torch.where(part.present, part.keys, 0)), part.before > 0
    return {
        "min": torch.where(continues, torch.minimum(low, earlier["min"]), low),
        "max": torch.where(continues, torch.maximum(high, earlier["max"]), high),
        "norm": torch.where(continues[..., 0], torch.maximum(norm, earlier["norm"]), norm),
    }


def finalize(cache_config: CacheConfig, statistics: Summary) -> Summary:
    """Per-channel min and max [.., D] (Quest) in int8, rounded outward; norm [..] = max |k|."""
    low, high = statistics["min"], statistics["max"]
    scale = up16(torch.maximum(low.abs(), high.abs()).amax(dim=-1) / 127)
    step = scale.float()[..., None]
    lo, hi = torch.floor(low / step), torch.ceil(high / step)
    # IEEE division cannot round past the code; a GPU's approximate one can
    lo = torch.where(lo * step > low, lo - 1, lo)
    hi = torch.where(hi * step < high, hi + 1, hi)
    return {
        "lo": lo.clamp(-128, 127).to(torch.int8),
        "hi": hi.clamp(-128, 127).to(torch.int8),
        "scale": scale,
        "norm": up16(statistics["norm"]),
    }


def build(cache_config: CacheConfig, constants: Summary, k: Tensor) -> Summary:
    return finalize(cache_config, {"min": k.amin(dim=-2), "max": k.amax(dim=-2), "norm": key_norm(k)})


def score(cache_config: CacheConfig, constants: Summary, summary: Summary, a: Tensor) -> Score:
    """sum_c max(a_c lo_c, a_c hi_c): Quest's score, an upper bound of every logit of the group. The largest product
    takes hi where a_c > 0 and lo where a_c < 0, the smallest the other way round."""
    log_n = math.log(cache_config.S)
    both = torch.cat([a.clamp(min=0), a.clamp(max=0)], dim=2)
    low_rising, low_falling = all_dots(summary["lo"], both).chunk(2, dim=2)
    high_rising, high_falling = all_dots(summary["hi"], both).chunk(2, dim=2)
    scale = per_group(summary, "scale")
    most, least = (high_rising + low_falling) * scale, (low_rising + high_falling) * scale
    slack = logit_slack(a, per_group(summary, "norm") + 2 * scale * math.sqrt(a.shape[-1]))
    return most, log_n + least - slack, log_n + most + slack
