"""The benchmarks' view of MLX: dense attention as good as it gets, a clock, copies, cold caches.

See eps_core.bench.platform for what each function promises. MLX computes when asked: every clock stops after `mx.eval`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import mlx.core as mx

from eps_core.cpu.host import (
    Variant,
    host_bandwidth_variants,
    host_cache_bytes,
    host_flusher,
    host_free_bytes,
    host_name,
    host_threads,
    kernel_threads,
    wall_clock,
)
from eps_mlx.cache import Cache, evaluate
from eps_mlx.device import device_of


def prepare(device: str) -> None:
    """Makes `device` the one that arrays without one go to."""
    mx.set_default_device(device_of(device))


def dense_variants(k: mx.array, v: mx.array, q: mx.array) -> dict[str, Variant]:
    """Dense attention by name, each () -> out [B, Hq, D]: k, v [B, Hkv, T, D] contiguous, q [B, Hq, D] unscaled."""
    batch, kv_heads, _, head_dim = k.shape
    single = q.reshape(batch, -1, 1, head_dim)  # one row each of Hq heads
    rows = q.reshape(batch, kv_heads, -1, head_dim)  # the query heads of one kv head as its rows
    scale = 1 / math.sqrt(head_dim)

    def grouped_matmul() -> mx.array:
        logits = (rows * scale) @ k.swapaxes(-1, -2)
        return (mx.softmax(logits, axis=-1, precise=True) @ v).reshape(q.shape)

    def fast(queries: mx.array) -> Variant:
        return lambda: mx.fast.scaled_dot_product_attention(queries, k, v, scale=scale).reshape(q.shape)

    return {"sdpa gqa": fast(single), "sdpa rows": fast(rows), "grouped matmul": grouped_matmul}


def synchronize(*results: Any) -> None:
    """Computes `results` and waits for the device."""
    mx.eval(list(_arrays(results)))
    mx.synchronize()


def _arrays(result: Any) -> Iterator[mx.array]:
    """The arrays of a result; of a cache, nothing: it computes its own."""
    if isinstance(result, Cache):
        evaluate(result)
    elif isinstance(result, mx.array):
        yield result
    elif isinstance(result, (tuple, list)):
        for part in result:
            yield from _arrays(part)
    elif is_dataclass(result):
        for one in fields(result):
            yield from _arrays(getattr(result, one.name))


def stopwatch(device: str) -> Callable[[Variant], tuple[float, Any]]:
    return wall_clock(synchronize)


def flusher(num_bytes: int, device: str) -> Variant:
    if device == "cpu":
        return host_flusher(num_bytes)
    buffers = [mx.zeros((num_bytes // 4,))]

    def flush() -> None:
        buffers[0] = buffers[0] + 1
        synchronize(buffers[0])

    return flush


def bandwidth_variants(num_bytes: int, device: str) -> dict[str, tuple[Variant, int]]:
    if device == "cpu":
        return host_bandwidth_variants(num_bytes)
    source = mx.ones((num_bytes // 4,))
    mx.eval(source)
    return {"copy": (lambda: source + 1, 2 * num_bytes), "read": (source.max, num_bytes)}


def stack_heads(parts: Sequence[mx.array]) -> mx.array:
    """B arrays [T, Hkv, D] as one contiguous [B, Hkv, T, D]."""
    whole = mx.contiguous(mx.stack([part.swapaxes(0, 1) for part in parts]))
    mx.eval(whole)
    return whole


def free_bytes(device: str) -> int | None:
    return host_free_bytes()


def last_cache_bytes(device: str) -> int | None:
    return host_cache_bytes()


def device_facts(device: str) -> dict[str, Any]:
    if device == "cpu":
        return {"device_name": host_name(), "threads": host_threads(), "kernel_threads": kernel_threads()}
    facts = mx.device_info() if hasattr(mx, "device_info") else mx.metal.device_info()
    return {"device_name": facts.get("device_name"), "memory_bytes": facts.get("memory_size")}


def capture(function: Variant) -> Variant | None:
    """MLX has no launch to record."""
    return None


def device_parts(cache: Any, q: Any, plan: Any) -> dict[str, Variant]:
    """Nothing to record."""
    return {}
