"""Checks of a write or a read, and what every cache says of its parts: no array mathematics."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from eps_core.config.cache import CacheConfig, CacheSpec


def check_write(spec: CacheSpec, cache_config: CacheConfig, shapes: Sequence[Sequence[int]], slots: np.ndarray) -> None:
    """Raises ValueError unless k and v, of these shapes, are [N, Hkv, D] for slots [N] inside the pool."""
    expected = (len(slots), spec.num_kv_heads, spec.head_dim)
    for name, shape in zip("kv", shapes, strict=True):
        if shape != expected and tuple(shape) != expected:
            raise ValueError(f"{name} has shape {tuple(shape)}: [slots, kv heads, head dim] is {expected}")
    capacity = spec.num_units * cache_config.unit_tokens
    if len(slots) == 1 and 0 <= slots[0] < capacity:
        return  # in every layer of every step
    if len(slots) and not 0 <= slots.min() <= slots.max() < capacity:
        raise ValueError(f"slots run from {slots.min()} to {slots.max()}: the pool has slots 0 to {capacity - 1}")


def check_query(spec: CacheSpec, shape: Sequence[int]) -> None:
    """Raises ValueError unless q, of this shape, is [B, Hq, D] with Hq a multiple of the cache's kv heads."""
    _, num_heads, head_dim = shape
    if head_dim != spec.head_dim or num_heads % spec.num_kv_heads:
        raise ValueError(
            f"q has {num_heads} heads of {head_dim}: the cache has {spec.num_kv_heads} kv heads of {spec.head_dim}, "
            "and query heads must be a multiple of them"
        )


class CountsRereads:
    """A cache's own summaries and those of its bounds, and the rows of K that it reads again to finalize groups."""

    spec: CacheSpec
    cache_config: CacheConfig
    centroid: list[Any]  # of key codes, layer by layer, once it is known
    bound: Any  # the cache of the summaries that bound, where they are other ones, or None
    tokens_reread: int  # of all layers; every kv head's rows are read
    _bytes_reported = 0  # by `newly_reread`

    def can_encode(self, layer: int) -> bool:
        """Return whether full groups have summaries: key codes wait for their centroid."""
        return not self.cache_config.method_spec.centroid_codes or self.centroid[layer] is not None

    def parts(self) -> list[Any]:
        """Return the cache and that of its bounds, where they have summaries."""
        return [one for one in (self, self.bound) if one is not None and one.cache_config.enabled]

    @property
    def bytes_k_reread(self) -> int:
        """Bytes read again so far, for the cache's own summaries and for those of its bounds."""
        return sum(one.tokens_reread * one.spec.num_kv_heads * one.spec.k_token_bytes for one in self.parts())

    def newly_reread(self) -> int:
        """Return the bytes read again since the last call."""
        reported, self._bytes_reported = self._bytes_reported, self.bytes_k_reread
        return self._bytes_reported - reported
