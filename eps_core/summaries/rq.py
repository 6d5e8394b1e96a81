"""TODO"""

from functools import cache

import numpy as np

from eps_core.summaries.base import LARGEST_ESTIMATE, Score, Summary, _f64, key_norm, near16, rounding_slack, up16

# Steps of the best uniform quantiser of a unit Gaussian with 2^b levels (Max 1960), by bits b
RQ_STEP = {2: 0.9957, 4: 0.3352, 8: 0.0308}
# Step of the second bit in mean absolute values: the 2-bit step above, and a Gaussian's mean absolute value
SECOND_STEP = 0.9957 * 1.2533141373155003
CENTRE_TOKENS = 256  # rq's centre is the mean of the first keys that a cache ever sees


def rq_signs(seed: int, head_dim: int) -> np.ndarray:
    """The random signs [D] float32 of rq's rotation x = H diag(signs) (mu - c)."""
    return (np.random.default_rng([seed, 2]).integers(0, 2, head_dim) * 2 - 1).astype(np.float32)


def hadamard_blocks(head_dim: int) -> list[int]:
    """D as its powers of two, largest first: 96 -> [64, 32]. Each block gets its own Hadamard matrix."""
    return [1 << bit for bit in reversed(range(head_dim.bit_length())) if head_dim >> bit & 1]


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
