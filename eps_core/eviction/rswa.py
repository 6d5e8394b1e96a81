"""R-SWA: the whole prompt, and a ring of the newest generated tokens (arXiv 2606.23050).

Query q reads k where k <= q and (k < prefix or q - k < w): a cache of prefix + w rows, however long the text. A budget
counts the prompt and so many generated tokens, so `--kv-keep` is a number of these, never a share. Where
`EvictionConfig.every` is 1 the rows that a step reads, its own token among them, are the mask's of w = kv-keep + 1, and
`fill` writes over the oldest one, as a ring does; `every` tokens more are read at most where it is larger.

It belongs to models trained with this mask. Here nothing is trained: what an untrained model loses is what is measured.
"""

import numpy as np

from eps_core.eviction.base import Head, Kept, PolicySpec, Rule, best_of_each

SPEC = PolicySpec(
    source="R-SWA, arXiv 2606.23050, code vLLM models/unlimited_ocr.py",
    deviations="for models trained so; here nothing is trained",
    at_prefill=False,
    prompt=True,
)


def scores(head: Head) -> np.ndarray:
    """[T]: infinite of the prompt's tokens, else minus the age in tokens; the newest are kept."""
    age = (head.length - head.positions).astype(np.float64)
    found: np.ndarray = np.where(head.positions < head.prompt, np.inf, -age)
    return found


def keep(layers: list[list[Head]], budget: int, rule: Rule) -> Kept:
    return best_of_each(layers, [[scores(head) for head in heads] for heads in layers], budget, rule)
