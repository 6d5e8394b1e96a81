"""Which groups to visit: guards on the host, policies on the device, no synchronisation.

`estimate [B, Hkv, G]` is the natural log of each group's mass as `score` returns it: +inf without a valid summary
(always visited), -inf past the sequence's end. Policies return a mask [B, Hkv, G] of groups to visit, the forced ones
among them. No sort order of equal values is ever relied on: the K-th value decides, and ties go to the lower index.
"""

import math
from dataclasses import replace

import mlx.core as mx
import numpy as np

from eps_core.config.eps import EpsConfig
from eps_core.gate.protocol import Certificate, Scores, Selection
from eps_core.paging.where import budget, forced_groups
from eps_mlx.cache import Cache
from eps_mlx.paths import kernels_module
from eps_mlx.summaries import best_first, logit_slack, score_summary

THRESHOLD_ROWS = 256  # groups that one pass of `select_threshold` compares with all others; changes memory only
RUN_GROUPS = 32  # groups that `_log_running` adds in a row; changes rounding only


def _best(keys: mx.array, count: mx.array, most: int) -> mx.array:
    """Mask [B, Hkv, G] of the `count` [B, Hkv or 1, 1] <= `most` largest keys, the lower index first among equals."""
    groups = keys.shape[-1]
    # the `most` largest as values, then in order: a full sort costs several times as much
    rising = mx.sort(mx.partition(keys, groups - most, axis=-1)[..., groups - most :], axis=-1)
    place = mx.broadcast_to(mx.clip(most - count, 0, most - 1), (*keys.shape[:-1], 1))
    least = mx.take_along_axis(rising, place, axis=-1)
    above, tied = keys > least, keys == least
    room = count - above.sum(axis=-1, keepdims=True)
    return (above | (tied & (mx.cumsum(tied.astype(mx.int32), axis=-1) <= room))) & (count > 0)


def select_topk(estimate: mx.array, forced: mx.array, count: mx.array, most: int) -> mx.array:
    """Forced groups, then the best: `count` [B, Hkv or 1, 1] <= `most` in all."""
    return _best(mx.where(forced, math.inf, estimate), count, most)


def select_share(config: EpsConfig, estimate: mx.array, forced: mx.array) -> mx.array:
    """Every group whose estimated share of the softmax is at least tau."""
    assert config.tau is not None
    return forced | (estimate - _log_total(estimate) >= math.log(config.tau))


def select_mass(config: EpsConfig, estimate: mx.array, forced: mx.array) -> mx.array:
    """The fewest groups, best first, that leave an estimated share of at most epsilon unread."""
    unforced = mx.where(forced, -math.inf, estimate)
    # rising, those without a share first: the longest run that sums to at most epsilon is what may be skipped. In the
    # log domain, so that no share vanishes: epsilon 0 skips nothing
    rising = mx.logcumsumexp(mx.sort(unforced, axis=-1), axis=-1) - _log_total(estimate)
    skipped = (rising <= (math.log(config.epsilon) if config.epsilon else -math.inf)).sum(axis=-1, keepdims=True)
    return forced | _best(unforced, estimate.shape[-1] - skipped, estimate.shape[-1])


def select_threshold(config: EpsConfig, estimate: mx.array, forced: mx.array) -> mx.array:
    """The product requirements' rule: newest to oldest, skip when B < T / alpha, T the top_pages-th best so far; of
    masses, T - log alpha, where estimates are their logarithms. T / alpha <= B_j says that fewer than top_pages newer
    groups have B_i / alpha > B_j: a count instead of a heap."""
    assert config.top_pages is not None
    groups = estimate.shape[-1]
    lowered = estimate / config.alpha if config.has_norm_estimate else estimate - math.log(config.alpha)
    scaled = mx.where(mx.isfinite(estimate), lowered, -math.inf)
    index, parts = mx.arange(groups), []
    for start in range(0, groups, THRESHOLD_ROWS):
        rows = slice(start, start + THRESHOLD_ROWS)
        newer_and_better = (scaled[..., None, :] > estimate[..., rows, None]) & (index > index[rows, None])
        parts.append(newer_and_better.sum(axis=-1) < config.top_pages)
    return forced | (mx.concatenate(parts, axis=-1) & mx.isfinite(estimate))


def _log_total(estimate: mx.array) -> mx.array:
    """log sum exp over the groups that have an estimate [B, Hkv, 1]; -inf where there is none."""
    known = mx.where(mx.isfinite(estimate), estimate, -math.inf)
    largest = mx.maximum(known.max(axis=-1, keepdims=True), -3e38)
    return largest + mx.log(mx.exp(known - largest).sum(axis=-1, keepdims=True))


def select(config: EpsConfig, scores: Scores, lengths: np.ndarray, layer: int = 0) -> Selection:
    """The configured policy over every (sequence, kv head); scope union gives all heads the union of their groups.
    `layer` says which head modes apply, where the config has any. Runs on the current default device: `scores` are its
    arrays."""
    lengths = np.asarray(lengths, np.int64)
    module = kernels_module(scores.kernels)
    if module is not None and (selection := module.select(config, scores, lengths, layer)) is not None:
        return selection
    estimate = scores.estimate
    groups = estimate.shape[-1]
    guards = forced_groups(config, lengths, groups)
    num_forced = guards.sum(axis=1) + np.asarray(scores.num_missing, np.int64)
    inside = mx.array(np.arange(groups) < -(-lengths // config.S)[:, None])[:, None, :]
    forced = (mx.array(guards)[:, None, :] | (estimate == math.inf)) & inside
    uniform = None
    if config.policy == "topk":
        uniform = budget(config, num_forced, lengths)
        visit = select_topk(
            estimate, forced, mx.array(uniform.astype(np.int32))[:, None, None], max(int(uniform.max()), 1)
        )
    elif config.policy == "threshold":
        visit = select_threshold(config, estimate, forced) & inside
    else:
        policy = select_share if config.policy == "share" else select_mass
        visit = policy(config, estimate, forced) & inside
        if config.top_pages is not None:
            count = visit.sum(axis=-1, keepdims=True)
            cap = mx.maximum(forced.sum(axis=-1, keepdims=True), config.top_pages)
            visit = select_topk(mx.where(visit, estimate, -math.inf), forced, mx.minimum(count, cap), groups)
    modes = config.head_modes[layer] if config.head_modes else ()
    if set(modes) - {"gate"}:
        uniform = None
        dense, window = (mx.array([mode == name for mode in modes])[None, :, None] for name in ("dense", "window"))
        visit = mx.where(dense, inside, mx.where(window, forced, visit))
    if uniform is None:  # a policy that wants nothing still reads the best group: attention over none has no meaning
        best = _best(mx.where(inside, estimate, -math.inf), mx.ones((*visit.shape[:-1], 1), mx.int32), 1)
        visit = visit | (best & ~visit.any(axis=-1, keepdims=True))
    wanted = None
    if config.scope == "union":
        wanted = visit.sum(axis=-1).astype(mx.int32)
        visit, uniform = mx.broadcast_to(visit.any(axis=1, keepdims=True), visit.shape), None
    width = groups if uniform is None else max(int(uniform.max()), 1)
    if module is not None and scores.kernels == "metal":
        listed, counts = module.listing(visit, width)
        return Selection(listed, counts, uniform, num_forced, wanted, visit)
    counts = visit.sum(axis=-1).astype(mx.int32)
    return Selection(_ascending(visit, width), counts, uniform, num_forced, wanted)


def _ascending(visit: mx.array, width: int) -> mx.array:
    """Indices of the True entries of visit [B, Hkv, G], ascending, then -1: [B, Hkv, width] int32. Each True entry goes
    to the place that its rank says, the others to a column that is cut off."""
    place = mx.where(visit, mx.cumsum(visit.astype(mx.int32), axis=-1) - 1, width)
    listed = mx.full((*visit.shape[:-1], width + 1), -1, dtype=mx.int32)
    index = mx.broadcast_to(mx.arange(visit.shape[-1], dtype=mx.int32), visit.shape)
    return mx.put_along_axis(listed, place, index, axis=-1)[..., :width]


def visit_mask(selection: Selection, num_groups: int) -> mx.array:
    """[B, Hkv, G]: True where a group is listed."""
    if selection.visit is not None:
        return selection.visit
    groups = selection.groups
    visit = mx.zeros((*groups.shape[:2], num_groups + 1), mx.bool_)
    listed = mx.where(groups < 0, num_groups, groups)
    return mx.put_along_axis(visit, listed, mx.array(True), axis=-1)[..., :num_groups]


def _float_margin(unread: mx.array, lse: mx.array) -> mx.array:
    """What float32 sums of exponentials may be off by, in nats: logarithms of masses `unread` and `lse`."""
    return 2.0**-20 * (mx.where(mx.isfinite(unread), mx.abs(unread), 0) + mx.abs(lse)) + 2.0**-18


def bounds(
    cache: Cache, layer: int, q: mx.array, table: np.ndarray, lengths: np.ndarray, scores: Scores, selection: Selection
) -> Scores:
    """`scores` with bounds from the codes of single keys, of the groups that `selection` left out; only their codes are
    read (and padding to the longest list), and counted in `bound_bytes_read`. The bounds of the visited ones are left
    empty: nothing asks for them. Returns `scores` as they are where the method's own bounds serve. Synchronises."""
    inner = cache.bound
    if inner is None:
        return scores
    batch, kv_heads, groups = scores.estimate.shape
    size, unit_tokens = cache.config.S, inner.config.unit_tokens
    with mx.stream(cache.stream):
        a = q.astype(mx.float32).reshape(batch, kv_heads, -1, q.shape[-1]) * (1 / math.sqrt(q.shape[-1]))
        left = ~visit_mask(selection, groups) & (scores.estimate > -math.inf)
        width = int(left.sum(axis=-1).max())
        slack = logit_slack(a, cache.largest_key[layer][:, None, None])[..., 0]
        if inner.centre[layer] is None or not width:
            upper = mx.broadcast_to(mx.where(left, math.inf, -math.inf)[:, :, None], (*a.shape[:3], groups))
            return replace(scores, lower=mx.full(upper.shape, -math.inf), upper=upper, slack=slack)
        listed = _ascending(left, width)
        tokens = (mx.maximum(listed, 0)[..., None] * size + mx.arange(size, dtype=mx.int32)).reshape(
            batch, kv_heads, -1
        )
        units = mx.broadcast_to(
            mx.array(np.maximum(table, 0).astype(np.int32))[:, None], (batch, kv_heads, table.shape[1])
        )
        heads = mx.arange(kv_heads, dtype=mx.int32)[:, None]
        rows = mx.take_along_axis(units, tokens // unit_tokens, axis=-1) * kv_heads + heads
        rows = rows * unit_tokens + tokens % unit_tokens
        codes = {
            name: mx.take(pool.reshape(-1, *pool.shape[3:]), rows, axis=0)
            for name, pool in inner.summaries[layer].items()
        }
        cache.bound_bytes_read += sum(part.nbytes for part in codes.values())
        _, least, most = score_summary(inner.config, inner.constants(layer), codes, a)
        assert least is not None and most is not None
        place = mx.broadcast_to(mx.where(listed < 0, groups, listed)[:, :, None], (*a.shape[:3], width))

        def of_groups(part: mx.array) -> mx.array:
            """Bounds of single keys [B, Hkv, R, X S] as bounds of their groups, in their places: [B, Hkv, R, G]."""
            mass = mx.logsumexp(part.reshape(*a.shape[:3], width, size), axis=-1)
            everywhere = mx.full((*a.shape[:3], groups + 1), -math.inf)
            return mx.put_along_axis(everywhere, place, mass, axis=-1)[..., :groups]

        return replace(scores, lower=of_groups(least), upper=of_groups(most), slack=slack)


def certify(cache: Cache, layer: int, scores: Scores, visited: Selection, out: mx.array, lse: mx.array) -> Certificate:
    """Bounds of what `visited` left out, from valid bounds alone (design section 4): out [B, Hq, D] and lse [B, Hq] are
    what `attend` gave for exactly these groups. Raises ValueError for a method without bounds."""
    if scores.upper is None or scores.slack is None:
        raise ValueError(f"method {cache.config.method} has no bounds: nothing can be certified")
    batch, kv_heads, repeat, groups = scores.upper.shape
    with mx.stream(cache.stream):
        skipped = ~visit_mask(visited, groups)[:, :, None]
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
        return Certificate(share.max(axis=-1), mx.where(share > 0, share * reach, 0).max(axis=-1))


def escalate(config: EpsConfig, scores: Scores, selection: Selection, lse: mx.array) -> tuple[Selection, Selection]:
    """(groups to visit besides, all visited groups) so that the certificate of the whole falls to config.epsilon, where
    `selection` was attended with lse [B, Hq]. Heads whose certificate holds already get none. The unvisited are ordered
    by their largest upper mass relative to what was read; of them the shortest run is taken after which even the upper
    masses of the rest are small against what was read plus the lower masses of the run. No synchronisation; runs on the
    current default device."""
    if scores.upper is None or scores.lower is None or scores.slack is None:
        raise ValueError(f"method {config.method} has no bounds: nothing can be certified")
    batch, kv_heads, repeat, groups = scores.upper.shape
    visit, lse = visit_mask(selection, groups), lse.reshape(batch, kv_heads, repeat, 1)
    upper = mx.where(visit[:, :, None], -math.inf, scores.upper)
    lower = mx.where(visit[:, :, None], -math.inf, scores.lower)
    order = best_first((upper - lse).max(axis=2))
    by_need = mx.broadcast_to(order[:, :, None], upper.shape)
    nothing = mx.full(lse.shape, -math.inf)
    # entry j: the first j of the order are visited, the others are not
    rest = _log_running(mx.take_along_axis(upper, by_need, axis=-1)[..., ::-1])[..., ::-1]
    rest = mx.concatenate([rest, nothing], axis=-1)
    gained = mx.concatenate([nothing, _log_running(mx.take_along_axis(lower, by_need, axis=-1))], axis=-1)
    odds = _log_odds(config.epsilon)
    # twice the margin: the certificate that is taken afterwards pays it once more
    margin = scores.slack[..., None] + 2 * _float_margin(rest, lse)
    holds = (rest <= odds + mx.logaddexp(lse, gained) - margin).all(axis=2)
    # the first True; past the sequence's end upper masses are -inf, so the last entry always holds
    count = (mx.cumsum(holds.astype(mx.int32), axis=-1) == 0).sum(axis=-1, keepdims=True)
    index = mx.broadcast_to(mx.arange(groups, dtype=mx.int32), order.shape)
    extra = mx.put_along_axis(mx.zeros(order.shape, mx.int32), order, index, axis=-1) < count
    if config.scope == "union":
        extra = extra.any(axis=1, keepdims=True) & ~visit
    whole = visit | extra
    first, second = (
        Selection(_ascending(mask, groups), mask.sum(axis=-1).astype(mx.int32), None, forced, wanted)
        for mask, forced, wanted in (
            (extra, np.zeros(batch, np.int64), None),
            (whole, selection.forced, selection.wanted),
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


def skipped_mass(scores: Scores, selection: Selection) -> mx.array:
    """Estimated share of the softmax left unread [B, Hkv]: an estimate, no bound. Groups without an estimate, which
    are always visited, are left out of both sides."""
    if scores.kernels == "numba":
        module = kernels_module(scores.kernels)
        assert module is not None
        share = module.skipped_mass(scores, selection)
        if share is not None:
            return share
    estimate = mx.where(mx.isfinite(scores.estimate), scores.estimate, -math.inf)
    left = _log_total(mx.where(visit_mask(selection, estimate.shape[-1]), -math.inf, estimate))
    return mx.where(left > -math.inf, mx.exp(left - _log_total(estimate)), 0)[..., 0]
