"""The benchmarks' view of MLX: dense attention as good as it gets, a clock, copies, cold caches.

See eps_core.cpu.host for what each function promises. MLX computes when asked: every clock stops after `mx.eval`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import mlx.core as mx

from eps_core.cpu import host
from eps_core.cpu.host import Variant
from eps_mlx.cache import Cache, evaluate
from eps_mlx.device import device_of

# its memory is the host's, and it has no launch to record
free_bytes, last_cache_bytes = host.free_bytes, host.last_cache_bytes
capture, device_parts = host.capture, host.device_parts


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
    return host.stopwatch(device, synchronize)


def flusher(num_bytes: int, device: str) -> Variant:
    if device == "cpu":
        return host.flusher(num_bytes, device)
    buffers = [mx.zeros((num_bytes // 4,))]

    def flush() -> None:
        buffers[0] = buffers[0] + 1
        synchronize(buffers[0])

    return flush


def bandwidth_variants(num_bytes: int, device: str) -> dict[str, tuple[Variant, int]]:
    if device == "cpu":
        return host.bandwidth_variants(num_bytes, device)
    source = mx.ones((num_bytes // 4,))
    mx.eval(source)
    return {"copy": (lambda: source + 1, 2 * num_bytes), "read": (source.max, num_bytes)}


def stack_heads(parts: Sequence[mx.array]) -> mx.array:
    """B arrays [T, Hkv, D] as one contiguous [B, Hkv, T, D]."""
    whole = mx.contiguous(mx.stack([part.swapaxes(0, 1) for part in parts]))
    mx.eval(whole)
    return whole


def device_facts(device: str) -> dict[str, Any]:
    if device == "cpu":
        return {**host.device_facts(device), "kernel_threads": host.kernel_threads()}
    facts = mx.device_info() if hasattr(mx, "device_info") else mx.metal.device_info()
    return {"device_name": facts.get("device_name"), "memory_bytes": facts.get("memory_size")}
