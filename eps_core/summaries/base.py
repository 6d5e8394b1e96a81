"""TODO"""

from typing import Any

import numpy as np

Summary = dict[str, Any]
Score = tuple[np.ndarray, np.ndarray | None, np.ndarray | None]
# Stands for an estimate past float32 (keys past float16's range): first in rank, yet no group without a summary (+inf)
LARGEST_ESTIMATE = 1e38


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


def _near_codes(x: np.ndarray, most: int) -> tuple[np.ndarray, np.float16]:
    scale = near16(float(np.abs(x).max()) / most)
    if float(scale) == 0:
        return np.zeros(len(x)), np.float16(0)
    return np.clip(np.round(x / float(scale)), -most, most), scale


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


# -------------------------------------------------------------------------------------------------------------- scoring


def _f64(summary: Summary, name: str) -> np.ndarray:
    return np.asarray(summary[name], np.float64)


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
