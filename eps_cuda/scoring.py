"""Scores of every group from its summary, and of the best from their second bits: array operations."""

import math

import numpy as np
import torch
from torch import Tensor

from eps_core.gate.protocol import Scores
from eps_core.paging.where import Where
from eps_core.summaries.table import fields
from eps_cuda.cache import Cache
from eps_cuda.kernels.choose import routed
from eps_cuda.summaries.base import Summary, logit_slack
from eps_cuda.summaries.table import method, score_summary


@routed
@torch.inference_mode()
def score(cache: Cache, layer: int, q: Tensor, where: Where) -> Scores:
    """Estimates [B, Hkv, G] of every group, max over the query heads of each kv head (never a mean), and bounds
    [B, Hkv, R, G]: q [B, Hq, D] unscaled. See `Scores` for what the numbers mean."""
    store, spec = cache.store, cache.spec
    batch, _, head_dim = q.shape
    kv_heads = spec.num_kv_heads
    can_encode = cache.can_encode(layer)
    missing = where.missing(cache.state[layer], can_encode)
    num_missing = where.num_missing(cache.state[layer], can_encode)
    groups, inside = where.num_groups, where.inside

    a = q.float().reshape(batch, kv_heads, -1, head_dim) * (1 / math.sqrt(head_dim))
    # whole units of one head are contiguous in K and in every summary
    rows = (np.maximum(where.table, 0)[:, None, :].astype(np.int64) * kv_heads + np.arange(kv_heads)[:, None]).reshape(
        -1
    )
    rows = torch.from_numpy(rows).to(q.device)
    stored = fields(store, head_dim)
    pools = {name: pool for name, pool in cache.summaries[layer].items() if not stored[name].best_only}
    if store.facts.reads_keys:
        pools = {"keys": cache.k[layer].unflatten(2, (-1, store.S))}
    gathered = {
        name: pool.reshape(spec.num_units * kv_heads, -1)
        .index_select(0, rows)
        .reshape(batch, kv_heads, groups, *pool.shape[3:])
        for name, pool in pools.items()
    }
    constants = cache.constants(layer)
    if store.facts.by_place:
        length = torch.from_numpy(where.lengths).to(q.device)[:, None, None, None]
        constants = constants | {"groups": torch.arange(groups, device=q.device), "length": length}
    parts = score_summary(store, constants, gathered, a)
    # 0: scored, 1: without a summary, 2: past the end
    state = torch.from_numpy(np.where(inside, missing.astype(np.uint8), np.uint8(2))).to(q.device)[:, None, :]
    known, past = state == 0, state == 2
    estimate = torch.where(known, parts[0].amax(dim=2), -math.inf)
    if where.config.read.refine:
        estimate = _refined(cache, layer, a, estimate, gathered, where)
    estimate = torch.where(known | past, estimate, math.inf)
    if parts[1] is None or parts[2] is None:
        return Scores(estimate, None, None, num_missing, kernels=cache.kernels)
    known, past = known[:, :, None], past[:, :, None]
    lower = torch.where(known, parts[1], -math.inf)
    upper = torch.where(known, parts[2], torch.where(past, -math.inf, math.inf))
    slack = logit_slack(a, cache.largest_key[layer][:, None, None])[..., 0]
    return Scores(estimate, lower, upper, num_missing, slack, cache.kernels)


def _refined(cache: Cache, layer: int, a: Tensor, estimate: Tensor, first: Summary, where: Where) -> Tensor:
    """`estimate` [B, Hkv, G] (-inf: unknown) with two-bit estimates of each head's best groups, the lower index first
    among equals; only their second bits are read. `first` [B, Hkv, G, ..] is what scoring read of all."""
    kv_heads, per_unit = cache.spec.num_kv_heads, cache.store.groups_per_unit
    device, counts = estimate.device, where.refined
    most = int(counts.max())
    # a stable sort: equal estimates keep their order
    best = estimate.sort(dim=-1, descending=True, stable=True).indices[..., :most]
    units = torch.from_numpy(np.maximum(where.table, 0).astype(np.int64)).to(device)[:, None].expand(-1, kv_heads, -1)
    heads = torch.arange(kv_heads, device=device)[None, :, None]
    index = torch.arange(len(estimate), device=device)[:, None, None]
    rows = (units.gather(-1, best // per_unit) * kv_heads + heads) * per_unit + best % per_unit
    summary = {name: array[index, heads, best] for name, array in first.items()}
    for name in cache.summaries[layer].keys() - first.keys():
        pool = cache.summaries[layer][name]
        summary[name] = (
            pool.reshape(-1, *pool.shape[3:]).index_select(0, rows.reshape(-1)).reshape(*rows.shape, *pool.shape[3:])
        )
    finer = method(cache.store.method).refine(cache.store, cache.constants(layer), summary, a).amax(dim=2)
    coarse = estimate.gather(-1, best)
    wanted = torch.from_numpy(np.arange(most) < counts[:, None]).to(device)[:, None]
    finer = torch.where(wanted & (coarse > -math.inf), finer, coarse)
    return estimate.scatter(-1, best, finer)
