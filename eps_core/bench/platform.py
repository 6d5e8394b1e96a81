"""The platform's part of a benchmark: dense attention as good as it gets, a clock, copies, cold caches.

The backends' `bench.py` list the same functions; this one is numpy's, and what it says of the host serves them.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from eps_core.cpu.host import (
    Variant,
    host_bandwidth_variants,
    host_cache_bytes,
    host_flusher,
    host_free_bytes,
    host_name,
    host_threads,
    wall_clock,
)


def prepare(device: str) -> None:
    """Makes `device` the one that arrays without one go to."""


def dense_variants(k: np.ndarray, v: np.ndarray, q: np.ndarray) -> dict[str, Variant]:
    """Dense attention by name, each () -> out [B, Hq, D]: k, v [B, Hkv, T, D] contiguous, q [B, Hq, D] unscaled."""
    batch, kv_heads, _, head_dim = k.shape
    rows = q.astype(np.float32).reshape(batch, kv_heads, -1, head_dim) / math.sqrt(head_dim)

    def grouped_matmul() -> np.ndarray:
        logits = rows @ k.astype(np.float32).swapaxes(-1, -2)
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
        return (weights @ v.astype(np.float32) / weights.sum(axis=-1, keepdims=True)).reshape(q.shape)

    return {"grouped matmul": grouped_matmul}


def synchronize(*results: Any) -> None:
    """Waits until `results` are computed and the device has nothing left to do."""


def stopwatch(device: str) -> Callable[[Variant], tuple[float, Any]]:
    """A function that calls another once and gives (milliseconds until its result is computed, the result)."""
    return wall_clock(synchronize)


def flusher(num_bytes: int, device: str) -> Variant:
    """A function that overwrites a buffer of `num_bytes`, so that nothing else is left in the device's caches."""
    return host_flusher(num_bytes)


def bandwidth_variants(num_bytes: int, device: str) -> dict[str, tuple[Variant, int]]:
    """Return calls that move memory as fast as the platform can: name -> (function, bytes of a call)."""
    return host_bandwidth_variants(num_bytes)


def stack_heads(parts: Sequence[np.ndarray]) -> np.ndarray:
    """B arrays [T, Hkv, D] as one contiguous [B, Hkv, T, D]."""
    return np.ascontiguousarray(np.stack([part.swapaxes(0, 1) for part in parts]))


def free_bytes(device: str) -> int | None:
    """Memory that new arrays may take; None: unknown."""
    return host_free_bytes()


def last_cache_bytes(device: str) -> int | None:
    """Size of the device's last cache before memory; None: unknown."""
    return host_cache_bytes()


def device_facts(device: str) -> dict[str, Any]:
    """Return the record's facts about the device."""
    return {"device_name": host_name(), "threads": host_threads()}


def capture(function: Variant) -> Variant | None:
    """The function as one recorded launch of the device; None where the platform has no such thing."""
    return None


def device_parts(cache: Any, q: Any, plan: Any) -> dict[str, Variant]:
    """The parts of a step from arrays on the device alone, which `capture` can record; empty where there are none."""
    return {}
