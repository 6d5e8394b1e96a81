"""KV-Compress: whole blocks go, wherever in the model they are cheapest, by the squared attention of the last queries
(Rehg 2024, arXiv 2410.00161; KVC-w, the default of its code). `kv-compress-full` counts all queries."""

from itertools import pairwise

import numpy as np

from eps_core.eviction.base import (
    Head,
    Kept,
    PolicySpec,
    Rule,
    by_position,
    neighbours,
    pinned,
    ranked,
    rounded,
    rows_in_all,
)

BLOCK = 16  # rows that a freed block held
KERNEL = 7  # tokens over which a query head's metric is the largest
SPEC = PolicySpec(
    source="KV-Compress, arXiv 2410.00161, code IsaacRe/vllm-kvcompress",
    deviations=(
        "the last block is cut, for exact budgets; while decoding the window moves on, where the code adds every new "
        "query; 32 newest rows are pinned, as in the code's README, where its flag says 64"
    ),
    window=32,
    uneven=True,
)


def scores(head: Head) -> np.ndarray:
    """[T]: squared softmax weight, summed over the window queries, the largest of a row's neighbourhood, summed over
    query heads; more is kept."""
    order, found = by_position(head), np.zeros(head.rows)
    squares = np.square(rounded(head.window)).sum(1)[:, order]
    found[order] = neighbours(squares, KERNEL).max(0).sum(0)
    return found


def free_blocks(layers: list[list[Head]], of_heads: list[list[np.ndarray]], budget: int, rule: Rule) -> Kept:
    """Return the rows kept by scores of_heads[l][h] [T]. A head's rows stand in the order in which they go, the lowest
    scores first. Its last block, which may be part full, is freed by the first of them and each further one by the next
    BLOCK; a block costs the largest score that must go for it. The cheapest go until the budget is met, ties from the
    last head on; the last one only as far as needed. Rows that free no block, since pinned ones share it, go after all
    that do; pinned rows where a budget is too small for them, of every head as far as its even share demands."""
    heads = [head for of_layer in layers for head in of_layer]
    flat = [score for of_layer in of_heads for score in of_layer]
    goes, chunks = [], []
    for i, head in enumerate(heads):
        score, first = flat[i], pinned(head, rule)
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


def keep(layers: list[list[Head]], budget: int, rule: Rule) -> Kept:
    return free_blocks(layers, [[scores(head) for head in heads] for heads in layers], budget, rule)
