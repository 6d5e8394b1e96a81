"""Codes of groups' means about a centroid, rotated, in 4 or 8 bits a dimension, with how far they may be off. Of groups
of a single key they bound the groups of any other method. They are not offered as an estimate."""

import numpy as np

from eps_core.summaries import base
from eps_core.summaries.base import Constants, Field, MethodSpec, Score, Settings, Summary
from eps_core.summaries.rq import pack_codes, rotate, rq_signs, unpack_codes

SPEC = MethodSpec(group_size=1, role="bounds", centroid_codes=True)

# Steps of the best uniform quantiser of a unit Gaussian with 2^b levels (Max 1960), by bits b
STEP = {4: 0.3352, 8: 0.0308}
CENTRE_TOKENS = 256  # the centroid is the mean of the first keys that a cache ever sees


def fields(settings: Settings, head_dim: int) -> dict[str, Field]:
    kept = {"codes": Field("uint8", (-(-head_dim * settings.bits // 8),)), "scale": Field("float16")}
    return kept | dict.fromkeys(("error", "radius", "norm"), Field("float16"))


def constants(settings: Settings, layer: int, num_kv_heads: int, head_dim: int) -> Constants:
    return {"signs": rq_signs(settings.seed, head_dim)}


def decode(packed: np.ndarray, scale: np.ndarray, bits: int, head_dim: int) -> np.ndarray:
    """x_hat [.., D] in rotated space, from codes [.., bytes] and scale [..]."""
    levels = unpack_codes(packed, bits, head_dim).astype(np.float64) - 2 ** (bits - 1) + 0.5
    return levels * np.asarray(scale, np.float64)[..., None]


def build(settings: Settings, constants: Constants, k: np.ndarray) -> Summary:
    """`bits` a dimension of x = H P diag(signs) (k - c) and one scale that makes <x_hat, x> = |x|^2 (RaBitQ's
    estimator): k [S, D], centroid [D] float16."""
    centroid, half = constants["centre"].astype(np.float64), 2 ** (settings.bits - 1)
    x = rotate(k.mean(axis=0) - centroid, settings.seed)
    step = STEP[settings.bits] * np.sqrt((x**2).mean())
    codes = np.clip(np.floor(x / step if step else x) + half, 0, 2 * half - 1).astype(int)
    levels = codes - half + 0.5
    product = float(x @ levels)
    scale = base.near16(float(x @ x) / product) if product > 0 else np.float16(0)
    residual = float(np.linalg.norm(x - levels * float(scale)))
    radius = base.key_norm(rotate(k - centroid, settings.seed) - levels * float(scale))
    return {
        "codes": pack_codes(codes, settings.bits), "scale": scale, "error": base.up16(residual),
        "radius": base.up16(radius), "norm": base.up16(base.key_norm(k)),
    }  # fmt: skip


def score(settings: Settings, constants: Constants, summary: Summary, a: np.ndarray) -> Score:
    """log n + c.a + x_hat.(H a), which is log n + mu_hat.a, and `ball` about mu_hat."""
    decoded, centroid = decode(summary["codes"], summary["scale"], settings.bits, len(a)), base.f64(constants, "centre")
    mean = np.log(settings.S) + (centroid @ a + decoded @ rotate(a, settings.seed))
    size, radius = np.linalg.norm(a), base.f64(summary, "radius")
    # the centroid is added and taken away again, whatever the size of the keys
    slack = base.rounding_slack(a, base.f64(summary, "norm") + radius + np.linalg.norm(centroid))
    return mean, mean - size * base.f64(summary, "error") - slack, mean + size * radius + slack
