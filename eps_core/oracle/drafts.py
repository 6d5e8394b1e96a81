"""What drafting asks of a cache besides a gated step: what was visited, and masses that a verify pass measured."""

from collections.abc import Sequence

import numpy as np

from eps_core.gate.protocol import Selection
from eps_core.oracle.cache import Cache
from eps_core.oracle.scoring import visit_mask


def visits(cache: Cache, drafts: Sequence[tuple[Selection, int] | None], num_groups: int) -> np.ndarray:
    """[T, Hkv, G] bool of what T steps visited: of each a selection and which of its sequences, None for everything."""
    every = np.ones((cache.spec.num_kv_heads, num_groups), bool)
    return np.stack([every if one is None else visit_mask(one[0], num_groups)[one[1]] for one in drafts])


def frozen_masses(cache: Cache, masses: np.ndarray, index: np.ndarray, num_groups: int) -> np.ndarray:
    """Rows [B, Hkv, num_groups] of masses [T, Hkv, G]: index [B], host; groups that came since have none, -inf;
    those past `num_groups`, of a longer sequence that has ended, go."""
    found = np.full((len(index), masses.shape[1], num_groups), -np.inf)
    known = min(num_groups, masses.shape[2])
    found[..., :known] = masses[index, :, :known]
    return found


def larger(cache: Cache, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Element by element."""
    return np.maximum(first, second)
