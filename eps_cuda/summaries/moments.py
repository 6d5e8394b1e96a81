"""Mean, principal directions and a bound on what is left (ours): the tightest bounds of the coarse summaries."""

import math

import torch
from torch import Tensor

from eps_core.config.store import Store
from eps_cuda.summaries.base import (
    Score,
    Summary,
    _direction_codes,
    _dots,
    _key_norm,
    _norm,
    _per_group,
    _right_singular,
    _schatten_bound,
    bennett,
    logit_slack,
    mean_codes,
    near16,
    random_energy,
    up16,
)


def build(store: Store, constants: Summary, k: Tensor) -> Summary:
    """Mean, `dim` centred principal directions with gains, and rho >= the norm of what they leave:
    aT C a <= sum_j gain_j (u_j.a)^2 + rho |a|^2 for every a, whatever rounding did to u_j and gain_j."""
    (n, head_dim), num_directions = k.shape[-2:], store.dim or 0
    mean = k.mean(dim=-2)
    centred = k - mean[..., None, :]
    energies, directions = _right_singular(centred, min(n, head_dim) + num_directions)
    values = energies / n
    trace = (centred * centred).sum(dim=(-1, -2)) / n
    noise = trace * 2.0**-20  # of float32 matrices as large as the covariance: no direction is worth less than it
    # Schatten bound of C - sum_j lambda_j v_j v_jT, whose eigenvalues are the other ones
    others = values[..., num_directions:]
    most = others.amax(dim=-1).clamp(min=1e-30)[..., None]
    left = most[..., 0] * ((others / most) ** 16).sum(dim=-1) ** (1 / 16) * (1 + 1e-4) + noise
    gain = near16((values[..., :num_directions] - left[..., None]).clamp(min=0))
    codes, lengths = _direction_codes(directions[..., :num_directions, :])
    codes = torch.where(gain[..., None] > 0, codes, 0)
    direction_scale = near16(torch.where(gain > 0, lengths, 0))
    rounded = codes * direction_scale.float()[..., None]

    stacked = torch.cat([centred, rounded], dim=-2).mT  # [.., D, S + k]
    if n + num_directions < head_dim:
        # E has rank S + k at most: take coordinates in an orthonormal basis of keys and directions, [.., S + k, S + k]
        stacked = torch.linalg.qr(stacked, mode="r").R
    keys, axes = stacked[..., :n], stacked[..., n:]
    unexplained = keys @ keys.mT / n - (axes * gain.float()[..., None, :]) @ axes.mT
    rho = up16(_schatten_bound(unexplained) + noise)
    mean_code, mean_scale = mean_codes(mean)
    return {
        "mean": mean_code,
        "mean_scale": mean_scale,
        "error": up16(_norm(mean - mean_code.float() * mean_scale.float()[..., None])),
        "radius": up16(_key_norm(centred)),
        "rest": near16((trace - (gain.float() + rho.float()[..., None]).sum(dim=-1)).clamp(min=0)),
        "rho": rho,
        "norm": up16(_key_norm(k)),
        "direction": codes.to(torch.int8),
        "direction_scale": direction_scale,
        "gain": gain,
    }


def score(store: Store, constants: Summary, summary: Summary, a: Tensor) -> Score:
    """Section 4: Samuelson and radius for the largest logit, Bennett for the upper mass, Jensen for the lower."""
    n, log_n = store.S, math.log(store.S)
    energy = (a * a).sum(dim=-1)[..., None]
    size = torch.sqrt(energy)
    mean = _dots(summary["mean"], a) * _per_group(summary, "mean_scale")
    gains, rho, radius = summary["gain"].float(), _per_group(summary, "rho"), _per_group(summary, "radius")
    kept = gains.shape[-1]
    explained, along = torch.zeros_like(mean), torch.zeros_like(mean)
    for j in range(kept):
        part = _dots(summary["direction"][..., j, :], a) * summary["direction_scale"].float()[..., None, :, j]
        along = along + part * part
        explained = explained + gains[..., None, :, j] * (part * part)
    spread = _per_group(summary, "rest") / max(a.shape[-1] - kept, 1) * (energy - along).clamp(min=0)
    v_estimate = explained + rho * along + spread
    v_upper = explained + rho * energy
    b = torch.minimum(size * radius, torch.sqrt((n - 1) * v_upper))
    slack = logit_slack(a, _per_group(summary, "norm") + radius)
    error = size * _per_group(summary, "error")
    return (
        log_n + mean + random_energy(v_estimate, n),
        log_n + mean - error - slack,
        log_n + mean + error + bennett(b, v_upper) + slack,
    )
