"""R-KV: rows that matter and that no later one repeats (Cai et al. 2025, arXiv 2505.24133; as its code)."""

import numpy as np

from eps_core.eviction.base import (
    Head,
    Kept,
    PolicySpec,
    Rule,
    best_of_each,
    by_position,
    neighbours,
    older,
    rounded,
    seen,
)
from eps_core.eviction.keydiff import unit_keys

IMPORTANCE = 0.07  # lambda: its weight; redundancy has the rest
SIMILAR = 0.5  # a cosine above says the same again
KERNEL = 7  # tokens over which importance is the largest
ROUNDING = 1e-4  # of a cosine in float32, and more: nearer to SIMILAR it is computed again in float64
COLUMNS = 512  # keys compared at a time: bounds memory, changes nothing
SPEC = PolicySpec(
    source="R-KV, arXiv 2505.24133, code Zefan-Cai/R-KV",
    deviations="the 32 newest rows are pinned, where the code pins its window of 8; importance is of those before",
    window=8,
    keys=True,
    queries=True,
)


def softmax(logits: np.ndarray) -> np.ndarray:
    """Over the last axis; 0 where a row has no finite logit."""
    top = logits.max(-1, keepdims=True, initial=-np.inf)
    mass = np.exp(logits - np.where(np.isfinite(top), top, 0.0))
    total = mass.sum(-1, keepdims=True)
    share: np.ndarray = mass / np.where(total > 0, total, 1.0)
    return share


def importance(head: Head, rule: Rule) -> np.ndarray:
    """[T]: softmax weight of the window queries over the older rows, of the largest logit among the query heads; mean
    over queries, then the largest of a row's neighbourhood. 0 for the newest rows, which are pinned."""
    found = np.zeros(head.rows)
    rows, keys, queries = older(head, rule), rounded(head.keys), rounded(head.queries)
    if len(rows):
        logits = (queries @ keys[rows].T / np.sqrt(keys.shape[1])).max(0)
        logits = np.where(seen(head, len(logits))[:, rows], logits, -np.inf)
        found[rows] = neighbours(softmax(logits).mean(0), KERNEL).max(0)
    return found


def latest_similar(unit: np.ndarray) -> np.ndarray:
    """[T]: for each of the unit keys [T, D] the last other one whose cosine with it is above SIMILAR; -1 where none."""
    found, single = np.full(len(unit), -1), unit.astype(np.float32)
    for end in range(len(unit), 0, -COLUMNS):
        start = max(end - COLUMNS, 0)
        rows = np.flatnonzero(found < 0)
        above = single[rows] @ single[start:end].T - np.float32(SIMILAR)
        similar = above > 0
        unsure = np.abs(above, out=above).min(1) < ROUNDING
        similar[unsure] = unit[rows[unsure]] @ unit[start:end].T > SIMILAR
        itself = np.flatnonzero((start <= rows) & (rows < end))
        similar[itself, rows[itself] - start] = False
        any_of = similar.any(1)
        found[rows[any_of]] = end - 1 - similar[any_of, ::-1].argmax(1)
    return found


def redundancy(head: Head) -> np.ndarray:
    """[T]: softmax over rows of their mean cosine with all rows, a row's with itself and with its latest similar one
    counting as 0: of rows that say the same, the latest is spared."""
    order = by_position(head)
    unit = unit_keys(head)[order]
    latest = latest_similar(unit)
    total = unit @ unit.sum(0) - np.einsum("td,td->t", unit, unit)
    has = np.flatnonzero(latest >= 0)
    np.subtract.at(total, latest[has], np.einsum("td,td->t", unit[has], unit[latest[has]]))
    found = np.zeros(head.rows)
    found[order] = softmax(total / head.rows)
    return found


def scores(head: Head, rule: Rule, share: float) -> np.ndarray:
    """[T]: importance less redundancy, weighted by `share` and the rest; more is kept."""
    return share * importance(head, rule) - (1 - share) * redundancy(head)


def keep(layers: list[list[Head]], budget: int, rule: Rule) -> Kept:
    return best_of_each(layers, [[scores(head, rule, IMPORTANCE) for head in heads] for heads in layers], budget, rule)
