"""Build and score the summaries of all eight methods, float32 in Torch operations.

Builders take keys `k [.., Hkv, S, D]` float32, exactly as attention will read them, and return a dict of stored arrays
`[.., Hkv, fields]`. Scorers take such a dict gathered as `[B, Hkv, G, ..]` and `a = scale * q` as `[B, Hkv, R, D]`
float32, and return `(estimate, lower, upper)`, each `[B, Hkv, R, G]` or None, of log A_p, the natural log of the
group's softmax mass (scaled logits): `estimate` ranks and is no bound, `lower <= log A_p <= upper` for every q. Stored
scalars are rounded to their safe side, and `slack` pays for float32 arithmetic.

`constants`: what a layer keeps apart from its groups: `phi [Hkv, D, m]` of jl; `signs [D]` and `centre [Hkv, D]` of rq.
Sources and formulas: see the float64 oracle of the same names; the functions stand in the same order.
"""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from eps_core.config.eps import MEAN, EpsConfig
from eps_core.gate.protocol import Scores
from eps_core.paging.where import forced_groups, missing_groups
from eps_core.summaries.base import LARGEST_ESTIMATE
from eps_core.summaries.rq import RQ_STEP, SECOND_STEP, hadamard_blocks
from eps_cuda.paths import kernels_module

if TYPE_CHECKING:
    from eps_cuda.cache import Cache

Summary = dict[str, Tensor]
Score = tuple[Tensor, Tensor | None, Tensor | None]

SCHATTEN_DOUBLINGS = 4
SECOND_LEVEL = ("second", "second_scale")  # of rq: read of the best groups only
PIECE_GROUPS = 256  # groups that a CPU decodes at once, to stay in its cache; changes speed only


# ------------------------------------------------------------------------------------------------------------- rounding


def up16(x: Tensor) -> Tensor:
    """A float16 that is at least x, for x >= 0. Rounding to nearest loses at most 2^-11; the rest absorbs float32."""
    return (x * (1 + 2.0**-10) + 2.0**-24).to(torch.float16)


def near16(x: Tensor) -> Tensor:
    """The nearest finite float16: for estimates, never for bounds."""
    return x.clamp(-65504.0, 65504.0).to(torch.float16)


def mean_codes(mu: Tensor) -> tuple[Tensor, Tensor]:
    """int8 codes [.., D] and a float16 scale [..] with mu ~ codes * scale, |codes| <= 127."""
    largest = mu.abs().amax(dim=-1)
    scale = up16(largest / 127)
    scale = torch.where((largest > 0) & torch.isfinite(scale), scale, 0)
    return _codes(mu, scale, 127).to(torch.int8), scale


def _codes(x: Tensor, scale: Tensor, most: int) -> Tensor:
    """round(x / scale) within +-most, 0 where the scale [..] is 0; float32 [.., D]."""
    step = scale.float()[..., None]
    codes = (x / torch.where(step > 0, step, 1)).round().clamp(-most, most)
    return torch.where(step > 0, codes, 0)


def _norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1)


def _key_norm(k: Tensor) -> Tensor:
    return _norm(k).amax(dim=-1)


# ------------------------------------------------------------------------------------------------------------- rotation


def rotate(x: Tensor, signs: Tensor) -> Tensor:
    """H diag(signs) x over the last axis, orthogonal. The order of the float32 additions is part of the definition:
    every library adds alike, so sign codes are equal bit for bit. (Not for torch.compile, which may fuse.)"""
    lead, head_dim = x.shape[:-1], x.shape[-1]
    x = x * signs
    pieces, start = [], 0
    for size in hadamard_blocks(head_dim):
        block, half = x[..., start : start + size], size // 2
        while half:
            first, second = block.reshape(*lead, size // (2 * half), 2, half).unbind(dim=-2)
            block = torch.stack([first + second, first - second], dim=-2).reshape(*lead, size)
            half //= 2
        pieces.append(block * float(np.float32(1 / math.sqrt(size))))
        start += size
    return torch.cat(pieces, dim=-1) if len(pieces) > 1 else pieces[0]


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """codes [.., D] in 0 .. 2^bits - 1 -> uint8 [.., ceil(D bits / 8)]: dimension i in byte i*bits // 8 at bit
    i*bits % 8."""
    per_byte = 8 // bits
    codes = torch.nn.functional.pad(codes.int(), (0, -codes.shape[-1] % per_byte))
    shifts = torch.arange(0, 8, bits, dtype=torch.int32, device=codes.device)
    return (codes.unflatten(-1, (-1, per_byte)) << shifts).sum(dim=-1).to(torch.uint8)


def unpack_codes(packed: Tensor, bits: int, head_dim: int) -> Tensor:
    """The inverse of `pack_codes`: uint8 [.., D]."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return ((packed[..., None] >> shifts) & ((1 << bits) - 1)).flatten(-2)[..., :head_dim]


def _levels(codes: Tensor, bits: int) -> Tensor:
    """Codes as the float32 numbers that the scale multiplies."""
    return 2 * codes.float() - 1 if bits == 1 else codes.float() - (2 ** (bits - 1) - 0.5)


# ------------------------------------------------------------------------------------------------------------- building


def gram_indices(dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows and columns of the upper triangle, row by row: the order of jl's packed Gram matrix."""
    rows, columns = torch.triu_indices(dim, dim, device=device)
    return rows, columns


def build_jl(k: Tensor, phi: Tensor) -> Summary:
    """Packed upper triangle of sum y yT, y = PhiT k (product requirements, EPS-JL). Additive over keys; a key of zeros
    adds nothing."""
    y = k @ phi
    gram = y.mT @ y
    rows, columns = gram_indices(phi.shape[-1], k.device)
    return {"gram": gram[..., rows, columns]}


def _right_singular(k: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(squared singular values [.., count], right singular vectors as rows [.., count, D]) of k [.., S, D], largest
    first, zeros where there are none; through the smaller Gram matrix."""
    n, head_dim = k.shape[-2:]
    tall = n >= head_dim
    # eigh raises on NaN and Inf, which `check_finite` must be left to report
    gram = torch.nan_to_num(k.mT @ k if tall else k @ k.mT, nan=0.0, posinf=0.0, neginf=0.0)
    try:
        values, vectors = torch.linalg.eigh(gram)
    except torch.linalg.LinAlgError:  # float32 does not converge on some finite matrices
        values, vectors = (part.float() for part in torch.linalg.eigh(gram.double()))
    kept = min(count, n, head_dim)
    values = values.flip(-1)[..., :kept].clamp(min=0)
    rows = vectors.flip(-1)[..., :kept].mT
    if not tall:
        rows = rows @ k
        size = _norm(rows)[..., None]
        rows = torch.where(size > 0, rows / torch.where(size > 0, size, 1), 0)
    pad = torch.nn.functional.pad
    return pad(values, (0, count - kept)), pad(rows, (0, 0, 0, count - kept))


def _direction_codes(direction: Tensor) -> tuple[Tensor, Tensor]:
    """int8 codes as float32 [.., D] of a direction, and 1 / |codes| [..] (0 where the direction is 0)."""
    largest = direction.abs().amax(dim=-1, keepdim=True)
    codes = (direction / torch.where(largest > 0, largest, 1) * 127).round()
    length = _norm(codes)
    return codes, torch.where(length > 0, 1 / torch.where(length > 0, length, 1), 0)


def build_pc1(k: Tensor) -> Summary:
    """Top right singular direction of K in int8; lambda = |K u|^2 and the rest, both with the *quantised* u."""
    codes, scale = _direction_codes(_right_singular(k, 1)[1][..., 0, :])
    along = _norm((k @ (codes * scale[..., None])[..., None])[..., 0])
    energy = (k * k).sum(dim=(-1, -2))
    return {
        "direction": codes.to(torch.int8),
        "direction_scale": scale,
        "lam": up16(along),
        "rest": up16(torch.sqrt((energy - along * along).clamp(min=0) + 1e-6 * energy)),
    }


def build_fd(k: Tensor, rows: int) -> Summary:
    """Frequent Directions of the whole group at once: |F a|^2 <= |K a|^2 <= |F a|^2 + Delta |a|^2."""
    energies, directions = _right_singular(k, rows + 1)
    shrinkage = energies[..., rows]
    lengths = torch.sqrt((energies[..., :rows] - shrinkage[..., None]).clamp(min=0))
    sketch = lengths[..., None] * directions[..., :rows, :]
    codes, scales = mean_codes(sketch)
    rounding = sketch - codes.float() * scales.float()[..., None]
    return {
        "rows": codes,
        "row_scale": scales,
        "error": up16(torch.linalg.vector_norm(rounding, dim=(-1, -2))),
        "delta": up16(torch.sqrt(shrinkage + 1e-5 * energies[..., 0])),
    }


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


def build_meanstd(mean: Tensor, std: Tensor) -> Summary:
    """Per-channel mean (int8) and population standard deviation (uint8) [.., D] (UNIQUE)."""
    mean_scale = near16(mean.abs().amax(dim=-1) / 127)
    std_scale = near16(std.amax(dim=-1) / 255)
    return {
        "mean": _codes(mean, mean_scale, 127).to(torch.int8),
        "mean_scale": mean_scale,
        "std": _codes(std, std_scale, 255).to(torch.uint8),
        "std_scale": std_scale,
    }


def build_ball(k: Tensor) -> Summary:
    """Mean in int8 and the radius about the *rounded* mean (AETHER's ball bound)."""
    mean = k.mean(dim=-2)
    codes, scale = mean_codes(mean)
    rounded = codes.float() * scale.float()[..., None]
    return {
        "mean": codes,
        "mean_scale": scale,
        "error": up16(_norm(mean - rounded)),
        "radius": up16(_key_norm(k - rounded[..., None, :])),
        "norm": up16(_key_norm(k)),
    }


def _schatten_bound(matrix: Tensor) -> Tensor:
    """(tr E^16)^(1/16) >= the spectral norm of the symmetric E [.., n, n]: valid without an eigensolver. Scaled by the
    Frobenius norm so that the sixteenth power stays within float32; the 1e-4 covers rounding."""
    size = torch.linalg.vector_norm(matrix, dim=(-1, -2))
    power = matrix / torch.where(size > 0, size, 1)[..., None, None]
    for _ in range(SCHATTEN_DOUBLINGS - 1):
        power = power @ power
    # tr (P P) of a symmetric P is its squared Frobenius norm: the last product is not needed
    trace = (power * power).sum(dim=(-1, -2))
    return size * trace ** (0.5**SCHATTEN_DOUBLINGS) * (1 + 1e-4)


def build_moments(k: Tensor, num_directions: int) -> Summary:
    """Mean, `num_directions` centred principal directions with gains, and rho >= the norm of what they leave:
    aT C a <= sum_j gain_j (u_j.a)^2 + rho |a|^2 for every a, whatever rounding did to u_j and gain_j."""
    n, head_dim = k.shape[-2:]
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


def _tree_sum(x: Tensor) -> Tensor:
    """The sum over the last axis but one as a tree of float32 additions, alike in every library."""
    while x.shape[-2] > 1:
        half = x.shape[-2] // 2
        paired, odd = x[..., :half, :] + x[..., half : 2 * half, :], x[..., 2 * half :, :]
        x = torch.cat([paired, odd], dim=-2) if odd.shape[-2] else paired
    return x[..., 0, :]


def build_rq(
    k: Tensor, centre: Tensor, signs: Tensor, bits: int, with_bounds: bool, with_second: bool = False
) -> Summary:
    """Rotated quantised mean (ours): `bits` per dimension of H D (mu - c) and one scale that makes <x_hat, x> = |x|^2
    (RaBitQ's estimator). centre [Hkv, D] float16. `with_second` adds to 1-bit codes the bit that makes them 2-bit
    codes, levels sign + second / 2 of +-1, with a scale of its own."""
    head_dim = k.shape[-1]
    x = rotate(_tree_sum(k) * (1 / k.shape[-2]) - centre.float(), signs)
    if bits == 1:
        codes = (x >= 0).to(torch.uint8)
    else:
        half = 2 ** (bits - 1)
        step = RQ_STEP[bits] * torch.sqrt((x * x).mean(dim=-1, keepdim=True))
        codes = (torch.floor(x / torch.where(step > 0, step, 1)) + half).clamp(0, 2 * half - 1).to(torch.uint8)
    levels = _levels(codes, bits)
    product = (x * levels).sum(dim=-1)
    scale = near16(torch.where(product > 0, (x * x).sum(dim=-1) / torch.where(product > 0, product, 1), 0))
    summary = {"codes": pack_codes(codes, bits), "scale": scale}
    if with_second:
        step = _tree_sum(x.abs()[..., None]) * float(np.float32(SECOND_STEP / head_dim))
        second = ((x >= step) | ((x < 0) & (x >= -step))).to(torch.uint8)
        finer = levels + 0.5 * _levels(second, 1)
        product = (x * finer).sum(dim=-1)
        summary["second"] = pack_codes(second, 1)
        summary["second_scale"] = near16(
            torch.where(product > 0, (x * x).sum(dim=-1) / torch.where(product > 0, product, 1), 0)
        )
    if with_bounds:
        rounded = levels * scale.float()[..., None]
        # distances to mu_hat, measured in rotated space
        turned = rotate(k - centre.float()[..., None, :], signs)
        summary["error"] = up16(_norm(x - rounded))
        summary["radius"] = up16(_key_norm(turned - rounded[..., None, :]))
        summary["norm"] = up16(_key_norm(k))
    return summary


def build_summary(config: EpsConfig, constants: Summary, k: Tensor) -> Summary:
    """The summaries of full groups: k [.., Hkv, S, D] in cache dtype -> stored arrays [.., Hkv, fields]."""
    k = k.float()
    dim = config.dim or 0
    if config.method == "oracle":
        return {}
    if config.method == MEAN:
        codes, scale = mean_codes(k.mean(dim=-2))
        return {"mean": codes, "mean_scale": scale}
    if config.method == "jl":
        return build_jl(k, constants["phi"])
    if config.method == "1pc":
        return build_pc1(k)
    if config.method == "fd":
        return build_fd(k, dim)
    if config.method == "box":
        return build_box(k.amin(dim=-2), k.amax(dim=-2), _key_norm(k))
    if config.method == "meanstd":
        return build_meanstd(k.mean(dim=-2), torch.sqrt(k.var(dim=-2, correction=0)))
    if config.method == "ball":
        return build_ball(k)
    if config.method == "moments":
        return build_moments(k, dim)
    return build_rq(k, constants["centre"], constants["signs"], config.bits, config.rq_bounds, bool(config.refine))


# -------------------------------------------------------------------------------------------------------------- scoring


def _pieces(codes: Tensor) -> Iterator[Tensor]:
    """Codes [B, Hkv, G, ..] in runs of groups: on a CPU decoded codes must not leave its cache (20 times faster than
    whole at 8,192 groups); a GPU takes all at once."""
    return iter(codes.split(PIECE_GROUPS if codes.device.type == "cpu" else max(codes.shape[2], 1), dim=2))


def _dots(codes: Tensor, a: Tensor) -> Tensor:
    """Inner products [B, Hkv, R, G] of stored codes [B, Hkv, G, D] with a [B, Hkv, R, D]."""
    columns = a.mT
    return torch.cat([piece.float() @ columns for piece in _pieces(codes)], dim=2).mT


def _packed_dots(packed: Tensor, bits: int, a: Tensor) -> Tensor:
    """Inner products [B, Hkv, R, G] of packed levels [B, Hkv, G, bytes] with a [B, Hkv, R, D], by a table of what each
    of the 256 values of each byte adds: one look-up instead of 8 / bits multiplications, and nothing is unpacked."""
    batch, kv_heads, repeat, _ = a.shape
    num_bytes, per_byte = packed.shape[-1], 8 // bits
    values = torch.arange(256, dtype=torch.uint8, device=a.device)[:, None]
    levels = _levels(unpack_codes(values, bits, per_byte), bits)  # [256, 8 / bits]
    parts = torch.nn.functional.pad(a, (0, num_bytes * per_byte - a.shape[-1])).unflatten(-1, (num_bytes, per_byte))
    # [B, Hkv, bytes, 256, R], flat: row ((b * Hkv + h) * bytes + j) * 256 + value
    table = (levels @ parts.permute(0, 1, 3, 4, 2)).reshape(-1, repeat)
    starts = torch.arange(0, len(table), 256, dtype=torch.int32, device=a.device)
    starts = starts.reshape(batch, kv_heads, 1, num_bytes)
    sums = [
        torch.nn.functional.embedding_bag((piece + starts).reshape(-1, num_bytes), table, mode="sum").reshape(
            batch, kv_heads, -1, repeat
        )
        for piece in _pieces(packed)
    ]
    return torch.cat(sums, dim=2).mT


def _per_group(summary: Summary, name: str) -> Tensor:
    """A stored scalar [B, Hkv, G] as float32 [B, Hkv, 1, G]."""
    return summary[name].float()[..., None, :]


def logit_slack(a: Tensor, norm: Tensor) -> Tensor:
    """What float32 arithmetic may add to a sum of D products of size |a| * norm (four times the worst case); the 1
    covers log n."""
    return (a.shape[-1] + 32) * 2.0**-21 * (_norm(a)[..., None] * norm + 1)


def score_jl(summary: Summary, a: Tensor, constants: Summary) -> Score:
    """sqrt(zT G z), z = PhiT a: an estimate of |K a|_2, unsigned and no bound (the null space of Phi gives 0)."""
    phi = constants["phi"]
    rows, columns = gram_indices(phi.shape[-1], a.device)
    z = a @ phi
    products = torch.where(rows == columns, 1.0, 2.0) * z[..., rows] * z[..., columns]
    return torch.sqrt(_dots(summary["gram"], products).clamp(min=0)), None, None


def score_pc1(summary: Summary, a: Tensor, n: int) -> Score:
    """B = |K u||u.a| + |K - K u uT|_F sqrt(|a|^2 - (u.a)^2) >= |K a|_2 >= every |logit| (product requirements, 1PC)."""
    along = (_dots(summary["direction"], a) * _per_group(summary, "direction_scale")).abs()
    energy = (a * a).sum(dim=-1)[..., None]
    across = (energy - along * along).clamp(min=0)
    lam, rest = _per_group(summary, "lam"), _per_group(summary, "rest")
    estimate = lam * along + rest * torch.sqrt(across)
    # the difference cancels in float32 where a runs along u: the bound pays for it under the root
    bound = lam * along + rest * torch.sqrt(across + (a.shape[-1] + 32) * 2.0**-22 * energy)
    slack = logit_slack(a, lam + rest)
    return estimate, math.log(n) - bound - slack, math.log(n) + bound + slack


def score_fd(summary: Summary, a: Tensor, n: int) -> Score:
    """|F a| estimates |K a|_2 from below; the bound adds the codes' rounding and the shrinkage Delta |a|^2."""
    scales = summary["row_scale"].float()
    rows, head_dim = summary["rows"].shape[-2:]
    parts = _dots(summary["rows"].flatten(2, 3), a).unflatten(-1, (-1, rows)) * scales[..., None, :, :]
    estimate, size = _norm(parts), _norm(a)[..., None]
    error, delta = _per_group(summary, "error"), _per_group(summary, "delta")
    bound = torch.hypot(estimate + error * size, delta * size)
    slack = logit_slack(a, error + delta + scales.sum(dim=-1)[..., None, :] * (127 * math.sqrt(head_dim)))
    return estimate, math.log(n) - bound - slack, math.log(n) + bound + slack


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


def score_meanstd(summary: Summary, a: Tensor) -> Score:
    """mu.a + sum_c |a_c| sd_c (UNIQUE): at least mean + one standard deviation of the logits; no bound."""
    mean = _dots(summary["mean"], a) * _per_group(summary, "mean_scale")
    return mean + _dots(summary["std"], a.abs()) * _per_group(summary, "std_scale"), None, None


def score_ball(summary: Summary, a: Tensor, n: int) -> Score:
    """mu_hat.a + |a| radius >= every logit; Jensen about the true mean gives the lower bound."""
    mean, size = _dots(summary["mean"], a) * _per_group(summary, "mean_scale"), _norm(a)[..., None]
    radius, error = _per_group(summary, "radius"), _per_group(summary, "error")
    slack = logit_slack(a, _per_group(summary, "norm") + radius)
    estimate = mean + size * radius
    return estimate, math.log(n) + mean - size * error - slack, math.log(n) + estimate + slack


def bennett(b: Tensor, v: Tensor) -> Tensor:
    """log( b^2/(b^2+v) exp(-v/b) + v/(b^2+v) exp(b) ): the largest log E exp(X) of a centred X <= b with variance <= v
    (Bennett 1962). Monotone in both, so upper bounds may be plugged in. 0 where b or v is 0."""
    spread = (b > 0) & (v > 0)
    b, v = torch.where(spread, b, 1.0), torch.where(spread, v, 1.0)
    # log(b^2/(b^2+v)) and log(v/(b^2+v)) without overflow or cancellation
    ratio = torch.log(v) - 2 * torch.log(b)
    softplus = torch.nn.functional.softplus
    value = torch.logaddexp(-softplus(ratio) - v / b, -softplus(-ratio) + b)
    return torch.where(spread, value, 0.0)


def random_energy(v: Tensor, n: int) -> Tensor:
    """v/2 while sqrt(v) <= sqrt(2 ln n), else sqrt(2 ln n) sqrt(v) - ln n (Derrida 1981)."""
    edge = math.sqrt(2 * math.log(n))
    return torch.where(torch.sqrt(v) <= edge, v / 2, edge * torch.sqrt(v) - math.log(n))


def score_moments(summary: Summary, a: Tensor, n: int) -> Score:
    """Section 4: Samuelson and radius for the largest logit, Bennett for the upper mass, Jensen for the lower."""
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
        math.log(n) + mean + random_energy(v_estimate, n),
        math.log(n) + mean - error - slack,
        math.log(n) + mean + error + bennett(b, v_upper) + slack,
    )


def score_rq(summary: Summary, a: Tensor, n: int, constants: Summary, bits: int) -> Score:
    """log n + c.a + x_hat.(H a), which is log n + mu_hat.a; with a stored radius, `ball` about mu_hat."""
    offset = (a * constants["centre"].float()[:, None, :]).sum(dim=-1)[..., None]
    dots = _packed_dots(summary["codes"], bits, rotate(a, constants["signs"]))
    mean = offset + dots * _per_group(summary, "scale")
    if "radius" not in summary:
        return math.log(n) + mean, None, None
    size, radius = _norm(a)[..., None], _per_group(summary, "radius")
    # the centre is added and taken away again, whatever the size of the keys
    slack = logit_slack(a, _per_group(summary, "norm") + radius + _norm(constants["centre"].float())[:, None, None])
    lower = math.log(n) + mean - size * _per_group(summary, "error") - slack
    return math.log(n) + mean, lower, math.log(n) + mean + size * radius + slack


def refine_rq(summary: Summary, a: Tensor, n: int, constants: Summary) -> Tensor:
    """log n + mu_hat.a from two bits a dimension: [B, Hkv, R, C]. An estimate, as of one bit."""
    offset = (a * constants["centre"].float()[:, None, :]).sum(dim=-1)[..., None]
    turned = rotate(a, constants["signs"])
    dots = _packed_dots(summary["codes"], 1, turned) + 0.5 * _packed_dots(summary["second"], 1, turned)
    estimate = math.log(n) + offset + dots * _per_group(summary, "second_scale")
    return torch.where(torch.isfinite(estimate), estimate, LARGEST_ESTIMATE)


def score_summary(config: EpsConfig, constants: Summary, summary: Summary, a: Tensor) -> Score:
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
        torch.where(torch.isfinite(estimate), estimate, LARGEST_ESTIMATE),
        None if lower is None else torch.where(torch.isfinite(lower), lower, -math.inf),
        None if upper is None else torch.where(torch.isfinite(upper), upper, math.inf),
    )


@torch.inference_mode()
def score(cache: "Cache", layer: int, q: Tensor, table: np.ndarray, lengths: np.ndarray) -> Scores:
    """Estimates [B, Hkv, G] of every group, max over the query heads of each kv head (never a mean), and bounds
    [B, Hkv, R, G]: q [B, Hq, D] unscaled, table [B, M], lengths [B] tokens. See `Scores` for what the numbers mean."""
    config, spec = cache.config, cache.spec
    table, lengths = np.asarray(table), np.asarray(lengths, np.int64)
    module = kernels_module(cache.kernels)
    if module is not None and (scores := module.score(cache, layer, q, table, lengths)) is not None:
        return scores
    batch, _, head_dim = q.shape
    kv_heads = spec.num_kv_heads
    can_encode = config.method != "rq" or cache.centre[layer] is not None
    missing = missing_groups(config, cache.state[layer], table, lengths, can_encode)
    groups = missing.shape[1]
    inside = np.arange(groups) < -(-lengths // config.S)[:, None]
    num_missing = (missing & ~forced_groups(config, lengths, groups)).sum(axis=1)

    a = q.float().reshape(batch, kv_heads, -1, head_dim) * (1 / math.sqrt(head_dim))
    # whole units of one head are contiguous in K and in every summary
    rows = (np.maximum(table, 0)[:, None, :].astype(np.int64) * kv_heads + np.arange(kv_heads)[:, None]).reshape(-1)
    rows = torch.from_numpy(rows).to(q.device)
    if config.method == "oracle":
        parts: Score = _true_masses(cache, layer, a, rows, lengths), None, None
    else:
        gathered = {
            name: pool.reshape(spec.num_units * kv_heads, -1)
            .index_select(0, rows)
            .reshape(batch, kv_heads, groups, *pool.shape[3:])
            for name, pool in cache.summaries[layer].items()
            if name not in SECOND_LEVEL
        }
        parts = score_summary(config, cache.constants(layer), gathered, a)
    # 0: scored, 1: without a summary, 2: past the end
    state = torch.from_numpy(np.where(inside, missing.astype(np.uint8), np.uint8(2))).to(q.device)[:, None, :]
    known, past = state == 0, state == 2
    estimate = torch.where(known, parts[0].amax(dim=2), -math.inf)
    if config.refine:
        estimate = _refined(cache, layer, a, estimate, gathered["codes"], table, lengths)
    estimate = torch.where(known | past, estimate, math.inf)
    if parts[1] is None or parts[2] is None:
        return Scores(estimate, None, None, num_missing, kernels=cache.kernels)
    known, past = known[:, :, None], past[:, :, None]
    lower = torch.where(known, parts[1], -math.inf)
    upper = torch.where(known, parts[2], torch.where(past, -math.inf, math.inf))
    slack = logit_slack(a, cache.largest_key[layer][:, None, None])[..., 0]
    return Scores(estimate, lower, upper, num_missing, slack, cache.kernels)


def _refined(
    cache: "Cache", layer: int, a: Tensor, estimate: Tensor, codes: Tensor, table: np.ndarray, lengths: np.ndarray
) -> Tensor:
    """`estimate` [B, Hkv, G] (-inf: unknown) with two-bit estimates of each head's best groups, the lower index first
    among equals; only their second bits are read. codes [B, Hkv, G, bytes] are the first bits of all."""
    config, kv_heads, per_unit = cache.config, cache.spec.num_kv_heads, cache.config.groups_per_unit
    device = estimate.device
    counts = np.array([config.refined_groups(int(length)) for length in lengths])
    most = int(counts.max())
    # a stable sort: equal estimates keep their order
    best = estimate.sort(dim=-1, descending=True, stable=True).indices[..., :most]
    units = torch.from_numpy(np.maximum(table, 0).astype(np.int64)).to(device)[:, None].expand(-1, kv_heads, -1)
    heads = torch.arange(kv_heads, device=device)[None, :, None]
    rows = (units.gather(-1, best // per_unit) * kv_heads + heads) * per_unit + best % per_unit
    summary = {"codes": codes.gather(2, best[..., None].expand(-1, -1, -1, codes.shape[-1]))}
    for name in SECOND_LEVEL:
        pool = cache.summaries[layer][name]
        summary[name] = (
            pool.reshape(-1, *pool.shape[3:]).index_select(0, rows.reshape(-1)).reshape(*rows.shape, *pool.shape[3:])
        )
    finer = refine_rq(summary, a, config.S, cache.constants(layer)).amax(dim=2)
    coarse = estimate.gather(-1, best)
    wanted = torch.from_numpy(np.arange(most) < counts[:, None]).to(device)[:, None]
    finer = torch.where(wanted & (coarse > -math.inf), finer, coarse)
    return estimate.scatter(-1, best, finer)


def _true_masses(cache: "Cache", layer: int, a: Tensor, rows: Tensor, lengths: np.ndarray) -> Tensor:
    """True log masses [B, Hkv, R, G], by reading all of K: what a perfect summary would say (evaluation only)."""
    batch, kv_heads, _, head_dim = a.shape
    flat = cache.k[layer].reshape(-1, cache.config.unit_tokens * head_dim)
    keys = flat.index_select(0, rows).reshape(batch, kv_heads, -1, head_dim)
    logits = _dots(keys, a)
    written = torch.from_numpy(np.arange(logits.shape[-1]) < lengths[:, None]).to(a.device)[:, None, None, :]
    tiles = torch.where(written, logits, -math.inf).unflatten(-1, (-1, cache.config.S))
    return torch.logsumexp(tiles, dim=-1)
