"""Documents under arms: prefilled once, decoded by each."""

from dataclasses import dataclass, field

import numpy as np

from eps_core.config.eps import EpsConfig
from eps_core.config.read import Read
from eps_core.config.store import CacheSpec
from eps_core.decode.forward import Decoder
from eps_core.gate.protocol import Backend


@dataclass
class Prompt:
    """A document after its dense prefill: K, V per layer [T, Hkv, D] (backend arrays) and the last token's logits."""

    length: int
    keys_values: list
    logits: np.ndarray


class Runner:
    """Runs one document at a time through a decoder, dense once and gated once per arm."""

    def __init__(self, backend: Backend, decoder: Decoder, device: str, prefill_chunk: int = 2048) -> None:
        self.backend, self.decoder, self.device, self.chunk = backend, decoder, device, prefill_chunk
        self.spec = decoder.spec

    def _cache(self, config: EpsConfig, num_tokens: int):
        units = -(-num_tokens // config.store.unit_tokens)
        spec = CacheSpec(self.spec.num_layers, self.spec.num_kv_heads, self.spec.head_dim, units, "bfloat16")
        return self.backend.new_cache(spec, config.store, self.device), np.arange(units, dtype=np.int32)

    def prefill(self, tokens: list[int], room: int):
        """(dense cache, table, Prompt): the prompt once, densely."""
        cache, table = self._cache(EpsConfig.of(), len(tokens) + room)
        logits = np.zeros(0)
        for start in range(0, len(tokens), self.chunk):
            chunk = np.array(tokens[start : start + self.chunk])
            slots = np.arange(start, start + len(chunk))
            cache, logits = self.decoder.prefill(cache, chunk, slots, table, start + len(chunk))
        stored = [self.backend.read_kv(cache, layer, table, len(tokens)) for layer in range(self.spec.num_layers)]
        return cache, table, Prompt(len(tokens), stored, logits)

    def arm(self, prompt: Prompt, config: EpsConfig, room: int):
        """An arm's cache with the prompt's K and V and their summaries."""
        cache, table = self._cache(config, prompt.length + room)
        for layer, (k, v) in enumerate(prompt.keys_values):
            cache = self.backend.write_kv(cache, layer, k, v, np.arange(prompt.length))
        return cache, table

    def decode(
        self,
        cache,
        table,
        prompt: Prompt,
        forced: list[int] | None,
        num_tokens: int,
        first: np.ndarray,
        read: Read | None = None,
    ):
        """`num_tokens` steps after the prompt: the forced tokens, or greedily from `first`, the prompt's logits.
        Returns (cache, logits [num_tokens, V] after each step, tokens fed, bytes read, dense bytes)."""
        logits, fed, got, num_read, dense = first, [], [], 0, 0
        for step in range(num_tokens):
            token = forced[step] if forced is not None else int(logits.argmax())
            length = prompt.length + step + 1
            cache, output = self.decoder.step(
                cache, np.array([token]), np.array([length - 1]), table[None], np.array([length]), read
            )
            logits = output.logits[0]
            fed.append(token)
            got.append(logits)
            num_read += sum(layer.kv_bytes_read + layer.summary_bytes_read for layer in output.layers)
            dense += self.spec.num_layers * self.spec.num_kv_heads * length * 4 * self.spec.head_dim
        return cache, np.array(got), fed, num_read, dense


@dataclass
class Tally:
    """What one document, or several, gave for one arm and budget."""

    divergences: list[float] = field(default_factory=list)
    documents: list[float] = field(default_factory=list)  # mean divergence of each text
    agreements: list[bool] = field(default_factory=list)
    answered: int = 0
    bytes_read: int = 0
    bytes_dense: int = 0
    needle_bytes_read: int = 0
    needle_bytes_dense: int = 0

    def add(self, other: "Tally") -> None:
        self.divergences += other.divergences
        self.documents += other.documents
        self.agreements += other.agreements
        self.answered += other.answered
        self.bytes_read += other.bytes_read
        self.bytes_dense += other.bytes_dense
        self.needle_bytes_read += other.needle_bytes_read
        self.needle_bytes_dense += other.needle_bytes_dense
