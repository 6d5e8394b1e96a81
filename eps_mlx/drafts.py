"""What drafting asks of a cache besides a gated step: what was visited, and masses that a verify pass measured."""

import math
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from eps_core.gate.protocol import Selection
from eps_mlx.cache import Cache, take
from eps_mlx.selection import visit_mask


def visits(cache: Cache, drafts: Sequence[tuple[Selection, int] | None], num_groups: int) -> mx.array:
    """[T, Hkv, G] bool of what T steps visited: of each a selection and which of its sequences, None for everything."""
    with mx.stream(cache.stream):
        every = mx.ones((cache.spec.num_kv_heads, num_groups), mx.bool_)
        return mx.stack([every if one is None else visit_mask(one[0], num_groups)[one[1]] for one in drafts])


def frozen_masses(cache: Cache, masses: mx.array, index: np.ndarray, num_groups: int) -> mx.array:
    """Rows [B, Hkv, num_groups] of masses [T, Hkv, G]: index [B], host; groups that came since have none, -inf;
    those past `num_groups`, of a longer sequence that has ended, go."""
    found = take(cache, masses, index)[..., :num_groups]
    with mx.stream(cache.stream):
        room = [(0, 0), (0, 0), (0, num_groups - found.shape[2])]
        return mx.pad(found, room, constant_values=-math.inf)


def larger(cache: Cache, first: mx.array, second: mx.array) -> mx.array:
    """Element by element."""
    with mx.stream(cache.stream):
        return mx.maximum(first, second)
