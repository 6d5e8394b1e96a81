"""Rows and units that are copied as they are held: within the pools (compaction, copy-on-write of forks), to and from
the host; and what drafts selected."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from eps_core.attention.protocol import Array, Selection
from eps_core.backend import pages
from eps_core.backend.cache import largest_norm, mark_valid, written
from eps_core.backend.ops import Ops
from eps_core.backend.selection import selection_mask

NORM_UNITS = 64  # whose norms are computed at a time: in float32


def move_kv(ops: Ops, cache: Any, layer: int, src: np.ndarray, dst: np.ndarray) -> Any:
    """Copies what slots src [N] (host) hold to slots dst [N] (host), as it is held, and brings the summaries of the
    groups written to up to date."""
    ops.settle(cache, layer)
    with ops.place(cache):
        source, target = (
            [ops.index(cache, part) for part in np.divmod(np.asarray(slots, np.int64), cache.cache_config.unit_tokens)]
            for slots in (src, dst)
        )
        keys, values = (pages.move(ops, pool[layer], source, target) for pool in (cache.k, cache.v))
    return written(ops, cache, layer, keys, values, np.asarray(dst, np.int64))


def copy_units(ops: Ops, cache: Any, src: Sequence[int], dst: Sequence[int]) -> Any:
    """Copies whole units with their summaries and partial groups: copy-on-write of a forked sequence's open unit."""
    if len(src) != len(dst):
        raise ValueError(f"{len(src)} source units for {len(dst)} target units: give one target per source")
    if not len(src):
        return cache
    ops.settle(cache, 0)
    with ops.place(cache):
        source, target = (ops.index(cache, np.asarray(units)) for units in (src, dst))
        for layer in range(cache.spec.num_layers):
            for pool in (*pages.arrays_of(cache.k[layer]), *pages.arrays_of(cache.v[layer])):
                pool[target] = pool[source]
            for one in cache.parts():
                for pool in one.summaries[layer].values():
                    pool[target] = pool[source]
                for from_unit, to_unit in zip(src, dst, strict=True):
                    for from_open, to_open in one.state[layer].copy(from_unit, to_unit):
                        for running in one.open[layer].values():
                            running[to_open] = running[from_open]
                    per_unit = one.cache_config.spans_per_unit
                    mark_valid(ops, one, layer, to_unit * per_unit + np.arange(per_unit))
    return cache


def unit_arrays(cache: Any) -> dict[str, Array]:
    """Everything of the cache that lies by pool units, [P, ..], by name: K, V (codes and scales), summaries."""
    found: dict[str, Array] = {}
    for layer in range(cache.spec.num_layers):
        for name, pool in (("k", cache.k[layer]), ("v", cache.v[layer])):
            found |= {f"layers.{layer}.{name}.{i}": array for i, array in enumerate(pages.arrays_of(pool))}
        for kind, one in (("summary", cache), ("bound", cache.bound)):
            if one is not None and one.cache_config.enabled:
                found |= {f"layers.{layer}.{kind}.{name}": pool for name, pool in one.summaries[layer].items()}
    return found


def export_units(ops: Ops, cache: Any, units: Sequence[int]) -> dict[str, np.ndarray]:
    """Return the data of units [M], as held: name -> [M, ..] on the host, bfloat16 as ml_dtypes' own; under `heads.`
    what else kv heads have: the largest norms of these units' K and V behind bounds, [Hkv], and the centroid of key
    codes, [Hkv, D], zeros without one. Of no unit: the names, shapes and dtypes that `import_units` of such a cache
    takes."""
    unit_tokens = cache.cache_config.unit_tokens
    with ops.place(cache):
        index = ops.index(cache, np.asarray(units, np.int64))
        found = {name: ops.host(array[index]) for name, array in unit_arrays(cache).items()}
        for layer in range(cache.spec.num_layers):
            if cache.bound is not None:
                found[f"heads.{layer}.bound.centre"] = ops.host(cache.bound.constants(layer)["centre"])
            if cache.cache_config.has_bounds:
                held = {"key": (cache.k, cache.largest_key), "value": (cache.v, cache.largest_value)}
                for name, (pool, largest) in held.items():
                    parts = [
                        np.asarray(units[start : start + NORM_UNITS]) for start in range(0, len(units), NORM_UNITS)
                    ]
                    rows = (pages.in_order(ops, pool[layer], part, len(part) * unit_tokens) for part in parts)
                    norms = [ops.host(largest_norm(ops, one)) for one in rows] or [ops.host(largest[layer])]
                    found[f"heads.{layer}.largest_{name}"] = np.maximum.reduce(norms)
    return found


def import_units(ops: Ops, cache: Any, units: Sequence[int], arrays: dict[str, np.ndarray]) -> Any:
    """Puts what `export_units` gave of a cache of the same store into units [M], which are full then: their groups are
    valid, and nothing is computed. A cache that takes a centroid must have none, or the same."""
    ops.settle(cache, 0)
    numbers = np.asarray(units, np.int64)
    with ops.place(cache):
        index = ops.index(cache, numbers)
        for name, array in unit_arrays(cache).items():
            array[index] = ops.native(cache, arrays[name])
        for layer in range(cache.spec.num_layers):
            if cache.bound is not None:
                cache.bound.centroid[layer] = ops.native(cache, arrays[f"heads.{layer}.bound.centre"])
            for one in cache.parts():
                per_unit = one.cache_config.spans_per_unit
                groups = (numbers[:, None] * per_unit + np.arange(per_unit)).ravel()
                one.state[layer].mark_written(groups, np.full(len(groups), one.cache_config.span_tokens))
                mark_valid(ops, one, layer, groups)
            if cache.cache_config.has_bounds:
                for name, largest in (("key", cache.largest_key), ("value", cache.largest_value)):
                    stored = ops.native(cache, arrays[f"heads.{layer}.largest_{name}"])
                    largest[layer] = ops.maximum(largest[layer], stored)
    return cache


def take(ops: Ops, cache: Any, array: Array, index: np.ndarray) -> Array:
    """Rows [N, ..] of an array [T, ..]: index [N], host."""
    with ops.place(cache):
        return ops.gather_rows(array, ops.index(cache, np.asarray(index)))


def visits(ops: Ops, cache: Any, drafts: Sequence[tuple[Selection, int] | None], num_groups: int) -> Array:
    """Return what T steps selected, [T, Hkv, G] bool: each a selection and one of its sequences, None for all."""
    with ops.place(cache):
        every = ops.full(cache, (cache.spec.num_kv_heads, num_groups), True)
        masks = (every if one is None else selection_mask(ops, one[0], num_groups)[one[1]] for one in drafts)
        return ops.stack(list(masks))
