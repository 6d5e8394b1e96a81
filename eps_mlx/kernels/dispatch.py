"""The functions of the backend through Metal kernels: what each covers, and the arrays it hands over.

Each takes what the array function of its name takes and returns the same, or None for what has no kernel: the array
function then does it. Nothing here waits for the device.

Kernels score `meanstd`, and `rq` unless it has bounds of its own: where array operations make bounds they make the
estimate with them, and a kernel of the estimate alone would save nothing. Its codes are read in stages,
each by one kernel over what the one before left. Kernels choose groups by topk per kv head;
the masks of other policies, of scope union and of head modes come from array operations, and a kernel lists them
(`listing`). Attention, of rows too, and tails have kernels whatever was chosen; writes have none.
"""

import mlx.core as mx
import numpy as np

from eps_core.gate.protocol import RowsRead, Scores, Selection
from eps_core.paging.rows import Rows
from eps_core.paging.where import Where
from eps_mlx.anchors import anchors
from eps_mlx.cache import Cache
from eps_mlx.kernels import attend as attend_kernels
from eps_mlx.kernels import rows as rows_kernels
from eps_mlx.kernels import select as select_kernels
from eps_mlx.kernels import tail as tail_kernels
from eps_mlx.kernels.score_meanstd import score_meanstd
from eps_mlx.kernels.turn_units import turn_units
from eps_mlx.kernels.units import read_on, score_units
from eps_mlx.selection import visit_mask

State = tuple[mx.array, mx.array]
SCORERS = {"meanstd": score_meanstd}  # besides rq without bounds of its own


def on_device(cache: Cache, where: Where | Rows) -> tuple[mx.array, mx.array]:
    """A step's or pass's table [B, M] and lengths [B] int32 on the device, copied once for all layers."""
    return where.once(
        ("device", cache.device), lambda: (mx.array(where.table), mx.array(where.lengths.astype(np.int32)))
    )


def score(cache: Cache, layer: int, q: mx.array, where: Where) -> Scores | None:
    store = cache.store
    covers_codes = store.facts.coded and not store.rq_bounds
    if store.method not in SCORERS and not covers_codes:
        return None
    num_missing = where.num_missing(cache.state[layer])
    with mx.stream(cache.stream):
        table, lengths = on_device(cache, where)
        if store.method in SCORERS:
            estimate = SCORERS[store.method](
                q, cache.summaries[layer], cache.valid[layer], table, lengths, group_tokens=store.S
            )
        else:
            estimate = unit_estimates(cache, layer, q, where, table, lengths)
    return Scores(estimate, None, None, num_missing, kernels=cache.kernels)


def unit_estimates(cache: Cache, layer: int, q: mx.array, where: Where, table: mx.array, lengths: mx.array) -> mx.array:
    """[B, Hkv, G] of rq: q [B, Hq, D], table [B, M] and lengths [B] of `where` on the device."""
    store, summary = cache.store, cache.summaries[layer]
    query = turn_units(q, cache.fixed[layer]["signs"], cache.spec.num_kv_heads)
    anchor = anchors(cache, layer, q, where.table[:, :1], where.config.read)
    estimate, base = score_units(
        query,
        summary,
        cache.valid[layer],
        table,
        lengths,
        anchor,
        group_tokens=store.S,
        mean_bits=store.mean_bits,
        sums=where.sums_after(0, cache.spec.head_dim),
    )
    # the groups still in the race: of the first stage all
    values, groups = estimate, None
    for passes, (parts, wanted, most) in enumerate(_stages(cache, where), start=1):
        picked, counts = select_kernels.select_best(values, wanted, width=max(most, 1))
        estimate, values, groups = read_on(
            query,
            base,
            summary,
            table,
            estimate,
            groups,
            picked,
            counts,
            parts=parts,
            sums=where.sums_after(passes, cache.spec.head_dim),
        )
    return estimate


def _stages(cache: Cache, where: Where) -> list[tuple[int | None, mx.array, int]]:
    """(parts of the codes that it reads, None for the second bit; of how many groups of each sequence [B] int32, and at
    most) of each stage after the first: copied to the device once for all layers."""

    def copy() -> list[tuple[int | None, mx.array, int]]:
        found: list[tuple[int | None, np.ndarray]] = list(enumerate(where.staged(cache.spec.head_dim), start=2))
        if where.config.read.refine:
            found.append((None, where.refined))
        return [(parts, mx.array(wanted.astype(np.int32)), int(wanted.max())) for parts, wanted in found]

    return where.once(("stages", cache.device, cache.spec.head_dim), copy)


def select(scores: Scores, where: Where, layer: int = 0) -> Selection | None:
    config, read = where.config, where.config.read
    if read.policy != "topk" or read.scope != "kv-head" or read.head_modes:
        return None
    forced = where.num_forced
    forced = forced + np.asarray(scores.num_missing, np.int64)
    uniform = where.budget(forced)
    groups, counts, visit = select_kernels.select_topk(
        scores.estimate, mx.array(uniform.astype(np.int32)), mx.array(where.lengths.astype(np.int32)),
        group_tokens=config.store.S, first_tokens=config.read.first_tokens, last_tokens=config.read.last_tokens,
        min_context=config.read.min_context, width=max(int(uniform.max()), 1),
    )  # fmt: skip
    return Selection(groups, counts, uniform, forced, visit=visit.astype(mx.bool_))


def listing(visit: mx.array, width: int) -> tuple[mx.array, mx.array]:
    """(groups [B, Hkv, width], counts [B, Hkv]) of a mask [B, Hkv, G] that array operations made."""
    return select_kernels.compact(visit, width=width)


def attend(cache: Cache, layer: int, q: mx.array, where: Where, selection: Selection | None) -> State | None:
    spec, size = cache.spec, cache.store.S
    listed = counts = None
    if selection is None:
        cache.count_read(int(where.lengths.sum()) * spec.num_kv_heads * spec.kv_token_bytes)
    else:
        listed, counts = selection.groups, selection.counts
        if selection.uniform is not None:
            cache.count_read(int(selection.uniform.sum()) * spec.num_kv_heads * size * spec.kv_token_bytes)
        else:
            cache.count_groups(counts.sum(), size * spec.kv_token_bytes)
    with mx.stream(cache.stream):
        table, lengths = on_device(cache, where)
        return attend_kernels.attend_groups(
            q, cache.k[layer], cache.v[layer], table, lengths, listed, counts, group_tokens=size
        )


def attend_rows(cache: Cache, layer: int, q: mx.array, rows: Rows, visit: mx.array | None = None) -> RowsRead:
    cache.count_read(int(rows.lengths.sum()) * cache.spec.num_kv_heads * cache.spec.kv_token_bytes)
    with mx.stream(cache.stream):
        table, lengths = on_device(cache, rows)
        starts = rows.once(("starts", cache.device), lambda: mx.array(rows.starts.astype(np.int32)))
        return RowsRead(
            *rows_kernels.attend_rows(
                q, cache.k[layer], cache.v[layer], table, lengths, starts,
                most_rows=int(rows.num_rows.max()), group_tokens=cache.store.S, visit=visit,
            )
        )  # fmt: skip


def attend_tail(
    cache: Cache,
    layer: int,
    where: Where,
    scores: Scores,
    selection: Selection,
    lse: mx.array,
) -> State | None:
    inner = cache.tail
    assert inner is not None
    fields = inner.summaries[layer]
    with mx.stream(cache.stream):
        table, lengths = on_device(cache, where)
        return tail_kernels.attend_tail(
            scores.estimate, visit_mask(selection, scores.estimate.shape[-1]), lse, fields["mean"],
            fields["mean_scale"], inner.valid[layer], table, lengths, group_tokens=cache.store.S,
            tail_tokens=cache.store.tail_tokens,
        )  # fmt: skip
