"""The rows that queries still to come will attend to most: the ceiling of every plot, for evaluation alone.

Of the mass that a head keeps under an even budget no policy does better; of the text that follows none is promised."""

import numpy as np

from eps_core.eviction.base import Head, Kept, PolicySpec, Rule, best_of_each, rounded

SPEC = PolicySpec(source="the weights that dense attention gives afterwards", future=True, while_decoding=False)


def scores(head: Head) -> np.ndarray:
    """[T]: softmax mass that queries to come give a row, sum over query heads; more is kept."""
    return rounded(head.future).sum(0)


def keep(layers: list[list[Head]], budget: int, rule: Rule) -> Kept:
    return best_of_each(layers, [[scores(head) for head in heads] for heads in layers], budget, rule)
