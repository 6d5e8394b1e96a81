"""InfiniGen, a reconstruction as an eviction: the rows that its speculation would fetch most often (Lee et al. 2024,
arXiv 2406.19707).

The paper guesses a layer's query from the layer before and keeps all rows on the host; here the layer's own last
queries stand for the guess, keys are skewed by the cache's own spectrum, and its pool's counter decides what goes."""

import numpy as np

from eps_core.eviction.base import Head, Kept, PolicySpec, Rule, best_of_each, descending, rounded, seen

PARTIAL = 0.1  # share of the head dim that the speculation reads
MARGIN = 5.0  # alpha, logits below a query's largest that are still fetched
MOST = 0.2  # of the rows, fetched by one query
SPEC = PolicySpec(
    source="InfiniGen, arXiv 2406.19707",
    deviations="a reconstruction as an eviction; thresholds by query head, not head 0's; columns by keys, too",
    window=8,
    keys=True,
    queries=True,
)


def partial_logits(head: Head) -> np.ndarray:
    """[R, W, T]: the speculated logits q A (K A)^T / sqrt(D) over the columns of A, the right singular vectors of K,
    whose mean |q A| plus mean |K A| is largest; -inf where a row is after the query."""
    keys, queries = rounded(head.keys), rounded(head.queries)
    skew = np.linalg.eigh(keys.T @ keys)[1]
    skewed_keys, skewed_queries = keys @ skew, queries @ skew
    energy = np.abs(skewed_keys).mean(0) + np.abs(skewed_queries).mean((0, 1))
    columns = np.sort(descending(energy)[: max(1, int(PARTIAL * keys.shape[1]))])
    logits = skewed_queries[..., columns] @ skewed_keys[:, columns].T / np.sqrt(keys.shape[1])
    return np.where(seen(head, queries.shape[1]), logits, -np.inf)


def scores(heads: list[Head]) -> list[np.ndarray]:
    """[T] of each head of a layer: by how many (query head, query)s of the window a row is fetched; more is kept. A
    query fetches of each head as many of the best rows as are within MARGIN of the largest, mean over the layer's
    query heads, at most MOST of the rows and at least one."""
    of_heads = [partial_logits(head) for head in heads]
    within = [(np.isfinite(x) & (x >= x.max(-1, keepdims=True) - MARGIN)).sum(-1) for x in of_heads]
    fetched = np.concatenate(within).mean(0).astype(np.int64)  # [W]
    counts = []
    for logits in of_heads:
        count = np.zeros(logits.shape[-1])
        most = np.clip(fetched, 1, max(1, int(MOST * len(count))))
        for of_queries in logits:
            for query, number in zip(of_queries, most, strict=True):
                count[descending(query)[: min(number, np.isfinite(query).sum())]] += 1
        counts.append(count)
    return counts


def keep(layers: list[list[Head]], budget: int, rule: Rule) -> Kept:
    return best_of_each(layers, [scores(heads) for heads in layers], budget, rule)
