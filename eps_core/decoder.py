"""The numpy decoder: the oracle for whole models, in float64. Slow on purpose, never optimised."""

import time
from typing import Any

import numpy as np

from eps_core import backend
from eps_core.config import DTYPE_BYTES, ConfigError, summary_group_bytes
from eps_core.interface import LayerStats, StepOutput
from eps_core.model import ModelSpec, inverse_frequencies

QUERY_BLOCK = 256  # queries that the prefill attends at a time; changes speed and memory only


class NumpyDecoder:
    """The oracle's forward pass, in float64. `dtype` is what the weights are rounded to before they are used; what
    attention reads is what lies in the cache, in the cache's dtype."""

    def __init__(self, spec: ModelSpec, weights: dict[str, np.ndarray], dtype: str = "float32") -> None:
        if dtype not in DTYPE_BYTES:
            raise ConfigError(f"dtype {dtype!r} is unknown: choose one of {', '.join(DTYPE_BYTES)}")
        self.spec, self.dtype, self.device = spec, dtype, "cpu"
        self.timing = False  # whether step() fills prepass_ms and attention_ms
        self.weights = {name: backend.from_numpy(w, dtype).astype(np.float64) for name, w in weights.items()}
        self.inverse_frequencies = inverse_frequencies(spec)

    def prefill(
        self, cache: Any, tokens: np.ndarray, slots: np.ndarray, table: np.ndarray, length: int
    ) -> tuple[Any, np.ndarray]:
        """Dense attention of one sequence's next chunk; see `interface.Decoder`."""
        positions = np.arange(length - len(tokens), length)
        x = self._embed(tokens)
        for layer in range(self.spec.num_layers):
            q, k, v = self._project(layer, x, positions)
            cache = backend.write_kv(cache, layer, k, v, slots)
            keys, values = backend.read_kv(cache, layer, table, length)
            x = self._feed_forward(layer, self._add_attention(layer, x, attend_causal(q, keys, values)))
        backend.check_finite(cache)
        return cache, self._logits(x[-1:])[0]

    def step(
        self, cache: Any, tokens: np.ndarray, slots: np.ndarray, table: np.ndarray, lengths: np.ndarray
    ) -> tuple[Any, StepOutput]:
        """One token of each of B sequences; see `interface.Decoder`."""
        config, spec = cache.config, self.spec
        x = self._embed(tokens)
        layers = []
        for layer in range(spec.num_layers):
            q, k, v = self._project(layer, x, lengths - 1)
            cache = backend.write_kv(cache, layer, k, v, slots)
            started, kv_bytes = time.perf_counter(), cache.kv_bytes_read
            selection = None
            if config.enabled:
                scores = backend.score(cache, layer, q, table, lengths)
                selection = backend.select(config, scores, lengths)
            selected = time.perf_counter()
            out, _ = backend.attend(cache, layer, q, table, lengths, selection)
            attended = time.perf_counter()
            x = self._feed_forward(layer, self._add_attention(layer, x, out))
            if selection is not None:
                groups = -(-lengths // config.S)
                group_bytes = spec.num_kv_heads * summary_group_bytes(config, spec.head_dim)
                layers.append(
                    LayerStats(
                        counts=selection.counts,
                        groups=groups,
                        forced=selection.forced,
                        mass_skipped_est=backend.skipped_mass(scores, selection),
                        kv_bytes_read=cache.kv_bytes_read - kv_bytes,
                        summary_bytes_read=table.size * config.groups_per_unit * group_bytes,
                        prepass_ms=1000 * (selected - started) if self.timing else None,
                        attention_ms=1000 * (attended - selected) if self.timing else None,
                        wanted=selection.wanted,
                    )
                )
        backend.check_finite(cache)
        short = int((lengths < config.min_context).sum()) if config.enabled else 0
        fallbacks = {"min_context": short * spec.num_layers} if short else {}
        return cache, StepOutput(self._logits(x), layers, fallbacks)

    def _embed(self, tokens: np.ndarray) -> np.ndarray:
        if len(tokens) and not 0 <= int(np.min(tokens)) <= int(np.max(tokens)) < self.spec.vocab_size:
            raise ValueError(f"token {int(np.max(tokens))} is outside the vocabulary of {self.spec.vocab_size}")
        return self.weights["embed"][tokens]

    def _linear(self, name: str, x: np.ndarray) -> np.ndarray:
        y = x @ self.weights[name].T
        bias = self.weights.get(f"{name}_bias")
        return y if bias is None else y + bias

    def _norm(self, name: str, x: np.ndarray) -> np.ndarray:
        """RMSNorm over the last axis."""
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + self.spec.norm_eps) * self.weights[name]

    def _project(self, layer: int, x: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """q [N, Hq, D], k, v [N, Hkv, D] of x [N, hidden], as attention reads them: normed and rotated."""
        spec, prefix = self.spec, f"layers.{layer}."
        h = self._norm(prefix + "input_norm", x)
        q = self._linear(prefix + "q", h).reshape(len(x), spec.num_heads, spec.head_dim)
        k = self._linear(prefix + "k", h).reshape(len(x), spec.num_kv_heads, spec.head_dim)
        v = self._linear(prefix + "v", h).reshape(len(x), spec.num_kv_heads, spec.head_dim)
        if spec.qk_norm:
            q, k = self._norm(prefix + "q_norm", q), self._norm(prefix + "k_norm", k)
        angles = positions[:, None] * self.inverse_frequencies
        return rotate(q, angles), rotate(k, angles), v

    def _add_attention(self, layer: int, x: np.ndarray, out: np.ndarray) -> np.ndarray:
        """The residual stream [N, hidden] after attention's out [N, Hq, D]."""
        return x + self._linear(f"layers.{layer}.o", out.reshape(len(x), -1))

    def _feed_forward(self, layer: int, x: np.ndarray) -> np.ndarray:
        prefix = f"layers.{layer}."
        h = self._norm(prefix + "post_norm", x)
        gate = self._linear(prefix + "gate", h)
        silu = gate * 0.5 * (1.0 + np.tanh(gate / 2))  # x sigmoid(x), without its overflow
        return x + self._linear(prefix + "down", silu * self._linear(prefix + "up", h))

    def _logits(self, x: np.ndarray) -> np.ndarray:
        name = "embed" if self.spec.tie_embeddings else "lm_head"
        return self._linear(name, self._norm("norm", x)).astype(np.float32)


def rotate(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """RoPE in Hugging Face's half-rotation form: x [N, H, D], angles [N, D/2] in radians. Dimensions i and i + D/2
    are a pair."""
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def attend_causal(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """out [N, Hq, D] of the last N of T tokens, each over itself and all before it: q [N, Hq, D], k, v [T, Hkv, D]."""
    num_queries, num_heads, head_dim = q.shape
    length, num_kv_heads, _ = k.shape
    repeat = num_heads // num_kv_heads
    out = np.empty_like(q)
    for head in range(num_kv_heads):
        keys, values = k[:, head].astype(np.float64), v[:, head].astype(np.float64)
        heads = slice(head * repeat, (head + 1) * repeat)
        for start in range(0, num_queries, QUERY_BLOCK):
            block = q[start : start + QUERY_BLOCK, heads].swapaxes(0, 1) / np.sqrt(head_dim)  # [R, n, D]
            positions = length - num_queries + start + np.arange(block.shape[1])
            seen = positions[-1] + 1
            logits = block @ keys[:seen].T
            logits[:, np.arange(seen) > positions[:, None]] = -np.inf
            weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            out[start : start + QUERY_BLOCK, heads] = (weights @ values[:seen]).swapaxes(0, 1)
    return out
