"""Attention over whole groups of a paged cache: `(out, lse)`, so that parts can be merged exactly.

Logits, softmax and sums are float32 whatever the cache holds. Only listed groups are read: whole `[S, D]` tiles, one
row of a gather each. No mask but over the unwritten end of the partial group, which can only be the last tile.
"""

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from eps_core.attention.protocol import RowsRead, Scores, Selection
from eps_core.kv_cache.counts import check_query
from eps_core.kv_cache.rows import Rows
from eps_core.kv_cache.step_plan import StepPlan
from eps_cuda import pages
from eps_cuda.cache import Cache, read_kv
from eps_cuda.device import DTYPES
from eps_cuda.kernels.choose import routed
from eps_cuda.selection import selection_mask

State = tuple[Tensor, Tensor]

PIECE_TOKENS = 256  # of a dense read on a CPU, to stay in its cache; changes speed only


def attend(cache: Cache, layer: int, q: Tensor, plan: StepPlan, selection: Selection | None) -> State:
    """(out [B, Hq, D] in q's dtype, lse [B, Hq] float32: natural log of the softmax mass read) of q [B, Hq, D],
    unscaled, over the selected groups of each sequence, or over all of its tokens where `selection` is None. A
    selection whose numbers only the device knows costs one synchronisation."""
    check_query(cache.spec, q.shape)
    return _attend(cache, layer, q, plan, selection)


@routed(lambda kernels: kernels.attend)
@torch.inference_mode()
def _attend(cache: Cache, layer: int, q: Tensor, plan: StepPlan, selection: Selection | None) -> State:
    batch, num_heads, head_dim = q.shape
    kv_heads = cache.spec.num_kv_heads
    table, lengths = plan.table, plan.lengths
    a = q.float().reshape(batch, kv_heads, -1, head_dim) * (1 / math.sqrt(head_dim))
    if selection is None:
        states = [_attend_all(cache, layer, a[b], table[b], int(lengths[b])) for b in range(batch)]
    else:
        if selection.uniform is not None:
            counts = np.repeat(np.asarray(selection.uniform)[:, None], kv_heads, axis=1)
        else:
            counts = selection.counts.cpu().numpy()
        states = [
            _attend_groups(cache, layer, a[b], selection.groups[b], counts[b], table[b], int(lengths[b]))
            for b in range(batch)
        ]
    out, lse = (torch.stack(part) for part in zip(*states, strict=True))
    return out.reshape(q.shape).to(q.dtype), lse.reshape(batch, num_heads)


def _softmax_sums(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(weights, their sum [.., 1], lse [..]) over the last axis, in which one logit at least is finite."""
    largest = logits.amax(dim=-1, keepdim=True)
    weights = torch.exp(logits - largest)
    total = weights.sum(dim=-1, keepdim=True)
    return weights, total, (largest + torch.log(total))[..., 0]


def _attend_all(cache: Cache, layer: int, a: Tensor, table: np.ndarray, length: int) -> State:
    """Dense attention of one sequence, a [Hkv, R, D] -> (out [Hkv, R, D], lse [Hkv, R]); exactly `length` tokens. A CPU
    reads in pieces through one buffer (a fifth of the time of copying K and V whole); a GPU reads all at once."""
    unit_tokens = cache.cache_config.unit_tokens
    units = table[: -(-length // unit_tokens)]
    step = max(PIECE_TOKENS // unit_tokens, 1) if a.device.type == "cpu" else len(units)
    buffer = a.new_empty((cache.spec.num_kv_heads, step, unit_tokens, cache.spec.head_dim))
    parts = []
    for start in range(0, len(units), step):
        piece, written = units[start : start + step], length - start * unit_tokens
        k = _by_head(cache.k[layer], piece, buffer)[:, :written]
        weights, total, lse = _softmax_sums(a @ k.mT)
        v = _by_head(cache.v[layer], piece, buffer)[:, :written]
        parts.append(((weights @ v) / total, lse))
    if len(parts) == 1:
        return parts[0]
    outs, lses = (torch.stack(part) for part in zip(*parts, strict=True))
    lse = torch.logsumexp(lses, dim=0)
    return (outs * torch.exp(lses - lse)[..., None]).sum(dim=0), lse


def _by_head(pool: pages.Pool, units: np.ndarray, buffer: Tensor) -> Tensor:
    """Tokens of some units of a pool, head by head, [Hkv, tokens, D] float32: a copy into the buffer [Hkv, M, U, D],
    valid until its next use."""
    return buffer[:, : len(units)].copy_(pages.units_of(pool, units).transpose(0, 1)).flatten(1, 2)


def _attend_groups(
    cache: Cache, layer: int, a: Tensor, groups: Tensor, counts: np.ndarray, table: np.ndarray, length: int
) -> State:
    """Attention of one sequence over the first counts [Hkv] of groups [Hkv, W], ascending: a [Hkv, R, D]."""
    per_unit, spec = cache.cache_config.groups_per_unit, cache.spec
    width = int(counts.max())
    groups = groups[:, :width].long()
    units = torch.from_numpy(np.maximum(table, 0).astype(np.int64)).to(a.device)[groups.clamp(min=0) // per_unit]
    heads = torch.arange(spec.num_kv_heads, device=a.device)[:, None]
    rows = (units * spec.num_kv_heads + heads) * per_unit + groups % per_unit  # as K's memory lies
    if width and (counts == width).all():
        return _attend_places(cache, layer, a, rows, groups[:, -1], length)
    states = []
    for head, count in enumerate(counts.tolist()):
        part = slice(head, head + 1)
        if count:
            states.append(_attend_places(cache, layer, a[part], rows[part, :count], groups[part, count - 1], length))
        else:
            states.append((torch.zeros_like(a[part]), a.new_full((1, a.shape[1]), -math.inf)))
    out, lse = (torch.cat(part) for part in zip(*states, strict=True))
    return out, lse


def _attend_places(cache: Cache, layer: int, a: Tensor, rows: Tensor, last: Tensor, length: int) -> State:
    """Attention of a [H, R, D] over the pool's tiles rows [H, W]; last [H] is the group in the last tile."""
    size, head_dim = cache.cache_config.S, cache.spec.head_dim
    tiles = [pages.tiles_of(pool[layer], rows, size) for pool in (cache.k, cache.v)]
    k, v = (tile.view(len(rows), -1, head_dim).float() for tile in tiles)
    logits = (k @ a.mT).mT
    unwritten = -length % size
    if unwritten:
        # only the device knows whether the partial group is listed; what lies there may be anything, NaN in V included
        is_open = (last == length // size)[:, None, None]
        logits[..., -unwritten:].masked_fill_(is_open, -math.inf)
        v[:, -unwritten:].masked_fill_(is_open, 0.0)
    weights, total, lse = _softmax_sums(logits)
    return (weights @ v) / total, lse


def attend_rows(cache: Cache, layer: int, q: Tensor, rows: Rows, selected_mask: Tensor | None = None) -> RowsRead:
    """Dense attention of q [T, Hq, D], unscaled, each row over the tokens before it and itself: see `RowsRead`.
    `selected_mask` [T, Hkv, G] bool; the groups are the cache's. K and V are read, and count, once for all rows of a
    sequence. What a row does not see does not reach it, NaN included."""
    check_query(cache.spec, q.shape)
    return _attend_rows(cache, layer, q, rows, selected_mask)


@routed(lambda kernels: kernels.attend_rows)
@torch.inference_mode()
def _attend_rows(cache: Cache, layer: int, q: Tensor, rows: Rows, selected_mask: Tensor | None = None) -> RowsRead:
    kv_heads, head_dim, size = cache.spec.num_kv_heads, cache.spec.head_dim, cache.cache_config.S
    num_groups = rows.table.shape[1] * cache.cache_config.groups_per_unit
    parts = []
    for b, length in enumerate(rows.lengths.tolist()):
        own = slice(int(rows.starts[b]), int(rows.starts[b + 1]))
        k, v = (x.float().transpose(0, 1) for x in read_kv(cache, layer, rows.table[b], length))  # [Hkv, T, D]
        a = q[own].float().unflatten(1, (kv_heads, -1)).transpose(0, 1) / math.sqrt(head_dim)  # [Hkv, N, R, D]
        seen = torch.from_numpy(rows.seen[own]).to(q.device)[:, None]
        hidden = torch.arange(length, device=q.device) >= seen  # [N, T]
        logits = (a.flatten(1, 2) @ k.mT).unflatten(1, a.shape[1:3]).masked_fill(hidden[:, None], -math.inf)
        weights, total, lse = _softmax_sums(logits)
        finite = torch.isfinite(v)
        out = (weights.flatten(1, 2) @ v.masked_fill(~finite, 0.0)).unflatten(1, a.shape[1:3]) / total
        broken = ~finite.all(dim=2)  # [Hkv, T]
        out = out.masked_fill((broken[:, None] & ~hidden).any(dim=2)[..., None, None], math.nan)
        selected = None
        if selected_mask is not None:
            padded = torch.nn.functional.pad(logits, (0, num_groups * size - length), value=-math.inf)
            mass = torch.logsumexp(padded.unflatten(3, (num_groups, size)), dim=4)  # [Hkv, N, R, G]
            listed = selected_mask[own].to(torch.bool).transpose(0, 1)[:, :, None]
            selected = torch.logsumexp(mass.masked_fill(~listed, -math.inf), dim=3).transpose(0, 1).flatten(1)
        parts.append((out.transpose(0, 1).flatten(1, 2), lse.transpose(0, 1).flatten(1), selected))
    outs, lses, visits = zip(*parts, strict=True)
    return RowsRead(
        torch.cat(outs).to(q.dtype),
        torch.cat(lses),
        None if selected_mask is None else torch.cat(visits),
    )


@torch.inference_mode()
def merge(first: State, second: State) -> State:
    """Exact merge of attention over two disjoint sets of keys: out [.., D] with lse [..] (-inf: no keys, weight 0)."""
    (out1, lse1), (out2, lse2) = first, second
    largest = torch.maximum(lse1, lse2)
    base = torch.where(torch.isneginf(largest), 0, largest)
    weight1, weight2 = torch.exp(lse1 - base), torch.exp(lse2 - base)
    total = weight1 + weight2
    divisor = torch.where(total > 0, total, 1)
    out = out1 * (weight1 / divisor)[..., None] + out2 * (weight2 / divisor)[..., None]
    return out.to(out1.dtype), base + torch.log(total)


@routed(lambda kernels: kernels.attend_correction)
@torch.inference_mode()
def attend_correction(
    cache: Cache, layer: int, plan: StepPlan, scores: Scores, selection: Selection, lse: Tensor
) -> State:
    """(out [B, Hq, D] float32, lse [B, Hq]): an estimate of attention over the groups that `selection` left out, to be
    merged with what was read, whose log mass is lse [B, Hq]. Each skipped group counts with its estimated mass and the
    mean value of the correction group around it. Estimates that were too high for what was read are lowered as much for
    what was not; where the correction group is not full, or has no estimate, it adds nothing. An estimate, no bound."""
    inner, spec = cache.correction, cache.spec
    assert inner is not None
    batch, kv_heads, groups = scores.estimate.shape
    lse = lse.reshape(batch, kv_heads, -1)
    missing = plan.missing(inner.state[layer])
    usable = ~missing & (np.arange(missing.shape[1]) < -(-plan.lengths // inner.cache_config.S)[:, None])
    known, selected_mask = torch.isfinite(scores.estimate), selection_mask(selection, groups)
    seen = torch.logsumexp(torch.where(known & selected_mask, scores.estimate, -math.inf), dim=-1)[..., None]
    skipped = torch.where(known & ~selected_mask, scores.estimate, -math.inf)
    # whole pool units are listed, so groups fill their correction groups
    mass = torch.logsumexp(skipped.unflatten(-1, (missing.shape[1], -1)), dim=-1)
    mass = torch.where(torch.from_numpy(usable).to(lse.device)[:, None], mass, -math.inf)
    total = torch.logsumexp(mass, dim=-1, keepdim=True)
    weights = torch.exp(mass - torch.where(total > -math.inf, total, 0))
    rows = (np.maximum(plan.table, 0)[:, None, :].astype(np.int64) * kv_heads + np.arange(kv_heads)[:, None]).reshape(
        -1
    )
    rows = torch.from_numpy(rows).to(lse.device)
    codes, scale = (
        inner.summaries[layer][name].reshape(spec.num_units * kv_heads, -1).index_select(0, rows)
        for name in ("mean", "mean_scale")
    )
    means = codes.view(batch, kv_heads, -1, spec.head_dim).float() * scale.view(batch, kv_heads, -1, 1).float()
    out = (weights[..., None, :] @ means).expand(-1, -1, lse.shape[-1], -1)
    correction = total - (seen - lse).clamp(min=0)
    return out.reshape(batch, -1, spec.head_dim), correction.reshape(batch, -1)


@routed(lambda kernels: kernels.add_correction)
@torch.inference_mode()
def add_correction(
    cache: Cache, layer: int, plan: StepPlan, scores: Scores, selection: Selection, state: State
) -> State:
    """Return `state`, of what was read, merged with `attend_correction`: out [B, Hq, D] in its dtype, lse [B, Hq]."""
    return merge(state, attend_correction(cache, layer, plan, scores, selection, state[1]))


@torch.inference_mode()
def attend_own(cache: Cache, q: Tensor, k: Tensor, v: Tensor) -> State:
    """(out [B, Hq, D] in q's dtype, lse [B, Hq] float32) of each token over itself alone: q [B, Hq, D], k, v
    [B, Hkv, D] as the cache would hold them."""
    stored, repeat = DTYPES[cache.spec.dtype], q.shape[1] // k.shape[1]
    held = (pages.held(pool[0], x.to(stored)) for pool, x in ((cache.k, k), (cache.v, v)))
    key, value = (x.float().repeat_interleave(repeat, dim=1) for x in held)
    return value.to(q.dtype), (q.float() * key).sum(dim=-1) / math.sqrt(q.shape[-1])


def attend_chunk(cache: Cache, q: Tensor, k: Tensor, v: Tensor, seen: np.ndarray | None = None) -> Tensor:
    """Dense attention of a prefill chunk: q [N, Hq, D] are the last N of the T tokens of k, v [T, Hkv, D], each over
    itself and all before it, or over those of `seen` [N, T] bool (host), at least one."""
    wide = q.dtype if k.dtype == q.dtype else torch.float32
    query, key, value = (x.to(wide).transpose(0, 1)[None] for x in (q, k, v))
    repeat, on_cpu = q.shape[1] // k.shape[1], q.device.type == "cpu"
    if not on_cpu and wide == torch.float32 and repeat > 1:
        # the only GPU kernel for float32 that needs no [N, T] matrix wants one kv head per query head
        key, value = (x.repeat_interleave(repeat, dim=1) for x in (key, value))
        repeat = 1
    if seen is not None:
        mask = torch.from_numpy(seen).to(q.device)
    elif on_cpu:
        mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
    else:
        mask = causal_lower_right(len(q), len(k))
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=repeat > 1)
    return out[0].transpose(0, 1).to(q.dtype)


@torch.inference_mode()
def weights(cache: Cache, q: Tensor, k: Tensor, seen: np.ndarray) -> Tensor:
    """[Hkv, R, N, T] float32: softmax weights of queries q [N, Hq, D], unscaled, over keys k [T, Hkv, D], of which each
    sees those of `seen` [N, T] bool (host), at least one; 0 for the others."""
    heads = q.float().view(len(q), k.shape[1], -1, q.shape[-1]).permute(1, 2, 0, 3) / math.sqrt(q.shape[-1])
    logits = heads @ k.float().permute(1, 2, 0)[:, None]
    mask = torch.from_numpy(np.ascontiguousarray(seen)).to(logits.device)
    return torch.softmax(logits.masked_fill_(~mask, -math.inf), dim=-1)


@torch.inference_mode()
def unread_share(lse: Tensor, lse_all: Tensor, kv_heads: int) -> Tensor:
    """[B, Hkv]: the largest share of a query head's softmax that was left out, lse [B, Hq] of what was read, lse_all of
    everything."""
    # two float32 sums differ by rounding even where everything was read
    rounding = 2.0**-20 * (lse.abs() + lse_all.abs())
    unread = torch.where(lse_all - lse > rounding, -torch.expm1(lse - lse_all), 0.0)
    return unread.reshape(len(lse), kv_heads, -1).amax(dim=-1)


@torch.inference_mode()
def moved_by(out: Tensor, whole: Tensor, kv_heads: int) -> Tensor:
    """[B, Hkv]: at least the largest L2 distance, over the query heads, between two outputs [B, Hq, D]."""
    moved = torch.linalg.vector_norm(whole.float() - out.float(), dim=-1).reshape(len(out), kv_heads, -1)
    return moved.amax(dim=-1) * (1 + 2.0**-16)
