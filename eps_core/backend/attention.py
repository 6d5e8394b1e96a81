"""Attention beside the reading of selected groups: rows of a verify pass, exact merges."""

import math
from typing import Any

import numpy as np

from eps_core.attention.kernels import kernel_first
from eps_core.attention.protocol import Array, RowsRead, State
from eps_core.backend import pages
from eps_core.backend.cache import read_kv
from eps_core.backend.ops import Ops
from eps_core.kv_cache.counts import check_query
from eps_core.kv_cache.rows import Rows


def softmax_sums(ops: Ops, logits: Array) -> tuple[Array, Array, Array]:
    """(weights, their sum [.., 1], lse [..]) over the last axis, in which one logit at least is finite."""
    largest = ops.max(logits, keepdims=True)
    weights = ops.exp(logits - largest)
    total = weights.sum(axis=-1, keepdims=True)
    return weights, total, (largest + ops.log(total))[..., 0]


def attend_rows(ops: Ops, cache: Any, layer: int, q: Array, rows: Rows, selected_mask: Array | None = None) -> RowsRead:
    """Dense attention of q [T, Hq, D], unscaled, each row over the tokens before it and itself: see `RowsRead`.
    `selected_mask` [T, Hkv, G] bool; the groups are the cache's. K and V are read once for all rows of a sequence. What
    a row does not see does not reach it, NaN included."""
    check_query(cache.spec, q.shape)
    return _attend_rows(ops, cache, layer, q, rows, selected_mask)


@kernel_first
def _attend_rows(
    ops: Ops, cache: Any, layer: int, q: Array, rows: Rows, selected_mask: Array | None = None
) -> RowsRead:
    with ops.place(cache):
        sequences = range(len(rows.lengths))
        parts = [_rows_of(ops, cache, layer, q, rows, selected_mask, sequence) for sequence in sequences]
        out, lse, selected = zip(*parts, strict=True)
        return RowsRead(
            ops.cast(ops.concatenate(out, axis=0), q.dtype),
            ops.concatenate(lse, axis=0),
            None if selected_mask is None else ops.concatenate(selected, axis=0),
        )


def _rows_of(
    ops: Ops, cache: Any, layer: int, q: Array, rows: Rows, selected_mask: Array | None, sequence: int
) -> tuple[Array, Array, Array | None]:
    """The fields of `RowsRead` for the N rows of one sequence."""
    kv_heads, head_dim, size = cache.spec.num_kv_heads, cache.spec.head_dim, cache.cache_config.S
    length, own = int(rows.lengths[sequence]), slice(int(rows.starts[sequence]), int(rows.starts[sequence + 1]))
    k, v = (ops.float32(x).swapaxes(0, 1) for x in read_kv(ops, cache, layer, rows.table[sequence], length))
    a = ops.float32(q[own]).reshape(int(rows.num_rows[sequence]), kv_heads, -1, head_dim)
    a = a.swapaxes(0, 1) / math.sqrt(head_dim)  # [Hkv, N, R, D]
    hidden = ops.arange(q, 0, length) >= ops.index(q, rows.seen[own])[:, None]  # [N, T]
    logits = (a.reshape(kv_heads, -1, head_dim) @ k.swapaxes(1, 2)).reshape(*a.shape[:3], length)
    logits = ops.where(hidden[:, None], -math.inf, logits)
    weights, total, lse = softmax_sums(ops, logits)
    finite = ops.isfinite(v)
    out = weights.reshape(kv_heads, -1, length) @ ops.where(finite, v, 0.0)
    broken = ~finite.all(axis=2)  # [Hkv, T]
    reached = (broken[:, None] & ~hidden).any(axis=2)[..., None, None]
    out = ops.where(reached, math.nan, out.reshape(a.shape) / total)
    selected = None
    if selected_mask is not None:
        num_groups = rows.table.shape[1] * cache.cache_config.groups_per_unit
        padded = ops.pad(logits, num_groups * size - length, value=-math.inf)
        mass = ops.logsumexp(padded.reshape(*a.shape[:3], num_groups, size), axis=4)  # [Hkv, N, R, G]
        listed = ops.boolean(selected_mask[own]).swapaxes(0, 1)[:, :, None]
        selected = ops.logsumexp(ops.where(listed, mass, -math.inf), axis=3)
        selected = selected.swapaxes(0, 1).reshape(-1, q.shape[1])
    return out.swapaxes(0, 1).reshape(-1, q.shape[1], head_dim), lse.swapaxes(0, 1).reshape(-1, q.shape[1]), selected


def merge(ops: Ops, first: State, second: State) -> State:
    """Exact merge of attention over two disjoint sets of keys: out [.., D] with lse [..] (-inf: no keys, weight 0).
    Runs where the states are, on MLX's default device."""
    (out1, lse1), (out2, lse2) = first, second
    with ops.place():
        largest = ops.maximum(lse1, lse2)
        base = ops.where(largest > -math.inf, largest, 0)
        weight1, weight2 = ops.exp(lse1 - base), ops.exp(lse2 - base)
        total = weight1 + weight2
        divisor = ops.where(total > 0, total, 1)
        out = out1 * (weight1 / divisor)[..., None] + out2 * (weight2 / divisor)[..., None]
        return ops.cast(out, out1.dtype), base + ops.log(total)


def attend_own(ops: Ops, cache: Any, q: Array, k: Array, v: Array) -> State:
    """(out [B, Hq, D] in q's dtype, lse [B, Hq] float32) of each token over itself alone: q [B, Hq, D], k, v
    [B, Hkv, D] as the cache would hold them."""
    dtype, heads_each = ops.dtypes[cache.spec.dtype], q.shape[1] // k.shape[1]
    with ops.place(cache):
        held = (pages.held(ops, pool[0], ops.cast(x, dtype)) for pool, x in ((cache.k, k), (cache.v, v)))
        key, value = (
            ops.broadcast_to(ops.float32(x)[:, :, None], (*x.shape[:2], heads_each, x.shape[2])).reshape(q.shape)
            for x in held
        )
        return ops.cast(value, q.dtype), (ops.float32(q) * key).sum(axis=-1) / math.sqrt(q.shape[-1])


def weights(ops: Ops, cache: Any, q: Array, k: Array, seen: np.ndarray) -> Array:
    """[Hkv, R, N, T] float32: softmax weights of queries q [N, Hq, D], unscaled, over keys k [T, Hkv, D], of which each
    sees those of `seen` [N, T] bool (host), at least one; 0 for the others."""
    with ops.place(cache):
        heads = ops.float32(q).reshape(len(q), k.shape[1], -1, q.shape[-1]) / math.sqrt(q.shape[-1])
        keys = ops.float32(k).swapaxes(0, 1).swapaxes(1, 2)[:, None]  # [Hkv, 1, D, T]
        logits = heads.swapaxes(0, 1).swapaxes(1, 2) @ keys
        return ops.softmax(ops.where(ops.on(q, np.ascontiguousarray(seen)), logits, -math.inf))


def unread_share(ops: Ops, lse: Array, lse_all: Array, kv_heads: int) -> Array:
    """[B, Hkv]: the largest share of a query head's softmax that was left out, lse [B, Hq] of what was read, lse_all of
    everything. Runs where these are, on MLX's default device."""
    with ops.place():
        # two float32 sums differ by rounding even where everything was read
        rounding = 2.0**-20 * (ops.where(ops.isfinite(lse), ops.abs(lse), 0) + ops.abs(lse_all))
        unread = ops.where(lse_all - lse > rounding, -ops.expm1(lse - lse_all), 0.0)
        return ops.max(unread.reshape(len(lse), kv_heads, -1))
