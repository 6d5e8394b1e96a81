"""A whole decode step on a CPU in one call of a team of threads: the calls of every layer, made ready once and repeated
step by step, as a CUDA graph is (`graph`).

Called one by one from Python, the parts of a step take a third longer: 140 microseconds a layer to prepare arguments.
The numbers that a step changes are copied into the arrays that its calls read. Where anything else changes, as a table
that is wider, the calls are made ready again. A step that finalizes summaries runs layer by layer.
"""

import copy
from dataclasses import replace

import numpy as np
import torch

from eps_core.attention.layer import dense_read
from eps_core.attention.protocol import Selection
from eps_core.attention.stats import LayerStats, StepOutput
from eps_core.backend.cache import check_finite, invalidate
from eps_core.cpu import calls, openmp
from eps_core.cpu.kernels import FusedOutput
from eps_core.kv_cache.counts import check_write
from eps_core.kv_cache.groups import plan_alike
from eps_core.kv_cache.step_plan import StepPlan
from eps_cuda.cache import Cache
from eps_cuda.few_rows import FewRows
from eps_cuda.kernels.cpu import is_dense, kernels, unsupported_whole
from eps_cuda.kernels.kept import Changed, Following, keep
from eps_cuda.ops import OPS


def covers(few: FewRows, cache: Cache, plan: StepPlan, draft: bool) -> bool:
    """Return whether a step consists of these calls alone: layers that `unsupported_whole` supports, written alike,
    without a window, and no group that gets its summary now."""
    spec, cache_config = cache.spec, cache.cache_config
    if few.spec.windowed or spec.num_layers != few.spec.num_layers:
        return False
    if any(state.history != cache.state[0].history for state in cache.state):
        return False
    if cache_config.enabled and not draft and (plan.lengths % cache_config.span_tokens == 0).any():
        return False
    layers = range(1 if plan.config.selection_config.head_modes is None else spec.num_layers)
    return not any(unsupported_whole(cache, layer, None, plan) for layer in layers)


class CpuStep(Following):
    """The calls of a step of B sequences over one cache, as `plan` reads it."""

    def __init__(self, few: FewRows, cache: Cache, plan: StepPlan, draft: bool) -> None:
        super().__init__(kernels, cache, plan)
        self.few, batch = few, len(plan.lengths)
        self.slots, self.x = np.zeros(batch, np.int64), np.empty((batch, few.spec.hidden_size), np.float32)
        self.turn = [(np.copy(cos), np.copy(sin)) for cos, sin in few.rotation(plan.lengths - 1)]
        self.logits = np.empty((batch, few.spec.vocab_size), np.float32)
        layers, host = range(few.spec.num_layers), kernels.pools(cache)
        # K of a draft may be taken back, and is not checked
        self.finite = [np.ones(1, np.bool_) if draft else host.flat(cache.finite[layer]) for layer in layers]
        self.skipped = np.zeros((few.spec.num_layers, batch, cache.spec.num_kv_heads), np.float32)
        self.times = np.zeros((few.spec.num_layers, 3), np.int64)  # `FusedOutput.stamps` of each layer
        self.read: list[FusedOutput | None] = []
        made: list[calls.Call] = []
        x, outs, room = self.x, few.projected(batch), few.room(batch)
        q, k, v = outs
        streams, filled = [np.empty_like(x) for _ in range(2)], None
        for layer in layers:
            skipped, times = self.skipped[layer], self.times[layer]
            attention, out, read = kernels.attending(cache, layer, q, self.plan, skipped, times, filled)
            if read is not None and not draft:  # whose lists are of each layer
                filled = read.chosen
            self.read.append(read)
            self.examples.setdefault(read is None, (layer, q, attention, read))
            after = streams[layer % 2]
            made += [
                few.before(layer, x, self.turn, outs),
                kernels.placing(cache, layer, (k, v), self.slots, self.finite[layer]),
                attention, few.after(layer, x, out, after, room),
            ]  # fmt: skip
            x = after
        self.calls = openmp.Calls([*made, few.head(x, self.logits)])
        self.hold(cache)

    def run(self, tokens: np.ndarray, slots: np.ndarray, lengths: np.ndarray) -> None:
        """Make the calls, and fill `logits`, `skipped` and what `read` holds."""
        self.x[...] = self.few.embed(tokens)
        for kept, new in zip(self.turn, self.few.rotation(lengths - 1), strict=True):
            for kept_array, array in zip(kept, new, strict=True):
                kept_array[...] = array
        self.slots[...], self.times[...] = slots, 0
        kernels.team.run_all(self.calls)


@torch.inference_mode()
def step(
    few: FewRows, cache: Cache, tokens: np.ndarray, slots: np.ndarray, plan: StepPlan, sparse: bool, draft: bool,
    timed: bool,
) -> tuple[Cache, StepOutput] | None:  # fmt: skip
    """`Decoder.step`; None, and nothing done, where a step does not consist of these calls alone, or helpers are to
    make them (`Team.serves`)."""
    if not covers(few, cache, plan, draft) or not kernels.team.serves():
        return None
    spec, own, batch, slots = cache.spec, few.spec, len(tokens), np.asarray(slots, np.int64)
    check_write(spec, cache.cache_config, [(batch, own.num_kv_heads, own.head_dim)] * 2, slots)
    if draft:
        for layer in range(spec.num_layers):
            invalidate(OPS, cache, layer, slots)
    elif cache.state:
        plan_alike(cache.state, slots)
    kinds = tuple(is_dense(plan, layer) for layer in range(spec.num_layers))
    key = "cpu", id(few), batch, plan.config, kinds, draft
    kept: CpuStep | None = cache.steps.get(key)
    try:
        if kept is None:
            raise Changed
        known = kept.follow(cache, plan)
    except Changed:
        kept = CpuStep(few, cache, plan, draft)
        known = kept.follow(cache, plan)
    keep(cache, key, kept)
    # before the step, after which Python's data lies in no cache
    layers = _statistics(kept, cache, plan, known) if sparse else []
    kept.run(tokens, slots, plan.lengths)
    if not all(finite[0] for finite in kept.finite):
        check_finite(OPS, cache)
    logits = few.model.capped(torch.from_numpy(kept.logits)).numpy().copy()
    if not sparse:
        return cache, StepOutput(logits, spec.num_layers * plan.dense_kv_bytes(spec))
    for one, read, skipped, (began, selected, ended) in zip(
        layers, kept.read, kept.skipped.copy(), (kept.times / 1e6).tolist(), strict=True
    ):
        if read is not None:
            one.skipped_mass = skipped
            if timed:
                one.prepass_ms, one.attention_ms = selected - began, ended - selected
    selections = [_selection(read, known) for read in kept.read] if draft else []
    return cache, StepOutput(
        logits, sum(one.kv_bytes_read for one in layers), layers, plan.fallbacks(own.full), selections=selections
    )


def _statistics(kept: CpuStep, cache: Cache, plan: StepPlan, known: FusedOutput | None) -> list[LayerStats]:
    """Return the statistics of all layers, without the skipped mass of sparse ones, which select as many groups as is
    `known`."""
    dense = dense_read(cache, plan).stats
    wanted, sparse = replace(dense, always_selected=plan.num_always_selected), dense
    if known is not None:
        counts, always_selected = known.chosen.counts, known.chosen.always_selected
        kv_bytes, summary_bytes = plan.kv_bytes(cache.spec, int(counts.sum())), plan.summary_bytes(cache.spec)
        sparse = LayerStats(counts, dense.groups, always_selected, None, kv_bytes, summary_bytes)
    dense_layer = plan.config.selection_config.dense_layer
    return [
        copy.copy(sparse if read is not None else dense if dense_layer(layer) else wanted)
        for layer, read in enumerate(kept.read)
    ]


def _selection(read: FusedOutput | None, known: FusedOutput | None) -> Selection | None:
    """Return what a draft's layer selected, in arrays that no later step fills; None: everything."""
    if read is None or known is None:
        return None
    chosen = known.chosen._replace(groups=read.chosen.groups.copy(), selected_mask=read.chosen.selected_mask.copy())
    return kernels.selection(chosen)
