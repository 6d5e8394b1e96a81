"""Ada-KV: a layer's budget goes to the heads whose rows score most (Feng et al. 2024, arXiv 2407.11550), by SnapKV's
window with the pooling of Ada-KV's own code.

kvpress has another rule: every head keeps its best rows up to a share of its even budget, and the layer's best rows
take the rest. The two agree where SAFE_SHARE is 0 and nothing is normalised, and where SAFE_SHARE is 1."""

import numpy as np

from eps_core.eviction.base import (
    Head,
    Kept,
    PolicySpec,
    Rule,
    descending,
    made_exact,
    neighbours,
    pinned,
    ranked,
    rows_in_all,
)
from eps_core.eviction.snapkv import judged

KERNEL = 7  # tokens over which a weight is the largest
SAFE_SHARE = 0.2  # floor_alpha: part of a head's rows that is its even budget, whatever other heads score
NORMALISED = True  # scores are multiplied by the share of a head's mass that its even budget would hold
SPEC = PolicySpec(
    source="Ada-KV, arXiv 2407.11550, code FFY0/AdaKV, as in KVCache-Factory",
    deviations="rounded budgets are brought to the exact sum; normalised as in KVCache-Factory, not as FFY0's scripts; "
    "kvpress has another budget rule and averages over 5",
    window=32,
    while_decoding=False,
    uneven=True,
)


def scores(head: Head, rule: Rule) -> np.ndarray:
    """[T]: the largest weight that the window queries give a row or a neighbour, mean over query heads; more is kept.
    0 for the newest rows, which are pinned."""
    found = np.zeros(head.rows)
    rows, weights = judged(head, rule)
    found[rows] = neighbours(weights, KERNEL).max(0)
    return found


def spread(heads: list[Head], of_heads: list[np.ndarray], budget: int, rule: Rule, share: float) -> list[np.ndarray]:
    """Return the rows kept of each head of a layer by its scores [T]: the pinned ones, and of its others as many as are
    among the layer's best, wherever these are, blended with the even budget: (1 - share) n + floor(share * even)."""
    even = np.array([min(budget, head.rows) for head in heads])
    rows = np.array([head.rows for head in heads])
    orders = [ranked(head, score, rule) for head, score in zip(heads, of_heads, strict=True)]
    first = np.array([min(len(pinned(head, rule)), most) for head, most in zip(heads, even, strict=True)])
    values = []
    for order, score, start, end in zip(orders, of_heads, first, even, strict=True):
        free = score[order[start:]]
        total = free.sum()
        values.append(free * (free[: end - start].sum() / total if NORMALISED and total else 1.0))
    owner = np.repeat(np.arange(len(heads)), rows - first)
    wanted_in_all = rows_in_all(heads, budget)
    counts = np.bincount(owner[descending(np.concatenate(values))[: wanted_in_all - first.sum()]], minlength=len(heads))
    floor = (share * (even - first)).astype(np.int64)
    wanted = first + np.round(counts * (1 - share) + floor).astype(np.int64)
    given = made_exact(wanted, first + floor, rows, wanted_in_all)
    return [np.sort(order[:most]) for order, most in zip(orders, given, strict=True)]


def keep(layers: list[list[Head]], budget: int, rule: Rule) -> Kept:
    return [spread(heads, [scores(head, rule) for head in heads], budget, rule, SAFE_SHARE) for heads in layers]
