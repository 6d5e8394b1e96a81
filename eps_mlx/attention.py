"""Attention over whole groups of a paged cache: `(out, lse)`, so that parts can be merged exactly.

Logits, softmax and sums are float32 whatever the cache holds. Only listed groups are read: whole `[S, D]` tiles, one
row of a gather each. No mask: the partial group, where it is selected, is the last tile, and its unwritten end is cut
off.
"""

import math

import mlx.core as mx
import numpy as np

from eps_core.attention.kernels import kernel_first
from eps_core.attention.protocol import Selection
from eps_core.backend import pages
from eps_core.backend.attention import merge
from eps_core.backend.ops import Ops
from eps_core.kv_cache.counts import check_query
from eps_core.kv_cache.step_plan import StepPlan
from eps_mlx.cache import Cache
from eps_mlx.ops import OPS

State = tuple[mx.array, mx.array]

# Tokens of dense attention converted to float32 at a time on a CPU, so that they stay in its cache; changes speed only
CPU_PIECE_TOKENS = 1024
MOST_LOGITS = 2**28  # of dense attention at a time: where MLX has no fused kernel it makes all of them


def attend(cache: Cache, layer: int, q: mx.array, plan: StepPlan, selection: Selection | None) -> State:
    """(out [B, Hq, D] in q's dtype, lse [B, Hq] float32: natural log of the softmax mass read) of q [B, Hq, D]
    unscaled, over the selected groups of each sequence, or over all of its tokens where `selection` is None. A
    selection whose numbers only the device knows costs one synchronisation."""
    check_query(cache.spec, q.shape)
    return _attend(OPS, cache, layer, q, plan, selection)


@kernel_first
def _attend(ops: Ops, cache: Cache, layer: int, q: mx.array, plan: StepPlan, selection: Selection | None) -> State:
    batch, num_heads, head_dim = q.shape
    kv_heads, table, lengths = cache.spec.num_kv_heads, plan.table, plan.lengths
    partial = lengths % cache.cache_config.S > 0  # sequences whose last group is not full
    with mx.stream(cache.stream):
        a = q.astype(mx.float32).reshape(batch, kv_heads, -1, head_dim) * (1 / math.sqrt(head_dim))
        if selection is None:
            states = [_attend_all(cache, layer, a[b], table[b], int(lengths[b])) for b in range(batch)]
        elif selection.common_counts is not None and selection.always_selected[partial].all():
            # always selected groups hold the open one: every head ends with the same tile
            states = [_attend_equal_counts(cache, layer, a[b], selection, plan, b) for b in range(batch)]
        else:
            states = _attend_ragged(cache, layer, a, selection, table, lengths)
        out, lse = (mx.stack(list(part)) for part in zip(*states, strict=True))
        return out.reshape(q.shape).astype(q.dtype), lse.reshape(batch, num_heads)


def _softmax_sums(logits: mx.array, axes: tuple[int, ...]) -> tuple[mx.array, mx.array, mx.array]:
    """(weights, their sum, the largest logit), axes kept."""
    largest = logits.max(axis=axes, keepdims=True)
    weights = mx.exp(logits - largest)
    return weights, weights.sum(axis=axes, keepdims=True), largest


def _attend_all(cache: Cache, layer: int, a: mx.array, table: np.ndarray, length: int) -> State:
    """Dense attention of one sequence, a [Hkv, R, D] -> (out [Hkv, R, D], lse [Hkv, R]); exactly `length` tokens."""
    num_full, rest = divmod(length, cache.cache_config.unit_tokens)
    parts = []
    if num_full:
        parts.append(_attend_units(cache, layer, a, table[:num_full], cache.cache_config.unit_tokens))
    if rest:
        parts.append(_attend_units(cache, layer, a, table[num_full : num_full + 1], rest))
    return parts[0] if len(parts) == 1 else merge(OPS, *parts)


def _attend_units(cache: Cache, layer: int, a: mx.array, units: np.ndarray, tokens: int) -> State:
    """The first `tokens` tokens of each unit. One small product per (unit, head), as the pool lies: a run of
    consecutive units needs no copy, which is twice as fast as gathering K and V head by head."""
    step = max(CPU_PIECE_TOKENS // cache.cache_config.unit_tokens, 1) if cache.device == "cpu" else len(units)
    pieces = [units[start : start + step] for start in range(0, len(units), step)]
    logits = [a @ _read_units(cache.k[layer], piece, tokens).swapaxes(-1, -2) for piece in pieces]
    weights, total, largest = _softmax_sums(mx.concatenate(logits), (0, 3))  # [M, Hkv, R, tokens]
    out = mx.zeros_like(a)
    for start, piece in zip(range(0, len(units), step), pieces, strict=True):
        out = out + (weights[start : start + step] @ _read_units(cache.v[layer], piece, tokens)).sum(axis=0)
    return out / total[0], (largest + mx.log(total))[0, :, :, 0]


def _read_units(pool: pages.Pool, units: np.ndarray, tokens: int) -> mx.array:
    """The first `tokens` tokens of each unit of K or V, float32 [M, Hkv, tokens, D]."""
    return pages.units_of(OPS, pool, units)[:, :, :tokens].astype(mx.float32)


def _attend_equal_counts(cache: Cache, layer: int, a: mx.array, selection: Selection, plan: StepPlan, b: int) -> State:
    """Attention of sequence b, a [Hkv, R, D], over equally many groups of each kv head, with the open one last."""
    assert selection.common_counts is not None
    groups, per_unit = selection.groups[b, :, : int(selection.common_counts[b])], cache.cache_config.groups_per_unit
    units = mx.take(mx.array(plan.table[b].astype(np.int32)), groups // per_unit)
    rows = (units * cache.spec.num_kv_heads + mx.arange(len(groups))[:, None]) * per_unit + groups % per_unit
    return _attend_places(cache, layer, a, rows, -int(plan.lengths[b]) % cache.cache_config.S)


def _attend_places(cache: Cache, layer: int, a: mx.array, rows: mx.array, unwritten: int) -> State:
    """Attention of a [H, R, D] over the pool's tiles rows [H, W], numbered as K's memory lies."""
    size, head_dim = cache.cache_config.S, cache.spec.head_dim
    tokens = rows.shape[1] * size - unwritten
    tiles = [pages.tiles_of(OPS, pool[layer], rows, size) for pool in (cache.k, cache.v)]
    k, v = (tile.reshape(len(rows), -1, head_dim)[:, :tokens].astype(mx.float32) for tile in tiles)
    weights, total, largest = _softmax_sums(a @ k.swapaxes(-1, -2), (2,))
    return (weights @ v) / total, (largest + mx.log(total))[..., 0]


def _attend_ragged(
    cache: Cache, layer: int, a: mx.array, selection: Selection, table: np.ndarray, lengths: np.ndarray
) -> list[State]:
    """Numbers of groups that differ by head: one synchronisation, then each (sequence, head) with exactly its groups.
    a [B, Hkv, R, D] -> per sequence (out [Hkv, R, D], lse [Hkv, R])."""
    cache_config, spec = cache.cache_config, cache.spec
    per_unit, size = cache_config.groups_per_unit, cache_config.S
    mx.eval(selection.groups, selection.counts)
    groups, counts = np.array(selection.groups), np.array(selection.counts)
    states = []
    for b, length in enumerate(lengths.tolist()):
        heads = []
        for head in range(spec.num_kv_heads):
            listed = groups[b, head, : counts[b, head]]
            if not len(listed):
                heads.append((mx.zeros(a.shape[2:])[None], mx.full((1, a.shape[2]), -math.inf)))
                continue
            rows = (table[b, listed // per_unit] * spec.num_kv_heads + head) * per_unit + listed % per_unit
            unwritten = -length % size if listed[-1] == length // size else 0
            heads.append(
                _attend_places(cache, layer, a[b, head : head + 1], mx.array(rows.astype(np.int32))[None], unwritten)
            )
        out, lse = (mx.concatenate(list(part)) for part in zip(*heads, strict=True))
        states.append((out, lse))
    return states


def attend_chunk(cache: Cache, q: mx.array, k: mx.array, v: mx.array, seen: np.ndarray | None = None) -> mx.array:
    """Dense attention of a prefill chunk: q [N, Hq, D] are the last N of the T tokens of k, v [T, Hkv, D], each over
    itself and all before it, or over those of `seen` [N, T] bool (host), at least one."""
    rows = max(MOST_LOGITS // (q.shape[1] * len(k)), 1)
    if seen is None and len(q) > rows:
        pieces = (slice(start, min(start + rows, len(q))) for start in range(0, len(q), rows))
        ends = ((piece, len(k) - len(q) + piece.stop) for piece in pieces)
        return mx.concatenate([attend_chunk(cache, q[piece], k[:end], v[:end]) for piece, end in ends])
    wide = q.dtype if k.dtype == q.dtype else mx.float32
    q, k, v, dtype = q.astype(wide), k.astype(wide), v.astype(wide), q.dtype
    with mx.stream(cache.stream):
        out = mx.fast.scaled_dot_product_attention(
            *(x.swapaxes(0, 1)[None] for x in (q, k, v)),
            scale=1 / math.sqrt(q.shape[-1]),
            mask="causal" if seen is None else mx.array(seen),
        )
        return out[0].swapaxes(0, 1).astype(dtype)
