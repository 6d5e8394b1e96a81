"""NACL: the rows that the prompt's end attends to, and some at random (Chen et al. 2024, arXiv 2408.03675).

The last 1 % of the prompt are its proxies; here at most 64 queries. Its code's recent window, negative below 25,600
tokens, is the rule's pinned rows."""

import numpy as np

from eps_core.eviction.base import Head, Kept, PolicySpec, Rule, descending, draws, pinned, ranked, rounded

TOKENS_PER_PROXY = 100  # of the prompt
BEST, DRAWN = 12, 7  # per cent of the prompt; a budget beyond the pinned rows is split in this proportion
SPEC = PolicySpec(
    source="NACL, arXiv 2408.03675, code PaddlePaddle/Research",
    deviations="at most 64 proxies, causal among themselves; mean over query heads, where the source scores each",
    window=64,
    while_decoding=False,
)


def scores(head: Head) -> np.ndarray:
    """[T]: softmax mass received of the proxy queries, sum over these and mean over query heads; more is kept."""
    weights = rounded(head.window)
    proxies = min(max(1, head.length // TOKENS_PER_PROXY), SPEC.window)
    received: np.ndarray = weights[:, -proxies:].sum(1).mean(0)
    return received


def kept(head: Head, layer: int, kv_head: int, budget: int, rule: Rule) -> np.ndarray:
    """Rows of one head, ascending: pinned, best, and of the others a sample without replacement with probabilities
    softmax(score), as the largest of score + Gumbel noise (Kool et al. 2019)."""
    score = scores(head)
    order = ranked(head, score, rule)
    rows = min(budget, head.rows)
    drawn = max(rows - len(pinned(head, rule)), 0) * DRAWN // (BEST + DRAWN)
    others = np.sort(order[rows - drawn :])
    noise = -np.log(-np.log(draws(rule.seed, layer, kv_head, head.positions[others])))
    sample = others[descending(score[others] + noise)[:drawn]]
    return np.sort(np.concatenate([order[: rows - drawn], sample]))


def keep(layers: list[list[Head]], budget: int, rule: Rule) -> Kept:
    return [[kept(head, layer, i, budget, rule) for i, head in enumerate(heads)] for layer, heads in enumerate(layers)]
