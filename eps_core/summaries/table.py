"""The oracle's summaries: build and score all eight methods in float64.

A summary of one group is a dict of numpy values in their *stored* dtypes (int8 codes, float16 scalars): rounding is
part of the method, and every stored bound is rounded to its safe side. `build_x(k [n, D])` makes it, one group at a
time; `score_x(summaries [G, ...], a [D])` returns `(estimate, lower, upper)`, each [G], of the natural log of the
groups' softmax mass for one query head

    log A = log sum_i exp(a . k_i),   a = scale * q,

one estimate (ranks, may be wrong) and two bounds (hold for every a), or None where the method has no bound.
This file judges the backends: it is written from the formulas, shares no code with them and nobody optimises it.
Design: section 3 (methods), section 4 (bounds).
"""

import numpy as np

from eps_core.config.store import MEAN, Store
from eps_core.summaries.ball import build_ball, score_ball
from eps_core.summaries.base import LARGEST_ESTIMATE, Score, Summary, key_norm, mean_codes
from eps_core.summaries.box import build_box, score_box
from eps_core.summaries.fd import build_fd, score_fd
from eps_core.summaries.jl import build_jl, score_jl
from eps_core.summaries.meanstd import build_meanstd, score_meanstd
from eps_core.summaries.moments import build_moments, score_moments
from eps_core.summaries.pc1 import build_pc1, score_pc1
from eps_core.summaries.rq import build_rq, score_rq


def build_summary(store: Store, k: np.ndarray, phi: np.ndarray | None, centre: np.ndarray | None) -> Summary:
    """The summary of one full group of one kv head: k [S, D] exactly as attention reads it. phi [D, m] for jl,
    centre [D] for rq."""
    k = k.astype(np.float64)
    dim = store.dim or 0
    if store.method == MEAN:
        codes, scale = mean_codes(k.mean(axis=0))
        return {"mean": codes, "mean_scale": scale}
    if store.method == "jl":
        assert phi is not None
        return build_jl(k, phi)
    if store.method == "1pc":
        return build_pc1(k)
    if store.method == "fd":
        return build_fd(k, dim)
    if store.method == "box":
        return build_box(k.min(axis=0), k.max(axis=0), key_norm(k))
    if store.method == "meanstd":
        return build_meanstd(k.mean(axis=0), k.std(axis=0))
    if store.method == "ball":
        return build_ball(k)
    if store.method == "moments":
        return build_moments(k, dim)
    assert store.method == "rq" and centre is not None
    return build_rq(k, centre, store.bits, store.seed, store.rq_bounds, store.second_bit)


def score_summary(
    store: Store, summary: Summary, a: np.ndarray, n: int, phi: np.ndarray | None, centre: np.ndarray | None
) -> Score:
    """Estimate and bounds [G] of full groups of n keys for one query head: summary [G, ...], a = scale * q [D]."""
    a = a.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        if store.method == "jl":
            assert phi is not None
            estimate, lower, upper = score_jl(summary, a, phi)
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
            assert store.method == "rq" and centre is not None
            estimate, lower, upper = score_rq(summary, a, n, centre, store.bits, store.seed)
    # an infinite stored scalar (key norms past float16) must loosen a bound, never turn it into NaN
    return (
        np.where(np.isfinite(estimate), estimate, LARGEST_ESTIMATE),
        None if lower is None else np.where(np.isfinite(lower), lower, -np.inf),
        None if upper is None else np.where(np.isfinite(upper), upper, np.inf),
    )
