"""Tests of whether a difference between two methods on the same questions could be chance.

Methods are compared on the same documents, so every test here is paired. Plain numpy; deterministic by seed.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

RESAMPLES = 10_000
_CHUNK = 1_000  # resamples at a time: bounds the memory


def bootstrap_interval(values: Sequence[float] | np.ndarray, seed: int) -> tuple[float, float] | None:
    """Return the 95 % percentile bootstrap interval (Efron 1979) of the mean of `values` [N], in their unit.

    `values` are independent draws: one number a document, never one a token. None for fewer than 2, whose spread is
    unknown. Where all are equal the interval has no width: it says that nothing varied, not that nothing can. With
    few values (below about 20) it covers somewhat less.
    """
    values = np.asarray(values, dtype=np.float64)
    if values.ndim != 1 or len(values) == 0:
        raise ValueError(f"values of shape {values.shape}: one number a document, at least one")
    if not np.isfinite(values).all():
        raise ValueError("a value is NaN or infinite: a mean of it would say nothing")
    if len(values) < 2:
        return None
    rng = np.random.default_rng(seed)
    means = np.concatenate(
        [
            values[rng.integers(0, len(values), (min(_CHUNK, RESAMPLES - start), len(values)))].mean(axis=1)
            for start in range(0, RESAMPLES, _CHUNK)
        ]
    )
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def paired_difference(
    first: Sequence[float] | np.ndarray, second: Sequence[float] | np.ndarray, seed: int
) -> tuple[float, tuple[float, float] | None]:
    """(mean of first - second, its 95 % bootstrap interval); `first[i]` and `second[i]` [N] are of the same document.

    Pairing takes the documents' own difficulty out of the spread.
    """
    first, second = _paired(first, second)
    differences = first - second
    return float(differences.mean()), bootstrap_interval(differences, seed)


def _paired(*sides: Sequence[float] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    first, second = (np.asarray(side, dtype=np.float64) for side in sides)
    if first.shape != second.shape:
        raise ValueError(f"{len(first)} scores against {len(second)}: paired scores are of the same documents")
    return first, second


def sign_test(first: Sequence[float] | np.ndarray, second: Sequence[float] | np.ndarray) -> float:
    """Return the two-sided exact p value that the paired scores [N] differ in neither direction; ties are left out. Of
    scores that are 0 or 1 this is McNemar's test.

    Conover, Practical Nonparametric Statistics, 3.5; the p value is twice the smaller binomial tail, at most 1.
    """
    first, second = _paired(first, second)
    higher, lower = int((first > second).sum()), int((first < second).sum())
    tail = sum(math.comb(higher + lower, k) for k in range(min(higher, lower) + 1))
    return min(1.0, 2 * tail / 2 ** (higher + lower))


def wilson_interval(successes: int, total: int) -> tuple[float, float] | None:
    """Wilson's 95 % score interval (1927) of a share, 0 to 1. Unlike the bootstrap it has a width at 0 and at 1. None
    of nothing."""
    if not 0 <= successes <= total:
        raise ValueError(f"{successes} successes of {total} cannot be")
    if total == 0:
        return None
    z = NormalDist().inv_cdf(0.975)
    share = successes / total
    scale = 1 + z * z / total
    centre = (share + z * z / (2 * total)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    # exactly 0 and 1 at the ends, where rounding would leave 1e-17
    return (0.0 if successes == 0 else centre - half), (1.0 if successes == total else centre + half)
