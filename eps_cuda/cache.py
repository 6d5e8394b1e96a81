"""The paged KV cache with its summaries: state as plain data, functions that return it.

K and V lie in `[P, Hkv, U, D]` per layer, summaries in `[P, Hkv, U/S, ..]` under the same pool index, S the tokens that
are summarised together (`CacheConfig.span_tokens`; "group" here). Torch writes in place: the cache that a function
returns is the one it was given.
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

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
from eps_cuda import pages
from eps_cuda.device import DTYPES, device_of, empty_pool, gpu
from eps_cuda.kernels.choose import kernels_of, usable_kernels
from eps_cuda.ops import OPS
from eps_cuda.pools import check_pools


@dataclass
class Cache(CountsRereads):
    """Everything per layer. With method off only `k`, `v` and `finite` are filled."""

    spec: CacheSpec
    cache_config: CacheConfig
    device: str
    k: list[pages.Pool]
    v: list[pages.Pool]
    finite: list[Tensor]  # device bool: no NaN or Inf in any K so far
    summaries: list[Summary] = field(default_factory=list)
    state: list[GroupState] = field(default_factory=list)
    open: list[Summary] = field(default_factory=list)  # running statistics of partial groups [slots, Hkv, ..]
    centroid: list[Tensor | None] = field(
        default_factory=list
    )  # of key codes: [Hkv, D] float16 once 256 keys were seen
    early: list[list[Tensor]] = field(default_factory=list)  # the keys until then
    fixed: list[Summary] = field(default_factory=list)  # see `eps_core.summaries.table.constants`
    # with bounds: at least the largest |k| and |v| that each kv head ever held, [Hkv] float32
    largest_key: list[Tensor] = field(default_factory=list)
    largest_value: list[Tensor] = field(default_factory=list)
    bound: "Cache | None" = None  # the summaries that bound, over the same K and V, where they are other ones
    correction: "Cache | None" = None  # mean values: its K is this cache's V
    tokens_reread: int = 0
    kernels: str = "arrays"  # see kernels/choose.py
    # triton: whether each group's summary may be read [P * U / S] uint8, what `state` says on the host
    valid: list[Tensor] = field(default_factory=list)
    # triton: graph.StaticStep by model, batch, width and config, oldest first
    steps: dict[Any, Any] = field(default_factory=dict)
    # numba: pools as numpy sees them, by their id, and the pools, which keep it theirs: a twentieth of a step of 2k
    views: dict[int, tuple[Tensor, np.ndarray]] = field(default_factory=dict)

    def constants(self, layer: int) -> Summary:
        """Return the arrays that builders and scorers of this layer need besides keys (see summaries/base.py)."""
        if not self.cache_config.needs_centroid:
            return self.fixed[layer]
        centroid = self.centroid[layer]
        if centroid is None:
            centroid = torch.zeros(
                (self.spec.num_kv_heads, self.spec.head_dim), dtype=torch.float16, device=self.device
            )
        return self.fixed[layer] | {"centre": centroid}

    def can_encode(self, layer: int) -> bool:
        """Return whether full groups have summaries: key codes wait for their centroid."""
        return not self.cache_config.needs_centroid or self.centroid[layer] is not None

    def plain(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V as they are, for kernels that know no codes."""
        k, v = self.k[layer], self.v[layer]
        assert isinstance(k, Tensor) and isinstance(v, Tensor), "this kernel knows no codes"
        return k, v


@torch.inference_mode()
def new_cache(
    spec: CacheSpec,
    cache_config: CacheConfig,
    device: str = "auto",
    kernels: str = "auto",
    pools: Sequence[tuple[Tensor, Tensor]] | None = None,
) -> Cache:
    """An empty cache. With method off no summary, state or constant is allocated. `kernels` changes speed only: auto,
    or one of `usable_kernels`. `pools`: of each layer an engine's own K and V to live in, views [P, Hkv, U, D] (see
    `pools.check_pools`); what they hold is left as it is."""
    place = device_of(device)
    kernels = resolve_kernels(kernels, usable_kernels(place.type), place.type)
    shape = (spec.num_units, spec.num_kv_heads, cache_config.unit_tokens, spec.head_dim)
    dtype, layers = DTYPES[spec.dtype], range(spec.num_layers)
    if pools is None:
        bits = spec.k_bits, spec.v_bits
        own = [[pages.new_pool(shape, dtype, one, place) for one in bits] for _ in layers]
    else:
        check_pools(pools, spec, shape, dtype, place.type)
        own = [list(pair) for pair in pools]
    cache = Cache(
        spec,
        cache_config,
        place.type,
        k=[k for k, _ in own],
        v=[v for _, v in own],
        finite=[torch.tensor(True, device=place) for _ in layers],
        kernels=kernels,
    )
    if cache_config.bound_bits:
        cache.bound = Cache(spec, cache_config.bound_store, place.type, cache.k, cache.v, cache.finite)
    if cache_config.correction_tokens:
        cache.correction = Cache(
            spec.of_values(), cache_config.correction_config, place.type, cache.v, cache.v, cache.finite
        )
    for one in (cache, cache.bound, cache.correction):
        if one is not None and one.cache_config.enabled:
            check_units(cache_config, one.cache_config)
            one.kernels = kernels
            _add_summaries(one, place)
    return cache


def _add_summaries(cache: Cache, place: torch.device) -> None:
    """Everything that a method keeps besides K and V, still empty."""
    spec, cache_config, layers = cache.spec, cache.cache_config, range(cache.spec.num_layers)
    cache.state = [GroupState(spec.num_units, cache_config, spec.max_open_groups) for _ in layers]
    if cache.kernels == "triton":
        groups = spec.num_units * cache_config.spans_per_unit
        cache.valid = [torch.zeros(groups, dtype=torch.uint8, device=place) for _ in layers]
    cache.centroid = [None for _ in layers]
    cache.early = [[] for _ in layers]
    fixed = [table.constants(cache_config, layer, spec.num_kv_heads, spec.head_dim) for layer in layers]
    cache.fixed = [{name: torch.from_numpy(array).to(place) for name, array in one.items()} for one in fixed]
    pool, slots = (
        (spec.num_units, spec.num_kv_heads, cache_config.spans_per_unit),
        (spec.max_open_groups, spec.num_kv_heads),
    )
    stored, running = table.fields(cache_config, spec.head_dim), table.running(cache_config, spec.head_dim)
    cache.summaries = [
        {
            name: empty_pool((*pool, *one.shape), getattr(torch, one.dtype), place).zero_()
            for name, one in stored.items()
        }
        for _ in layers
    ]
    cache.open = [
        {name: torch.zeros((*slots, *one.shape), device=place) for name, one in running.items()} for _ in layers
    ]
    if cache_config.has_bounds:
        cache.largest_key = [torch.zeros(spec.num_kv_heads, device=place) for _ in layers]
        cache.largest_value = [torch.zeros(spec.num_kv_heads, device=place) for _ in layers]


def span(name: str, cache: Cache) -> AbstractContextManager[Any]:
    """A range for profilers: NVTX (roctx on ROCm) on a GPU, nothing elsewhere."""
    return torch.cuda.nvtx.range(name) if cache.device == "cuda" else nullcontext()


def wait(cache: Cache, *arrays: Tensor) -> None:
    """Until everything so far is computed."""
    if cache.device != "cpu":
        gpu(cache.device).synchronize()


def to_host(cache: Cache, arrays: Sequence[Tensor]) -> list[np.ndarray]:
    """Arrays on the host, bfloat16 as float32: one copy for all of one shape and dtype."""
    alike: dict[Any, list[int]] = {}
    for i, array in enumerate(arrays):
        alike.setdefault((array.shape, array.dtype), []).append(i)
    values: list[np.ndarray] = [np.empty(0)] * len(arrays)
    for places in alike.values():
        stacked = torch.stack([arrays[i] for i in places])
        stacked = stacked.float() if stacked.dtype == torch.bfloat16 else stacked  # which numpy lacks
        for i, value in zip(places, stacked.cpu().numpy(), strict=True):
            values[i] = value
    return values


@torch.inference_mode()
def check_finite(cache: Cache) -> None:
    """Raises ConfigError if any K written since the last failure held NaN or Inf. Synchronises."""
    finite = torch.stack(cache.finite).cpu().numpy()
    if not finite.all():
        layer = int(np.argmin(finite))
        for one in cache.finite:
            one.fill_(True)
        raise overflow(f"K of layer {layer}", cache.spec.dtype)


@torch.inference_mode()
def write_kv(cache: Cache, layer: int, k: Tensor, v: Tensor, slots: np.ndarray) -> Cache:
    """Writes k, v [N, Hkv, D] to pool slots [N] (host) and brings the summaries of the touched groups up to date: a
    group is valid again when its last slot is written. NaN or Inf in K is kept for `check_finite` to raise."""
    spec, slots = cache.spec, np.asarray(slots, np.int64)
    check_write(spec, cache.cache_config, (k.shape, v.shape), slots)
    if not len(slots):
        return cache
    kernels = kernels_of(cache.kernels)
    # a decode step's tokens lie in units of their own, a prefill's do not
    if kernels.write_kv is not None and len(np.unique(slots // cache.cache_config.unit_tokens)) == len(slots):
        kernel = kernels.serving(kernels.write_kv, "write_kv", cache, layer, k, v, slots)
        if kernel is not None:
            written_by: Cache = kernel.run(cache, layer, k, v, slots)
            return written_by
    units, offsets = (on(cache, part) for part in np.divmod(slots, cache.cache_config.unit_tokens))
    keys = pages.write(cache.k[layer], units, offsets, k.to(DTYPES[spec.dtype]))
    values = pages.write(cache.v[layer], units, offsets, v.to(DTYPES[spec.dtype]))
    return written(cache, layer, keys, values, slots)


def written(cache: Cache, layer: int, keys: Tensor, values: Tensor, slots: np.ndarray) -> Cache:
    """Brings everything that is kept besides K and V up to date with rows [N, Hkv, D] as the pools hold them."""
    cache.finite[layer].logical_and_(torch.isfinite(keys).all())  # in place: a captured graph writes to it, too
    if cache.cache_config.has_bounds:
        for largest, array in ((cache.largest_key, keys), (cache.largest_value, values)):
            # a float32 norm is short by less than 2^-16 of itself; NaN in V bounds nothing
            norm = torch.linalg.vector_norm(array.float(), dim=-1).nan_to_num(math.inf, math.inf)
            norm = norm.amax(dim=0) * (1 + 2.0**-16)
            largest[layer] = torch.maximum(largest[layer], norm)
    for one, rows in ((cache, keys), (cache.bound, keys), (cache.correction, values)):
        if one is None or not one.cache_config.enabled:
            continue
        # the plan must follow every write, whatever the method makes of it
        plan = one.state[layer].plan(slots)
        _update_summaries(one, layer, rows, plan)
        mark_valid(one, layer, np.concatenate([plan.full_groups, plan.part_groups]))
    return cache


def _update_summaries(cache: Cache, layer: int, keys: Tensor, plan: WritePlan) -> None:
    if not cache.summaries[layer]:
        return
    has_parts = len(plan.part_groups) > 0
    if not cache.can_encode(layer):
        if not _find_centroid(cache, layer, keys):
            return
        # the first centroid: encode every group that is full by now, also those written long ago
        state = cache.state[layer]
        written = np.flatnonzero(state.valid(np.arange(cache.spec.num_units * cache.cache_config.spans_per_unit)))
        finalize(cache, layer, np.setdiff1d(written, plan.full_groups))
        mark_valid(cache, layer, written)
        has_parts = False
    if len(plan.full_groups):
        finalize(cache, layer, plan.full_groups, keys[on(cache, plan.full_tokens)].transpose(1, 2))
    if has_parts:
        _extend(cache, layer, keys, plan)


def mark_valid(cache: Cache, layer: int, groups: np.ndarray) -> None:
    """Tells kernels which of groups [F] may be read."""
    if not cache.valid or not cache.can_encode(layer):
        return
    flags = cache.state[layer].valid(groups).astype(np.uint8)
    cache.valid[layer][on(cache, groups)] = on(cache, flags)


def _find_centroid(cache: Cache, layer: int, keys: Tensor) -> bool:
    """The centroid of key codes is the mean of the first 256 keys this layer ever sees, in the order of the slots
    argument, taken in float64 on the host: equal in every backend, once in a cache's life."""
    early = cache.early[layer]
    early.append(keys.clone())  # the caller may reuse its buffer
    if sum(len(part) for part in early) < CENTRE_TOKENS:
        return False
    first = torch.cat(early)[:CENTRE_TOKENS].cpu().double().numpy()
    # rounded by numpy: Torch rounds float64 to float16 twice
    with np.errstate(over="ignore"):
        cache.centroid[layer] = torch.from_numpy(first.mean(axis=0).astype(np.float16)).to(keys.device)
    cache.early[layer] = []
    return True


def _extend(cache: Cache, layer: int, keys: Tensor, plan: WritePlan) -> None:
    """Some keys of groups that this call does not write whole. A method that follows partial groups adds them to its
    statistics, which lie beside the pool or are the summary itself; of the others, and of groups that lost their open
    slot, the keys are read back once they are full."""
    cache_config = cache.cache_config
    followed = (plan.part_open >= 0) & cache_config.method_spec.follows
    finalize(cache, layer, plan.part_groups[plan.finalized & ~followed])
    if not followed.any():
        return
    constants = cache.constants(layer)
    groups, finalized, tokens = plan.part_groups[followed], plan.finalized[followed], plan.part_tokens[followed]
    present = tokens >= 0
    part = Part(
        keys[on(cache, np.maximum(tokens, 0))].float().transpose(1, 2),
        on(cache, present)[:, None, :, None],
        on(cache, present.sum(axis=1).astype(np.float32))[:, None, None],
        on(cache, plan.part_before[followed].astype(np.float32))[:, None, None],
    )
    beside = cache.open[layer]
    if not beside:
        units, subs = _places(cache, groups)
        earlier = {name: pool[units, :, subs] for name, pool in cache.summaries[layer].items()}
        _store(cache, layer, groups, method(cache_config.method).extend(OPS, cache_config, constants, earlier, part))
        return
    place = on(cache, plan.part_open[followed])
    earlier = {name: array[place] for name, array in beside.items()}
    statistics = method(cache_config.method).extend(OPS, cache_config, constants, earlier, part)
    for name, value in statistics.items():
        beside[name][place] = value
    if finalized.any():
        done = on(cache, np.flatnonzero(finalized))
        summary = method(cache_config.method).finalize(
            OPS, cache_config, {name: value[done] for name, value in statistics.items()}
        )
        _store(cache, layer, groups[finalized], summary)


def finalize(cache: Cache, layer: int, groups: np.ndarray, keys: Tensor | None = None) -> None:
    """Summarises full groups [F] of keys [F, Hkv, S, D]; where these are not in hand, they are read back from the
    cache, which is counted."""
    if not len(groups):
        return
    spec, cache_config = cache.spec, cache.cache_config
    if keys is None:
        units, subs = np.divmod(groups, cache_config.spans_per_unit)
        heads = units[:, None] * spec.num_kv_heads + np.arange(spec.num_kv_heads)
        rows = heads * cache_config.spans_per_unit + subs[:, None]
        keys = pages.tiles_of(cache.k[layer], on(cache, rows), cache_config.span_tokens)
        cache.tokens_reread += len(groups) * cache_config.span_tokens
    _store(cache, layer, groups, _summarise(cache, layer, keys))


def _summarise(cache: Cache, layer: int, k: Tensor) -> Summary:
    """Summaries of full groups: k [F, Hkv, S, D]."""
    cache_config, constants = cache.cache_config, cache.constants(layer)
    kernels = kernels_of(cache.kernels)
    of_codes = kernels.build_summary if cache_config.method_spec.coded else None  # other methods have none
    kernel = kernels.serving(of_codes, "build_summary", cache_config, constants, k)
    if kernel is None:
        return build_summary(OPS, cache_config, constants, k)
    summary: Summary = kernel.run(cache_config, constants, k)
    return summary


def on(cache: Cache, array: np.ndarray) -> Tensor:
    """A host array on the cache's device."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(cache.device)


def _places(cache: Cache, groups: np.ndarray) -> tuple[Tensor, Tensor]:
    units, subs = np.divmod(groups, cache.cache_config.spans_per_unit)
    return on(cache, units), on(cache, subs)


def _store(cache: Cache, layer: int, groups: np.ndarray, summary: Summary) -> None:
    """Writes summaries [F, Hkv, ..] of groups [F] into the pool."""
    units, subs = _places(cache, groups)
    for name, value in summary.items():
        cache.summaries[layer][name][units, :, subs] = value


@torch.inference_mode()
def grow(cache: Cache, num_units: int) -> Cache:
    """Room for `num_units` units in all; what the cache holds stays where it is."""
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
    cache.steps.clear()  # captured graphs hold the old pools, and so do views
    cache.views.clear()
    return cache


@torch.inference_mode()
def read_kv(cache: Cache, layer: int, table: np.ndarray, length: int) -> tuple[Tensor, Tensor]:
    """K, V [length, Hkv, D] of one sequence in cache dtype, copied out of the pool in token order: table [M]. Each head
    is contiguous in memory."""
    units = np.asarray(table)[: -(-length // cache.cache_config.unit_tokens)]
    k, v = (
        pages.units_of(pool[layer], units)
        .transpose(0, 1)  # [Hkv, M, U, D]
        .clone(memory_format=torch.contiguous_format)
        .flatten(1, 2)[:, :length]
        .transpose(0, 1)
        for pool in (cache.k, cache.v)
    )
    return k, v
