"""Which groups to visit: sink and recent tokens on the host, policies on the device, no synchronisation.

`estimate [B, Hkv, G]` is the natural log of each group's mass as `score` returns it: +inf without a valid summary
(always selected), -inf past the sequence's end. Policies return a mask [B, Hkv, G] of groups to visit, the forced ones
among them. No sort order of equal values is ever relied on: the K-th value decides, and ties go to the lower index.
"""

import math

import numpy as np
import torch
from torch import Tensor

from eps_core.attention.protocol import Scores, Selection
from eps_core.config.eps import EpsConfig
from eps_core.kv_cache.step_plan import StepPlan
from eps_cuda.kernels.choose import kernels_of, routed

THRESHOLD_ROWS = 256  # groups that one pass of `select_threshold` compares with all others; changes memory only


def _best(keys: Tensor, count: Tensor, most: int) -> Tensor:
    """Mask [B, Hkv, G] of the `count` [B, Hkv or 1, 1] <= `most` largest keys, the lower index first among equals."""
    falling = keys.topk(most, dim=-1).values
    place = (count - 1).clamp(0, most - 1).expand(*keys.shape[:-1], 1)
    least = falling.gather(-1, place)
    above, tied = keys > least, keys == least
    room = count - above.sum(dim=-1, keepdim=True)
    return (above | (tied & (tied.cumsum(dim=-1, dtype=torch.int32) <= room))) & (count > 0)


def select_topk(estimate: Tensor, always_selected: Tensor, count: Tensor, most: int) -> Tensor:
    """Forced groups, then the best: `count` [B, Hkv or 1, 1] <= `most` in all."""
    return _best(torch.where(always_selected, math.inf, estimate), count, most)


def select_threshold(config: EpsConfig, estimate: Tensor, always_selected: Tensor) -> Tensor:
    """The threshold rule: newest to oldest, skip when B < T / alpha, T the top_pages-th best so far; of masses, T - log
    alpha, where estimates are their logarithms. T / alpha <= B_j says that fewer than top_pages newer groups have B_i /
    alpha > B_j: a count instead of a heap."""
    assert config.selection_config.top_pages is not None
    estimate = estimate.double()
    groups = estimate.shape[-1]
    lowered = (
        estimate / config.selection_config.alpha
        if config.cache_config.has_norm_estimate
        else estimate - math.log(config.selection_config.alpha)
    )
    scaled = torch.where(torch.isfinite(estimate), lowered, -math.inf)
    index, parts = torch.arange(groups, device=estimate.device), []
    for rows in index.split(THRESHOLD_ROWS):
        newer_and_better = (scaled[..., None, :] > estimate[..., rows, None]) & (index > rows[:, None])
        parts.append(newer_and_better.sum(dim=-1) < config.selection_config.top_pages)
    return always_selected | (torch.cat(parts, dim=-1) & torch.isfinite(estimate))


@routed(lambda kernels: kernels.select)
@torch.inference_mode()
def select(scores: Scores, plan: StepPlan, layer: int = 0) -> Selection:
    """The configured policy over every (sequence, kv head); scope union gives all heads the union of their groups.
    `layer` says which head modes apply, where the config has any."""
    config = plan.config
    estimate = scores.estimate
    _, _, groups = estimate.shape
    device = estimate.device
    num_always_selected = plan.num_always_selected + np.asarray(scores.num_missing, np.int64)
    inside = torch.from_numpy(plan.inside).to(device)[:, None, :]
    always_selected = (torch.from_numpy(plan.always_selected).to(device)[:, None, :] | (estimate == math.inf)) & inside
    uniform = None
    if config.selection_config.policy == "topk":
        uniform = plan.budget(num_always_selected)
        selected_mask = select_topk(
            estimate, always_selected, torch.from_numpy(uniform).to(device)[:, None, None], int(uniform.max())
        )
    else:
        selected_mask = select_threshold(config, estimate, always_selected) & inside
    modes = config.selection_config.head_modes[layer] if config.selection_config.head_modes else ()
    if set(modes) - {"gate"}:
        uniform = None
        dense, window = (
            torch.tensor([mode == name for mode in modes], device=device)[None, :, None] for name in ("dense", "window")
        )
        selected_mask = torch.where(dense, inside, torch.where(window, always_selected, selected_mask))
    if uniform is None:  # a policy that wants nothing still reads the best group: attention over none has no meaning
        best = _best(
            torch.where(inside, estimate, -math.inf), torch.ones_like(selected_mask[..., :1], dtype=torch.int32), 1
        )
        selected_mask = selected_mask | (best & ~selected_mask.any(dim=-1, keepdim=True))
    wanted = None
    if config.selection_config.scope == "union":
        wanted = selected_mask.sum(dim=-1, dtype=torch.int32)
        selected_mask, uniform = selected_mask.any(dim=1, keepdim=True).expand(selected_mask.shape), None
    width = groups if uniform is None else max(int(uniform.max()), 1)
    listing = kernels_of(scores.kernels).listing
    if listing is not None:
        listed, counts = listing(selected_mask, width)
        return Selection(listed, counts, uniform, num_always_selected, wanted, selected_mask)
    counts = selected_mask.sum(dim=-1, dtype=torch.int32)
    return Selection(ascending(selected_mask, width), counts, uniform, num_always_selected, wanted)


def ascending(selected_mask: Tensor, width: int) -> Tensor:
    """Indices of the True entries of selected_mask [B, Hkv, G], ascending, then -1: [B, Hkv, width] int32. Each goes to
    the place that its rank says, the others to a column that is cut off."""
    place = torch.where(selected_mask, selected_mask.cumsum(dim=-1) - 1, width)
    listed = torch.full((*selected_mask.shape[:-1], width + 1), -1, dtype=torch.int32, device=selected_mask.device)
    index = torch.arange(selected_mask.shape[-1], dtype=torch.int32, device=selected_mask.device).expand(
        selected_mask.shape
    )
    return listed.scatter_(-1, place, index)[..., :width]


def selection_mask(selection: Selection, num_groups: int) -> Tensor:
    """[B, Hkv, G]: True where a group is listed."""
    if selection.selected_mask is not None:
        return selection.selected_mask
    groups = selection.groups.long()
    selected_mask = torch.zeros((*groups.shape[:2], num_groups + 1), dtype=torch.bool, device=groups.device)
    return selected_mask.scatter_(-1, torch.where(groups < 0, num_groups, groups), True)[..., :num_groups]


@routed(lambda kernels: kernels.skipped_mass)
@torch.inference_mode()
def skipped_mass(scores: Scores, selection: Selection) -> Tensor:
    """Estimated share of the softmax left unread [B, Hkv]: an estimate, no bound. Groups without an estimate, which
    are always selected, are left out of both sides."""
    estimate = torch.where(torch.isfinite(scores.estimate), scores.estimate, -math.inf)
    largest = estimate.amax(dim=-1, keepdim=True).clamp(min=-3e38)
    mass = torch.exp(estimate - largest)
    skipped = torch.where(selection_mask(selection, mass.shape[-1]), 0, mass)
    return skipped.sum(dim=-1) / mass.sum(dim=-1).clamp(min=1e-30)
