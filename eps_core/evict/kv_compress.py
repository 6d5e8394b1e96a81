"""KV-Compress: whole blocks go, wherever in the model they are cheapest (Rehg 2024, arXiv 2410.00161; its
code's squared attention)."""

from itertools import pairwise

import numpy as np

from eps_core.evict.base import Facts, Head, Kept, Rule, pinned, ranked, rounded, rows_in_all

BLOCK = 16  # rows that a freed block held
FACTS = Facts(
    source="KV-Compress, arXiv 2410.00161, code IsaacRe/vllm-kvcompress; the last block is cut, for exact budgets",
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
    needed. Rows that free no block, since pinned ones share it, go after all that do; pinned rows where a budget is too
    small for them, of every head as far as its even share demands."""
    heads = [head for of_layer in layers for head in of_layer]
    goes, chunks = [], []
    for i, head in enumerate(heads):
        score, first = scores(head), pinned(head, rule)
        safe = min(len(first), budget, head.rows)
        order = ranked(head, score, rule)[safe:][::-1]
        goes.append(order)
        hanging = head.rows % BLOCK or BLOCK
        edges = sorted({0, *range(hanging, len(order), BLOCK), len(order)})
        for start, end in pairwise(edges):
            dearest, frees = order[end - 1], (head.rows - end) % BLOCK == 0
            cost = np.float32(score[dearest])
            chunks.append((bool(np.isin(dearest, first)), not frees, cost, -i, start, end))
    left = sum(head.rows for head in heads) - rows_in_all(heads, budget)
    gone = [0] * len(heads)
    for *_, i, start, end in sorted(chunks):
        gone[-i] += (taken := min(end - start, left))
        left -= taken
    rows = (np.setdiff1d(np.arange(head.rows), goes[i][: gone[i]]) for i, head in enumerate(heads))
    return [[next(rows) for _ in of_layer] for of_layer in layers]
