"""The decoder: one forward pass over any backend's arithmetic, and one gated layer (`gate.attend_layer`) in it.

Two attentions: dense and causal for a prefill chunk, gated for a decode step. A step waits for the device once, when
its logits go to the host.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from eps_core.config.eps import EpsConfig
from eps_core.config.read import Read
from eps_core.config.store import CacheSpec
from eps_core.decode.layers import layers_of, run_layers
from eps_core.gate.attend import LayerRead, collect
from eps_core.gate.protocol import Array, Backend, Selection
from eps_core.gate.stats import StepOutput, VerifyOutput
from eps_core.models.spec import ModelSpec
from eps_core.paging.rows import Rows
from eps_core.paging.where import Where


class Arithmetic(Protocol):
    """A backend's part of a loaded model: weights, and what is done to them. Letters as in `gate.protocol`."""

    spec: ModelSpec
    dtype: str
    device: str

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that one call reads, for any number of rows: all but the input embedding, of which a token
        takes one row, unless it is the output head, too."""
        ...

    def quantised(self) -> "Arithmetic":
        """The model with 4-bit weights in its linear layers, output head included, for drafts: affine groups rounded to
        nearest (`decode.draft_weights`, `oracle.draft_weights.affine`). It shares all else with this one, which stays
        as it is. Raises ConfigError where the library has no such product for the device or no layer is fit for it."""
        ...

    def scope(self) -> AbstractContextManager[Any]:
        """Where all of a call runs: a stream, inference mode."""
        ...

    def embed(self, tokens: np.ndarray) -> Array:
        """[N, hidden] of tokens [N]."""
        ...

    def rotation(self, positions: np.ndarray) -> Any:
        """What `project` turns q and k by at positions [N]; made once a call, for all layers."""
        ...

    def project(self, layer: int, x: Array, turn: Any) -> tuple[Array, Array, Array]:
        """q [N, Hq, D], k, v [N, Hkv, D] of x [N, hidden], as attention reads them: normed and rotated."""
        ...

    def add_attention(self, layer: int, x: Array, out: Array) -> Array:
        """The residual stream [N, hidden] after attention's out [N, Hq, D]."""
        ...

    def feed_forward(self, layer: int, x: Array) -> Array:
        """The residual stream [N, hidden] after the layer's feed-forward block."""
        ...

    def logits(self, x: Array) -> Array:
        """[N, V] float32 of x [N, hidden]."""
        ...

    def whole_step(
        self, cache: Any, tokens: np.ndarray, slots: np.ndarray, where: Where, gated: bool, draft: bool
    ) -> tuple[Any, StepOutput] | None:
        """A decode step as one piece (a CUDA graph), or None, and nothing done, where there is none. A `draft` as
        `Decoder.step` has it."""
        ...


class Decoder:
    """A loaded model on a backend. Calls return the cache, which the caller must rebind."""

    def __init__(self, eps: Backend, model: Arithmetic) -> None:
        self.eps, self.model, self.spec, self.device = eps, model, model.spec, model.device
        self.layers = layers_of(eps, model.spec)
        self.timing = False  # whether step() fills prepass_ms and attention_ms, at the cost of three waits a layer
        # where set, called by step() in every layer with (layer, q [B, Hq, D] unscaled, as attention uses it)
        self.tap: Callable[[int, Array], None] | None = None
        # where set, called by prefill() in every layer with (cache, layer, q [N, Hq, D] as above, k [T, Hkv, D] of all
        # so far, T)
        self.watch: Callable[[Any, int, Array, Array, int], None] | None = None
        self._drafter: Decoder | None = None

    def spec_of(self, cache: Any) -> CacheSpec:
        """Return the shape of a cache, with all kv heads of the model."""
        spec: CacheSpec = cache.spec
        return spec

    def drafter(self) -> "Decoder":
        """A decoder over the same caches with quantised weights, made once."""
        if self._drafter is None:
            self._drafter = Decoder(self.eps, self.model.quantised())
        return self._drafter

    def prefill(
        self, cache: Any, tokens: np.ndarray, slots: np.ndarray, table: np.ndarray, length: int
    ) -> tuple[Any, np.ndarray]:
        """Dense attention of one sequence's next chunk: tokens [N], their slots [N], table [M], `length` tokens in all
        once the chunk is written. Returns the logits after the last token, [V] float32."""
        eps, model = self.eps, self.model
        self._check_tokens(tokens)

        def attention(layer: int, q: Array, k: Array, v: Array) -> Array:
            nonlocal cache
            cache = eps.write_kv(cache, layer, k, v, slots)
            keys, values = eps.read_kv(cache, layer, table, length)
            out = self.layers[layer].chunk(cache, q, keys, values)
            if self.watch is not None:
                self.watch(cache, layer, q, keys, length)
            return out

        with model.scope():
            turn = model.rotation(np.arange(length - len(tokens), length))
            x = run_layers(model, model.embed(tokens), turn, attention)
            _, (logits,) = collect(eps, cache, [], model.logits(x[-1:]))
            eps.check_finite(cache)
        return cache, logits[0]

    def step(
        self,
        cache: Any,
        tokens: np.ndarray,
        slots: np.ndarray,
        table: np.ndarray,
        lengths: np.ndarray,
        read: Read | None = None,
        audit: bool = False,
        draft: bool = False,
    ) -> tuple[Any, StepOutput]:
        """One token of each of B sequences: tokens [B], slots [B], table [B, M] (padding -1), lengths [B] that count
        the new token. Gated as `read` says; dense without it, or where the cache keeps no summaries (which follow every
        write all the same). `audit` attends densely in addition: true skipped masses and dense logits; its reads are
        counted nowhere. It needs at least one token before the new one.

        A `draft` may be taken back: its K and V are placed, not written (see `Backend.place_kv`), NaN is not refused,
        and `selections` say what was visited."""
        eps, model, spec = self.eps, self.model, self.spec
        self._check_tokens(tokens)
        gated = read is not None and cache.store.enabled
        if gated:
            assert read is not None
            where = Where.of(EpsConfig.over(cache.store, read), table, lengths)
        else:
            where = Where.dense(cache.store, table, lengths)
        if not audit and not self.timing and self.tap is None:
            done = model.whole_step(cache, tokens, slots, where, gated, draft)
            if done is not None:
                return done
        reads: list[LayerRead] = []
        clock = self._clock if self.timing else None

        def attention(layer: int, q: Array, k: Array, v: Array) -> Array:
            nonlocal cache
            cache = (eps.place_kv if draft else eps.write_kv)(cache, layer, k, v, slots)
            if self.tap is not None:
                self.tap(layer, q)
            if not gated:
                return self.layers[layer].dense(cache, q, where)
            out, one = self.layers[layer].sparse(cache, q, where, audit, clock)
            reads.append(one)
            return out

        with model.scope():
            dense_logits = None
            if audit:
                cache, dense_logits = self._dense_logits(cache, tokens, slots, where)
            x = run_layers(model, model.embed(tokens), model.rotation(where.lengths - 1), attention)
            selections = [one.selection for one in reads] if draft else []
            layers, (logits,) = collect(eps, cache, reads, model.logits(x))
            if not draft:
                eps.check_finite(cache)
        fallbacks = where.fallbacks(spec.full, spec.windowed) if gated else {}
        each = (
            (one.kv_bytes_read for one in layers)
            if gated
            else (one.dense_kv_bytes(cache, where) for one in self.layers)
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
        and row what a draft step visited (None: everything), for the share that it left out."""
        eps, model, spec = self.eps, self.model, self.spec
        self._check_tokens(tokens)
        kv, lses, visited = [], [], []

        def attention(layer: int, q: Array, k: Array, v: Array) -> Array:
            nonlocal cache
            cache = eps.place_kv(cache, layer, k, v, slots)
            with eps.span("eps.verify", cache):
                read = self.layers[layer].rows(cache, q, rows, drafts[layer] if drafts else None)
            kv.append((k, v))
            lses.append(read.lse)
            visited.append(read.visited_lse)
            return read.out

        with model.scope():
            x = run_layers(model, model.embed(np.asarray(tokens)), model.rotation(rows.seen - 1), attention)
            logits = model.logits(x)
            unread = []
            if drafts:
                unread = [eps.unread_share(visited[layer], lses[layer], spec.num_kv_heads) for layer in spec.full]
            _, (values, *shares) = collect(eps, cache, [], logits, *unread)
        left_out = np.zeros((spec.num_layers, rows.total, spec.num_kv_heads), np.float32) if drafts else None
        for layer, share in zip(spec.full, shares, strict=bool(drafts)):
            assert left_out is not None
            left_out[layer] = share
        return cache, VerifyOutput(values, sum(one.rows_kv_bytes(cache, rows) for one in self.layers), kv, left_out)

    def commit(self, cache: Any, verified: VerifyOutput, kept: np.ndarray, slots: np.ndarray) -> Any:
        """Writes K and V of the rows `kept` [N] of a verify pass to their slots [N] again, now for good: all that
        follows from a write follows. Raises ConfigError where K is NaN or Inf."""
        eps = self.eps
        every = len(kept) == len(verified.logits) and (np.diff(kept) == 1).all()
        with self.model.scope():
            for layer, (k, v) in enumerate(verified.kv):
                k, v = (part if every else eps.take(cache, part, kept) for part in (k, v))
                cache = eps.write_kv(cache, layer, k, v, slots)
            eps.check_finite(cache)
        return cache

    def _dense_logits(self, cache: Any, tokens: np.ndarray, slots: np.ndarray, where: Where) -> tuple[Any, np.ndarray]:
        """(cache, logits [B, V]) of a dense step of the new tokens, whose K and V are not written yet. Computed at
        once: a pending reader would hold the cache's old buffers through the next write."""
        model = self.model

        def attention(layer: int, q: Array, k: Array, v: Array) -> Array:
            nonlocal cache
            cache, out = self.layers[layer].before(cache, q, k, v, where, slots)
            return out

        x = run_layers(model, model.embed(tokens), model.rotation(where.lengths - 1), attention)
        _, (logits,) = collect(self.eps, cache, [], model.logits(x))
        return cache, logits

    def _clock(self, cache: Any, *arrays: Array) -> float:
        """Now, once everything so far is computed."""
        self.eps.wait(cache, *arrays)
        return time.perf_counter()

    def _check_tokens(self, tokens: np.ndarray) -> None:
        if len(tokens) and not 0 <= int(np.min(tokens)) <= int(np.max(tokens)) < self.spec.vocab_size:
            raise ValueError(
                f"tokens run from {np.min(tokens)} to {np.max(tokens)}: the vocabulary has 0 to "
                f"{self.spec.vocab_size - 1}"
            )


def load_decoder(eps: Backend, path: Path, spec: ModelSpec, dtype: str = "float32", device: str = "auto") -> Decoder:
    """The decoder of a Hugging Face directory. Raises ConfigError for an absent device or an unknown dtype before any
    weight is read."""
    return Decoder(eps, eps.load_model(path, spec, dtype, device))
