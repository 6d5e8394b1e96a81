"""Scores of every group from its summary, and of the best from their second bits: array operations."""

import math

import mlx.core as mx
import numpy as np

from eps_core.gate.protocol import Scores
from eps_core.paging.where import Where
from eps_core.summaries.table import fields
from eps_mlx.cache import Cache
from eps_mlx.kernels.choose import routed
from eps_mlx.selection import best_first
from eps_mlx.summaries.base import Summary, logit_slack
from eps_mlx.summaries.table import method, score_summary


@routed
def score(cache: Cache, layer: int, q: mx.array, where: Where) -> Scores:
    """Estimates [B, Hkv, G] of every group, max over the query heads of each kv head (never a mean), and bounds
    [B, Hkv, R, G]: q [B, Hq, D] unscaled. See `Scores` for what the numbers mean."""
    store, spec = cache.store, cache.spec
    batch, _, head_dim = q.shape
    kv_heads = spec.num_kv_heads
    can_encode = cache.can_encode(layer)
    missing = where.missing(cache.state[layer], can_encode)
    num_missing = where.num_missing(cache.state[layer], can_encode)
    groups, inside, table = where.num_groups, where.inside, where.table

    with mx.stream(cache.stream):
        a = q.astype(mx.float32).reshape(batch, kv_heads, -1, head_dim) * (1 / math.sqrt(head_dim))
        # whole units of one head are contiguous in K and in every summary
        rows = mx.array((np.maximum(table, 0)[:, None, :] * kv_heads + np.arange(kv_heads)[:, None]).astype(np.int32))
        stored = fields(store, head_dim)
        pools = {name: pool for name, pool in cache.summaries[layer].items() if not stored[name].best_only}
        if store.facts.reads_keys:
            keys = cache.k[layer]
            pools = {"keys": keys.reshape(*keys.shape[:2], -1, store.S, head_dim)}
        gathered = {
            name: mx.take(pool.reshape(spec.num_units * kv_heads, -1), rows, axis=0).reshape(
                batch, kv_heads, groups, *pool.shape[3:]
            )
            for name, pool in pools.items()
        }
        constants = cache.constants(layer)
        if store.facts.by_place:
            length = mx.array(where.lengths)[:, None, None, None]
            constants = constants | {"groups": mx.arange(groups), "length": length}
        parts = score_summary(store, constants, gathered, a)
        known, unknown = mx.array(inside & ~missing)[:, None, :], mx.array(missing)[:, None, :]
        # the groups that were not scored: without a summary, and past the end
        rest = mx.where(unknown, math.inf, -math.inf)
        estimate = mx.where(known, parts[0].max(axis=2), -math.inf)
        if where.config.read.refine:
            estimate = _refined(cache, layer, a, estimate, gathered, where)
        estimate = mx.where(known, estimate, rest)
        if parts[1] is None or parts[2] is None:
            return Scores(estimate, None, None, num_missing, kernels=cache.kernels)
        lower = mx.where(known[:, :, None], parts[1], -math.inf)
        upper = mx.where(known[:, :, None], parts[2], rest[:, :, None])
        slack = logit_slack(a, cache.largest_key[layer][:, None, None])[..., 0]
        return Scores(estimate, lower, upper, num_missing, slack, cache.kernels)


def _refined(cache: Cache, layer: int, a: mx.array, estimate: mx.array, first: Summary, where: Where) -> mx.array:
    """`estimate` [B, Hkv, G] (-inf: unknown) with two-bit estimates of each head's best groups, the lower index first
    among equals; only their second bits are read. `first` [B, Hkv, G, ..] is what scoring read of all."""
    kv_heads, per_unit = cache.spec.num_kv_heads, cache.store.groups_per_unit
    table, counts = where.table, where.refined
    most = int(counts.max())
    best = best_first(estimate)[..., :most]
    units = mx.broadcast_to(
        mx.array(np.maximum(table, 0).astype(np.int32))[:, None], (len(table), kv_heads, table.shape[1])
    )
    heads = mx.arange(kv_heads, dtype=mx.int32)[None, :, None]
    rows = (mx.take_along_axis(units, best // per_unit, axis=-1) * kv_heads + heads) * per_unit + best % per_unit
    index = mx.arange(len(table), dtype=mx.int32)[:, None, None]
    summary = {name: array[index, heads, best] for name, array in first.items()}
    for name in cache.summaries[layer].keys() - first.keys():
        pool = cache.summaries[layer][name]
        summary[name] = mx.take(pool.reshape(-1, *pool.shape[3:]), rows, axis=0)
    finer = method(cache.store.method).refine(cache.store, cache.constants(layer), summary, a).max(axis=2)
    coarse = mx.take_along_axis(estimate, best, axis=-1)
    wanted = mx.array(np.arange(most) < counts[:, None])[:, None]
    finer = mx.where(wanted & (coarse > -math.inf), finer, coarse)
    return mx.put_along_axis(estimate, best, finer, axis=-1)
