"""Scissorhands: rows that stay important (Liu et al. 2023, arXiv 2305.17118).

The paper counts in how many of the last steps a row's weight is low; as cold-compress writes it, the share of the steps
in which it is not. Its batches of dropped tokens are here the tokens between two evictions."""

import numpy as np

from eps_core.eviction.base import FLAT, Head, Kept, PolicySpec, Rule, best_of_each, rounded, seen

SPEC = PolicySpec(
    source="Scissorhands, arXiv 2305.17118",
    deviations="weights at or above 1/n are counted, n the rows that a query sees, as cold-compress has it on request; "
    "a window of 64, where it has 400, for memory",
    window=64,
    num_recent_tokens=10,
)


def scores(head: Head) -> np.ndarray:
    """[T]: share in [0, 1] of (query head, window query)s that see a row in which its softmax weight is at least the
    uniform one, 1 / rows seen; more is kept. A weight that is uniform up to float32's rounding counts."""
    weights = rounded(head.window)
    sees = seen(head, weights.shape[1])
    high = sees & (weights * sees.sum(1, keepdims=True) >= 1 - FLAT)
    share: np.ndarray = high.sum((0, 1)) / np.maximum(len(weights) * sees.sum(0), 1)
    return share


def keep(layers: list[list[Head]], budget: int, rule: Rule) -> Kept:
    return best_of_each(layers, [[scores(head) for head in heads] for heads in layers], budget, rule)
