"""Build and score the summaries of all eight methods, float32 in MLX operations.

Builders take keys `k [.., Hkv, S, D]` float32, exactly as attention will read them, and return a dict of stored arrays
`[.., Hkv, fields]`. Scorers take such a dict gathered as `[B, Hkv, G, ..]` and `a = scale * q` as `[B, Hkv, R, D]`
float32, and return `(estimate, lower, upper)`, each `[B, Hkv, R, G]` or None, of log A_p, the natural log of the
group's softmax mass (scaled logits): `estimate` ranks and is no bound, `lower <= log A_p <= upper` for every q. Stored
scalars are rounded to their safe side, and `slack` pays for float32 arithmetic.

`constants`: what a layer keeps apart from its groups: `phi [Hkv, D, m]` of jl; `signs [D]` and `centre [Hkv, D]` of rq.
Sources and formulas: see the float64 oracle of the same names; the functions stand in the same order.
"""

import math
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from eps_core.config.eps import MEAN, EpsConfig
from eps_core.gate.protocol import Scores
from eps_core.paging.where import forced_groups, missing_groups
from eps_core.summaries.base import LARGEST_ESTIMATE
from eps_core.summaries.rq import RQ_STEP, SECOND_STEP, hadamard_blocks
from eps_mlx.paths import kernels_module

if TYPE_CHECKING:
    from eps_mlx.cache import Cache

Summary = dict[str, mx.array]
Score = tuple[mx.array, mx.array | None, mx.array | None]

SCHATTEN_DOUBLINGS = 4
SECOND_LEVEL = ("second", "second_scale")  # of rq: read of the best groups only


# ------------------------------------------------------------------------------------------------------------- rounding


def up16(x: mx.array) -> mx.array:
    """A float16 that is at least x, for x >= 0. Rounding to nearest loses at most 2^-11; the rest absorbs float32."""
    return (x * (1 + 2.0**-10) + 2.0**-24).astype(mx.float16)


def near16(x: mx.array) -> mx.array:
    """The nearest finite float16: for estimates, never for bounds."""
    return mx.clip(x, -65504.0, 65504.0).astype(mx.float16)


def mean_codes(mu: mx.array) -> tuple[mx.array, mx.array]:
    """int8 codes [.., D] and a float16 scale [..] with mu ~ codes * scale, |codes| <= 127."""
    largest = mx.abs(mu).max(axis=-1)
    scale = up16(largest / 127)
    usable = (largest > 0) & mx.isfinite(scale)
    codes = _codes(mu, mx.where(usable, scale, 0), 127)
    return codes.astype(mx.int8), mx.where(usable, scale, 0).astype(mx.float16)


def _codes(x: mx.array, scale: mx.array, most: int) -> mx.array:
    """round(x / scale) within +-most, 0 where the scale [..] is 0; float32 [.., D]."""
    step = scale.astype(mx.float32)[..., None]
    codes = mx.clip(mx.round(x / mx.where(step > 0, step, 1)), -most, most)
    return mx.where(step > 0, codes, 0)


def _wide(x: mx.array) -> mx.array:
    return x.astype(mx.float32)


def _norm(x: mx.array) -> mx.array:
    return mx.sqrt((x * x).sum(axis=-1))


def _key_norm(k: mx.array) -> mx.array:
    return _norm(k).max(axis=-1)


# ------------------------------------------------------------------------------------------------------------- rotation


def rotate(x: mx.array, signs: mx.array) -> mx.array:
    """H diag(signs) x over the last axis, orthogonal. The order of the float32 additions is part of the definition:
    every library adds alike, so sign codes are equal bit for bit. (Not for mx.compile, which may fuse.)"""
    lead, head_dim = x.shape[:-1], x.shape[-1]
    x = x * signs
    pieces, start = [], 0
    for size in hadamard_blocks(head_dim):
        block, half = x[..., start : start + size], size // 2
        while half:
            pairs = block.reshape(*lead, size // (2 * half), 2, half)
            first, second = pairs[..., 0, :], pairs[..., 1, :]
            block = mx.stack([first + second, first - second], axis=-2).reshape(*lead, size)
            half //= 2
        pieces.append(block * float(np.float32(1 / math.sqrt(size))))
        start += size
    return mx.concatenate(pieces, axis=-1) if len(pieces) > 1 else pieces[0]


def pack_codes(codes: mx.array, bits: int) -> mx.array:
    """codes [.., D] in 0 .. 2^bits - 1 -> uint8 [.., ceil(D bits / 8)]: dimension i in byte i*bits // 8 at bit
    i*bits % 8."""
    per_byte = 8 // bits
    short = -codes.shape[-1] % per_byte
    if short:
        codes = mx.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, short)])
    parts = codes.astype(mx.uint32).reshape(*codes.shape[:-1], -1, per_byte)
    return (parts << mx.arange(0, 8, bits, dtype=mx.uint32)).sum(axis=-1).astype(mx.uint8)


def unpack_codes(packed: mx.array, bits: int, head_dim: int) -> mx.array:
    """The inverse of `pack_codes`: uint8 [.., D]."""
    parts = (packed[..., None] >> mx.arange(0, 8, bits, dtype=mx.uint8)) & ((1 << bits) - 1)
    return parts.reshape(*packed.shape[:-1], -1)[..., :head_dim]


def _levels(codes: mx.array, bits: int) -> mx.array:
    """Codes as the float32 numbers that the scale multiplies."""
    wide = _wide(codes)
    return 2 * wide - 1 if bits == 1 else wide - (2 ** (bits - 1) - 0.5)


# ------------------------------------------------------------------------------------------------------------- building


def gram_indices(dim: int) -> tuple[mx.array, mx.array]:
    """Rows and columns of the upper triangle, row by row: the order of jl's packed Gram matrix."""
    rows, columns = np.triu_indices(dim)
    return mx.array(rows.astype(np.int32)), mx.array(columns.astype(np.int32))


def build_jl(k: mx.array, phi: mx.array) -> Summary:
    """Packed upper triangle of sum y yT, y = PhiT k (product requirements, EPS-JL). Additive over keys; a key of zeros
    adds nothing."""
    y = k @ phi
    gram = y.swapaxes(-1, -2) @ y
    rows, columns = gram_indices(phi.shape[-1])
    return {"gram": gram[..., rows, columns]}


def _right_singular(k: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """(squared singular values [.., count], right singular vectors as rows [.., count, D]) of k [.., S, D], largest
    first, zeros where there are none; through the smaller Gram matrix. eigh exists on the CPU only."""
    n, head_dim = k.shape[-2:]
    tall = n >= head_dim
    transposed = k.swapaxes(-1, -2)
    # eigh raises on NaN and Inf, which `check_finite` must be left to report
    gram = mx.nan_to_num(transposed @ k if tall else k @ transposed, nan=0.0, posinf=0.0, neginf=0.0)
    values, vectors = mx.linalg.eigh(gram, stream=mx.cpu)
    kept = min(count, n, head_dim)
    values = mx.maximum(values[..., ::-1][..., :kept], 0)
    rows = vectors[..., ::-1][..., :kept].swapaxes(-1, -2)
    if not tall:
        rows = rows @ k
        size = _norm(rows)[..., None]
        rows = mx.where(size > 0, rows / mx.where(size > 0, size, 1), 0)
    if kept < count:
        lead = [(0, 0)] * (k.ndim - 2)
        values = mx.pad(values, [*lead, (0, count - kept)])
        rows = mx.pad(rows, [*lead, (0, count - kept), (0, 0)])
    return values, rows


def _direction_codes(direction: mx.array) -> tuple[mx.array, mx.array]:
    """int8 codes as float32 [.., D] of a direction, and 1 / |codes| [..] (0 where the direction is 0)."""
    largest = mx.abs(direction).max(axis=-1, keepdims=True)
    codes = mx.round(direction / mx.where(largest > 0, largest, 1) * 127)
    length = _norm(codes)
    return codes, mx.where(length > 0, 1 / mx.where(length > 0, length, 1), 0)


def build_pc1(k: mx.array) -> Summary:
    """Top right singular direction of K in int8; lambda = |K u|^2 and the rest, both with the *quantised* u."""
    codes, scale = _direction_codes(_right_singular(k, 1)[1][..., 0, :])
    unit = (codes * scale[..., None])[..., None, :]
    along = (k * unit).sum(axis=-1, keepdims=True)
    # |K|^2 - |K u|^2 as a sum of squares: the difference would cancel where u explains nearly everything
    across = k - along * unit
    return {
        "direction": codes.astype(mx.int8),
        "direction_scale": scale,
        "lam": up16(mx.sqrt((along * along).sum(axis=(-1, -2)))),
        "rest": up16(mx.sqrt((across * across).sum(axis=(-1, -2)) + 1e-6 * (k * k).sum(axis=(-1, -2)))),
    }


def build_fd(k: mx.array, rows: int) -> Summary:
    """Frequent Directions of the whole group at once: |F a|^2 <= |K a|^2 <= |F a|^2 + Delta |a|^2."""
    energies, directions = _right_singular(k, rows + 1)
    shrinkage = energies[..., rows]
    sketch = mx.sqrt(mx.maximum(energies[..., :rows] - shrinkage[..., None], 0))[..., None] * directions[..., :rows, :]
    codes, scales = mean_codes(sketch)
    rounding = sketch - _wide(codes) * _wide(scales)[..., None]
    return {
        "rows": codes,
        "row_scale": scales,
        "error": up16(mx.sqrt((rounding * rounding).sum(axis=(-1, -2)))),
        "delta": up16(mx.sqrt(shrinkage + 1e-5 * energies[..., 0])),
    }


def build_box(low: mx.array, high: mx.array, norm: mx.array) -> Summary:
    """Per-channel min and max [.., D] (Quest) in int8, rounded outward; norm [..] = max |k|."""
    scale = up16(mx.maximum(mx.abs(low), mx.abs(high)).max(axis=-1) / 127)
    step = _wide(scale)[..., None]
    lo, hi = mx.floor(low / step), mx.ceil(high / step)
    # IEEE division cannot round past the code; a GPU's approximate one can
    lo = mx.where(lo * step > low, lo - 1, lo)
    hi = mx.where(hi * step < high, hi + 1, hi)
    return {
        "lo": mx.clip(lo, -128, 127).astype(mx.int8),
        "hi": mx.clip(hi, -128, 127).astype(mx.int8),
        "scale": scale,
        "norm": up16(norm),
    }


def build_meanstd(mean: mx.array, std: mx.array) -> Summary:
    """Per-channel mean (int8) and population standard deviation (uint8) [.., D] (UNIQUE)."""
    mean_scale = near16(mx.abs(mean).max(axis=-1) / 127)
    std_scale = near16(std.max(axis=-1) / 255)
    return {
        "mean": _codes(mean, mean_scale, 127).astype(mx.int8),
        "mean_scale": mean_scale,
        "std": _codes(std, std_scale, 255).astype(mx.uint8),
        "std_scale": std_scale,
    }


def build_ball(k: mx.array) -> Summary:
    """Mean in int8 and the radius about the *rounded* mean (AETHER's ball bound)."""
    mean = k.mean(axis=-2)
    codes, scale = mean_codes(mean)
    rounded = _wide(codes) * _wide(scale)[..., None]
    return {
        "mean": codes,
        "mean_scale": scale,
        "error": up16(_norm(mean - rounded)),
        "radius": up16(_key_norm(k - rounded[..., None, :])),
        "norm": up16(_key_norm(k)),
    }


def _schatten_bound(matrix: mx.array) -> mx.array:
    """(tr E^16)^(1/16) >= the spectral norm of the symmetric E [.., n, n]: valid without an eigensolver. Scaled by the
    Frobenius norm so that the sixteenth power stays within float32; the 1e-4 covers rounding."""
    size = mx.sqrt((matrix * matrix).sum(axis=(-1, -2)))
    power = matrix / mx.where(size > 0, size, 1)[..., None, None]
    for _ in range(SCHATTEN_DOUBLINGS - 1):
        power = power @ power
    # tr (P P) of a symmetric P is its squared Frobenius norm: the last product is not needed
    trace = (power * power).sum(axis=(-1, -2))
    return size * trace ** (0.5**SCHATTEN_DOUBLINGS) * (1 + 1e-4)


def build_moments(k: mx.array, num_directions: int) -> Summary:
    """Mean, `num_directions` centred principal directions with gains, and rho >= the norm of what they leave:
    aT C a <= sum_j gain_j (u_j.a)^2 + rho |a|^2 for every a, whatever rounding did to u_j and gain_j."""
    n, head_dim = k.shape[-2:]
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


def _tree_sum(x: mx.array) -> mx.array:
    """The sum over the last axis but one as a tree of float32 additions, alike in every library."""
    while x.shape[-2] > 1:
        half = x.shape[-2] // 2
        paired, odd = x[..., :half, :] + x[..., half : 2 * half, :], x[..., 2 * half :, :]
        x = mx.concatenate([paired, odd], axis=-2) if odd.shape[-2] else paired
    return x[..., 0, :]


def build_rq(
    k: mx.array, centre: mx.array, signs: mx.array, bits: int, with_bounds: bool, with_second: bool = False
) -> Summary:
    """Rotated quantised mean (ours): `bits` per dimension of H D (mu - c) and one scale that makes <x_hat, x> = |x|^2
    (RaBitQ's estimator). centre [Hkv, D] float16. `with_second` adds to 1-bit codes the bit that makes them 2-bit
    codes, levels sign + second / 2 of +-1, with a scale of its own."""
    head_dim = k.shape[-1]
    x = rotate(_tree_sum(k) * (1 / k.shape[-2]) - _wide(centre), signs)
    if bits == 1:
        codes = (x >= 0).astype(mx.uint8)
    else:
        half = 2 ** (bits - 1)
        step = RQ_STEP[bits] * mx.sqrt((x * x).mean(axis=-1, keepdims=True))
        codes = mx.clip(mx.floor(x / mx.where(step > 0, step, 1)) + half, 0, 2 * half - 1).astype(mx.uint8)
    levels = _levels(codes, bits)
    product = (x * levels).sum(axis=-1)
    scale = near16(mx.where(product > 0, (x * x).sum(axis=-1) / mx.where(product > 0, product, 1), 0))
    summary = {"codes": pack_codes(codes, bits), "scale": scale}
    if with_second:
        step = _tree_sum(mx.abs(x)[..., None]) * float(np.float32(SECOND_STEP / head_dim))
        second = ((x >= step) | ((x < 0) & (x >= -step))).astype(mx.uint8)
        finer = levels + 0.5 * _levels(second, 1)
        product = (x * finer).sum(axis=-1)
        summary["second"] = pack_codes(second, 1)
        summary["second_scale"] = near16(
            mx.where(product > 0, (x * x).sum(axis=-1) / mx.where(product > 0, product, 1), 0)
        )
    if with_bounds:
        rounded = levels * _wide(scale)[..., None]
        # distances to mu_hat, measured in rotated space
        turned = rotate(k - _wide(centre)[..., None, :], signs)
        summary["error"] = up16(_norm(x - rounded))
        summary["radius"] = up16(_key_norm(turned - rounded[..., None, :]))
        summary["norm"] = up16(_key_norm(k))
    return summary


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


# -------------------------------------------------------------------------------------------------------------- scoring


def _dots(codes: mx.array, a: mx.array) -> mx.array:
    """Inner products [B, Hkv, R, G] of stored codes [B, Hkv, G, D] with a [B, Hkv, R, D]."""
    return a @ _wide(codes).swapaxes(-1, -2)


def _packed_dots(packed: mx.array, bits: int, a: mx.array) -> mx.array:
    """Inner products [B, Hkv, R, G] of packed codes [B, Hkv, G, bytes] with a [B, Hkv, R, D], scale left out."""
    head_dim, num_bytes, per_byte = a.shape[-1], packed.shape[-1], 8 // bits
    if bits > 2:
        return a @ _levels(unpack_codes(packed, bits, head_dim), bits).swapaxes(-1, -2)
    # One table look-up a byte, for all R heads at once: what each of the 256 bytes adds to each inner product. Three
    # times as fast as unpacking into a matrix on a CPU, and a 32nd of its memory.
    batch, kv_heads, repeat, _ = a.shape
    a = mx.pad(a, [(0, 0)] * 3 + [(0, num_bytes * per_byte - head_dim)])
    levels = _levels(unpack_codes(mx.arange(256, dtype=mx.uint8)[:, None], bits, per_byte), bits)
    added = levels @ a.reshape(batch, kv_heads, repeat, num_bytes, per_byte).transpose(0, 1, 3, 4, 2)
    first = mx.arange(batch * kv_heads * num_bytes, dtype=mx.int32).reshape(batch, kv_heads, 1, num_bytes) * 256
    return mx.take(added.reshape(-1, repeat), packed + first, axis=0).sum(axis=3).swapaxes(-1, -2)


def _per_group(summary: Summary, name: str) -> mx.array:
    """A stored scalar [B, Hkv, G] as float32 [B, Hkv, 1, G]."""
    return _wide(summary[name])[..., None, :]


def logit_slack(a: mx.array, norm: mx.array) -> mx.array:
    """What float32 arithmetic may add to a sum of D products of size |a| * norm (four times the worst case); the 1
    covers log n."""
    return (a.shape[-1] + 32) * 2.0**-21 * (_norm(a)[..., None] * norm + 1)


def score_jl(summary: Summary, a: mx.array, constants: Summary) -> Score:
    """sqrt(zT G z), z = PhiT a: an estimate of |K a|_2, unsigned and no bound (the null space of Phi gives 0)."""
    phi = constants["phi"]
    rows, columns = gram_indices(phi.shape[-1])
    z = a @ phi
    products = mx.where(rows == columns, 1.0, 2.0) * z[..., rows] * z[..., columns]
    return mx.sqrt(mx.maximum(products @ summary["gram"].swapaxes(-1, -2), 0)), None, None


def score_pc1(summary: Summary, a: mx.array, n: int) -> Score:
    """B = |K u||u.a| + |K - K u uT|_F sqrt(|a|^2 - (u.a)^2) >= |K a|_2 >= every |logit| (product requirements, 1PC)."""
    along = mx.abs(_dots(summary["direction"], a) * _per_group(summary, "direction_scale"))
    energy = (a * a).sum(axis=-1)[..., None]
    across = mx.maximum(energy - along * along, 0)
    lam, rest = _per_group(summary, "lam"), _per_group(summary, "rest")
    estimate = lam * along + rest * mx.sqrt(across)
    # the difference cancels in float32 where a runs along u: the bound pays for it under the root
    bound = lam * along + rest * mx.sqrt(across + (a.shape[-1] + 32) * 2.0**-22 * energy)
    slack = logit_slack(a, lam + rest)
    return estimate, math.log(n) - bound - slack, math.log(n) + bound + slack


def score_fd(summary: Summary, a: mx.array, n: int) -> Score:
    """|F a| estimates |K a|_2 from below; the bound adds the codes' rounding and the shrinkage Delta |a|^2."""
    scales = _wide(summary["row_scale"])
    batch, kv_heads, groups, rows, head_dim = summary["rows"].shape
    parts = _dots(summary["rows"].reshape(batch, kv_heads, groups * rows, head_dim), a)
    parts = parts.reshape(batch, kv_heads, -1, groups, rows) * scales[..., None, :, :]
    estimate, size = _norm(parts), _norm(a)[..., None]
    error, delta = _per_group(summary, "error"), _per_group(summary, "delta")
    inside, across = estimate + error * size, delta * size
    bound = mx.sqrt(inside * inside + across * across)
    slack = logit_slack(a, error + delta + scales.sum(axis=-1)[..., None, :] * (127 * math.sqrt(head_dim)))
    return estimate, math.log(n) - bound - slack, math.log(n) + bound + slack


def score_box(summary: Summary, a: mx.array, n: int) -> Score:
    """sum_c max(a_c lo_c, a_c hi_c): Quest's score, an upper bound of every logit of the group. As two products:
    a.mid +- |a|.half, in code units."""
    lo, hi = _wide(summary["lo"]), _wide(summary["hi"])
    scale = _per_group(summary, "scale")
    middle = _dots((lo + hi) * 0.5, a) * scale
    half = _dots((hi - lo) * 0.5, mx.abs(a)) * scale
    slack = logit_slack(a, _per_group(summary, "norm") + 2 * scale * math.sqrt(a.shape[-1]))
    return middle + half, math.log(n) + middle - half - slack, math.log(n) + middle + half + slack


def score_meanstd(summary: Summary, a: mx.array) -> Score:
    """mu.a + sum_c |a_c| sd_c (UNIQUE): at least mean + one standard deviation of the logits; no bound."""
    mean = _dots(summary["mean"], a) * _per_group(summary, "mean_scale")
    return mean + _dots(summary["std"], mx.abs(a)) * _per_group(summary, "std_scale"), None, None


def score_ball(summary: Summary, a: mx.array, n: int) -> Score:
    """mu_hat.a + |a| radius >= every logit; Jensen about the true mean gives the lower bound."""
    mean, size = _dots(summary["mean"], a) * _per_group(summary, "mean_scale"), _norm(a)[..., None]
    radius, error = _per_group(summary, "radius"), _per_group(summary, "error")
    slack = logit_slack(a, _per_group(summary, "norm") + radius)
    estimate = mean + size * radius
    return estimate, math.log(n) + mean - size * error - slack, math.log(n) + estimate + slack


def bennett(b: mx.array, v: mx.array) -> mx.array:
    """log( b^2/(b^2+v) exp(-v/b) + v/(b^2+v) exp(b) ): the largest log E exp(X) of a centred X <= b with variance <= v
    (Bennett 1962). Monotone in both, so upper bounds may be plugged in. 0 where b or v is 0."""
    spread = (b > 0) & (v > 0)
    b, v = mx.where(spread, b, 1.0), mx.where(spread, v, 1.0)
    # log(b^2/(b^2+v)) and log(v/(b^2+v)) without overflow or cancellation
    ratio = mx.log(v) - 2 * mx.log(b)
    value = mx.logaddexp(-mx.logaddexp(0.0, ratio) - v / b, -mx.logaddexp(0.0, -ratio) + b)
    return mx.where(spread, value, 0.0)


def random_energy(v: mx.array, n: int) -> mx.array:
    """v/2 while sqrt(v) <= sqrt(2 ln n), else sqrt(2 ln n) sqrt(v) - ln n (Derrida 1981)."""
    edge = math.sqrt(2 * math.log(n))
    return mx.where(mx.sqrt(v) <= edge, v / 2, edge * mx.sqrt(v) - math.log(n))


def score_moments(summary: Summary, a: mx.array, n: int) -> Score:
    """Section 4: Samuelson and radius for the largest logit, Bennett for the upper mass, Jensen for the lower."""
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
        math.log(n) + mean + random_energy(v_estimate, n),
        math.log(n) + mean - error - slack,
        math.log(n) + mean + error + bennett(b, v_upper) + slack,
    )


def score_rq(summary: Summary, a: mx.array, n: int, constants: Summary, bits: int) -> Score:
    """log n + c.a + x_hat.(H a), which is log n + mu_hat.a; with a stored radius, `ball` about mu_hat."""
    offset = (a * _wide(constants["centre"])[:, None, :]).sum(axis=-1)[..., None]
    mean = offset + _packed_dots(summary["codes"], bits, rotate(a, constants["signs"])) * _per_group(summary, "scale")
    if "radius" not in summary:
        return math.log(n) + mean, None, None
    size, radius = _norm(a)[..., None], _per_group(summary, "radius")
    # the centre is added and taken away again, whatever the size of the keys
    slack = logit_slack(a, _per_group(summary, "norm") + radius + _norm(_wide(constants["centre"]))[:, None, None])
    lower = math.log(n) + mean - size * _per_group(summary, "error") - slack
    return math.log(n) + mean, lower, math.log(n) + mean + size * radius + slack


def refine_rq(summary: Summary, a: mx.array, n: int, constants: Summary) -> mx.array:
    """log n + mu_hat.a from two bits a dimension: [B, Hkv, R, C]. An estimate, as of one bit."""
    offset = (a * _wide(constants["centre"])[:, None, :]).sum(axis=-1)[..., None]
    turned = rotate(a, constants["signs"])
    dots = _packed_dots(summary["codes"], 1, turned) + 0.5 * _packed_dots(summary["second"], 1, turned)
    estimate = math.log(n) + offset + dots * _per_group(summary, "second_scale")
    return mx.where(mx.isfinite(estimate), estimate, LARGEST_ESTIMATE)


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


def score(cache: "Cache", layer: int, q: mx.array, table: np.ndarray, lengths: np.ndarray) -> Scores:
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

    with mx.stream(cache.stream):
        a = q.astype(mx.float32).reshape(batch, kv_heads, -1, head_dim) * (1 / math.sqrt(head_dim))
        # whole units of one head are contiguous in K and in every summary
        rows = mx.array((np.maximum(table, 0)[:, None, :] * kv_heads + np.arange(kv_heads)[:, None]).astype(np.int32))
        if config.method == "oracle":
            parts: Score = _true_masses(cache, layer, a, rows, lengths), None, None
        else:
            gathered = {
                name: mx.take(pool.reshape(spec.num_units * kv_heads, -1), rows, axis=0).reshape(
                    batch, kv_heads, groups, *pool.shape[3:]
                )
                for name, pool in cache.summaries[layer].items()
                if name not in SECOND_LEVEL
            }
            parts = score_summary(config, cache.constants(layer), gathered, a)
        known, unknown = mx.array(inside & ~missing)[:, None, :], mx.array(missing)[:, None, :]
        # the groups that were not scored: without a summary, and past the end
        rest = mx.where(unknown, math.inf, -math.inf)
        estimate = mx.where(known, parts[0].max(axis=2), -math.inf)
        if config.refine:
            estimate = _refined(cache, layer, a, estimate, gathered["codes"], table, lengths)
        estimate = mx.where(known, estimate, rest)
        if parts[1] is None or parts[2] is None:
            return Scores(estimate, None, None, num_missing, kernels=cache.kernels)
        lower = mx.where(known[:, :, None], parts[1], -math.inf)
        upper = mx.where(known[:, :, None], parts[2], rest[:, :, None])
        slack = logit_slack(a, cache.largest_key[layer][:, None, None])[..., 0]
        return Scores(estimate, lower, upper, num_missing, slack, cache.kernels)


def _refined(
    cache: "Cache", layer: int, a: mx.array, estimate: mx.array, codes: mx.array, table: np.ndarray, lengths: np.ndarray
) -> mx.array:
    """`estimate` [B, Hkv, G] (-inf: unknown) with two-bit estimates of each head's best groups, the lower index first
    among equals; only their second bits are read. codes [B, Hkv, G, bytes] are the first bits of all."""
    config, kv_heads, per_unit = cache.config, cache.spec.num_kv_heads, cache.config.groups_per_unit
    counts = np.array([config.refined_groups(int(length)) for length in lengths])
    most = int(counts.max())
    best = best_first(estimate)[..., :most]
    units = mx.broadcast_to(
        mx.array(np.maximum(table, 0).astype(np.int32))[:, None], (len(table), kv_heads, table.shape[1])
    )
    heads = mx.arange(kv_heads, dtype=mx.int32)[None, :, None]
    rows = (mx.take_along_axis(units, best // per_unit, axis=-1) * kv_heads + heads) * per_unit + best % per_unit
    kept = mx.broadcast_to(best[..., None], (*best.shape, codes.shape[-1]))
    summary = {"codes": mx.take_along_axis(codes, kept, axis=2)}
    for name in SECOND_LEVEL:
        pool = cache.summaries[layer][name]
        summary[name] = mx.take(pool.reshape(-1, *pool.shape[3:]), rows, axis=0)
    finer = refine_rq(summary, a, config.S, cache.constants(layer)).max(axis=2)
    coarse = mx.take_along_axis(estimate, best, axis=-1)
    wanted = mx.array(np.arange(most) < counts[:, None])[:, None]
    finer = mx.where(wanted & (coarse > -math.inf), finer, coarse)
    return mx.put_along_axis(estimate, best, finer, axis=-1)


def best_first(keys: mx.array) -> mx.array:
    """Indices [.., G] int32 in falling order of keys [.., G], the lower first among equals. A sort need not be stable:
    the second one is of whole numbers, (place among the different keys, index)."""
    groups = keys.shape[-1]
    falling = mx.argsort(-keys, axis=-1).astype(mx.int32)
    values = mx.take_along_axis(keys, falling, axis=-1)
    differs = (values[..., 1:] != values[..., :-1]).astype(mx.int64)
    place = mx.pad(mx.cumsum(differs, axis=-1), [(0, 0)] * (keys.ndim - 1) + [(1, 0)])
    return (mx.sort(place * groups + falling, axis=-1) % groups).astype(mx.int32)


def _true_masses(cache: "Cache", layer: int, a: mx.array, rows: mx.array, lengths: np.ndarray) -> mx.array:
    """True log masses [B, Hkv, R, G], by reading all of K: what a perfect summary would say (evaluation only)."""
    batch, kv_heads, repeat, head_dim = a.shape
    flat = cache.k[layer].reshape(-1, cache.config.unit_tokens * head_dim)
    keys = mx.take(flat, rows, axis=0).reshape(batch, kv_heads, -1, head_dim)
    logits = a @ _wide(keys).swapaxes(-1, -2)
    written = mx.array(np.arange(logits.shape[-1]) < lengths[:, None])[:, None, None, :]
    return mx.logsumexp(
        mx.where(written, logits, -math.inf).reshape(batch, kv_heads, repeat, -1, cache.config.S), axis=-1
    )
