"""Mean, principal directions and a bound on what is left (ours): the tightest bounds of the coarse summaries."""

import math

from eps_core.attention.protocol import Array
from eps_core.backend.ops import Ops, Score, Summary
from eps_core.backend.summaries import base
from eps_core.config.cache import CacheConfig


def build(ops: Ops, cache_config: CacheConfig, constants: Summary, k: Array) -> Summary:
    """Mean, `dim` centred principal directions with gains, and rho >= the norm of what they leave:
    aT C a <= sum_j gain_j (u_j.a)^2 + rho |a|^2 for every a, whatever rounding did to u_j and gain_j."""
    (n, head_dim), num_directions = k.shape[-2:], cache_config.dim or 0
    mean = k.mean(axis=-2)
    centred = k - mean[..., None, :]
    energies, directions = base.right_singular(ops, centred, min(n, head_dim) + num_directions)
    values = energies / n
    # Schatten bound of C - sum_j lambda_j v_j v_jT, whose eigenvalues are the other ones
    others = values[..., num_directions:]
    most = ops.clip(ops.max(others), 1e-30, None)[..., None]
    trace = (centred * centred).sum(axis=(-1, -2)) / n
    noise = trace * 2.0**-20  # of float32 matrices and eigenvalues as large as the covariance
    left = noise + most[..., 0] * ((others / most) ** 16).sum(axis=-1) ** (1 / 16) * (1 + 1e-4)
    gain = ops.near16(ops.clip(values[..., :num_directions] - left[..., None], 0, None))
    codes, lengths = base.direction_codes(ops, directions[..., :num_directions, :])
    codes = ops.where(gain[..., None] > 0, codes, 0)
    direction_scale = ops.near16(ops.where(gain > 0, lengths, 0))
    rounded = codes * ops.float32(direction_scale)[..., None]

    if n + num_directions < head_dim:
        # E has rank n + k at most: work in an orthonormal basis of the keys and directions instead of D dimensions
        coordinates = ops.triangle(ops.concatenate([centred, rounded], axis=-2).swapaxes(-1, -2))
        keys, axes = coordinates[..., :n], coordinates[..., n:]
    else:
        keys, axes = centred.swapaxes(-1, -2), rounded.swapaxes(-1, -2)
    unexplained = keys @ keys.swapaxes(-1, -2) / n - (axes * ops.float32(gain)[..., None, :]) @ axes.swapaxes(-1, -2)
    rho = ops.up16(base.schatten_bound(ops, unexplained) + noise)
    mean_code, mean_scale = ops.mean_codes(mean)
    return {
        "mean": mean_code,
        "mean_scale": mean_scale,
        "error": ops.up16(ops.norms(mean - ops.float32(mean_code) * ops.float32(mean_scale)[..., None])),
        "radius": ops.up16(ops.key_norm(centred)),
        "rest": ops.near16(ops.clip(trace - (ops.float32(gain) + ops.float32(rho)[..., None]).sum(axis=-1), 0, None)),
        "rho": rho,
        "norm": ops.up16(ops.key_norm(k)),
        "direction": ops.int8(codes),
        "direction_scale": direction_scale,
        "gain": gain,
    }


def score(ops: Ops, cache_config: CacheConfig, constants: Summary, summary: Summary, a: Array) -> Score:
    """Section 4: Samuelson and radius for the largest logit, Bennett for the upper mass, Jensen for the lower."""
    n, log_n = cache_config.S, math.log(cache_config.S)
    energy = (a * a).sum(axis=-1)[..., None]
    size = ops.sqrt(energy)
    mean = ops.all_dots(summary["mean"], a) * ops.per_group(summary, "mean_scale")
    rho, radius = ops.per_group(summary, "rho"), ops.per_group(summary, "radius")
    gains, scales = ops.float32(summary["gain"]), ops.float32(summary["direction_scale"])
    kept = gains.shape[-1]
    explained, along = ops.zeros_like(mean), ops.zeros_like(mean)
    for j in range(kept):
        part = ops.all_dots(summary["direction"][..., j, :], a) * scales[..., None, :, j]
        along = along + part * part
        explained = explained + gains[..., None, :, j] * (part * part)
    spread = ops.per_group(summary, "rest") / max(a.shape[-1] - kept, 1) * ops.clip(energy - along, 0, None)
    v_estimate = explained + rho * along + spread
    v_upper = explained + rho * energy
    b = ops.minimum(size * radius, ops.sqrt((n - 1) * v_upper))
    slack = ops.logit_slack(a, ops.per_group(summary, "norm") + radius)
    error = size * ops.per_group(summary, "error")
    return (
        log_n + mean + base.random_energy(ops, v_estimate, n),
        log_n + mean - error - slack,
        log_n + mean + error + base.bennett(ops, b, v_upper) + slack,
    )
