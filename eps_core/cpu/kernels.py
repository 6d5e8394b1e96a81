"""A whole sparse layer as one of the calls of `calls`, and attention of rows, over numpy arrays.

A backend gives its cache as it is; `host`, which shows its arrays as numpy; and `run`, which calls a kernel in every
thread (`threads.run` or `openmp.team_of` its library). The first call of an installation compiles (tens of seconds),
later ones load what was compiled.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from eps_core.cpu import amx, calls, fused, rows_amx, vectors
from eps_core.cpu import rows as portable
from eps_core.cpu.calls import Call, Chosen, Host, State
from eps_core.kv_cache.rows import Rows
from eps_core.kv_cache.step_plan import StepPlan

Run = Callable[..., None]
# of attention of a few rows, and of a prompt's blocks, about: fixed, so that the bits of a row are
ROWS_TASK_TOKENS, PREFILL_TASK_TOKENS = 1024, 8192
PREFILL_LANES = 384  # query heads times tokens of a block of a prompt, whose sums stay in a thread's second cache
PREFILL_ROWS = 2048  # tokens of a prompt at a time: what tasks leave takes as much memory as their queries, each


class FusedOutput(NamedTuple):
    """A sparse layer: attention over what was chosen, the estimated share [B, Hkv] of the softmax that was not read,
    and when the parts were computed."""

    read: State
    chosen: Chosen
    skipped: np.ndarray
    stamps: np.ndarray  # int64: when scoring began, attention began, and all ended, in ns


def fused_call(
    cache: Any,
    layer: int,
    q: np.ndarray,
    plan: StepPlan,
    host: Host,
    skipped: np.ndarray,
    stamps: np.ndarray,
    filled: Chosen | None = None,
) -> tuple[Call, FusedOutput]:
    """Return the call that scores, selects and attends at once, and what it fills, skipped [B, Hkv] and stamps [3]
    int64, which are 0 before, among it. q [B, Hq, D] float32, contiguous; no bounds; `filled` as `calls.choosing` takes
    it."""
    shape = len(q), cache.spec.num_kv_heads, plan.num_groups
    estimate = plan.room(("estimate", shape), lambda: np.empty(shape, np.float32))
    score_call = calls.scoring(cache, layer, q, plan, host, estimate)
    choice, chosen = calls.choosing(plan, estimate, plan.num_missing(cache.state[layer]), filled)
    attention, read = calls.attending(cache, layer, q, plan, (chosen.groups, chosen.counts), host)
    summing = calls.summing_skipped(estimate, chosen.selected_mask, skipped)
    *scored, _ = score_call.args
    _, *attended = attention.args
    args = stamps, score_call.phases, tuple(scored), choice.args, tuple(attended), summing.args
    phases = score_call.phases + fused.PHASES + chosen.counts.size
    call = Call(fused.score_and_read, phases, args)
    return call, FusedOutput(read, chosen, skipped, stamps)


def attend_rows(
    cache: Any, layer: int, q: np.ndarray, is_short: bool, rows: Rows, selected_mask: np.ndarray | None, host: Host,
    run: Run, task_tokens: int = ROWS_TASK_TOKENS, weight_parts: int = 2,
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:  # fmt: skip
    """The fields of `RowsRead` for q [T, Hq, D] float32, contiguous, of bfloat16 numbers where it `is_short`, visit
    [T, Hkv, G] bool. A task takes about `task_tokens` tokens of K and V. On tile registers, and there alone, softmax
    weights are the sum of weight_parts bfloat16, one or two."""
    cache_config, spec = cache.cache_config, cache.spec
    kv_heads, unit_tokens = spec.num_kv_heads, cache_config.unit_tokens
    _, num_heads, head_dim = q.shape
    (k, k_strides), (v, v_strides) = (host.rows(pool[layer], spec.dtype) for pool in (cache.k, cache.v))
    per_task = max(task_tokens // unit_tokens, 1) * unit_tokens
    tasks = np.repeat(-(-rows.lengths // per_task), kv_heads)  # of every (sequence, kv head)
    lanes = -(-rows.num_rows * (num_heads // kv_heads) // vectors.LANES) * vectors.LANES
    lanes = np.repeat(lanes, kv_heads)
    starts, slots, places = (np.concatenate([[0], np.cumsum(one)]) for one in (tasks, tasks * lanes, lanes))
    listed = np.empty((0, 0, 0), np.uint8) if selected_mask is None else selected_mask.view(np.uint8)
    largest, totals, selected = (np.empty(slots[-1], np.float32) for _ in range(3))
    out, lse, selected_lse = np.empty(q.shape, np.float32), *(np.empty(q.shape[:2], np.float32) for _ in range(2))
    tiled = isinstance(k, np.ndarray) and isinstance(v, np.ndarray) and k.dtype == np.uint16 and amx.usable()
    tiled = tiled and k_strides == v_strides
    tiled = tiled and head_dim % amx.STEP == 0 and unit_tokens % rows_amx.UNIT_TOKENS == 0
    parts = 1 if is_short else 3
    # of two bytes on tile registers
    queries, sums = calls.aligned(
        (-(-int(places[-1]) * head_dim * (parts if tiled else 2) // 2),), (int(slots[-1]) * head_dim,)
    )
    about = (
        rows.table, rows.lengths, rows.starts, unit_tokens, cache_config.S, per_task, starts, slots, places, listed,
        queries.view(np.uint16) if tiled else queries, largest, totals, selected, sums,
        out, lse, selected_lse,
    )  # fmt: skip
    if tiled:
        run(rows_amx.attend_rows, 3, q, parts, weight_parts, k, v, k_strides, *about)
    else:
        run(portable.attend_rows, 3, q, k, v, k_strides, v_strides, *about)
    return out, lse, None if selected_mask is None else selected_lse
