"""A whole decode step over device buffers at fixed addresses: no host value, no wait, no shape that depends on what is
kept. On CUDA it is captured once per (batch, table width, configuration) as a CUDA graph and replayed; elsewhere it
runs as it is.

What changes from step to step goes through `StaticStep.buffers`, all in one copy. The step is idempotent (it writes the
same rows again), so the warm-up that a capture needs leaves the cache as one step would.

A draft is a sparse step that places K and V and says what it selected; on the host its groups are void, not planned.
"""

import math
import weakref
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eps_core.attention.protocol import Selection
from eps_core.attention.stats import LayerStats, StepOutput
from eps_core.backend.cache import check_finite, invalidate
from eps_core.backend.gpu import covers_codes
from eps_core.config.eps import EpsConfig
from eps_core.decode.layers import run_layers
from eps_core.kv_cache.step_plan import StepPlan
from eps_cuda.cache import Cache, span
from eps_cuda.capture import captured
from eps_cuda.kernels import dispatch
from eps_cuda.kernels.attend import attend_groups
from eps_cuda.kernels.score import Depth
from eps_cuda.ops import OPS

BUCKET_TOKENS = 4096  # tables of longer sequences than others are padded to whole multiples of this
MAX_GRAPHS = 8  # of one cache, by model, batch, table width and what is read; the oldest goes first


@dataclass
class Outputs:
    """Results of a step, overwritten by the next one."""

    results: Tensor  # float32: whether all K were finite, logits [B, V], skipped mass [L, B, Hkv] of a sparse step
    selected: tuple[Tensor, Tensor, Tensor] | None  # of a draft, all layers: a `Selection`'s groups, counts and visit


def covers(cache: Cache, plan: StepPlan) -> bool:
    """Return whether such a sparse step exists: topk of rq, without bounds, strict mode or head modes, over K and V as
    they are."""
    selection_config = plan.config.selection_config
    return (
        not cache.spec.quantised
        and selection_config.policy == "topk"
        and selection_config.scope == "kv-head"
        and not cache.cache_config.has_bounds
        and not selection_config.head_modes
        and int(plan.lengths.min()) >= selection_config.min_context
        and not plan.reads_all(0)
        and covers_codes(cache)
    )


class StaticStep:
    """The step of one cache for B sequences and tables of up to `num_units` units: dense, sparse or a draft."""

    def __init__(
        self, model: Any, cache: Cache, batch: int, num_units: int, config: EpsConfig | None, draft: bool = False
    ) -> None:
        device = cache.device
        self.config = config  # None: dense
        self.finite = torch.ones((), dtype=torch.bool, device=device) if draft else None  # what nobody asks
        # neither is held: the cache holds its steps, and a ring of the two would outlive both
        self.owner = weakref.ref(model)
        if config is not None:
            selection_config, size = config.selection_config, config.cache_config.S
            most_tokens = num_units * config.cache_config.unit_tokens
            selectable = (
                -(-selection_config.num_sink_tokens // size)
                - (-selection_config.num_recent_tokens // size)
                + 1
                + config.cache_config.groups_per_span
            )
            # a budget in tokens rounds up where it covers a sequence
            covering = math.ceil(selection_config.budget / size) if selection_config.budget > 1 else 0
            self.width = min(max(config.budget_groups(most_tokens), covering, selectable), most_tokens // size)
            self.most_cascaded = config.cascade_groups(most_tokens, cache.spec.head_dim)
            self.most_rescored = config.rescored_groups(most_tokens)

        head_dim = cache.spec.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "tokens": (batch,),
            "slots": (batch,),
            "lengths": (batch,),
            "wanted": (batch,),  # groups that each kv head selects
            # groups of whose codes each further part is read
            "cascaded": (0 if config is None else len(self.most_cascaded), batch),
            "rescored": (batch,),  # groups whose rescoring bit is read
            "table": (batch, num_units),
            "cos": (batch, 1, head_dim),  # float32, as sin; all others are int32
            "sin": (batch, 1, head_dim),
        }
        sizes = [math.prod(shape) for shape in shapes.values()]
        # one copy brings all of them: each costs the host more than its bytes
        self.inputs = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self.on_host = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=device == "cuda")
        views: list[dict[str, Tensor]] = []
        for flat in (self.inputs, self.on_host):
            parts = zip(shapes, flat.split(sizes), strict=True)
            typed = {name: part.view(torch.float32) if name in ("cos", "sin") else part for name, part in parts}
            views.append({name: part.view(shapes[name]) for name, part in typed.items()})
        self.buffers = SimpleNamespace(**views[0])
        self.places = {name: view.numpy() for name, view in views[1].items()}
        if config is not None:
            cascaded = tuple(zip(self.buffers.cascaded, self.most_cascaded, strict=True))
            rescored = self.buffers.rescored, self.most_rescored
            self.depth = Depth(cascaded, rescored, config.selection_config.reads_at_once)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.outputs: Outputs | None = None

    def fill(self, **arrays: np.ndarray) -> None:
        """Takes this step's numbers; a table narrower than its place is padded with -1. The step before must be over:
        its copy reads the same memory."""
        for name, array in arrays.items():
            place = self.places[name]
            if name == "table":
                place[:, array.shape[1] :] = -1
                place = place[:, : array.shape[1]]
            place[...] = array

    @torch.inference_mode()
    def __call__(self, model: Any, cache: Cache) -> Outputs:
        self.inputs.copy_(self.on_host, non_blocking=True)
        if cache.device != "cuda":
            return self.compute(model, cache)
        if self.graph is None:
            self.graph, self.outputs = captured(lambda: self.compute(model, cache))
        # a replay has no ranges of its own: those of its layers are passed while it is captured
        with span("eps.step", cache):
            self.graph.replay()
        assert self.outputs is not None
        return self.outputs

    @torch.inference_mode()
    def compute(self, model: Any, cache: Cache) -> Outputs:
        """Every layer, from the buffers."""
        at = self.buffers
        selections: list[tuple[Tensor, Tensor, Tensor]] = []
        config = self.config
        skipped: list[Tensor] = []

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if config is None:
                dispatch.write(cache, layer, k, v, at.slots)
                pools = cache.plain(layer)
                return attend_groups(q, *pools, at.table, at.lengths, None, None, group_size=cache.cache_config.S)[0]
            best = attend_static(config, cache, layer, q, k, v, at, self.depth, self.width, self.finite)
            skipped.append(best.skipped)
            if self.finite is not None:
                selections.append(best.listed())
            return best.out

        x = run_layers(model, model.embedded(at.tokens), [(at.cos, at.sin)], attention)
        selected = None
        if self.finite is not None:
            groups, counts, selected_mask = (torch.stack(part) for part in zip(*selections, strict=True))
            selected = groups, counts, selected_mask.bool()
        finite = torch.stack(cache.finite).all().float()
        return Outputs(torch.cat([one.reshape(-1) for one in (finite, model.logits(x), *skipped)]), selected)


def attend_static(
    config: EpsConfig, cache: Cache, layer: int, q: Tensor, k: Tensor, v: Tensor, at: Any, depth: Depth, width: int,
    tentative_finite: Tensor | None = None, into: dispatch.Into | None = None,
) -> dispatch.Attended:  # fmt: skip
    """One layer's sparse attention: write (see `dispatch.write`), score, choose and attend, from device arrays alone,
    those of `at` (`StaticStep.buffers`). `into`: see `dispatch.attend_rounded`."""
    q = q.contiguous()
    query, counters = dispatch.begin(
        cache, layer, q, k, v, at.slots, at.table, depth, config.selection_config, tentative_finite
    )
    read = at.table, at.lengths, at.wanted, depth, width
    return dispatch.attend_rounded(config, cache, layer, q, query, counters, *read, with_lse=False, into=into)


def _static(model: Any, cache: Cache, plan: StepPlan, sparse: bool, draft: bool = False) -> StaticStep:
    """The kept step for tables of at least this width, or a new one: as wide as the pool allows for sequences of one
    length, so that one step serves a whole generation. Kernels pass over what is past a sequence's end, unless they
    read codes in stages; a draft's masks are as wide as its table."""
    batch, num_units = plan.table.shape
    config = plan.config if sparse else None
    share, bucket = cache.spec.num_units // batch, BUCKET_TOKENS // cache.cache_config.unit_tokens
    num_units = share if num_units <= share and not draft else -(-num_units // bucket) * bucket
    key = (id(model), batch, num_units, config, draft)
    static = cache.steps.pop(key, None)
    if static is None or static.owner() is not model:
        static = StaticStep(model, cache, batch, num_units, config, draft)
    cache.steps[key] = static
    while len(cache.steps) > MAX_GRAPHS:
        cache.steps.pop(next(iter(cache.steps)))
    return static


def _start(
    static: StaticStep, model: Any, cache: Cache, tokens: np.ndarray, slots: np.ndarray, plan: StepPlan
) -> Outputs:
    """Launch a step whose budget is in place, once the host's state has taken its slots."""
    if static.finite is None:
        dispatch.plan_step(cache, slots)
    else:
        for layer in range(cache.spec.num_layers):
            invalidate(OPS, cache, layer, slots)
    ((cos, sin),) = model.angles(plan.lengths - 1)
    static.fill(tokens=np.asarray(tokens), slots=slots, lengths=plan.lengths, table=plan.table, cos=cos, sin=sin)
    return static(model, cache)


def _finish(static: StaticStep, cache: Cache, outputs: Outputs, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (logits [B, V], skipped mass [L, B, Hkv] or [], both on the host): the one wait."""
    finite, numbers = np.split(outputs.results.cpu().numpy(), [1])
    if static.finite is None and not finite:
        check_finite(OPS, cache)
    num_shares = 0 if static.config is None else cache.spec.num_layers * batch * cache.spec.num_kv_heads
    logits, shares = np.split(numbers, [len(numbers) - num_shares])
    return logits.reshape(batch, -1), shares.reshape(-1, batch, cache.spec.num_kv_heads)


@torch.inference_mode()
def dense_step(
    model: Any, cache: Cache, tokens: np.ndarray, slots: np.ndarray, plan: StepPlan
) -> tuple[Cache, StepOutput] | None:
    """`Decoder.step`, dense, with one wait at its end; None, and nothing done, where kernels do not cover it."""
    if dispatch.unsupported_writing(cache) is not None:
        return None
    static = _static(model, cache, plan, sparse=False)
    outputs = _start(static, model, cache, tokens, slots, plan)
    kv_bytes = cache.spec.num_layers * plan.dense_kv_bytes(cache.spec)
    logits, _ = _finish(static, cache, outputs, len(tokens))
    return cache, StepOutput(logits, kv_bytes)


@torch.inference_mode()
def step(
    model: Any, cache: Cache, tokens: np.ndarray, slots: np.ndarray, plan: StepPlan, draft: bool = False
) -> tuple[Cache, StepOutput] | None:
    """`Decoder.step`, sparse, with one wait at its end; None, and nothing done, where kernels do not cover it or more
    groups are without a summary than its lists have room for: that is there for those of an open unit."""
    if not covers(cache, plan):
        return None
    spec = cache.spec
    # the token of this step is written before it scores; what a draft places gets no summary
    always_selected = plan.num_always_selected_after_write(cache.state[0], finalizes=not draft)
    static = _static(model, cache, plan, sparse=True, draft=draft)
    common_counts = plan.budget(always_selected)
    if int(common_counts.max()) > static.width:
        return None
    static.fill(
        wanted=common_counts, rescored=plan.rescored,
        cascaded=np.array(plan.cascaded(spec.head_dim), np.int32).reshape(tuple(static.buffers.cascaded.shape)),
    )  # fmt: skip
    outputs = _start(static, model, cache, tokens, slots, plan)
    counts = np.repeat(common_counts[:, None], spec.num_kv_heads, axis=1)
    kv_bytes, summary_bytes, ends = plan.kv_bytes(spec, int(counts.sum())), plan.summary_bytes(spec), plan.ends
    logits, unread = _finish(static, cache, outputs, len(tokens))
    layers = [LayerStats(counts, ends, always_selected, one, kv_bytes, summary_bytes) for one in unread]
    selections = []
    if outputs.selected is not None:
        # the next draft's take their places
        groups, listed, selected_mask = (one.clone() for one in outputs.selected)
        selected_mask = selected_mask[..., : plan.num_groups]
        selections = [
            Selection(groups[layer], listed[layer], common_counts, always_selected, selected_mask=selected_mask[layer])
            for layer in range(spec.num_layers)
        ]
    return cache, StepOutput(logits, kv_bytes * spec.num_layers, layers, selections=selections)
