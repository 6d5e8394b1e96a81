"""Build and score the summaries of all eight methods, float32 in MLX operations.

Builders take keys `k [.., Hkv, S, D]` float32, exactly as attention will read them, and return a dict of stored arrays
`[.., Hkv, fields]`. Scorers take such a dict gathered as `[B, Hkv, G, ..]` and `a = scale * q` as `[B, Hkv, R, D]`
float32, and return `(estimate, lower, upper)`, each `[B, Hkv, R, G]` or None, of log A_p, the natural log of the
group's softmax mass (scaled logits): `estimate` ranks and is no bound, `lower <= log A_p <= upper` for every q. Stored
scalars are rounded to their safe side, and `slack` pays for float32 arithmetic.

`constants`: what a layer keeps apart from its groups: `phi [Hkv, D, m]` of jl; `signs [D]` and `centre [Hkv, D]` of rq.
Sources and formulas: see the float64 oracle of the same names; the functions stand in the same order.
"""

import math

import mlx.core as mx
import numpy as np

from eps_core.gate.protocol import Scores
from eps_core.paging.where import Where
from eps_mlx.cache import Cache
from eps_mlx.kernels.choose import kernels_module
from eps_mlx.selection import best_first
from eps_mlx.summaries.base import Score, _wide, logit_slack
from eps_mlx.summaries.rq import SECOND_LEVEL, refine_rq
from eps_mlx.summaries.table import score_summary


def score(cache: Cache, layer: int, q: mx.array, where: Where) -> Scores:
    """Estimates [B, Hkv, G] of every group, max over the query heads of each kv head (never a mean), and bounds
    [B, Hkv, R, G]: q [B, Hq, D] unscaled. See `Scores` for what the numbers mean."""
    store, spec = cache.store, cache.spec
    module = kernels_module(cache.kernels)
    if module is not None and (scores := module.score(cache, layer, q, where)) is not None:
        return scores
    batch, _, head_dim = q.shape
    kv_heads = spec.num_kv_heads
    can_encode = store.method != "rq" or cache.centre[layer] is not None
    missing = where.missing(cache.state[layer], can_encode)
    num_missing = where.num_missing(cache.state[layer], can_encode)
    groups, inside, table = where.num_groups, where.inside, where.table

    with mx.stream(cache.stream):
        a = q.astype(mx.float32).reshape(batch, kv_heads, -1, head_dim) * (1 / math.sqrt(head_dim))
        # whole units of one head are contiguous in K and in every summary
        rows = mx.array((np.maximum(table, 0)[:, None, :] * kv_heads + np.arange(kv_heads)[:, None]).astype(np.int32))
        if store.method == "oracle":
            parts: Score = _true_masses(cache, layer, a, rows, where.lengths), None, None
        else:
            gathered = {
                name: mx.take(pool.reshape(spec.num_units * kv_heads, -1), rows, axis=0).reshape(
                    batch, kv_heads, groups, *pool.shape[3:]
                )
                for name, pool in cache.summaries[layer].items()
                if name not in SECOND_LEVEL
            }
            parts = score_summary(store, cache.constants(layer), gathered, a)
        known, unknown = mx.array(inside & ~missing)[:, None, :], mx.array(missing)[:, None, :]
        # the groups that were not scored: without a summary, and past the end
        rest = mx.where(unknown, math.inf, -math.inf)
        estimate = mx.where(known, parts[0].max(axis=2), -math.inf)
        if where.config.read.refine:
            estimate = _refined(cache, layer, a, estimate, gathered["codes"], where)
        estimate = mx.where(known, estimate, rest)
        if parts[1] is None or parts[2] is None:
            return Scores(estimate, None, None, num_missing, kernels=cache.kernels)
        lower = mx.where(known[:, :, None], parts[1], -math.inf)
        upper = mx.where(known[:, :, None], parts[2], rest[:, :, None])
        slack = logit_slack(a, cache.largest_key[layer][:, None, None])[..., 0]
        return Scores(estimate, lower, upper, num_missing, slack, cache.kernels)


def _refined(cache: Cache, layer: int, a: mx.array, estimate: mx.array, codes: mx.array, where: Where) -> mx.array:
    """`estimate` [B, Hkv, G] (-inf: unknown) with two-bit estimates of each head's best groups, the lower index first
    among equals; only their second bits are read. codes [B, Hkv, G, bytes] are the first bits of all."""
    kv_heads, per_unit = cache.spec.num_kv_heads, cache.store.groups_per_unit
    table, counts = where.table, where.refined
    most = int(counts.max())
    best = best_first(estimate)[..., :most]
    units = mx.broadcast_to(
        mx.array(np.maximum(table, 0).astype(np.int32))[:, None], (len(table), kv_heads, table.shape[1])
    )
    heads = mx.arange(kv_heads, dtype=mx.int32)[None, :, None]
    rows = (mx.take_along_axis(units, best // per_unit, axis=-1) * kv_heads + heads) * per_unit + best % per_unit
    kept = mx.broadcast_to(best[..., None], (*best.shape, codes.shape[-1]))
    summary = {"codes": mx.take_along_axis(codes, kept, axis=2)}
    for name in SECOND_LEVEL:
        pool = cache.summaries[layer][name]
        summary[name] = mx.take(pool.reshape(-1, *pool.shape[3:]), rows, axis=0)
    finer = refine_rq(summary, a, cache.store.S, cache.constants(layer)).max(axis=2)
    coarse = mx.take_along_axis(estimate, best, axis=-1)
    wanted = mx.array(np.arange(most) < counts[:, None])[:, None]
    finer = mx.where(wanted & (coarse > -math.inf), finer, coarse)
    return mx.put_along_axis(estimate, best, finer, axis=-1)


def _true_masses(cache: Cache, layer: int, a: mx.array, rows: mx.array, lengths: np.ndarray) -> mx.array:
    """True log masses [B, Hkv, R, G], by reading all of K: what a perfect summary would say (evaluation only)."""
    batch, kv_heads, repeat, head_dim = a.shape
    flat = cache.k[layer].reshape(-1, cache.store.unit_tokens * head_dim)
    keys = mx.take(flat, rows, axis=0).reshape(batch, kv_heads, -1, head_dim)
    logits = a @ _wide(keys).swapaxes(-1, -2)
    written = mx.array(np.arange(logits.shape[-1]) < lengths[:, None])[:, None, None, :]
    return mx.logsumexp(
        mx.where(written, logits, -math.inf).reshape(batch, kv_heads, repeat, -1, cache.store.S), axis=-1
    )
