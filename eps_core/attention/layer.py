"""The sparse layer, written once for every backend: score, select, attend, bound, extend, bound.

Neither model nor sampling nor waiting belongs here: an engine's hook calls `sparse_attention` with its own queries, and
`collect` once a step, which waits for the device once. Strict and bounds alone may ask the device in between.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from eps_core.attention.protocol import Array, Backend, FusedRead, Selection
from eps_core.attention.stats import LayerStats
from eps_core.config.cache import CacheSpec
from eps_core.kv_cache.step_plan import StepPlan

Clock = Callable[..., float]  # (cache, *arrays) -> seconds, once the arrays are computed


@dataclass
class LayerRead:
    """The read of one layer: what the host knows, and by field of `LayerStats` what is still on the device."""

    stats: LayerStats
    plan: StepPlan
    spec: CacheSpec
    bounds_skipped: bool = False  # key codes of what was not selected are read for bounds
    pending: dict[str, Array] = field(default_factory=dict)
    selection: Selection | None = None  # what was selected, strict's additions too; None: everything
    lse: Array = None  # [B, Hq] natural log of the softmax mass behind `out`


def sparse_attention(
    backend: Backend,
    cache: Any,
    layer: int,
    q: Array,
    plan: StepPlan,
    audit: bool = False,
    clock: Clock | None = None,
    dense: Callable[[], Array] | None = None,
    passing: bool = False,
) -> tuple[Array, LayerRead]:
    """(out [B, Hq, D] in q's dtype, what was read) of one layer's sparse attention of q [B, Hq, D], unscaled, as
    `plan` says. K and V of the step are in `cache` already.

    Where every group would be read (`StepPlan.reads_all`) nothing is scored; `dense`, where given, attends then: out
    [B, Hq, D] as an engine itself would have it, of which `LayerRead.lse` is None. `audit` reads everything in
    addition, for the true share that was left out; its bytes are counted nowhere. `clock` times pre-pass and attention,
    at the cost of a wait each, and of the parts where a kernel of the whole layer is not `timed`. `passing`:
    `selection` and `lse` of what was read are valid only until the next layer's call, which saves copies."""
    config, cache_config, spec = plan.config, cache.cache_config, cache.spec
    batch, kv_heads = len(plan.lengths), spec.num_kv_heads
    read = dense_read(cache, plan)
    stats, pending = read.stats, read.pending
    started = selected = None if clock is None else clock(cache, q)
    at_once: FusedRead | None = None
    if plan.reads_all(layer):
        if not config.selection_config.dense_layer(layer):
            stats.always_selected = plan.num_always_selected
        with backend.span("eps.attention", cache):
            out, lse = backend.attend(cache, layer, q, plan, None) if dense is None else (dense(), None)
        if cache_config.has_bounds:
            stats.skipped_mass_bound = stats.output_error_bound = np.zeros((batch, kv_heads))
    elif (at_once := fused_sparse_attention(backend, cache, layer, q, plan, clock is not None)) is not None:
        at_once = at_once if passing else at_once.lasting()
        out, lse, selection = at_once.out, at_once.lse, at_once.selection
        pending["counts"], pending["skipped_mass"] = selection.counts, at_once.skipped
        read.selection, stats.always_selected = selection, selection.always_selected
        stats.summary_bytes_read = plan.summary_bytes(spec)
    else:
        with backend.span("eps.prepass", cache):
            scores = backend.score(cache, layer, q, plan)
            selection = backend.select(scores, plan, layer)
        selected = None if clock is None else clock(cache, selection.groups, selection.counts)
        with backend.span("eps.attention", cache):
            out, lse = backend.attend(cache, layer, q, plan, selection)
            read.bounds_skipped = cache.bound is not None and cache.bound.can_encode(layer)
            if cache_config.has_bounds:
                scores = backend.bounds(cache, layer, q, plan, scores, selection)
            if config.selection_config.strict:
                extra, selection = backend.extend_selection(config.selection_config, scores, selection, lse)
                out, lse = backend.merge((out, lse), backend.attend(cache, layer, q, plan, extra))
                pending["extended"] = extra.counts
            if cache_config.has_bounds:
                error_bound = backend.bound_error(cache, layer, scores, selection, out, lse)
                pending["skipped_mass_bound"] = error_bound.mass
                pending["output_error_bound"] = error_bound.error
        pending["counts"], pending["skipped_mass"] = selection.counts, backend.skipped_mass(scores, selection)
        if selection.counts_before_union is not None:
            pending["counts_before_union"] = selection.counts_before_union
        read.selection, stats.always_selected = selection, selection.always_selected
        stats.summary_bytes_read = plan.summary_bytes(spec)
    read.lse = lse
    if clock is not None and started is not None and selected is not None:
        attended = clock(cache, out, *pending.values())
        if at_once is not None and at_once.stamps is not None:
            began, chosen, ended = at_once.stamps.tolist()
            selected = started + (chosen - began) / max(ended - began, 1) * (attended - started)
        stats.prepass_ms, stats.attention_ms = 1000 * (selected - started), 1000 * (attended - selected)
    if audit and lse is None:
        stats.skipped_mass_true = np.zeros((batch, kv_heads))
    elif audit:
        _, lse_all = backend.attend(cache, layer, q, plan, None)
        pending["skipped_mass_true"] = backend.unread_share(lse, lse_all, kv_heads)
    return out, read


def fused_sparse_attention(
    backend: Backend, cache: Any, layer: int, q: Array, plan: StepPlan, timed: bool
) -> FusedRead | None:
    """The layer by one kernel that does what the parts do; None where there is none."""
    kernel: Any = backend.kernel_of(cache, "attend_fused")
    found: FusedRead | None = None if kernel is None or (timed and not kernel.timed) else kernel(cache, layer, q, plan)
    return found


def attend_prefill(backend: Backend, cache: Any, layer: int, q: Array, table: np.ndarray, length: int) -> Array:
    """Return out [N, Hq, D] of the last N of a sequence's `length` tokens, whose K and V are in the cache: q [N, Hq, D]
    unscaled, table [M]. Each attends to all before it and to itself."""
    kernel = backend.kernel_of(cache, "attend_prefill")
    out = None if kernel is None else kernel(cache, layer, q, table, length)
    return backend.attend_chunk(cache, q, *backend.read_kv(cache, layer, table, length)) if out is None else out


def dense_read(cache: Any, plan: StepPlan) -> LayerRead:
    """Return the read of a layer that attends densely: every group of every sequence."""
    spec, cache_config = cache.spec, cache.cache_config

    def count() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        groups = -(-plan.lengths // cache_config.S)
        counts = np.repeat(groups[:, None], spec.num_kv_heads, axis=1)
        shared = counts, groups, np.zeros_like(groups), np.zeros(counts.shape)
        for array in shared:
            array.flags.writeable = False  # of the statistics of all layers
        return shared

    counts, groups, none_always_selected, none_skipped = plan.once(
        ("dense_read", cache_config.S, spec.num_kv_heads), count
    )
    stats = LayerStats(
        counts, groups, none_always_selected, none_skipped, plan.dense_kv_bytes(spec), summary_bytes_read=0
    )
    return LayerRead(stats, plan, spec)


def collect(
    backend: Backend, cache: Any, reads: Sequence[LayerRead], *arrays: Array
) -> tuple[list[LayerStats], list[Any]]:
    """(the statistics of all layers, `arrays` on the host): the step's only wait. Writes to the cache that are still
    pending are done by then, too."""
    names = [(read, name) for read in reads for name in read.pending]
    values = backend.to_host(cache, [*arrays, *(read.pending[name] for read, name in names)])
    for (read, name), value in zip(names, values[len(arrays) :], strict=True):
        setattr(read.stats, name, value)
    for read in reads:
        if "counts" not in read.pending:
            continue
        stats, plan, spec = read.stats, read.plan, read.spec
        num_selected = int(stats.counts.sum())
        stats.kv_bytes_read = plan.kv_bytes(spec, num_selected)
        if read.bounds_skipped:
            added = 0 if stats.extended is None else int(stats.extended.sum())
            num_groups = int(plan.ends.sum()) * spec.num_kv_heads
            stats.summary_bytes_read += plan.bound_bytes(spec, num_groups - num_selected + added)
    return [read.stats for read in reads], values[: len(arrays)]
