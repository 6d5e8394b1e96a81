"""The CPU kernels over numpy arrays: `score`, `select`, `attend`, `attend_rows` and `attend_tail` of an array backend
whose arrays lie in the memory of the host. Speed only: values are the array operations' up to float32 rounding, lists
are equal.

A backend gives its cache as it is; `host`, which shows one of its arrays as numpy without a copy (bfloat16 as uint16);
and `run`, which calls a kernel in every thread (`threads.run` or `openmp.team_of` its library). `None` says
that a configuration has no kernel here: the array operations serve. The first call of an installation compiles (tens of
seconds), later ones load what was compiled.
"""

import importlib.util
import math
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from eps_core.errors import install
from eps_core.paging.rows import Rows
from eps_core.paging.where import Where
from eps_core.summaries.rq import PARTS, QUERY_STEPS, hadamard_blocks, part_dims

Host = Callable[[Any], np.ndarray]
Run = Callable[..., None]
# besides codes without bounds of their own: method -> (index in `score_codes`, two code pools, four scalar pools, the
# unused ones repeated)
CODES = {
    "box": (0, ("lo", "hi"), ("scale", "norm", "norm", "norm")),
    "ball": (1, ("mean", "mean"), ("mean_scale", "radius", "error", "norm")),
    "meanstd": (2, ("mean", "std"), ("mean_scale", "std_scale", "std_scale", "std_scale")),
}
_ELEMENTS = {"float32": np.float32, "float16": np.int16, "bfloat16": np.uint16}  # as kernels see a dtype
TASK_TOKENS, TASKS_PER_THREAD = (256, 1024), 16  # of attention: least and most, and how many are wanted; speed only
ROWS_TASK_TOKENS = 1024  # of attention of rows, about: fixed, so that the bits of a row are
ROWS_PER_THREAD = 3  # (sequence, kv head)s, from which on a thread scores whole ones; speed only
FEW_GROUPS = 4096  # of all rows: selecting among fewer is done before a helper wakes


def why_not() -> str | None:
    """Why these kernels cannot be used here, in a few words, or None; does not import numba, which takes a second."""
    if importlib.util.find_spec("numba") is None:
        return f"numba is not installed: {install('cuda')}"
    if os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):
        return "NUMBA_DISABLE_JIT is set: unset it"
    threads = os.environ.get("NUMBA_NUM_THREADS")
    if threads is not None and not (threads.isdecimal() and int(threads)):
        return f"NUMBA_NUM_THREADS {threads!r} is no number of threads: set 1 or more, or unset it"
    return None


def _lanes(array: np.ndarray) -> np.ndarray:
    """Flat, float16 as the int16 of its bits."""
    return (array.view(np.int16) if array.dtype == np.float16 else array).reshape(-1)


def _flat_pool(pool: np.ndarray) -> tuple[np.ndarray, tuple[int, int, int]]:
    """The memory from the first to the last element of a pool [P, Hkv, U, D], flat as `_lanes`, and the strides of a
    unit, a kv head and a token in elements: no copy however they lie, as long as a row's D elements lie together."""
    unit, head, token, element = (stride // pool.itemsize for stride in pool.strides)
    assert element == 1 or pool.shape[3] == 1, "the elements of a row of K or V do not lie together"
    if pool.flags.c_contiguous:
        return _lanes(pool), (unit, head, token)
    span = 1 + sum((size - 1) * stride for size, stride in zip(pool.shape, (unit, head, token, 1), strict=True))
    flat = np.lib.stride_tricks.as_strided(pool, (span,), (pool.itemsize,))
    return _lanes(flat), (unit, head, token)


def _rows_of(pool: Any, dtype: str, host: Host) -> tuple[Any, tuple[int, int, int]]:
    """A pool of K or V as `pool_vectors` reads it, and the strides of a unit, a kv head and a token in what names a
    row."""
    if not hasattr(pool, "codes"):
        return _flat_pool(host(pool))
    codes, scale = host(pool.codes), host(pool.scale)
    assert codes.flags.c_contiguous and scale.flags.c_contiguous, "codes of K or V do not lie together"
    _, kv_heads, unit_tokens = scale.shape
    of = np.empty(0, _ELEMENTS[dtype])
    return (codes.reshape(-1), _lanes(scale), of), (kv_heads * unit_tokens, unit_tokens, 1)


def score(
    cache: Any, layer: int, q: np.ndarray, where: Where, host: Host, run: Run
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None, np.ndarray, np.ndarray | None] | None:
    """The fields of `Scores` in their order, for q [B, Hq, D] float32: estimate, lower, upper, num_missing, slack."""
    store, spec = cache.store, cache.spec
    if store.rq_bounds or not (store.facts.coded or store.method in CODES):
        return None
    if store.mean_tokens:
        return _score_units(cache, layer, q, where, host, run)
    from eps_core.cpu import score, vectors

    table, lengths, guards = where.table, where.lengths, where.guards
    q = np.ascontiguousarray(q)
    batch, num_heads, head_dim = q.shape
    kv_heads, per_unit = spec.num_kv_heads, store.groups_per_unit
    groups, repeat = table.shape[1] * per_unit, num_heads // kv_heads
    estimate = np.empty((batch, kv_heads, groups), np.float32)
    missing, states = np.empty(batch, np.int64), np.empty((batch, groups), np.uint8)
    state, stored = cache.state[layer], cache.summaries[layer]
    if store.facts.coded:
        pools = {name: _lanes(host(array)) for name, array in stored.items()}
        centre = cache.centre[layer]
        passes, num_bytes = -(-repeat // vectors.HEADS), -(-head_dim * store.bits // 8)
        tables = np.empty((batch * kv_heads, passes, num_bytes * 2 * 16 * vectors.HEADS), np.float32)
        run(
            score.score_rq, 3, q, pools["codes"], pools["scale"], pools.get("second", pools["codes"]),
            pools.get("second_scale", pools["scale"]), state.fill, table, lengths, guards, where.refined,
            np.zeros((kv_heads, head_dim), np.int16) if centre is None else host(centre).view(np.int16),
            host(cache.fixed[layer]["signs"]), np.array(hadamard_blocks(head_dim)), store.bits,
            store.S, per_unit, centre is not None, states, tables,
            np.empty((*tables.shape[:2], vectors.HEADS), np.float32), missing, estimate,
        )  # fmt: skip
        return estimate, None, None, missing, None
    index, codes, scalars = CODES[store.method]
    bounded = store.own_bounds
    lower, upper = (np.empty((batch, kv_heads, repeat, groups if bounded else 0), np.float32) for _ in range(2))
    first, second = (_lanes(host(stored[name])) for name in codes)
    run(
        score.score_codes, 2, index, q, first, second, tuple(_lanes(host(stored[name])) for name in scalars),
        state.fill, table, lengths, guards, store.S, per_unit, states, missing, estimate, lower, upper,
    )  # fmt: skip
    if not bounded:
        return estimate, None, None, missing, None
    slack = np.empty((batch, kv_heads, repeat), np.float32)
    score.score_slack(q, host(cache.largest_key[layer]), slack)
    return estimate, lower, upper, missing, slack


def _score_units(
    cache: Any, layer: int, q: np.ndarray, where: Where, host: Host, run: Run
) -> tuple[np.ndarray, None, None, np.ndarray, None] | None:
    """`score` by codes about units' means."""
    from eps_core.cpu import threads, unit_vectors, units, vectors, write

    store, spec = cache.store, cache.spec
    batch, num_heads, head_dim = q.shape
    if store.groups_per_seal % vectors.LANES or head_dim * QUERY_STEPS >= 2**15:  # sums are int16
        return None
    kv_heads, per_seal = spec.num_kv_heads, store.groups_per_seal
    rows, passes = batch * kv_heads, -(-num_heads // kv_heads // vectors.HEADS)
    groups = where.num_groups
    seals = groups // per_seal
    # without waiting for other threads where each has rows enough
    together = rows < ROWS_PER_THREAD * threads.num_threads()
    dims = part_dims(store, head_dim)
    pools = {name: _lanes(host(array)) for name, array in cache.summaries[layer].items()}
    codes, *later = (pools[name] for name in PARTS[len(dims)])
    estimate, missing = np.empty((batch, kv_heads, groups), np.float32), np.empty(batch, np.int64)

    chunks = -(-seals // max(units.CHUNK_GROUPS // per_seal, 1))

    def know() -> tuple[Any, ...]:
        """What every layer's call is told alike: counts, a rotation and dimensions, sizes of what it works in."""
        words = sum(-(-many // (8 * unit_vectors.WORD)) for many in (*dims, head_dim)) * unit_vectors.WORD_TABLE // 4
        sides, mean_bytes = 8 // store.mean_bits, -(-head_dim * store.mean_bits // 8)
        sizes = words, sides * vectors.HEADS * mean_bytes, (len(dims) + 1) * vectors.HEADS
        return (
            np.array(where.staged(head_dim), np.int64).reshape(-1, batch), write.rotation(head_dim), np.array(dims),
            [(rows, passes, size) for size in sizes], units.new_lists(0, groups, chunks, passes),
        )  # fmt: skip

    key = "score_units", store.parts, store.mean_bits, per_seal, head_dim, num_heads, kv_heads
    staged, rotation, dims_array, shapes, no_lists = where.once(key, know)
    words, queries, factors = _aligned(*shapes)
    run(
        units.score_units, 1 + units.MOST_PHASES if together else 2, together, np.ascontiguousarray(q),
        pools["mean"], pools["mean_scale"], store.mean_bits, pools["scale"], codes, (*later, codes, codes)[:2],
        pools.get("second", codes), pools.get("second_scale", pools["scale"]), cache.state[layer].fill, where.table,
        where.lengths, where.guards, staged, where.refined, host(cache.fixed[layer]["signs"]), *rotation, dims_array,
        store.S, store.sealed_tokens, store.seals_per_unit, np.empty((batch, seals), np.uint8),
        np.empty((batch, seals), np.int64), words.view(np.int8), queries,
        factors.reshape(rows, passes, -1, vectors.HEADS),
        np.empty((rows, passes * vectors.HEADS * (seals + vectors.LANES)), np.float32),
        np.empty((rows, 2, seals + vectors.LANES), np.float32),
        units.new_lists(rows, groups, chunks, passes) if together else no_lists, missing, estimate,
    )  # fmt: skip
    return estimate, None, None, missing, None


def select(
    where: Where, estimate: np.ndarray, num_missing: np.ndarray, layer: int, run: Run
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray] | None:
    """(groups [B, Hkv, W] int32, counts [B, Hkv] int32, uniform [B], forced [B], visit [B, Hkv, G] bool) of policy topk
    over estimate [B, Hkv, G] float32."""
    read = where.config.read
    modes = read.head_modes[layer] if read.head_modes else ()
    if read.policy != "topk" or read.scope != "kv-head" or set(modes) - {"gate"}:
        return None
    from eps_core.cpu import best

    batch, kv_heads, _ = estimate.shape
    own_missing = np.asarray(num_missing, np.int64)

    def count() -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
        forced = where.num_forced + own_missing
        uniform = where.budget(forced)
        counts = np.repeat(uniform[:, None], kv_heads, axis=1).astype(np.int32)
        return counts, uniform, forced, max(int(uniform.max()), 1)

    # layers that were written alike share one answer
    counts, uniform, forced, width = where.once(("topk", kv_heads, own_missing.tobytes()), count)
    groups = np.empty((batch, kv_heads, width), np.int32)
    visit = np.empty(estimate.shape, np.bool_)
    run(
        best.select_topk, 1, estimate, uniform, where.guards, where.ends, groups, visit.view(np.uint8),
        alone=estimate.size < FEW_GROUPS,
    )  # fmt: skip
    return groups, counts, uniform, forced, visit


def attend(
    cache: Any, layer: int, q: np.ndarray, where: Where,
    listed: tuple[np.ndarray, np.ndarray] | None, host: Host, run: Run,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """(out [B, Hq, D], lse [B, Hq]) float32 of q [B, Hq, D] float32 over `listed`, the groups and counts of a
    selection, or over every token where it is None."""
    from eps_core.cpu import attend, threads, vectors

    store, spec = cache.store, cache.spec
    table, lengths = where.table, where.lengths
    q = np.ascontiguousarray(q)
    size, per_unit = store.S, store.groups_per_unit
    if listed is None:
        # whole units as groups: what lies past a sequence's end is not read
        size, per_unit = store.unit_tokens, 1

        def whole() -> tuple[np.ndarray, np.ndarray]:
            groups = np.empty((len(table), spec.num_kv_heads, table.shape[1]), np.int32)
            groups[:] = np.arange(table.shape[1])
            return groups, np.repeat(-(-lengths[:, None] // size), spec.num_kv_heads, axis=1).astype(np.int32)

        listed = where.once(("attend whole", spec.num_kv_heads, size), whole)
        cache.kv_bytes_read += int(lengths.sum()) * spec.num_kv_heads * spec.kv_token_bytes
        groups, counts = listed
    else:
        groups, counts = listed
        cache.kv_bytes_read += int(counts.sum()) * size * spec.kv_token_bytes
    out, lse = np.empty(q.shape, np.float32), np.empty(q.shape[:2], np.float32)
    (k, k_strides), (v, v_strides) = (_rows_of(pool[layer], spec.dtype, host) for pool in (cache.k, cache.v))

    def tasks() -> tuple[int, np.ndarray]:
        least, most = TASK_TOKENS
        tokens_each = min(max(int(counts.sum()) * size // (TASKS_PER_THREAD * threads.num_threads()), least), most)
        per_task = max(tokens_each // size, 1)
        starts = np.zeros(counts.size + 1, np.int64)
        np.cumsum(-(-counts.reshape(-1) // per_task), out=starts[1:])
        return per_task, starts

    per_task, starts = where.once(("attend", counts.tobytes(), size, threads.num_threads()), tasks)
    heads = -(-q.shape[1] // spec.num_kv_heads // vectors.HEADS) * vectors.HEADS
    largest, masses = (np.empty((starts[-1], heads), np.float32) for _ in range(2))
    sums = np.empty((starts[-1], heads * q.shape[2]), np.float32)
    run(
        attend.attend, 2, q, k, v, k_strides, v_strides, table, lengths, groups, counts, size, per_unit, per_task,
        starts, largest, masses, sums, out, lse,
    )  # fmt: skip
    return out, lse


def attend_rows(
    cache: Any, layer: int, q: np.ndarray, is_short: bool, rows: Rows, visit: np.ndarray | None, masses: bool,
    host: Host, run: Run,
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None]:  # fmt: skip
    """The fields of `RowsRead` for q [T, Hq, D] float32, of bfloat16 numbers where it `is_short`, visit [T, Hkv, G]
    bool."""
    from eps_core.cpu import amx, rows_amx, vectors
    from eps_core.cpu import rows as portable

    store, spec = cache.store, cache.spec
    q = np.ascontiguousarray(q)
    kv_heads, unit_tokens = spec.num_kv_heads, store.unit_tokens
    total, num_heads, head_dim = q.shape
    cache.kv_bytes_read += int(rows.lengths.sum()) * kv_heads * spec.kv_token_bytes
    (k, k_strides), (v, v_strides) = (_rows_of(pool[layer], spec.dtype, host) for pool in (cache.k, cache.v))
    per_task = max(ROWS_TASK_TOKENS // unit_tokens, 1) * unit_tokens
    tasks = np.repeat(-(-rows.lengths // per_task), kv_heads)  # of every (sequence, kv head)
    lanes = -(-rows.num_rows * (num_heads // kv_heads) // vectors.LANES) * vectors.LANES
    lanes = np.repeat(lanes, kv_heads)
    starts, slots, places = (np.concatenate([[0], np.cumsum(one)]) for one in (tasks, tasks * lanes, lanes))
    shape = total, kv_heads, rows.table.shape[1] * store.groups_per_unit
    listed = np.empty((0, 0, 0), np.uint8) if visit is None else visit.view(np.uint8)
    by_group = np.empty(shape if masses else (0, 0, 0), np.float32)
    largest, totals, visited = (np.empty(slots[-1], np.float32) for _ in range(3))
    out, lse, visited_lse = np.empty(q.shape, np.float32), *(np.empty(q.shape[:2], np.float32) for _ in range(2))
    tiled = isinstance(k, np.ndarray) and isinstance(v, np.ndarray) and k.dtype == np.uint16 and amx.usable()
    tiled = tiled and k_strides == v_strides
    tiled = tiled and head_dim % amx.STEP == 0 and unit_tokens % rows_amx.UNIT_TOKENS == 0
    parts = 1 if is_short else 3
    # of two bytes on tile registers
    queries, sums = _aligned(
        (-(-int(places[-1]) * head_dim * (parts if tiled else 2) // 2),), (int(slots[-1]) * head_dim,)
    )
    about = (
        rows.table, rows.lengths, rows.starts, unit_tokens, store.S, per_task, starts, slots, places, listed,
        queries.view(np.uint16) if tiled else queries, largest, totals, visited, sums,
        by_group, out, lse, visited_lse,
    )  # fmt: skip
    if tiled:
        run(rows_amx.attend_rows, 3, q, parts, k, v, k_strides, *about)
    else:
        run(portable.attend_rows, 3, q, k, v, k_strides, v_strides, *about)
    return out, lse, None if visit is None else visited_lse, by_group if masses else None


def _aligned(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    """float32 arrays of these shapes, each of which begins with a cache line."""
    sizes = [math.prod(shape) for shape in shapes]
    whole = np.empty(sum(sizes) + 16 * len(sizes), np.float32)
    found, start = [], -whole.ctypes.data % 64 // 4
    for shape, size in zip(shapes, sizes, strict=True):
        found.append(whole[start : start + size].reshape(shape))
        start += -(-size // 16) * 16
    return found


def attend_tail(
    cache: Any, layer: int, where: Where, estimate: np.ndarray,
    listed: tuple[np.ndarray, np.ndarray], lse: np.ndarray, host: Host, run: Run,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """(out [B, Hq, D], lse [B, Hq], share [B, Hkv]) float32: the estimated attention over what the groups and counts of
    `listed` left out of estimate [B, Hkv, G], where the listed ones gave lse [B, Hq], and `skipped_mass` of them."""
    from eps_core.cpu import attend

    inner = cache.tail
    out, tail = np.empty((*lse.shape, cache.spec.head_dim), np.float32), np.empty(lse.shape, np.float32)
    shares = np.empty(estimate.shape[:2], np.float32)
    means, scale = (_lanes(host(inner.summaries[layer][name])) for name in ("mean", "mean_scale"))
    run(
        attend.attend_tail, 1, estimate, *listed, lse, means, scale, inner.state[layer].fill, where.table,
        where.lengths, inner.store.S, inner.store.groups_per_unit, out, tail, shares,
    )  # fmt: skip
    return out, tail, shares


def merge(
    out: np.ndarray, lse: np.ndarray, other_out: np.ndarray, other_lse: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(out [B, Hq, D], lse [B, Hq]) float32 of two states of attention over disjoint sets of keys, float32 both."""
    from eps_core.cpu import attend

    whole, whole_lse = np.empty(out.shape, np.float32), np.empty(lse.shape, np.float32)
    rows = lse.size, out.shape[-1]
    attend.merge(
        out.reshape(rows), lse.reshape(-1), other_out.reshape(rows), other_lse.reshape(-1), whole.reshape(rows),
        whole_lse.reshape(-1),
    )  # fmt: skip
    return whole, whole_lse


def skipped_mass(estimate: np.ndarray, visit: np.ndarray, run: Run) -> np.ndarray:
    """The estimated share [B, Hkv] of the softmax outside visit [B, Hkv, G] bool: estimate [B, Hkv, G] float32."""
    from eps_core.cpu import attend

    shares = np.empty(estimate.shape[:2], np.float32)
    run(attend.skipped_mass, 1, estimate, visit.view(np.uint8), shares, alone=estimate.size < FEW_GROUPS)
    return shares
