"""Which groups to select: sink and recent tokens on the host, policies on the device, no synchronisation.

`estimate [B, Hkv, G]` is the natural log of each group's mass as `score` returns it: +inf without a valid summary
(always selected), -inf past the sequence's end. Policies return a mask [B, Hkv, G] of groups to select, the always
selected among them. No sort order of equal values is ever relied on: the K-th value decides, and ties go to the lower
index.
"""

import math

import numpy as np

from eps_core.attention.kernels import kernel_first
from eps_core.attention.protocol import Array, Scores, Selection
from eps_core.backend.ops import Ops
from eps_core.config.eps import EpsConfig
from eps_core.kv_cache.step_plan import StepPlan

THRESHOLD_ROWS = 256  # groups that one pass of `select_threshold` compares with all others; changes memory only


def _best(ops: Ops, keys: Array, count: Array, most: int) -> Array:
    """Mask [B, Hkv, G] of the `count` [B, Hkv or 1, 1] <= `most` largest keys, the lower index first among equals."""
    least = ops.kth_largest(keys, count, most)
    above, tied = keys > least, keys == least
    room = count - above.sum(axis=-1, keepdims=True)
    return (above | (tied & (ops.running_count(tied) <= room))) & (count > 0)


def select_threshold(ops: Ops, config: EpsConfig, estimate: Array, always_selected: Array) -> Array:
    """The threshold rule: newest to oldest, skip when B < T / alpha, T the top_pages-th best so far; of masses minus
    log alpha, where estimates are their logarithms. T / alpha <= B_j says that fewer than top_pages newer groups have
    B / alpha > B_j: a count instead of a heap."""
    selection_config = config.selection_config
    assert selection_config.top_pages is not None
    estimate = ops.widest(estimate)
    groups = estimate.shape[-1]
    lowered = (
        estimate / selection_config.alpha
        if config.cache_config.method_spec.norm_estimate
        else estimate - math.log(selection_config.alpha)
    )
    scaled = ops.where(ops.isfinite(estimate), lowered, -math.inf)
    index, parts = ops.arange(estimate, 0, groups), []
    for start in range(0, groups, THRESHOLD_ROWS):
        rows = slice(start, start + THRESHOLD_ROWS)
        newer_and_better = (scaled[..., None, :] > estimate[..., rows, None]) & (index > index[rows, None])
        parts.append(newer_and_better.sum(axis=-1) < selection_config.top_pages)
    return always_selected | (ops.concatenate(parts, axis=-1) & ops.isfinite(estimate))


@kernel_first
def select(ops: Ops, scores: Scores, plan: StepPlan, layer: int = 0) -> Selection:
    """The configured policy over every (sequence, kv head); scope union gives all heads the union of their groups.
    `layer` says which head modes apply, where the config has any. Runs where scores are: on MLX's default device."""
    num_always_selected = plan.num_always_selected + np.asarray(scores.num_missing, np.int64)
    with ops.place():
        selection_config, estimate = plan.config.selection_config, scores.estimate
        inside = ops.on(estimate, plan.inside)[:, None, :]
        always_selected = (ops.on(estimate, plan.always_selected)[:, None, :] | (estimate == math.inf)) & inside
        common_counts = counts_before_union = None
        if selection_config.policy == "topk":
            common_counts = plan.budget(num_always_selected)
            count = ops.on(estimate, common_counts.astype(np.int32))[:, None, None]
            first = ops.where(always_selected, math.inf, estimate)
            selected_mask = _best(ops, first, count, max(int(common_counts.max()), 1))
        else:
            selected_mask = select_threshold(ops, plan.config, estimate, always_selected) & inside
        modes = selection_config.head_modes[layer] if selection_config.head_modes else ()
        if set(modes) - {"sparse"}:
            common_counts = None
            dense, window = (
                ops.on(estimate, np.array([mode == name for mode in modes]))[None, :, None]
                for name in ("dense", "window")
            )
            selected_mask = ops.where(dense, inside, ops.where(window, always_selected, selected_mask))
        if common_counts is None:  # a policy may select nothing: the best group is read, as none has no value
            one = ops.on(estimate, np.ones((1, 1, 1), np.int32))
            best = _best(ops, ops.where(inside, estimate, -math.inf), one, 1)
            selected_mask = selected_mask | (best & ~selected_mask.any(axis=-1, keepdims=True))
        if selection_config.scope == "union":
            counts_before_union, common_counts = ops.int32(selected_mask.sum(axis=-1)), None
            selected_mask = ops.broadcast_to(selected_mask.any(axis=1, keepdims=True), selected_mask.shape)
        width = selected_mask.shape[-1] if common_counts is None else max(int(common_counts.max()), 1)
        listing = ops.kernels_of(scores.kernels).listing
        if listing is not None:
            listed, counts = listing(selected_mask, width=width)
            return Selection(listed, counts, common_counts, num_always_selected, counts_before_union, selected_mask)
        listed, counts = ascending(ops, selected_mask, width), ops.int32(selected_mask.sum(axis=-1))
        return Selection(listed, counts, common_counts, num_always_selected, counts_before_union)


def ascending(ops: Ops, selected_mask: Array, width: int) -> Array:
    """Indices of the True entries of selected_mask [B, Hkv, G], ascending, then -1: [B, Hkv, width] int32. Each goes to
    the place that its rank says, the others to a column that is cut off."""
    place = ops.where(selected_mask, ops.running_count(selected_mask) - 1, width)
    index = ops.broadcast_to(ops.arange(selected_mask, 0, selected_mask.shape[-1]), selected_mask.shape)
    listed = ops.full(selected_mask, (*selected_mask.shape[:-1], width + 1), -1)
    return ops.put_along(listed, place, index)[..., :width]


def selection_mask(ops: Ops, selection: Selection, num_groups: int) -> Array:
    """[B, Hkv, G]: True where a group is listed."""
    if selection.selected_mask is not None:
        return selection.selected_mask
    groups = selection.groups
    selected_mask = ops.full(groups, (*groups.shape[:2], num_groups + 1), False)
    return ops.put_along(selected_mask, ops.where(groups < 0, num_groups, groups), True)[..., :num_groups]


@kernel_first
def skipped_mass(ops: Ops, scores: Scores, selection: Selection) -> Array:
    """Estimated share of the softmax left unread [B, Hkv]: an estimate, no bound. Groups without an estimate, which
    are always selected, are left out of both sides."""
    with ops.place():
        estimate = ops.where(ops.isfinite(scores.estimate), scores.estimate, -math.inf)
        mass = ops.exp(estimate - ops.clip(ops.max(estimate, keepdims=True), -3e38, None))
        skipped = ops.where(selection_mask(ops, selection, mass.shape[-1]), 0, mass)
        return skipped.sum(axis=-1) / ops.clip(mass.sum(axis=-1), 1e-30, None)
