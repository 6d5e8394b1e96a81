"""The oracle's attention over a paged cache, in float64."""

import numpy as np

from eps_core.attention.protocol import RowsRead, Selection
from eps_core.kv_cache.rows import Rows
from eps_core.kv_cache.step_plan import StepPlan
from eps_core.reference import formulas, pages
from eps_core.reference.cache import DTYPES, Cache
from eps_core.reference.formulas import State

QUERY_BLOCK = 256  # queries that the prefill attends at a time; changes speed and memory only


def attend(cache: Cache, layer: int, q: np.ndarray, plan: StepPlan, selected: Selection | None) -> State:
    """(out [B, Hq, D], lse [B, Hq]) over the selected groups, or over all tokens where `selected` is None."""
    cache_config, size, table, lengths = cache.cache_config, cache.cache_config.S, plan.table, plan.lengths
    batch, num_heads, head_dim = q.shape
    repeat = num_heads // cache.spec.num_kv_heads
    out, lse = np.zeros(q.shape), np.zeros((batch, num_heads))
    for b, head in np.ndindex(batch, cache.spec.num_kv_heads):
        length = int(lengths[b])
        if selected is None:
            tokens = np.arange(length)
        else:
            groups = selected.groups[b, head, : selected.counts[b, head]]
            tokens = (groups[:, None] * size + np.arange(size)).reshape(-1)
            tokens = tokens[tokens < length]
        units, offsets = table[b, tokens // cache_config.unit_tokens], tokens % cache_config.unit_tokens
        k, v = (pages.rows_of(pool[layer], units, head, offsets) for pool in (cache.k, cache.v))
        for r in range(head * repeat, (head + 1) * repeat):
            out[b, r], lse[b, r] = formulas.attend_keys(q[b, r].astype(np.float64) / np.sqrt(head_dim), k, v)
    return out, lse


def attend_rows(
    cache: Cache, layer: int, q: np.ndarray, rows: Rows, selected_mask: np.ndarray | None = None
) -> RowsRead:
    """Dense attention of q [T, Hq, D], unscaled, each row over the tokens before it and itself: see `RowsRead`.
    `selected_mask` [T, Hkv, G] bool; the groups are the cache's. K and V count as read once for all rows of a
    sequence."""
    size, unit_tokens, kv_heads = cache.cache_config.S, cache.cache_config.unit_tokens, cache.spec.num_kv_heads
    total, num_heads, head_dim = q.shape
    repeat = num_heads // kv_heads
    out, lse = np.zeros(q.shape), np.zeros((total, num_heads))
    selected = None if selected_mask is None else np.full((total, num_heads), -np.inf)
    for t, head in np.ndindex(total, kv_heads):
        tokens = np.arange(int(rows.seen[t]))
        units, offsets = rows.table[rows.sequence[t], tokens // unit_tokens], tokens % unit_tokens
        k, v = (pages.rows_of(pool[layer], units, head, offsets) for pool in (cache.k, cache.v))
        for r in range(head * repeat, (head + 1) * repeat):
            query = q[t, r].astype(np.float64) / np.sqrt(head_dim)
            out[t, r], lse[t, r] = formulas.attend_keys(query, k, v)
            if selected is not None and selected_mask is not None:
                own = formulas.group_masses(query, k, size)
                selected[t, r] = np.logaddexp.reduce(own[selected_mask[t, head, : len(own)]], initial=-np.inf)
    return RowsRead(out, lse, selected)


def attend_own(cache: Cache, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> State:
    """(out [B, Hq, D], lse [B, Hq]) of each token over itself alone: q [B, Hq, D], k, v [B, Hkv, D] as the cache would
    hold them."""
    dtype, repeat = DTYPES[cache.spec.dtype], q.shape[1] // k.shape[1]
    held = (pages.held(pool[0], x.astype(dtype)) for pool, x in ((cache.k, k), (cache.v, v)))
    key, value = (np.repeat(x.astype(np.float64), repeat, axis=1) for x in held)
    return value, (q.astype(np.float64) * key).sum(axis=2) / np.sqrt(q.shape[2])


def attend_chunk(
    cache: Cache, q: np.ndarray, k: np.ndarray, v: np.ndarray, seen: np.ndarray | None = None
) -> np.ndarray:
    """Dense attention of a prefill chunk: out [N, Hq, D] of the last N of T tokens, each over itself and all before it,
    or over those of `seen` [N, T] bool, at least one: q [N, Hq, D], k, v [T, Hkv, D]."""
    num_queries, num_heads, head_dim = q.shape
    length, num_kv_heads, _ = k.shape
    repeat = num_heads // num_kv_heads
    out = np.empty_like(q)
    if seen is None:
        seen = np.arange(length) <= (length - num_queries + np.arange(num_queries))[:, None]
    for head in range(num_kv_heads):
        keys, values = k[:, head].astype(np.float64), v[:, head].astype(np.float64)
        heads = slice(head * repeat, (head + 1) * repeat)
        for start in range(0, num_queries, QUERY_BLOCK):
            block = q[start : start + QUERY_BLOCK, heads].swapaxes(0, 1) / np.sqrt(head_dim)  # [R, n, D]
            visible = seen[start : start + QUERY_BLOCK]
            end = int(np.flatnonzero(visible.any(axis=0))[-1]) + 1
            logits = block @ keys[:end].T
            logits[:, ~visible[:, :end]] = -np.inf
            weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            out[start : start + QUERY_BLOCK, heads] = (weights @ values[:end]).swapaxes(0, 1)
    return out


def weights(cache: Cache, q: np.ndarray, k: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """[Hkv, R, N, T] float32: softmax weights of queries q [N, Hq, D], unscaled, over keys k [T, Hkv, D], of which each
    sees those of `seen` [N, T] bool (host), at least one; 0 for the others."""
    num_queries, _, head_dim = q.shape
    heads = q.astype(np.float64).reshape(num_queries, k.shape[1], -1, head_dim).transpose(1, 2, 0, 3) / np.sqrt(
        head_dim
    )
    logits = heads @ k.astype(np.float64).transpose(1, 2, 0)[:, None]
    logits = np.where(seen, logits, -np.inf)
    mass = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return (mass / mass.sum(axis=-1, keepdims=True)).astype(np.float32)


def unread_share(lse: np.ndarray, lse_all: np.ndarray, kv_heads: int) -> np.ndarray:
    """[B, Hkv]: the largest share of a query head's softmax that was left out, lse [B, Hq] of what was read, lse_all of
    everything."""
    # two sums of the same numbers differ by rounding
    rounding = 2.0**-44 * (np.where(np.isfinite(lse), np.abs(lse), 0) + np.abs(lse_all))
    unread = np.where(lse_all - lse > rounding, -np.expm1(np.minimum(lse - lse_all, 0)), 0.0)
    return unread.reshape(len(lse), kv_heads, -1).max(axis=2)
