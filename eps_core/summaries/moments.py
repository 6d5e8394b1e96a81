"""Mean, principal directions and a bound on what is left (ours): the tightest bounds of the coarse summaries."""

import numpy as np

from eps_core.summaries import base
from eps_core.summaries.base import Constants, Field, MethodSpec, Score, Settings, Summary

SPEC = MethodSpec(group_size=8, colour=4, dim=1, dim_means="k")


def fields(settings: Settings, head_dim: int) -> dict[str, Field]:
    kept, scalar = settings.dim or 0, Field("float16")
    scalars = dict.fromkeys(("mean_scale", "error", "radius", "rest", "rho", "norm"), scalar)
    return (
        {"mean": Field("int8", (head_dim,))}
        | scalars
        | {
            "direction": Field("int8", (kept, head_dim)),
            "direction_scale": Field("float16", (kept,)),
            "gain": Field("float16", (kept,)),
        }
    )


def build(settings: Settings, constants: Constants, k: np.ndarray) -> Summary:
    """Mean, `dim` centred principal directions with gains, and rho >= the norm of what they leave:
    aT C a <= sum_j gain_j (u_j.a)^2 + rho |a|^2 for every a, whatever rounding did to u_j and gain_j."""
    (n, head_dim), num_directions = k.shape, settings.dim or 0
    mean = k.mean(axis=0)
    centred = k - mean
    covariance = centred.T @ centred / n
    values, vectors = np.linalg.eigh(covariance)
    values, vectors = values[::-1], vectors[:, ::-1]
    values = np.pad(values, (0, num_directions))[:num_directions]
    vectors = np.pad(vectors, ((0, 0), (0, num_directions)))[:, :num_directions]
    left = base.schatten_bound(covariance - (vectors * values) @ vectors.T)
    codes = np.zeros((num_directions, head_dim), np.int8)
    scales, gains = np.zeros(num_directions, np.float16), np.zeros(num_directions, np.float16)
    explained = np.zeros_like(covariance)
    for j in range(num_directions):
        gains[j] = base.near16(max(float(values[j]) - left, 0))
        if gains[j] > 0:
            codes[j] = np.round(vectors[:, j] / np.abs(vectors[:, j]).max() * 127)
            scales[j] = base.near16(1 / float(np.linalg.norm(codes[j].astype(np.float64))))
        rounded = codes[j] * np.float64(scales[j])
        explained += float(gains[j]) * np.outer(rounded, rounded)
    rho = base.up16(base.schatten_bound(covariance - explained))
    mean_code, mean_scale = base.mean_codes(mean)
    return {
        "mean": mean_code,
        "mean_scale": mean_scale,
        "error": base.up16(float(np.linalg.norm(mean - mean_code * np.float64(mean_scale)))),
        "radius": base.up16(base.key_norm(centred)),
        "rest": base.near16(max(float(np.trace(covariance)) - float((gains.astype(float) + float(rho)).sum()), 0)),
        "rho": rho,
        "norm": base.up16(base.key_norm(k)),
        "direction": codes,
        "direction_scale": scales,
        "gain": gains,
    }


def score(settings: Settings, constants: Constants, summary: Summary, a: np.ndarray) -> Score:
    """Section 4: Samuelson and radius for the largest logit, Bennett for the upper mass, Jensen for the lower."""
    energy, size, n = a @ a, np.linalg.norm(a), settings.S
    mean = base.f64(summary, "mean") @ a * base.f64(summary, "mean_scale")
    gains, rho, radius = base.f64(summary, "gain"), base.f64(summary, "rho"), base.f64(summary, "radius")
    parts = (base.f64(summary, "direction") @ a * base.f64(summary, "direction_scale")) ** 2
    left = np.maximum(energy - parts.sum(axis=-1), 0)
    spread = base.f64(summary, "rest") / max(len(a) - parts.shape[-1], 1) * left
    v_estimate = ((gains + rho[..., None]) * parts).sum(axis=-1) + spread
    v_upper = (gains * parts).sum(axis=-1) + rho * energy
    b = np.minimum(size * radius, np.sqrt((n - 1) * v_upper))
    slack = base.rounding_slack(a, base.f64(summary, "norm") + radius)
    error = size * base.f64(summary, "error")
    return (
        np.log(n) + mean + base.random_energy(v_estimate, n),
        np.log(n) + mean - error - slack,
        np.log(n) + mean + error + base.bennett(b, v_upper) + slack,
    )
