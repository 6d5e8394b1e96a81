"""Which groups to visit: sink and recent tokens on the host, policies on the device, no synchronisation.

`estimate [B, Hkv, G]` is the natural log of each group's mass as `score` returns it: +inf without a valid summary
(always selected), -inf past the sequence's end. Policies return a mask [B, Hkv, G] of groups to visit, the forced ones
among them. No sort order of equal values is ever relied on: the K-th value decides, and ties go to the lower index.
"""

import math

import mlx.core as mx
import numpy as np

from eps_core.attention.protocol import Scores, Selection
from eps_core.config.eps import EpsConfig
from eps_core.kv_cache.step_plan import StepPlan
from eps_mlx.kernels.choose import kernels_of, routed

THRESHOLD_ROWS = 256  # groups that one pass of `select_threshold` compares with all others; changes memory only


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


def select_topk(estimate: mx.array, always_selected: mx.array, count: mx.array, most: int) -> mx.array:
    """Forced groups, then the best: `count` [B, Hkv or 1, 1] <= `most` in all."""
    return _best(mx.where(always_selected, math.inf, estimate), count, most)


def select_threshold(config: EpsConfig, estimate: mx.array, always_selected: mx.array) -> mx.array:
    """The threshold rule: newest to oldest, skip when B < T / alpha, T the top_pages-th best so far; of masses, T - log
    alpha, where estimates are their logarithms. T / alpha <= B_j says that fewer than top_pages newer groups have B_i /
    alpha > B_j: a count instead of a heap."""
    assert config.selection_config.top_pages is not None
    groups = estimate.shape[-1]
    lowered = (
        estimate / config.selection_config.alpha
        if config.cache_config.has_norm_estimate
        else estimate - math.log(config.selection_config.alpha)
    )
    scaled = mx.where(mx.isfinite(estimate), lowered, -math.inf)
    index, parts = mx.arange(groups), []
    for start in range(0, groups, THRESHOLD_ROWS):
        rows = slice(start, start + THRESHOLD_ROWS)
        newer_and_better = (scaled[..., None, :] > estimate[..., rows, None]) & (index > index[rows, None])
        parts.append(newer_and_better.sum(axis=-1) < config.selection_config.top_pages)
    return always_selected | (mx.concatenate(parts, axis=-1) & mx.isfinite(estimate))


def _log_total(estimate: mx.array) -> mx.array:
    """log sum exp over the groups that have an estimate [B, Hkv, 1]; -inf where there is none."""
    known = mx.where(mx.isfinite(estimate), estimate, -math.inf)
    largest = mx.maximum(known.max(axis=-1, keepdims=True), -3e38)
    return largest + mx.log(mx.exp(known - largest).sum(axis=-1, keepdims=True))


@routed(lambda kernels: kernels.select)
def select(scores: Scores, plan: StepPlan, layer: int = 0) -> Selection:
    """The configured policy over every (sequence, kv head); scope union gives all heads the union of their groups.
    `layer` says which head modes apply, where the config has any. Runs on the current default device: `scores` are its
    arrays."""
    config = plan.config
    estimate = scores.estimate
    groups = estimate.shape[-1]
    num_always_selected = plan.num_always_selected + np.asarray(scores.num_missing, np.int64)
    inside = mx.array(plan.inside)[:, None, :]
    always_selected = (mx.array(plan.always_selected)[:, None, :] | (estimate == math.inf)) & inside
    uniform = None
    if config.selection_config.policy == "topk":
        uniform = plan.budget(num_always_selected)
        selected_mask = select_topk(
            estimate, always_selected, mx.array(uniform.astype(np.int32))[:, None, None], max(int(uniform.max()), 1)
        )
    else:
        selected_mask = select_threshold(config, estimate, always_selected) & inside
    modes = config.selection_config.head_modes[layer] if config.selection_config.head_modes else ()
    if set(modes) - {"gate"}:
        uniform = None
        dense, window = (mx.array([mode == name for mode in modes])[None, :, None] for name in ("dense", "window"))
        selected_mask = mx.where(dense, inside, mx.where(window, always_selected, selected_mask))
    if uniform is None:  # a policy that wants nothing still reads the best group: attention over none has no meaning
        best = _best(mx.where(inside, estimate, -math.inf), mx.ones((*selected_mask.shape[:-1], 1), mx.int32), 1)
        selected_mask = selected_mask | (best & ~selected_mask.any(axis=-1, keepdims=True))
    wanted = None
    if config.selection_config.scope == "union":
        wanted = selected_mask.sum(axis=-1).astype(mx.int32)
        selected_mask, uniform = mx.broadcast_to(selected_mask.any(axis=1, keepdims=True), selected_mask.shape), None
    width = groups if uniform is None else max(int(uniform.max()), 1)
    listing = kernels_of(scores.kernels).listing
    if listing is not None:
        listed, counts = listing(selected_mask, width)
        return Selection(listed, counts, uniform, num_always_selected, wanted, selected_mask)
    counts = selected_mask.sum(axis=-1).astype(mx.int32)
    return Selection(ascending(selected_mask, width), counts, uniform, num_always_selected, wanted)


def ascending(selected_mask: mx.array, width: int) -> mx.array:
    """Indices of the True entries of selected_mask [B, Hkv, G], ascending, then -1: [B, Hkv, width] int32. Each goes to
    the place that its rank says, the others to a column that is cut off."""
    place = mx.where(selected_mask, mx.cumsum(selected_mask.astype(mx.int32), axis=-1) - 1, width)
    listed = mx.full((*selected_mask.shape[:-1], width + 1), -1, dtype=mx.int32)
    index = mx.broadcast_to(mx.arange(selected_mask.shape[-1], dtype=mx.int32), selected_mask.shape)
    return mx.put_along_axis(listed, place, index, axis=-1)[..., :width]


def selection_mask(selection: Selection, num_groups: int) -> mx.array:
    """[B, Hkv, G]: True where a group is listed."""
    if selection.selected_mask is not None:
        return selection.selected_mask
    groups = selection.groups
    selected_mask = mx.zeros((*groups.shape[:2], num_groups + 1), mx.bool_)
    listed = mx.where(groups < 0, num_groups, groups)
    return mx.put_along_axis(selected_mask, listed, mx.array(True), axis=-1)[..., :num_groups]


@routed(lambda kernels: kernels.skipped_mass)
def skipped_mass(scores: Scores, selection: Selection) -> mx.array:
    """Estimated share of the softmax left unread [B, Hkv]: an estimate, no bound. Groups without an estimate, which
    are always selected, are left out of both sides."""
    estimate = mx.where(mx.isfinite(scores.estimate), scores.estimate, -math.inf)
    left = _log_total(mx.where(selection_mask(selection, estimate.shape[-1]), -math.inf, estimate))
    return mx.where(left > -math.inf, mx.exp(left - _log_total(estimate)), 0)[..., 0]


def best_first(keys: mx.array) -> mx.array:
    """Indices [.., G] int32 in falling order of keys [.., G], the lower first among equals. A sort need not be stable:
    the second one is of whole numbers, (place among the different keys, index)."""
    groups = keys.shape[-1]
    falling = mx.argsort(-keys, axis=-1).astype(mx.int32)
    values = mx.take_along_axis(keys, falling, axis=-1)
    differs = (values[..., 1:] != values[..., :-1]).astype(mx.int64)
    place = mx.pad(mx.cumsum(differs, axis=-1), [(0, 0)] * (keys.ndim - 1) + [(1, 0)])
    return (mx.sort(place * groups + falling, axis=-1) % groups).astype(mx.int32)
