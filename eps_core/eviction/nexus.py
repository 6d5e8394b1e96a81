"""Nexus Sampling, a reconstruction: rows by a weighted lottery instead of a ranking (arXiv 2606.23961, of which the
reservoir's key u^(1/w) is confirmed and the walk that makes the weights is ours).

The reservoir is Efraimidis and Spirakis' (2006): every row draws u once and for all, and the largest u^(1/w) are a
sample without replacement by weights w."""

import numpy as np

from eps_core.eviction.base import Head, Kept, PolicySpec, Rule, best_of_each, draws, rounded
from eps_core.eviction.keydiff import unit_keys

HOPS = 2  # steps of the walk: our choice, of the paper's 1 to 3
WALKED = 0.5  # gamma, the share of weight that comes over the walk: our choice
SPEC = PolicySpec(
    source="Nexus Sampling, arXiv 2606.23961",
    deviations="a reconstruction but for the key u^(1/w)",
    window=32,
    keys=True,
)


def weights(head: Head) -> np.ndarray:
    """[T] >= 0, w of the lottery: s = window mass (sum over queries and query heads), then HOPS times
    s <- (1 - WALKED) s0 + WALKED A^T s, where A [T, T] are the keys' squared cosines with rows that sum to 1.

    Squared, they are never negative, and a product with A costs T D^2 instead of T^2 D."""
    direct = rounded(head.window).sum((0, 1))
    unit = unit_keys(head)
    row_sums = np.einsum("td,td->t", unit @ (unit.T @ unit), unit)
    found = direct
    for _ in range(HOPS):
        share = found / np.where(row_sums > 0, row_sums, 1.0)
        walked = np.einsum("td,td->t", unit @ (unit.T @ (unit * share[:, None])), unit)
        found = (1 - WALKED) * direct + WALKED * walked
    return np.maximum(found, 0.0)


def scores(head: Head, layer: int, kv_head: int, rule: Rule) -> np.ndarray:
    """[T]: log w - log(-log u), which ranks as u^(1/w) does and neither underflows; more is kept."""
    with np.errstate(divide="ignore"):
        return np.log(weights(head)) - np.log(-np.log(draws(rule.seed, layer, kv_head, head.positions)))


def keep(layers: list[list[Head]], budget: int, rule: Rule) -> Kept:
    found = [[scores(head, layer, i, rule) for i, head in enumerate(heads)] for layer, heads in enumerate(layers)]
    return best_of_each(layers, found, budget, rule)
