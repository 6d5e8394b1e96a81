"""The functions of the backend through Metal kernels: what each covers, and the arrays it hands over.

Each takes what the array function of its name takes and returns the same, or None for what has no kernel: the array
function then does it. Nothing here waits for the device.

Kernels score `meanstd`, and `rq` unless it has bounds of its own: where array operations make bounds they make the
estimate with them, and a kernel of the estimate alone would save nothing. Kernels choose groups by topk per kv head;
the masks of other policies, of scope union and of head modes come from array operations, and a kernel lists them
(`listing`). Attention and tails have kernels whatever was chosen; writes have none.
"""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from eps_core.config.eps import EpsConfig
from eps_core.gate.protocol import Scores, Selection
from eps_core.paging.where import budget, forced_groups, missing_groups
from eps_mlx.cache import Cache
from eps_mlx.kernels import attend as attend_kernels
from eps_mlx.kernels import score as score_kernels
from eps_mlx.kernels import select as select_kernels
from eps_mlx.kernels import tail as tail_kernels
from eps_mlx.kernels.score_meanstd import score_meanstd
from eps_mlx.selection import visit_mask
from eps_mlx.summaries.rq import rotate

State = tuple[mx.array, mx.array]


@dataclass(frozen=True)
class Where:
    """Where the tokens of a step lie, on the host and the device: table [B, M], lengths [B] int32."""

    host_table: np.ndarray
    host_lengths: np.ndarray
    table: mx.array
    lengths: mx.array


def where(cache: Cache, table: np.ndarray, lengths: np.ndarray) -> Where:
    """The device's copies, made once a step: every layer asks with the same numbers."""
    kept = cache.where
    if kept is not None and np.array_equal(kept.host_table, table) and np.array_equal(kept.host_lengths, lengths):
        return kept
    table, lengths = np.array(table, np.int32), np.array(lengths, np.int64)
    cache.where = Where(table, lengths, mx.array(table), mx.array(lengths.astype(np.int32)))
    return cache.where


def rotation(cache: Cache) -> mx.array:
    """[D, D] float32: `a @ rotation` is `rotate(a)`, of queries only. Sign codes are made by `rotate` itself."""
    if cache.rotation is None:
        cache.rotation = rotate(mx.eye(cache.spec.head_dim), cache.fixed[0]["signs"])
    return cache.rotation


def score(cache: Cache, layer: int, q: mx.array, table: np.ndarray, lengths: np.ndarray) -> Scores | None:
    config = cache.config
    covers_rq = config.method == "rq" and not config.rq_bounds and cache.centre[layer] is not None
    if config.method != "meanstd" and not covers_rq:
        return None
    missing = missing_groups(config, cache.state[layer], table, lengths, can_encode=True)
    num_missing = (missing & ~forced_groups(config, lengths, missing.shape[1])).sum(axis=1)
    with mx.stream(cache.stream):
        place = where(cache, table, lengths)
        if config.method == "meanstd":
            estimate = score_meanstd(
                q, cache.summaries[layer], cache.valid[layer], place.table, place.lengths, group_tokens=config.S
            )
        else:
            refined = np.array([config.refined_groups(int(length)) for length in lengths], np.int32)
            estimate = estimates(cache, layer, q, place.table, place.lengths, mx.array(refined), int(refined.max()))
    return Scores(estimate, None, None, num_missing, kernels=cache.kernels)


def estimates(
    cache: Cache, layer: int, q: mx.array, table: mx.array, lengths: mx.array, refined: mx.array, most_refined: int
) -> mx.array:
    """[B, Hkv, G] of rq: q [B, Hq, D], table [B, M], lengths [B], refined [B] groups whose second bit is read, at most
    `most_refined`."""
    config, summary, centre = cache.config, cache.summaries[layer], cache.centre[layer]
    assert centre is not None
    turned, offset = score_kernels.turn_queries(q, rotation(cache), centre)
    estimate = score_kernels.score_rq(
        turned, offset, summary["codes"], summary["scale"], cache.valid[layer], table, lengths,
        group_tokens=config.S, bits=config.bits,
    )  # fmt: skip
    if config.refine:
        best, counts = select_kernels.select_best(estimate, refined, width=max(most_refined, 1))
        estimate = score_kernels.refine_rq(
            turned, offset, summary["codes"], summary["second"], summary["second_scale"], table, estimate, best, counts,
            group_tokens=config.S,
        )  # fmt: skip
    return estimate


def select(config: EpsConfig, scores: Scores, lengths: np.ndarray, layer: int) -> Selection | None:
    if config.policy != "topk" or config.scope != "kv-head" or config.head_modes:
        return None
    forced = forced_groups(config, lengths, scores.estimate.shape[-1]).sum(axis=1)
    forced = forced + np.asarray(scores.num_missing, np.int64)
    uniform = budget(config, forced, lengths)
    groups, counts, visit = select_kernels.select_topk(
        scores.estimate, mx.array(uniform.astype(np.int32)), mx.array(lengths.astype(np.int32)),
        group_tokens=config.S, first_tokens=config.first_tokens, last_tokens=config.last_tokens,
        min_context=config.min_context, width=max(int(uniform.max()), 1),
    )  # fmt: skip
    return Selection(groups, counts, uniform, forced, visit=visit.astype(mx.bool_))


def listing(visit: mx.array, width: int) -> tuple[mx.array, mx.array]:
    """(groups [B, Hkv, width], counts [B, Hkv]) of a mask [B, Hkv, G] that array operations made."""
    return select_kernels.compact(visit, width=width)


def attend(
    cache: Cache, layer: int, q: mx.array, table: np.ndarray, lengths: np.ndarray, selection: Selection | None
) -> State | None:
    spec, size = cache.spec, cache.config.S
    listed = counts = None
    if selection is None:
        cache.count_read(int(lengths.sum()) * spec.num_kv_heads * spec.kv_token_bytes)
    else:
        listed, counts = selection.groups, selection.counts
        if selection.uniform is not None:
            cache.count_read(int(selection.uniform.sum()) * spec.num_kv_heads * size * spec.kv_token_bytes)
        else:
            cache.count_groups(counts.sum(), size * spec.kv_token_bytes)
    with mx.stream(cache.stream):
        place = where(cache, table, lengths)
        return attend_kernels.attend_groups(
            q, cache.k[layer], cache.v[layer], place.table, place.lengths, listed, counts, group_tokens=size
        )


def attend_tail(
    cache: Cache,
    layer: int,
    table: np.ndarray,
    lengths: np.ndarray,
    scores: Scores,
    selection: Selection,
    lse: mx.array,
) -> State | None:
    inner = cache.tail
    assert inner is not None
    fields = inner.summaries[layer]
    with mx.stream(cache.stream):
        place = where(cache, table, lengths)
        return tail_kernels.attend_tail(
            scores.estimate, visit_mask(selection, scores.estimate.shape[-1]), lse, fields["mean"],
            fields["mean_scale"], inner.valid[layer], place.table, place.lengths, group_tokens=cache.config.S,
            tail_tokens=cache.config.tail_tokens,
        )  # fmt: skip
