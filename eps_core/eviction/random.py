"""Rows at random: the floor of every plot."""

import numpy as np

from eps_core.eviction.base import Head, Kept, PolicySpec, Rule, best_of_each, draws

SPEC = PolicySpec(source="uniform draws by (seed, layer, kv head, position)")


def scores(head: Head, layer: int, kv_head: int, rule: Rule) -> np.ndarray:
    """[T]: a row's draw, which it keeps for life: what two evictions leave is what one would have left."""
    return draws(rule.seed, layer, kv_head, head.positions)


def keep(layers: list[list[Head]], budget: int, rule: Rule) -> Kept:
    found = [[scores(head, layer, i, rule) for i, head in enumerate(heads)] for layer, heads in enumerate(layers)]
    return best_of_each(layers, found, budget, rule)
