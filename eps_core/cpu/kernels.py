"""The CPU kernels over numpy arrays: `score`, `select`, `attend`, `attend_rows` and `attend_tail` of an array backend
whose arrays lie in the memory of the host, and a whole gated layer in one. Speed only: values are the array operations'
up to float32 rounding, lists are equal.

A backend gives its cache as it is; `host`, which shows one of its arrays as numpy without a copy (bfloat16 as uint16);
and `run`, which calls a kernel in every thread (`threads.run` or `openmp.team_of` its library). The first call of an
installation compiles (tens of seconds), later ones load what was compiled.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from eps_core.cpu import amx, calls, gated, rows_amx, vectors
from eps_core.cpu import attend as attend_kernels
from eps_core.cpu import rows as portable
from eps_core.cpu.calls import Chosen, Host, State
from eps_core.paging.counts import check_query
from eps_core.paging.rows import Rows
from eps_core.paging.where import Where

Run = Callable[..., None]
ROWS_TASK_TOKENS = 1024  # of attention of rows, about: fixed, so that the bits of a row are


class Gated(NamedTuple):
    """A gated layer: `read`, attention over what was chosen; `whole`, the tail's estimate included; the estimated share
    [B, Hkv] of the softmax that was not read; the share of the time that scoring and choosing took."""

    read: State
    whole: State
    chosen: Chosen
    skipped: np.ndarray
    prepass_share: float


def score(cache: Any, layer: int, q: np.ndarray, where: Where, host: Host, run: Run) -> tuple[np.ndarray, np.ndarray]:
    """(estimate [B, Hkv, G] float32, num_missing [B]) of `Scores`, for q [B, Hq, D] float32."""
    call, estimate = calls.scoring(cache, layer, np.ascontiguousarray(q), where, host)
    run(call.kernel, call.phases, *call.args)
    return estimate, where.num_missing(cache.state[layer])


def select(where: Where, estimate: np.ndarray, num_missing: np.ndarray, run: Run) -> Chosen:
    """Return the groups that policy topk selects of each kv head by estimate [B, Hkv, G] float32."""
    call, chosen = calls.choosing(where, estimate, num_missing)
    run(call.kernel, call.phases, *call.args, alone=call.alone)
    return chosen


def attend(
    cache: Any, layer: int, q: np.ndarray, where: Where,
    listed: tuple[np.ndarray, np.ndarray] | None, host: Host, run: Run,
) -> State:  # fmt: skip
    """Of q [B, Hq, D] float32 over `listed`, the groups and counts of a selection, or over every token where it is
    None."""
    call, state = calls.attending(cache, layer, np.ascontiguousarray(q), where, listed, host)
    run(call.kernel, call.phases, *call.args)
    return state


def attend_gated(cache: Any, layer: int, q: np.ndarray, where: Where, host: Host, run: Run) -> Gated:
    """Score, select, attend and add the tail at once (`gated`): what the parts give one by one, bit for bit. q
    [B, Hq, D] float32; no bounds. Raises ValueError for q that does not fit the cache."""
    check_query(cache.spec, q.shape)
    q = np.ascontiguousarray(q)
    score_call, estimate = calls.scoring(cache, layer, q, where, host)
    choice, chosen = calls.choosing(where, estimate, where.num_missing(cache.state[layer]))
    listed = chosen.groups, chosen.counts
    attention, read = calls.attending(cache, layer, q, where, listed, host)
    has_tail = bool(cache.store.tail_tokens)
    adding, tail, skipped = calls.adding_tail(cache, layer, where, estimate, listed, read.lse, host)
    summing = calls.summing_skipped(estimate, chosen.visit, skipped)
    whole = State(np.empty_like(read.out), np.empty_like(read.lse))
    stamps = np.zeros(3, np.int64)
    run(
        gated.AFTER[score_call.kernel], score_call.phases + gated.PHASES, stamps, score_call.phases, score_call.args,
        choice.args, attention.args, has_tail, adding.args, (*read, *tail, *whole), summing.args,
    )  # fmt: skip
    began, selected, ended = stamps.tolist()
    share = (selected - began) / max(ended - began, 1)
    return Gated(read, whole if has_tail else read, chosen, skipped, share)


def attend_rows(
    cache: Any, layer: int, q: np.ndarray, is_short: bool, rows: Rows, visit: np.ndarray | None, host: Host,
    run: Run,
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:  # fmt: skip
    """The fields of `RowsRead` for q [T, Hq, D] float32, of bfloat16 numbers where it `is_short`, visit [T, Hkv, G]
    bool."""
    store, spec = cache.store, cache.spec
    q = np.ascontiguousarray(q)
    kv_heads, unit_tokens = spec.num_kv_heads, store.unit_tokens
    _, num_heads, head_dim = q.shape
    cache.kv_bytes_read += int(rows.lengths.sum()) * kv_heads * spec.kv_token_bytes
    (k, k_strides), (v, v_strides) = (calls.rows_of(pool[layer], spec.dtype, host) for pool in (cache.k, cache.v))
    per_task = max(ROWS_TASK_TOKENS // unit_tokens, 1) * unit_tokens
    tasks = np.repeat(-(-rows.lengths // per_task), kv_heads)  # of every (sequence, kv head)
    lanes = -(-rows.num_rows * (num_heads // kv_heads) // vectors.LANES) * vectors.LANES
    lanes = np.repeat(lanes, kv_heads)
    starts, slots, places = (np.concatenate([[0], np.cumsum(one)]) for one in (tasks, tasks * lanes, lanes))
    listed = np.empty((0, 0, 0), np.uint8) if visit is None else visit.view(np.uint8)
    largest, totals, visited = (np.empty(slots[-1], np.float32) for _ in range(3))
    out, lse, visited_lse = np.empty(q.shape, np.float32), *(np.empty(q.shape[:2], np.float32) for _ in range(2))
    tiled = isinstance(k, np.ndarray) and isinstance(v, np.ndarray) and k.dtype == np.uint16 and amx.usable()
    tiled = tiled and k_strides == v_strides
    tiled = tiled and head_dim % amx.STEP == 0 and unit_tokens % rows_amx.UNIT_TOKENS == 0
    parts = 1 if is_short else 3
    # of two bytes on tile registers
    queries, sums = calls.aligned(
        (-(-int(places[-1]) * head_dim * (parts if tiled else 2) // 2),), (int(slots[-1]) * head_dim,)
    )
    about = (
        rows.table, rows.lengths, rows.starts, unit_tokens, store.S, per_task, starts, slots, places, listed,
        queries.view(np.uint16) if tiled else queries, largest, totals, visited, sums,
        out, lse, visited_lse,
    )  # fmt: skip
    if tiled:
        run(rows_amx.attend_rows, 3, q, parts, k, v, k_strides, *about)
    else:
        run(portable.attend_rows, 3, q, k, v, k_strides, v_strides, *about)
    return out, lse, None if visit is None else visited_lse


def attend_tail(
    cache: Any, layer: int, where: Where, estimate: np.ndarray,
    listed: tuple[np.ndarray, np.ndarray], lse: np.ndarray, host: Host, run: Run,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """(out [B, Hq, D], lse [B, Hq], share [B, Hkv]) float32: the estimated attention over what the groups and counts of
    `listed` left out of estimate [B, Hkv, G], where the listed ones gave lse [B, Hq], and `skipped_mass` of them."""
    call, tail, shares = calls.adding_tail(cache, layer, where, estimate, listed, lse, host)
    run(call.kernel, call.phases, *call.args)
    return *tail, shares


def merge(
    out: np.ndarray, lse: np.ndarray, other_out: np.ndarray, other_lse: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(out [B, Hq, D], lse [B, Hq]) float32 of two states of attention over disjoint sets of keys, float32 both."""
    whole, whole_lse = np.empty(out.shape, np.float32), np.empty(lse.shape, np.float32)
    rows = lse.size, out.shape[-1]
    attend_kernels.merge(
        out.reshape(rows), lse.reshape(-1), other_out.reshape(rows), other_lse.reshape(-1), whole.reshape(rows),
        whole_lse.reshape(-1),
    )  # fmt: skip
    return whole, whole_lse


def skipped_mass(estimate: np.ndarray, visit: np.ndarray, run: Run) -> np.ndarray:
    """The estimated share [B, Hkv] of the softmax outside visit [B, Hkv, G] bool: estimate [B, Hkv, G] float32."""
    shares = np.empty(estimate.shape[:2], np.float32)
    call = calls.summing_skipped(estimate, visit, shares)
    run(call.kernel, call.phases, *call.args, alone=call.alone)
    return shares
