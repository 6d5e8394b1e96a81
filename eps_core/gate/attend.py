"""The gated layer, written once for every backend: score, select, attend, bound, escalate, certify, add the tail.

Neither model nor sampling nor waiting belongs here: an engine's hook calls `attend_layer` with its own queries, and
`collect` once a step, which waits for the device once. Strict and bounds alone may ask the device in between.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from eps_core.config.store import CacheSpec
from eps_core.gate.protocol import Array, Backend, GatedRead, Selection
from eps_core.gate.stats import LayerStats
from eps_core.paging.where import Where

Clock = Callable[..., float]  # (cache, *arrays) -> seconds, once the arrays are computed


@dataclass
class LayerRead:
    """What one layer read: what the host knows, and by field of `LayerStats` what is still on the device."""

    stats: LayerStats
    where: Where
    spec: CacheSpec
    bounds_skipped: bool = False  # key codes of what was not selected are read for bounds
    pending: dict[str, Array] = field(default_factory=dict)
    selection: Selection | None = None  # what was visited, strict's additions too; None: everything
    lse: Array = None  # [B, Hq] natural log of the softmax mass behind `out`, the tail's estimate included


def attend_layer(
    eps: Backend,
    cache: Any,
    layer: int,
    q: Array,
    where: Where,
    audit: bool = False,
    clock: Clock | None = None,
    dense: Callable[[], Array] | None = None,
) -> tuple[Array, LayerRead]:
    """(out [B, Hq, D] in q's dtype, what was read) of one layer's gated attention of q [B, Hq, D], unscaled, as `where`
    says. K and V of the step are in `cache` already.

    Where every group would be read (`Where.reads_all`) nothing is scored; `dense`, where given, attends then: out
    [B, Hq, D] as an engine itself would have it, of which `LayerRead.lse` is None. `audit` reads
    everything in addition, for the true share that was left out; its bytes are counted nowhere. `clock` times pre-pass
    and attention, at the cost of a wait each."""
    config, store, spec = where.config, cache.store, cache.spec
    batch, kv_heads = len(where.lengths), spec.num_kv_heads
    read = dense_read(cache, where)
    stats, pending = read.stats, read.pending
    started = selected = None if clock is None else clock(cache, q)
    at_once: GatedRead | None = None
    if where.reads_all(layer):
        if not config.read.dense_layer(layer):
            stats.forced = where.num_forced
        with eps.span("eps.attention", cache):
            out, lse = eps.attend(cache, layer, q, where, None) if dense is None else (dense(), None)
        whole, read.lse = out, lse
        if store.has_bounds:
            stats.mass_skipped_cert = stats.output_error_cert = np.zeros((batch, kv_heads))
    elif (at_once := _at_once(eps, cache, layer, q, where)) is not None:
        whole, read.lse, lse, selection = at_once.out, at_once.lse, at_once.read_lse, at_once.selection
        pending["counts"], pending["mass_skipped_est"] = selection.counts, at_once.skipped
        read.selection, stats.forced = selection, selection.forced
        stats.summary_bytes_read = where.summary_bytes(spec)
    else:
        with eps.span("eps.prepass", cache):
            scores = eps.score(cache, layer, q, where)
            selection = eps.select(scores, where, layer)
        selected = None if clock is None else clock(cache, selection.groups, selection.counts)
        with eps.span("eps.attention", cache):
            out, lse = eps.attend(cache, layer, q, where, selection)
            read.bounds_skipped = cache.bound is not None and cache.bound.can_encode(layer)
            if store.has_bounds:
                scores = eps.bounds(cache, layer, q, where, scores, selection)
            if config.read.strict:
                extra, selection = eps.escalate(config.read, scores, selection, lse)
                out, lse = eps.merge((out, lse), eps.attend(cache, layer, q, where, extra))
                pending["escalated"] = extra.counts
            if store.has_bounds:
                certificate = eps.certify(cache, layer, scores, selection, out, lse)
                pending["mass_skipped_cert"] = certificate.mass
                pending["output_error_cert"] = certificate.error
            whole, read.lse = out, lse
            if store.tail_tokens:
                whole, read.lse = eps.add_tail(cache, layer, where, scores, selection, (out, lse))
                if store.has_bounds:
                    # the bound is of what was read alone: the tail may move away from it, or from the truth
                    moved = eps.moved_by(out, whole, kv_heads)
                    pending["output_error_cert"] = pending["output_error_cert"] + moved
        pending["counts"], pending["mass_skipped_est"] = selection.counts, eps.skipped_mass(scores, selection)
        if selection.wanted is not None:
            pending["wanted"] = selection.wanted
        read.selection, stats.forced = selection, selection.forced
        stats.summary_bytes_read = where.summary_bytes(spec)
    if clock is not None and started is not None and selected is not None:
        attended = clock(cache, whole, *pending.values())
        if at_once is not None:
            selected = started + at_once.prepass_share * (attended - started)
        stats.prepass_ms, stats.attention_ms = 1000 * (selected - started), 1000 * (attended - selected)
    if audit and lse is None:
        stats.mass_skipped_true = np.zeros((batch, kv_heads))
    elif audit:
        _, lse_all = eps.attend(cache, layer, q, where, None)
        pending["mass_skipped_true"] = eps.unread_share(lse, lse_all, kv_heads)
    return whole, read


def _at_once(eps: Backend, cache: Any, layer: int, q: Array, where: Where) -> GatedRead | None:
    """The layer by one kernel that does what the parts do; None where there is none."""
    kernel = eps.kernel_of(cache, "attend_gated")
    found: GatedRead | None = None if kernel is None else kernel(cache, layer, q, where)
    return found


def dense_read(cache: Any, where: Where) -> LayerRead:
    """What one layer reads that attends densely: every group of every sequence."""
    spec, store = cache.spec, cache.store

    def count() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        groups = -(-where.lengths // store.S)
        counts = np.repeat(groups[:, None], spec.num_kv_heads, axis=1)
        shared = counts, groups, np.zeros_like(groups), np.zeros(counts.shape)
        for array in shared:
            array.flags.writeable = False  # of the statistics of all layers
        return shared

    counts, groups, none_forced, none_skipped = where.once(("dense_read", store.S, spec.num_kv_heads), count)
    stats = LayerStats(counts, groups, none_forced, none_skipped, where.dense_kv_bytes(spec), summary_bytes_read=0)
    return LayerRead(stats, where, spec)


def collect(eps: Backend, cache: Any, reads: Sequence[LayerRead], *arrays: Array) -> tuple[list[LayerStats], list[Any]]:
    """(the statistics of all layers, `arrays` on the host): the step's only wait. Writes to the cache that are still
    pending are done by then, too."""
    names = [(read, name) for read in reads for name in read.pending]
    values = eps.to_host(cache, [*arrays, *(read.pending[name] for read, name in names)])
    for (read, name), value in zip(names, values[len(arrays) :], strict=True):
        setattr(read.stats, name, value)
    for read in reads:
        if "counts" in read.pending:
            _count_bytes(read)
    return [read.stats for read in reads], values[: len(arrays)]


def _count_bytes(read: LayerRead) -> None:
    """Fills the bytes of a layer whose counts have arrived."""
    stats, where, spec = read.stats, read.where, read.spec
    num_selected = int(stats.counts.sum())
    stats.kv_bytes_read = where.kv_bytes(spec, num_selected)
    if read.bounds_skipped:
        added = 0 if stats.escalated is None else int(stats.escalated.sum())
        num_groups = int(where.ends.sum()) * spec.num_kv_heads
        stats.summary_bytes_read += where.bound_bytes(spec, num_groups - num_selected + added)
