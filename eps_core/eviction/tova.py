"""TOVA: the rows that the last query attends to, the same in all heads of a layer (Oren et al. 2024, arXiv
2401.06104)."""

import numpy as np

from eps_core.eviction.base import Head, Kept, PolicySpec, Rule, best_of_each, require_same_positions, rounded

SPEC = PolicySpec(
    source="TOVA, arXiv 2401.06104, code schwartz-lab-NLP/TOVA",
    deviations="the 32 newest rows are pinned; the source pins none, kvpress one",
    window=1,
)


def scores(heads: list[Head]) -> np.ndarray:
    """[T]: the last query's softmax weight, mean over all query heads of the layer; more is kept."""
    require_same_positions(heads, "tova")
    return np.concatenate([rounded(head.window)[:, -1] for head in heads]).mean(0)


def keep(layers: list[list[Head]], budget: int, rule: Rule) -> Kept:
    return best_of_each(layers, [[scores(heads)] * len(heads) for heads in layers], budget, rule)
