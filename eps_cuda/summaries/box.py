"""TODO"""

import math

import torch
from torch import Tensor

from eps_cuda.summaries.base import Score, Summary, _dots, _per_group, logit_slack, up16


def build_box(low: Tensor, high: Tensor, norm: Tensor) -> Summary:
    """Per-channel min and max [.., D] (Quest) in int8, rounded outward; norm [..] = max |k|."""
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
        "norm": up16(norm),
    }


def score_box(summary: Summary, a: Tensor, n: int) -> Score:
    """sum_c max(a_c lo_c, a_c hi_c): Quest's score, an upper bound of every logit of the group. The largest product
    takes hi where a_c > 0 and lo where a_c < 0, the smallest the other way round."""
    both = torch.cat([a.clamp(min=0), a.clamp(max=0)], dim=2)
    low_rising, low_falling = _dots(summary["lo"], both).chunk(2, dim=2)
    high_rising, high_falling = _dots(summary["hi"], both).chunk(2, dim=2)
    scale = _per_group(summary, "scale")
    most, least = (high_rising + low_falling) * scale, (low_rising + high_falling) * scale
    slack = logit_slack(a, _per_group(summary, "norm") + 2 * scale * math.sqrt(a.shape[-1]))
    return most, math.log(n) + least - slack, math.log(n) + most + slack
