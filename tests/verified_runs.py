"""What tests of decoding share: a tiny model's dense, sparse and verified runs of the same prompts, their caches
compared token by token, drafters of all kinds, and runs held against one that never drafted, round by round."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
from tiny_models import saved

from eps_core import reference
from eps_core.config.cache import CacheSpec
from eps_core.config.eps import EpsConfig
from eps_core.config.speculative import SpeculativeConfig
from eps_core.decode.forward import Decoder, load_decoder
from eps_core.decode.generate import generate, prefill, take_step, tokens_of
from eps_core.decode.sampling import Sampling, draw
from eps_core.decode.verified import Verifier, verified
from eps_core.kv_cache.pool import PagePool
from eps_core.metrics.rounds import RoundRecord
from eps_core.models.config import read_spec

TOKENS = SpeculativeConfig("tokens")
GREEDY = Sampling()
DRAWN = Sampling(0.8, 0.9, 3)


@cache
def judge(name: str = "llama2") -> "Model":
    """The float64 oracle of a tiny model."""
    return Model(reference, "cpu", saved(name))


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(0, tiny_models.VOCAB_SIZE, length).tolist()


def eps(method: str, **flat: Any) -> EpsConfig:
    small = {"budget": 0.2, "num_sink_tokens": 2, "num_recent_tokens": 8, "block_size": 16}
    return EpsConfig.of(method=method, **small | ({} if method == "rq" else {"group_size": 4}) | flat)


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

    def __init__(
        self,
        backend: Any,
        device: str,
        path: Path,
        kv_dtype: str = "float32",
        units: int = 40,
        dtype: str = "float32",
        kv_bits: tuple[int, int] = (16, 16),
        kernels: str = "auto",
    ) -> None:
        self.kv_bits, self.kernels = kv_bits, kernels
        self.backend, self.device, self.path, self.kv_dtype, self.units = backend, device, path, kv_dtype, units
        self.spec = read_spec(path)
        self.decoder = load_decoder(backend, path, self.spec, dtype, device)

    def cache(self, config: EpsConfig) -> tuple[Any, PagePool]:
        spec = CacheSpec(
            self.spec.num_layers, self.spec.num_kv_heads, self.spec.head_dim, self.units, self.kv_dtype,
            max_open_groups=8, k_bits=self.kv_bits[0], v_bits=self.kv_bits[1],
        )  # fmt: skip
        pool = PagePool(self.units, config.cache_config.unit_tokens)
        return self.backend.new_cache(spec, config.cache_config, self.device, self.kernels), pool

    def start(self, prompts: Sequence[Sequence[int]], config: EpsConfig, decoder: Decoder | None = None) -> tuple:
        cache, pool = self.cache(config)
        sequences = []
        for prompt in prompts:
            sequence, cache = prefill(decoder or self.decoder, cache, pool, prompt[:-1], 64)
            sequences.append(sequence)
        return cache, pool, sequences

    def decode(
        self,
        prompts: Sequence[Sequence[int]],
        config: EpsConfig,
        sampling: Sampling = GREEDY,
        tokens: int = 12,
        decoder: Any = None,
        **more: Any,
    ) -> Run:
        """Decode tokens of each prompt, dense or sparse as `config` says, with their logits."""
        cache, pool = self.cache(config)
        more = {"prefill_chunk": 64, "keep_logits": True, **more}
        steps = generate(
            decoder or self.decoder, cache, pool, prompts, tokens, sampling, config.selection_config, **more
        )
        return self._finish(steps, prompts, pool, [])

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
        verify: SpeculativeConfig = TOKENS,
        decoder: Decoder | None = None,
        **more: Any,
    ) -> Run:
        cache, pool, sequences = self.start(prompts, config)
        rounds = verified(
            decoder or self.decoder, cache, pool, prompts, tokens, sampling, config.selection_config, verify,
            written=sequences, **more,
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


def same(got: list[Any], want: list[Any], atol: float = 0.0) -> None:
    """Steps of two runs have the same tokens, counts and bytes, and logits within `atol`."""
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert one.tokens == other.tokens
        np.testing.assert_allclose(one.logits, other.logits, rtol=0, atol=atol, equal_nan=False)
        for name in (
            "pages_total", "pages_visited", "pages_skipped", "pages_always_selected", "bytes_kv_read_est",
            "bytes_kv_dense", "bytes_summary_read", "bytes_k_reread", "fallbacks",
        ):  # fmt: skip
            assert getattr(one, name) == getattr(other, name), name
        assert one.skipped_mass_mean == pytest.approx(other.skipped_mass_mean, abs=atol / 2)


def assert_same_state(model: Model, got: Run, want: Run, tolerance: float = 0.0) -> None:
    """Every sequence's tokens, K, V, fills and summaries: what a run that never drafted has."""
    backend = model.backend

    def numbers(array: Any) -> np.ndarray:
        return np.asarray(backend.to_numpy(array), np.float64)

    for mine, other in zip(got.sequences, want.sequences, strict=True):
        assert mine.tokens == other.tokens, "the sequences differ"
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
            for name in ("", "bound"):
                caches = [getattr(run.cache, name) if name else run.cache for run in (got, want)]
                if caches[0] is None or not caches[0].cache_config.enabled:
                    continue
                assert_same_summaries(numbers, caches, tables, layer, mine.length, tolerance)
    # a round that fills a group has its keys in hand, where single steps read them back
    assert got.cache.bytes_k_reread <= want.cache.bytes_k_reread, "K was read back more often"
    bounds = [run.cache.bound for run in (got, want)]
    if bounds[0] is not None and bounds[0].centroid[0] is not None:
        np.testing.assert_allclose(*(numbers(one.centroid[0]) for one in bounds), rtol=0, atol=tolerance)


def assert_same_summaries(numbers: Any, caches: list, tables: list, layer: int, length: int, tolerance: float) -> None:
    per_unit, size = caches[0].cache_config.spans_per_unit, caches[0].cache_config.span_tokens
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
        # running statistics in float32 are sums of single keys or of those of a round, and a code or float16 of
        # them, or of keys that differ within the tolerance, may round the other way where its number lies between two
        near = max(tolerance, 1e-5 if caches[0].cache_config.method_spec.follows else 0.0)
        close = np.isclose(a, b, rtol=near, atol=near * max(np.abs(b).max(), 1.0))
        assert (~close).sum() <= (max(0.01 * close.size, 1) if near else 0), (name, layer)


class Drafter:
    """A decoder whose draft steps are changed: `change` makes other logits [B, V] of theirs, `place` is what K and V of
    the drafts are set to, and a `dense` one reads everything, so that in exact arithmetic it is always right."""

    def __init__(
        self,
        model: Model,
        change: Callable[[np.ndarray], np.ndarray] | None = None,
        place: float | None = None,
        dense: bool = False,
    ) -> None:
        self.runs, self.model, self.backend = model, model.decoder.model, model.backend
        self.change, self.place, self.dense = change, place, dense
        self.steps = 0

    def step(self, cache: Any, tokens: Any, slots: Any, table: Any, lengths: Any, read: Any, *, draft: bool) -> Any:
        assert draft
        self.steps += 1
        with np.errstate(invalid="ignore"):  # NaN that was placed
            cache, output = self.runs.decoder.step(
                cache, tokens, slots, table, lengths, None if self.dense else read, draft=True
            )
        if self.place is not None:
            cache = placed(self.runs, cache, slots, self.place)
        if self.change is not None:
            output.logits = self.change(output.logits)
        return cache, output


def placed(model: Model, cache: Any, slots: np.ndarray, value: float) -> Any:
    """The cache with K and V of slots [N] set to a number, in every layer."""
    spec = model.spec
    rows = np.full((len(slots), spec.num_kv_heads, spec.head_dim), value, np.float32)
    given = model.backend.from_numpy(rows, model.kv_dtype, model.device)
    for layer in range(spec.num_layers):
        cache = model.backend.write_kv_tentative(cache, layer, given, given, slots)
    return cache


def unwritten(pool: PagePool, sequences: Sequence[Any]) -> np.ndarray:
    """Slots of a pool that hold no token of the sequences, ascending."""
    held = [
        unit * pool.unit_tokens + np.arange(min(one.length - i * pool.unit_tokens, pool.unit_tokens))
        for one in sequences
        for i, unit in enumerate(one.table)
        if one.length > i * pool.unit_tokens
    ]
    return np.setdiff1d(np.arange(pool.num_units * pool.unit_tokens), np.concatenate([np.zeros(0, int), *held]))


class _Plain:
    """Dense decoding of one sequence and one token at a time: `Decoder.step` and `draw`."""

    def __init__(self, model: Model, cache: Any, pool: PagePool, sampling: Sampling) -> None:
        self.decoder, self.cache, self.pool, self.sampling = model.decoder, cache, pool, sampling

    def next(self, index: int, sequence: Any, token: int) -> int:
        self.cache, output, _ = take_step(self.decoder, self.cache, self.pool, [sequence], [token])
        return draw(output.logits[0], self.sampling, index, sequence.length).token


def check_rounds(
    model: Model,
    prompts: Sequence[Sequence[int]],
    config: EpsConfig,
    tokens: int,
    sampling: Sampling,
    verify: SpeculativeConfig,
    drafter: Any = None,
    poison: float | None = None,
    tolerance: float = 1e-6,
    stop: Sequence[int] = (),
) -> list[RoundRecord]:
    """Decodes, and after every round feeds what was said, token by token, to a cache in which nothing is ever drafted:
    tokens, K, V, summaries, centroid and pool must be the same there. `poison` is written, between the rounds, to every
    slot that holds no token."""
    cache, pool, sequences = model.start(prompts, config)
    run = Verifier(model.decoder, cache, pool, sampling, config.selection_config, verify, stop, drafter)
    cache, other, mirrored = model.start(prompts, config)
    plain = _Plain(model, cache, other, sampling)
    fed = {index: int(one[-1]) for index, one in enumerate(prompts)}
    room, alive, records = dict.fromkeys(fed, tokens), dict(enumerate(sequences)), []
    while alive:
        if poison is not None:
            run.cache = placed(model, run.cache, unwritten(pool, sequences), poison)
        before = dict(fed)
        records.append(record := run.round(alive, dict(fed), room))
        pool.check()
        said: dict[int, list[int]] = {index: [] for index in alive}
        for index, token in zip(record.sequences, record.tokens, strict=True):
            said[index].append(token)
        for depth in range(max(map(len, said.values()))):
            for index in [i for i in said if depth < len(said[i])]:
                feed = said[index][depth - 1] if depth else before[index]
                want = plain.next(index, mirrored[index], feed)
                assert said[index][depth] == want, f"sequence {index} says other than dense decoding"
        for (index, own), drafted, accepted in zip(said.items(), record.drafted, record.accepted, strict=True):
            asked = record.gamma if verify.draft is None else verify.draft
            assert drafted <= asked, "more drafts than were asked for"
            # all that was accepted and the token after it
            ends = own[-1] in stop
            assert len(own) == accepted + 1 or (ends and len(own) == accepted), "a round says too few or too many"
            assert not any(token in stop for token in own[:-1]), "a sequence goes on after its end"
            fed[index], room[index] = own[-1], room[index] - len(own)
            assert room[index] >= 0, "says more than it was asked for"
            if ends or not room[index]:
                del alive[index]
        assert_same_state(
            model, Run([], [], run.cache, pool, sequences), Run([], [], plain.cache, other, mirrored), tolerance
        )
        assert [len(one.table) for one in sequences] == [len(one.table) for one in mirrored], "units are held"
        assert pool.num_free == other.num_free, "units are held"
        for index, own in said.items():
            assert sequences[index].tokens[-len(own) :] == [before[index], *own[:-1]], "other tokens are in the cache"
    return records
