"""Error bounds, and the groups that strict mode selects in addition."""

import math
from dataclasses import replace

import mlx.core as mx
import numpy as np

from eps_core.attention.protocol import ErrorBound, Scores, Selection
from eps_core.backend.summaries.table import score_summary
from eps_core.config.selection import SelectionConfig
from eps_core.kv_cache.step_plan import StepPlan
from eps_mlx.cache import Cache
from eps_mlx.ops import OPS
from eps_mlx.selection import ascending, best_first, selection_mask

RUN_GROUPS = 32  # groups that `_log_running` adds in a row; changes rounding only


def _float_margin(unread: mx.array, lse: mx.array) -> mx.array:
    """Return the largest error of float32 sums of exponentials, in nats: logarithms of masses `unread` and `lse`."""
    return 2.0**-20 * (mx.where(mx.isfinite(unread), mx.abs(unread), 0) + mx.abs(lse)) + 2.0**-18


def bounds(cache: Cache, layer: int, q: mx.array, plan: StepPlan, scores: Scores, selection: Selection) -> Scores:
    """`scores` with bounds from the codes of single keys, of the groups that `selection` left out; only their codes are
    read. The bounds of the selected ones are left empty: nothing asks for them. Returns `scores` as they are where the
    method's own bounds serve. Synchronises."""
    inner = cache.bound
    if inner is None:
        return scores
    batch, kv_heads, groups = scores.estimate.shape
    size, unit_tokens = cache.cache_config.S, inner.cache_config.unit_tokens
    with mx.stream(cache.stream):
        a = q.astype(mx.float32).reshape(batch, kv_heads, -1, q.shape[-1]) * (1 / math.sqrt(q.shape[-1]))
        left = ~selection_mask(selection, groups) & (scores.estimate > -math.inf)
        lefts = np.array(left.sum(axis=-1))
        width = int(lefts.max())
        slack = OPS.logit_slack(a, cache.largest_key[layer][:, None, None])[..., 0]
        if not inner.can_encode(layer) or not width:
            upper = mx.broadcast_to(mx.where(left, math.inf, -math.inf)[:, :, None], (*a.shape[:3], groups))
            return replace(scores, lower=mx.full(upper.shape, -math.inf), upper=upper, slack=slack)
        listed = ascending(left, width)
        tokens = (mx.maximum(listed, 0)[..., None] * size + mx.arange(size, dtype=mx.int32)).reshape(
            batch, kv_heads, -1
        )
        units = mx.broadcast_to(
            mx.array(np.maximum(plan.table, 0).astype(np.int32))[:, None], (batch, kv_heads, plan.table.shape[1])
        )
        heads = mx.arange(kv_heads, dtype=mx.int32)[:, None]
        rows = mx.take_along_axis(units, tokens // unit_tokens, axis=-1) * kv_heads + heads
        rows = rows * unit_tokens + tokens % unit_tokens
        codes = {
            name: mx.take(pool.reshape(-1, *pool.shape[3:]), rows, axis=0)
            for name, pool in inner.summaries[layer].items()
        }
        _, least, most = score_summary(OPS, inner.cache_config, inner.constants(layer), codes, a)
        assert least is not None and most is not None
        place = mx.broadcast_to(mx.where(listed < 0, groups, listed)[:, :, None], (*a.shape[:3], width))

        def of_groups(part: mx.array) -> mx.array:
            """Bounds of single keys [B, Hkv, R, X S] as bounds of their groups, in their places: [B, Hkv, R, G]."""
            mass = mx.logsumexp(part.reshape(*a.shape[:3], width, size), axis=-1)
            everywhere = mx.full((*a.shape[:3], groups + 1), -math.inf)
            return mx.put_along_axis(everywhere, place, mass, axis=-1)[..., :groups]

        return replace(scores, lower=of_groups(least), upper=of_groups(most), slack=slack)


def bound_error(
    cache: Cache, layer: int, scores: Scores, selected: Selection, out: mx.array, lse: mx.array
) -> ErrorBound:
    """Bounds of what `selected` left out, from valid bounds alone: out [B, Hq, D] and lse [B, Hq] are what `attend`
    gave for exactly these groups. Raises ValueError for a method without bounds."""
    if scores.upper is None or scores.slack is None:
        raise ValueError(f"method {cache.cache_config.method} has no bounds: nothing can be bounded")
    batch, kv_heads, repeat, groups = scores.upper.shape
    with mx.stream(cache.stream):
        skipped = ~selection_mask(selected, groups)[:, :, None]
        unread = mx.logsumexp(mx.where(skipped, scores.upper, -math.inf), axis=-1)
        lse = lse.reshape(batch, kv_heads, repeat)
        # a float32 sigmoid near 1 may round down
        share = mx.sigmoid(unread - lse + (scores.slack + _float_margin(unread, lse))) * (1 + 2.0**-22)
        share = mx.minimum(share, 1.0)
        # everything read: exactly 0, also where a norm past float32 made the slack or the reach infinite
        share = mx.where(unread > -math.inf, share, 0)
        size = mx.linalg.norm(out.astype(mx.float32), axis=-1).reshape(batch, kv_heads, repeat)
        # the norm's own rounding, and that of `out` to its dtype
        reach = (cache.largest_value[layer][:, None] + size) * (1 + 2.0**-16 + mx.finfo(out.dtype).eps)
        return ErrorBound(share.max(axis=-1), mx.where(share > 0, share * reach, 0).max(axis=-1))


def extend_selection(
    selection_config: SelectionConfig, scores: Scores, selection: Selection, lse: mx.array
) -> tuple[Selection, Selection]:
    """(groups to add, all selected groups) so that the error bound of the whole falls to its epsilon, where
    `selection` was attended with lse [B, Hq]. Heads whose error bound holds already get none. The unvisited are ordered
    by their largest upper mass relative to what was read; of them the shortest run is taken after which even the upper
    masses of the rest are small against what was read plus the lower masses of the run. No synchronisation; runs on the
    current default device."""
    if scores.upper is None or scores.lower is None or scores.slack is None:
        raise ValueError("the method has no bounds: nothing can be bounded")
    batch, kv_heads, repeat, groups = scores.upper.shape
    selected_mask, lse = selection_mask(selection, groups), lse.reshape(batch, kv_heads, repeat, 1)
    upper = mx.where(selected_mask[:, :, None], -math.inf, scores.upper)
    lower = mx.where(selected_mask[:, :, None], -math.inf, scores.lower)
    order = best_first((upper - lse).max(axis=2))
    by_need = mx.broadcast_to(order[:, :, None], upper.shape)
    nothing = mx.full(lse.shape, -math.inf)
    # entry j: the first j of the order are selected, the others are not
    rest = _log_running(mx.take_along_axis(upper, by_need, axis=-1)[..., ::-1])[..., ::-1]
    rest = mx.concatenate([rest, nothing], axis=-1)
    gained = mx.concatenate([nothing, _log_running(mx.take_along_axis(lower, by_need, axis=-1))], axis=-1)
    odds = _log_odds(selection_config.epsilon)
    # twice the margin: the error bound that is taken afterwards pays it once more
    margin = scores.slack[..., None] + 2 * _float_margin(rest, lse)
    holds = (rest <= odds + mx.logaddexp(lse, gained) - margin).all(axis=2)
    # the first True; past the sequence's end upper masses are -inf, so the last entry always holds
    count = (mx.cumsum(holds.astype(mx.int32), axis=-1) == 0).sum(axis=-1, keepdims=True)
    index = mx.broadcast_to(mx.arange(groups, dtype=mx.int32), order.shape)
    extra = mx.put_along_axis(mx.zeros(order.shape, mx.int32), order, index, axis=-1) < count
    if selection_config.scope == "union":
        extra = extra.any(axis=1, keepdims=True) & ~selected_mask
    whole = selected_mask | extra
    first, second = (
        Selection(ascending(mask, groups), mask.sum(axis=-1).astype(mx.int32), None, always_selected, wanted)
        for mask, always_selected, wanted in (
            (extra, np.zeros(batch, np.int64), None),
            (whole, selection.always_selected, selection.wanted),
        )
    )
    return first, second


def _log_running(x: mx.array) -> mx.array:
    """log sum exp of x [.., G] up to each entry. In runs: the library's scan of 64k values in a row is off by a
    hundred times `_float_margin` on a CPU."""
    lead, groups = x.shape[:-1], x.shape[-1]
    if groups <= RUN_GROUPS:
        return mx.logcumsumexp(x, axis=-1)
    runs = mx.pad(x, [(0, 0)] * len(lead) + [(0, -groups % RUN_GROUPS)]).reshape(*lead, -1, RUN_GROUPS)
    within = mx.logcumsumexp(runs, axis=-1)
    before = mx.concatenate([mx.full((*lead, 1), -math.inf), _log_running(within[..., :-1, -1])], axis=-1)
    return mx.logaddexp(within, before[..., None]).reshape(*lead, -1)[..., :groups]


def _log_odds(epsilon: float) -> float:
    """log(epsilon / (1 - epsilon)), with its limits at 0 and 1."""
    if epsilon in (0, 1):
        return math.inf if epsilon else -math.inf
    return math.log(epsilon) - math.log1p(-epsilon)
