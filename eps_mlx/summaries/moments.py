"""Mean, principal directions and a bound on what is left (ours): the tightest bounds of the coarse summaries."""

import math

import mlx.core as mx

from eps_core.config.store import Store
from eps_mlx.summaries.base import (
    Score,
    Summary,
    _direction_codes,
    _dots,
    _key_norm,
    _norm,
    _per_group,
    _right_singular,
    _schatten_bound,
    _wide,
    bennett,
    logit_slack,
    mean_codes,
    near16,
    random_energy,
    up16,
)


def build(store: Store, constants: Summary, k: mx.array) -> Summary:
    """Mean, `dim` centred principal directions with gains, and rho >= the norm of what they leave:
    aT C a <= sum_j gain_j (u_j.a)^2 + rho |a|^2 for every a, whatever rounding did to u_j and gain_j."""
    (n, head_dim), num_directions = k.shape[-2:], store.dim or 0
    mean = k.mean(axis=-2)
    centred = k - mean[..., None, :]
    energies, directions = _right_singular(centred, min(n, head_dim) + num_directions)
    values = energies / n
    # Schatten bound of C - sum_j lambda_j v_j v_jT, whose eigenvalues are the other ones
    others = values[..., num_directions:]
    most = mx.maximum(others.max(axis=-1), 1e-30)[..., None]
    trace = (centred * centred).sum(axis=(-1, -2)) / n
    noise = trace * 2.0**-20  # of float32 matrices and eigenvalues as large as the covariance
    left = noise + most[..., 0] * ((others / most) ** 16).sum(axis=-1) ** (1 / 16) * (1 + 1e-4)
    gain = near16(mx.maximum(values[..., :num_directions] - left[..., None], 0))
    codes, lengths = _direction_codes(directions[..., :num_directions, :])
    codes = mx.where(gain[..., None] > 0, codes, 0)
    direction_scale = near16(mx.where(gain > 0, lengths, 0))
    rounded = codes * _wide(direction_scale)[..., None]

    if n + num_directions < head_dim:
        # E has rank n + k at most: work in an orthonormal basis of the keys and directions instead of D dimensions
        _, coordinates = mx.linalg.qr(mx.concatenate([centred, rounded], axis=-2).swapaxes(-1, -2), stream=mx.cpu)
        keys, axes = coordinates[..., :n], coordinates[..., n:]
    else:
        keys, axes = centred.swapaxes(-1, -2), rounded.swapaxes(-1, -2)
    unexplained = keys @ keys.swapaxes(-1, -2) / n - (axes * _wide(gain)[..., None, :]) @ axes.swapaxes(-1, -2)
    rho = up16(_schatten_bound(unexplained) + noise)
    mean_code, mean_scale = mean_codes(mean)
    return {
        "mean": mean_code,
        "mean_scale": mean_scale,
        "error": up16(_norm(mean - _wide(mean_code) * _wide(mean_scale)[..., None])),
        "radius": up16(_key_norm(centred)),
        "rest": near16(mx.maximum(trace - (_wide(gain) + _wide(rho)[..., None]).sum(axis=-1), 0)),
        "rho": rho,
        "norm": up16(_key_norm(k)),
        "direction": codes.astype(mx.int8),
        "direction_scale": direction_scale,
        "gain": gain,
    }


def score(store: Store, constants: Summary, summary: Summary, a: mx.array) -> Score:
    """Section 4: Samuelson and radius for the largest logit, Bennett for the upper mass, Jensen for the lower."""
    n, log_n = store.S, math.log(store.S)
    energy = (a * a).sum(axis=-1)[..., None]
    size = mx.sqrt(energy)
    mean = _dots(summary["mean"], a) * _per_group(summary, "mean_scale")
    gains, rho, radius = _wide(summary["gain"]), _per_group(summary, "rho"), _per_group(summary, "radius")
    kept = gains.shape[-1]
    explained, along = mx.zeros_like(mean), mx.zeros_like(mean)
    for j in range(kept):
        part = _dots(summary["direction"][..., j, :], a) * _wide(summary["direction_scale"])[..., None, :, j]
        along = along + part * part
        explained = explained + gains[..., None, :, j] * (part * part)
    spread = _per_group(summary, "rest") / max(a.shape[-1] - kept, 1) * mx.maximum(energy - along, 0)
    v_estimate = explained + rho * along + spread
    v_upper = explained + rho * energy
    b = mx.minimum(size * radius, mx.sqrt((n - 1) * v_upper))
    slack = logit_slack(a, _per_group(summary, "norm") + radius)
    error = size * _per_group(summary, "error")
    return (
        log_n + mean + random_energy(v_estimate, n),
        log_n + mean - error - slack,
        log_n + mean + error + bennett(b, v_upper) + slack,
    )
