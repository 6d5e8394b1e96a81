"""The decoder: Llama, Mistral, Qwen2 and Qwen3 in MLX operations over the paged cache.

One forward pass, two attentions: dense and causal for a prefill chunk, gated for a decode step. Pending state is
evaluated once per chunk or step, together with the logits: that is the only synchronisation of a step whose selection
has host-known numbers.
"""

import time
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np

from eps_core.config.bytes import scoring_bytes
from eps_core.decode.model import ModelSpec, inverse_frequencies, load_weights
from eps_core.errors import ConfigError
from eps_core.gate.stats import LayerStats, StepOutput
from eps_core.paging.where import forced_groups
from eps_mlx.attention import add_tail, attend, attend_chunk, attend_own, merge
from eps_mlx.cache import Cache, check_finite, evaluate, read_kv, write_kv
from eps_mlx.certify import bounds, certify, escalate
from eps_mlx.device import DTYPES, device_of, devices, from_numpy
from eps_mlx.score import score
from eps_mlx.selection import select, skipped_mass

Pending = dict[str, mx.array]  # fields of LayerStats that are still on the device, by name


def _fill(layers: list[LayerStats], pending: list[Pending], tile_bytes: int) -> None:
    """Brings what lay on the device, computed by now, to the host. `tile_bytes`: K and V of a group, which was read
    whole."""
    for stats, arrays in zip(layers, pending, strict=True):
        for name, array in arrays.items():
            setattr(stats, name, np.array(array))
        if "counts" in arrays:
            stats.kv_bytes_read = int(stats.counts.sum()) * tile_bytes


class Decoder:
    """A loaded model; see `gate.protocol.Decoder`. Weights and activations are in `dtype`; norms, rotation, attention
    logits and the returned logits are float32. The cache's dtype may differ."""

    def __init__(self, spec: ModelSpec, weights: dict[str, mx.array], dtype: str, device: str) -> None:
        self.spec, self.weights, self.dtype, self.device = spec, weights, dtype, device
        self.timing = False  # whether step() fills prepass_ms and attention_ms, at the cost of two waits a layer
        self.tap: Callable[[int, mx.array], None] | None = None
        self.inverse_frequencies = inverse_frequencies(spec)

    def prefill(
        self, cache: Cache, tokens: np.ndarray, slots: np.ndarray, table: np.ndarray, length: int
    ) -> tuple[Cache, np.ndarray]:
        """Dense attention of one sequence's next chunk: tokens [N], slots [N], table [M]; `length` tokens in all."""
        with mx.stream(device_of(self.device)):
            x = self._embed(tokens)
            turn = self._rotation(np.arange(length - len(tokens), length))
            for layer in range(self.spec.num_layers):
                q, k, v = self._project(layer, x, turn)
                cache = write_kv(cache, layer, k, v, slots)
                out = attend_chunk(cache, q, *read_kv(cache, layer, table, length))
                x = self._feed_forward(layer, self._add_attention(layer, x, out))
            logits = self._logits(x[-1:])
            evaluate(cache, logits)
            check_finite(cache)
            return cache, np.array(logits[0])

    def step(
        self,
        cache: Cache,
        tokens: np.ndarray,
        slots: np.ndarray,
        table: np.ndarray,
        lengths: np.ndarray,
        gate: bool = True,
        audit: bool = False,
    ) -> tuple[Cache, StepOutput]:
        """One token of each of B sequences: tokens [B], slots [B], table [B, M], lengths [B] with the new token."""
        config, spec, lengths = cache.config, self.spec, np.asarray(lengths, np.int64)
        layers: list[LayerStats] = []
        pending: list[Pending] = []
        with mx.stream(device_of(self.device)):
            dense_logits = self._dense_logits(cache, tokens, table, lengths) if audit else None
            x, turn = self._embed(tokens), self._rotation(lengths - 1)
            for layer in range(spec.num_layers):
                q, k, v = self._project(layer, x, turn)
                cache = write_kv(cache, layer, k, v, slots)
                if self.tap is not None:
                    self.tap(layer, q)
                if config.enabled and gate:
                    out, stats, arrays = self._attend_gated(cache, layer, q, table, lengths, audit)
                    layers.append(stats)
                    pending.append(arrays)
                else:
                    out, _ = attend(cache, layer, q, table, lengths, None)
                x = self._feed_forward(layer, self._add_attention(layer, x, out))
            logits = self._logits(x)
            evaluate(cache, logits, *(array for arrays in pending for array in arrays.values()))
        check_finite(cache)
        _fill(layers, pending, config.S * cache.spec.kv_token_bytes)
        short = int((lengths < config.min_context).sum()) if layers else 0
        fallbacks = {"min_context": short * spec.num_layers} if short else {}
        dense_layers = sum(config.dense_layer(layer) for layer in range(spec.num_layers)) if layers else 0
        if dense_layers:
            fallbacks["dense_layer"] = dense_layers * len(lengths)
        return cache, StepOutput(np.array(logits), layers, fallbacks, dense_logits)

    def _attend_gated(
        self, cache: Cache, layer: int, q: mx.array, table: np.ndarray, lengths: np.ndarray, audit: bool
    ) -> tuple[mx.array, LayerStats, Pending]:
        """(out [B, Hq, D], statistics, what of them still lies on the device) of one layer: score, select, attend;
        strict visits more until certified."""
        config, batch, kv_heads = cache.config, len(lengths), self.spec.num_kv_heads
        groups = -(-lengths // config.S)
        stats = LayerStats(
            counts=np.repeat(groups[:, None], kv_heads, axis=1),
            groups=groups,
            forced=np.zeros(batch, np.int64),
            mass_skipped_est=np.zeros((batch, kv_heads)),
            kv_bytes_read=0,
            summary_bytes_read=0,
            prepass_ms=None,
            attention_ms=None,
        )
        arrays: Pending = {}
        started = self._clock(cache, q)
        if config.reads_all(layer, lengths.tolist()):
            selected = started
            if not config.dense_layer(layer):
                stats.forced = forced_groups(config, lengths, int(groups.max())).sum(axis=1)
            stats.kv_bytes_read = int(lengths.sum()) * kv_heads * cache.spec.kv_token_bytes
            out, lse = attend(cache, layer, q, table, lengths, None)
            whole = out
            if config.has_bounds:
                stats.mass_skipped_cert = stats.output_error_cert = np.zeros((batch, kv_heads))
        else:
            scores = score(cache, layer, q, table, lengths)
            selection = select(config, scores, lengths, layer)
            selected = self._clock(cache, selection.groups, selection.counts)
            out, lse = attend(cache, layer, q, table, lengths, selection)
            bound_bytes = cache.bound_bytes_read
            if config.has_bounds:
                scores = bounds(cache, layer, q, table, lengths, scores, selection)
            if config.strict:
                extra, selection = escalate(config, scores, selection, lse)
                out, lse = merge((out, lse), attend(cache, layer, q, table, lengths, extra))
                arrays["escalated"] = extra.counts
            if config.has_bounds:
                certificate = certify(cache, layer, scores, selection, out, lse)
                arrays["mass_skipped_cert"] = certificate.mass
                arrays["output_error_cert"] = certificate.error
            whole = out
            if config.tail_tokens:
                whole, _ = add_tail(cache, layer, table, lengths, scores, selection, (out, lse))
                if config.has_bounds:
                    # the bound is of what was read alone: the tail may move away from it, or from the truth
                    moved = mx.linalg.norm(whole.astype(mx.float32) - out.astype(mx.float32), axis=-1)
                    moved = moved.reshape(batch, kv_heads, -1)
                    arrays["output_error_cert"] = arrays["output_error_cert"] + moved.max(axis=-1) * (1 + 2.0**-16)
            arrays["counts"], arrays["mass_skipped_est"] = selection.counts, skipped_mass(scores, selection)
            if selection.wanted is not None:
                arrays["wanted"] = selection.wanted
            stats.forced = selection.forced
            stats.summary_bytes_read = kv_heads * scoring_bytes(
                config, self.spec.head_dim, table.size * config.groups_per_unit, lengths
            )
            stats.summary_bytes_read += cache.bound_bytes_read - bound_bytes
        attended = self._clock(cache, whole, *arrays.values())
        if started is not None and selected is not None and attended is not None:
            stats.prepass_ms, stats.attention_ms = 1000 * (selected - started), 1000 * (attended - selected)
        if audit:
            kv_bytes = cache.kv_bytes_read
            _, lse_all = attend(cache, layer, q, table, lengths, None)
            cache.kv_bytes_read = kv_bytes
            # two float32 sums differ by rounding even where everything was read
            rounding = 2.0**-20 * (mx.abs(lse) + mx.abs(lse_all))
            unread = mx.where(lse_all - lse > rounding, -mx.expm1(lse - lse_all), 0)
            unread = unread.reshape(batch, kv_heads, -1)
            arrays["mass_skipped_true"] = unread.max(axis=-1)
        return whole, stats, arrays

    def _dense_logits(self, cache: Cache, tokens: np.ndarray, table: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Logits [B, V] of a dense step of the new tokens, whose K and V are merged in instead of written. Computed at
        once: a pending reader would hold the cache's old buffers through the next write."""
        kv_bytes, x, turn = cache.kv_bytes_read, self._embed(tokens), self._rotation(lengths - 1)
        for layer in range(self.spec.num_layers):
            q, k, v = self._project(layer, x, turn)
            before = attend(cache, layer, q, table, lengths - 1, None)
            out, _ = merge(before, attend_own(cache, q, k, v))
            x = self._feed_forward(layer, self._add_attention(layer, x, out))
        cache.kv_bytes_read = kv_bytes
        return np.array(self._logits(x))

    def _clock(self, cache: Cache, *arrays: mx.array) -> float | None:
        """Now, once everything so far is computed; None unless timing is on."""
        if not self.timing:
            return None
        evaluate(cache, *arrays)
        return time.perf_counter()

    def _embed(self, tokens: np.ndarray) -> mx.array:
        tokens = np.asarray(tokens)
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.spec.vocab_size:
            raise ValueError(
                f"tokens run from {tokens.min()} to {tokens.max()}: the vocabulary has 0 to {self.spec.vocab_size - 1}"
            )
        return self.weights["embed"][mx.array(tokens.astype(np.int32))]

    def _rotation(self, positions: np.ndarray) -> tuple[mx.array, mx.array]:
        """cos and sin [N, 1, D/2] float32 of every position's angles, from float64: float32 angles lose a thousandth of
        a radian at 16k tokens."""
        angles = positions[:, None, None] * self.inverse_frequencies
        return mx.array(np.cos(angles).astype(np.float32)), mx.array(np.sin(angles).astype(np.float32))

    def _linear(self, name: str, x: mx.array) -> mx.array:
        y, bias = x @ self.weights[name].T, self.weights.get(f"{name}_bias")
        return y if bias is None else y + bias

    def _norm(self, name: str, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, self.weights[name], self.spec.norm_eps)

    def _project(self, layer: int, x: mx.array, turn: tuple[mx.array, mx.array]) -> tuple[mx.array, mx.array, mx.array]:
        """q [N, Hq, D], k, v [N, Hkv, D] of x [N, hidden], as attention reads them: normed and rotated."""
        spec, prefix = self.spec, f"layers.{layer}."
        h = self._norm(prefix + "input_norm", x)
        q = self._linear(prefix + "q", h).reshape(len(x), spec.num_heads, spec.head_dim)
        k = self._linear(prefix + "k", h).reshape(len(x), spec.num_kv_heads, spec.head_dim)
        v = self._linear(prefix + "v", h).reshape(len(x), spec.num_kv_heads, spec.head_dim)
        if spec.qk_norm:
            q, k = self._norm(prefix + "q_norm", q), self._norm(prefix + "k_norm", k)
        return rotate(q, *turn), rotate(k, *turn), v

    def _add_attention(self, layer: int, x: mx.array, out: mx.array) -> mx.array:
        """The residual stream [N, hidden] after attention's out [N, Hq, D]."""
        return x + self._linear(f"layers.{layer}.o", out.reshape(len(x), -1))

    def _feed_forward(self, layer: int, x: mx.array) -> mx.array:
        prefix = f"layers.{layer}."
        h = self._norm(prefix + "post_norm", x)
        gate = self._linear(prefix + "gate", h)
        return x + self._linear(prefix + "down", gate * mx.sigmoid(gate) * self._linear(prefix + "up", h))

    def _logits(self, x: mx.array) -> mx.array:
        name = "embed" if self.spec.tie_embeddings else "lm_head"
        return self._linear(name, self._norm("norm", x)).astype(mx.float32)


def rotate(x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    """RoPE in Hugging Face's half-rotation form, in float32: x [N, H, D], cos, sin [N, 1, D/2]. Dimensions i and
    i + D/2 are a pair."""
    first, second = mx.split(x.astype(mx.float32), 2, axis=-1)
    return mx.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def load_model(path: Path, spec: ModelSpec, dtype: str = "float32", device: str = "auto") -> Decoder:
    """The decoder of a Hugging Face directory. Raises ConfigError for an absent device or an unknown dtype before any
    weight is read."""
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r} is unknown: choose one of {', '.join(DTYPES)}")
    device_of(device)
    device = devices()[-1] if device == "auto" else device
    weights = {}
    for name, array in load_weights(path, spec).items():
        weights[name] = from_numpy(array, dtype, device)
        mx.eval(weights[name])
    return Decoder(spec, weights, dtype, device)
