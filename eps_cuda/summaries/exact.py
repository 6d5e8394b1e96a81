"""True masses, by reading all of K, which byte counts leave out: what a perfect summary would say."""

import torch
from torch import Tensor

from eps_core.config.store import Store
from eps_cuda.summaries.base import Score, Summary, _dots


def score(store: Store, constants: Summary, summary: Summary, a: Tensor) -> Score:
    """The masses themselves, from "keys" [B, Hkv, G, S, D]."""
    logits = _dots(summary["keys"].flatten(2, 3), a)
    return torch.logsumexp(logits.unflatten(-1, (-1, store.S)), dim=-1), None, None
