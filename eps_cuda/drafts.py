"""What drafting asks of a cache besides a gated step: what was visited, and masses that a verify pass measured."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from eps_core.gate.protocol import Selection
from eps_cuda.cache import Cache, take
from eps_cuda.selection import visit_mask


@torch.inference_mode()
def visits(cache: Cache, drafts: Sequence[tuple[Selection, int] | None], num_groups: int) -> Tensor:
    """[T, Hkv, G] bool of what T steps visited: of each a selection and which of its sequences, None for everything."""
    every = torch.ones((cache.spec.num_kv_heads, num_groups), dtype=torch.bool, device=cache.device)
    return torch.stack([every if one is None else visit_mask(one[0], num_groups)[one[1]] for one in drafts])


@torch.inference_mode()
def frozen_masses(cache: Cache, masses: Tensor, index: np.ndarray, num_groups: int) -> Tensor:
    """Rows [B, Hkv, num_groups] of masses [T, Hkv, G]: index [B], host; groups that came since have none, -inf;
    those past `num_groups`, of a longer sequence that has ended, go."""
    found = take(cache, masses, index)[..., :num_groups]
    return torch.nn.functional.pad(found, (0, num_groups - found.shape[2]), value=-math.inf)


@torch.inference_mode()
def larger(cache: Cache, first: Tensor, second: Tensor) -> Tensor:
    """Element by element."""
    return torch.maximum(first, second)
