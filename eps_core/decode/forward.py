"""The decoder: one forward pass over any backend's arithmetic, one sparse layer (`attention.sparse_attention`) in it.

Two attentions: dense and causal for a prefill chunk, sparse for a decode step. A step waits for the device once, when
its logits go to the host.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from eps_core.attention.layer import LayerRead, collect
from eps_core.attention.protocol import Array, Backend, Selection
from eps_core.attention.stats import StepOutput, VerifyOutput
from eps_core.config.cache import CacheSpec
from eps_core.config.eps import EpsConfig
from eps_core.config.selection import SelectionConfig
from eps_core.decode.layers import layers_of, run_layers
from eps_core.kv_cache.rows import Rows
from eps_core.kv_cache.step_plan import StepPlan
from eps_core.models.spec import ModelSpec


class Arithmetic(Protocol):
    """A backend's part of a loaded model: weights, and what is done to them. Letters as in `attention.protocol`."""

    spec: ModelSpec
    dtype: str
    device: str

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that one call reads, for any number of rows: all but the input embedding, of which a token
        takes one row, unless it is the output head, too."""
        ...

    @property
    def full(self) -> "Arithmetic":
        """The model with its own weights: this one, but where it is `quantised`."""
        ...

    def quantised(self, bits: int) -> "Arithmetic":
        """The model with 4-bit or 8-bit weights in its linear layers, output head included: `affine` groups or
        `symmetric` rows of `reference.quantised_weights`. It shares all else with the full one, which stays as it is.
        Raises ConfigError where the library has no such product for the device or no layer is fit for it."""
        ...

    def multiply_rows(self, name: str, factors: np.ndarray) -> None:
        """Multiplies the rows of a weight [N, ..] by factors [N] float32, which its dtype holds. To be called before
        anything is made of the weights."""
        ...

    def scope(self) -> AbstractContextManager[Any]:
        """Return where all of a call runs: a stream, inference mode."""
        ...

    def embed(self, tokens: np.ndarray) -> Array:
        """[N, hidden] of tokens [N]."""
        ...

    def rotation(self, positions: np.ndarray) -> Any:
        """Return the rotation that `project` turns q and k by at positions [N]; made once a call, for all layers."""
        ...

    def project(self, layer: int, x: Array, turn: Any) -> tuple[Array, Array, Array]:
        """q [N, Hq, D], k, v [N, Hkv, D] of x [N, hidden], as attention reads them: normed and rotated."""
        ...

    def after_attention(self, layer: int, x: Array, out: Array) -> Array:
        """The residual stream [N, hidden] after attention's out [N, Hq, D] and the layer's feed-forward block."""
        ...

    def logits(self, x: Array) -> Array:
        """[N, V] float32 of x [N, hidden]."""
        ...

    def for_rows(self, kernels: str, rows: int) -> "Arithmetic":
        """This model, or what computes a pass of so few rows faster by the kernels of that name."""
        ...

    def whole_step(
        self, cache: Any, tokens: np.ndarray, slots: np.ndarray, plan: StepPlan, sparse: bool, draft: bool, timed: bool
    ) -> tuple[Any, StepOutput] | None:
        """A decode step as one piece (a CUDA graph, or one call of a CPU's threads), or None, and nothing done, where
        there is none. A `draft` as `Decoder.step` has it; `timed` asks for the times of layers, too."""
        ...


class Decoder:
    """A loaded model on a backend. Calls return the cache, which the caller must rebind."""

    def __init__(self, backend: Backend, model: Arithmetic) -> None:
        self.backend, self.model, self.spec, self.device = backend, model, model.spec, model.device
        self.layers = self._own_layers = layers_of(backend, model.spec)  # whoever puts others here sees their calls
        self.timing = False  # whether step() fills prepass_ms and attention_ms, at the cost of three waits a layer
        # where set, called by step() in every layer with (layer, q [B, Hq, D] unscaled, as attention uses it)
        self.tap: Callable[[int, Array], None] | None = None
        # where set, called by prefill() in every layer with (cache, layer, q [N, Hq, D] as above, k [T, Hkv, D] of all
        # so far, T)
        self.watch: Callable[[Any, int, Array, Array, int], None] | None = None
        self._quantised: dict[int, Decoder] = {}

    def spec_of(self, cache: Any) -> CacheSpec:
        """Return the shape of a cache, with all kv heads of the model."""
        spec: CacheSpec = cache.spec
        return spec

    def quantised(self, bits: int | None) -> "Decoder":
        """A decoder over the same caches with quantised weights, made once; with None this one."""
        if bits is None:
            return self
        if bits not in self._quantised:
            self._quantised[bits] = Decoder(self.backend, self.model.quantised(bits))
        return self._quantised[bits]

    def prefill(
        self, cache: Any, tokens: np.ndarray, slots: np.ndarray, table: np.ndarray, length: int
    ) -> tuple[Any, np.ndarray]:
        """Dense attention of one sequence's next chunk, with full weights: tokens [N], their slots [N], table [M],
        `length` tokens in all once the chunk is written. Returns the logits after the last token, [V] float32."""
        backend, model = self.backend, self.model.full
        self._check_tokens(tokens)

        def attention(layer: int, q: Array, k: Array, v: Array) -> Array:
            nonlocal cache
            cache = backend.write_kv(cache, layer, k, v, slots)
            out = self.layers[layer].chunk(cache, q, table, length)
            if self.watch is not None:
                self.watch(cache, layer, q, backend.read_kv(cache, layer, table, length)[0], length)
            return out

        with model.scope():
            turn = model.rotation(np.arange(length - len(tokens), length))
            x = run_layers(model, model.embed(tokens), turn, attention)
            _, (logits,) = collect(backend, cache, [], model.logits(x[-1:]))
            backend.check_finite(cache)
        return cache, logits[0]

    def step(
        self,
        cache: Any,
        tokens: np.ndarray,
        slots: np.ndarray,
        table: np.ndarray,
        lengths: np.ndarray,
        selection_config: SelectionConfig | None = None,
        audit: bool = False,
        draft: bool = False,
    ) -> tuple[Any, StepOutput]:
        """One token of each of B sequences: tokens [B], slots [B], table [B, M] (padding -1), lengths [B] that count
        the new token. Sparse as `selection_config` says; dense without it, or where the cache keeps no summaries (which
        follow every write all the same). `audit` attends densely in addition: true skipped masses and dense logits; its
        reads are counted nowhere. It needs at least one token before the new one.

        A `draft` may be taken back: its K and V are placed, not written (see `Backend.write_kv_tentative`), NaN is not
        refused, and `selections` say what was selected."""
        backend, model, spec = self.backend, self.model, self.spec
        self._check_tokens(tokens)
        sparse = selection_config is not None and cache.cache_config.enabled
        if sparse:
            assert selection_config is not None
            plan = StepPlan.of(EpsConfig.over(cache.cache_config, selection_config), table, lengths)
        else:
            plan = StepPlan.dense(cache.cache_config, table, lengths)
        if not audit and self.tap is None and self.layers is self._own_layers:
            done = model.whole_step(cache, tokens, slots, plan, sparse, draft, self.timing)
            if done is not None:
                return done
        reads: list[LayerRead] = []
        clock = self._clock if self.timing else None

        def attention(layer: int, q: Array, k: Array, v: Array) -> Array:
            nonlocal cache
            cache = (backend.write_kv_tentative if draft else backend.write_kv)(cache, layer, k, v, slots)
            if self.tap is not None:
                self.tap(layer, q)
            if not sparse:
                return self.layers[layer].dense(cache, q, plan)
            out, one = self.layers[layer].sparse(cache, q, plan, audit, clock)
            reads.append(one)
            return out

        with model.scope():
            model, dense_logits = model.for_rows(cache.kernels, len(tokens)), None
            if audit:
                cache, dense_logits = self._dense_logits(model, cache, tokens, slots, plan)
            x = run_layers(model, model.embed(tokens), model.rotation(plan.lengths - 1), attention)
            selections = [one.selection for one in reads] if draft else []
            layers, (logits,) = collect(backend, cache, reads, model.logits(x))
            if not draft:
                backend.check_finite(cache)
        fallbacks = plan.fallbacks(spec.full, spec.windowed) if sparse else {}
        each = (
            (one.kv_bytes_read for one in layers)
            if sparse
            else (one.dense_kv_bytes(cache, plan) for one in self.layers)
        )
        kv_bytes = sum(each)
        return cache, StepOutput(logits, kv_bytes, layers, fallbacks, dense_logits, selections)

    def verify(
        self,
        cache: Any,
        tokens: np.ndarray,
        slots: np.ndarray,
        rows: Rows,
        drafts: Sequence[Sequence[tuple[Selection, int] | None]] = (),
    ) -> tuple[Any, VerifyOutput]:
        """Dense attention of several new tokens of each of B sequences in one pass: tokens [T] and
        their slots [T], T as in `rows`. K and V are placed; `commit` writes those that stay. `drafts`: of each layer
        and row what a draft step selected (None: everything), for the share that it left out."""
        backend, model, spec = self.backend, self.model, self.spec
        self._check_tokens(tokens)
        kv, lses, selected = [], [], []

        def attention(layer: int, q: Array, k: Array, v: Array) -> Array:
            nonlocal cache
            cache = backend.write_kv_tentative(cache, layer, k, v, slots)
            with backend.span("eps.verify", cache):
                read = self.layers[layer].rows(cache, q, rows, drafts[layer] if drafts else None)
            kv.append((k, v))
            lses.append(read.lse)
            selected.append(read.selected_lse)
            return read.out

        with model.scope():
            model = model.for_rows(cache.kernels, len(tokens))
            x = run_layers(model, model.embed(np.asarray(tokens)), model.rotation(rows.seen - 1), attention)
            logits = model.logits(x)
            unread = []
            if drafts:
                unread = [backend.unread_share(selected[layer], lses[layer], spec.num_kv_heads) for layer in spec.full]
            _, (values, *shares) = collect(backend, cache, [], logits, *unread)
        left_out = np.zeros((spec.num_layers, rows.total, spec.num_kv_heads), np.float32) if drafts else None
        for layer, share in zip(spec.full, shares, strict=bool(drafts)):
            assert left_out is not None
            left_out[layer] = share
        return cache, VerifyOutput(values, sum(one.rows_kv_bytes(cache, rows) for one in self.layers), kv, left_out)

    def commit(self, cache: Any, verified: VerifyOutput, kept: np.ndarray, slots: np.ndarray) -> Any:
        """Writes K and V of the rows `kept` [N] of a verify pass to their slots [N] again, now for good: all that
        follows from a write follows. Raises ConfigError where K is NaN or Inf."""
        backend = self.backend
        every = len(kept) == len(verified.logits) and (np.diff(kept) == 1).all()
        with self.model.scope():
            for layer, (k, v) in enumerate(verified.kv):
                k, v = (part if every else backend.take(cache, part, kept) for part in (k, v))
                cache = backend.write_kv(cache, layer, k, v, slots)
            backend.check_finite(cache)
        return cache

    def _dense_logits(
        self, model: Arithmetic, cache: Any, tokens: np.ndarray, slots: np.ndarray, plan: StepPlan
    ) -> tuple[Any, np.ndarray]:
        """(cache, logits [B, V]) of a dense step of the new tokens, whose K and V are not written yet. Computed at
        once: a pending reader would hold the cache's old buffers through the next write."""

        def attention(layer: int, q: Array, k: Array, v: Array) -> Array:
            nonlocal cache
            cache, out = self.layers[layer].before(cache, q, k, v, plan, slots)
            return out

        x = run_layers(model, model.embed(tokens), model.rotation(plan.lengths - 1), attention)
        _, (logits,) = collect(self.backend, cache, [], model.logits(x))
        return cache, logits

    def _clock(self, cache: Any, *arrays: Array) -> float:
        """Now, once everything so far is computed."""
        self.backend.wait(cache, *arrays)
        return time.perf_counter()

    def _check_tokens(self, tokens: np.ndarray) -> None:
        if len(tokens) and not 0 <= int(np.min(tokens)) <= int(np.max(tokens)) < self.spec.vocab_size:
            raise ValueError(
                f"tokens run from {np.min(tokens)} to {np.max(tokens)}: the vocabulary has 0 to "
                f"{self.spec.vocab_size - 1}"
            )


def load_decoder(
    backend: Backend, path: Path, spec: ModelSpec, dtype: str = "float32", device: str = "auto"
) -> Decoder:
    """The decoder of a Hugging Face directory. Raises ConfigError for an absent device or an unknown dtype before any
    weight is read."""
    return Decoder(backend, backend.load_model(path, spec, dtype, device))
