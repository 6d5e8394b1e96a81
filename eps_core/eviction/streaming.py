"""StreamingLLM: the first tokens and the latest, whatever they say (Xiao et al. 2024, arXiv 2309.17453).

Keys keep the rotation of the positions at which they were read, where the paper counts positions inside the cache."""

import numpy as np

from eps_core.eviction.base import Head, Kept, PolicySpec, Rule, best_of_each

SPEC = PolicySpec(
    source="StreamingLLM, arXiv 2309.17453, code mit-han-lab/streaming-llm",
    deviations="positions stay absolute, as in kvpress",
)


def scores(head: Head) -> np.ndarray:
    """[T]: minus the age in tokens; the newest are kept."""
    return (head.positions - head.length).astype(np.float64)


def keep(layers: list[list[Head]], budget: int, rule: Rule) -> Kept:
    return best_of_each(layers, [[scores(head) for head in heads] for heads in layers], budget, rule)
