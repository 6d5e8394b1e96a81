"""The numpy decoder: the oracle for whole models, in float64. Slow on purpose, never optimised."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from eps_core.config.bytes import scoring_bytes
from eps_core.config.store import DTYPE_BYTES
from eps_core.decode.model import ModelSpec, inverse_frequencies, load_weights
from eps_core.errors import ConfigError
from eps_core.gate.stats import LayerStats, StepOutput
from eps_core.oracle import attend, score
from eps_core.oracle.cache import check_finite, from_numpy, read_kv, write_kv
from eps_core.paging.where import forced_groups

QUERY_BLOCK = 256  # queries that the prefill attends at a time; changes speed and memory only


class NumpyDecoder:
    """The oracle's forward pass, in float64. `dtype` is what the weights are rounded to before they are used; what
    attention reads is what lies in the cache, in the cache's dtype."""

    def __init__(self, spec: ModelSpec, weights: dict[str, np.ndarray], dtype: str = "float32") -> None:
        if dtype not in DTYPE_BYTES:
            raise ConfigError(f"dtype {dtype!r} is unknown: choose one of {', '.join(DTYPE_BYTES)}")
        self.spec, self.dtype, self.device = spec, dtype, "cpu"
        self.timing = False  # whether step() fills prepass_ms and attention_ms
        self.tap: Callable[[int, np.ndarray], None] | None = None
        self.weights = {name: from_numpy(w, dtype).astype(np.float64) for name, w in weights.items()}
        self.inverse_frequencies = inverse_frequencies(spec)

    def prefill(
        self, cache: Any, tokens: np.ndarray, slots: np.ndarray, table: np.ndarray, length: int
    ) -> tuple[Any, np.ndarray]:
        """Dense attention of one sequence's next chunk; see `gate.protocol.Decoder`."""
        positions = np.arange(length - len(tokens), length)
        x = self._embed(tokens)
        for layer in range(self.spec.num_layers):
            q, k, v = self._project(layer, x, positions)
            cache = write_kv(cache, layer, k, v, slots)
            keys, values = read_kv(cache, layer, table, length)
            x = self._feed_forward(layer, self._add_attention(layer, x, attend_causal(q, keys, values)))
        check_finite(cache)
        return cache, self._logits(x[-1:])[0]

    def step(
        self,
        cache: Any,
        tokens: np.ndarray,
        slots: np.ndarray,
        table: np.ndarray,
        lengths: np.ndarray,
        gate: bool = True,
        audit: bool = False,
    ) -> tuple[Any, StepOutput]:
        """One token of each of B sequences; see `gate.protocol.Decoder`."""
        config, spec = cache.config, self.spec
        dense_logits = self._dense_logits(cache, tokens, table, lengths) if audit else None
        x = self._embed(tokens)
        layers = []
        for layer in range(spec.num_layers):
            q, k, v = self._project(layer, x, lengths - 1)
            cache = write_kv(cache, layer, k, v, slots)
            if self.tap is not None:
                self.tap(layer, q)
            if config.enabled and gate:
                out, stats = self._attend_gated(cache, layer, q, table, lengths, audit)
                layers.append(stats)
            else:
                out, _ = attend.attend(cache, layer, q, table, lengths, None)
            x = self._feed_forward(layer, self._add_attention(layer, x, out))
        check_finite(cache)
        short = int((lengths < config.min_context).sum()) if layers else 0
        fallbacks = {"min_context": short * spec.num_layers} if short else {}
        dense_layers = sum(config.dense_layer(layer) for layer in range(spec.num_layers)) if layers else 0
        if dense_layers:
            fallbacks["dense_layer"] = dense_layers * len(lengths)
        return cache, StepOutput(self._logits(x), layers, fallbacks, dense_logits)

    def _attend_gated(
        self, cache: Any, layer: int, q: np.ndarray, table: np.ndarray, lengths: np.ndarray, audit: bool
    ) -> tuple[np.ndarray, LayerStats]:
        """(out [B, Hq, D], statistics) of one layer: score, select, attend; strict visits more until certified."""
        config, kv_heads = cache.config, self.spec.num_kv_heads
        groups = -(-lengths // config.S)
        started, kv_bytes = time.perf_counter(), cache.kv_bytes_read
        stats = LayerStats(
            counts=np.repeat(groups[:, None], kv_heads, axis=1),
            groups=groups,
            forced=np.zeros(len(lengths), np.int64),
            mass_skipped_est=np.zeros((len(lengths), kv_heads)),
            kv_bytes_read=0,
            summary_bytes_read=0,
            prepass_ms=None,
            attention_ms=None,
        )
        if config.reads_all(layer, lengths.tolist()):
            selected = started
            if not config.dense_layer(layer):
                stats.forced = forced_groups(config, lengths, int(groups.max())).sum(axis=1)
            out, lse = attend.attend(cache, layer, q, table, lengths, None)
            whole = out
            if config.has_bounds:
                stats.mass_skipped_cert = stats.output_error_cert = np.zeros((len(lengths), kv_heads))
        else:
            scores = score.score(cache, layer, q, table, lengths)
            selection = score.select(config, scores, lengths, layer)
            selected = time.perf_counter()
            out, lse = attend.attend(cache, layer, q, table, lengths, selection)
            bound_bytes = cache.bound_bytes_read
            if config.has_bounds:
                scores = score.bounds(cache, layer, q, table, lengths, scores, selection)
            if config.strict:
                extra, selection = score.escalate(config, scores, selection, lse)
                rest = attend.attend(cache, layer, q, table, lengths, extra)
                out, lse = attend.merge((out, lse), rest)
                stats.escalated = extra.counts
            if config.has_bounds:
                certificate = score.certify(cache, layer, scores, selection, out, lse)
                stats.mass_skipped_cert, stats.output_error_cert = certificate.mass, certificate.error
            whole = out
            if config.tail_tokens:
                whole, _ = attend.add_tail(cache, layer, table, lengths, scores, selection, (out, lse))
                if stats.output_error_cert is not None:
                    # the bound is of what was read alone: the tail may move away from it, or from the truth
                    moved = np.linalg.norm(whole - out, axis=2).reshape(len(lengths), kv_heads, -1).max(axis=2)
                    stats.output_error_cert = stats.output_error_cert + moved
            stats.counts, stats.forced, stats.wanted = selection.counts, selection.forced, selection.wanted
            stats.mass_skipped_est = score.skipped_mass(scores, selection)
            stats.summary_bytes_read = kv_heads * scoring_bytes(
                config, self.spec.head_dim, table.size * config.groups_per_unit, lengths
            )
            stats.summary_bytes_read += cache.bound_bytes_read - bound_bytes
        stats.kv_bytes_read = cache.kv_bytes_read - kv_bytes
        if self.timing:
            stats.prepass_ms = 1000 * (selected - started)
            stats.attention_ms = 1000 * (time.perf_counter() - selected)
        if audit:
            kv_bytes = cache.kv_bytes_read
            _, lse_all = attend.attend(cache, layer, q, table, lengths, None)
            cache.kv_bytes_read = kv_bytes
            unread = -np.expm1(np.minimum(lse - lse_all, 0)).reshape(len(lengths), kv_heads, -1)
            stats.mass_skipped_true = unread.max(axis=2)
        return whole, stats

    def _dense_logits(self, cache: Any, tokens: np.ndarray, table: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Logits [B, V] of a dense step of the new tokens, whose K and V are merged in instead of written."""
        kv_bytes, x = cache.kv_bytes_read, self._embed(tokens)
        for layer in range(self.spec.num_layers):
            q, k, v = self._project(layer, x, lengths - 1)
            before = attend.attend(cache, layer, q, table, lengths - 1, None)
            out, _ = attend.merge(before, attend.attend_own(cache, q, k, v))
            x = self._feed_forward(layer, self._add_attention(layer, x, out))
        cache.kv_bytes_read = kv_bytes
        return self._logits(x)

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


def load_model(path: Path, spec: ModelSpec, dtype: str = "float32", device: str = "cpu") -> NumpyDecoder:
    """The numpy decoder of a Hugging Face directory."""
    return NumpyDecoder(spec, load_weights(path, spec), dtype)
