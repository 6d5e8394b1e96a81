"""Proven limits of what sparse attention left out, and the groups that bring them down."""

import math
from dataclasses import replace
from typing import Any

import numpy as np

from eps_core.attention.protocol import Array, ErrorBound, Scores, Selection
from eps_core.backend.ops import Ops
from eps_core.backend.selection import ascending, selection_mask
from eps_core.backend.summaries.table import score_summary
from eps_core.config.selection import SelectionConfig
from eps_core.kv_cache.step_plan import StepPlan


def _float_margin(ops: Ops, unread: Array, lse: Array) -> Array:
    """Return the largest error of float32 sums of exponentials, in nats: logarithms of masses `unread` and `lse`."""
    return 2.0**-20 * (ops.where(ops.isfinite(unread), ops.abs(unread), 0) + ops.abs(lse)) + 2.0**-18


def bounds(ops: Ops, cache: Any, layer: int, q: Array, plan: StepPlan, scores: Scores, selection: Selection) -> Scores:
    """`scores` with bounds from the codes of single keys, of the groups that `selection` left out; only their codes are
    read. The bounds of the selected ones are left empty: nothing asks for them. Returns `scores` as they are where the
    method's own bounds serve. Synchronises."""
    inner = cache.bound
    if inner is None:
        return scores
    batch, kv_heads, groups = scores.estimate.shape
    size, unit_tokens = cache.cache_config.S, inner.cache_config.unit_tokens
    with ops.place(cache):
        a = ops.float32(q).reshape(batch, kv_heads, -1, q.shape[-1]) * (1 / math.sqrt(q.shape[-1]))
        left = ~selection_mask(ops, selection, groups) & (scores.estimate > -math.inf)
        width = int(left.sum(axis=-1).max())
        slack = ops.logit_slack(a, cache.largest_key[layer][:, None, None])[..., 0]
        if not inner.can_encode(layer) or not width:
            upper = ops.where(left, math.inf, -math.inf)[:, :, None]
            upper = ops.broadcast_to(upper, (*a.shape[:3], groups))
            return replace(scores, lower=ops.full(a, upper.shape, -math.inf), upper=upper, slack=slack)
        listed = ascending(ops, left, width)
        tokens = ops.clip(listed, 0, None)[..., None] * size + ops.arange(a, 0, size)
        tokens = tokens.reshape(batch, kv_heads, -1)
        units = ops.index(a, np.maximum(plan.table, 0))[:, None]
        units = ops.broadcast_to(units, (batch, kv_heads, plan.table.shape[1]))
        rows = ops.take_along(units, tokens // unit_tokens) * kv_heads + ops.arange(a, 0, kv_heads)[:, None]
        rows = rows * unit_tokens + tokens % unit_tokens
        codes = {
            name: ops.gather_rows(pool.reshape(-1, *pool.shape[3:]), rows)
            for name, pool in inner.summaries[layer].items()
        }
        _, least, most = score_summary(ops, inner.cache_config, inner.constants(layer), codes, a)
        assert least is not None and most is not None
        place = ops.where(listed < 0, groups, listed)[:, :, None]
        place = ops.broadcast_to(place, (*a.shape[:3], width))

        def of_groups(part: Array) -> Array:
            """Bounds of single keys [B, Hkv, R, X S] as bounds of their groups, in their places: [B, Hkv, R, G]."""
            mass = ops.logsumexp(part.reshape(*a.shape[:3], width, size), axis=-1)
            return ops.put_along(ops.full(a, (*a.shape[:3], groups + 1), -math.inf), place, mass)[..., :groups]

        return replace(scores, lower=of_groups(least), upper=of_groups(most), slack=slack)


def bound_error(
    ops: Ops, cache: Any, layer: int, scores: Scores, selected: Selection, out: Array, lse: Array
) -> ErrorBound:
    """Bounds of what `selected` left out, from valid bounds alone: out [B, Hq, D] and lse [B, Hq] are what `attend`
    gave for exactly these groups. Raises ValueError for a method without bounds."""
    if scores.upper is None or scores.slack is None:
        raise ValueError(f"method {cache.cache_config.method} has no bounds: nothing can be bounded")
    batch, kv_heads, repeat, groups = scores.upper.shape
    with ops.place(cache):
        skipped = ~selection_mask(ops, selected, groups)[:, :, None]
        unread = ops.logsumexp(ops.where(skipped, scores.upper, -math.inf), axis=-1)
        lse = lse.reshape(batch, kv_heads, repeat)
        # a float32 sigmoid near 1 may round down
        share = ops.sigmoid(unread - lse + (scores.slack + _float_margin(ops, unread, lse))) * (1 + 2.0**-22)
        share = ops.clip(share, None, 1.0)
        # everything read: exactly 0, also where a norm past float32 made the slack or the reach infinite
        share = ops.where(unread > -math.inf, share, 0.0)
        size = ops.norms(ops.float32(out)).reshape(batch, kv_heads, repeat)
        # the norm's own rounding, and that of `out` to its dtype
        reach = (cache.largest_value[layer][:, None] + size) * (1 + 2.0**-16 + ops.finfo(out.dtype).eps)
        return ErrorBound(ops.max(share), ops.max(ops.where(share > 0, share * reach, 0.0)))


def extend_selection(
    ops: Ops, selection_config: SelectionConfig, scores: Scores, selection: Selection, lse: Array
) -> tuple[Selection, Selection]:
    """(groups to add, all selected groups) so that the error bound of the whole falls to its epsilon, where
    `selection` was attended with lse [B, Hq]. Heads whose error bound holds already get none. The unvisited are ordered
    by their largest upper mass relative to what was read; of them the shortest run is taken after which even the upper
    masses of the rest are small against what was read plus the lower masses of the run. No synchronisation; runs where
    scores are, on MLX's default device."""
    if scores.upper is None or scores.lower is None or scores.slack is None:
        raise ValueError("the method has no bounds: nothing can be bounded")
    batch, kv_heads, repeat, groups = scores.upper.shape
    with ops.place():
        selected_mask, lse = selection_mask(ops, selection, groups), lse.reshape(batch, kv_heads, repeat, 1)
        # a float32 scan of many groups is off by more than the margin
        upper = ops.where(selected_mask[:, :, None], -math.inf, ops.widest(scores.upper))
        lower = ops.where(selected_mask[:, :, None], -math.inf, ops.widest(scores.lower))
        order = ops.best_first(ops.max(upper - lse, axis=2))
        by_need = ops.broadcast_to(order[:, :, None], upper.shape)
        nothing = ops.full(lse, lse.shape, -math.inf)
        # entry j: the first j of the order are selected, the others are not
        rest = ops.flip(ops.log_running(ops.flip(ops.take_along(upper, by_need))))
        rest = ops.concatenate([rest, nothing], axis=-1)
        gained = ops.concatenate([nothing, ops.log_running(ops.take_along(lower, by_need))], axis=-1)
        odds = _log_odds(selection_config.epsilon)
        # twice the margin: the error bound that is taken afterwards pays it once more
        margin = scores.slack[..., None] + 2 * _float_margin(ops, rest, lse)
        holds = (rest <= odds + ops.logaddexp(lse, gained) - margin).all(axis=2)
        # the first True; past the sequence's end upper masses are -inf, so the last entry always holds
        count = (ops.running_count(holds) == 0).sum(axis=-1, keepdims=True)
        index = ops.broadcast_to(ops.arange(order, 0, groups), order.shape)
        extra = ops.put_along(ops.full(order, order.shape, 0), order, index) < count
        if selection_config.scope == "union":
            extra = extra.any(axis=1, keepdims=True) & ~selected_mask
        added = _listed(ops, extra, np.zeros(batch, np.int64), None)
        return added, _listed(ops, selected_mask | extra, selection.always_selected, selection.counts_before_union)


def _listed(ops: Ops, mask: Array, always_selected: np.ndarray, counts_before_union: Array | None) -> Selection:
    counts = ops.int32(mask.sum(axis=-1))
    return Selection(ascending(ops, mask, mask.shape[-1]), counts, None, always_selected, counts_before_union)


def _log_odds(epsilon: float) -> float:
    """log(epsilon / (1 - epsilon)), with its limits at 0 and 1."""
    if epsilon in (0, 1):
        return math.inf if epsilon else -math.inf
    return math.log(epsilon) - math.log1p(-epsilon)
