"""The worth of a ranking, given the true masses: recall, bounded skips, bytes at an error."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, log

import numpy as np

RECALL_FRACTIONS = (0.05, 0.125, 0.25)  # of the groups that are not always selected, where mass recall is measured
CERTIFIED_LEVELS = (1e-1, 1e-2, 1e-3)  # bounded shares left unread for which the skipped fraction is measured


@dataclass(frozen=True)
class Truth:
    """One step in float64: what the whole of K and V says."""

    log_masses: np.ndarray  # [Hkv, R, G] log A_p
    shares: np.ndarray  # [Hkv, R, G] A_p / sum of A
    out: np.ndarray  # [Hkv, R, D] dense attention


def truth_of(q: np.ndarray, keys: np.ndarray, values: np.ndarray, scale: float, group_size: int) -> Truth:
    """q [Hq, D], keys, values [Hkv, T, D] float64, the last group possibly open."""
    kv_heads, _, head_dim = keys.shape
    a = scale * q.astype(np.float64).reshape(kv_heads, -1, head_dim)
    logits = a @ keys.swapaxes(1, 2)
    peak = logits.max(axis=2, keepdims=True)
    weights = np.exp(logits - peak)
    total = weights.sum(axis=2, keepdims=True)
    log_masses = _log_group_sums(logits, group_size)
    return Truth(log_masses, np.exp(log_masses - peak - np.log(total)), weights @ values / total)


def _log_group_sums(logits: np.ndarray, group_size: int) -> np.ndarray:
    """log sum exp over each group of the last axis: [.., T] -> [.., G]. Group by group around its own largest logit, so
    that no small group underflows."""
    missing = -logits.shape[-1] % group_size
    padded = np.concatenate([logits, np.full((*logits.shape[:-1], missing), -np.inf)], axis=-1)
    grouped = padded.reshape(*logits.shape[:-1], -1, group_size)
    peak = grouped.max(axis=-1)
    return peak + np.log(np.exp(grouped - peak[..., None]).sum(axis=-1))


def recall_at(estimate: np.ndarray, shares: np.ndarray, fractions: Sequence[float]) -> np.ndarray:
    """[Hkv, len(fractions)]: share that the best groups by estimate [Hkv, G] hold of the mass of all that are ranked,
    mean over R; shares [Hkv, R, G]. Groups whose estimate is infinite are not: they have no summary, or none is needed.
    NaN where none is ranked. The number of groups is rounded up; ties go to the lower index."""
    inside = np.isfinite(estimate).all(axis=0)
    if not inside.any():
        return np.full((len(estimate), len(fractions)), np.nan)
    order = np.argsort(-estimate[:, inside], axis=1, kind="stable")
    best_first = np.take_along_axis(shares[:, :, inside], order[:, None], axis=2)
    held = np.cumsum(best_first, axis=2) / best_first.sum(axis=2, keepdims=True)
    counts = [ceil(fraction * inside.sum() - 1e-9) for fraction in fractions]
    return held[:, :, np.array(counts) - 1].mean(axis=1)


def bounded_skip(upper: np.ndarray, log_masses: np.ndarray, levels: Sequence[float]) -> np.ndarray:
    """[Hkv, len(levels)]: greatest fraction of the groups that may stay unread so that every query head's error bound,
    exp(lse_X W) / (exp(lse_X W) + A_V), is at most each level.

    W is upper [Hkv, R, G], +inf where nothing is known; A_V is the true mass of what was read, log_masses [Hkv, R, G].
    A kv head reads in the order of max over R of W.
    """
    order = np.argsort(-upper.max(axis=1), axis=1, kind="stable")[:, None]
    peak = log_masses.max(axis=2, keepdims=True)
    with np.errstate(over="ignore", invalid="ignore"):
        bound = np.exp(np.take_along_axis(upper, order, axis=2) - peak)
        mass = np.exp(np.take_along_axis(log_masses, order, axis=2) - peak)
        # column j: the first j groups in order are read, the others are not
        unread = np.flip(np.cumsum(np.flip(bound, axis=2), axis=2), axis=2)
        read = np.cumsum(mass, axis=2) - mass
        share = unread / (unread + read)
    share = np.where(np.isfinite(share), share, 1.0).max(axis=1)
    # with all groups read the share is 0, whatever the level
    fewest = np.stack([(share > level).sum(axis=1) for level in levels], axis=1)
    return 1 - fewest / upper.shape[2]


def false_skips(selected_mask: np.ndarray, truth: Truth, epsilon: float) -> np.ndarray:
    """[Hkv] skipped groups that should have been read (see `ReplayResult`): selected_mask [Hkv, G] bool."""
    best = truth.log_masses.max(axis=1)
    order = np.argsort(-best, axis=1, kind="stable")
    rank = np.argsort(order, axis=1, kind="stable")
    in_top = rank < selected_mask.sum(axis=1, keepdims=True)
    return (~selected_mask & (in_top | (truth.shares.max(axis=1) > epsilon))).sum(axis=1)


def bytes_at_error(points: Iterable[tuple[float, float]], error: float) -> float | None:
    """Bytes (over dense) at which a sweep of (bytes ratio, output error) points reaches `error`, between two of them by
    the logarithm of the error; None outside the sweep. Points that read more for a larger error are left out."""
    front: list[tuple[float, float]] = []
    for ratio, found in sorted(points):
        if found > 0 and (not front or found < front[-1][1]):
            front.append((ratio, found))
    for (ratio1, error1), (ratio2, error2) in pairwise(front):
        if error1 >= error >= error2:
            return ratio1 + (ratio2 - ratio1) * (log(error1) - log(error)) / (log(error1) - log(error2))
    return front[0][0] if len(front) == 1 and front[0][1] == error else None
