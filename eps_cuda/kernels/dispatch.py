"""The functions of the backend through Triton kernels: what each covers, and the arrays it hands over.

Each takes what the array function of its name takes and returns the same, or None for what has no kernel: the array
function then does it. Nothing here waits for the device.

Kernels score `meanstd`, and `rq` unless it has bounds of its own: where array operations make bounds they make the
estimate with them, and a kernel of the estimate alone would save nothing. Kernels choose groups by topk per kv head;
the masks of other policies, of scope union and of head modes come from array operations, and a kernel lists them
(`listing`). Attention and tails have kernels whatever was chosen; writes have them where `covers_writing` says
so.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eps_core.config.eps import EpsConfig
from eps_core.gate.protocol import Scores, Selection
from eps_core.paging.groups import WritePlan
from eps_core.paging.where import budget, forced_groups, missing_groups
from eps_cuda.cache import Cache
from eps_cuda.kernels import attend as attend_kernels
from eps_cuda.kernels import score as score_kernels
from eps_cuda.kernels import select as select_kernels
from eps_cuda.kernels import tail as tail_kernels
from eps_cuda.kernels.write import RqPools, TailPools, write_tokens
from eps_cuda.summaries.rq import rotate

State = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Where:
    """Where the tokens of a step lie, on the host and the device: table [B, M], lengths [B] int32."""

    host_table: np.ndarray
    host_lengths: np.ndarray
    table: Tensor
    lengths: Tensor


def where(cache: Cache, table: np.ndarray, lengths: np.ndarray) -> Where:
    """The device's copies, made once a step: every layer asks with the same numbers."""
    kept = cache.where
    if kept is not None and np.array_equal(kept.host_table, table) and np.array_equal(kept.host_lengths, lengths):
        return kept
    table, lengths = np.array(table, np.int32), np.array(lengths, np.int64)
    cache.where = Where(table, lengths, to_device(cache, table), to_device(cache, lengths.astype(np.int32)))
    return cache.where


def to_device(cache: Cache, array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(cache.device, non_blocking=True)


def rotation(cache: Cache) -> Tensor:
    """[D, D] float32: `a @ rotation` is `rotate(a)`, of queries only. Sign codes are made by `rotate` itself."""
    if cache.rotation is None:
        eye = torch.eye(cache.spec.head_dim, device=cache.device)
        cache.rotation = rotate(eye, cache.fixed[0]["signs"])
    return cache.rotation


def covers_scoring(cache: Cache, layer: int) -> bool:
    """Whether `estimates` serves: rq once its centre is there, without bounds of its own."""
    config = cache.config
    return config.method == "rq" and not config.rq_bounds and cache.centre[layer] is not None


@torch.inference_mode()
def score(cache: Cache, layer: int, q: Tensor, table: np.ndarray, lengths: np.ndarray) -> Scores | None:
    config = cache.config
    if config.method != "meanstd" and not covers_scoring(cache, layer):
        return None
    missing = missing_groups(config, cache.state[layer], table, lengths, can_encode=True)
    num_missing = (missing & ~forced_groups(config, lengths, missing.shape[1])).sum(axis=1)
    place = where(cache, table, lengths)
    if config.method == "meanstd":
        estimate = score_kernels.score_meanstd(
            q, cache.summaries[layer], cache.valid[layer], place.table, place.lengths, group_tokens=config.S
        )
    else:
        refined = np.array([config.refined_groups(int(length)) for length in lengths], np.int32)
        estimate = estimates(cache, layer, q, place.table, place.lengths, to_device(cache, refined), int(refined.max()))
    return Scores(estimate, None, None, num_missing, kernels=cache.kernels)


def estimates(
    cache: Cache, layer: int, q: Tensor, table: Tensor, lengths: Tensor, refined: Tensor, most_refined: int
) -> Tensor:
    """[B, Hkv, G] of rq, from device arrays alone: q [B, Hq, D], table [B, M], lengths [B], refined [B] groups whose
    second bit is read, at most `most_refined`."""
    config, summary, centre = cache.config, cache.summaries[layer], cache.centre[layer]
    assert centre is not None
    turned, offset = score_kernels.turn_queries(q.contiguous(), rotation(cache), centre)
    estimate = score_kernels.score_rq(
        turned, offset, summary["codes"], summary["scale"], cache.valid[layer], table, lengths,
        group_tokens=config.S, bits=config.bits,
    )  # fmt: skip
    if config.refine:
        best, counts = select_kernels.select_best(estimate, refined, width=max(most_refined, 1))
        score_kernels.refine_rq(
            turned, offset, summary["codes"], summary["second"], summary["second_scale"], table, estimate, best, counts,
            group_tokens=config.S,
        )  # fmt: skip
    return estimate


@torch.inference_mode()
def select(config: EpsConfig, scores: Scores, lengths: np.ndarray, layer: int) -> Selection | None:
    if config.policy != "topk" or config.scope != "kv-head" or config.head_modes:
        return None
    lengths = np.asarray(lengths, np.int64)
    device, groups = scores.estimate.device, scores.estimate.shape[-1]
    forced = forced_groups(config, lengths, groups).sum(axis=1) + np.asarray(scores.num_missing, np.int64)
    uniform = budget(config, forced, lengths)
    wanted, ends = (torch.from_numpy(part.astype(np.int32)).to(device) for part in (uniform, lengths))
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
        estimate, wanted, lengths, group_tokens=config.S, first_tokens=config.first_tokens,
        last_tokens=config.last_tokens, min_context=config.min_context, width=width,
    )  # fmt: skip


@torch.inference_mode()
def attend(
    cache: Cache, layer: int, q: Tensor, table: np.ndarray, lengths: np.ndarray, selection: Selection | None
) -> State | None:
    spec, size = cache.spec, cache.config.S
    place = where(cache, table, lengths)
    if selection is None:
        cache.count_read(int(lengths.sum()) * spec.num_kv_heads * spec.kv_token_bytes)
        listed = counts = None
    else:
        listed, counts = selection.groups, selection.counts
        if selection.uniform is not None:
            cache.count_read(int(selection.uniform.sum()) * spec.num_kv_heads * size * spec.kv_token_bytes)
        else:
            cache.count_groups(counts.sum(), size * spec.kv_token_bytes)
    return attend_kernels.attend_groups(
        q, cache.k[layer], cache.v[layer], place.table, place.lengths, listed, counts, group_tokens=size
    )


@torch.inference_mode()
def attend_tail(
    cache: Cache, layer: int, table: np.ndarray, lengths: np.ndarray, scores: Scores, selection: Selection, lse: Tensor
) -> State | None:
    from eps_cuda.selection import visit_mask

    inner = cache.tail
    assert inner is not None
    place = where(cache, table, lengths)
    return tail_kernels.attend_tail(
        scores.estimate, visit_mask(selection, scores.estimate.shape[-1]), lse, inner.summaries[layer]["mean"],
        inner.summaries[layer]["mean_scale"], inner.valid[layer], place.table, place.lengths,
        group_tokens=cache.config.S, tail_tokens=cache.config.tail_tokens,
    )  # fmt: skip


def covers_writing(cache: Cache, layer: int) -> bool:
    """Whether one kernel writes a decode step's tokens and all that follows from them: rq with its centre, or off."""
    config = cache.config
    if not config.enabled:
        return True
    return config.method == "rq" and not config.has_bounds and cache.centre[layer] is not None


@torch.inference_mode()
def write_kv(cache: Cache, layer: int, k: Tensor, v: Tensor, slots: np.ndarray) -> bool:
    """Writes a decode step's tokens, and says whether it did: each must lie in a unit of its own."""
    if not covers_writing(cache, layer) or len(np.unique(slots // cache.config.unit_tokens)) < len(slots):
        return False
    for one in _summarised(cache):
        count_sealed(cache, one, one.state[layer].plan(slots))
    write(cache, layer, k, v, to_device(cache, slots.astype(np.int32)))
    return True


def _summarised(cache: Cache) -> list[Cache]:
    return [one for one in (cache, cache.tail) if one is not None and one.config.enabled]


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
    cache.bytes_k_reread += sealed * cache.spec.num_kv_heads * one.config.S * cache.spec.kv_token_bytes // 2


@torch.inference_mode()
def write(cache: Cache, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """One token of each sequence, k, v [N, Hkv, D] to slots [N] (device, -1: none), from device arrays alone. The host
    must tell every `state` of the same slots."""
    config, inner = cache.config, cache.tail
    rq = tail = None
    valid = None
    if config.enabled:
        summary, centre = cache.summaries[layer], cache.centre[layer]
        assert centre is not None
        valid = cache.valid[layer]
        rq = RqPools(
            summary["codes"], summary["scale"], summary.get("second"), summary.get("second_scale"), centre,
            cache.fixed[layer]["signs"], config.bits,
        )  # fmt: skip
    if inner is not None:
        fields = inner.summaries[layer]
        tail = TailPools(fields["mean"], fields["mean_scale"], inner.valid[layer], config.tail_tokens)
    k, v = (x.to(cache.k[layer].dtype).contiguous() for x in (k, v))
    write_tokens(
        k, v, slots, cache.k[layer], cache.v[layer], cache.finite[layer], valid, group_tokens=config.S, rq=rq,
        tail=tail, largest_key=None, largest_value=None,
    )  # fmt: skip
