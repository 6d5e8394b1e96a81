"""The oracle's cache. K and V lie in the cache's dtype (bfloat16 through ml_dtypes); every statistic is computed in
float64 from what lies there."""

import platform
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np

from eps_core.backend.moves import unit_arrays
from eps_core.backend.pages import Pool, arrays_of, each
from eps_core.config.cache import CacheConfig, CacheSpec
from eps_core.cpu.host import host_name
from eps_core.errors import ConfigError, overflow
from eps_core.kv_cache.counts import CountsRereads
from eps_core.kv_cache.groups import GroupState, WritePlan
from eps_core.kv_cache.step_plan import check_units
from eps_core.load import resolve_kernels
from eps_core.reference import pages
from eps_core.summaries import base, table
from eps_core.summaries.keys import CENTRE_TOKENS
from eps_core.summaries.table import build_summary

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float64": np.float64}


@dataclass
class Cache(CountsRereads):
    """Paged K and V [P, Hkv, U, D] per layer and, under the same index, the summaries [P, Hkv, U/S, ...], S the tokens
    that are summarised together (`CacheConfig.span_tokens`)."""

    spec: CacheSpec
    cache_config: CacheConfig
    device: str
    k: list[Pool]
    v: list[Pool]
    summaries: list[dict[str, np.ndarray]] = field(default_factory=list)
    state: list[GroupState] = field(default_factory=list)
    # running statistics of partial groups [slots, Hkv, ..] float64
    open: list[dict[str, np.ndarray]] = field(default_factory=list)
    centroid: list[np.ndarray | None] = field(default_factory=list)  # of key codes: [Hkv, D] float16, after 256 keys
    early: list[np.ndarray] = field(default_factory=list)  # the keys until then [<256, Hkv, D]
    fixed: list[base.Constants] = field(default_factory=list)  # see `summaries.table.constants`
    # with bounds: the largest |k| and |v| that each kv head ever held, [Hkv]
    largest_key: list[np.ndarray] = field(default_factory=list)
    largest_value: list[np.ndarray] = field(default_factory=list)
    bound: "Cache | None" = None  # the summaries that bound, over the same K and V, where they are other ones
    tokens_reread: int = 0
    kernels: str = "arrays"

    def constants(self, layer: int, head: int) -> base.Constants:
        """Return the constants that builders and scorers of one kv head need besides keys."""
        values = {name: array if name == "signs" else array[head] for name, array in self.fixed[layer].items()}
        centroid = self.centroid[layer]
        return values if centroid is None else values | {"centre": centroid[head]}


def device_name(device: str = "cpu") -> str:
    return host_name()


def usable_kernels(device: str = "cpu") -> list[str]:
    """The oracle has numpy alone."""
    return ["arrays"]


def kernel_of(cache: Cache, name: str) -> None:
    return None


def new_cache(spec: CacheSpec, cache_config: CacheConfig, device: str = "cpu", kernels: str = "auto") -> Cache:
    """An empty cache. With method off no summary, state or constant is allocated."""
    if device != "cpu":
        raise ConfigError(f"device {device!r} is not one of the numpy backend's: use --device cpu")
    resolve_kernels(kernels, usable_kernels(device), device)
    shape = (spec.num_units, spec.num_kv_heads, cache_config.unit_tokens, spec.head_dim)
    dtype = DTYPES[spec.dtype]
    layers = range(spec.num_layers)
    cache = Cache(
        spec,
        cache_config,
        device,
        k=[pages.new_pool(shape, dtype, spec.k_bits) for _ in layers],
        v=[pages.new_pool(shape, dtype, spec.v_bits) for _ in layers],
    )
    if cache_config.bound_bits:
        cache.bound = Cache(spec, cache_config.bound_store, device, cache.k, cache.v)
    for one in cache.parts():
        check_units(cache_config, one.cache_config)
        _add_summaries(one)
    return cache


def _add_summaries(cache: Cache) -> None:
    """Everything that a method keeps besides K and V, still empty."""
    spec, cache_config, layers = cache.spec, cache.cache_config, range(cache.spec.num_layers)
    pool = (spec.num_units, spec.num_kv_heads, cache_config.spans_per_unit)
    stored, running = table.fields(cache_config, spec.head_dim), table.running(cache_config, spec.head_dim)
    cache.summaries = [{name: np.zeros((*pool, *one.shape), one.dtype) for name, one in stored.items()} for _ in layers]
    cache.state = [GroupState(spec.num_units, cache_config, spec.max_open_groups) for _ in layers]
    slots = (spec.max_open_groups, spec.num_kv_heads)
    cache.open = [{name: np.zeros((*slots, *one.shape)) for name, one in running.items()} for _ in layers]
    cache.centroid = [None for _ in layers]
    cache.early = [np.zeros((0, spec.num_kv_heads, spec.head_dim)) for _ in layers]
    if cache_config.has_bounds:
        cache.largest_key = [np.zeros(spec.num_kv_heads) for _ in layers]
        cache.largest_value = [np.zeros(spec.num_kv_heads) for _ in layers]
    cache.fixed = [table.constants(cache_config, layer, spec.num_kv_heads, spec.head_dim) for layer in layers]


def write_kv(cache: Cache, layer: int, k: np.ndarray, v: np.ndarray, slots: np.ndarray) -> Cache:
    """Writes k, v [N, Hkv, D] to pool slots [N] and brings the summaries of the touched groups up to date: a group is
    valid again when its last slot is written. Raises ConfigError on NaN or Inf in K, before anything is written."""
    units, offsets = np.divmod(slots, cache.cache_config.unit_tokens)
    with np.errstate(over="ignore"):  # an overflow to Inf is what the next lines refuse
        own, others = k.astype(DTYPES[cache.spec.dtype]), v.astype(DTYPES[cache.spec.dtype])
    stored, values = pages.held(cache.k[layer], own), pages.held(cache.v[layer], others)
    if not np.isfinite(stored).all():
        raise overflow(f"K of layer {layer}", cache.spec.dtype)
    pages.write(cache.k[layer], units, offsets, own)
    pages.write(cache.v[layer], units, offsets, others)
    return _written(cache, layer, stored, values, slots)


def _written(cache: Cache, layer: int, stored: np.ndarray, values: np.ndarray, slots: np.ndarray) -> Cache:
    """Brings everything that is kept besides K and V up to date with rows [N, Hkv, D] as the pools hold them."""
    if cache.cache_config.has_bounds and len(slots):
        for largest, array in ((cache.largest_key, stored), (cache.largest_value, values)):
            largest[layer] = np.maximum(largest[layer], _largest_norm(array, axis=0))
    for one in cache.parts():
        plan = one.state[layer].plan(slots)
        if one.summaries[layer]:
            _update_summaries(one, layer, stored.astype(np.float64), plan)
    return cache


def _largest_norm(rows: np.ndarray, axis: int | tuple[int, ...]) -> np.ndarray:
    """Return the largest norm of rows [.., D], over the axes of their tokens."""
    norm = np.linalg.norm(rows.astype(np.float64), axis=-1)
    largest: np.ndarray = np.nan_to_num(norm, nan=np.inf, posinf=np.inf).max(axis=axis, initial=0)
    return largest


def write_kv_tentative(cache: Cache, layer: int, k: np.ndarray, v: np.ndarray, slots: np.ndarray) -> Cache:
    """Writes k, v [N, Hkv, D] to pool slots [N] and nothing else: of what lies there no summary speaks until `write_kv`
    writes it again. For tokens that may be taken back; NaN and Inf are kept as they are."""
    units, offsets = np.divmod(slots, cache.cache_config.unit_tokens)
    with np.errstate(over="ignore"):
        for pool, rows in ((cache.k, k), (cache.v, v)):
            pages.write(pool[layer], units, offsets, rows.astype(DTYPES[cache.spec.dtype]))
    for one in cache.parts():
        one.state[layer].invalidate(slots)
    return cache


def move_kv(cache: Cache, layer: int, src: np.ndarray, dst: np.ndarray) -> Cache:
    """Copies what slots src [N] hold to slots dst [N], as it is held, and brings the summaries of the groups written to
    up to date."""
    source, target = (np.divmod(slots, cache.cache_config.unit_tokens) for slots in (src, dst))
    for pool in (cache.k[layer], cache.v[layer]):
        pages.move(pool, source, target)
    k, v = (pages.rows_of(pool[layer], target[0], slice(None), target[1]) for pool in (cache.k, cache.v))
    return _written(cache, layer, k, v, dst)


def _update_summaries(cache: Cache, layer: int, keys: np.ndarray, plan: WritePlan) -> None:
    if not cache.can_encode(layer):
        early = np.concatenate([cache.early[layer], keys])[:CENTRE_TOKENS]
        cache.early[layer] = early
        if len(early) < CENTRE_TOKENS:
            return
        cache.centroid[layer] = early.mean(axis=0).astype(np.float16)
        cache.early[layer] = early[:0]
        state = cache.state[layer]
        for group in np.flatnonzero(state.valid(np.arange(len(state.fill)))):
            _finalize(cache, layer, int(group), _stored_group(cache, layer, int(group), group not in plan.full_groups))
        return
    for group, tokens in zip(plan.full_groups, plan.full_tokens, strict=True):
        _finalize(cache, layer, int(group), keys[tokens])
    for i, group in enumerate(plan.part_groups):
        _extend(cache, layer, int(group), keys[plan.part_tokens[i][plan.part_tokens[i] >= 0]], plan, i)


def _extend(cache: Cache, layer: int, group: int, keys: np.ndarray, plan: WritePlan, i: int) -> None:
    """Some keys [n, Hkv, D] of a group that this call does not write whole. A method that follows partial groups adds
    them to its statistics, which lie beside the pool or are the summary itself; the others read the group back once it
    is full."""
    cache_config, before, slot = cache.cache_config, int(plan.part_before[i]), int(plan.part_open[i])
    method = table.METHODS[cache_config.method]
    if not cache_config.method_spec.follows or slot < 0:
        if plan.finalized[i]:
            _finalize(cache, layer, group, _stored_group(cache, layer, group, reread=True))
        return
    beside, (unit, sub) = cache.open[layer], divmod(group, cache_config.spans_per_unit)
    for head in range(cache.spec.num_kv_heads):
        place, kept = ((slot, head), beside) if beside else ((unit, head, sub), cache.summaries[layer])
        earlier = {name: array[place] for name, array in kept.items()}
        statistics = method.extend(cache_config, cache.constants(layer, head), earlier, keys[:, head], before)
        for name, value in statistics.items():
            kept[name][place] = value
        if beside and plan.finalized[i]:
            _store(cache, layer, group, head, method.finalize(cache_config, statistics))


def _stored_group(cache: Cache, layer: int, group: int, reread: bool) -> np.ndarray:
    """K of one full group [S, Hkv, D] float64, read from the cache; `reread` counts its bytes."""
    unit, sub = divmod(group, cache.cache_config.spans_per_unit)
    size = cache.cache_config.span_tokens
    stored = pages.rows_of(cache.k[layer], unit, slice(None), slice(sub * size, (sub + 1) * size))
    if reread:
        cache.tokens_reread += size
    return stored.astype(np.float64).swapaxes(0, 1)


def _finalize(cache: Cache, layer: int, group: int, keys: np.ndarray) -> None:
    for head in range(cache.spec.num_kv_heads):
        summary = build_summary(cache.cache_config, cache.constants(layer, head), keys[:, head])
        _store(cache, layer, group, head, summary)


def _store(cache: Cache, layer: int, group: int, head: int, summary: base.Summary) -> None:
    unit, sub = divmod(group, cache.cache_config.spans_per_unit)
    for name, value in summary.items():
        cache.summaries[layer][name][unit, head, sub] = value


def copy_units(cache: Cache, src: Sequence[int], dst: Sequence[int]) -> Cache:
    """Copies whole units with their summaries and partial groups: copy-on-write of a forked sequence's open unit."""
    for layer in range(cache.spec.num_layers):
        for pool in (*arrays_of(cache.k[layer]), *arrays_of(cache.v[layer])):
            pool[list(dst)] = pool[list(src)]
        for one in cache.parts():
            for pool in one.summaries[layer].values():
                pool[list(dst)] = pool[list(src)]
            for source, target in zip(src, dst, strict=True):
                for src_open, dst_open in one.state[layer].copy(source, target):
                    for running in one.open[layer].values():
                        running[dst_open] = running[src_open]
    return cache


def export_units(cache: Cache, units: Sequence[int]) -> dict[str, np.ndarray]:
    """Return the contents of units [M] as held: name -> [M, ..] on the host, bfloat16 as ml_dtypes' own; under `heads.`
    what else kv heads have: the largest norms of these units' K and V behind bounds, [Hkv], and the centroid of key
    codes, [Hkv, D], zeros without one. Of no unit: the names, shapes and dtypes that `import_units` of such a cache
    takes."""
    index = np.asarray(units, np.int64)
    found = {name: array[index] for name, array in unit_arrays(cache).items()}
    for layer in range(cache.spec.num_layers):
        if cache.bound is not None:
            centroid = cache.bound.centroid[layer]
            empty = np.zeros((cache.spec.num_kv_heads, cache.spec.head_dim), np.float16)
            found[f"heads.{layer}.bound.centre"] = empty if centroid is None else centroid
        if cache.cache_config.has_bounds:
            for name, pool in (("key", cache.k[layer]), ("value", cache.v[layer])):
                found[f"heads.{layer}.largest_{name}"] = _largest_norm(pages.rows_of(pool, index), axis=(0, 2))
    return found


def import_units(cache: Cache, units: Sequence[int], arrays: dict[str, np.ndarray]) -> Cache:
    """Puts what `export_units` gave of a cache of the same store into units [M], which are full then: their groups are
    valid, and nothing is computed. A cache that takes a centroid must have none, or the same."""
    index = np.asarray(units, np.int64)
    for name, array in unit_arrays(cache).items():
        array[index] = arrays[name]
    for layer in range(cache.spec.num_layers):
        if cache.bound is not None:
            cache.bound.centroid[layer] = arrays[f"heads.{layer}.bound.centre"]
        for one in cache.parts():
            per_unit = one.cache_config.spans_per_unit
            groups = (index[:, None] * per_unit + np.arange(per_unit)).ravel()
            one.state[layer].mark_written(groups, np.full(len(groups), one.cache_config.span_tokens))
        if cache.cache_config.has_bounds:
            for name, largest in (("key", cache.largest_key), ("value", cache.largest_value)):
                largest[layer] = np.maximum(largest[layer], arrays[f"heads.{layer}.largest_{name}"])
    return cache


def grow(cache: Cache, num_units: int) -> Cache:
    """Room for `num_units` units in all; what the cache holds stays where it is."""

    def longer(pool: np.ndarray) -> np.ndarray:
        return np.concatenate([pool, np.zeros((num_units - len(pool), *pool.shape[1:]), pool.dtype)])

    for pools in (cache.k, cache.v):  # which bounds share
        pools[:] = [each(pool, longer) for pool in pools]
    for one in (cache, cache.bound):
        if one is not None:
            one.spec = replace(one.spec, num_units=num_units)
            one.summaries = [{name: longer(pool) for name, pool in fields.items()} for fields in one.summaries]
            for state in one.state:
                state.grow(num_units)
    return cache


def read_kv(cache: Cache, layer: int, table: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """K, V [length, Hkv, D] of one sequence, copied out of the pool in token order: table [M]."""
    units, offsets = np.divmod(np.arange(length), cache.cache_config.unit_tokens)
    k, v = (pages.rows_of(pool[layer], table[units], slice(None), offsets) for pool in (cache.k, cache.v))
    return k, v


def span(name: str, cache: Cache) -> AbstractContextManager[Any]:
    return nullcontext()


def take(cache: Cache, array: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Rows [N, ..] of an array [T, ..]: index [N], host."""
    return array[index]


def wait(cache: Cache, *arrays: np.ndarray) -> None:
    """numpy computes at once."""


def to_host(cache: Cache, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    return list(arrays)


def check_finite(cache: Cache) -> None:
    """Nothing to do: this backend refuses NaN and Inf in K at the write."""


def to_numpy(array: np.ndarray) -> np.ndarray:
    return np.asarray(array)


def from_numpy(array: np.ndarray, dtype: str, device: str = "cpu") -> np.ndarray:
    return array.astype(DTYPES[dtype])


def devices() -> list[str]:
    return ["cpu"]


def versions() -> dict[str, str]:
    return {"numpy": np.__version__, "python": platform.python_version()}
