"""MLX's cache (`eps_core.backend.cache`): how it is made and grown, and what computes what MLX has put off.

MLX writes a slice in place only where no other reference to the buffer exists: no view of the cache outlives a call
here, and `evaluate` must run once per chunk or step so that no un-evaluated reader pins an old buffer. With Metal
kernels decode steps write no pool (`open_units`).
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np

from eps_core.backend import cache as shared
from eps_core.backend import moves, pages
from eps_core.backend.ops import Ops
from eps_core.config.cache import CacheConfig, CacheSpec
from eps_core.load import resolve_kernels
from eps_mlx.device import device_of, devices
from eps_mlx.kernels.choose import usable_kernels
from eps_mlx.open_units import OpenUnits, Pools
from eps_mlx.ops import OPS


@dataclass
class Cache(shared.ArrayCache):
    ops: ClassVar[Ops] = OPS

    k: Any  # `Pools`
    v: Any

    @property
    def stream(self) -> mx.Device:
        return device_of(self.device)


def new_cache(spec: CacheSpec, cache_config: CacheConfig, device: str = "auto", kernels: str = "auto") -> Cache:
    """An empty cache. With method off no summary, state or constant is allocated. `kernels` changes speed only: auto,
    or one of `usable_kernels`."""
    place = device_of(device)
    device = devices()[-1] if device == "auto" else device
    kernels = resolve_kernels(kernels, usable_kernels(device), device)
    with mx.stream(place):
        shape = (spec.num_units, spec.num_kv_heads, cache_config.unit_tokens, spec.head_dim)
        layers = range(spec.num_layers)
        formats = spec.k_bits, spec.v_bits
        k, v = ([pages.new_pool(OPS, device, shape, spec.dtype, bits) for _ in layers] for bits in formats)
        opened = OpenUnits(k, v, device)
        cache = Cache(
            spec,
            cache_config,
            device,
            Pools(opened, 0),
            Pools(opened, 1),
            finite=[mx.array(True) for _ in layers],
            kernels=kernels,
        )
        shared.add_all_summaries(cache)
        evaluate(cache)
    return cache


def pending(cache: Cache) -> list[mx.array]:
    """Return all state that a write or a read may have left to be computed."""
    arrays = cache.k.opened.arrays() + cache.finite
    for one in cache.parts():
        arrays += [array for fields in (*one.summaries, *one.open) for array in fields.values()]
        arrays += [array for keys in one.early for array in keys]
        arrays += [*one.valid, *one.largest_key, *one.largest_value]
    return arrays


def evaluate(cache: Cache, *others: mx.array) -> None:
    """Computes all pending state, once per chunk or step: from here on the cache owns its buffers alone."""
    mx.eval(pending(cache), *others)


def span(name: str, cache: Cache) -> AbstractContextManager[Any]:
    """A range for profilers: MLX has none."""
    return nullcontext()


def to_host(cache: Cache, arrays: Sequence[mx.array]) -> list[np.ndarray]:
    """Arrays on the host, computed together with the cache's pending writes."""
    # bfloat16, which numpy lacks, as float32
    arrays = [array.astype(mx.float32) if array.dtype == mx.bfloat16 else array for array in arrays]
    evaluate(cache, *arrays)
    return [np.array(array) for array in arrays]


def read_kv(cache: Cache, layer: int, table: np.ndarray, length: int) -> tuple[mx.array, mx.array]:
    """See `eps_core.backend.cache.read_kv`. Open units stay open: an engine's own attention asks in every step."""
    opened: OpenUnits = cache.k.opened
    units = np.asarray(table)[: -(-length // cache.cache_config.unit_tokens)]
    own = opened.places(layer, units) - cache.spec.num_units  # rows of `held`
    is_open = np.flatnonzero(own >= 0)
    with mx.stream(cache.stream):
        k, v = (pages.units_of(OPS, pools[layer], units, sliced=False) for pools in opened.pools)
        if len(is_open):
            for array, held in zip((k, v), opened.held[layer], strict=True):
                array[OPS.index(cache, is_open)] = held[OPS.index(cache, own[is_open])]
        return OPS.by_token(k, length), OPS.by_token(v, length)


def grow(cache: Cache, num_units: int) -> Cache:
    """Room for `num_units` units in all; what the cache holds stays where it is."""
    shared.grow(OPS, cache, num_units)
    evaluate(cache)
    return cache


def import_units(cache: Cache, units: Sequence[int], arrays: dict[str, np.ndarray]) -> Cache:
    """See `eps_core.backend.moves.import_units`."""
    moves.import_units(OPS, cache, units, arrays)
    evaluate(cache)
    return cache
