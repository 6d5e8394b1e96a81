"""KV-Compress: whole blocks go, wherever in the model they are cheapest (Rehg 2024, arXiv 2410.00161, section 4; its
code's squared attention)."""

import numpy as np

from eps_core.evict.base import Facts, Head, Kept, Rule, pinned, ranked, rounded

BLOCK = 16  # rows that a freed block held
FACTS = Facts(
    source="KV-Compress, arXiv 2410.00161, algorithm 1; the last block is cut, so that budgets are exact",
    squares=True,
    uneven=True,
)


def scores(head: Head) -> np.ndarray:
    """[T]: squared softmax weight, sum over all queries so far and all query heads; more is kept."""
    return rounded(head.squares).sum(0)


def keep(layers: list[list[Head]], budget: int, rule: Rule) -> Kept:
    """A head's rows stand in the order in which they go, the lowest scores first. Its last block, which may be part
    full, is freed by the first of them and each further one by the next BLOCK; a block costs the largest score that
    must go for it. The cheapest go until the budget is met, ties from the last head on; the last one only as far as
    needed. Pinned rows go where a budget is too small for them, of every head as far as its even share demands."""
    heads = [head for of_layer in layers for head in of_layer]
    goes, chunks = [], []
    for i, head in enumerate(heads):
        score, first = scores(head), pinned(head, rule)
        cost = score.astype(np.float32)
        cost[first] = np.inf
        safe = min(len(first), budget, head.rows)
        order = ranked(head, score, rule)[safe:][::-1]
        goes.append(order)
        hanging = head.rows % BLOCK or BLOCK
        starts = [0, *range(hanging, len(order), BLOCK)] if len(order) else []
        for start, end in zip(starts, [*starts[1:], len(order)], strict=True):
            chunks.append((cost[order[end - 1]], -i, start, end))
    left = sum(max(head.rows - budget, 0) for head in heads)
    gone = [0] * len(heads)
    for _, i, start, end in sorted(chunks):
        gone[-i] += (taken := min(end - start, left))
        left -= taken
    rows = (np.setdiff1d(np.arange(head.rows), goes[i][: gone[i]]) for i, head in enumerate(heads))
    return [[next(rows) for _ in of_layer] for of_layer in layers]
