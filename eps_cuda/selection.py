"""Which groups to visit: guards on the host, policies on the device, no synchronisation.

`estimate [B, Hkv, G]` is the natural log of each group's mass as `score` returns it: +inf without a valid summary
(always visited), -inf past the sequence's end. Policies return a mask [B, Hkv, G] of groups to visit, the forced ones
among them. No sort order of equal values is ever relied on: the K-th value decides, and ties go to the lower index.
"""

import math

import numpy as np
import torch
from torch import Tensor

from eps_core.config.eps import EpsConfig
from eps_core.gate.protocol import Scores, Selection
from eps_core.paging.where import Where
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


def select_topk(estimate: Tensor, forced: Tensor, count: Tensor, most: int) -> Tensor:
    """Forced groups, then the best: `count` [B, Hkv or 1, 1] <= `most` in all."""
    return _best(torch.where(forced, math.inf, estimate), count, most)


def select_threshold(config: EpsConfig, estimate: Tensor, forced: Tensor) -> Tensor:
    """The product requirements' rule: newest to oldest, skip when B < T / alpha, T the top_pages-th best so far; of
    masses, T - log alpha, where estimates are their logarithms. T / alpha <= B_j says that fewer than top_pages newer
    groups have B_i / alpha > B_j: a count instead of a heap."""
    assert config.read.top_pages is not None
    estimate = estimate.double()
    groups = estimate.shape[-1]
    lowered = estimate / config.read.alpha if config.store.has_norm_estimate else estimate - math.log(config.read.alpha)
    scaled = torch.where(torch.isfinite(estimate), lowered, -math.inf)
    index, parts = torch.arange(groups, device=estimate.device), []
    for rows in index.split(THRESHOLD_ROWS):
        newer_and_better = (scaled[..., None, :] > estimate[..., rows, None]) & (index > rows[:, None])
        parts.append(newer_and_better.sum(dim=-1) < config.read.top_pages)
    return forced | (torch.cat(parts, dim=-1) & torch.isfinite(estimate))


@routed(lambda kernels: kernels.select)
@torch.inference_mode()
def select(scores: Scores, where: Where, layer: int = 0) -> Selection:
    """The configured policy over every (sequence, kv head); scope union gives all heads the union of their groups.
    `layer` says which head modes apply, where the config has any."""
    config = where.config
    estimate = scores.estimate
    _, _, groups = estimate.shape
    device = estimate.device
    num_forced = where.num_forced + np.asarray(scores.num_missing, np.int64)
    inside = torch.from_numpy(where.inside).to(device)[:, None, :]
    forced = (torch.from_numpy(where.forced).to(device)[:, None, :] | (estimate == math.inf)) & inside
    uniform = None
    if config.read.policy == "topk":
        uniform = where.budget(num_forced)
        visit = select_topk(estimate, forced, torch.from_numpy(uniform).to(device)[:, None, None], int(uniform.max()))
    else:
        visit = select_threshold(config, estimate, forced) & inside
    modes = config.read.head_modes[layer] if config.read.head_modes else ()
    if set(modes) - {"gate"}:
        uniform = None
        dense, window = (
            torch.tensor([mode == name for mode in modes], device=device)[None, :, None] for name in ("dense", "window")
        )
        visit = torch.where(dense, inside, torch.where(window, forced, visit))
    if uniform is None:  # a policy that wants nothing still reads the best group: attention over none has no meaning
        best = _best(torch.where(inside, estimate, -math.inf), torch.ones_like(visit[..., :1], dtype=torch.int32), 1)
        visit = visit | (best & ~visit.any(dim=-1, keepdim=True))
    wanted = None
    if config.read.scope == "union":
        wanted = visit.sum(dim=-1, dtype=torch.int32)
        visit, uniform = visit.any(dim=1, keepdim=True).expand(visit.shape), None
    width = groups if uniform is None else max(int(uniform.max()), 1)
    listing = kernels_of(scores.kernels).listing
    if listing is not None:
        listed, counts = listing(visit, width)
        return Selection(listed, counts, uniform, num_forced, wanted, visit)
    counts = visit.sum(dim=-1, dtype=torch.int32)
    return Selection(ascending(visit, width), counts, uniform, num_forced, wanted)


def ascending(visit: Tensor, width: int) -> Tensor:
    """Indices of the True entries of visit [B, Hkv, G], ascending, then -1: [B, Hkv, width] int32. Each True entry goes
    to the place that its rank says, the others to a column that is cut off."""
    place = torch.where(visit, visit.cumsum(dim=-1) - 1, width)
    listed = torch.full((*visit.shape[:-1], width + 1), -1, dtype=torch.int32, device=visit.device)
    index = torch.arange(visit.shape[-1], dtype=torch.int32, device=visit.device).expand(visit.shape)
    return listed.scatter_(-1, place, index)[..., :width]


def visit_mask(selection: Selection, num_groups: int) -> Tensor:
    """[B, Hkv, G]: True where a group is listed."""
    if selection.visit is not None:
        return selection.visit
    groups = selection.groups.long()
    visit = torch.zeros((*groups.shape[:2], num_groups + 1), dtype=torch.bool, device=groups.device)
    return visit.scatter_(-1, torch.where(groups < 0, num_groups, groups), True)[..., :num_groups]


@routed(lambda kernels: kernels.skipped_mass)
@torch.inference_mode()
def skipped_mass(scores: Scores, selection: Selection) -> Tensor:
    """Estimated share of the softmax left unread [B, Hkv]: an estimate, no bound. Groups without an estimate, which
    are always visited, are left out of both sides."""
    estimate = torch.where(torch.isfinite(scores.estimate), scores.estimate, -math.inf)
    largest = estimate.amax(dim=-1, keepdim=True).clamp(min=-3e38)
    mass = torch.exp(estimate - largest)
    skipped = torch.where(visit_mask(selection, mass.shape[-1]), 0, mass)
    return skipped.sum(dim=-1) / mass.sum(dim=-1).clamp(min=1e-30)
