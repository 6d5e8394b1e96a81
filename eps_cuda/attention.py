"""Attention over whole groups of a paged cache: `(out, lse)`, so that parts can be merged exactly.

Logits, softmax and sums are float32 whatever the cache holds. Only listed groups are read: whole `[S, D]` tiles, one
row of a gather each. No mask but over the unwritten end of the partial group, which can only be the last tile.
"""

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from eps_core.attention.kernels import kernel_first
from eps_core.attention.protocol import Selection
from eps_core.backend import pages
from eps_core.backend.attention import softmax_sums
from eps_core.backend.ops import Ops
from eps_core.kv_cache.counts import check_query
from eps_core.kv_cache.step_plan import StepPlan
from eps_cuda.cache import Cache
from eps_cuda.ops import OPS, multiplies

State = tuple[Tensor, Tensor]

PIECE_TOKENS = 256  # of a dense read on a CPU, to stay in its cache; changes speed only


def attend(cache: Cache, layer: int, q: Tensor, plan: StepPlan, selection: Selection | None) -> State:
    """(out [B, Hq, D] in q's dtype, lse [B, Hq] float32: natural log of the softmax mass read) of q [B, Hq, D],
    unscaled, over the selected groups of each sequence, or over all of its tokens where `selection` is None. A
    selection whose numbers only the device knows costs one synchronisation."""
    check_query(cache.spec, q.shape)
    return _attend(OPS, cache, layer, q, plan, selection)


@kernel_first
@torch.inference_mode()
def _attend(ops: Ops, cache: Cache, layer: int, q: Tensor, plan: StepPlan, selection: Selection | None) -> State:
    batch, num_heads, head_dim = q.shape
    kv_heads = cache.spec.num_kv_heads
    table, lengths = plan.table, plan.lengths
    a = q.float().reshape(batch, kv_heads, -1, head_dim) * (1 / math.sqrt(head_dim))
    if selection is None:
        states = [_attend_all(cache, layer, a[b], table[b], int(lengths[b])) for b in range(batch)]
    else:
        if selection.common_counts is not None:
            counts = np.repeat(np.asarray(selection.common_counts)[:, None], kv_heads, axis=1)
        else:
            counts = selection.counts.cpu().numpy()
        states = [
            _attend_groups(cache, layer, a[b], selection.groups[b], counts[b], table[b], int(lengths[b]))
            for b in range(batch)
        ]
    out, lse = (torch.stack(part) for part in zip(*states, strict=True))
    return out.reshape(q.shape).to(q.dtype), lse.reshape(batch, num_heads)


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
        weights, total, lse = softmax_sums(OPS, a @ k.mT)
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
    return buffer[:, : len(units)].copy_(pages.units_of(OPS, pool, units).transpose(0, 1)).flatten(1, 2)


def _attend_groups(
    cache: Cache, layer: int, a: Tensor, groups: Tensor, counts: np.ndarray, table: np.ndarray, length: int
) -> State:
    """Attention of one sequence over the first counts [Hkv] of groups [Hkv, W], ascending: a [Hkv, R, D]."""
    per_unit, spec = cache.cache_config.groups_per_unit, cache.spec
    width = int(counts.max())
    groups = groups[:, :width].long()
    units = OPS.index(a, np.maximum(table, 0))[groups.clamp(min=0) // per_unit]
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
    tiles = [pages.tiles_of(OPS, pool[layer], rows, size) for pool in (cache.k, cache.v)]
    k, v = (tile.view(len(rows), -1, head_dim).float() for tile in tiles)
    logits = (k @ a.mT).mT
    unwritten = -length % size
    if unwritten:
        # only the device knows whether the partial group is listed; what lies there may be anything, NaN in V included
        is_open = (last == length // size)[:, None, None]
        logits[..., -unwritten:].masked_fill_(is_open, -math.inf)
        v[:, -unwritten:].masked_fill_(is_open, 0.0)
    weights, total, lse = softmax_sums(OPS, logits)
    return (weights @ v) / total, lse


def _after_past(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """`attend_chunk` on a CPU, [Hq, N, D] of query [1, Hq, N, D], key and value [1, Hkv, T, D]: over what lies before
    the chunk without a mask, the query heads of a kv head as its rows, and causal over the chunk. A mask [N, T] costs
    a fifth more."""
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    _, heads, num, dim = query.shape
    kv_heads, past = key.shape[1], key.shape[2] - num
    rows = query.reshape(1, kv_heads, -1, dim)
    earlier, earlier_lse = attend(rows, key[:, :, :past], value[:, :, :past])
    repeat = heads // kv_heads
    own_key, own_value = (x[:, :, past:].repeat_interleave(repeat, dim=1) for x in (key, value))
    own, own_lse = attend(query, own_key, own_value, is_causal=True)
    earlier, earlier_lse = earlier.reshape(own.shape), earlier_lse.reshape(own_lse.shape)
    share = torch.sigmoid(own_lse - earlier_lse)[..., None]  # of the chunk
    return torch.lerp(earlier.float(), own.float(), share)[0]


def attend_chunk(cache: Cache, q: Tensor, k: Tensor, v: Tensor, seen: np.ndarray | None = None) -> Tensor:
    """Dense attention of a prefill chunk: q [N, Hq, D] are the last N of the T tokens of k, v [T, Hkv, D], each over
    itself and all before it, or over those of `seen` [N, T] bool (host), at least one."""
    wide = q.dtype if k.dtype == q.dtype and multiplies(q) else torch.float32
    query, key, value = (x.to(wide).transpose(0, 1)[None] for x in (q, k, v))
    repeat, on_cpu = q.shape[1] // k.shape[1], q.device.type == "cpu"
    if not on_cpu and wide == torch.float32 and repeat > 1:
        # the only GPU kernel for float32 that needs no [N, T] matrix wants one kv head per query head
        key, value = (x.repeat_interleave(repeat, dim=1) for x in (key, value))
        repeat = 1
    if seen is not None:
        mask = torch.from_numpy(seen).to(q.device)
    elif on_cpu and 1 < len(q) < len(k):
        return _after_past(query, key, value).transpose(0, 1).to(q.dtype)
    elif on_cpu:
        mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
    else:
        mask = causal_lower_right(len(q), len(k))
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=repeat > 1)
    return out[0].transpose(0, 1).to(q.dtype)
