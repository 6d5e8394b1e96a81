"""The paged KV cache with its summaries over arrays of either library: state as plain data, functions that return it.

K and V lie in `[P, Hkv, U, D]` per layer, summaries in `[P, Hkv, U/S, ..]` under the same pool index, S the tokens that
are summarised together (`CacheConfig.span_tokens`; "group" here). Arrays are written in place: the cache that a
function returns is the one it was given.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from eps_core.attention.protocol import Array
from eps_core.backend import pages
from eps_core.backend.ops import Ops, Summary
from eps_core.backend.summaries.base import Part
from eps_core.backend.summaries.table import build_summary, method
from eps_core.config.cache import CacheConfig, CacheSpec
from eps_core.errors import overflow
from eps_core.kv_cache.counts import CountsRereads, check_write
from eps_core.kv_cache.groups import GroupState, WritePlan
from eps_core.kv_cache.step_plan import check_units
from eps_core.summaries import table
from eps_core.summaries.keys import CENTRE_TOKENS


@dataclass
class ArrayCache(CountsRereads):
    """Everything per layer. With method off only `k`, `v` and `finite` are filled. A backend's own cache is a subclass
    with its `ops`."""

    ops: ClassVar[Ops]

    spec: CacheSpec
    cache_config: CacheConfig
    device: str
    k: list[pages.Pool]
    v: list[pages.Pool]
    finite: list[Array]  # device bool: no NaN or Inf in any K so far
    summaries: list[Summary] = field(default_factory=list)
    state: list[GroupState] = field(default_factory=list)
    open: list[Summary] = field(default_factory=list)  # running statistics of partial groups [slots, Hkv, ..]
    # of key codes: [Hkv, D] float16 once 256 keys were seen
    centroid: list[Array | None] = field(default_factory=list)
    early: list[list[Array]] = field(default_factory=list)  # the keys until then
    fixed: list[Summary] = field(default_factory=list)  # see `eps_core.summaries.table.constants`
    # with bounds: at least the largest |k| and |v| that each kv head ever held, [Hkv] float32
    largest_key: list[Array] = field(default_factory=list)
    largest_value: list[Array] = field(default_factory=list)
    bound: Any = None  # a cache of the summaries that bound, over the same K and V, where they are other ones
    tokens_reread: int = 0
    kernels: str = "arrays"  # see the backend's kernels/choose.py
    # GPU kernels: whether each group's summary may be read [P * U / S] uint8, what `state` says on the host
    valid: list[Array] = field(default_factory=list)

    def constants(self, layer: int) -> Summary:
        """Return the arrays, keys aside, that `build_summary` and `score_summary` take for this layer."""
        if not self.cache_config.method_spec.centroid_codes:
            return self.fixed[layer]
        centroid = self.centroid[layer]
        if centroid is None:
            centroid = self.ops.new(self.device, (self.spec.num_kv_heads, self.spec.head_dim), "float16")
        return self.fixed[layer] | {"centre": centroid}


def add_all_summaries(cache: Any) -> None:
    """Allocates the summaries of a new cache, and of its bounds where the config has them."""
    cache_config = cache.cache_config
    if cache_config.bound_bits:
        cache.bound = type(cache)(cache.spec, cache_config.bound_store, cache.device, cache.k, cache.v, cache.finite)
    for one in cache.parts():
        check_units(cache_config, one.cache_config)
        one.kernels = cache.kernels
        _add_summaries(one)


def _add_summaries(cache: Any) -> None:
    ops, spec, cache_config, layers = cache.ops, cache.spec, cache.cache_config, range(cache.spec.num_layers)
    cache.state = [GroupState(spec.num_units, cache_config, spec.max_open_groups) for _ in layers]
    if cache.kernels == ops.gpu_family:
        cache.valid = [ops.new(cache.device, (spec.num_units * cache_config.spans_per_unit,), "uint8") for _ in layers]
    cache.centroid = [None for _ in layers]
    cache.early = [[] for _ in layers]
    fixed = [table.constants(cache_config, layer, spec.num_kv_heads, spec.head_dim) for layer in layers]
    cache.fixed = [{name: ops.on(cache, array) for name, array in one.items()} for one in fixed]
    pool = spec.num_units, spec.num_kv_heads, cache_config.spans_per_unit
    slots = spec.max_open_groups, spec.num_kv_heads
    stored, running = table.fields(cache_config, spec.head_dim), table.running(cache_config, spec.head_dim)
    cache.summaries = [
        {name: ops.new(cache.device, (*pool, *one.shape), one.dtype) for name, one in stored.items()} for _ in layers
    ]
    cache.open = [
        {name: ops.new(cache.device, (*slots, *one.shape), "float32") for name, one in running.items()} for _ in layers
    ]
    if cache_config.has_bounds:
        cache.largest_key = [ops.new(cache.device, (spec.num_kv_heads,), "float32") for _ in layers]
        cache.largest_value = [ops.new(cache.device, (spec.num_kv_heads,), "float32") for _ in layers]


def check_finite(ops: Ops, cache: Any) -> None:
    """Raises ConfigError if any K written since the last failure held NaN or Inf. Synchronises."""
    with ops.place(cache):
        finite = np.array(ops.stack(cache.finite).tolist())
        if not finite.all():
            layer = int(np.argmin(finite))
            for one in cache.finite:
                one[...] = True
            raise overflow(f"K of layer {layer}", cache.spec.dtype)


def write_kv(ops: Ops, cache: Any, layer: int, k: Array, v: Array, slots: np.ndarray) -> Any:
    """Writes k, v [N, Hkv, D] to pool slots [N] (host) and brings the summaries of the touched groups up to date: a
    group is valid again when its last slot is written. NaN or Inf in K is kept for `check_finite` to raise."""
    slots = np.asarray(slots, np.int64)
    check_write(cache.spec, cache.cache_config, (k.shape, v.shape), slots)
    if not len(slots):
        return cache
    kernels = ops.kernels_of(cache.kernels)
    # a decode step's tokens lie in units of their own, a prefill's do not
    unit_tokens = cache.cache_config.unit_tokens
    if kernels.write_kv is not None and (len(slots) == 1 or len(np.unique(slots // unit_tokens)) == len(slots)):
        kernel = kernels.serving("write_kv", cache, layer, k, v, slots)
        if kernel is not None:
            return kernel.run(cache, layer, k, v, slots)
    return place_kv(ops, cache, layer, k, v, slots)


def place_kv(ops: Ops, cache: Any, layer: int, k: Array, v: Array, slots: np.ndarray) -> Any:
    """`write_kv` of any tokens, once they are checked."""
    kernels = ops.kernels_of(cache.kernels)
    placed = None if kernels.place_rows is None else kernels.place_rows(cache, layer, k, v, slots, False)
    if placed is None:
        return written(ops, cache, layer, *write_rows(ops, cache, layer, k, v, slots), slots)
    keys, values = placed
    return follow_write(ops, cache, layer, keys, values, slots)


def write_kv_tentative(ops: Ops, cache: Any, layer: int, k: Array, v: Array, slots: np.ndarray) -> Any:
    """Writes k, v [N, Hkv, D] to pool slots [N] (host) and nothing else: of what lies there no summary speaks until
    `write_kv` writes it again. For tokens that may be taken back; NaN and Inf are kept as they are."""
    slots = np.asarray(slots, np.int64)
    check_write(cache.spec, cache.cache_config, (k.shape, v.shape), slots)
    if len(slots):
        kernels = ops.kernels_of(cache.kernels)
        if kernels.place_rows is None or kernels.place_rows(cache, layer, k, v, slots, True) is None:
            write_rows(ops, cache, layer, k, v, slots)
        invalidate(ops, cache, layer, slots)
    return cache


def invalidate(ops: Ops, cache: Any, layer: int, slots: np.ndarray) -> None:
    """No summary of the groups of slots [N] counts from there on: on the host, and for kernels."""
    for one in cache.parts():
        changed = one.state[layer].invalidate(slots)
        if len(changed):
            mark_valid(ops, one, layer, changed)


def write_rows(ops: Ops, cache: Any, layer: int, k: Array, v: Array, slots: np.ndarray) -> tuple[Array, Array]:
    """Writes rows k, v [N, Hkv, D] to slots [N] and returns them as stored. In place, unless another reference to a
    pool exists (MLX copies it then)."""
    ops.settle(cache, layer)
    dtype = ops.dtypes[cache.spec.dtype]
    with ops.place(cache):
        units, offsets = (ops.index(cache, part) for part in np.divmod(slots, cache.cache_config.unit_tokens))
        keys = pages.write(ops, cache.k[layer], units, offsets, ops.cast(k, dtype))
        return keys, pages.write(ops, cache.v[layer], units, offsets, ops.cast(v, dtype))


def written(ops: Ops, cache: Any, layer: int, keys: Array, values: Array, slots: np.ndarray) -> Any:
    """Do what follows from rows [N, Hkv, D] as they were stored in slots [N]: note for `check_finite` whether K is
    finite, and `follow_write`."""
    with ops.place(cache):
        # in place: a captured graph writes to it, too
        cache.finite[layer] &= ops.isfinite(keys).all()
    return follow_write(ops, cache, layer, keys, values, slots)


def largest_norm(ops: Ops, rows: Array) -> Array:
    """Return at least the largest norm [Hkv] of rows [N, Hkv, D]."""
    # a float32 norm is short by less than 2^-16 of itself; NaN in V bounds nothing
    norm = ops.norms(ops.float32(rows))
    return ops.max(ops.where(ops.isnan(norm), math.inf, norm), axis=0) * (1 + 2.0**-16)


def follow_write(ops: Ops, cache: Any, layer: int, keys: Array, values: Array, slots: np.ndarray) -> Any:
    """Update summaries and bounds with rows [N, Hkv, D] as they were stored in slots [N]."""
    with ops.place(cache):
        if cache.cache_config.has_bounds:
            for largest, array in ((cache.largest_key, keys), (cache.largest_value, values)):
                largest[layer] = ops.maximum(largest[layer], largest_norm(ops, array))
        for one in cache.parts():
            # whose flags may change
            state, span = one.state[layer], one.cache_config.span_tokens
            groups = np.unique(slots // span) if one.valid else slots[:0]
            before = state.valid(groups)
            # the plan must follow every write, whatever the method makes of it
            plan = state.plan(slots)
            _update_summaries(ops, one, layer, keys, plan)
            mark_valid(ops, one, layer, groups[state.valid(groups) != before])
    return cache


def _update_summaries(ops: Ops, cache: Any, layer: int, keys: Array, plan: WritePlan) -> None:
    if not cache.summaries[layer]:
        return
    has_parts = len(plan.part_groups) > 0
    if not cache.can_encode(layer):
        if not _find_centroid(ops, cache, layer, keys):
            return
        # the first centroid: encode every group that is full by now, also those written long ago
        state = cache.state[layer]
        filled = np.flatnonzero(state.valid(np.arange(len(state.fill))))
        finalize(ops, cache, layer, np.setdiff1d(filled, plan.full_groups))
        mark_valid(ops, cache, layer, filled)
        has_parts = False
    if len(plan.full_groups):
        in_hand = keys[ops.index(cache, plan.full_tokens)]  # [F, S, Hkv, D]
        finalize(ops, cache, layer, plan.full_groups, in_hand.swapaxes(1, 2))
    if has_parts:
        _extend(ops, cache, layer, keys, plan)


def mark_valid(ops: Ops, cache: Any, layer: int, groups: np.ndarray) -> None:
    """Tells kernels which of groups [F] may be read."""
    if not cache.valid or not len(groups) or not cache.can_encode(layer):
        return
    flags = cache.state[layer].valid(groups).astype(np.uint8)
    with ops.place(cache):
        cache.valid[layer][ops.index(cache, groups)] = ops.on(cache, flags)


def _find_centroid(ops: Ops, cache: Any, layer: int, keys: Array) -> bool:
    """The centroid of key codes is the mean of the first 256 keys this layer ever sees, in the order of the slots
    argument, taken in float64 on the host: equal in every backend, once in a cache's life."""
    early = cache.early[layer]
    early.append(ops.copy(keys))  # the caller may reuse its buffer
    if sum(len(part) for part in early) < CENTRE_TOKENS:
        return False
    first = np.concatenate([ops.host(ops.float32(part)) for part in early])[:CENTRE_TOKENS]
    # rounded by numpy: Torch rounds float64 to float16 twice
    with np.errstate(over="ignore"):
        cache.centroid[layer] = ops.on(cache, first.astype(np.float64).mean(axis=0).astype(np.float16))
    cache.early[layer] = []
    return True


def _extend(ops: Ops, cache: Any, layer: int, keys: Array, plan: WritePlan) -> None:
    """Some keys of groups that this call does not write whole. A method that follows partial groups adds them to its
    statistics, which lie beside the pool or are the summary itself; of the others, and of groups that lost their open
    slot, the keys are read back once they are full."""
    cache_config = cache.cache_config
    if not (cache_config.method_spec.follows or plan.finalized.any()):
        return
    followed = (plan.part_open >= 0) & cache_config.method_spec.follows
    finalize(ops, cache, layer, plan.part_groups[plan.finalized & ~followed])
    if not followed.any():
        return
    own, constants = method(cache_config.method), cache.constants(layer)
    groups, finalized, tokens = plan.part_groups[followed], plan.finalized[followed], plan.part_tokens[followed]
    present = tokens >= 0
    part = Part(
        ops.float32(keys[ops.index(cache, np.maximum(tokens, 0))]).swapaxes(1, 2),
        ops.on(cache, present)[:, None, :, None],
        ops.on(cache, present.sum(axis=1).astype(np.float32))[:, None, None],
        ops.on(cache, plan.part_before[followed].astype(np.float32))[:, None, None],
    )
    beside = cache.open[layer]
    if not beside:
        units, subs = _places(ops, cache, groups)
        earlier = {name: pool[units, :, subs] for name, pool in cache.summaries[layer].items()}
        _store(ops, cache, layer, groups, own.extend(ops, cache_config, constants, earlier, part))
        return
    place = ops.index(cache, plan.part_open[followed])
    earlier = {name: array[place] for name, array in beside.items()}
    statistics = own.extend(ops, cache_config, constants, earlier, part)
    for name, value in statistics.items():
        beside[name][place] = value
    if finalized.any():
        done = ops.index(cache, np.flatnonzero(finalized))
        summary = own.finalize(ops, cache_config, {name: value[done] for name, value in statistics.items()})
        _store(ops, cache, layer, groups[finalized], summary)


def finalize(ops: Ops, cache: Any, layer: int, groups: np.ndarray, keys: Array | None = None) -> None:
    """Summarises full groups [F] of keys [F, Hkv, S, D]; where these are not in hand, they are read back from the
    cache, which is counted."""
    if not len(groups):
        return
    spec, cache_config = cache.spec, cache.cache_config
    if keys is None:
        units, subs = np.divmod(groups, cache_config.spans_per_unit)
        heads = units[:, None] * spec.num_kv_heads + np.arange(spec.num_kv_heads)
        rows = heads * cache_config.spans_per_unit + subs[:, None]
        keys = pages.tiles_of(ops, cache.k[layer], ops.index(cache, rows), cache_config.span_tokens)
        cache.tokens_reread += len(groups) * cache_config.span_tokens
    _store(ops, cache, layer, groups, _summarise(ops, cache, layer, keys))


def _summarise(ops: Ops, cache: Any, layer: int, k: Array) -> Summary:
    """Summaries of full groups: k [F, Hkv, S, D]."""
    cache_config, constants = cache.cache_config, cache.constants(layer)
    kernel = None
    if cache_config.method_spec.coded:  # other methods have none
        kernel = ops.kernels_of(cache.kernels).serving("build_summary", cache_config, constants, k)
    if kernel is None:
        return build_summary(ops, cache_config, constants, k)
    summary: Summary = kernel.run(cache_config, constants, k)
    return summary


def _places(ops: Ops, cache: Any, groups: np.ndarray) -> tuple[Array, Array]:
    units, subs = np.divmod(groups, cache.cache_config.spans_per_unit)
    return ops.index(cache, units), ops.index(cache, subs)


def _store(ops: Ops, cache: Any, layer: int, groups: np.ndarray, summary: Summary) -> None:
    """Writes summaries [F, Hkv, ..] of groups [F] into the pool."""
    units, subs = _places(ops, cache, groups)
    for name, value in summary.items():
        cache.summaries[layer][name][units, :, subs] = value


def grow(ops: Ops, cache: Any, num_units: int) -> Any:
    """Room for `num_units` units in all; what the cache holds stays where it is."""
    with ops.place(cache):
        for pools in (cache.k, cache.v):  # which bounds share
            pools[:] = [pages.each(pool, lambda array: ops.longer(array, num_units)) for pool in pools]
        for one in (cache, cache.bound):
            if one is None:
                continue
            one.spec = replace(one.spec, num_units=num_units)
            for state in one.state:
                state.grow(num_units)
            one.summaries = [
                {name: ops.longer(pool, num_units) for name, pool in fields.items()} for fields in one.summaries
            ]
            one.valid = [ops.longer(flags, num_units * one.cache_config.spans_per_unit) for flags in one.valid]
    return cache


def read_kv(ops: Ops, cache: Any, layer: int, table: np.ndarray, length: int) -> tuple[Array, Array]:
    """K, V [length, Hkv, D] of one sequence in cache dtype, copied out of the pool in token order: table [M]."""
    units = np.asarray(table)[: -(-length // cache.cache_config.unit_tokens)]
    with ops.place(cache):
        return pages.in_order(ops, cache.k[layer], units, length), pages.in_order(ops, cache.v[layer], units, length)
