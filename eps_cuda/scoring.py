"""Scores of every group from its summary, and of the best from their rescoring bits: array operations."""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from eps_core.attention.protocol import Scores
from eps_core.backend.ops import Summary
from eps_core.backend.summaries.rq import of_groups
from eps_core.backend.summaries.table import method, score_summary
from eps_core.kv_cache.step_plan import StepPlan
from eps_core.summaries.base import Field
from eps_core.summaries.table import fields
from eps_cuda import pages
from eps_cuda.anchors import anchors, combined
from eps_cuda.cache import Cache
from eps_cuda.kernels.choose import routed
from eps_cuda.ops import OPS


class Race(NamedTuple):
    """The groups whose codes were read as far as any."""

    left: Tensor  # [B, Hkv, G] bool: which these are
    summary: Summary  # what was read of them [B, Hkv, C, ..], or of all groups, before any were left behind
    place: Tensor | None  # [B, Hkv, G] int64: where in the former they are; None: the latter


@routed(lambda kernels: kernels.score)
@torch.inference_mode()
def score(cache: Cache, layer: int, q: Tensor, plan: StepPlan) -> Scores:
    """Estimates [B, Hkv, G] of every group, of the query heads of each kv head as `SelectionConfig.combine` says, and
    bounds [B, Hkv, R, G]: q [B, Hq, D] unscaled. See `Scores` for what the numbers mean."""
    cache_config, spec = cache.cache_config, cache.spec
    batch, _, head_dim = q.shape
    kv_heads = spec.num_kv_heads
    missing = plan.missing(cache.state[layer])
    num_missing = plan.num_missing(cache.state[layer])
    inside = plan.inside

    a = q.float().reshape(batch, kv_heads, -1, head_dim) * (1 / math.sqrt(head_dim))
    # whole units of one head are contiguous in K and in every summary
    rows = (np.maximum(plan.table, 0)[:, None, :].astype(np.int64) * kv_heads + np.arange(kv_heads)[:, None]).reshape(
        -1
    )
    rows = torch.from_numpy(rows).to(q.device)
    stored = fields(cache_config, head_dim)
    gathered = {
        name: pool.reshape(spec.num_units * kv_heads, -1)
        .index_select(0, rows)
        .reshape(batch, kv_heads, -1, *pool.shape[3:])
        for name, pool in cache.summaries[layer].items()
        if _of_all(stored[name])
    }
    if cache_config.method_spec.reads_keys:
        keys = pages.tiles_of(cache.k[layer], rows, cache_config.unit_tokens)
        gathered = {"keys": keys.reshape(batch, kv_heads, -1, cache_config.S, head_dim)}
    constants = cache.constants(layer)
    if cache_config.method_spec.by_place:
        length = torch.from_numpy(plan.lengths).to(q.device)[:, None, None, None]
        constants = constants | {"groups": torch.arange(plan.num_groups, device=q.device), "length": length}
    parts = score_summary(OPS, cache_config, constants, gathered, a)
    # 0: scored, 1: without a summary, 2: past the end
    state = torch.from_numpy(np.where(inside, missing.astype(np.uint8), np.uint8(2))).to(q.device)[:, None, :]
    known, past = state == 0, state == 2
    anchor = anchors(cache, layer, q, torch.from_numpy(plan.table[:, :1]).to(q.device), plan.config.selection_config)
    estimate = torch.where(known, combined(parts[0], anchor, plan.sums_after(0, head_dim)), -math.inf)
    race = Race(known.expand(estimate.shape), gathered, None)
    for part in range(2, 2 + len(plan.cascaded(head_dim))):
        estimate, race = _read_on(cache, layer, a, anchor, estimate, race, plan, part)
    if plan.config.selection_config.rescore:
        estimate, race = _read_on(cache, layer, a, anchor, estimate, race, plan, None)
    estimate = torch.where(known | past, estimate, math.inf)
    if parts[1] is None or parts[2] is None:
        return Scores(estimate, None, None, num_missing, kernels=cache.kernels)
    known, past = known[:, :, None], past[:, :, None]
    lower = torch.where(known, parts[1], -math.inf)
    upper = torch.where(known, parts[2], torch.where(past, -math.inf, math.inf))
    slack = OPS.logit_slack(a, cache.largest_key[layer][:, None, None])[..., 0]
    return Scores(estimate, lower, upper, num_missing, slack, cache.kernels)


def _of_all(field: Field) -> bool:
    """Return whether scoring reads it of every group."""
    return not field.best_only and not field.part


def _read_on(
    cache: Cache,
    layer: int,
    a: Tensor,
    anchor: Tensor | None,
    estimate: Tensor,
    race: Race,
    plan: StepPlan,
    part: int | None,
) -> tuple[Tensor, Race]:
    """(`estimate` [B, Hkv, G] with better ones of each head's best groups in the race, the lower index first among
    equals; these alone): from one more part of their codes, the `part`-th, or from their rescoring bits where it is
    None. Only this is read, and of them alone."""
    cache_config, kv_heads, head_dim = cache.cache_config, cache.spec.num_kv_heads, a.shape[-1]
    device, counts = estimate.device, plan.rescored if part is None else plan.cascaded(head_dim)[part - 2]
    most = int(counts.max())
    # a stable sort: equal estimates keep their order
    ranked = torch.where(race.left, estimate, -math.inf)
    best = ranked.sort(dim=-1, descending=True, stable=True).indices[..., :most]
    units = torch.from_numpy(np.maximum(plan.table, 0).astype(np.int64)).to(device)[:, None].expand(-1, kv_heads, -1)
    heads = torch.arange(kv_heads, device=device)[None, :, None]
    index = torch.arange(len(estimate), device=device)[:, None, None]
    spans, groups, per_unit = (
        best // cache_config.groups_per_span,
        best % cache_config.groups_per_span,
        cache_config.spans_per_unit,
    )
    rows = (units.gather(-1, spans // per_unit) * kv_heads + heads) * per_unit + spans % per_unit
    if race.place is None:
        summary = {name: of_groups(name, array, index, heads, spans, groups) for name, array in race.summary.items()}
    else:
        place = race.place.gather(-1, best)
        summary = {name: array[index, heads, place] for name, array in race.summary.items()}
    for name, field in fields(cache_config, head_dim).items():
        if field.best_only if part is None else field.part == part - 1:
            shape = field.shape[1:]
            by_group = cache.summaries[layer][name].reshape(-1, *shape)
            wanted_rows = (rows * cache_config.groups_per_span + groups).reshape(-1)
            summary[name] = by_group.index_select(0, wanted_rows).reshape(*rows.shape, *shape)
    constants, own = cache.constants(layer), method(cache_config.method)
    sums = plan.sums_after(len(plan.cascaded(head_dim)) + 1 if part is None else part - 1, head_dim)
    finer = (
        own.rescore(OPS, cache_config, constants, summary, a)
        if part is None
        else own.stage(OPS, cache_config, constants, summary, a, part)
    )
    coarse = estimate.gather(-1, best)
    wanted = torch.from_numpy(np.arange(most) < counts[:, None]).to(device)[:, None] & race.left.gather(-1, best)
    estimate = estimate.scatter(-1, best, torch.where(wanted, combined(finer, anchor, sums), coarse))
    left = torch.zeros_like(race.left).scatter(-1, best, wanted)
    place = torch.zeros_like(left, dtype=torch.int64).scatter(
        -1, best, torch.arange(most, device=device).expand_as(best)
    )
    return estimate, Race(left, summary, place)
