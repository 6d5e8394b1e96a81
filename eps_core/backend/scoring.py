"""The log mass of every group, from its summary alone: gather whole units of summaries, score, fill the rest."""

import math
from typing import Any, NamedTuple

import numpy as np

from eps_core.attention.kernels import kernel_first
from eps_core.attention.protocol import Array, Scores
from eps_core.backend import pages
from eps_core.backend.ops import Ops, Summary
from eps_core.backend.summaries.rq import of_groups
from eps_core.backend.summaries.table import method, score_summary
from eps_core.config.selection import ANCHOR_SPREAD, SelectionConfig
from eps_core.kv_cache.step_plan import StepPlan
from eps_core.summaries.base import LARGEST_ESTIMATE
from eps_core.summaries.table import fields


class Race(NamedTuple):
    """The groups whose codes were read as far as any."""

    left: Array  # [B, Hkv, G] bool: which these are
    summary: Summary  # what was read of them [B, Hkv, C, ..], or of all groups, before any were left behind
    place: Array | None  # [B, Hkv, G] indices: where in the former they are; None: the latter


@kernel_first
def score(ops: Ops, cache: Any, layer: int, q: Array, plan: StepPlan) -> Scores:
    """Estimates [B, Hkv, G] of every group, of the query heads of each kv head as `SelectionConfig.combine` says, and
    bounds [B, Hkv, R, G]: q [B, Hq, D] unscaled. See `Scores` for what the numbers mean."""
    with ops.place(cache):
        cache_config, spec = cache.cache_config, cache.spec
        batch, _, head_dim = q.shape
        kv_heads = spec.num_kv_heads
        missing, inside = plan.missing(cache.state[layer]), plan.inside
        num_missing = plan.num_missing(cache.state[layer])
        a = ops.float32(q).reshape(batch, kv_heads, -1, head_dim) * (1 / math.sqrt(head_dim))
        # whole units of one head are contiguous in K and in every summary
        rows = ops.index(q, np.maximum(plan.table, 0)[:, None, :] * kv_heads + np.arange(kv_heads)[:, None])
        stored = fields(cache_config, head_dim)
        gathered = {
            name: ops.gather_rows(pool.reshape(spec.num_units * kv_heads, -1), rows).reshape(
                batch, kv_heads, -1, *pool.shape[3:]
            )
            for name, pool in cache.summaries[layer].items()
            if not (stored[name].best_only or stored[name].part)  # which are read of the best groups
        }
        if cache_config.method_spec.reads_keys:
            keys = pages.tiles_of(ops, cache.k[layer], rows, cache_config.unit_tokens)
            gathered = {"keys": keys.reshape(batch, kv_heads, -1, cache_config.S, head_dim)}
        constants = cache.constants(layer)
        if cache_config.method_spec.by_place:
            length = ops.on(q, plan.lengths)[:, None, None, None]
            constants = constants | {"groups": ops.arange(q, 0, plan.num_groups), "length": length}
        estimates, lower, upper = score_summary(ops, cache_config, constants, gathered, a)
        known, unknown = ops.on(q, inside & ~missing)[:, None, :], ops.on(q, missing)[:, None, :]
        # the groups that were not scored: without a summary, and past the end
        rest = ops.where(unknown, math.inf, -math.inf)
        anchor = anchors(ops, cache, layer, q, ops.index(q, plan.table[:, 0]), plan.config.selection_config)
        estimate = ops.where(known, combined(ops, estimates, anchor, plan.sums_after(0, head_dim)), -math.inf)
        race = Race(ops.broadcast_to(known, estimate.shape), gathered, None)
        for part in range(2, 2 + len(plan.cascaded(head_dim))):
            estimate, race = _read_on(ops, cache, layer, a, anchor, estimate, race, plan, part)
        if plan.config.selection_config.rescore:
            estimate, race = _read_on(ops, cache, layer, a, anchor, estimate, race, plan, None)
        estimate = ops.where(known, estimate, rest)
        if lower is None or upper is None:
            return Scores(estimate, None, None, num_missing, kernels=cache.kernels)
        lower = ops.where(known[:, :, None], lower, -math.inf)
        upper = ops.where(known[:, :, None], upper, rest[:, :, None])
        slack = ops.logit_slack(a, cache.largest_key[layer][:, None, None])[..., 0]
        return Scores(estimate, lower, upper, num_missing, slack, cache.kernels)


def _read_on(
    ops: Ops, cache: Any, layer: int, a: Array, anchor: Array | None, estimate: Array, race: Race, plan: StepPlan,
    part: int | None,
) -> tuple[Array, Race]:  # fmt: skip
    """(`estimate` [B, Hkv, G] with better ones of each head's best groups in the race, the lower index first among
    equals; these alone): from one more part of their codes, the `part`-th, or from their rescoring bits where it is
    None. Only this is read, and of them alone."""
    cache_config, kv_heads, head_dim = cache.cache_config, cache.spec.num_kv_heads, a.shape[-1]
    table, counts = plan.table, plan.rescored if part is None else plan.cascaded(head_dim)[part - 2]
    most, per_span, per_unit = int(counts.max()), cache_config.groups_per_span, cache_config.spans_per_unit
    best = ops.best_first(ops.where(race.left, estimate, -math.inf))[..., :most]
    units = ops.index(a, np.maximum(table, 0))[:, None]
    units = ops.broadcast_to(units, (len(table), kv_heads, table.shape[1]))
    heads = ops.arange(a, 0, kv_heads)[None, :, None]
    index = ops.arange(a, 0, len(table))[:, None, None]
    spans, groups = best // per_span, best % per_span
    rows = (ops.take_along(units, spans // per_unit) * kv_heads + heads) * per_unit + spans % per_unit
    if race.place is None:
        summary = {name: of_groups(name, array, index, heads, spans, groups) for name, array in race.summary.items()}
    else:
        place = ops.take_along(race.place, best)
        summary = {name: array[index, heads, place] for name, array in race.summary.items()}
    for name, field in fields(cache_config, head_dim).items():
        if field.best_only if part is None else field.part == part - 1:
            by_group = cache.summaries[layer][name].reshape(-1, *field.shape[1:])
            summary[name] = ops.gather_rows(by_group, rows * per_span + groups)
    constants, own = cache.constants(layer), method(cache_config.method)
    sums = plan.sums_after(len(plan.cascaded(head_dim)) + 1 if part is None else part - 1, head_dim)
    finer = (
        own.rescore(ops, cache_config, constants, summary, a)
        if part is None
        else own.stage(ops, cache_config, constants, summary, a, part)
    )
    wanted = ops.on(a, np.arange(most) < counts[:, None])[:, None] & ops.take_along(race.left, best)
    coarse = ops.take_along(estimate, best)
    estimate = ops.put_along(estimate, best, ops.where(wanted, combined(ops, finer, anchor, sums), coarse))
    left = ops.put_along(ops.zeros_like(race.left), best, wanted)
    places = ops.broadcast_to(ops.arange(a, 0, most), best.shape)
    place = ops.put_along(ops.full(a, left.shape, 0), best, places)
    return estimate, Race(left, summary, place)


# How the estimates of the query heads of one kv head become one (`SelectionConfig.combine`)


def anchors(
    ops: Ops, cache: Any, layer: int, q: Array, units: Array, selection_config: SelectionConfig
) -> Array | None:
    """The anchors [B, Hkv, R] float32 of the query heads q [B, Hq, D] unscaled, where these are summed: the logits of
    the first token of each sequence, which begins with `units` [B] (device), at most `ANCHOR_SPREAD` from their
    mean."""
    if selection_config.combine == "max":
        return None
    keys = ops.float32(pages.first_rows(ops, cache.k[layer], units))
    batch, num_heads, head_dim = q.shape
    kv_heads = cache.spec.num_kv_heads
    heads = ops.float32(q).reshape(batch, kv_heads, num_heads // kv_heads, head_dim)
    logits = (heads * keys[:, :, None]).sum(axis=-1) * (1 / math.sqrt(head_dim))
    mean = logits.mean(axis=-1, keepdims=True)
    return mean + ops.clip(logits - mean, -ANCHOR_SPREAD, ANCHOR_SPREAD)


def combined(ops: Ops, estimates: Array, anchor: Array | None, sums: bool) -> Array:
    """One estimate [B, Hkv, G] of those [B, Hkv, R, G] of the query heads, less the anchor [B, Hkv, R] of each where
    there is one: their largest, or the log of the sum of masses. What is not finite stays the largest."""
    if anchor is not None:
        shifted = estimates - anchor[..., None]
        finite = ops.isfinite(shifted) & (estimates < LARGEST_ESTIMATE)
        estimates = ops.where(finite, shifted, LARGEST_ESTIMATE)
    return ops.logsumexp(estimates, axis=2) if sums else ops.max(estimates, axis=2)
