"""Calls of a decode step's layers, made ready once and repeated step by step: those of whole steps (`cpu_step`) follow
the same rules as those of an engine, which asks layer by layer.

Between two layers an engine's weights pass through the CPU's caches, after which every operation of Python costs
microseconds: preparing a layer's arguments and results again took as long as its kernel.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from threading import get_ident
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from eps_core.attention.protocol import FusedRead, Selection
from eps_core.cpu import calls, openmp, threads
from eps_core.cpu.calls import Chosen
from eps_core.cpu.kernels import FusedOutput
from eps_core.kv_cache.counts import check_query
from eps_core.kv_cache.groups import GroupState
from eps_core.kv_cache.step_plan import StepPlan
from eps_cuda.device import DTYPES

MOST_STEPS = 8  # of one cache: whole steps by batch and what is read, and two of each thread; the oldest goes first
Pair = tuple[np.ndarray, np.ndarray]
# of a layer that stands for others: its number, its queries, its call, and what it gives where it is sparse
Example = tuple[int, np.ndarray, calls.Call, FusedOutput | None]


class Changed(Exception):
    """The calls of a step differ from those that are kept in more than numbers."""


def keep(cache: Any, key: Any, step: Any) -> None:
    """Puts a step's calls with those that a cache keeps, the oldest of which go."""
    cache.steps.pop(key, None)
    cache.steps[key] = step
    while len(cache.steps) > MOST_STEPS:
        cache.steps.pop(next(iter(cache.steps)), None)


class Following:
    """Calls whose arrays of whole numbers are those of `plan`, its own copy of a step's: those of later steps are
    copied into them."""

    def __init__(self, kernels: Any, cache: Any, plan: StepPlan) -> None:
        self.kernels = kernels
        self.plan = StepPlan.of(plan.config, plan.table.copy(), plan.lengths.copy())
        self.examples: dict[bool, Example] = {}  # the first dense and the first sparse layer
        self.held: set[int] = set()

    def hold(self, cache: Any) -> None:
        """Notes the arrays of the cache: another one in the place of one of them is another call."""
        self.held = {id(array) for array in _arrays(tuple(shown for _, shown in cache.views.values()))}
        self.held |= {id(state.fill) for state in cache.state}

    def follow(self, cache: Any, plan: StepPlan) -> FusedOutput | None:
        """Take the numbers of a step, and return what its sparse layers know before they run, None where there are
        none. Raises `Changed` where more than numbers changed."""
        if plan.table.shape != self.plan.table.shape:
            raise Changed
        known: FusedOutput | None = None
        plan = StepPlan.of(plan.config, plan.table, plan.lengths)
        self.plan.lend_room(plan)
        pairs: list[Pair] = []
        for layer, q, kept, given in self.examples.values():
            filled = None if given is None else given.chosen
            unused = np.empty((len(q), cache.spec.num_kv_heads), np.float32), np.zeros(3, np.int64)
            call, _, read = self.kernels.attending(cache, layer, q, plan, *unused, filled)
            known = read or known
            self._compare(kept.args, call.args, pairs)
        for kept_array, array in pairs:
            kept_array[...] = array
        return known

    def _compare(self, kept: Any, new: Any, pairs: list[Pair]) -> None:
        """Append the arrays of whole numbers of a kept call, and those that hold the step's own in a new one. Raises
        `Changed` where a number differs that is no array's, a shape, or what the cache holds. Other arrays are those
        that a call fills."""
        if isinstance(kept, tuple):
            if len(kept) != len(new):
                raise Changed
            for one, other in zip(kept, new, strict=True):
                self._compare(one, other, pairs)
        elif isinstance(kept, np.ndarray):
            if kept is new:
                return
            if kept.shape != new.shape or kept.dtype != new.dtype or id(kept) in self.held:
                raise Changed
            if kept.dtype.kind in "iu":
                pairs.append((kept, new))
        elif kept != new:
            raise Changed


def _arrays(tree: Any) -> Iterator[np.ndarray]:
    """The arrays of nested tuples."""
    if isinstance(tree, np.ndarray):
        yield tree
    elif isinstance(tree, tuple):
        for one in tree:
            yield from _arrays(one)


def _room(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return an array that may be filled in inference mode and out of it."""
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=dtype)


def _fill(room: Tensor, array: Tensor) -> None:
    room.copy_(array.detach() if array.requires_grad else array)


class _Read(FusedRead):
    """A read whose lists, `lse` and `stamps` later layers fill again."""

    def lasting(self) -> FusedRead:
        assert self.stamps is not None
        lists = {name: getattr(self.selection, name).clone() for name in ("groups", "selected_mask")}
        selection = replace(self.selection, **lists)
        return FusedRead(self.out, self.lse.clone(), selection, self.skipped, self.stamps.copy())


class _Layer(NamedTuple):
    calls: openmp.Calls
    stamps: np.ndarray
    out: Tensor  # [B, Hq, D] float32
    lse: Tensor
    skipped: Tensor
    groups: Tensor
    selected_mask: Tensor


class KeptLayers(Following):
    """Sparse layers of one cache for queries [B, Hq, D], as one thread asks for them. Layers that are written alike are
    followed together."""

    def __init__(self, kernels: Any, cache: Any, q: Tensor, plan: StepPlan) -> None:
        check_query(cache.spec, q.shape)
        super().__init__(kernels, cache, plan)
        self.q = _room(q.shape, torch.float32)
        self.layers: dict[int, _Layer] = {}
        self.chosen: Chosen | None = None  # numbers of the step that no later one fills
        self.counts: Any = None  # of these, as an array of Torch
        self.first = self.asked = plan
        self.followed: int | None = None  # the history of its layers' writes

    def attend(self, cache: Any, layer: int, q: Tensor, plan: StepPlan) -> FusedRead:
        """`attend_fused`. Raises `Changed` where other calls are needed."""
        if not self.layers:
            self._make(cache, layer)
        history = cache.state[layer].history
        if cache.state[self.examples[False][0]].history != history:
            raise Changed  # layers that were written otherwise select other numbers of groups
        if self.asked is not plan or self.followed != history:
            known = self.follow(cache, plan)
            assert known is not None
            self.chosen, self.asked, self.followed = known.chosen, plan, history
            self.counts = self.kernels.array(known.chosen.counts)
        if layer not in self.layers and plan is not self.first:
            raise Changed  # of `plan` only what calls read is that of the step
        one, chosen = self.layers.get(layer) or self._make(cache, layer), self.chosen
        assert chosen is not None
        _fill(self.q, q)
        one.stamps[:] = 0
        self.kernels.team.run_all(one.calls)
        selection = Selection(
            one.groups, self.counts, chosen.common_counts, chosen.always_selected, selected_mask=one.selected_mask
        )
        return _Read(one.out.to(q.dtype, copy=True), one.lse, selection, one.skipped.clone(), one.stamps)

    def _make(self, cache: Any, layer: int) -> _Layer:
        q, batch = self.q.numpy(), len(self.q)
        example = self.examples.get(False)
        filled = None if example is None or example[3] is None else example[3].chosen
        skipped = np.zeros((batch, cache.spec.num_kv_heads), np.float32), np.zeros(3, np.int64)
        call, out, read = self.kernels.attending(cache, layer, q, self.plan, *skipped, filled)
        if example is None:
            self.examples[False] = layer, q, call, read
            self.hold(cache)
            numbers = ("counts", "common_counts", "always_selected")
            self.chosen = read.chosen._replace(**{name: getattr(read.chosen, name).copy() for name in numbers})
            self.counts = self.kernels.array(self.chosen.counts)
            self.followed = cache.state[layer].history
        shown = out, read.read.lse, read.skipped, read.chosen.groups, read.chosen.selected_mask
        self.layers[layer] = _Layer(openmp.Calls([call]), read.stamps, *map(self.kernels.array, shown))
        return self.layers[layer]


class KeptRows:
    """Writes of one K and V row of each of B sequences to the layers of one cache, as one thread asks for them, where
    no group gets its summary."""

    def __init__(self, kernels: Any, cache: Any, k: Tensor) -> None:
        self.k, self.v = (_room(k.shape, k.dtype) for _ in range(2))
        self.slots, self.progress = np.zeros(len(k), np.int64), threads.new_progress(1)
        given, host = [kernels.host(one) for one in (self.k, self.v)], kernels.pools(cache)
        self.calls = [
            kernels.placing(cache, layer, given, self.slots, host.flat(cache.finite[layer]))
            for layer in range(cache.spec.num_layers)
        ]
        # of a step's first layer: its history, what it wrote, its history then
        self.first: tuple[int, bytes, int, GroupState | None] = 0, b"", 0, None

    def write(self, cache: Any, layer: int, k: Tensor, v: Tensor, slots: np.ndarray) -> None:
        _fill(self.k, k)
        _fill(self.v, v)
        self.slots[...] = slots
        self.progress[...] = 0
        call, state = self.calls[layer], cache.state[layer]
        call.kernel(self.progress, *call.args)
        history, wrote, after, first = self.first
        before, given = state.history, slots.tobytes()
        if first is not None and before == history and wrote == given and first.history == after:
            state.follow(first, slots)
        else:
            state.plan(slots)
            self.first = before, given, state.history, state


def attend(kernels: Any, cache: Any, layer: int, q: Tensor, plan: StepPlan) -> FusedRead:
    """`attend_fused` by calls that are kept with the cache."""
    key = "layers", get_ident()
    kept: KeptLayers | None = cache.steps.get(key)
    if kept is not None and kept.q.shape == q.shape:
        with suppress(Changed):
            return kept.attend(cache, layer, q, plan)
    kept = KeptLayers(kernels, cache, q, plan)
    keep(cache, key, kept)
    return kept.attend(cache, layer, q, plan)


def _is_supported(cache: Any, k: Tensor, v: Tensor) -> bool:
    """Return whether such rows are stored as they are given, and nothing else follows than that groups are longer."""
    spec, cache_config, of = cache.spec, cache.cache_config, DTYPES[cache.spec.dtype]
    if spec.quantised or cache_config.has_bounds or not (cache_config.enabled and cache_config.method_spec.coded):
        return False
    return k.dtype == v.dtype and (k.dtype == of or (k.dtype == torch.float32 and of == torch.bfloat16))


def write(kernels: Any, cache: Any, layer: int, k: Tensor, v: Tensor, slots: np.ndarray) -> bool:
    """Puts rows k, v [B, Hkv, D] to slots [B] of units of their own by calls that are kept with the cache. Return
    whether it did: not where more follows than that groups are longer."""
    span_tokens = cache.cache_config.span_tokens
    if any((slot + 1) % span_tokens == 0 for slot in slots.tolist()):  # its span gets its summary
        return False
    key = "rows", get_ident()
    kept: KeptRows | None = cache.steps.get(key)
    if kept is None or kept.k.shape != k.shape or kept.k.dtype != k.dtype or v.dtype != k.dtype:
        if not _is_supported(cache, k, v):
            return False
        kept = KeptRows(kernels, cache, k)
        keep(cache, key, kept)
    kept.write(cache, layer, k, v, slots)
    return True
