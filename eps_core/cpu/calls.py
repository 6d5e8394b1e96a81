"""The calls of the CPU kernels: of each part of a sparse layer the kernel, its phases, its arguments, and the arrays
that it fills. `kernels` runs them, one by one or all in one.

`cache` is a backend's; `host` shows its arrays.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from eps_core.config.formats import READ_BITS
from eps_core.cpu import attend, best, threads, unit_vectors, units, vectors, write
from eps_core.kv_cache.step_plan import StepPlan
from eps_core.summaries.rq import PARTS, QUERY_STEPS, part_dims

_ELEMENTS = {"float32": np.float32, "float16": np.int16, "bfloat16": np.uint16}  # as kernels see a dtype
TASK_TOKENS, TASKS_PER_THREAD = (256, 1024), 16  # of attention: least and most, and how many are wanted; speed only
ROWS_PER_THREAD = 1  # (sequence, kv head)s, from which on a thread scores whole ones; speed only
_NO_KEYS = np.empty(0, np.float32), (0, 0, 0)  # and their strides
_ALL_READY = threads.new_progress(0)  # lists of groups before attention
# what `select_topk` takes of no row
_NONE_CHOSEN = (
    np.empty(0, np.int64), np.empty((0, 0), np.int64), np.empty(0, np.int64), np.empty((0, 0, 0), np.int32),
    np.empty((0, 0, 0), np.uint8), _ALL_READY,
)  # fmt: skip
FEW_GROUPS = 4096  # of all rows: selecting among fewer is done before a helper wakes


class Call(NamedTuple):
    """kernel(progress, *args), `alone`: in the caller's thread."""

    kernel: Any
    phases: int
    args: tuple[Any, ...]
    alone: bool = False


class Chosen(NamedTuple):
    """`Selection`: groups [B, Hkv, W] int32 and selected_mask [B, Hkv, G] bool filled by the call; counts [B, Hkv]
    int32, common_counts [B] and always_selected [B] known before."""

    groups: np.ndarray
    counts: np.ndarray
    common_counts: np.ndarray
    always_selected: np.ndarray
    selected_mask: np.ndarray


class State(NamedTuple):
    """Attention over some keys, filled by the call: out [B, Hq, D] and lse [B, Hq] float32."""

    out: np.ndarray
    lse: np.ndarray


def lanes(array: np.ndarray) -> np.ndarray:
    """Flat, float16 as the int16 of its bits."""
    return (array.view(np.int16) if array.dtype == np.float16 else array).reshape(-1)


def _flat_pool(pool: np.ndarray) -> tuple[np.ndarray, tuple[int, int, int]]:
    """The memory from the first to the last element of a pool [P, Hkv, U, D], flat as `lanes`, and the strides of a
    unit, a kv head and a token in elements: no copy however they lie, as long as a row's D elements lie together."""
    unit, head, token, element = (stride // pool.itemsize for stride in pool.strides)
    assert element == 1 or pool.shape[3] == 1, "the elements of a row of K or V do not lie together"
    if pool.flags.c_contiguous:
        return lanes(pool), (unit, head, token)
    span = 1 + sum((size - 1) * stride for size, stride in zip(pool.shape, (unit, head, token, 1), strict=True))
    flat = np.lib.stride_tricks.as_strided(pool, (span,), (pool.itemsize,))
    return lanes(flat), (unit, head, token)


class Host:
    """A backend's arrays as kernels read them: `show` is one as numpy without a copy (bfloat16 as uint16)."""

    def __init__(self, show: Callable[[Any], np.ndarray]) -> None:
        self.show = show

    def __call__(self, array: Any) -> np.ndarray:
        return self.show(array)

    def flat(self, array: Any) -> np.ndarray:
        """Return an array as `lanes`."""
        return lanes(self.show(array))

    def rows(self, pool: Any, dtype: str) -> tuple[Any, tuple[int, int, int]]:
        """Return a pool of K or V as `pool_vectors` reads it and `write.put_row` writes it, and the strides of a unit,
        a kv head and a token in what names a row."""
        if not hasattr(pool, "codes"):
            return _flat_pool(self.show(pool))
        codes, scale = self.show(pool.codes), self.show(pool.scale)
        assert codes.flags.c_contiguous and scale.flags.c_contiguous, "codes of K or V do not lie together"
        _, kv_heads, unit_tokens = scale.shape
        of = np.empty(0, _ELEMENTS[dtype])
        return (codes.reshape(-1), lanes(scale), of), (kv_heads * unit_tokens, unit_tokens, 1)


def aligned(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    """float32 arrays of these shapes, each of which begins with a cache line."""
    total, places = _lines(shapes)
    whole = np.empty(total + 16, np.float32)
    address, _ = whole.__array_interface__["data"]  # `ctypes.data` takes five times as long
    first = -address % 64 // 4
    return [whole[first + start : first + end].reshape(shape) for start, end, shape in places]


@functools.lru_cache(maxsize=64)
def _lines(shapes: tuple[tuple[int, ...], ...]) -> tuple[int, list[tuple[int, int, tuple[int, ...]]]]:
    """Return how many numbers arrays of these shapes take, one after another from a cache line each, and where each
    is."""
    places, start = [], 0
    for shape in shapes:
        size = math.prod(shape)
        places.append((start, start + size, shape))
        start += -(-size // 16) * 16
    return start, places


def unsupported_scoring(cache: Any, plan: StepPlan) -> str | None:
    """Return the part of a cache or of its reading that `scoring` does not support, in a few words, or None."""
    cache_config, spec = cache.cache_config, cache.spec
    if cache_config.rq_bounds:
        return "rq with bounds of its own"
    if not cache_config.method_spec.coded:
        return f"method {cache_config.method}"
    if cache_config.groups_per_span % vectors.LANES:
        return f"{cache_config.groups_per_span} groups to a mean, no multiple of {vectors.LANES}"
    if spec.head_dim * QUERY_STEPS >= 2**15:  # sums are int16
        return f"head dim {spec.head_dim}"
    if plan.config.selection_config.combine == "sum" and spec.k_bits not in READ_BITS:
        return f"combine sum over K in {spec.k_bits}"
    return None


def scoring(cache: Any, layer: int, q: np.ndarray, plan: StepPlan, host: Host, estimate: np.ndarray) -> Call:
    """Return the call that scores q [B, Hq, D] float32 and fills estimate [B, Hkv, G] float32. Needs a cache of which
    `unsupported_scoring` is None."""
    cache_config, spec = cache.cache_config, cache.spec
    batch, num_heads, head_dim = q.shape
    sums = plan.config.selection_config.combine == "sum"
    kv_heads, per_span = spec.num_kv_heads, cache_config.groups_per_span
    rows, passes = batch * kv_heads, -(-num_heads // kv_heads // vectors.HEADS)
    groups = plan.num_groups
    spans = groups // per_span
    # without waiting for other threads where each has rows enough
    together = rows < ROWS_PER_THREAD * threads.num_threads()
    pools = {name: host.flat(array) for name, array in cache.summaries[layer].items()}
    chunks = -(-spans // max(units.CHUNK_GROUPS // per_span, 1))

    def know() -> tuple[Any, ...]:
        """Return the arguments that all layers' calls share: counts, a rotation and dimensions, sizes of work
        arrays."""
        dims = part_dims(cache_config, head_dim)
        words = sum(-(-many // (8 * unit_vectors.WORD)) for many in (*dims, head_dim)) * unit_vectors.WORD_TABLE // 4
        sizes = (words,), (vectors.HEADS, head_dim), (len(dims) + 1, vectors.HEADS)
        return (
            np.array(plan.cascaded(head_dim), np.int64).reshape(-1, batch), write.rotation(head_dim), np.array(dims),
            [(rows, passes, *size) for size in sizes], units.new_lists(0, groups, chunks, passes),
        )  # fmt: skip

    key = "score_units", cache_config.parts, per_span, head_dim, num_heads, kv_heads
    cascaded, rotation, dims, shapes, no_lists = plan.once(key, know)
    codes, *later = (pools[name] for name in PARTS[len(dims)])

    def work() -> tuple[Any, ...]:
        words, queries, factors = aligned(*shapes)
        return (
            np.empty((batch, spans), np.uint8), np.empty((batch, spans), np.int64), words.view(np.int8),
            queries, factors, np.empty((rows, passes, vectors.HEADS), np.float32),
            np.empty((rows, passes * vectors.HEADS * (spans + vectors.LANES)), np.float32),
            units.new_lists(rows, groups, chunks, passes) if together else no_lists,
        )  # fmt: skip

    args = (
        together, q, *(host.rows(cache.k[layer], spec.dtype) if sums else _NO_KEYS), sums,
        pools["mean"], pools["mean_scale"], pools["scale"], codes,
        (*later, codes, codes)[:2], pools.get("second", codes), pools.get("second_scale", pools["scale"]),
        cache.state[layer].fill, plan.table, plan.lengths, cascaded, plan.rescored,
        host(cache.fixed[layer]["signs"]), *rotation, dims, cache_config.S, cache_config.span_tokens,
        cache_config.spans_per_unit, *plan.room(key, work), estimate, _NONE_CHOSEN,
    )  # fmt: skip
    phases = 1 + units.MOST_PHASES if together else 2
    return Call(units.score_units, phases, args)


def choosing(
    plan: StepPlan, estimate: np.ndarray, num_missing: np.ndarray, filled: Chosen | None = None
) -> tuple[Call, Chosen]:
    """By policy topk over estimate [B, Hkv, G] float32; num_missing [B] as in `Scores`. The arrays of `filled` are
    filled again where their shapes fit."""
    batch, kv_heads, _ = estimate.shape
    own_missing = np.asarray(num_missing, np.int64)

    def count() -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
        always_selected = plan.num_always_selected + own_missing
        common_counts = plan.budget(always_selected)
        counts = np.repeat(common_counts[:, None], kv_heads, axis=1).astype(np.int32)
        return counts, common_counts, always_selected, max(int(common_counts.max()), 1)

    # layers that were written alike share one answer
    counts, common_counts, always_selected, width = plan.once(("topk", kv_heads, own_missing.tobytes()), count)
    if filled is not None and filled.groups.shape[2] == width and filled.selected_mask.shape == estimate.shape:
        groups, selected_mask = filled.groups, filled.selected_mask
    else:
        groups, selected_mask = np.empty((batch, kv_heads, width), np.int32), np.empty(estimate.shape, np.bool_)
    args = estimate, common_counts, plan.selectable, plan.ends, groups, selected_mask.view(np.uint8)
    alone = estimate.size < FEW_GROUPS
    return Call(best.select_topk, 1, args, alone), Chosen(groups, counts, common_counts, always_selected, selected_mask)


def attending(
    cache: Any, layer: int, q: np.ndarray, plan: StepPlan, listed: tuple[np.ndarray, np.ndarray] | None, host: Host
) -> tuple[Call, State]:
    """Return the call that attends for q [B, Hq, D] float32 over `listed`, the groups and counts of a selection, or
    over every token where it is None."""
    cache_config, spec = cache.cache_config, cache.spec
    table, lengths = plan.table, plan.lengths
    size, per_unit = cache_config.S, cache_config.groups_per_unit
    if listed is None:
        # whole units as groups: what lies past a sequence's end is not read
        size, per_unit = cache_config.unit_tokens, 1

        def whole() -> tuple[np.ndarray, np.ndarray]:
            groups = np.empty((len(table), spec.num_kv_heads, table.shape[1]), np.int32)
            groups[:] = np.arange(table.shape[1])
            return groups, np.repeat(-(-lengths[:, None] // size), spec.num_kv_heads, axis=1).astype(np.int32)

        groups, counts = plan.once(("attend whole", spec.num_kv_heads, size), whole)
    else:
        groups, counts = listed
    state = State(np.empty(q.shape, np.float32), np.empty(q.shape[:2], np.float32))
    (k, k_strides), (v, v_strides) = (host.rows(pool[layer], spec.dtype) for pool in (cache.k, cache.v))

    def tasks() -> tuple[int, np.ndarray]:
        least, most = TASK_TOKENS
        tokens_each = min(max(int(counts.sum()) * size // (TASKS_PER_THREAD * threads.num_threads()), least), most)
        per_task = max(tokens_each // size, 1)
        starts = np.zeros(counts.size + 1, np.int64)
        np.cumsum(-(-counts.reshape(-1) // per_task), out=starts[1:])
        return per_task, starts

    per_task, starts = plan.once(("attend", counts.tobytes(), size, threads.num_threads()), tasks)
    heads = -(-q.shape[1] // spec.num_kv_heads // vectors.HEADS) * vectors.HEADS

    def work() -> list[np.ndarray]:
        """Return what each task leaves: the largest logit of a head, the sum of masses, the sum of values."""
        return [np.empty((starts[-1], width), np.float32) for width in (heads, heads, heads * q.shape[2])]

    args = (
        _ALL_READY, q, k, v, k_strides, v_strides, table, lengths, groups, counts, size, per_unit, per_task, starts,
        *plan.room(("attend", starts[-1], heads, q.shape[2]), work), *state,
    )  # fmt: skip
    return Call(attend.attend, 2, args), state


def summing_skipped(estimate: np.ndarray, selected_mask: np.ndarray, shares: np.ndarray) -> Call:
    """Fills shares [B, Hkv] float32 with the estimated share of the softmax outside visit [B, Hkv, G] bool: estimate
    [B, Hkv, G] float32."""
    return Call(attend.skipped_mass, 1, (estimate, selected_mask.view(np.uint8), shares), estimate.size < FEW_GROUPS)
