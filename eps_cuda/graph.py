"""A whole decode step over device buffers at fixed addresses: no host value, no wait, no shape that depends on what is
kept. On CUDA it is captured once per (batch, table width) as a CUDA graph and replayed; elsewhere it runs as it is.

What changes from step to step goes through `Buffers`, one small copy each. The step is idempotent (it writes the same
rows again), so the warm-up that a capture needs leaves the cache as one step would.
"""

import math
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from eps_core.config.bytes import scoring_bytes
from eps_core.gate.protocol import Scores, Selection
from eps_core.gate.stats import LayerStats, StepOutput
from eps_core.paging.where import budget, forced_groups, missing_groups
from eps_cuda.cache import Cache, check_finite
from eps_cuda.kernels import dispatch
from eps_cuda.kernels.attend import attend_groups
from eps_cuda.kernels.tail import attend_with_tail
from eps_cuda.nvtx import span
from eps_cuda.selection import skipped_mass

if TYPE_CHECKING:
    from eps_cuda.model import Decoder

BUCKET_TOKENS = 4096  # tables are padded to whole multiples, so that a graph serves this many steps
MAX_GRAPHS = 4  # of one cache; the oldest goes first
WARM_UP_STEPS = 3


@dataclass(frozen=True)
class Buffers:
    """What a step reads besides weights and cache. B sequences, M units of the padded table."""

    tokens: Tensor  # [B] int64
    slots: Tensor  # [B] int32
    lengths: Tensor  # [B] int32
    wanted: Tensor  # [B] int32 groups that each kv head visits
    refined: Tensor  # [B] int32 groups whose second bit is read
    table: Tensor  # [B, M] int32
    cos: Tensor  # [B, 1, D/2] float32
    sin: Tensor


@dataclass
class Outputs:
    """Results of a step, overwritten by the next one."""

    logits: Tensor  # [B, V] float32
    mass_skipped_est: Tensor | None  # [L, B, Hkv] of a gated step


def covers(cache: Cache, lengths: np.ndarray) -> bool:
    """Whether such a gated step exists: topk of rq, its centre found, without bounds, strict mode or head modes."""
    config = cache.config
    return (
        cache.kernels == "triton"
        and config.policy == "topk"
        and config.scope == "kv-head"
        and not config.has_bounds
        and not config.head_modes
        and cache.tail is not None
        and int(lengths.min()) >= config.min_context
        and not config.reads_all(0, lengths.tolist())
        and all(dispatch.covers_scoring(cache, layer) for layer in range(cache.spec.num_layers))
    )


def covers_dense(cache: Cache) -> bool:
    """Whether such a dense step exists: wherever one kernel writes what a step adds."""
    return cache.kernels == "triton" and all(
        dispatch.covers_writing(cache, layer) for layer in range(cache.spec.num_layers)
    )


class StaticStep:
    """The step of one cache for B sequences and tables of up to `num_units` units, gated or dense."""

    def __init__(self, decoder: "Decoder", cache: Cache, batch: int, num_units: int, gated: bool) -> None:
        config, device = cache.config, cache.device
        self.gated = gated
        # neither is held: the cache holds its steps, and a ring of the two would outlive both
        self.owner = weakref.ref(decoder)
        most_tokens = num_units * config.unit_tokens
        guards = -(-config.first_tokens // config.S) - (-config.last_tokens // config.S) + 2
        # a budget in tokens rounds up where it covers a sequence
        covering = math.ceil(config.budget / config.S) if config.budget > 1 else 0
        self.width = min(max(config.budget_groups(most_tokens), covering, guards), most_tokens // config.S)
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
            refined=integers(batch),
            table=integers(batch, num_units),
            cos=angles(),
            sin=angles(),
        )
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
    def __call__(self, decoder: "Decoder", cache: Cache) -> Outputs:
        if cache.device != "cuda":
            return self.compute(decoder, cache)
        if self.graph is None:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(WARM_UP_STEPS):
                    self.compute(decoder, cache)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.outputs = self.compute(decoder, cache)
            self.graph = graph  # only now: a capture that failed must not be replayed
        # a replay has no ranges of its own: those of its layers are passed while it is captured
        with span("eps.step", cache.device):
            self.graph.replay()
        assert self.outputs is not None
        return self.outputs

    @torch.inference_mode()
    def compute(self, decoder: "Decoder", cache: Cache) -> Outputs:
        """Every layer, from the buffers."""
        at = self.buffers
        x = decoder.weights["embed"][at.tokens]
        skipped = []
        for layer in range(cache.spec.num_layers):
            q, k, v = decoder._project(layer, x, (at.cos, at.sin))
            dispatch.write(cache, layer, k, v, at.slots)
            if self.gated:
                out, unread = attend_layer(
                    cache, layer, q, at.table, at.lengths, at.wanted, at.refined, self.width, self.most_refined
                )
                skipped.append(unread)
            else:
                out, _ = attend_groups(
                    q, cache.k[layer], cache.v[layer], at.table, at.lengths, None, None, group_tokens=cache.config.S
                )
            x = decoder._feed_forward(layer, decoder._add_attention(layer, x, out))
        return Outputs(decoder._logits(x), torch.stack(skipped) if skipped else None)


def attend_layer(
    cache: Cache,
    layer: int,
    q: Tensor,
    table: Tensor,
    lengths: Tensor,
    wanted: Tensor,
    refined: Tensor,
    width: int,
    most_refined: int,
) -> tuple[Tensor, Tensor]:
    """(out [B, Hq, D], estimated share left unread [B, Hkv]) of one layer's gated attention with its tail: score,
    select and attend, from device arrays alone."""
    inner = cache.tail
    assert inner is not None
    with span("eps.prepass", cache.device):
        estimate = dispatch.estimates(cache, layer, q, table, lengths, refined, most_refined)
        groups, counts, visit = dispatch.choose(cache.config, estimate, wanted, lengths, width)
    with span("eps.attention", cache.device):
        out, _ = attend_with_tail(
            q, cache.k[layer], cache.v[layer], table, lengths, groups, counts, estimate, visit,
            inner.summaries[layer]["mean"], inner.summaries[layer]["mean_scale"], inner.valid[layer],
            group_tokens=cache.config.S, tail_tokens=cache.config.tail_tokens,
        )  # fmt: skip
    nothing = np.zeros(0, np.int64)
    selection = Selection(groups, counts, None, nothing, visit=visit.bool())
    return out, skipped_mass(Scores(estimate, None, None, nothing), selection)


def _static(decoder: "Decoder", cache: Cache, batch: int, num_units: int, gated: bool) -> StaticStep:
    """The kept step for tables of `num_units`, or a new one."""
    bucket = BUCKET_TOKENS // cache.config.unit_tokens
    num_units = -(-num_units // bucket) * bucket
    key = (id(decoder), batch, num_units, gated)
    static = cache.steps.pop(key, None)
    if static is None or static.owner() is not decoder:
        static = StaticStep(decoder, cache, batch, num_units, gated)
    cache.steps[key] = static
    while len(cache.steps) > MAX_GRAPHS:
        cache.steps.pop(next(iter(cache.steps)))
    return static


def _advance(
    static: StaticStep, decoder: "Decoder", cache: Cache, tokens: np.ndarray, slots: np.ndarray, table: np.ndarray,
    lengths: np.ndarray,
) -> Outputs:  # fmt: skip
    """Runs a step whose budget is in place."""
    dispatch.plan_step(cache, slots)
    cos, sin = decoder.angles(lengths - 1)
    static.fill(
        tokens=np.asarray(tokens, np.int64), slots=slots.astype(np.int32), lengths=lengths.astype(np.int32),
        table=table, cos=cos, sin=sin,
    )  # fmt: skip
    return static(decoder, cache)


@torch.inference_mode()
def dense_step(
    decoder: "Decoder", cache: Cache, tokens: np.ndarray, slots: np.ndarray, table: np.ndarray, lengths: np.ndarray
) -> tuple[Cache, StepOutput]:
    """`Decoder.step`, dense, with one wait at its end."""
    static = _static(decoder, cache, len(lengths), table.shape[1], gated=False)
    logits = _advance(static, decoder, cache, tokens, slots, table, lengths).logits.cpu().numpy()
    check_finite(cache)
    spec = cache.spec
    cache.count_read(spec.num_layers * int(lengths.sum()) * spec.num_kv_heads * spec.kv_token_bytes)
    return cache, StepOutput(logits, [])


@torch.inference_mode()
def step(
    decoder: "Decoder", cache: Cache, tokens: np.ndarray, slots: np.ndarray, table: np.ndarray, lengths: np.ndarray
) -> tuple[Cache, StepOutput] | None:
    """`Decoder.step`, gated, with one wait at its end; None, and nothing done, where groups are without a summary."""
    config, spec, batch = cache.config, cache.spec, len(lengths)
    groups = table.shape[1] * config.groups_per_unit
    # what this step writes belongs to the open group, or seals it: a guard covers both
    missing = missing_groups(config, cache.state[0], table, lengths, can_encode=True)
    written = np.arange(groups) == ((lengths - 1) // config.S)[:, None]
    if (missing & ~written & ~forced_groups(config, lengths, groups)).any():
        return None
    static = _static(decoder, cache, batch, table.shape[1], gated=True)
    # the token of this step is written before it scores: a group that it fills is full, not open
    forced = forced_groups(config, lengths, groups).sum(axis=1)
    uniform = budget(config, forced, lengths)
    if int(uniform.max()) > static.width:
        return None
    refined = np.array([config.refined_groups(int(length)) for length in lengths])
    static.fill(wanted=uniform.astype(np.int32), refined=refined.astype(np.int32))
    outputs = _advance(static, decoder, cache, tokens, slots, table, lengths)
    assert outputs.mass_skipped_est is not None
    logits, unread = outputs.logits.cpu().numpy(), outputs.mass_skipped_est.cpu().numpy()
    check_finite(cache)
    counts = np.repeat(uniform[:, None], spec.num_kv_heads, axis=1)
    tile_bytes = config.S * spec.kv_token_bytes
    summary_bytes = spec.num_kv_heads * scoring_bytes(config, spec.head_dim, groups * batch, lengths)
    layers = [
        LayerStats(
            counts,
            -(-lengths // config.S),
            forced,
            unread[layer],
            int(counts.sum()) * tile_bytes,
            summary_bytes,
            None,
            None,
        )
        for layer in range(spec.num_layers)
    ]
    cache.count_read(sum(stats.kv_bytes_read for stats in layers))
    return cache, StepOutput(logits, layers)
