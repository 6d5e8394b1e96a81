"""The groups that draft steps selected, as a verify pass needs them."""

from collections.abc import Sequence

import numpy as np

from eps_core.attention.protocol import Selection
from eps_core.reference.cache import Cache
from eps_core.reference.scoring import selection_mask


def visits(cache: Cache, drafts: Sequence[tuple[Selection, int] | None], num_groups: int) -> np.ndarray:
    """[T, Hkv, G] bool of what T steps selected: of each a selection and which of its sequences, None for all."""
    every = np.ones((cache.spec.num_kv_heads, num_groups), bool)
    return np.stack([every if one is None else selection_mask(one[0], num_groups)[one[1]] for one in drafts])
