"""TODO"""

import math

import torch
from torch import Tensor

from eps_core.config.store import MEAN, Store
from eps_core.summaries.base import LARGEST_ESTIMATE
from eps_cuda.summaries.ball import build_ball, score_ball
from eps_cuda.summaries.base import Score, Summary, _key_norm, mean_codes
from eps_cuda.summaries.box import build_box, score_box
from eps_cuda.summaries.fd import build_fd, score_fd
from eps_cuda.summaries.jl import build_jl, score_jl
from eps_cuda.summaries.meanstd import build_meanstd, score_meanstd
from eps_cuda.summaries.moments import build_moments, score_moments
from eps_cuda.summaries.pc1 import build_pc1, score_pc1
from eps_cuda.summaries.rq import build_rq, score_rq


def build_summary(store: Store, constants: Summary, k: Tensor) -> Summary:
    """The summaries of full groups: k [.., Hkv, S, D] in cache dtype -> stored arrays [.., Hkv, fields]."""
    k = k.float()
    dim = store.dim or 0
    if store.method == "oracle":
        return {}
    if store.method == MEAN:
        codes, scale = mean_codes(k.mean(dim=-2))
        return {"mean": codes, "mean_scale": scale}
    if store.method == "jl":
        return build_jl(k, constants["phi"])
    if store.method == "1pc":
        return build_pc1(k)
    if store.method == "fd":
        return build_fd(k, dim)
    if store.method == "box":
        return build_box(k.amin(dim=-2), k.amax(dim=-2), _key_norm(k))
    if store.method == "meanstd":
        return build_meanstd(k.mean(dim=-2), torch.sqrt(k.var(dim=-2, correction=0)))
    if store.method == "ball":
        return build_ball(k)
    if store.method == "moments":
        return build_moments(k, dim)
    return build_rq(k, constants["centre"], constants["signs"], store.bits, store.rq_bounds, store.second_bit)


def score_summary(store: Store, constants: Summary, summary: Summary, a: Tensor) -> Score:
    """Estimate and bounds [B, Hkv, R, G] of full groups: summary [B, Hkv, G, ..], a = scale * q [B, Hkv, R, D]."""
    n = store.S
    if store.method == "jl":
        estimate, lower, upper = score_jl(summary, a, constants)
    elif store.method == "1pc":
        estimate, lower, upper = score_pc1(summary, a, n)
    elif store.method == "fd":
        estimate, lower, upper = score_fd(summary, a, n)
    elif store.method == "box":
        estimate, lower, upper = score_box(summary, a, n)
    elif store.method == "meanstd":
        estimate, lower, upper = score_meanstd(summary, a)
    elif store.method == "ball":
        estimate, lower, upper = score_ball(summary, a, n)
    elif store.method == "moments":
        estimate, lower, upper = score_moments(summary, a, n)
    else:
        estimate, lower, upper = score_rq(summary, a, n, constants, store.bits)
    # an infinite stored scalar (key norms past float16) must loosen a bound, never turn it into NaN
    return (
        torch.where(torch.isfinite(estimate), estimate, LARGEST_ESTIMATE),
        None if lower is None else torch.where(torch.isfinite(lower), lower, -math.inf),
        None if upper is None else torch.where(torch.isfinite(upper), upper, math.inf),
    )
