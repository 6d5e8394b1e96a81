"""The functions of the backend through Triton kernels (see `eps_core.backend.gpu`), and what graphs of whole steps
call with arrays of the device alone. One kernel writes a decode step's tokens where `unsupported_writing` is None."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eps_core.attention.kernels import Kernel, unsupported_choice
from eps_core.attention.protocol import FusedRead, Selection
from eps_core.backend import scoring
from eps_core.backend.gpu import GpuKernels, unsupported_scoring
from eps_core.config.eps import EpsConfig
from eps_core.config.selection import SelectionConfig
from eps_core.kv_cache.groups import WritePlan, plan_alike
from eps_core.kv_cache.step_plan import StepPlan
from eps_core.summaries.rq import part_dims
from eps_cuda.cache import Cache, span
from eps_cuda.kernels import attend as attend_kernels
from eps_cuda.kernels import rows as rows_kernels
from eps_cuda.kernels import select as select_kernels
from eps_cuda.kernels import thresholds
from eps_cuda.kernels import units as unit_kernels
from eps_cuda.kernels import write as write_kernels
from eps_cuda.kernels.attend_best import attend_best
from eps_cuda.kernels.prepare import prepare
from eps_cuda.kernels.score import Depth
from eps_cuda.kernels.write import UnitPools, write_tokens
from eps_cuda.ops import OPS


class TritonKernels(GpuKernels):
    family, ops = "triton", OPS
    attend_groups = attend_kernels.attend_groups
    attend_all_rows = rows_kernels.attend_rows
    select_topk = select_kernels.select_topk
    compact = select_kernels.compact

    def estimates(self, cache: Cache, layer: int, q: Tensor, plan: StepPlan, table: Tensor, lengths: Tensor) -> Tensor:
        q, depth, selection_config = q.contiguous(), depth_of(cache, plan), plan.config.selection_config
        query = unit_kernels.round_queries(q, **rounding_of(cache, layer, q, table, depth, selection_config))
        if selection_config.combine == "sum" and query.anchors is None:  # K in codes, which that kernel does not read
            query = replace(query, anchors=scoring.anchors(OPS, cache, layer, q, table[:, 0], selection_config))
        return estimates_of(cache, layer, query, table, lengths, depth)

    def attend_fused(self, cache: Cache, layer: int, q: Tensor, plan: StepPlan) -> FusedRead:
        """A layer whose K and V are written, in five launches where codes are read at once. What it selects is listed
        by `lasting`."""
        with self.ops.place(cache):
            table, lengths = self.on_device(cache, plan)
            always_selected, counts, wanted = self.wanted(cache, layer, plan)
            read = table, lengths, wanted, depth_of(cache, plan), max(int(counts.max()), 1)
            best = attend_layer(plan.config, cache, layer, q, *read)
        selection = Selection(None, wanted[:, None].expand(best.skipped.shape), counts, always_selected)
        return _Read(best.out, best.lse, selection, best.skipped, None, best)


@dataclass(frozen=True)
class Into:
    """Where a layer's results go, at addresses that do not change."""

    out: Tensor  # [B, Hq, D] of any dtype
    skipped: Tensor  # [B, Hkv] float32
    state: Tensor  # [B * Hkv, STATE] int32: see `thresholds.STATE`


@dataclass(frozen=True)
class Attended:
    """Attention over a layer's best groups, and by what they were found."""

    out: Tensor  # [B, Hq, D] in q's dtype
    lse: Tensor | None  # [B, Hq] float32
    skipped: Tensor  # [B, Hkv] float32: the estimated share of the softmax left unread
    estimate: Tensor
    lengths: Tensor
    found: thresholds.Thresholds
    width: int

    def listed(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return groups [B, Hkv, width], counts [B, Hkv] and the mask [B, Hkv, G] uint8 of what was selected."""
        mask = torch.empty(self.estimate.shape, dtype=torch.uint8, device=self.estimate.device)
        return *select_kernels.listed(self.estimate, self.lengths, self.found, self.width, mask), mask


@dataclass(frozen=True)
class _Read(FusedRead):
    best: Attended

    def lasting(self) -> FusedRead:
        groups, counts, mask = self.best.listed()
        selection = replace(self.selection, groups=groups, counts=counts, selected_mask=OPS.boolean(mask))
        return FusedRead(self.out, self.lse, selection, self.skipped, None)


def depth_of(cache: Cache, plan: StepPlan) -> Depth:
    """Return how far a step reads codes, copied once for all layers."""

    def copy() -> Depth:
        counts = [*plan.cascaded(cache.spec.head_dim), plan.rescored]
        *cascaded, rescored = ((OPS.on(cache, one.astype(np.int32)), int(one.max())) for one in counts)
        return Depth(tuple(cascaded), rescored, plan.config.selection_config.reads_at_once)

    return plan.once(("depth", cache.device, cache.spec.head_dim), copy)


def rounding_of(
    cache: Cache, layer: int, q: Tensor, table: Tensor, depth: Depth, selection_config: SelectionConfig
) -> dict[str, Any]:
    """Return the arguments by which a query is rounded."""
    repeat, pool = q.shape[1] // cache.spec.num_kv_heads, cache.k[layer]
    return {
        "signs": cache.fixed[layer]["signs"],
        "kv_heads": cache.spec.num_kv_heads,
        "first": (pool, table) if selection_config.combine == "sum" and isinstance(pool, Tensor) else None,
        "with_planes": unit_kernels.reads_bits(
            depth, cache.cache_config.groups_per_span, repeat, cache.spec.head_dim, table.device
        ),
    }


def estimates_of(
    cache: Cache, layer: int, query: unit_kernels.Query, table: Tensor, lengths: Tensor, depth: Depth, fill: bool = True
) -> Tensor:
    """Estimates [B, Hkv, G] of rq by a rounded query, from device arrays alone: table [B, M], lengths [B]. `fill`: see
    `score_units`."""
    return unit_kernels.score_units(
        query, cache.summaries[layer], cache.valid[layer], table, lengths, depth, group_size=cache.cache_config.S,
        dims=part_dims(cache.cache_config, cache.spec.head_dim), fill=fill,
    )  # fmt: skip


def attend_rounded(
    config: EpsConfig, cache: Cache, layer: int, q: Tensor, query: unit_kernels.Query, counters: Tensor, table: Tensor,
    lengths: Tensor, wanted: Tensor, depth: Depth, width: int, with_lse: bool = True, into: Into | None = None,
) -> Attended:  # fmt: skip
    """Score, choose and attend for q [B, Hq, D], rounded, from device arrays alone: cleared counters, table [B, M],
    lengths [B], and of the best groups `wanted` [B] a kv head, at most `width`. With `into`, whose caller's host does
    not know how many groups lack a summary, all that are always selected are read, be they more than `wanted`."""
    selection_config = config.selection_config
    with span("eps.prepass", cache):
        estimate = estimates_of(cache, layer, query, table, lengths, depth, fill=False)
        selectable = (
            config.cache_config.S, selection_config.num_sink_tokens, selection_config.num_recent_tokens,
            selection_config.min_context,
        )  # fmt: skip
        state = None if into is None else into.state
        found = thresholds.find_thresholds(
            estimate, lengths, wanted, width, selectable, counters, state, always=into is not None
        )
    with span("eps.attention", cache):
        placed = (None, None) if into is None else (into.out, into.skipped)
        read = attend_best(q, *cache.plain(layer), table, lengths, estimate, found, with_lse, *placed)
    return Attended(*read, estimate, lengths, found, width)


def attend_layer(
    config: EpsConfig, cache: Cache, layer: int, q: Tensor, table: Tensor, lengths: Tensor, wanted: Tensor,
    depth: Depth, width: int,
) -> Attended:  # fmt: skip
    """`attend_rounded` for q [B, Hq, D] as it is."""
    q = q.contiguous()
    counters = thresholds.new_counters(len(q) * cache.spec.num_kv_heads, q.device)
    by = rounding_of(cache, layer, q, table, depth, config.selection_config)
    query = unit_kernels.round_queries(q, **by, counters=counters)
    return attend_rounded(config, cache, layer, q, query, counters, table, lengths, wanted, depth, width)


def _unsupported_layer(cache: Cache, layer: int, q: Tensor, plan: StepPlan) -> str | None:
    if cache.cache_config.has_bounds:
        return "bounds"
    if cache.spec.quantised:
        return "K or V in codes"
    return unsupported_choice(None, plan, layer) or unsupported_scoring(cache, layer, q, plan)


def unsupported_writing(cache: Cache) -> str | None:
    """Return why one kernel does not write a decode step's tokens and all that follows from them, or None: it
    knows rq and off, and K and V without codes."""
    cache_config = cache.cache_config
    if cache.spec.quantised:
        return "K or V in codes"
    if not cache_config.enabled:
        return None
    if not cache_config.method_spec.coded:
        return f"method {cache_config.method}"
    return "bounds" if cache_config.has_bounds else None


@torch.inference_mode()
def write_kv(cache: Cache, layer: int, k: Tensor, v: Tensor, slots: np.ndarray) -> Cache:
    """Writes a decode step's tokens, each in a unit of its own."""
    if cache.cache_config.enabled:
        count_finalized(cache, cache.state[layer].plan(slots))
    write(cache, layer, k, v, OPS.on(cache, slots.astype(np.int32)))
    return cache


def plan_step(cache: Cache, slots: np.ndarray) -> None:
    """Tells every layer's state on the host of a step's write, whose layers all write the same slots."""
    if cache.cache_config.enabled:
        count_finalized(cache, plan_alike(cache.state, slots), len(cache.state))


def count_finalized(cache: Cache, plan: WritePlan, num_layers: int = 1) -> None:
    """Counts the keys that are read back to finalize groups."""
    cache.tokens_reread += num_layers * int(plan.finalized.sum()) * cache.cache_config.span_tokens


@torch.inference_mode()
def write(
    cache: Cache, layer: int, k: Tensor, v: Tensor, slots: Tensor, tentative_finite: Tensor | None = None
) -> None:
    """One token of each sequence, k, v [N, Hkv, D] to slots [N] (device, -1: none), from device arrays alone. The host
    must tell every `state` of the same slots. With `tentative_finite` [] bool, which is told of NaN and Inf in the
    cache's place, nothing follows from the write: K and V are left as `cache.write_kv_tentative` leaves them."""
    write_tokens(**writing_of(cache, layer, k, v, slots, tentative_finite))


def writing_of(
    cache: Cache, layer: int, k: Tensor, v: Tensor, slots: Tensor, tentative_finite: Tensor | None = None
) -> dict[str, Any]:
    """Return the arguments by which `write` writes tokens."""
    cache_config, finite = cache.cache_config, tentative_finite
    rq = valid = None
    if finite is None:
        finite = cache.finite[layer]
        if cache_config.enabled:
            summary, valid = cache.summaries[layer], cache.valid[layer]
            rq = UnitPools(summary, cache.fixed[layer]["signs"], cache_config.S)
    k_pool, v_pool = cache.plain(layer)
    k, v = k.to(k_pool.dtype), v.to(k_pool.dtype)
    return {
        "k": k, "v": v, "slots": slots, "k_pool": k_pool, "v_pool": v_pool, "finite": finite, "valid": valid,
        "span_tokens": cache_config.span_tokens, "rq": rq,
    }  # fmt: skip


def begin(
    cache: Cache, layer: int, q: Tensor, k: Tensor, v: Tensor, slots: Tensor, table: Tensor, depth: Depth,
    selection_config: SelectionConfig, tentative_finite: Tensor | None = None,
) -> tuple[unit_kernels.Query, Tensor]:  # fmt: skip
    """`write` of a step's tokens, its query q [B, Hq, D] rounded, and cleared counters for its choice, in one launch;
    K as it is."""
    counters = thresholds.new_counters(len(q) * cache.spec.num_kv_heads, q.device)
    by = rounding_of(cache, layer, q, table, depth, selection_config)
    query, rounded = unit_kernels.rounding(q, **by, counters=counters)
    written, num_warps = write_kernels.writing(**writing_of(cache, layer, k, v, slots, tentative_finite))
    prepare(written, num_warps, rounded)
    return query, counters


kernels = TritonKernels()
KERNELS = kernels.table(
    write_kv=Kernel(write_kv, lambda cache, layer, k, v, slots: unsupported_writing(cache)),
    attend_fused=Kernel(kernels.attend_fused, _unsupported_layer),
)
