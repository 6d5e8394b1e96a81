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

from functools import cache
from typing import Any

import numpy as np

from eps_core.config.eps import MEAN, EpsConfig

Summary = dict[str, Any]
Score = tuple[np.ndarray, np.ndarray | None, np.ndarray | None]

# Steps of the best uniform quantiser of a unit Gaussian with 2^b levels (Max 1960), by bits b
RQ_STEP = {2: 0.9957, 4: 0.3352, 8: 0.0308}
# Step of the second bit in mean absolute values: the 2-bit step above, and a Gaussian's mean absolute value
SECOND_STEP = 0.9957 * 1.2533141373155003
# Stands for an estimate past float32 (keys past float16's range): first in rank, yet no group without a summary (+inf)
LARGEST_ESTIMATE = 1e38
CENTRE_TOKENS = 256  # rq's centre is the mean of the first keys that a cache ever sees


# ---------------------------------------------------------------- constants shared with the backends (values, not code)


def jl_projection(seed: int, layer: int, num_kv_heads: int, head_dim: int, dim: int) -> np.ndarray:
    """Phi [Hkv, D, m] float32 of +-1/sqrt(m), seeded per layer (Achlioptas 2003). The 1/sqrt(m) makes
    E[(PhiT k).(PhiT a)] = k.a; without it every comparison is off by m."""
    signs = np.random.default_rng([seed, 1, layer]).integers(0, 2, (num_kv_heads, head_dim, dim)) * 2 - 1
    return (signs / np.sqrt(dim)).astype(np.float32)


def rq_signs(seed: int, head_dim: int) -> np.ndarray:
    """The random signs [D] float32 of rq's rotation x = H diag(signs) (mu - c)."""
    return (np.random.default_rng([seed, 2]).integers(0, 2, head_dim) * 2 - 1).astype(np.float32)


def hadamard_blocks(head_dim: int) -> list[int]:
    """D as its powers of two, largest first: 96 -> [64, 32]. Each block gets its own Hadamard matrix."""
    return [1 << bit for bit in reversed(range(head_dim.bit_length())) if head_dim >> bit & 1]


# ------------------------------------------------------------------------------------------------------------- rounding


def up16(x: float) -> np.float16:
    """A float16 that is at least x, for x >= 0. Rounding to nearest loses at most 2^-11; the rest absorbs float32."""
    with np.errstate(over="ignore"):
        return np.float16(x * (1 + 2.0**-10) + 2.0**-24)


def near16(x: float) -> np.float16:
    """The nearest finite float16: for estimates, never for bounds."""
    return np.float16(np.clip(x, -65504, 65504))


def mean_codes(mu: np.ndarray) -> tuple[np.ndarray, np.float16]:
    """int8 codes [D] and a float16 scale with mu ~ codes * scale, |codes| <= 127."""
    scale = up16(float(np.abs(mu).max()) / 127)
    if not np.abs(mu).any() or not np.isfinite(scale):
        return np.zeros(len(mu), np.int8), np.float16(0)
    return np.clip(np.round(mu / float(scale)), -127, 127).astype(np.int8), scale


def rounding_slack(a: np.ndarray, norm: np.ndarray) -> np.ndarray:
    """What float32 arithmetic may add to log n plus a sum of D products of size |a| * norm (four times the worst
    case)."""
    return (len(a) + 32) * 2.0**-21 * (np.linalg.norm(a) * norm + 1)


def key_norm(k: np.ndarray) -> float:
    return float(np.linalg.norm(k, axis=1).max())


# ------------------------------------------------------------------------------------------------------------- rotation


@cache
def _hadamard(size: int) -> np.ndarray:
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def rotate(x: np.ndarray, seed: int) -> np.ndarray:
    """x [.., D] -> H diag(signs) x, orthogonal: Sylvester-Hadamard blocks scaled by 1/sqrt(block)."""
    signed, pieces, start = x * rq_signs(seed, x.shape[-1]), [], 0
    for size in hadamard_blocks(x.shape[-1]):
        pieces.append(signed[..., start : start + size] @ _hadamard(size) / np.sqrt(size))
        start += size
    return np.concatenate(pieces, axis=-1)


def pack_codes(codes: np.ndarray, bits: int) -> np.ndarray:
    """codes [D] in 0 .. 2^bits - 1 -> uint8 [ceil(D bits / 8)]: dimension i in byte i*bits // 8 at bit i*bits % 8."""
    packed = np.zeros(-(-len(codes) * bits // 8), np.uint8)
    for i, code in enumerate(codes):
        packed[i * bits // 8] |= int(code) << (i * bits % 8)
    return packed


def unpack_codes(packed: np.ndarray, bits: int, head_dim: int) -> np.ndarray:
    """The inverse of `pack_codes`: integers [.., D]."""
    position = np.arange(head_dim) * bits
    return (packed[..., position // 8] >> (position % 8)) & ((1 << bits) - 1)


def decode_rq(packed: np.ndarray, scale: np.ndarray, bits: int, head_dim: int) -> np.ndarray:
    """x_hat [.., D] in rotated space, from codes [.., bytes] and scale [..]."""
    codes = unpack_codes(packed, bits, head_dim).astype(np.float64)
    levels = 2 * codes - 1 if bits == 1 else codes - 2 ** (bits - 1) + 0.5
    return levels * np.asarray(scale, np.float64)[..., None]


# ------------------------------------------------------------------------------------------------------------- building


def build_jl(k: np.ndarray, phi: np.ndarray) -> Summary:
    """Upper triangle, row by row, of sum y yT with y = PhiT k (product requirements, EPS-JL). phi [D, m]."""
    y = k @ phi.astype(np.float64)
    gram = y.T @ y
    return {"gram": gram[np.triu_indices(len(gram))].astype(np.float32)}


def build_pc1(k: np.ndarray) -> Summary:
    """Top right singular direction of K in int8; lambda = |K u|^2 and the rest, both with the *quantised* u."""
    direction = np.linalg.svd(k, full_matrices=False)[2][0]
    codes = (
        np.round(direction / np.abs(direction).max() * 127).astype(np.int8)
        if k.any()
        else np.zeros(k.shape[1], np.int8)
    )
    length = float(np.linalg.norm(codes.astype(np.float64)))
    scale = np.float32(1 / length) if length else np.float32(0)
    along = float(np.linalg.norm(k @ (codes * np.float64(scale))))
    energy = float((k**2).sum())
    return {
        "direction": codes,
        "direction_scale": scale,
        "lam": up16(along),
        "rest": up16(np.sqrt(max(energy - along**2, 0) + 1e-6 * energy)),
    }


def build_fd(k: np.ndarray, rows: int) -> Summary:
    """Frequent Directions (Liberty 2013; Ghashami et al. 2016) of the whole group at once: F = `rows` shrunken
    singular rows and Delta = the square of the next singular value, so |F a|^2 <= |K a|^2 <= |F a|^2 + Delta |a|^2."""
    _, s, vt = np.linalg.svd(k, full_matrices=False)
    s, vt = np.pad(s, (0, rows + 1)), np.pad(vt, ((0, rows + 1), (0, 0)))
    delta = s[rows] ** 2
    sketch = np.sqrt(np.maximum(s[:rows, None] ** 2 - delta, 0)) * vt[:rows]
    quantised = [mean_codes(row) for row in sketch]
    codes, scales = np.stack([c for c, _ in quantised]), np.array([x for _, x in quantised], np.float16)
    return {
        "rows": codes,
        "row_scale": scales,
        "error": up16(float(np.linalg.norm(sketch - codes * scales.astype(np.float64)[:, None]))),
        "delta": up16(float(np.sqrt(delta + 1e-5 * s[0] ** 2))),
    }


def build_box(low: np.ndarray, high: np.ndarray, norm: float) -> Summary:
    """Per-channel min and max [D] (Quest, arXiv 2406.10774) in int8, rounded outward; norm = max |k|."""
    scale = up16(float(np.maximum(np.abs(low), np.abs(high)).max()) / 127)
    step = float(scale)
    return {
        "lo": np.clip(np.floor(low / step), -128, 127).astype(np.int8),
        "hi": np.clip(np.ceil(high / step), -128, 127).astype(np.int8),
        "scale": scale,
        "norm": up16(norm),
    }


def build_meanstd(mean: np.ndarray, std: np.ndarray) -> Summary:
    """Per-channel mean (int8) and population standard deviation (uint8) [D] (UNIQUE, arXiv 2605.27740)."""
    codes, scale = _near_codes(mean, 127)
    std_codes, std_scale = _near_codes(std, 255)
    return {
        "mean": codes.astype(np.int8),
        "mean_scale": scale,
        "std": std_codes.astype(np.uint8),
        "std_scale": std_scale,
    }


def _near_codes(x: np.ndarray, most: int) -> tuple[np.ndarray, np.float16]:
    scale = near16(float(np.abs(x).max()) / most)
    if float(scale) == 0:
        return np.zeros(len(x)), np.float16(0)
    return np.clip(np.round(x / float(scale)), -most, most), scale


def build_ball(k: np.ndarray) -> Summary:
    """Mean in int8 and the radius about the *rounded* mean (AETHER's ball bound)."""
    mean = k.mean(axis=0)
    codes, scale = mean_codes(mean)
    rounded = codes * np.float64(scale)
    return {
        "mean": codes,
        "mean_scale": scale,
        "error": up16(float(np.linalg.norm(mean - rounded))),
        "radius": up16(key_norm(k - rounded)),
        "norm": up16(key_norm(k)),
    }


def schatten_bound(matrix: np.ndarray, doublings: int = 4) -> float:
    """(tr E^(2^j))^(1/2^j) >= the spectral norm of the symmetric E: valid without an eigensolver, where a power
    iteration would only estimate it from below. The 1e-4 covers rounding."""
    size = float(np.abs(matrix).max()) * len(matrix)
    if size == 0:
        return 0.0
    power = matrix / size
    for _ in range(doublings):
        power = power @ power
    return size * max(float(np.trace(power)), 0.0) ** (0.5**doublings) * (1 + 1e-4)


def build_moments(k: np.ndarray, num_directions: int) -> Summary:
    """Mean, `num_directions` centred principal directions with gains, and rho >= the norm of what they leave:
    aT C a <= sum_j gain_j (u_j.a)^2 + rho |a|^2 for every a, whatever rounding did to u_j and gain_j."""
    n, head_dim = k.shape
    mean = k.mean(axis=0)
    centred = k - mean
    covariance = centred.T @ centred / n
    values, vectors = np.linalg.eigh(covariance)
    values, vectors = values[::-1], vectors[:, ::-1]
    values = np.pad(values, (0, num_directions))[:num_directions]
    vectors = np.pad(vectors, ((0, 0), (0, num_directions)))[:, :num_directions]
    left = schatten_bound(covariance - (vectors * values) @ vectors.T)
    codes = np.zeros((num_directions, head_dim), np.int8)
    scales, gains = np.zeros(num_directions, np.float16), np.zeros(num_directions, np.float16)
    explained = np.zeros_like(covariance)
    for j in range(num_directions):
        gains[j] = near16(max(float(values[j]) - left, 0))
        if gains[j] > 0:
            codes[j] = np.round(vectors[:, j] / np.abs(vectors[:, j]).max() * 127)
            scales[j] = near16(1 / float(np.linalg.norm(codes[j].astype(np.float64))))
        rounded = codes[j] * np.float64(scales[j])
        explained += float(gains[j]) * np.outer(rounded, rounded)
    rho = up16(schatten_bound(covariance - explained))
    mean_code, mean_scale = mean_codes(mean)
    return {
        "mean": mean_code,
        "mean_scale": mean_scale,
        "error": up16(float(np.linalg.norm(mean - mean_code * np.float64(mean_scale)))),
        "radius": up16(key_norm(centred)),
        "rest": near16(max(float(np.trace(covariance)) - float((gains.astype(float) + float(rho)).sum()), 0)),
        "rho": rho,
        "norm": up16(key_norm(k)),
        "direction": codes,
        "direction_scale": scales,
        "gain": gains,
    }


def build_rq(
    k: np.ndarray, centre: np.ndarray, bits: int, seed: int, with_bounds: bool, with_second: bool = False
) -> Summary:
    """Rotated quantised mean (ours): `bits` per dimension of H D (mu - c) and one scale that makes
    <x_hat, x> = |x|^2 (RaBitQ, arXiv 2405.12497, for one bit: |x|^2 / |x|_1). centre [D] float16. `with_second` adds
    to 1-bit codes the bit that makes them 2-bit codes, levels sign + second / 2 of +-1, with a scale of its own."""
    mean = k.mean(axis=0)
    x = rotate(mean - centre.astype(np.float64), seed)
    if bits == 1:
        codes = (x >= 0).astype(int)
        levels = 2.0 * codes - 1
    else:
        step = RQ_STEP[bits] * np.sqrt((x**2).mean())
        half = 2 ** (bits - 1)
        codes = np.clip(np.floor(x / step if step else x) + half, 0, 2 * half - 1).astype(int)
        levels = codes - half + 0.5
    product = float(x @ levels)
    scale = near16(float(x @ x) / product) if product > 0 else np.float16(0)
    summary = {"codes": pack_codes(codes, bits), "scale": scale}
    if with_second:
        step = SECOND_STEP * np.abs(x).mean()
        second = ((x >= step) | ((x < 0) & (x >= -step))).astype(int)
        finer = levels + (2 * second - 1) / 2
        product = float(x @ finer)
        summary["second"] = pack_codes(second, 1)
        summary["second_scale"] = near16(float(x @ x) / product) if product > 0 else np.float16(0)
    if with_bounds:
        residual = float(np.linalg.norm(x - levels * float(scale)))
        radius = float(
            np.linalg.norm(rotate(k - centre.astype(np.float64), seed) - levels * float(scale), axis=1).max()
        )
        summary |= {"error": up16(residual), "radius": up16(radius), "norm": up16(key_norm(k))}
    return summary


def build_summary(config: EpsConfig, k: np.ndarray, phi: np.ndarray | None, centre: np.ndarray | None) -> Summary:
    """The summary of one full group of one kv head: k [S, D] exactly as attention reads it. phi [D, m] for jl,
    centre [D] for rq."""
    k = k.astype(np.float64)
    dim = config.dim or 0
    if config.method == MEAN:
        codes, scale = mean_codes(k.mean(axis=0))
        return {"mean": codes, "mean_scale": scale}
    if config.method == "jl":
        assert phi is not None
        return build_jl(k, phi)
    if config.method == "1pc":
        return build_pc1(k)
    if config.method == "fd":
        return build_fd(k, dim)
    if config.method == "box":
        return build_box(k.min(axis=0), k.max(axis=0), key_norm(k))
    if config.method == "meanstd":
        return build_meanstd(k.mean(axis=0), k.std(axis=0))
    if config.method == "ball":
        return build_ball(k)
    if config.method == "moments":
        return build_moments(k, dim)
    assert config.method == "rq" and centre is not None
    return build_rq(k, centre, config.bits, config.seed, config.rq_bounds, bool(config.refine))


# -------------------------------------------------------------------------------------------------------------- scoring


def _f64(summary: Summary, name: str) -> np.ndarray:
    return np.asarray(summary[name], np.float64)


def score_jl(summary: Summary, a: np.ndarray, phi: np.ndarray) -> Score:
    """sqrt(zT G z), z = PhiT a: an estimate of |K a|_2, unsigned and no bound (the null space of Phi gives 0)."""
    m = phi.shape[1]
    rows, columns = np.triu_indices(m)
    z = phi.T.astype(np.float64) @ a
    weights = np.where(rows == columns, 1.0, 2.0) * z[rows] * z[columns]
    return np.sqrt(np.maximum(_f64(summary, "gram") @ weights, 0)), None, None


def score_pc1(summary: Summary, a: np.ndarray, n: int) -> Score:
    """B = |K u||u.a| + |K - K u uT|_F sqrt(|a|^2 - (u.a)^2) >= |K a|_2 >= every |logit| (product requirements, 1PC)."""
    along = np.abs(_f64(summary, "direction") @ a * _f64(summary, "direction_scale"))
    across = np.maximum(a @ a - along**2, 0)
    lam, rest = _f64(summary, "lam"), _f64(summary, "rest")
    estimate = lam * along + rest * np.sqrt(across)
    # the difference cancels in float32 where a runs along u: the bound pays for it under the root
    bound = lam * along + rest * np.sqrt(across + (len(a) + 32) * 2.0**-22 * (a @ a))
    slack = rounding_slack(a, lam + rest)
    return estimate, np.log(n) - bound - slack, np.log(n) + bound + slack


def score_fd(summary: Summary, a: np.ndarray, n: int) -> Score:
    """|F a| estimates |K a|_2 from below; the bound adds the codes' rounding and the shrinkage Delta |a|^2."""
    scales = _f64(summary, "row_scale")
    estimate = np.linalg.norm(_f64(summary, "rows") @ a * scales, axis=-1)
    size = np.linalg.norm(a)
    error, delta = _f64(summary, "error"), _f64(summary, "delta")
    bound = np.hypot(estimate + error * size, delta * size)
    slack = rounding_slack(a, error + delta + scales.sum(axis=-1) * 127 * np.sqrt(len(a)))
    return estimate, np.log(n) - bound - slack, np.log(n) + bound + slack


def score_box(summary: Summary, a: np.ndarray, n: int) -> Score:
    """sum_c max(a_c lo_c, a_c hi_c): Quest's score, an upper bound of every logit of the group."""
    scale = _f64(summary, "scale")
    low, high = (_f64(summary, name) * scale[..., None] for name in ("lo", "hi"))
    most, least = np.maximum(a * low, a * high).sum(axis=-1), np.minimum(a * low, a * high).sum(axis=-1)
    slack = rounding_slack(a, _f64(summary, "norm") + 2 * scale * np.sqrt(len(a)))
    return most, np.log(n) + least - slack, np.log(n) + most + slack


def score_meanstd(summary: Summary, a: np.ndarray) -> Score:
    """mu.a + sum_c |a_c| sd_c (UNIQUE): at least mean + one standard deviation of the logits; no bound."""
    mean = _f64(summary, "mean") @ a * _f64(summary, "mean_scale")
    return mean + _f64(summary, "std") @ np.abs(a) * _f64(summary, "std_scale"), None, None


def score_ball(summary: Summary, a: np.ndarray, n: int) -> Score:
    """mu_hat.a + |a| radius >= every logit; Jensen about the true mean gives the lower bound."""
    mean, size = _f64(summary, "mean") @ a * _f64(summary, "mean_scale"), np.linalg.norm(a)
    radius, error = _f64(summary, "radius"), _f64(summary, "error")
    slack = rounding_slack(a, _f64(summary, "norm") + radius)
    return mean + size * radius, np.log(n) + mean - size * error - slack, np.log(n) + mean + size * radius + slack


def bennett(b: np.ndarray, v: np.ndarray) -> np.ndarray:
    """log( b^2/(b^2+v) exp(-v/b) + v/(b^2+v) exp(b) ): the largest log E exp(X) of a centred X <= b with variance <= v
    (Bennett 1962). Monotone in both, so upper bounds may be plugged in. 0 where b or v is 0."""
    b, v = np.broadcast_arrays(np.asarray(b, np.float64), np.asarray(v, np.float64))
    spread = (b > 0) & (v > 0)
    b, v = np.where(spread, b, 1.0), np.where(spread, v, 1.0)
    # log(b^2/(b^2+v)) and log(v/(b^2+v)) without overflow or cancellation
    ratio = np.log(v) - 2 * np.log(b)
    value = np.logaddexp(-np.logaddexp(0, ratio) - v / b, -np.logaddexp(0, -ratio) + b)
    return np.where(spread, value, 0.0)


def random_energy(v: np.ndarray, n: int) -> np.ndarray:
    """v/2 while sqrt(v) <= sqrt(2 ln n), else sqrt(2 ln n) sqrt(v) - ln n: log of the mean of n exponentials of
    Gaussians with variance v, which cannot grow as fast as their expectation (Derrida 1981)."""
    edge = np.sqrt(2 * np.log(n))
    return np.where(np.sqrt(v) <= edge, v / 2, edge * np.sqrt(v) - np.log(n))


def score_moments(summary: Summary, a: np.ndarray, n: int) -> Score:
    """Section 4: Samuelson and radius for the largest logit, Bennett for the upper mass, Jensen for the lower."""
    energy, size = a @ a, np.linalg.norm(a)
    mean = _f64(summary, "mean") @ a * _f64(summary, "mean_scale")
    gains, rho, radius = _f64(summary, "gain"), _f64(summary, "rho"), _f64(summary, "radius")
    parts = (_f64(summary, "direction") @ a * _f64(summary, "direction_scale")) ** 2
    left = np.maximum(energy - parts.sum(axis=-1), 0)
    spread = _f64(summary, "rest") / max(len(a) - parts.shape[-1], 1) * left
    v_estimate = ((gains + rho[..., None]) * parts).sum(axis=-1) + spread
    v_upper = (gains * parts).sum(axis=-1) + rho * energy
    b = np.minimum(size * radius, np.sqrt((n - 1) * v_upper))
    slack = rounding_slack(a, _f64(summary, "norm") + radius)
    error = size * _f64(summary, "error")
    return (
        np.log(n) + mean + random_energy(v_estimate, n),
        np.log(n) + mean - error - slack,
        np.log(n) + mean + error + bennett(b, v_upper) + slack,
    )


def score_rq(summary: Summary, a: np.ndarray, n: int, centre: np.ndarray, bits: int, seed: int) -> Score:
    """log n + c.a + x_hat.(H a), which is log n + mu_hat.a; with a stored radius, `ball` about mu_hat."""
    decoded = decode_rq(summary["codes"], summary["scale"], bits, len(a))
    mean = centre.astype(np.float64) @ a + decoded @ rotate(a, seed)
    if "radius" not in summary:
        return np.log(n) + mean, None, None
    size, radius = np.linalg.norm(a), _f64(summary, "radius")
    # the centre is added and taken away again, whatever the size of the keys
    slack = rounding_slack(a, _f64(summary, "norm") + radius + np.linalg.norm(centre.astype(np.float64)))
    lower = np.log(n) + mean - size * _f64(summary, "error") - slack
    return np.log(n) + mean, lower, np.log(n) + mean + size * radius + slack


def refine_rq(summary: Summary, a: np.ndarray, n: int, centre: np.ndarray, seed: int) -> np.ndarray:
    """log n + mu_hat.a from two bits a dimension: [G]. An estimate, as of one bit."""
    head_dim = len(a)
    signs = 2.0 * unpack_codes(summary["codes"], 1, head_dim) - 1
    finer = signs + (2.0 * unpack_codes(summary["second"], 1, head_dim) - 1) / 2
    estimate = np.log(n) + centre.astype(np.float64) @ a + _f64(summary, "second_scale") * (finer @ rotate(a, seed))
    return np.where(np.isfinite(estimate), estimate, LARGEST_ESTIMATE)


def score_summary(
    config: EpsConfig, summary: Summary, a: np.ndarray, n: int, phi: np.ndarray | None, centre: np.ndarray | None
) -> Score:
    """Estimate and bounds [G] of full groups of n keys for one query head: summary [G, ...], a = scale * q [D]."""
    a = a.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        if config.method == "jl":
            assert phi is not None
            estimate, lower, upper = score_jl(summary, a, phi)
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
            assert config.method == "rq" and centre is not None
            estimate, lower, upper = score_rq(summary, a, n, centre, config.bits, config.seed)
    # an infinite stored scalar (key norms past float16) must loosen a bound, never turn it into NaN
    return (
        np.where(np.isfinite(estimate), estimate, LARGEST_ESTIMATE),
        None if lower is None else np.where(np.isfinite(lower), lower, -np.inf),
        None if upper is None else np.where(np.isfinite(upper), upper, np.inf),
    )
