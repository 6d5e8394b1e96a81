"""The context from which sparse attention pays on this device: one layer, dense against sparse, measured once.

The result is an estimate, from medians of a few calls over random keys, which on a CPU are in no cache, as after the
weights and the other layers of a step; it changes what is read below it, and so the
output there: dense. It is kept in `costs.json` of the cache folder (`io.caches`), one entry for everything that it
depends on. On a GPU the calls of one layer are timed one by one, while a decode step may replay a graph: sparse
attention then pays earlier than this says. What error bounds and strict mode cost is left out.
"""

import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from eps_core.attention.layer import collect, sparse_attention
from eps_core.attention.protocol import Array, Backend
from eps_core.config.cache import CacheSpec
from eps_core.config.eps import EpsConfig
from eps_core.cpu import host
from eps_core.errors import ConfigError
from eps_core.io import caches, inputs
from eps_core.io.records import Count, Positive, read_record
from eps_core.kv_cache.step_plan import StepPlan
from eps_core.load import backend_name, resolve_kernels
from eps_core.metrics.provenance import package_version

CONTEXTS = (2048, 8192, 32768)  # tokens
ROUNDS = 7  # of which the median is taken
ROUND_UP = 256  # tokens: finer is noise
MAX_SECONDS = 6.0  # no further context is begun after that
FILL_TOKENS = 2048  # written at a time


@dataclass(frozen=True)
class Cost:
    """Median milliseconds of one layer's attention at each of `contexts` tokens, one sequence."""

    contexts: tuple[Count, ...]
    dense_ms: tuple[Positive, ...]
    sparse_ms: tuple[Positive, ...]  # score, select and attend

    @property
    def min_context(self) -> int | None:
        """Tokens from which sparse attention pays, by straight lines between neighbouring contexts; None: never."""
        saved = np.subtract(self.dense_ms, self.sparse_ms)
        paying = saved > 0
        first = len(saved) - int(np.argmin(paying[::-1])) if not paying.all() else 0
        if first == 0:
            return 0
        low, high = (first - 1, first) if first < len(saved) else (first - 2, first - 1)
        if low < 0:
            return None  # one context tells no slope
        slope = (saved[high] - saved[low]) / (self.contexts[high] - self.contexts[low])
        if slope <= 0:
            return None
        at = self.contexts[low] - saved[low] / slope
        return int(-(-at // ROUND_UP) * ROUND_UP)


def pays_from(config: EpsConfig, cost: Cost) -> int | None:
    """Tokens from which a step reads less than a dense one and takes less time; None: from none on."""
    if cost.min_context is None or config.sparse_from is None:
        return None
    return max(cost.min_context, config.sparse_from)


def measure(
    backend: Backend, device: str, kernels: str, spec: CacheSpec, num_heads: int, config: EpsConfig, max_context: int,
    whole_steps: bool = False,
) -> Cost:  # fmt: skip
    """Times one layer of `spec`'s shape, with `num_heads` query heads, at contexts up to `max_context`: as it is
    called, or with `whole_steps` as steps repeat it that are one call, where the backend has such."""
    contexts = [context for context in CONTEXTS if context <= max_context] or [max_context]
    sparse = config.replace(min_context=0, head_modes=None)
    rng, started = np.random.default_rng(0), time.perf_counter()
    on_cpu = backend.device_name(device) == host.host_name()
    flush = host.flusher(host.flush_bytes(host.last_cache_bytes(device)), device) if on_cpu else lambda: None

    def variants(context: int) -> tuple[Callable[[], Any], ...]:
        """(dense, sparse) calls over a filled cache; each waits for its result."""
        units = -(-context // sparse.cache_config.unit_tokens)
        one = replace(spec, num_layers=1, num_units=units, max_open_groups=1)
        cache = backend.new_cache(one, sparse.cache_config, device, kernels)

        def random(*shape: int) -> Array:
            return backend.from_numpy(rng.standard_normal(shape, np.float32), spec.dtype, device)

        for start in range(0, context, FILL_TOKENS):
            slots = np.arange(start, min(start + FILL_TOKENS, context))
            k, v = (random(len(slots), spec.num_kv_heads, spec.head_dim) for _ in range(2))
            cache = backend.write_kv(cache, 0, k, v, slots)
        q = random(1, num_heads, spec.head_dim)
        place = np.arange(units, dtype=np.int32)[None], np.array([context])
        plans = StepPlan.dense(sparse.cache_config, *place), StepPlan.of(sparse, *place)
        ready_layer = backend.kernel_of(cache, "ready_layer") if whole_steps else None
        if ready_layer is not None:
            ready = tuple(ready_layer(cache, 0, q, plan) for plan in plans)
            if None not in ready:
                return ready

        def dense_call() -> None:
            out, _ = backend.attend(cache, 0, q, StepPlan.dense(sparse.cache_config, *place), None)
            collect(backend, cache, [], out)

        def sparse_call() -> None:
            out, read = sparse_attention(backend, cache, 0, q, StepPlan.of(sparse, *place))
            collect(backend, cache, [read], out)

        return dense_call, sparse_call

    rows: list[tuple[int, float, float]] = []
    for context in contexts:
        if rows and time.perf_counter() - started > MAX_SECONDS:
            break
        dense_ms, sparse_ms = _medians(variants(context), flush)
        # where the budget covers the context a sparse step is a dense one, and saves nothing
        rows.append((context, dense_ms, dense_ms if sparse.reads_all(0, [context]) else sparse_ms))
    return Cost(*zip(*rows, strict=True))  # type: ignore[arg-type]


def _medians(variants: Sequence[Callable[[], Any]], flush: Callable[[], None]) -> tuple[float, ...]:
    """Milliseconds of each variant, alternating, after two calls that warm up, each after a flush."""
    times: list[list[float]] = [[] for _ in variants]
    for index in range(2 + ROUNDS):
        for variant, taken in zip(variants, times, strict=True):
            flush()
            started = time.perf_counter()
            variant()
            if index >= 2:
                taken.append(1000 * (time.perf_counter() - started))
    return tuple(float(np.median(taken)) for taken in times)


def costs_path() -> Path | None:
    folder = caches.folder()
    return None if folder is None else folder / "costs.json"


def cost_of(
    backend: Backend, device: str, kernels: str, spec: CacheSpec, num_heads: int, config: EpsConfig, max_context: int,
    whole_steps: bool = False,
) -> tuple[Cost, bool]:  # fmt: skip
    """(cost, whether it was kept from an earlier run): measured the first time, and kept. A store that cannot be read
    or written is as none: the next run measures again."""
    settled = config.replace(min_context=0, head_modes=None).to_dict()
    key = json.dumps(
        {
            "backend": backend_name(backend),
            "device": backend.device_name(device),
            "kernels": resolve_kernels(kernels, backend.usable_kernels(device), device),
            "versions": {
                **backend.versions(),
                "eps": package_version(),
                **{name: package_version(name) for name in ("numba", "triton")},
            },
            "threads": [os.cpu_count(), *(os.environ.get(f"{name}_NUM_THREADS") for name in ("OMP", "NUMBA"))],
            "shape": [num_heads, spec.num_kv_heads, spec.head_dim, spec.dtype, spec.k_bits, spec.v_bits],
            "max_context": min(max_context, CONTEXTS[-1]),
            "config": settled,
            "whole_steps": whole_steps,
            "measured": 7,  # raised when something else is measured
        },
        sort_keys=True,
    )
    path = costs_path()
    kept: dict[str, Any] = {}
    with suppress(ConfigError):
        kept = {} if path is None else inputs.read_object(path, "costs", "remove it")
    with suppress(ConfigError):
        found = read_record(Cost, kept.get(key), str(path), "remove it")
        rising = found.contexts and list(found.contexts) == sorted(set(found.contexts))
        if rising and len(found.contexts) == len(found.dense_ms) == len(found.sparse_ms):
            return found, True
    cost = measure(backend, device, kernels, spec, num_heads, config, max_context, whole_steps)
    if path is not None:
        caches.keep(path, json.dumps({**kept, key: asdict(cost)}).encode())
    return cost, False
