"""A whole decode step over device buffers at fixed addresses: no host value, no wait, no shape that depends on what is
kept. On CUDA it is captured once per (batch, table width, configuration) as a CUDA graph and replayed; elsewhere it
runs as it is.

What changes from step to step goes through `Buffers`, one small copy each. The step is idempotent (it writes the same
rows again), so the warm-up that a capture needs leaves the cache as one step would.

A draft is a gated step that places K and V and says what it visited; on the host its groups are void, not planned.
"""

import math
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eps_core.backend.gpu import covers_codes
from eps_core.config.eps import EpsConfig
from eps_core.decode.layers import run_layers
from eps_core.gate.protocol import Scores, Selection
from eps_core.gate.stats import LayerStats, StepOutput
from eps_core.paging.where import Where
from eps_cuda.cache import Cache, check_finite, span
from eps_cuda.drafts import void
from eps_cuda.kernels import dispatch
from eps_cuda.kernels.attend import attend_groups
from eps_cuda.kernels.select import Depth
from eps_cuda.kernels.tail import attend_with_tail
from eps_cuda.selection import skipped_mass

BUCKET_TOKENS = 4096  # tables are padded to whole multiples, so that a graph serves this many steps
MAX_GRAPHS = 8  # of one cache, by model, batch, table width and what is read; the oldest goes first
WARM_UP_STEPS = 3
VISITED = ("groups", "counts", "visit")  # of a Selection


@dataclass(frozen=True)
class Buffers:
    """What a step reads besides weights and cache. B sequences, M units of the padded table."""

    tokens: Tensor  # [B] int64
    slots: Tensor  # [B] int32
    lengths: Tensor  # [B] int32
    wanted: Tensor  # [B] int32 groups that each kv head visits
    staged: Tensor  # [parts - 1, B] int32 groups of whose codes each further part is read
    refined: Tensor  # [B] int32 groups whose second bit is read
    table: Tensor  # [B, M] int32
    cos: Tensor  # [B, 1, D/2] float32
    sin: Tensor


@dataclass
class Outputs:
    """Results of a step, overwritten by the next one."""

    logits: Tensor  # [B, V] float32
    mass_skipped_est: Tensor | None  # [L, B, Hkv] of a gated step
    visited: tuple[Tensor, Tensor, Tensor] | None  # of a draft, all layers: a `Selection`'s groups, counts and visit


def covers(cache: Cache, where: Where) -> bool:
    """Whether such a gated step exists: topk of rq, without bounds, strict mode or head modes, over K and V as they
    are."""
    read = where.config.read
    return (
        cache.kernels == "triton"
        and not cache.spec.quantised
        and read.policy == "topk"
        and read.scope == "kv-head"
        and not cache.store.has_bounds
        and not read.head_modes
        and int(where.lengths.min()) >= read.min_context
        and not where.reads_all(0)
        and covers_codes(cache)
    )


def covers_dense(cache: Cache) -> bool:
    """Whether such a dense step exists: wherever one kernel writes what a step adds."""
    return cache.kernels == "triton" and dispatch.covers_writing(cache)


class StaticStep:
    """The step of one cache for B sequences and tables of up to `num_units` units: dense, gated or a draft."""

    def __init__(
        self, model: Any, cache: Cache, batch: int, num_units: int, config: EpsConfig | None, draft: bool = False
    ) -> None:
        device = cache.device
        self.config = config  # None: dense
        self.finite = torch.ones((), dtype=torch.bool, device=device) if draft else None  # what nobody asks
        # neither is held: the cache holds its steps, and a ring of the two would outlive both
        self.owner = weakref.ref(model)
        if config is not None:
            read, size, most_tokens = config.read, config.store.S, num_units * config.store.unit_tokens
            guards = -(-read.first_tokens // size) - (-read.last_tokens // size) + 1 + config.store.groups_per_seal
            # a budget in tokens rounds up where it covers a sequence
            covering = math.ceil(read.budget / size) if read.budget > 1 else 0
            self.width = min(max(config.budget_groups(most_tokens), covering, guards), most_tokens // size)
            self.most_staged = config.staged_groups(most_tokens, cache.spec.head_dim)
            self.most_refined = config.refined_groups(most_tokens)

        def integers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        def angles() -> Tensor:
            return torch.zeros((batch, 1, cache.spec.head_dim // 2), device=device)

        self.buffers = Buffers(
            tokens=torch.zeros(batch, dtype=torch.int64, device=device),
            slots=integers(batch),
            lengths=integers(batch),
            wanted=integers(batch),
            staged=integers(0 if config is None else len(self.most_staged), batch),
            refined=integers(batch),
            table=integers(batch, num_units),
            cos=angles(),
            sin=angles(),
        )
        if config is not None:
            staged = tuple(zip(self.buffers.staged, self.most_staged, strict=True))
            self.depth = Depth(staged, (self.buffers.refined, self.most_refined))
        self.graph: torch.cuda.CUDAGraph | None = None
        self.outputs: Outputs | None = None

    @torch.inference_mode()
    def fill(self, **arrays: np.ndarray) -> None:
        """Copies this step's numbers to their places; a table narrower than its place is padded with -1."""
        for name, array in arrays.items():
            place: Tensor = getattr(self.buffers, name)
            if name == "table":
                padded = np.full(tuple(place.shape), -1, np.int32)
                padded[:, : array.shape[1]] = array
                array = padded
            place.copy_(torch.from_numpy(np.ascontiguousarray(array)), non_blocking=True)

    @torch.inference_mode()
    def __call__(self, model: Any, cache: Cache) -> Outputs:
        if cache.device != "cuda":
            return self.compute(model, cache)
        if self.graph is None:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(WARM_UP_STEPS):
                    self.compute(model, cache)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.outputs = self.compute(model, cache)
            self.graph = graph  # only now: a capture that failed must not be replayed
        # a replay has no ranges of its own: those of its layers are passed while it is captured
        with span("eps.step", cache):
            self.graph.replay()
        assert self.outputs is not None
        return self.outputs

    @torch.inference_mode()
    def compute(self, model: Any, cache: Cache) -> Outputs:
        """Every layer, from the buffers."""
        at = self.buffers
        skipped, selections = [], []

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if self.finite is None:
                dispatch.write(cache, layer, k, v, at.slots)
            else:
                dispatch.place(cache, layer, k, v, at.slots, self.finite)
            if self.config is None:
                out, _ = attend_groups(
                    q, *cache.plain(layer), at.table, at.lengths, None, None, group_tokens=cache.store.S
                )
                return out
            out, unread, selection = attend_static(
                self.config, cache, layer, q, at.table, at.lengths, at.wanted, self.depth, self.width
            )
            skipped.append(unread)
            selections.append(selection)
            return out

        x = run_layers(model, model.embedded(at.tokens), [(at.cos, at.sin)], attention)
        visited = None
        if self.finite is not None:
            groups, counts, visit = (torch.stack([getattr(one, name) for one in selections]) for name in VISITED)
            visited = groups, counts, visit
        return Outputs(model.logits(x), torch.stack(skipped) if skipped else None, visited)


def attend_static(
    config: EpsConfig,
    cache: Cache,
    layer: int,
    q: Tensor,
    table: Tensor,
    lengths: Tensor,
    wanted: Tensor,
    depth: Depth,
    width: int,
) -> tuple[Tensor, Tensor, Selection]:
    """Return (out [B, Hq, D], estimated share left unread [B, Hkv], what was selected) of one layer's sparse attention:
    score, select and attend, from device arrays alone."""
    inner = cache.tail
    with span("eps.prepass", cache):
        estimate = dispatch.estimates(cache, layer, q, table, lengths, depth, config.read)
        groups, counts, visit = dispatch.kernels.choose(config, estimate, wanted, lengths, width)
    with span("eps.attention", cache):
        read = q, *cache.plain(layer), table, lengths, groups, counts
        if inner is None:
            out, _ = attend_groups(*read, group_tokens=cache.store.S)
        else:
            out, _ = attend_with_tail(
                *read, estimate, visit,
                inner.summaries[layer]["mean"], inner.summaries[layer]["mean_scale"], inner.valid[layer],
                group_tokens=cache.store.S, tail_tokens=cache.store.tail_tokens,
            )  # fmt: skip
    nothing = np.zeros(0, np.int64)
    selection = Selection(groups, counts, None, nothing, visit=visit.bool())
    return out, skipped_mass(Scores(estimate, None, None, nothing), selection), selection


def _static(model: Any, cache: Cache, where: Where, gated: bool, draft: bool = False) -> StaticStep:
    """The kept step for tables of at least this width, or a new one."""
    batch, num_units = where.table.shape
    config = where.config if gated else None
    bucket = BUCKET_TOKENS // cache.store.unit_tokens
    num_units = -(-num_units // bucket) * bucket
    key = (id(model), batch, num_units, config, draft)
    static = cache.steps.pop(key, None)
    if static is None or static.owner() is not model:
        static = StaticStep(model, cache, batch, num_units, config, draft)
    cache.steps[key] = static
    while len(cache.steps) > MAX_GRAPHS:
        cache.steps.pop(next(iter(cache.steps)))
    return static


def _advance(
    static: StaticStep, model: Any, cache: Cache, tokens: np.ndarray, slots: np.ndarray, where: Where
) -> Outputs:
    """Runs a step whose budget is in place."""
    if static.finite is None:
        dispatch.plan_step(cache, slots)
    else:
        for layer in range(cache.spec.num_layers):
            void(cache, layer, slots)
    ((cos, sin),) = model.angles(where.lengths - 1)
    static.fill(
        tokens=np.asarray(tokens, np.int64), slots=slots.astype(np.int32), lengths=where.lengths.astype(np.int32),
        table=where.table, cos=cos, sin=sin,
    )  # fmt: skip
    return static(model, cache)


@torch.inference_mode()
def dense_step(
    model: Any, cache: Cache, tokens: np.ndarray, slots: np.ndarray, where: Where
) -> tuple[Cache, StepOutput] | None:
    """`Decoder.step`, dense, with one wait at its end; None, and nothing done, where kernels do not cover it."""
    if not covers_dense(cache):
        return None
    static = _static(model, cache, where, gated=False)
    logits = _advance(static, model, cache, tokens, slots, where).logits.cpu().numpy()
    check_finite(cache)
    return cache, StepOutput(logits, cache.spec.num_layers * where.dense_kv_bytes(cache.spec))


@torch.inference_mode()
def step(
    model: Any, cache: Cache, tokens: np.ndarray, slots: np.ndarray, where: Where, draft: bool = False
) -> tuple[Cache, StepOutput] | None:
    """`Decoder.step`, gated, with one wait at its end; None, and nothing done, where kernels do not cover it or more
    groups are without a summary than its lists have room for: that is there for those of an open unit."""
    if not covers(cache, where):
        return None
    spec = cache.spec
    # the token of this step is written before it scores; what a draft places gets no summary
    forced = where.num_always_selected_after_write(cache.state[0], finalizes=not draft)
    static = _static(model, cache, where, gated=True, draft=draft)
    uniform = where.budget(forced)
    if int(uniform.max()) > static.width:
        return None
    static.fill(
        wanted=uniform.astype(np.int32), refined=where.refined.astype(np.int32),
        staged=np.array(where.staged(spec.head_dim), np.int32).reshape(tuple(static.buffers.staged.shape)),
    )  # fmt: skip
    outputs = _advance(static, model, cache, tokens, slots, where)
    assert outputs.mass_skipped_est is not None
    logits, unread = outputs.logits.cpu().numpy(), outputs.mass_skipped_est.cpu().numpy()
    if not draft:
        check_finite(cache)
    counts = np.repeat(uniform[:, None], spec.num_kv_heads, axis=1)
    kv_bytes, summary_bytes = where.kv_bytes(spec, int(counts.sum())), where.summary_bytes(spec)
    layers = [
        LayerStats(counts, where.ends, forced, unread[layer], kv_bytes, summary_bytes)
        for layer in range(spec.num_layers)
    ]
    selections = []
    if outputs.visited is not None:
        # the next draft's take their places
        groups, listed, visit = (one.clone() for one in outputs.visited)
        visit = visit[..., : where.num_groups]
        selections = [
            Selection(groups[layer], listed[layer], uniform, forced, visit=visit[layer])
            for layer in range(spec.num_layers)
        ]
    return cache, StepOutput(logits, kv_bytes * spec.num_layers, layers, selections=selections)
