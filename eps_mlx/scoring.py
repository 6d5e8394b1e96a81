"""Scores of every group from its summary, and of the best from their rescoring bits: array operations."""

import math
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from eps_core.attention.protocol import Scores
from eps_core.backend.ops import Summary
from eps_core.backend.summaries.rq import of_groups
from eps_core.backend.summaries.table import method, score_summary
from eps_core.kv_cache.step_plan import StepPlan
from eps_core.summaries.base import Field
from eps_core.summaries.table import fields
from eps_mlx import pages
from eps_mlx.anchors import anchors, combined
from eps_mlx.cache import Cache
from eps_mlx.kernels.choose import routed
from eps_mlx.ops import OPS
from eps_mlx.selection import best_first


class Race(NamedTuple):
    """The groups whose codes were read as far as any."""

    left: mx.array  # [B, Hkv, G] bool: which these are
    summary: Summary  # what was read of them [B, Hkv, C, ..], or of all groups, before any were left behind
    place: mx.array | None  # [B, Hkv, G] int32: where in the former they are; None: the latter


@routed(lambda kernels: kernels.score)
def score(cache: Cache, layer: int, q: mx.array, plan: StepPlan) -> Scores:
    """Estimates [B, Hkv, G] of every group, of the query heads of each kv head as `SelectionConfig.combine` says, and
    bounds [B, Hkv, R, G]: q [B, Hq, D] unscaled. See `Scores` for what the numbers mean."""
    cache_config, spec = cache.cache_config, cache.spec
    batch, _, head_dim = q.shape
    kv_heads = spec.num_kv_heads
    missing = plan.missing(cache.state[layer])
    num_missing = plan.num_missing(cache.state[layer])
    inside = plan.inside

    with mx.stream(cache.stream):
        a = q.astype(mx.float32).reshape(batch, kv_heads, -1, head_dim) * (1 / math.sqrt(head_dim))
        # whole units of one head are contiguous in K and in every summary
        rows = mx.array(
            (np.maximum(plan.table, 0)[:, None, :] * kv_heads + np.arange(kv_heads)[:, None]).astype(np.int32)
        )
        stored = fields(cache_config, head_dim)
        gathered = {
            name: mx.take(pool.reshape(spec.num_units * kv_heads, -1), rows, axis=0).reshape(
                batch, kv_heads, -1, *pool.shape[3:]
            )
            for name, pool in cache.summaries[layer].items()
            if _of_all(stored[name])
        }
        if cache_config.method_spec.reads_keys:
            keys = pages.tiles_of(cache.k[layer], rows, cache_config.unit_tokens)
            gathered = {"keys": keys.reshape(batch, kv_heads, -1, cache_config.S, head_dim)}
        constants = cache.constants(layer)
        if cache_config.method_spec.by_place:
            length = mx.array(plan.lengths)[:, None, None, None]
            constants = constants | {"groups": mx.arange(plan.num_groups), "length": length}
        parts = score_summary(OPS, cache_config, constants, gathered, a)
        known, unknown = mx.array(inside & ~missing)[:, None, :], mx.array(missing)[:, None, :]
        # the groups that were not scored: without a summary, and past the end
        rest = mx.where(unknown, math.inf, -math.inf)
        anchor = anchors(cache, layer, q, plan.table[:, :1], plan.config.selection_config)
        estimate = mx.where(known, combined(parts[0], anchor, plan.sums_after(0, head_dim)), -math.inf)
        race = Race(mx.broadcast_to(known, estimate.shape), gathered, None)
        for part in range(2, 2 + len(plan.cascaded(head_dim))):
            estimate, race = _read_on(cache, layer, a, anchor, estimate, race, plan, part)
        if plan.config.selection_config.rescore:
            estimate, race = _read_on(cache, layer, a, anchor, estimate, race, plan, None)
        estimate = mx.where(known, estimate, rest)
        if parts[1] is None or parts[2] is None:
            return Scores(estimate, None, None, num_missing, kernels=cache.kernels)
        lower = mx.where(known[:, :, None], parts[1], -math.inf)
        upper = mx.where(known[:, :, None], parts[2], rest[:, :, None])
        slack = OPS.logit_slack(a, cache.largest_key[layer][:, None, None])[..., 0]
        return Scores(estimate, lower, upper, num_missing, slack, cache.kernels)


def _of_all(field: Field) -> bool:
    """Return whether scoring reads it of every group."""
    return not field.best_only and not field.part


def _read_on(
    cache: Cache,
    layer: int,
    a: mx.array,
    anchor: mx.array | None,
    estimate: mx.array,
    race: Race,
    plan: StepPlan,
    part: int | None,
) -> tuple[mx.array, Race]:
    """(`estimate` [B, Hkv, G] with better ones of each head's best groups in the race, the lower index first among
    equals; these alone): from one more part of their codes, the `part`-th, or from their rescoring bits where it is
    None. Only this is read, and of them alone."""
    cache_config, kv_heads, head_dim = cache.cache_config, cache.spec.num_kv_heads, a.shape[-1]
    table, counts = plan.table, plan.rescored if part is None else plan.cascaded(head_dim)[part - 2]
    most = int(counts.max())
    best = best_first(mx.where(race.left, estimate, -math.inf))[..., :most]
    units = mx.broadcast_to(
        mx.array(np.maximum(table, 0).astype(np.int32))[:, None], (len(table), kv_heads, table.shape[1])
    )
    heads = mx.arange(kv_heads, dtype=mx.int32)[None, :, None]
    index = mx.arange(len(table), dtype=mx.int32)[:, None, None]
    spans, groups, per_unit = (
        best // cache_config.groups_per_span,
        best % cache_config.groups_per_span,
        cache_config.spans_per_unit,
    )
    rows = (mx.take_along_axis(units, spans // per_unit, axis=-1) * kv_heads + heads) * per_unit + spans % per_unit
    if race.place is None:
        summary = {name: of_groups(name, array, index, heads, spans, groups) for name, array in race.summary.items()}
    else:
        place = mx.take_along_axis(race.place, best, axis=-1)
        summary = {name: array[index, heads, place] for name, array in race.summary.items()}
    for name, field in fields(cache_config, head_dim).items():
        if field.best_only if part is None else field.part == part - 1:
            pool = cache.summaries[layer][name]
            by_group = pool.reshape(-1, *field.shape[1:])
            summary[name] = mx.take(by_group, rows * cache_config.groups_per_span + groups, axis=0)
    constants, own = cache.constants(layer), method(cache_config.method)
    sums = plan.sums_after(len(plan.cascaded(head_dim)) + 1 if part is None else part - 1, head_dim)
    finer = (
        own.rescore(OPS, cache_config, constants, summary, a)
        if part is None
        else own.stage(OPS, cache_config, constants, summary, a, part)
    )
    coarse = mx.take_along_axis(estimate, best, axis=-1)
    wanted = mx.array(np.arange(most) < counts[:, None])[:, None] & mx.take_along_axis(race.left, best, axis=-1)
    estimate = mx.put_along_axis(estimate, best, mx.where(wanted, combined(finer, anchor, sums), coarse), axis=-1)
    left = mx.put_along_axis(race.left & False, best, wanted, axis=-1)
    places = mx.broadcast_to(mx.arange(most, dtype=mx.int32), best.shape)
    place = mx.put_along_axis(mx.zeros(left.shape, mx.int32), best, places, axis=-1)
    return estimate, Race(left, summary, place)
