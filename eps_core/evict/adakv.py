"""Ada-KV: a layer's budget goes to the heads whose rows score most (Feng et al. 2024, arXiv 2407.11550),
here by SnapKV's scores."""

import numpy as np

from eps_core.evict.base import Facts, Head, Kept, Rule, descending, pinned, ranked, rows_in_all
from eps_core.evict.snapkv import scores

SAFE_SHARE = 0.2  # alpha: of its even budget, what every head keeps of its own best
FACTS = Facts(
    source="Ada-KV, arXiv 2407.11550, as kvpress has it, over SnapKV's scores; pinned rows count among the safe ones",
    window=32,
    while_decoding=False,
    uneven=True,
)


def spread(heads: list[Head], of_heads: list[np.ndarray], budget: int, rule: Rule, share: float) -> list[np.ndarray]:
    """Rows kept of each head of a layer by its scores [T]: its pinned ones, or its best floor(share * budget) if these
    are more, then the layer's best wherever they are, ties to the lower head."""
    even = [min(budget, head.rows) for head in heads]
    safe, owner, row, value = [], [], [], []
    for i, (head, score) in enumerate(zip(heads, of_heads, strict=True)):
        first = pinned(head, rule)
        order = ranked(head, score, rule)
        num_safe = max(min(len(first), even[i]), int(share * even[i]))
        safe.append(order[:num_safe])
        others = np.sort(order[num_safe:])
        row.append(others)
        owner.append(np.full(len(others), i))
        value.append(np.where(np.isin(others, first), np.inf, score[others]))
    left = rows_in_all(heads, budget) - sum(map(len, safe))
    chosen = descending(np.concatenate(value))[:left]
    owners, rows = np.concatenate(owner)[chosen], np.concatenate(row)[chosen]
    return [np.sort(np.concatenate([own, rows[owners == i]])) for i, own in enumerate(safe)]


def keep(layers: list[list[Head]], budget: int, rule: Rule) -> Kept:
    return [spread(heads, [scores(head, rule) for head in heads], budget, rule, SAFE_SHARE) for heads in layers]
