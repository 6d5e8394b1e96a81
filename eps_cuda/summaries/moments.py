"""Mean, principal directions and a bound on what is left (ours): the tightest bounds of the coarse summaries."""

import math

import torch
from torch import Tensor

from eps_core.config.cache import CacheConfig
from eps_cuda.summaries import base
from eps_cuda.summaries.base import Score, Summary


def build(cache_config: CacheConfig, constants: Summary, k: Tensor) -> Summary:
    """Mean, `dim` centred principal directions with gains, and rho >= the norm of what they leave:
    aT C a <= sum_j gain_j (u_j.a)^2 + rho |a|^2 for every a, whatever rounding did to u_j and gain_j."""
    (n, head_dim), num_directions = k.shape[-2:], cache_config.dim or 0
    mean = k.mean(dim=-2)
    centred = k - mean[..., None, :]
    energies, directions = base.right_singular(centred, min(n, head_dim) + num_directions)
    values = energies / n
    trace = (centred * centred).sum(dim=(-1, -2)) / n
    noise = trace * 2.0**-20  # of float32 matrices as large as the covariance: no direction is worth less than it
    # Schatten bound of C - sum_j lambda_j v_j v_jT, whose eigenvalues are the other ones
    others = values[..., num_directions:]
    most = others.amax(dim=-1).clamp(min=1e-30)[..., None]
    left = most[..., 0] * ((others / most) ** 16).sum(dim=-1) ** (1 / 16) * (1 + 1e-4) + noise
    gain = base.near16((values[..., :num_directions] - left[..., None]).clamp(min=0))
    codes, lengths = base.direction_codes(directions[..., :num_directions, :])
    codes = torch.where(gain[..., None] > 0, codes, 0)
    direction_scale = base.near16(torch.where(gain > 0, lengths, 0))
    rounded = codes * direction_scale.float()[..., None]

    stacked = torch.cat([centred, rounded], dim=-2).mT  # [.., D, S + k]
    if n + num_directions < head_dim:
        # E has rank S + k at most: take coordinates in an orthonormal basis of keys and directions, [.., S + k, S + k]
        stacked = torch.linalg.qr(stacked, mode="r").R
    keys, axes = stacked[..., :n], stacked[..., n:]
    unexplained = keys @ keys.mT / n - (axes * gain.float()[..., None, :]) @ axes.mT
    rho = base.up16(base.schatten_bound(unexplained) + noise)
    mean_code, mean_scale = base.mean_codes(mean)
    return {
        "mean": mean_code,
        "mean_scale": mean_scale,
        "error": base.up16(base.norms(mean - mean_code.float() * mean_scale.float()[..., None])),
        "radius": base.up16(base.key_norm(centred)),
        "rest": base.near16((trace - (gain.float() + rho.float()[..., None]).sum(dim=-1)).clamp(min=0)),
        "rho": rho,
        "norm": base.up16(base.key_norm(k)),
        "direction": codes.to(torch.int8),
        "direction_scale": direction_scale,
        "gain": gain,
    }


def score(cache_config: CacheConfig, constants: Summary, summary: Summary, a: Tensor) -> Score:
    """Section 4: Samuelson and radius for the largest logit, Bennett for the upper mass, Jensen for the lower."""
    n, log_n = cache_config.S, math.log(cache_config.S)
    energy = (a * a).sum(dim=-1)[..., None]
    size = torch.sqrt(energy)
    mean = base.all_dots(summary["mean"], a) * base.per_group(summary, "mean_scale")
    gains, rho, radius = summary["gain"].float(), base.per_group(summary, "rho"), base.per_group(summary, "radius")
    kept = gains.shape[-1]
    explained, along = torch.zeros_like(mean), torch.zeros_like(mean)
    for j in range(kept):
        part = base.all_dots(summary["direction"][..., j, :], a) * summary["direction_scale"].float()[..., None, :, j]
        along = along + part * part
        explained = explained + gains[..., None, :, j] * (part * part)
    spread = base.per_group(summary, "rest") / max(a.shape[-1] - kept, 1) * (energy - along).clamp(min=0)
    v_estimate = explained + rho * along + spread
    v_upper = explained + rho * energy
    b = torch.minimum(size * radius, torch.sqrt((n - 1) * v_upper))
    slack = base.logit_slack(a, base.per_group(summary, "norm") + radius)
    error = size * base.per_group(summary, "error")
    return (
        log_n + mean + base.random_energy(v_estimate, n),
        log_n + mean - error - slack,
        log_n + mean + error + base.bennett(b, v_upper) + slack,
    )
