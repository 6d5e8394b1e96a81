"""Counts and checks of both array backends around a write or a read: no array mathematics."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from eps_core.config.cache import CacheConfig, CacheSpec


def check_write(spec: CacheSpec, cache_config: CacheConfig, shapes: Sequence[Sequence[int]], slots: np.ndarray) -> None:
    """Raises ValueError unless k and v, of these shapes, are [N, Hkv, D] for slots [N] inside the pool."""
    expected = (len(slots), spec.num_kv_heads, spec.head_dim)
    for name, shape in zip("kv", shapes, strict=True):
        if tuple(shape) != expected:
            raise ValueError(f"{name} has shape {tuple(shape)}: [slots, kv heads, head dim] is {expected}")
    capacity = spec.num_units * cache_config.unit_tokens
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


class CountsReads:
    """Bytes of K and V that a cache has read, some of them known to the device alone until somebody asks."""

    known_bytes_read: int
    pending_reads: dict[int, Any]  # bytes of a group -> groups read, a number on the device

    @property
    def kv_bytes_read(self) -> int:
        """Bytes of K and V read so far. Synchronises where only the device knows how many groups were."""
        for group_bytes, number in self.pending_reads.items():
            self.known_bytes_read += int(number) * group_bytes
        self.pending_reads = {}
        return self.known_bytes_read

    @kv_bytes_read.setter
    def kv_bytes_read(self, value: int) -> None:
        self.known_bytes_read, self.pending_reads = value, {}

    def count_read(self, num_bytes: int) -> None:
        """Adds to `kv_bytes_read` without asking for it."""
        self.known_bytes_read += num_bytes

    def count_groups(self, number: Any, group_bytes: int) -> None:
        """The same for a number of groups that only the device knows."""
        before = self.pending_reads.get(group_bytes)
        self.pending_reads[group_bytes] = number if before is None else before + number
