"""Rows and units that are copied as they are held: within the pools (compaction, copy-on-write of forks), to and from
the host."""

from collections.abc import Sequence

import ml_dtypes
import mlx.core as mx
import numpy as np

from eps_mlx import pages
from eps_mlx.cache import Cache, evaluate, mark_valid, written
from eps_mlx.kernels.choose import kernels_of


def move_kv(cache: Cache, layer: int, src: np.ndarray, dst: np.ndarray) -> Cache:
    """Copies what slots src [N] (host) hold to slots dst [N] (host), as it is held, and brings the summaries of the
    groups written to up to date."""
    settle = kernels_of(cache.kernels).settle
    if settle is not None:
        settle()
    with mx.stream(cache.stream):
        source, target = (
            [mx.array(part.astype(np.int32)) for part in np.divmod(slots, cache.cache_config.unit_tokens)]
            for slots in (src, dst)
        )
        keys, values = (pages.move(pool[layer], source, target) for pool in (cache.k, cache.v))
    return written(cache, layer, keys, values, np.asarray(dst, np.int64))


def copy_units(cache: Cache, src: Sequence[int], dst: Sequence[int]) -> Cache:
    """Copies whole units with their summaries and partial groups: copy-on-write of a forked sequence's open unit."""
    if len(src) != len(dst):
        raise ValueError(f"{len(src)} source units for {len(dst)} target units: give one target per source")
    if not len(src):
        return cache
    with mx.stream(cache.stream):
        source, target = mx.array(list(src), mx.int32), mx.array(list(dst), mx.int32)
        for layer in range(cache.spec.num_layers):
            for pool in (*pages.arrays_of(cache.k[layer]), *pages.arrays_of(cache.v[layer])):
                pool[target] = pool[source]
            for one in (cache, cache.bound, cache.correction):
                if one is None or not one.cache_config.enabled:
                    continue
                for pool in one.summaries[layer].values():
                    pool[target] = pool[source]
                for from_unit, to_unit in zip(src, dst, strict=True):
                    for from_open, to_open in one.state[layer].copy(from_unit, to_unit):
                        for running in one.open[layer].values():
                            running[to_open] = running[from_open]
                    per_unit = one.cache_config.spans_per_unit
                    mark_valid(one, layer, to_unit * per_unit + np.arange(per_unit))
    return cache


def _unit_arrays(cache: Cache) -> dict[str, mx.array]:
    """Everything of the cache that lies by pool units, [P, ..], by name: K, V (codes and scales), summaries."""
    found: dict[str, mx.array] = {}
    for layer in range(cache.spec.num_layers):
        for name, pool in (("k", cache.k[layer]), ("v", cache.v[layer])):
            found |= {f"layers.{layer}.{name}.{i}": array for i, array in enumerate(pages.arrays_of(pool))}
        for kind, one in (("summary", cache), ("bound", cache.bound), ("correction", cache.correction)):
            if one is not None and one.cache_config.enabled:
                found |= {f"layers.{layer}.{kind}.{name}": pool for name, pool in one.summaries[layer].items()}
    return found


def export_units(cache: Cache, units: Sequence[int]) -> dict[str, np.ndarray]:
    """Return the data of units [M], as held: name -> [M, ..] on the host, bfloat16 as ml_dtypes' own; under `heads.`
    what else kv heads have: the largest norms behind bounds, [Hkv], and the centroid of key codes, [Hkv, D], zeros
    without one. Of no unit: the names, shapes and dtypes that `import_units` of such a cache takes."""
    with mx.stream(cache.stream):
        index = mx.array(list(units), mx.int32)
        found = {name: _held(array[index]) for name, array in _unit_arrays(cache).items()}
        for layer in range(cache.spec.num_layers):
            if cache.bound is not None:
                found[f"heads.{layer}.bound.centre"] = _held(cache.bound.constants(layer)["centre"])
            if cache.cache_config.has_bounds:
                for name, largest in (("key", cache.largest_key), ("value", cache.largest_value)):
                    found[f"heads.{layer}.largest_{name}"] = _held(largest[layer])
    return found


def import_units(cache: Cache, units: Sequence[int], arrays: dict[str, np.ndarray]) -> Cache:
    """Puts what `export_units` gave of a cache of the same store into units [M], which are full then: their groups are
    valid, and nothing is computed. A cache that takes a centroid must have none, or the same."""
    settle = kernels_of(cache.kernels).settle
    if settle is not None:
        settle()
    numbers = np.asarray(units, np.int64)
    with mx.stream(cache.stream):
        index = mx.array(numbers.astype(np.int32))
        for name, array in _unit_arrays(cache).items():
            array[index] = _native(arrays[name])
        for layer in range(cache.spec.num_layers):
            if cache.bound is not None:
                cache.bound.centroid[layer] = _native(arrays[f"heads.{layer}.bound.centre"])
            for one in (cache, cache.bound, cache.correction):
                if one is None or not one.cache_config.enabled:
                    continue
                per_unit = one.cache_config.spans_per_unit
                groups = (numbers[:, None] * per_unit + np.arange(per_unit)).ravel()
                one.state[layer].mark_written(groups, np.full(len(groups), one.cache_config.span_tokens))
                mark_valid(one, layer, groups)
            if cache.cache_config.has_bounds:
                for name, largest in (("key", cache.largest_key), ("value", cache.largest_value)):
                    largest[layer] = mx.maximum(largest[layer], _native(arrays[f"heads.{layer}.largest_{name}"]))
        evaluate(cache)
    return cache


def _held(array: mx.array) -> np.ndarray:
    """A host copy in the array's own dtype."""
    if array.dtype == mx.bfloat16:
        return np.array(array.view(mx.uint16)).view(ml_dtypes.bfloat16)
    return np.array(array)


def _native(array: np.ndarray) -> mx.array:
    """A host array, in its own dtype."""
    if array.dtype == ml_dtypes.bfloat16:
        return mx.array(np.ascontiguousarray(array).view(np.uint16)).view(mx.bfloat16)
    return mx.array(array)
