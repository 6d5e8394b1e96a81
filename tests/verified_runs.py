"""What tests of verified decoding share: a tiny model's dense and verified runs of the same prompts, and their caches
compared token by token."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eps_core.config.eps import EpsConfig
from eps_core.config.store import CacheSpec
from eps_core.config.verify import Verify
from eps_core.decode.forward import Decoder, load_decoder
from eps_core.decode.generate import generate, prefill, tokens_of
from eps_core.decode.model import read_spec
from eps_core.decode.sampling import Sampling
from eps_core.decode.verified import verified
from eps_core.paging.pool import PagePool
from eps_core.telemetry.rounds import RoundRecord

TOKENS = Verify("tokens")


@dataclass
class Run:
    """What a run said, and what it left behind."""

    said: list[list[int]]
    records: list[Any]
    cache: Any
    pool: PagePool
    sequences: list[Any]


class Model:
    """A tiny model on a backend, whose runs begin with all prompts but their last tokens in the cache."""

    def __init__(self, backend: Any, device: str, path: Path, kv_dtype: str = "float32", units: int = 40) -> None:
        self.backend, self.device, self.kv_dtype, self.units = backend, device, kv_dtype, units
        self.spec = read_spec(path)
        self.decoder = load_decoder(backend, path, self.spec, "float32", device)

    def cache(self, config: EpsConfig) -> tuple[Any, PagePool]:
        spec = CacheSpec(
            self.spec.num_layers, self.spec.num_kv_heads, self.spec.head_dim, self.units, self.kv_dtype,
            max_open_groups=8,
        )  # fmt: skip
        return self.backend.new_cache(spec, config.store, self.device), PagePool(self.units, config.store.unit_tokens)

    def start(self, prompts: Sequence[Sequence[int]], config: EpsConfig, decoder: Decoder | None = None) -> tuple:
        cache, pool = self.cache(config)
        sequences = []
        for prompt in prompts:
            sequence, cache = prefill(decoder or self.decoder, cache, pool, prompt[:-1], 64)
            sequences.append(sequence)
        return cache, pool, sequences

    def dense(
        self, prompts: Sequence[Sequence[int]], config: EpsConfig, tokens: int, sampling: Sampling, **more: Any
    ) -> Run:
        """Dense decoding in a cache that keeps what `config` says."""
        cache, pool, sequences = self.start(prompts, config)
        steps = generate(self.decoder, cache, pool, prompts, tokens, sampling, written=sequences, **more)
        return self._finish(steps, prompts, pool, sequences)

    def verified(
        self,
        prompts: Sequence[Sequence[int]],
        config: EpsConfig,
        tokens: int,
        sampling: Sampling,
        verify: Verify = TOKENS,
        decoder: Decoder | None = None,
        **more: Any,
    ) -> Run:
        cache, pool, sequences = self.start(prompts, config)
        rounds = verified(
            decoder or self.decoder, cache, pool, prompts, tokens, sampling, config.read, verify, written=sequences,
            **more,
        )  # fmt: skip
        return self._finish(rounds, prompts, pool, sequences)

    def _finish(self, steps: Any, prompts: Any, pool: PagePool, sequences: list) -> Run:
        records = []
        while True:
            try:
                records.append(next(steps))
            except StopIteration as end:
                pool.check()
                return Run(tokens_of(records, len(prompts)), records, end.value, pool, sequences)


def assert_same_state(model: Model, got: Run, want: Run, tolerance: float = 0.0) -> None:
    """Every sequence's tokens, K, V, fills and summaries: what a run that never drafted has."""
    backend = model.backend

    def numbers(array: Any) -> np.ndarray:
        return np.asarray(backend.to_numpy(array), np.float64)

    for mine, other in zip(got.sequences, want.sequences, strict=True):
        assert mine.tokens == other.tokens
        if not mine.tokens:
            continue
        tables = [run.pool.table([one])[0] for run, one in ((got, mine), (want, other))]
        for layer in range(model.spec.num_layers):
            pairs = [
                backend.read_kv(run.cache, layer, table, mine.length)
                for run, table in zip((got, want), tables, strict=True)
            ]
            for a, b in zip(*pairs, strict=True):
                np.testing.assert_allclose(numbers(a), numbers(b), rtol=0, atol=tolerance)
            for name in ("", "bound", "tail"):
                caches = [getattr(run.cache, name) if name else run.cache for run in (got, want)]
                if caches[0] is None or not caches[0].store.enabled:
                    continue
                assert_same_summaries(numbers, caches, tables, layer, mine.length, tolerance)
    # a round that fills a group has its keys in hand, where single steps read them back
    assert got.cache.bytes_k_reread <= want.cache.bytes_k_reread
    if got.cache.centre and got.cache.centre[0] is not None:
        np.testing.assert_allclose(numbers(got.cache.centre[0]), numbers(want.cache.centre[0]), rtol=0, atol=tolerance)


def assert_same_summaries(numbers: Any, caches: list, tables: list, layer: int, length: int, tolerance: float) -> None:
    per_unit, size = caches[0].store.groups_per_unit, caches[0].store.S
    index = np.arange(-(-length // size))
    rows = [table[index // per_unit] * per_unit + index % per_unit for table in tables]
    fills = [cache.state[layer].fill[row] for cache, row in zip(caches, rows, strict=True)]
    np.testing.assert_array_equal(*fills)
    full = fills[0] == size
    if not full.any() or not caches[0].can_encode(layer):
        return
    for name in caches[0].summaries[layer]:
        a, b = (
            numbers(cache.summaries[layer][name])[table[index // per_unit], :, index % per_unit][full]
            for cache, table in zip(caches, tables, strict=True)
        )
        # a code may round the other way where its number lies between two
        close = np.isclose(a, b, rtol=tolerance, atol=tolerance)
        assert close.mean() >= (1.0 if not tolerance else 0.99), (name, layer)


def rounds(run: Run) -> list[RoundRecord]:
    return run.records
