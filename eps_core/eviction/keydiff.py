"""KeyDiff: the keys that differ most from the others (Park et al. 2025, arXiv 2504.15364)."""

import numpy as np

from eps_core.eviction.base import FLAT, Head, Kept, PolicySpec, Rule, best_of_each, rounded

SPEC = PolicySpec(
    source="KeyDiff, arXiv 2504.15364, as kvpress has it, over keys as cached, after RoPE",
    deviations="the 32 newest rows are pinned; kvpress pins none",
    keys=True,
)


def unit_keys(head: Head) -> np.ndarray:
    """Keys [T, D] float64 over their norms; keys of 0 stay 0."""
    keys = rounded(head.keys)
    norms = np.linalg.norm(keys, axis=1, keepdims=True)
    unit: np.ndarray = keys / np.where(norms > 0, norms, 1.0)
    return unit


def scores(head: Head) -> np.ndarray:
    """[T], in [-1, 1]: minus the cosine between a key and the mean of all unit keys; more is kept."""
    unit = unit_keys(head)
    anchor = unit.mean(0)
    size = float(np.linalg.norm(anchor))
    # keys that cancel out have no mean direction to differ from
    return -(unit @ anchor) / size if size > FLAT else np.zeros(head.rows)


def keep(layers: list[list[Head]], budget: int, rule: Rule) -> Kept:
    return best_of_each(layers, [[scores(head) for head in heads] for heads in layers], budget, rule)
