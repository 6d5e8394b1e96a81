"""H2O: the rows that drew most attention so far, and as many of the newest (Zhang et al. 2023, arXiv 2306.14048).

Sums over all queries favour early rows, which more queries have seen: the paper's own bias, left as it is."""

import numpy as np

from eps_core.eviction.base import Head, Kept, PolicySpec, Rule, best_of_each, rounded

SPEC = PolicySpec(
    source="H2O, arXiv 2306.14048, code FMInference/H2O",
    deviations="weights are summed over a kv head's query heads; rows go at the end of prefill and then many at a time",
    num_recent_tokens=0.5,  # heavy_ratio and recent_ratio are equal
    sums=True,
)


def scores(head: Head) -> np.ndarray:
    """[T]: softmax mass received of all queries so far and all query heads; more is kept."""
    return rounded(head.sums).sum(0)


def keep(layers: list[list[Head]], budget: int, rule: Rule) -> Kept:
    return best_of_each(layers, [[scores(head) for head in heads] for heads in layers], budget, rule)
