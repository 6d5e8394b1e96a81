"""KV-Compress by the squared attention of all queries (Rehg 2024, arXiv 2410.00161; KVC-full of its code, which needs a
buffer: a row's nearest queries, which give it most, do not count)."""

import numpy as np

from eps_core.eviction.base import Head, Kept, PolicySpec, Rule, rounded
from eps_core.eviction.kv_compress import free_blocks

SPEC = PolicySpec(
    source="KV-Compress, arXiv 2410.00161, KVC-full of code IsaacRe/vllm-kvcompress",
    deviations="the last block is cut, for exact budgets; 32 newest rows are pinned, as in the code's README",
    squares=True,
    buffer=10,
    uneven=True,
)


def scores(head: Head) -> np.ndarray:
    """[T]: squared softmax weight, sum over the queries at least `SPEC.buffer` tokens later and all query heads; more
    is kept."""
    return rounded(head.squares).sum(0)


def keep(layers: list[list[Head]], budget: int, rule: Rule) -> Kept:
    return free_blocks(layers, [[scores(head) for head in heads] for heads in layers], budget, rule)
