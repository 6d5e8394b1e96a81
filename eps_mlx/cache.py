"""The paged KV cache with its summaries: state as plain data, functions that return it.

K and V lie in `[P, Hkv, U, D]` per layer, summaries in `[P, Hkv, U/S, ..]` under the same pool index, S the tokens that
are summarised together (`CacheConfig.span_tokens`; "group" means these here). MLX writes a slice in place only while
nobody else holds the buffer: no view of the cache outlives a call here, and `evaluate` must run once per chunk or step
so that no un-evaluated reader pins an old buffer.
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import numpy as np

from eps_core.backend.ops import Summary
from eps_core.backend.summaries.base import Part
from eps_core.backend.summaries.table import build_summary, method
from eps_core.config.cache import CacheConfig, CacheSpec
from eps_core.errors import overflow
from eps_core.kv_cache.counts import CountsRereads, check_write
from eps_core.kv_cache.groups import GroupState, WritePlan
from eps_core.kv_cache.step_plan import check_units
from eps_core.load import resolve_kernels
from eps_core.summaries import table
from eps_core.summaries.keys import CENTRE_TOKENS
from eps_mlx import pages
from eps_mlx.device import DTYPES, device_of, devices
from eps_mlx.kernels.choose import kernels_of, usable_kernels
from eps_mlx.ops import OPS


@dataclass
class Cache(CountsRereads):
    """Everything per layer. With method off only `k`, `v` and `finite` are filled."""

    spec: CacheSpec
    cache_config: CacheConfig
    device: str
    k: list[pages.Pool]
    v: list[pages.Pool]
    finite: list[mx.array]  # device bool: no NaN or Inf in any K so far
    summaries: list[Summary] = field(default_factory=list)
    state: list[GroupState] = field(default_factory=list)
    open: list[Summary] = field(default_factory=list)  # running statistics of partial groups [slots, Hkv, ..]
    centroid: list[mx.array | None] = field(default_factory=list)  # of key codes: [Hkv, D] float16, after 256 keys
    early: list[list[mx.array]] = field(default_factory=list)  # the keys until then
    fixed: list[Summary] = field(default_factory=list)  # see `eps_core.summaries.table.constants`
    # with bounds: at least the largest |k| and |v| that each kv head ever held, [Hkv] float32
    largest_key: list[mx.array] = field(default_factory=list)
    largest_value: list[mx.array] = field(default_factory=list)
    bound: "Cache | None" = None  # the summaries that bound, over the same K and V, where they are other ones
    correction: "Cache | None" = None  # mean values: its K is this cache's V
    tokens_reread: int = 0
    kernels: str = "arrays"  # see kernels/choose.py
    # metal: whether each group's summary may be read [P * U / S] uint8, what `state` says on the host
    valid: list[mx.array] = field(default_factory=list)

    @property
    def stream(self) -> mx.Device:
        return device_of(self.device)

    def constants(self, layer: int) -> Summary:
        """Return the arrays that builders and scorers of this layer need besides keys (see summaries/base.py)."""
        if not self.cache_config.needs_centroid:
            return self.fixed[layer]
        centroid = self.centroid[layer]
        if centroid is None:
            centroid = mx.zeros((self.spec.num_kv_heads, self.spec.head_dim), mx.float16)
        return self.fixed[layer] | {"centre": centroid}

    def can_encode(self, layer: int) -> bool:
        """Return whether full groups have summaries: key codes wait for their centroid."""
        return not self.cache_config.needs_centroid or self.centroid[layer] is not None


def new_cache(spec: CacheSpec, cache_config: CacheConfig, device: str = "auto", kernels: str = "auto") -> Cache:
    """An empty cache. With method off no summary, state or constant is allocated. `kernels` changes speed only: auto,
    or one of `usable_kernels`."""
    place = device_of(device)
    device = devices()[-1] if device == "auto" else device
    kernels = resolve_kernels(kernels, usable_kernels(device), device)
    with mx.stream(place):
        shape = (spec.num_units, spec.num_kv_heads, cache_config.unit_tokens, spec.head_dim)
        dtype, layers = DTYPES[spec.dtype], range(spec.num_layers)
        cache = Cache(
            spec,
            cache_config,
            device,
            k=[pages.new_pool(shape, dtype, spec.k_bits) for _ in layers],
            v=[pages.new_pool(shape, dtype, spec.v_bits) for _ in layers],
            finite=[mx.array(True) for _ in layers],
            kernels=kernels,
        )
        if cache_config.bound_bits:
            cache.bound = Cache(spec, cache_config.bound_store, cache.device, cache.k, cache.v, cache.finite)
        if cache_config.correction_tokens:
            cache.correction = Cache(
                spec.of_values(), cache_config.correction_config, cache.device, cache.v, cache.v, cache.finite
            )
        for one in (cache, cache.bound, cache.correction):
            if one is not None and one.cache_config.enabled:
                check_units(cache_config, one.cache_config)
                one.kernels = kernels
                _add_summaries(one)
        evaluate(cache)
    return cache


def _add_summaries(cache: Cache) -> None:
    """Everything that a method keeps besides K and V, still empty."""
    spec, cache_config, layers = cache.spec, cache.cache_config, range(cache.spec.num_layers)
    cache.state = [GroupState(spec.num_units, cache_config, spec.max_open_groups) for _ in layers]
    if cache.kernels == "metal":
        cache.valid = [mx.zeros(spec.num_units * cache_config.spans_per_unit, mx.uint8) for _ in layers]
    cache.centroid = [None for _ in layers]
    cache.early = [[] for _ in layers]
    fixed = [table.constants(cache_config, layer, spec.num_kv_heads, spec.head_dim) for layer in layers]
    cache.fixed = [{name: mx.array(array) for name, array in one.items()} for one in fixed]
    pool, slots = (
        (spec.num_units, spec.num_kv_heads, cache_config.spans_per_unit),
        (spec.max_open_groups, spec.num_kv_heads),
    )
    stored, running = table.fields(cache_config, spec.head_dim), table.running(cache_config, spec.head_dim)
    cache.summaries = [
        {name: mx.zeros((*pool, *one.shape), getattr(mx, one.dtype)) for name, one in stored.items()} for _ in layers
    ]
    cache.open = [{name: mx.zeros((*slots, *one.shape)) for name, one in running.items()} for _ in layers]
    if cache_config.has_bounds:
        cache.largest_key = [mx.zeros(spec.num_kv_heads) for _ in layers]
        cache.largest_value = [mx.zeros(spec.num_kv_heads) for _ in layers]


def pending(cache: Cache) -> list[mx.array]:
    """Return all state that a write or a read may have left to be computed."""
    arrays = [array for pool in (*cache.k, *cache.v) for array in pages.arrays_of(pool)]
    arrays += cache.finite
    for one in (cache, cache.bound, cache.correction):
        if one is not None:
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


def wait(cache: Cache, *arrays: mx.array) -> None:
    """Until everything so far is computed."""
    evaluate(cache, *arrays)


def to_host(cache: Cache, arrays: Sequence[mx.array]) -> list[np.ndarray]:
    """Arrays on the host, computed together with the cache's pending writes."""
    # bfloat16, which numpy lacks, as float32
    arrays = [array.astype(mx.float32) if array.dtype == mx.bfloat16 else array for array in arrays]
    evaluate(cache, *arrays)
    return [np.array(array) for array in arrays]


def check_finite(cache: Cache) -> None:
    """Raises ConfigError if any K written since the last failure held NaN or Inf. Synchronises."""
    finite = np.array(mx.stack(cache.finite, stream=cache.stream))
    if not finite.all():
        layer = int(np.argmin(finite))
        cache.finite = [mx.array(True) for _ in cache.finite]
        raise overflow(f"K of layer {layer}", cache.spec.dtype)


def write_kv(cache: Cache, layer: int, k: mx.array, v: mx.array, slots: np.ndarray) -> Cache:
    """Writes k, v [N, Hkv, D] to pool slots [N] (host) and brings the summaries of the touched groups up to date: a
    group is valid again when its last slot is written. NaN or Inf in K is kept for `check_finite` to raise."""
    spec, slots = cache.spec, np.asarray(slots, np.int64)
    check_write(spec, cache.cache_config, (k.shape, v.shape), slots)
    if not len(slots):
        return cache
    with mx.stream(cache.stream):
        keys, values = write_rows(cache, layer, k.astype(DTYPES[spec.dtype]), v.astype(DTYPES[spec.dtype]), slots)
    return written(cache, layer, keys, values, slots)


def written(cache: Cache, layer: int, keys: mx.array, values: mx.array, slots: np.ndarray) -> Cache:
    """Brings everything that is kept besides K and V up to date with rows [N, Hkv, D] as the pools hold them."""
    with mx.stream(cache.stream):
        cache.finite[layer] = cache.finite[layer] & mx.isfinite(keys).all()
        if cache.cache_config.has_bounds:
            for largest, array in ((cache.largest_key, keys), (cache.largest_value, values)):
                # a float32 norm is short by less than 2^-16 of itself; NaN in V bounds nothing
                norm = mx.linalg.norm(array.astype(mx.float32), axis=-1)
                norm = mx.where(mx.isnan(norm), math.inf, norm).max(axis=0) * (1 + 2.0**-16)
                largest[layer] = mx.maximum(largest[layer], norm)
        for one, rows in ((cache, keys), (cache.bound, keys), (cache.correction, values)):
            if one is None or not one.cache_config.enabled:
                continue
            # the plan must follow every write, whatever the method makes of it
            plan = one.state[layer].plan(slots)
            _update_summaries(one, layer, rows, plan)
            mark_valid(one, layer, np.concatenate([plan.full_groups, plan.part_groups]))
    return cache


def write_rows(
    cache: Cache, layer: int, keys: mx.array, values: mx.array, slots: np.ndarray
) -> tuple[mx.array, mx.array]:
    """Rows [N, Hkv, D] of the cache's dtype to slots [N], in place while nobody else holds the pools, and as these hold
    them."""
    settle = kernels_of(cache.kernels).settle
    if settle is not None:
        settle()
    with mx.stream(cache.stream):
        units, offsets = (mx.array(part.astype(np.int32)) for part in np.divmod(slots, cache.cache_config.unit_tokens))
        keys = pages.write(cache.k[layer], units, offsets, keys)
        values = pages.write(cache.v[layer], units, offsets, values)
    return keys, values


def _update_summaries(cache: Cache, layer: int, keys: mx.array, plan: WritePlan) -> None:
    if not cache.summaries[layer]:
        return
    full, parts = np.asarray(plan.full_groups, np.int64), np.asarray(plan.part_groups, np.int64)
    if not cache.can_encode(layer):
        if not _find_centroid(cache, layer, keys):
            return
        # the first centroid: encode every group that is full by now, also those written long ago
        state = cache.state[layer]
        written = np.flatnonzero(state.valid(np.arange(cache.spec.num_units * cache.cache_config.spans_per_unit)))
        _finalize_stored(cache, layer, np.setdiff1d(written, full))
        mark_valid(cache, layer, written)
        parts = parts[:0]
    if len(full):
        in_hand = mx.take(keys, mx.array(plan.full_tokens.astype(np.int32)), axis=0)  # [F, S, Hkv, D]
        _store(cache, layer, full, _summarise(cache, layer, in_hand.swapaxes(1, 2)))
    if len(parts):
        _extend(cache, layer, keys, plan)


def mark_valid(cache: Cache, layer: int, groups: np.ndarray) -> None:
    """Tells kernels which of groups [F] may be read."""
    if not cache.valid or not cache.can_encode(layer):
        return
    flags = cache.state[layer].valid(groups).astype(np.uint8)
    cache.valid[layer][mx.array(groups.astype(np.int32))] = mx.array(flags)


def _find_centroid(cache: Cache, layer: int, keys: mx.array) -> bool:
    """The centroid of key codes is the mean of the first 256 keys this layer ever sees, in the order of the slots
    argument, taken in float64 on the host: equal in every backend, once in a cache's life."""
    early = cache.early[layer]
    early.append(keys)
    if sum(len(part) for part in early) < CENTRE_TOKENS:
        return False
    first = np.concatenate([np.array(part.astype(mx.float32)) for part in early])[:CENTRE_TOKENS]
    with np.errstate(over="ignore"):
        cache.centroid[layer] = mx.array(first.astype(np.float64).mean(axis=0).astype(np.float16))
    cache.early[layer] = []
    return True


def _extend(cache: Cache, layer: int, keys: mx.array, plan: WritePlan) -> None:
    """Some keys of groups that this call does not write whole. A method that follows partial groups adds them to its
    statistics, which lie beside the pool or are the summary itself; of the others, and of groups that lost their open
    slot, the keys are read back once they are full."""
    cache_config = cache.cache_config
    followed = (plan.part_open >= 0) & cache_config.method_spec.follows
    _finalize_stored(cache, layer, plan.part_groups[plan.finalized & ~followed])
    if not followed.any():
        return
    constants = cache.constants(layer)
    groups, finalized, tokens = plan.part_groups[followed], plan.finalized[followed], plan.part_tokens[followed]
    present = tokens >= 0
    taken = mx.take(keys, mx.array(np.maximum(tokens, 0).astype(np.int32)), axis=0)
    part = Part(
        taken.astype(mx.float32).swapaxes(1, 2),
        mx.array(present)[:, None, :, None],
        mx.array(present.sum(axis=1).astype(np.float32))[:, None, None],
        mx.array(plan.part_before[followed].astype(np.float32))[:, None, None],
    )
    beside = cache.open[layer]
    if not beside:
        units, subs = _places(cache, groups)
        earlier = {name: pool[units, :, subs] for name, pool in cache.summaries[layer].items()}
        _store(cache, layer, groups, method(cache_config.method).extend(OPS, cache_config, constants, earlier, part))
        return
    place = mx.array(plan.part_open[followed].astype(np.int32))
    earlier = {name: array[place] for name, array in beside.items()}
    statistics = method(cache_config.method).extend(OPS, cache_config, constants, earlier, part)
    for name, value in statistics.items():
        beside[name][place] = value
    if finalized.any():
        done = mx.array(np.flatnonzero(finalized).astype(np.int32))
        summary = method(cache_config.method).finalize(
            OPS, cache_config, {name: value[done] for name, value in statistics.items()}
        )
        _store(cache, layer, groups[finalized], summary)


def _finalize_stored(cache: Cache, layer: int, groups: np.ndarray) -> None:
    """Summarises full groups [F] by reading their keys back from the cache, which is counted."""
    if not len(groups):
        return
    spec, cache_config = cache.spec, cache.cache_config
    units, subs = np.divmod(groups, cache_config.spans_per_unit)
    rows = (units[:, None] * spec.num_kv_heads + np.arange(spec.num_kv_heads)) * cache_config.spans_per_unit + subs[
        :, None
    ]
    keys = pages.tiles_of(cache.k[layer], mx.array(rows), cache_config.span_tokens)
    cache.tokens_reread += len(groups) * cache_config.span_tokens
    _store(cache, layer, groups, _summarise(cache, layer, keys))


def _summarise(cache: Cache, layer: int, k: mx.array) -> Summary:
    """Summaries of full groups: k [F, Hkv, S, D]."""
    cache_config, constants = cache.cache_config, cache.constants(layer)
    kernels = kernels_of(cache.kernels)
    of_codes = kernels.build_summary if cache_config.method_spec.coded else None  # other methods have none
    kernel = kernels.serving(of_codes, "build_summary", cache_config, constants, k)
    if kernel is None:
        return build_summary(OPS, cache_config, constants, k)
    summary: Summary = kernel.run(cache_config, constants, k)
    return summary


def _places(cache: Cache, groups: np.ndarray) -> tuple[mx.array, mx.array]:
    units, subs = np.divmod(groups, cache.cache_config.spans_per_unit)
    return mx.array(units.astype(np.int32)), mx.array(subs.astype(np.int32))


def _store(cache: Cache, layer: int, groups: np.ndarray, summary: Summary) -> None:
    """Writes summaries [F, Hkv, ..] of groups [F] into the pool."""
    units, subs = _places(cache, groups)
    for name, value in summary.items():
        cache.summaries[layer][name][units, :, subs] = value


def grow(cache: Cache, num_units: int) -> Cache:
    """Room for `num_units` units in all; what the cache holds stays where it is."""
    with mx.stream(cache.stream):
        for pools in (cache.k, cache.v):  # which bounds and corrections share
            pools[:] = [pages.each(pool, lambda array: pages.longer(array, num_units)) for pool in pools]
        for one in (cache, cache.bound, cache.correction):
            if one is None:
                continue
            one.spec = replace(one.spec, num_units=num_units)
            for state in one.state:
                state.grow(num_units)
            one.summaries = [
                {name: pages.longer(pool, num_units) for name, pool in fields.items()} for fields in one.summaries
            ]
            one.valid = [pages.longer(flags, num_units * one.cache_config.spans_per_unit) for flags in one.valid]
        evaluate(cache)
    return cache


def read_kv(cache: Cache, layer: int, table: np.ndarray, length: int) -> tuple[mx.array, mx.array]:
    """K, V [length, Hkv, D] of one sequence in cache dtype, copied out of the pool in token order: table [M]."""
    cache_config, spec = cache.cache_config, cache.spec
    units = np.asarray(table)[: -(-length // cache_config.unit_tokens)]
    with mx.stream(cache.stream):
        pools = (pages.copies_of(pool[layer], units).swapaxes(1, 2) for pool in (cache.k, cache.v))
        k, v = (mx.contiguous(pool.reshape(-1, spec.num_kv_heads, spec.head_dim)[:length]) for pool in pools)
    return k, v
