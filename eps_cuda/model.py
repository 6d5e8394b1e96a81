"""The decoder: Llama, Mistral, Qwen2 and Qwen3 in Torch operations over the paged cache.

One forward pass, two attentions: dense and causal for a prefill chunk, gated for a decode step. A step whose selection
has host-known numbers synchronises once, when its logits go to the host.
"""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from eps_core.config.bytes import scoring_bytes
from eps_core.decode.model import ModelSpec, inverse_frequencies, load_weights
from eps_core.errors import ConfigError
from eps_core.gate.stats import LayerStats, StepOutput
from eps_core.paging.where import forced_groups
from eps_cuda.attention import add_tail, attend, attend_chunk, attend_own, merge
from eps_cuda.cache import Cache, check_finite, read_kv, write_kv
from eps_cuda.certify import bounds, certify, escalate
from eps_cuda.device import DTYPES, device_of, from_numpy
from eps_cuda.nvtx import span
from eps_cuda.score import score
from eps_cuda.selection import select, skipped_mass

Pending = dict[str, Tensor]  # fields of LayerStats that are still on the device, by name


def _fill(layers: list[LayerStats], pending: list[Pending], tile_bytes: int) -> None:
    """Brings what lies on the device to the host, one field of all layers at a time. `tile_bytes`: K and V of a group,
    which was read whole."""
    for name in {name: None for arrays in pending for name in arrays}:
        having = [(stats, arrays[name]) for stats, arrays in zip(layers, pending, strict=True) if name in arrays]
        values = torch.stack([array for _, array in having]).cpu().numpy()
        for (stats, _), value in zip(having, values, strict=True):
            setattr(stats, name, value)
    for stats, arrays in zip(layers, pending, strict=True):
        if "counts" in arrays:
            stats.kv_bytes_read = int(stats.counts.sum()) * tile_bytes


class Decoder:
    """A loaded model; see `gate.protocol.Decoder`. Weights and activations are in `dtype`; norms, rotation, attention
    logits and the returned logits are float32. The cache's dtype may differ."""

    def __init__(self, spec: ModelSpec, weights: dict[str, Tensor], dtype: str, device: str) -> None:
        self.spec, self.weights, self.dtype, self.device = spec, weights, dtype, device
        self.timing = False  # whether step() fills prepass_ms and attention_ms, at the cost of three waits a layer
        self.tap: Callable[[int, Tensor], None] | None = None
        self.inverse_frequencies = inverse_frequencies(spec)

    @torch.inference_mode()
    def prefill(
        self, cache: Cache, tokens: np.ndarray, slots: np.ndarray, table: np.ndarray, length: int
    ) -> tuple[Cache, np.ndarray]:
        """Dense attention of one sequence's next chunk: tokens [N], slots [N], table [M]; `length` tokens in all."""
        x = self._embed(tokens)
        turn = self._rotation(np.arange(length - len(tokens), length))
        for layer in range(self.spec.num_layers):
            q, k, v = self._project(layer, x, turn)
            cache = write_kv(cache, layer, k, v, slots)
            out = attend_chunk(q, *read_kv(cache, layer, table, length))
            x = self._feed_forward(layer, self._add_attention(layer, x, out))
        check_finite(cache)
        return cache, self._logits(x[-1:])[0].cpu().numpy()

    @torch.inference_mode()
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
        if cache.kernels == "triton" and not audit and not self.timing and self.tap is None:
            from eps_cuda import graph  # imports Triton, which only these kernels need

            self._check_tokens(tokens)
            if not (config.enabled and gate):
                if graph.covers_dense(cache):
                    return graph.dense_step(self, cache, tokens, slots, np.asarray(table), lengths)
            elif graph.covers(cache, lengths):
                done = graph.step(self, cache, tokens, slots, np.asarray(table), lengths)
                if done is not None:
                    return done
        dense_logits = self._dense_logits(cache, tokens, table, lengths) if audit else None
        x, turn = self._embed(tokens), self._rotation(lengths - 1)
        layers: list[LayerStats] = []
        pending: list[Pending] = []
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
        logits = self._logits(x).cpu().numpy()
        check_finite(cache)
        _fill(layers, pending, config.S * cache.spec.kv_token_bytes)
        short = int((lengths < config.min_context).sum()) if layers else 0
        fallbacks = {"min_context": short * spec.num_layers} if short else {}
        dense_layers = sum(config.dense_layer(layer) for layer in range(spec.num_layers)) if layers else 0
        if dense_layers:
            fallbacks["dense_layer"] = dense_layers * len(lengths)
        return cache, StepOutput(logits, layers, fallbacks, dense_logits)

    def _attend_gated(
        self, cache: Cache, layer: int, q: Tensor, table: np.ndarray, lengths: np.ndarray, audit: bool
    ) -> tuple[Tensor, LayerStats, Pending]:
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
        started = self._clock()
        if config.reads_all(layer, lengths.tolist()):
            selected = started
            if not config.dense_layer(layer):
                stats.forced = forced_groups(config, lengths, int(groups.max())).sum(axis=1)
            stats.kv_bytes_read = int(lengths.sum()) * kv_heads * cache.spec.kv_token_bytes
            with span("eps.attention", self.device):
                out, lse = attend(cache, layer, q, table, lengths, None)
            whole = out
            if config.has_bounds:
                stats.mass_skipped_cert = stats.output_error_cert = np.zeros((batch, kv_heads))
        else:
            with span("eps.prepass", self.device):
                scores = score(cache, layer, q, table, lengths)
                selection = select(config, scores, lengths, layer)
            selected = self._clock()
            with span("eps.attention", self.device):
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
                        moved = torch.linalg.vector_norm(whole.float() - out.float(), dim=-1).reshape(
                            batch, kv_heads, -1
                        )
                        arrays["output_error_cert"] += moved.amax(dim=-1) * (1 + 2.0**-16)
            arrays["counts"], arrays["mass_skipped_est"] = selection.counts, skipped_mass(scores, selection)
            if selection.wanted is not None:
                arrays["wanted"] = selection.wanted
            stats.forced = selection.forced
            stats.summary_bytes_read = kv_heads * scoring_bytes(
                config, self.spec.head_dim, table.size * config.groups_per_unit, lengths
            )
            stats.summary_bytes_read += cache.bound_bytes_read - bound_bytes
        attended = self._clock()
        if started is not None and selected is not None and attended is not None:
            stats.prepass_ms, stats.attention_ms = 1000 * (selected - started), 1000 * (attended - selected)
        if audit:
            kv_bytes = cache.kv_bytes_read
            _, lse_all = attend(cache, layer, q, table, lengths, None)
            cache.kv_bytes_read = kv_bytes
            # two float32 sums differ by rounding even where everything was read
            rounding = 2.0**-20 * (lse.abs() + lse_all.abs())
            unread = torch.where(lse_all - lse > rounding, -torch.expm1(lse - lse_all), 0.0)
            unread = unread.reshape(batch, kv_heads, -1)
            arrays["mass_skipped_true"] = unread.amax(dim=-1)
        return whole, stats, arrays

    def _dense_logits(self, cache: Cache, tokens: np.ndarray, table: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Logits [B, V] of a dense step of the new tokens, whose K and V are merged in instead of written."""
        kv_bytes, x, turn = cache.kv_bytes_read, self._embed(tokens), self._rotation(lengths - 1)
        for layer in range(self.spec.num_layers):
            q, k, v = self._project(layer, x, turn)
            before = attend(cache, layer, q, table, lengths - 1, None)
            out, _ = merge(before, attend_own(cache, q, k, v))
            x = self._feed_forward(layer, self._add_attention(layer, x, out))
        cache.kv_bytes_read = kv_bytes
        return self._logits(x).cpu().numpy()

    def _clock(self) -> float | None:
        """Now, once everything so far is computed; None unless timing is on."""
        if not self.timing:
            return None
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def _embed(self, tokens: np.ndarray) -> Tensor:
        self._check_tokens(tokens)
        return self.weights["embed"][torch.from_numpy(np.asarray(tokens, np.int64)).to(self.device)]

    def _check_tokens(self, tokens: np.ndarray) -> None:
        tokens = np.asarray(tokens, np.int64)
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.spec.vocab_size:
            raise ValueError(
                f"tokens run from {tokens.min()} to {tokens.max()}: the vocabulary has 0 to {self.spec.vocab_size - 1}"
            )

    def angles(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """cos and sin [N, 1, D/2] float32 of every position's angles, from float64: float32 angles lose a thousandth of
        a radian at 16k tokens."""
        angles = positions[:, None, None] * self.inverse_frequencies
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    def _rotation(self, positions: np.ndarray) -> tuple[Tensor, Tensor]:
        cos, sin = (torch.from_numpy(part).to(self.device) for part in self.angles(positions))
        return cos, sin

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return functional.linear(x, self.weights[name], self.weights.get(f"{name}_bias"))

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], self.weights[name], self.spec.norm_eps)

    def _project(self, layer: int, x: Tensor, turn: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """q [N, Hq, D], k, v [N, Hkv, D] of x [N, hidden], as attention reads them: normed and rotated."""
        spec, prefix = self.spec, f"layers.{layer}."
        h = self._norm(prefix + "input_norm", x)
        q = self._linear(prefix + "q", h).reshape(len(x), spec.num_heads, spec.head_dim)
        k = self._linear(prefix + "k", h).reshape(len(x), spec.num_kv_heads, spec.head_dim)
        v = self._linear(prefix + "v", h).reshape(len(x), spec.num_kv_heads, spec.head_dim)
        if spec.qk_norm:
            q, k = self._norm(prefix + "q_norm", q), self._norm(prefix + "k_norm", k)
        return rotate(q, *turn), rotate(k, *turn), v

    def _add_attention(self, layer: int, x: Tensor, out: Tensor) -> Tensor:
        """The residual stream [N, hidden] after attention's out [N, Hq, D]."""
        return x + self._linear(f"layers.{layer}.o", out.reshape(len(x), -1))

    def _feed_forward(self, layer: int, x: Tensor) -> Tensor:
        prefix = f"layers.{layer}."
        h = self._norm(prefix + "post_norm", x)
        gate = functional.silu(self._linear(prefix + "gate", h))
        return x + self._linear(prefix + "down", gate * self._linear(prefix + "up", h))

    def _logits(self, x: Tensor) -> Tensor:
        name = "embed" if self.spec.tie_embeddings else "lm_head"
        return self._linear(name, self._norm("norm", x)).float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE in Hugging Face's half-rotation form, in float32: x [N, H, D], cos, sin [N, 1, D/2]. Dimensions i and
    i + D/2 are a pair."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


@torch.inference_mode()
def load_model(path: Path, spec: ModelSpec, dtype: str = "float32", device: str = "auto") -> Decoder:
    """The decoder of a Hugging Face directory. Raises ConfigError for an absent device or an unknown dtype before any
    weight is read."""
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r} is unknown: choose one of {', '.join(DTYPES)}")
    place = device_of(device).type
    weights = {name: from_numpy(array, dtype, place) for name, array in load_weights(path, spec).items()}
    return Decoder(spec, weights, dtype, place)
