"""TODO"""

import math

import mlx.core as mx

from eps_core.config.eps import MEAN, EpsConfig
from eps_core.summaries.base import LARGEST_ESTIMATE
from eps_mlx.summaries.ball import build_ball, score_ball
from eps_mlx.summaries.base import Score, Summary, _key_norm, mean_codes
from eps_mlx.summaries.box import build_box, score_box
from eps_mlx.summaries.fd import build_fd, score_fd
from eps_mlx.summaries.jl import build_jl, score_jl
from eps_mlx.summaries.meanstd import build_meanstd, score_meanstd
from eps_mlx.summaries.moments import build_moments, score_moments
from eps_mlx.summaries.pc1 import build_pc1, score_pc1
from eps_mlx.summaries.rq import build_rq, score_rq


def build_summary(config: EpsConfig, constants: Summary, k: mx.array) -> Summary:
    """The summaries of full groups: k [.., Hkv, S, D] in cache dtype -> stored arrays [.., Hkv, fields]."""
    k = k.astype(mx.float32)
    dim = config.dim or 0
    if config.method == "oracle":
        return {}
    if config.method == MEAN:
        codes, scale = mean_codes(k.mean(axis=-2))
        return {"mean": codes, "mean_scale": scale}
    if config.method == "jl":
        return build_jl(k, constants["phi"])
    if config.method == "1pc":
        return build_pc1(k)
    if config.method == "fd":
        return build_fd(k, dim)
    if config.method == "box":
        return build_box(k.min(axis=-2), k.max(axis=-2), _key_norm(k))
    if config.method == "meanstd":
        return build_meanstd(k.mean(axis=-2), mx.sqrt(k.var(axis=-2)))
    if config.method == "ball":
        return build_ball(k)
    if config.method == "moments":
        return build_moments(k, dim)
    return build_rq(k, constants["centre"], constants["signs"], config.bits, config.rq_bounds, bool(config.refine))


def score_summary(config: EpsConfig, constants: Summary, summary: Summary, a: mx.array) -> Score:
    """Estimate and bounds [B, Hkv, R, G] of full groups: summary [B, Hkv, G, ..], a = scale * q [B, Hkv, R, D]."""
    n = config.S
    if config.method == "jl":
        estimate, lower, upper = score_jl(summary, a, constants)
    elif config.method == "1pc":
        estimate, lower, upper = score_pc1(summary, a, n)
    elif config.method == "fd":
        estimate, lower, upper = score_fd(summary, a, n)
    elif config.method == "box":
        estimate, lower, upper = score_box(summary, a, n)
    elif config.method == "meanstd":
        estimate, lower, upper = score_meanstd(summary, a)
    elif config.method == "ball":
        estimate, lower, upper = score_ball(summary, a, n)
    elif config.method == "moments":
        estimate, lower, upper = score_moments(summary, a, n)
    else:
        estimate, lower, upper = score_rq(summary, a, n, constants, config.bits)
    # an infinite stored scalar (key norms past float16) must loosen a bound, never turn it into NaN
    return (
        mx.where(mx.isfinite(estimate), estimate, LARGEST_ESTIMATE),
        None if lower is None else mx.where(mx.isfinite(lower), lower, -math.inf),
        None if upper is None else mx.where(mx.isfinite(upper), upper, math.inf),
    )
