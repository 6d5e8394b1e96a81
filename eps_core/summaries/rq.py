"""Rotated quantised mean (ours): a few bits a dimension of each group's mean, about a centre of the whole cache."""

from functools import cache

import numpy as np

from eps_core.summaries.base import (
    LARGEST_ESTIMATE,
    Constants,
    Facts,
    Field,
    Score,
    Settings,
    Summary,
    _f64,
    key_norm,
    near16,
    rounding_slack,
    up16,
)

# it ranks single tokens well enough to find the recent ones that matter by itself: narrow guards, half the budget
# (eps_core/README.md, "Decisions")
FACTS = Facts(
    group_tokens=2,
    colour=0,
    coded=True,
    bounds_setting="rq_bounds",
    no_bounds="none without what they need in store: add --eps-bound-bits 8",
    budget=0.05,
    guards=(4, 32),
    tail=True,
    refine=0.125,
)

# Steps of the best uniform quantiser of a unit Gaussian with 2^b levels (Max 1960), by bits b
RQ_STEP = {2: 0.9957, 4: 0.3352, 8: 0.0308}
# Step of the second bit in mean absolute values: the 2-bit step above, and a Gaussian's mean absolute value
SECOND_STEP = 0.9957 * 1.2533141373155003
CENTRE_TOKENS = 256  # rq's centre is the mean of the first keys that a cache ever sees


def fields(settings: Settings, head_dim: int) -> dict[str, Field]:
    kept = {"codes": Field("uint8", (-(-head_dim * settings.bits // 8),)), "scale": Field("float16")}
    if settings.second_bit:
        kept["second"] = Field("uint8", (-(-head_dim // 8),), best_only=True)
        kept["second_scale"] = Field("float16", best_only=True)
    return kept | (dict.fromkeys(("error", "radius", "norm"), Field("float16")) if settings.rq_bounds else {})


def rq_signs(seed: int, head_dim: int) -> np.ndarray:
    """The random signs [D] float32 of rq's rotation x = H diag(signs) (mu - c)."""
    return (np.random.default_rng([seed, 2]).integers(0, 2, head_dim) * 2 - 1).astype(np.float32)


def constants(settings: Settings, layer: int, num_kv_heads: int, head_dim: int) -> Constants:
    return {"signs": rq_signs(settings.seed, head_dim)}


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


def build(settings: Settings, constants: Constants, k: np.ndarray) -> Summary:
    """Rotated quantised mean (ours): `bits` per dimension of H D (mu - c) and one scale that makes
    <x_hat, x> = |x|^2 (RaBitQ, arXiv 2405.12497, for one bit: |x|^2 / |x|_1). centre [D] float16. `second_bit` adds
    to 1-bit codes the bit that makes them 2-bit codes, levels sign + second / 2 of +-1, with a scale of its own."""
    centre, bits, seed = constants["centre"].astype(np.float64), settings.bits, settings.seed
    x = rotate(k.mean(axis=0) - centre, seed)
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
    if settings.second_bit:
        step = SECOND_STEP * np.abs(x).mean()
        second = ((x >= step) | ((x < 0) & (x >= -step))).astype(int)
        finer = levels + (2 * second - 1) / 2
        product = float(x @ finer)
        summary["second"] = pack_codes(second, 1)
        summary["second_scale"] = near16(float(x @ x) / product) if product > 0 else np.float16(0)
    if settings.rq_bounds:
        residual = float(np.linalg.norm(x - levels * float(scale)))
        radius = key_norm(rotate(k - centre, seed) - levels * float(scale))
        summary |= {"error": up16(residual), "radius": up16(radius), "norm": up16(key_norm(k))}
    return summary


def score(settings: Settings, constants: Constants, summary: Summary, a: np.ndarray) -> Score:
    """log n + c.a + x_hat.(H a), which is log n + mu_hat.a; with a stored radius, `ball` about mu_hat."""
    decoded, centre = decode_rq(summary["codes"], summary["scale"], settings.bits, len(a)), _f64(constants, "centre")
    mean = np.log(settings.S) + (centre @ a + decoded @ rotate(a, settings.seed))
    if not settings.rq_bounds:
        return mean, None, None
    size, radius = np.linalg.norm(a), _f64(summary, "radius")
    # the centre is added and taken away again, whatever the size of the keys
    slack = rounding_slack(a, _f64(summary, "norm") + radius + np.linalg.norm(centre))
    return mean, mean - size * _f64(summary, "error") - slack, mean + size * radius + slack


def refine(settings: Settings, constants: Constants, summary: Summary, a: np.ndarray) -> np.ndarray:
    """log n + mu_hat.a from two bits a dimension: [G]. An estimate, as of one bit."""
    head_dim = len(a)
    signs = 2.0 * unpack_codes(summary["codes"], 1, head_dim) - 1
    finer = signs + (2.0 * unpack_codes(summary["second"], 1, head_dim) - 1) / 2
    dots = _f64(summary, "second_scale") * (finer @ rotate(a, settings.seed))
    estimate = np.log(settings.S) + _f64(constants, "centre") @ a + dots
    return np.where(np.isfinite(estimate), estimate, LARGEST_ESTIMATE)
