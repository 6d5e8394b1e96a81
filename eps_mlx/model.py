"""The decoder: Llama, Mistral, Qwen2 and Qwen3 in MLX operations over the paged cache.

One forward pass, two attentions: dense and causal for a prefill chunk, gated for a decode step. Pending state is
evaluated once per chunk or step, together with the logits: that is the only synchronisation of a step whose selection
has host-known numbers.
"""

import time
from pathlib import Path

import mlx.core as mx
import numpy as np

from eps_core.config import ConfigError, summary_group_bytes
from eps_core.interface import LayerStats, Selection, StepOutput
from eps_core.model import ModelSpec, inverse_frequencies, load_weights
from eps_mlx.attention import attend, attend_chunk
from eps_mlx.cache import DTYPES, Cache, check_finite, device_of, devices, evaluate, from_numpy, read_kv, write_kv
from eps_mlx.selection import select, skipped_mass
from eps_mlx.summaries import score


class Decoder:
    """A loaded model; see `interface.Decoder`. Weights and activations are in `dtype`; norms, rotation, attention
    logits and the returned logits are float32. The cache's dtype may differ."""

    def __init__(self, spec: ModelSpec, weights: dict[str, mx.array], dtype: str, device: str) -> None:
        self.spec, self.weights, self.dtype, self.device = spec, weights, dtype, device
        self.timing = False  # whether step() fills prepass_ms and attention_ms, at the cost of two waits a layer
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
        self, cache: Cache, tokens: np.ndarray, slots: np.ndarray, table: np.ndarray, lengths: np.ndarray
    ) -> tuple[Cache, StepOutput]:
        """One token of each of B sequences: tokens [B], slots [B], table [B, M], lengths [B] with the new token."""
        config, spec, lengths = cache.config, self.spec, np.asarray(lengths, np.int64)
        groups = -(-lengths // config.S)
        group_bytes = spec.num_kv_heads * summary_group_bytes(config, spec.head_dim)
        layers, device_stats = [], []
        with mx.stream(device_of(self.device)):
            x, turn = self._embed(tokens), self._rotation(lengths - 1)
            for layer in range(spec.num_layers):
                q, k, v = self._project(layer, x, turn)
                cache = write_kv(cache, layer, k, v, slots)
                kv_bytes = cache.kv_bytes_read
                started = self._clock(cache, q)
                selection: Selection | None = None
                if config.enabled:
                    scores = score(cache, layer, q, table, lengths)
                    selection = select(config, scores, lengths)
                    stats = [selection.counts, skipped_mass(scores, selection)]
                    device_stats.append(stats if selection.wanted is None else [*stats, selection.wanted])
                selected = self._clock(cache, *(() if selection is None else (selection.groups, selection.counts)))
                out, _ = attend(cache, layer, q, table, lengths, selection)
                attended = self._clock(cache, out)
                x = self._feed_forward(layer, self._add_attention(layer, x, out))
                if selection is not None:
                    layers.append(
                        LayerStats(
                            counts=np.zeros(0),
                            groups=groups,
                            forced=selection.forced,
                            mass_skipped_est=None,
                            kv_bytes_read=cache.kv_bytes_read - kv_bytes,
                            summary_bytes_read=table.size * config.groups_per_unit * group_bytes,
                            prepass_ms=None if started is None or selected is None else 1000 * (selected - started),
                            attention_ms=None if selected is None or attended is None else 1000 * (attended - selected),
                        )
                    )
            logits = self._logits(x)
            evaluate(cache, logits, *(array for arrays in device_stats for array in arrays))
        check_finite(cache)
        for found, (counts, skipped, *wanted) in zip(layers, device_stats, strict=True):
            found.counts, found.mass_skipped_est = np.array(counts), np.array(skipped)
            found.wanted = np.array(wanted[0]) if wanted else None
        short = int((lengths < config.min_context).sum()) if config.enabled else 0
        fallbacks = {"min_context": short * spec.num_layers} if short else {}
        return cache, StepOutput(np.array(logits), layers, fallbacks)

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
