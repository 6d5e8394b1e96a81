"""A whole decode step on a CPU in one call of a team of threads: the calls of every layer, made ready once and repeated
step by step, as a CUDA graph is (`graph`).

Called one by one from Python, the parts of a step take a third longer: 140 microseconds a layer to prepare arguments.
What a step changes is copied into the arrays that its calls read. Where anything else changes, as a table that is
wider, the calls are made ready again. A step that finalizes summaries runs layer by layer.
"""

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from eps_core.attention.kernels import unsupported_choice
from eps_core.attention.layer import dense_read
from eps_core.attention.protocol import Selection
from eps_core.attention.stats import LayerStats, StepOutput
from eps_core.cpu import calls, openmp
from eps_core.cpu.kernels import FusedOutput, fused_call
from eps_core.kv_cache.counts import check_write
from eps_core.kv_cache.step_plan import StepPlan
from eps_cuda.arrays import check_finite, invalidate
from eps_cuda.cache import Cache
from eps_cuda.few_rows import FewRows
from eps_cuda.kernels.cpu import KeptHost, kernels

MOST_STEPS = 8  # of one cache, by batch and what is read; the oldest goes first
Pair = tuple[np.ndarray, np.ndarray]


def covers(few: FewRows, cache: Cache, plan: StepPlan, sparse: bool, draft: bool) -> bool:
    """Return whether a step is these calls alone: K and V in float32 or bfloat16, no bounds, no skipped-mass
    correction, rq or no summaries, no group that gets its summary now, and in sparse layers topk for each kv head."""
    spec, cache_config = cache.spec, cache.cache_config
    first = cache.state[0].history if cache.state else 0
    if (
        spec.quantised
        or few.spec.windowed
        or cache_config.has_bounds
        or cache_config.correction_tokens
        or spec.dtype == "float16"
        or any(state.history != first for state in cache.state)
    ):
        return False
    if cache_config.enabled:
        ends_span = plan.lengths % cache_config.span_tokens == 0
        if not cache_config.method_spec.coded or (not draft and ends_span.any()):
            return False
    layers = range(spec.num_layers if sparse and plan.config.selection_config.head_modes else sparse)
    scored = [layer for layer in layers if not plan.reads_all(layer)]
    return not scored or not any(
        (calls.unsupported_scoring(cache, plan), *(unsupported_choice(None, plan, layer) for layer in scored))
    )


class CpuStep:
    """The calls of a step of B sequences over one cache: sparse as `plan` says, or dense."""

    def __init__(self, few: FewRows, cache: Cache, plan: StepPlan, sparse: bool) -> None:
        self.few, self.sparse, batch = few, sparse, len(plan.lengths)
        # its arrays are what the calls read: the numbers of later steps are copied into them
        self.plan = StepPlan.of(plan.config, plan.table.copy(), plan.lengths.copy())
        self.slots, self.finite = np.zeros(batch, np.int64), np.ones(1, np.bool_)
        self.x = np.empty((batch, few.spec.hidden_size), np.float32)
        self.turn = [(np.copy(cos), np.copy(sin)) for cos, sin in few.rotation(plan.lengths - 1)]
        self.logits = np.empty((batch, few.spec.vocab_size), np.float32)
        self.skipped = np.zeros((few.spec.num_layers, batch, cache.spec.num_kv_heads), np.float32)
        self.read: list[FusedOutput | None] = []
        # of the first dense and the first sparse layer: its number, its queries and its call
        self.examples: dict[bool, tuple[int, np.ndarray, calls.Call]] = {}
        made: list[calls.Call] = []
        x, outs, room = self.x, few.projected(batch), few.room(batch)
        q, k, v = outs
        streams = [np.empty_like(x) for _ in range(2)]
        for layer in range(few.spec.num_layers):
            attention, out, read = self._attention(cache, layer, q, self.plan)
            self.read.append(read)
            self.examples.setdefault(read is None, (layer, q, attention))
            after = streams[layer % 2]
            made += [
                few.before(layer, x, self.turn, outs), kernels.placing(cache, layer, (k, v), self.slots, self.finite),
                attention, few.after(layer, x, out, after, room),
            ]  # fmt: skip
            x = after
        self.calls = openmp.Calls([*made, few.head(x, self.logits)])

    def _attention(
        self, cache: Cache, layer: int, q: np.ndarray, plan: StepPlan
    ) -> tuple[calls.Call, np.ndarray, FusedOutput | None]:
        """Return a layer's call, its output [B, Hq, D] and, where it is sparse, what else it gives."""
        host = KeptHost(cache.views)
        if not self.sparse or plan.reads_all(layer):
            call, state = calls.attending(cache, layer, q, plan, None, host)
            return call, state.out, None
        call, read = fused_call(cache, layer, q, plan, host, self.skipped[layer])
        return call, read.whole.out, read

    def follow(self, cache: Cache, plan: StepPlan) -> FusedOutput | None:
        """Take the numbers of a step, and return what its sparse layers know before they run, None where there are
        none. Raises `Changed` where more than numbers changed."""
        if plan.table.shape != self.plan.table.shape:
            raise Changed
        known: FusedOutput | None = None
        plan = StepPlan.of(plan.config, plan.table, plan.lengths)
        self.plan.lend_room(plan)
        pairs: list[Pair] = []
        for is_dense, (layer, q, kept) in self.examples.items():
            call, _, read = self._attention(cache, layer, q, plan)
            if (read is None) != is_dense:
                raise Changed
            known = read or known
            _compare(kept.args, call.args, pairs)
        for kept_array, array in pairs:
            kept_array[...] = array
        return known

    def run(self, tokens: np.ndarray, slots: np.ndarray, lengths: np.ndarray) -> None:
        """Make the calls, and fill `logits` and what `read` holds."""
        self.x[...] = self.few.embed(tokens)
        for kept, new in zip(self.turn, self.few.rotation(lengths - 1), strict=True):
            for kept_array, array in zip(kept, new, strict=True):
                kept_array[...] = array
        self.slots[...] = slots
        self.finite[...] = True
        kernels.team.run_all(self.calls)


class Changed(Exception):
    """A step's calls differ from those that are kept in more than numbers."""


def _compare(kept: Any, new: Any, pairs: list[Pair]) -> None:
    """Appends the whole numbers that a kept call reads, and those that it is to read now. Raises `Changed` where
    anything else differs but what the call fills."""
    if isinstance(kept, tuple):
        if len(kept) != len(new):
            raise Changed
        for one, other in zip(kept, new, strict=True):
            _compare(one, other, pairs)
    elif isinstance(kept, np.ndarray):
        if kept is not new and (kept.shape != new.shape or kept.dtype != new.dtype):
            raise Changed
        if kept is not new and kept.dtype.kind in "iu":
            pairs.append((kept, new))
    elif kept != new:
        raise Changed


@torch.inference_mode()
def step(
    few: FewRows, cache: Cache, tokens: np.ndarray, slots: np.ndarray, plan: StepPlan, sparse: bool, draft: bool
) -> tuple[Cache, StepOutput] | None:
    """`Decoder.step`; None, and nothing done, where it is not these calls alone or no team is to be asked now."""
    if not covers(few, cache, plan, sparse, draft) or not kernels.team.serves():
        return None
    spec, batch, slots = cache.spec, len(tokens), np.asarray(slots, np.int64)
    check_write(spec, cache.cache_config, [(batch, spec.num_kv_heads, spec.head_dim)] * 2, slots)
    if draft:
        for layer in range(spec.num_layers):
            invalidate(cache, layer, slots)
    elif cache.state:
        first, *others = cache.state
        first.plan(slots)
        for state in others:
            state.follow(first, slots)
    key = "cpu", id(few), batch, plan.config if sparse else None
    kept: CpuStep | None = cache.steps.pop(key, None)
    try:
        if kept is None:
            raise Changed
        known = kept.follow(cache, plan)
    except Changed:
        kept = CpuStep(few, cache, plan, sparse)
        known = kept.follow(cache, plan)
    cache.steps[key] = kept
    while len(cache.steps) > MOST_STEPS:
        cache.steps.pop(next(iter(cache.steps)))
    # before the step, after which Python's data lies in no cache
    layers = _statistics(kept, cache, plan, known) if sparse else []
    kept.run(tokens, slots, plan.lengths)
    if not draft and not kept.finite[0]:
        cache.finite[0] &= False
        check_finite(cache)
    logits = few.model.capped(torch.from_numpy(kept.logits)).numpy().copy()
    if not sparse:
        return cache, StepOutput(logits, spec.num_layers * plan.dense_kv_bytes(spec))
    for one, read, skipped in zip(layers, kept.read, kept.skipped.copy(), strict=True):
        one.skipped_mass = one.skipped_mass if read is None else skipped
    selections = [_selection(read, known) for read in kept.read] if draft and known is not None else []
    return cache, StepOutput(
        logits, sum(one.kv_bytes_read for one in layers), layers, plan.fallbacks(few.spec.full), selections=selections
    )


def _statistics(kept: CpuStep, cache: Cache, plan: StepPlan, known: FusedOutput | None) -> list[LayerStats]:
    """Return those of all layers, without the skipped mass of sparse ones, which select as many groups as is
    `known`."""
    dense = dense_read(cache, plan).stats
    wanted = replace(dense, always_selected=plan.num_always_selected)
    sparse = dense
    if known is not None:
        counts, always_selected = known.chosen.counts, known.chosen.always_selected
        kv_bytes, summary_bytes = plan.kv_bytes(cache.spec, int(counts.sum())), plan.summary_bytes(cache.spec)
        sparse = LayerStats(counts, dense.groups, always_selected, None, kv_bytes, summary_bytes)
    found, is_dense = [], plan.config.selection_config.dense_layer
    for layer, read in enumerate(kept.read):
        alike = sparse if read is not None else dense if is_dense(layer) else wanted
        found.append(copy.copy(alike))
    return found


def _selection(read: FusedOutput | None, known: FusedOutput) -> Selection | None:
    """Return what a draft's layer selected, in arrays of its own; None: everything."""
    if read is None:
        return None
    groups, counts, selected_mask = (
        torch.from_numpy(one)
        for one in (read.chosen.groups.copy(), known.chosen.counts, read.chosen.selected_mask.copy())
    )
    chosen = known.chosen
    return Selection(groups, counts, chosen.common_counts, chosen.always_selected, selected_mask=selected_mask)
