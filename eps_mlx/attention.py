"""Attention over whole groups of a paged cache: `(out, lse)`, so that parts can be merged exactly.

Logits, softmax and sums are float32 whatever the cache holds. Only listed groups are read: whole `[S, D]` tiles, one
row of a gather each. No mask: the partial group, where it is selected, is the last tile, and its unwritten end is cut
off.
"""

import math

import mlx.core as mx
import numpy as np

from eps_core.attention.protocol import RowsRead, Scores, Selection
from eps_core.kv_cache.counts import check_query
from eps_core.kv_cache.rows import Rows
from eps_core.kv_cache.step_plan import StepPlan
from eps_mlx import pages
from eps_mlx.cache import Cache, read_kv
from eps_mlx.device import DTYPES
from eps_mlx.kernels.choose import routed
from eps_mlx.selection import selection_mask

State = tuple[mx.array, mx.array]

# Tokens of dense attention converted to float32 at a time on a CPU, so that they stay in its cache; changes speed only
CPU_PIECE_TOKENS = 1024


def attend(cache: Cache, layer: int, q: mx.array, plan: StepPlan, selection: Selection | None) -> State:
    """(out [B, Hq, D] in q's dtype, lse [B, Hq] float32: natural log of the softmax mass read) of q [B, Hq, D]
    unscaled, over the selected groups of each sequence, or over all of its tokens where `selection` is None. A
    selection whose numbers only the device knows costs one synchronisation."""
    check_query(cache.spec, q.shape)
    return _attend(cache, layer, q, plan, selection)


@routed(lambda kernels: kernels.attend)
def _attend(cache: Cache, layer: int, q: mx.array, plan: StepPlan, selection: Selection | None) -> State:
    batch, num_heads, head_dim = q.shape
    kv_heads = cache.spec.num_kv_heads
    table, lengths = plan.table, plan.lengths
    with mx.stream(cache.stream):
        a = q.astype(mx.float32).reshape(batch, kv_heads, -1, head_dim) * (1 / math.sqrt(head_dim))
        if selection is None:
            states = [_attend_all(cache, layer, a[b], table[b], int(lengths[b])) for b in range(batch)]
        elif (
            selection.uniform is not None and (selection.always_selected > 0)[lengths % cache.cache_config.S > 0].all()
        ):
            # always selected groups hold the open one: every head ends with the same tile
            states = [
                _attend_tiles(
                    cache,
                    layer,
                    a[b],
                    selection.groups[b, :, : int(selection.uniform[b])],
                    table[b],
                    _unwritten(cache, int(lengths[b])),
                )
                for b in range(batch)
            ]
        else:
            states = _attend_ragged(cache, layer, a, selection, table, lengths)
        out, lse = (mx.stack(list(part)) for part in zip(*states, strict=True))
        return out.reshape(q.shape).astype(q.dtype), lse.reshape(batch, num_heads)


def _unwritten(cache: Cache, length: int) -> int:
    return -length % cache.cache_config.S


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
    return parts[0] if len(parts) == 1 else merge(parts[0], parts[1])


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
    return pages.units_of(pool, units)[:, :, :tokens].astype(mx.float32)


def _attend_tiles(cache: Cache, layer: int, a: mx.array, groups: mx.array, table: np.ndarray, unwritten: int) -> State:
    """Attention of kv heads a [H, R, D] over groups [H, W] of one sequence, `unwritten` tokens of the last cut off.
    H is all kv heads."""
    per_unit = cache.cache_config.groups_per_unit
    units = mx.take(mx.array(table.astype(np.int32)), groups // per_unit)
    rows = (units * cache.spec.num_kv_heads + mx.arange(len(groups))[:, None]) * per_unit + groups % per_unit
    return _attend_places(cache, layer, a, rows, unwritten)


def _attend_places(cache: Cache, layer: int, a: mx.array, rows: mx.array, unwritten: int) -> State:
    """Attention of a [H, R, D] over the pool's tiles rows [H, W], numbered as K's memory lies."""
    size, head_dim = cache.cache_config.S, cache.spec.head_dim
    tokens = rows.shape[1] * size - unwritten
    tiles = [pages.tiles_of(pool[layer], rows, size) for pool in (cache.k, cache.v)]
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
            unwritten = _unwritten(cache, length) if listed[-1] == length // size else 0
            heads.append(
                _attend_places(cache, layer, a[b, head : head + 1], mx.array(rows.astype(np.int32))[None], unwritten)
            )
        out, lse = (mx.concatenate(list(part)) for part in zip(*heads, strict=True))
        states.append((out, lse))
    return states


def attend_rows(cache: Cache, layer: int, q: mx.array, rows: Rows, selected_mask: mx.array | None = None) -> RowsRead:
    """Dense attention of q [T, Hq, D], unscaled, each row over the tokens before it and itself: see `RowsRead`.
    `selected_mask` [T, Hkv, G] bool; the groups are the cache's. K and V are read, and count, once for all rows of a
    sequence. What a row does not see does not reach it, NaN included."""
    check_query(cache.spec, q.shape)
    return _attend_rows(cache, layer, q, rows, selected_mask)


@routed(lambda kernels: kernels.attend_rows)
def _attend_rows(cache: Cache, layer: int, q: mx.array, rows: Rows, selected_mask: mx.array | None = None) -> RowsRead:
    kv_heads, head_dim, size = cache.spec.num_kv_heads, cache.spec.head_dim, cache.cache_config.S
    num_groups = rows.table.shape[1] * cache.cache_config.groups_per_unit
    outs, lses, visits = [], [], []
    with mx.stream(cache.stream):
        for b, length in enumerate(rows.lengths.tolist()):
            own = slice(int(rows.starts[b]), int(rows.starts[b + 1]))
            k, v = (x.astype(mx.float32).swapaxes(0, 1) for x in read_kv(cache, layer, rows.table[b], length))
            a = q[own].astype(mx.float32).reshape(int(rows.num_rows[b]), kv_heads, -1, head_dim).swapaxes(0, 1)
            a = a / math.sqrt(head_dim)  # [Hkv, N, R, D]
            hidden = mx.arange(length) >= mx.array(rows.seen[own].astype(np.int32))[:, None]  # [N, T]
            logits = (a.reshape(kv_heads, -1, head_dim) @ k.swapaxes(1, 2)).reshape(*a.shape[:3], length)
            logits = mx.where(hidden[:, None], -math.inf, logits)
            weights, total, largest = _softmax_sums(logits, (3,))
            finite = mx.isfinite(v)
            out = weights.reshape(kv_heads, -1, length) @ mx.where(finite, v, 0.0)
            broken = ~finite.all(axis=2)  # [Hkv, T]
            reached = (broken[:, None] & ~hidden).any(axis=2)[..., None, None]
            out = mx.where(reached, math.nan, out.reshape(a.shape) / total)
            outs.append(out.swapaxes(0, 1).reshape(-1, q.shape[1], head_dim))
            lses.append((largest + mx.log(total))[..., 0].swapaxes(0, 1).reshape(-1, q.shape[1]))
            if selected_mask is not None:
                room = num_groups * size - length
                padded = mx.pad(logits, [(0, 0), (0, 0), (0, 0), (0, room)], constant_values=-math.inf)
                mass = mx.logsumexp(padded.reshape(*a.shape[:3], num_groups, size), axis=4)  # [Hkv, N, R, G]
                listed = selected_mask[own].astype(mx.bool_).swapaxes(0, 1)[:, :, None]
                seen = mx.logsumexp(mx.where(listed, mass, -math.inf), axis=3)
                visits.append(seen.swapaxes(0, 1).reshape(-1, q.shape[1]))
        return RowsRead(
            mx.concatenate(outs).astype(q.dtype),
            mx.concatenate(lses),
            None if selected_mask is None else mx.concatenate(visits),
        )


def merge(first: State, second: State) -> State:
    """Exact merge of attention over two disjoint sets of keys: out [.., D] with lse [..] (-inf: no keys, weight 0)."""
    (out1, lse1), (out2, lse2) = first, second
    largest = mx.maximum(lse1, lse2)
    base = mx.where(largest > -math.inf, largest, 0)
    weight1, weight2 = mx.exp(lse1 - base), mx.exp(lse2 - base)
    total = weight1 + weight2
    divisor = mx.where(total > 0, total, 1)
    out = out1 * (weight1 / divisor)[..., None] + out2 * (weight2 / divisor)[..., None]
    return out.astype(out1.dtype), base + mx.log(total)


@routed(lambda kernels: kernels.attend_correction)
def attend_correction(
    cache: Cache,
    layer: int,
    plan: StepPlan,
    scores: Scores,
    selection: Selection,
    lse: mx.array,
) -> State:
    """(out [B, Hq, D] float32, lse [B, Hq]): an estimate of attention over the groups that `selection` left out, to be
    merged with what was read, whose log mass is lse [B, Hq]. Each skipped group counts with its estimated mass and the
    mean value of the correction group around it. Estimates that were too high for what was read are lowered as much for
    what was not; where the correction group is not full, or has no estimate, it adds nothing. An estimate, no bound."""
    inner, spec = cache.correction, cache.spec
    assert inner is not None
    batch, kv_heads, groups = scores.estimate.shape
    missing = plan.missing(inner.state[layer])
    usable = ~missing & (np.arange(missing.shape[1]) < -(-plan.lengths // inner.cache_config.S)[:, None])
    with mx.stream(cache.stream):
        lse = lse.reshape(batch, kv_heads, -1)
        known, selected_mask = mx.isfinite(scores.estimate), selection_mask(selection, groups)
        seen = mx.logsumexp(mx.where(known & selected_mask, scores.estimate, -math.inf), axis=-1, keepdims=True)
        skipped = mx.where(known & ~selected_mask, scores.estimate, -math.inf)
        # whole pool units are listed, so groups fill their correction groups
        mass = mx.logsumexp(skipped.reshape(batch, kv_heads, missing.shape[1], -1), axis=-1)
        mass = mx.where(mx.array(usable)[:, None], mass, -math.inf)
        total = mx.logsumexp(mass, axis=-1, keepdims=True)
        weights = mx.exp(mass - mx.where(total > -math.inf, total, 0))
        rows = mx.array(
            (np.maximum(plan.table, 0)[:, None, :] * kv_heads + np.arange(kv_heads)[:, None]).astype(np.int32)
        )
        codes, scale = (
            mx.take(inner.summaries[layer][name].reshape(spec.num_units * kv_heads, -1), rows, axis=0)
            for name in ("mean", "mean_scale")
        )
        means = codes.reshape(batch, kv_heads, -1, spec.head_dim).astype(mx.float32)
        means = means * scale.reshape(batch, kv_heads, -1, 1).astype(mx.float32)
        correction = total - mx.maximum(seen - lse, 0)
        out = mx.broadcast_to(weights[..., None, :] @ means, (*lse.shape, spec.head_dim))
        return out.reshape(batch, -1, spec.head_dim), correction.reshape(batch, -1)


@routed(lambda kernels: kernels.add_correction)
def add_correction(
    cache: Cache, layer: int, plan: StepPlan, scores: Scores, selection: Selection, state: State
) -> State:
    """Return `state`, of what was read, merged with `attend_correction`: out [B, Hq, D] in its dtype, lse [B, Hq]."""
    return merge(state, attend_correction(cache, layer, plan, scores, selection, state[1]))


def attend_own(cache: Cache, q: mx.array, k: mx.array, v: mx.array) -> State:
    """(out [B, Hq, D] in q's dtype, lse [B, Hq] float32) of each token over itself alone: q [B, Hq, D], k, v
    [B, Hkv, D] as the cache would hold them."""
    stored, repeat = DTYPES[cache.spec.dtype], q.shape[1] // k.shape[1]
    with mx.stream(cache.stream):
        held = (pages.held(pool[0], x.astype(stored)) for pool, x in ((cache.k, k), (cache.v, v)))
        key, value = (mx.repeat(x.astype(mx.float32), repeat, axis=1) for x in held)
        return value.astype(q.dtype), (q.astype(mx.float32) * key).sum(axis=-1) / math.sqrt(q.shape[-1])


def attend_chunk(cache: Cache, q: mx.array, k: mx.array, v: mx.array, seen: np.ndarray | None = None) -> mx.array:
    """Dense attention of a prefill chunk: q [N, Hq, D] are the last N of the T tokens of k, v [T, Hkv, D], each over
    itself and all before it, or over those of `seen` [N, T] bool (host), at least one."""
    wide = q.dtype if k.dtype == q.dtype else mx.float32
    q, k, v, dtype = q.astype(wide), k.astype(wide), v.astype(wide), q.dtype
    with mx.stream(cache.stream):
        out = mx.fast.scaled_dot_product_attention(
            *(x.swapaxes(0, 1)[None] for x in (q, k, v)),
            scale=1 / math.sqrt(q.shape[-1]),
            mask="causal" if seen is None else mx.array(seen),
        )
        return out[0].swapaxes(0, 1).astype(dtype)


def weights(cache: Cache, q: mx.array, k: mx.array, seen: np.ndarray) -> mx.array:
    """[Hkv, R, N, T] float32: softmax weights of queries q [N, Hq, D], unscaled, over keys k [T, Hkv, D], of which each
    sees those of `seen` [N, T] bool (host), at least one; 0 for the others."""
    with mx.stream(cache.stream):
        heads = q.astype(mx.float32).reshape(len(q), k.shape[1], -1, q.shape[-1]).transpose(1, 2, 0, 3)
        logits = (heads / math.sqrt(q.shape[-1])) @ k.astype(mx.float32).transpose(1, 2, 0)[:, None]
        return mx.softmax(mx.where(mx.array(np.asarray(seen)), logits, -math.inf), axis=-1)


def unread_share(lse: mx.array, lse_all: mx.array, kv_heads: int) -> mx.array:
    """[B, Hkv]: the largest share of a query head's softmax that was left out, lse [B, Hq] of what was read, lse_all of
    everything. Runs on the current default device."""
    # two float32 sums differ by rounding even where everything was read
    rounding = 2.0**-20 * (mx.abs(lse) + mx.abs(lse_all))
    unread = mx.where(lse_all - lse > rounding, -mx.expm1(lse - lse_all), 0)
    return unread.reshape(len(lse), kv_heads, -1).max(axis=-1)


def moved_by(out: mx.array, whole: mx.array, kv_heads: int) -> mx.array:
    """[B, Hkv]: at least the largest L2 distance, over the query heads, between two outputs [B, Hq, D]. Runs on the
    current default device."""
    moved = mx.linalg.norm(whole.astype(mx.float32) - out.astype(mx.float32), axis=-1)
    return moved.reshape(len(out), kv_heads, -1).max(axis=-1) * (1 + 2.0**-16)
