"""SnapKV: what the last queries of the prompt attend to, smoothed over neighbours (Li et al. 2024, arXiv 2404.14469,
and its code's defaults)."""

import numpy as np

from eps_core.eviction.base import Head, Kept, PolicySpec, Rule, best_of_each, neighbours, older, rounded

KERNEL = 5  # tokens over which weights are averaged, so that a fact is kept with what stands around it
SPEC = PolicySpec(
    source="SnapKV, arXiv 2404.14469, code FasterDecoding/SnapKV",
    deviations="mean over a kv head's query heads, as in kvpress; kvpress's default window is 64",
    window=32,
    while_decoding=False,
)


def judged(head: Head, rule: Rule) -> tuple[np.ndarray, np.ndarray]:
    """Return (row indices in the order of the text, without the newest, which are pinned; of each of these the softmax
    weight that the window queries give it, their sum and the mean over query heads)."""
    rows = older(head, rule)
    return rows, rounded(head.window).sum(1).mean(0)[rows]


def scores(head: Head, rule: Rule) -> np.ndarray:
    """[T]: the window queries' softmax weight of a row and its neighbours, mean over query heads and kernel; more is
    kept. 0 for the newest rows, which are pinned; beyond the first and the last row judged, weights count as 0."""
    found = np.zeros(head.rows)
    rows, weights = judged(head, rule)
    found[rows] = neighbours(weights, KERNEL).sum(0) / KERNEL
    return found


def keep(layers: list[list[Head]], budget: int, rule: Rule) -> Kept:
    return best_of_each(layers, [[scores(head, rule) for head in heads] for heads in layers], budget, rule)
