"""The functions of the backend through Triton kernels: what each covers, and the arrays it hands over.

Each takes what the array function of its name takes and returns the same, or None for what has no kernel: the array
function then does it. Nothing here waits for the device.

Kernels score `meanstd`, and `rq` unless it has bounds of its own: where array operations make bounds they make the
estimate with them, and a kernel of the estimate alone would save nothing. Kernels choose groups by topk per kv head;
the masks of other policies, of scope union and of head modes come from array operations, and a kernel lists them
(`listing`). Attention, of rows too, and tails have kernels whatever was chosen; writes have them where
`covers_writing` says so.
"""

import numpy as np
import torch
from torch import Tensor

from eps_core.config.eps import EpsConfig
from eps_core.config.read import Read
from eps_core.gate.protocol import RowsRead, Scores, Selection
from eps_core.paging.groups import WritePlan
from eps_core.paging.rows import Rows
from eps_core.paging.where import Where
from eps_core.summaries.rq import part_dims
from eps_cuda.anchors import anchors
from eps_cuda.cache import Cache
from eps_cuda.kernels import attend as attend_kernels
from eps_cuda.kernels import rows as rows_kernels
from eps_cuda.kernels import score as score_kernels
from eps_cuda.kernels import select as select_kernels
from eps_cuda.kernels import tail as tail_kernels
from eps_cuda.kernels import units as unit_kernels
from eps_cuda.kernels.select import Depth
from eps_cuda.kernels.write import TailPools, UnitPools, write_tokens

State = tuple[Tensor, Tensor]
SCORERS = {"meanstd": score_kernels.score_meanstd}  # besides rq without bounds of its own


def on_device(cache: Cache, where: Where | Rows) -> tuple[Tensor, Tensor]:
    """A step's or pass's table [B, M] and lengths [B] int32 on the device, copied once for all layers."""
    return where.once(
        ("device", cache.device),
        lambda: (to_device(cache, where.table), to_device(cache, where.lengths.astype(np.int32))),
    )


def to_device(cache: Cache, array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(cache.device, non_blocking=True)


def covers_scoring(cache: Cache) -> bool:
    """Whether `estimates` serves: rq without bounds of its own."""
    return cache.store.facts.coded and not cache.store.rq_bounds


@torch.inference_mode()
def score(cache: Cache, layer: int, q: Tensor, where: Where) -> Scores | None:
    store = cache.store
    if store.method not in SCORERS and not covers_scoring(cache):
        return None
    num_missing = where.num_missing(cache.state[layer])
    table, lengths = on_device(cache, where)
    if store.method in SCORERS:
        estimate = SCORERS[store.method](
            q, cache.summaries[layer], cache.valid[layer], table, lengths, group_tokens=store.S
        )
    else:
        estimate = estimates(cache, layer, q, table, lengths, depth_of(cache, where), where.config.read)
    return Scores(estimate, None, None, num_missing, kernels=cache.kernels)


def depth_of(cache: Cache, where: Where) -> Depth:
    """How far a step reads codes, copied once for all layers."""

    def copy() -> Depth:
        counts = [*where.staged(cache.spec.head_dim), where.refined]
        *staged, refined = ((to_device(cache, one.astype(np.int32)), int(one.max())) for one in counts)
        return Depth(tuple(staged), refined)

    return where.once(("depth", cache.device, cache.spec.head_dim), copy)


def estimates(cache: Cache, layer: int, q: Tensor, table: Tensor, lengths: Tensor, depth: Depth, read: Read) -> Tensor:
    """[B, Hkv, G] of rq, from device arrays alone: q [B, Hq, D], table [B, M], lengths [B]."""
    q = q.contiguous()
    store, summary = cache.store, cache.summaries[layer]
    query = unit_kernels.round_queries(q, cache.fixed[layer]["signs"], cache.spec.num_kv_heads)
    return unit_kernels.score_units(
        query, summary, cache.valid[layer], table, lengths, depth, anchors(cache, layer, q, table[:, :1], read),
        group_tokens=store.S, mean_bits=store.mean_bits, dims=part_dims(store, cache.spec.head_dim),
    )  # fmt: skip


@torch.inference_mode()
def select(scores: Scores, where: Where, layer: int = 0) -> Selection | None:
    config, read = where.config, where.config.read
    if read.policy != "topk" or read.scope != "kv-head" or read.head_modes:
        return None
    device = scores.estimate.device
    forced = where.num_forced + np.asarray(scores.num_missing, np.int64)
    uniform = where.budget(forced)
    wanted, ends = (torch.from_numpy(part.astype(np.int32)).to(device) for part in (uniform, where.lengths))
    listed, counts, visit = choose(config, scores.estimate, wanted, ends, max(int(uniform.max()), 1))
    return Selection(listed, counts, uniform, forced, visit=visit.bool())


def listing(visit: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """(groups [B, Hkv, width], counts [B, Hkv]) of a mask [B, Hkv, G] that array operations made."""
    return select_kernels.compact(visit.contiguous(), width=width)


def choose(
    config: EpsConfig, estimate: Tensor, wanted: Tensor, lengths: Tensor, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(groups [B, Hkv, width], counts [B, Hkv], visit [B, Hkv, G]) of topk, from device arrays alone."""
    return select_kernels.select_topk(
        estimate, wanted, lengths, group_tokens=config.store.S, first_tokens=config.read.first_tokens,
        last_tokens=config.read.last_tokens, min_context=config.read.min_context, width=width,
    )  # fmt: skip


@torch.inference_mode()
def attend(cache: Cache, layer: int, q: Tensor, where: Where, selection: Selection | None) -> State | None:
    spec, size = cache.spec, cache.store.S
    table, lengths = on_device(cache, where)
    if selection is None:
        cache.count_read(int(where.lengths.sum()) * spec.num_kv_heads * spec.kv_token_bytes)
        listed = counts = None
    else:
        listed, counts = selection.groups, selection.counts
        if selection.uniform is not None:
            cache.count_read(int(selection.uniform.sum()) * spec.num_kv_heads * size * spec.kv_token_bytes)
        else:
            cache.count_groups(counts.sum(), size * spec.kv_token_bytes)
    return attend_kernels.attend_groups(
        q, cache.k[layer], cache.v[layer], table, lengths, listed, counts, group_tokens=size
    )


@torch.inference_mode()
def attend_rows(cache: Cache, layer: int, q: Tensor, rows: Rows, visit: Tensor | None = None) -> RowsRead:
    table, lengths = on_device(cache, rows)
    starts = rows.once(("starts", cache.device), lambda: to_device(cache, rows.starts.astype(np.int32)))
    cache.count_read(int(rows.lengths.sum()) * cache.spec.num_kv_heads * cache.spec.kv_token_bytes)
    return RowsRead(
        *rows_kernels.attend_rows(
            q, cache.k[layer], cache.v[layer], table, lengths, starts,
            most_rows=int(rows.num_rows.max()), group_tokens=cache.store.S, visit=visit,
        )
    )  # fmt: skip


@torch.inference_mode()
def attend_tail(
    cache: Cache, layer: int, where: Where, scores: Scores, selection: Selection, lse: Tensor
) -> State | None:
    from eps_cuda.selection import visit_mask

    inner = cache.tail
    assert inner is not None
    table, lengths = on_device(cache, where)
    return tail_kernels.attend_tail(
        scores.estimate, visit_mask(selection, scores.estimate.shape[-1]), lse, inner.summaries[layer]["mean"],
        inner.summaries[layer]["mean_scale"], inner.valid[layer], table, lengths,
        group_tokens=cache.store.S, tail_tokens=cache.store.tail_tokens,
    )  # fmt: skip


def covers_writing(cache: Cache) -> bool:
    """Whether one kernel writes a decode step's tokens and all that follows from them: rq or off; K and V as they
    are."""
    store = cache.store
    if cache.spec.quantised:
        return False
    if not store.enabled:
        return True
    return store.facts.coded and not store.has_bounds


@torch.inference_mode()
def write_kv(cache: Cache, layer: int, k: Tensor, v: Tensor, slots: np.ndarray) -> bool:
    """Writes a decode step's tokens, and says whether it did: each must lie in a unit of its own."""
    if not covers_writing(cache) or len(np.unique(slots // cache.store.unit_tokens)) < len(slots):
        return False
    for one in _summarised(cache):
        count_sealed(cache, one, one.state[layer].plan(slots))
    write(cache, layer, k, v, to_device(cache, slots.astype(np.int32)))
    return True


def _summarised(cache: Cache) -> list[Cache]:
    return [one for one in (cache, cache.tail) if one is not None and one.store.enabled]


def plan_step(cache: Cache, slots: np.ndarray) -> None:
    """Tells every layer's state on the host of a step's write, whose layers all write the same slots."""
    for one in _summarised(cache):
        first, *others = one.state
        plan = first.plan(slots)
        for state in others:
            state.follow(first, slots)
        count_sealed(cache, one, plan, len(one.state))


def count_sealed(cache: Cache, one: Cache, plan: WritePlan, num_layers: int = 1) -> None:
    """Counts the keys and values that are read back to seal groups of `one`, the cache or its tail."""
    sealed = num_layers * int(plan.sealed.sum())
    cache.bytes_k_reread += sealed * cache.spec.num_kv_heads * one.store.sealed_tokens * cache.spec.kv_token_bytes // 2


@torch.inference_mode()
def write(cache: Cache, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """One token of each sequence, k, v [N, Hkv, D] to slots [N] (device, -1: none), from device arrays alone. The host
    must tell every `state` of the same slots."""
    store, inner = cache.store, cache.tail
    rq: UnitPools | None = None
    tail = valid = None
    if store.enabled:
        summary, valid = cache.summaries[layer], cache.valid[layer]
        optional = {name: summary.get(name) for name in ("more", "rest", "second", "second_scale")}
        rq = UnitPools(
            mean=summary["mean"], mean_scale=summary["mean_scale"], codes=summary["codes"], scale=summary["scale"],
            signs=cache.fixed[layer]["signs"], group_tokens=store.S, bits=store.mean_bits, **optional,
        )  # fmt: skip
    if inner is not None:
        fields = inner.summaries[layer]
        tail = TailPools(fields["mean"], fields["mean_scale"], inner.valid[layer], store.tail_tokens)
    k, v = (x.to(cache.k[layer].dtype).contiguous() for x in (k, v))
    write_tokens(
        k, v, slots, *cache.plain(layer), cache.finite[layer], valid,
        sealed_tokens=store.sealed_tokens, rq=rq, tail=tail, largest_key=None, largest_value=None,
    )  # fmt: skip


@torch.inference_mode()
def place(cache: Cache, layer: int, k: Tensor, v: Tensor, slots: Tensor, finite: Tensor) -> None:
    """`write` without what follows from a write: K and V alone, as `cache.place_kv` leaves them. `finite` [] bool is
    told of NaN and Inf in the cache's place."""
    k, v = (x.to(cache.k[layer].dtype).contiguous() for x in (k, v))
    write_tokens(
        k, v, slots, *cache.plain(layer), finite, None, sealed_tokens=cache.store.sealed_tokens, rq=None,
        tail=None, largest_key=None, largest_value=None,
    )  # fmt: skip
