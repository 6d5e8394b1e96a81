"""The groups that draft steps visited, as a verify pass needs them."""

from collections.abc import Sequence

import numpy as np

from eps_core.gate.protocol import Selection
from eps_core.oracle.cache import Cache
from eps_core.oracle.scoring import visit_mask


def visits(cache: Cache, drafts: Sequence[tuple[Selection, int] | None], num_groups: int) -> np.ndarray:
    """[T, Hkv, G] bool of what T steps visited: of each a selection and which of its sequences, None for everything."""
    every = np.ones((cache.spec.num_kv_heads, num_groups), bool)
    return np.stack([every if one is None else visit_mask(one[0], num_groups)[one[1]] for one in drafts])
