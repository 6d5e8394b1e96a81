"""MLX's CPU arrays for the compiled kernels of `eps_core.cpu.kernels`, and back.

The functions have the signatures of their namesakes over arrays; None says that there is no kernel for the case. What
the kernels read is evaluated first and read in place. No view of the cache outlives a call: one that did would make the
next slice assignment copy a whole pool.
"""

from typing import Any

import mlx.core as mx
import numpy as np

from eps_core.config.store import Store
from eps_core.cpu import kernels, write
from eps_core.cpu.calls import Chosen
from eps_core.gate.protocol import GatedRead, RowsRead, Scores, Selection
from eps_core.paging.rows import Rows
from eps_core.paging.where import Where
from eps_core.summaries.rq import part_dims
from eps_mlx.cache import Cache
from eps_mlx.summaries.base import mean_codes, near16, to_byte, widened
from eps_mlx.summaries.rq import pack_codes

State = tuple[mx.array, mx.array]


def _host(array: mx.array) -> np.ndarray:
    """The array's own memory; bfloat16 as uint16. Synchronises."""
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array, copy=False)


def _run(kernel: Any, phases: int, *args: Any, alone: bool = False) -> None:
    """Runs kernels on threads of our own: MLX's cannot be reached."""
    from eps_core.cpu import threads

    threads.run(kernel, phases, *args, alone=alone)


def _array(array: np.ndarray | None) -> mx.array | None:
    return None if array is None else mx.array(array)


def _listed(selection: Selection) -> tuple[np.ndarray, np.ndarray]:
    return _host(selection.groups), _host(selection.counts)


def score(cache: Cache, layer: int, q: mx.array, where: Where) -> Scores | None:
    """See `scoring.score`."""
    with mx.stream(cache.stream):
        scored = kernels.score(cache, layer, _host(q.astype(mx.float32)), where, _host, _run)
        if scored is None:
            return None
        estimate, lower, upper, num_missing, slack = scored
        return Scores(
            mx.array(estimate), _array(lower), _array(upper), num_missing, _array(slack), kernels=cache.kernels
        )


def select(scores: Scores, where: Where, layer: int = 0) -> Selection | None:
    """See `selection.select`."""
    chosen = kernels.select(where, _host(scores.estimate), scores.num_missing, layer, _run)
    return None if chosen is None else _selection(chosen)


def _selection(chosen: Chosen) -> Selection:
    groups, counts, uniform, forced, visit = chosen
    return Selection(mx.array(groups), mx.array(counts), uniform, forced, visit=mx.array(visit))


def attend_gated(cache: Cache, layer: int, q: mx.array, where: Where) -> GatedRead | None:
    """Of q [B, Hq, D], unscaled, what `score`, `select`, `attend`, `add_tail` and `skipped_mass` give, to the last bit.
    Out of 16 bits is rounded once, though: they round before the tail is added, too."""
    with mx.stream(cache.stream):
        found = kernels.attend_gated(cache, layer, _host(q.astype(mx.float32)), where, _host, _run)
        if found is None:
            return None
        (out, lse), (_, read_lse) = found.whole, found.read
        return GatedRead(
            mx.array(out).astype(q.dtype), mx.array(lse), mx.array(read_lse), _selection(found.chosen),
            mx.array(found.skipped), found.prepass_share,
        )  # fmt: skip


def attend(cache: Cache, layer: int, q: mx.array, where: Where, selection: Selection | None) -> State:
    """See `attention.attend`."""
    with mx.stream(cache.stream):
        listed = None if selection is None else _listed(selection)
        out, lse = kernels.attend(cache, layer, _host(q.astype(mx.float32)), where, listed, _host, _run)
        return mx.array(out).astype(q.dtype), mx.array(lse)


def attend_rows(cache: Cache, layer: int, q: mx.array, rows: Rows, visit: mx.array | None = None) -> RowsRead:
    """See `attention.attend_rows`."""
    with mx.stream(cache.stream):
        listed = None if visit is None else _host(visit.astype(mx.bool_))
        query, is_short = _host(q.astype(mx.float32)), q.dtype == mx.bfloat16
        out, *others = kernels.attend_rows(cache, layer, query, is_short, rows, listed, _host, _run)
        return RowsRead(mx.array(out).astype(q.dtype), *map(_array, others))


def attend_tail(
    cache: Cache,
    layer: int,
    where: Where,
    scores: Scores,
    selection: Selection,
    lse: mx.array,
) -> State:
    """See `attention.attend_tail`."""
    with mx.stream(cache.stream):
        out, tail, _ = kernels.attend_tail(
            cache, layer, where, _host(scores.estimate), _listed(selection), _host(lse), _host, _run
        )
        return mx.array(out), mx.array(tail)


def build_summary(store: Store, constants: dict[str, mx.array], k: mx.array) -> dict[str, mx.array] | None:
    """See `summaries.build_summary`: k [F, Hkv, S, D], or of U tokens. Covers rq without bounds."""
    if not store.facts.coded or store.rq_bounds:
        return None
    keys = _host(k.astype(mx.float32))
    turned, mean = write.unit_means(keys, store.S, _host(constants["signs"]))
    most = 2 ** (store.mean_bits - 1) - 1
    codes, mean_scale = mean_codes(mx.array(mean), most)
    stored = widened(codes) * widened(mean_scale)[..., None]
    summary = write.build_units(turned, _host(stored), part_dims(store, keys.shape[-1]), store.second_bit)
    arrays = {name: mx.array(array) for name, array in summary.items()}
    rounded = {name: to_byte(near16(x)) if x.dtype == mx.float32 else x for name, x in arrays.items()}
    packed = pack_codes(codes.astype(mx.int32) + (most + 1), store.mean_bits)
    return rounded | {"mean": packed, "mean_scale": mean_scale}


def add_tail(cache: Cache, layer: int, where: Where, scores: Scores, selection: Selection, state: State) -> State:
    """See `attention.add_tail`."""
    out, lse = state
    with mx.stream(cache.stream):
        *tail, share = kernels.attend_tail(
            cache, layer, where, _host(scores.estimate), _listed(selection), _host(lse), _host, _run
        )
        selection.kept["skipped"] = scores.estimate, mx.array(share)
        whole, whole_lse = kernels.merge(_host(out.astype(mx.float32)), _host(lse), *tail)
        return mx.array(whole).astype(out.dtype), mx.array(whole_lse)


def skipped_mass(scores: Scores, selection: Selection) -> mx.array | None:
    """See `selection.skipped_mass`."""
    of, share = selection.kept.get("skipped", (None, None))
    if of is scores.estimate:  # the tail of the same estimates, which summed them, too
        return share
    if selection.visit is None:
        return None
    return mx.array(kernels.skipped_mass(_host(scores.estimate), _host(selection.visit), _run))


def let_go() -> None:
    """Waits until no thread of a kernel holds a view of a pool any more: a write would copy the pool."""
    from eps_core.cpu import threads

    threads.settle()
