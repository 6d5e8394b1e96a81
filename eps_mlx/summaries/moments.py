"""Mean, principal directions and a bound on what is left (ours): the tightest bounds of the coarse summaries."""

import math

import mlx.core as mx

from eps_core.config.cache import CacheConfig
from eps_mlx.summaries import base
from eps_mlx.summaries.base import Score, Summary


def build(cache_config: CacheConfig, constants: Summary, k: mx.array) -> Summary:
    """Mean, `dim` centred principal directions with gains, and rho >= the norm of what they leave:
    aT C a <= sum_j gain_j (u_j.a)^2 + rho |a|^2 for every a, whatever rounding did to u_j and gain_j."""
    (n, head_dim), num_directions = k.shape[-2:], cache_config.dim or 0
    mean = k.mean(axis=-2)
    centred = k - mean[..., None, :]
    energies, directions = base.right_singular(centred, min(n, head_dim) + num_directions)
    values = energies / n
    # Schatten bound of C - sum_j lambda_j v_j v_jT, whose eigenvalues are the other ones
    others = values[..., num_directions:]
    most = mx.maximum(others.max(axis=-1), 1e-30)[..., None]
    trace = (centred * centred).sum(axis=(-1, -2)) / n
    noise = trace * 2.0**-20  # of float32 matrices and eigenvalues as large as the covariance
    left = noise + most[..., 0] * ((others / most) ** 16).sum(axis=-1) ** (1 / 16) * (1 + 1e-4)
    gain = base.near16(mx.maximum(values[..., :num_directions] - left[..., None], 0))
    codes, lengths = base.direction_codes(directions[..., :num_directions, :])
    codes = mx.where(gain[..., None] > 0, codes, 0)
    direction_scale = base.near16(mx.where(gain > 0, lengths, 0))
    rounded = codes * base.widened(direction_scale)[..., None]

    if n + num_directions < head_dim:
        # E has rank n + k at most: work in an orthonormal basis of the keys and directions instead of D dimensions
        _, coordinates = mx.linalg.qr(mx.concatenate([centred, rounded], axis=-2).swapaxes(-1, -2), stream=mx.cpu)
        keys, axes = coordinates[..., :n], coordinates[..., n:]
    else:
        keys, axes = centred.swapaxes(-1, -2), rounded.swapaxes(-1, -2)
    unexplained = keys @ keys.swapaxes(-1, -2) / n - (axes * base.widened(gain)[..., None, :]) @ axes.swapaxes(-1, -2)
    rho = base.up16(base.schatten_bound(unexplained) + noise)
    mean_code, mean_scale = base.mean_codes(mean)
    return {
        "mean": mean_code,
        "mean_scale": mean_scale,
        "error": base.up16(base.norms(mean - base.widened(mean_code) * base.widened(mean_scale)[..., None])),
        "radius": base.up16(base.key_norm(centred)),
        "rest": base.near16(mx.maximum(trace - (base.widened(gain) + base.widened(rho)[..., None]).sum(axis=-1), 0)),
        "rho": rho,
        "norm": base.up16(base.key_norm(k)),
        "direction": codes.astype(mx.int8),
        "direction_scale": direction_scale,
        "gain": gain,
    }


def score(cache_config: CacheConfig, constants: Summary, summary: Summary, a: mx.array) -> Score:
    """Section 4: Samuelson and radius for the largest logit, Bennett for the upper mass, Jensen for the lower."""
    n, log_n = cache_config.S, math.log(cache_config.S)
    energy = (a * a).sum(axis=-1)[..., None]
    size = mx.sqrt(energy)
    mean = base.all_dots(summary["mean"], a) * base.per_group(summary, "mean_scale")
    gains, rho, radius = (
        base.widened(summary["gain"]),
        base.per_group(summary, "rho"),
        base.per_group(summary, "radius"),
    )
    kept = gains.shape[-1]
    explained, along = mx.zeros_like(mean), mx.zeros_like(mean)
    for j in range(kept):
        part = (
            base.all_dots(summary["direction"][..., j, :], a)
            * base.widened(summary["direction_scale"])[..., None, :, j]
        )
        along = along + part * part
        explained = explained + gains[..., None, :, j] * (part * part)
    spread = base.per_group(summary, "rest") / max(a.shape[-1] - kept, 1) * mx.maximum(energy - along, 0)
    v_estimate = explained + rho * along + spread
    v_upper = explained + rho * energy
    b = mx.minimum(size * radius, mx.sqrt((n - 1) * v_upper))
    slack = base.logit_slack(a, base.per_group(summary, "norm") + radius)
    error = size * base.per_group(summary, "error")
    return (
        log_n + mean + base.random_energy(v_estimate, n),
        log_n + mean - error - slack,
        log_n + mean + error + base.bennett(b, v_upper) + slack,
    )
