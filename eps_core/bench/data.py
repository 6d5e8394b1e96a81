"""A benchmark's data: keys and values in clusters, a cache filled with them, and fresh slots to write to.

Real keys share a large common mean and come in runs that are alike, so few groups hold most of the mass. Independent
normal keys would make every group alike and every selection arbitrary. Here a key is the head's mean, the centroid of
the cluster of its run of 32 tokens, and noise; a query leans to one cluster. The noise repeats every 4,096 tokens
(drawing it again would take longer than filling the cache); values are made in the same way.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from eps_core.attention.protocol import Array, Backend
from eps_core.config.cache import CacheSpec
from eps_core.config.eps import EpsConfig
from eps_core.kv_cache.step_plan import StepPlan

CLUSTERS, RUN_TOKENS, NOISE_TOKENS, CHUNK_TOKENS = 64, 32, 4096, 8192
MEAN_STD, CLUSTER_STD, NOISE_STD = 0.5, 0.7, 0.7  # of one dimension
QUERY_LEAN = 1.0  # of a query to its cluster's centroid, which stands for about 6 nats at 128 dimensions
DESCRIPTION = (
    f"keys and values: the head's mean (std {MEAN_STD}) + one of {CLUSTERS} centres (std {CLUSTER_STD}) for each run "
    f"of {RUN_TOKENS} tokens + noise (std {NOISE_STD}); queries: noise (std 1) + one centroid"
)


@dataclass(frozen=True)
class Shape:
    """The shape of one layer: B sequences of `context` tokens each."""

    context: int
    batch: int
    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: str


@dataclass
class Source:
    """Draws one layer's keys, values and queries; the same seed gives the same."""

    shape: Shape
    seed: int = 0
    centres: np.ndarray = field(init=False)  # [2, CLUSTERS, Hkv, D] float32, means included: of keys and of values
    noise: np.ndarray = field(init=False)  # [2, NOISE_TOKENS, Hkv, D] float32

    def __post_init__(self) -> None:
        rng, heads = np.random.default_rng(self.seed), (self.shape.kv_heads, self.shape.head_dim)
        mean = MEAN_STD * rng.standard_normal((2, 1, *heads), np.float32)
        self.centres = mean + CLUSTER_STD * rng.standard_normal((2, CLUSTERS, *heads), np.float32)
        self.noise = NOISE_STD * rng.standard_normal((2, NOISE_TOKENS, *heads), np.float32)

    def chunks(self, sequence: int) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """(first token, keys, values [n, Hkv, D] float32) of one sequence, in order."""
        rng = np.random.default_rng([self.seed, sequence, 1])
        for start in range(0, self.shape.context, CHUNK_TOKENS):
            tokens = min(CHUNK_TOKENS, self.shape.context - start)
            runs = rng.integers(CLUSTERS, size=-(-tokens // RUN_TOKENS))
            labels = np.repeat(runs, RUN_TOKENS)[:tokens]
            places = (np.arange(tokens) + rng.integers(NOISE_TOKENS)) % NOISE_TOKENS
            k, v = (centres[labels] + noise[places] for centres, noise in zip(self.centres, self.noise, strict=True))
            yield start, k, v

    def queries(self) -> np.ndarray:
        """[B, Hq, D] float32, unscaled."""
        shape = self.shape
        rng = np.random.default_rng([self.seed, 2])
        q = rng.standard_normal((shape.batch, shape.q_heads, shape.head_dim), np.float32)
        heads = np.arange(shape.q_heads) // (shape.q_heads // shape.kv_heads)
        labels = rng.integers(CLUSTERS, size=(shape.batch, shape.q_heads))
        return q + QUERY_LEAN * self.centres[0][labels, heads]

    def tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values [B, Hkv, D] float32 of one more token of each sequence."""
        rng = np.random.default_rng([self.seed, 3])
        labels = rng.integers(CLUSTERS, size=self.shape.batch)
        k, v = self.centres[0][labels] + self.noise[0][: len(labels)], self.centres[1][labels]
        return k, v


@dataclass
class Layer:
    """One layer's filled cache and what its functions are called with. `cache` is rebound by every write."""

    backend: Backend
    shape: Shape
    config: EpsConfig
    cache: Any
    table: np.ndarray  # [B, M] int32
    lengths: np.ndarray  # [B] int64
    q: Array  # [B, Hq, D] in the cache's dtype
    k_new: Array  # [B, Hkv, D]: what every write writes
    v_new: Array
    spare: np.ndarray  # [B, slots] int64: slots that no table holds, in order
    written: int = 0  # of each sequence's spare slots

    @property
    def groups(self) -> int:
        """Groups of one sequence."""
        return -(-self.shape.context // self.config.cache_config.S)

    def plan(self, config: EpsConfig | None = None) -> StepPlan:
        """A step over all that is written, read as `config` says, or as the layer's own."""
        return StepPlan.of(config or self.config, self.table, self.lengths)

    def write(self) -> Any:
        """One token of each sequence to slots that were never written, as decoding does."""
        slots = self.spare[:, self.written]
        self.written += 1
        self.cache = self.backend.write_kv(self.cache, 0, self.k_new, self.v_new, slots)
        return self.cache


def pool_units(shape: Shape, config: EpsConfig, spare_tokens: int) -> int:
    """Units of the pool that `fill` makes: P."""
    unit = config.cache_config.unit_tokens
    return shape.batch * (-(-shape.context // unit) + -(-spare_tokens // unit))


def fill(
    backend: Backend, source: Source, config: EpsConfig, device: str, kernels: str, spare_tokens: int, wait: Any,
    drawn: tuple[Array, Array] | None = None,
) -> Layer:  # fmt: skip
    """A cache of one layer that holds the source's tokens, in units scattered over the pool as an engine's are.
    `wait(cache)` computes what was written so far. `drawn`: the same keys and values [B, Hkv, T, D], where they are on
    the device already."""
    shape, unit = source.shape, config.cache_config.unit_tokens
    units, spare_units = -(-shape.context // unit), -(-spare_tokens // unit)
    order = np.random.default_rng(source.seed).permutation(shape.batch * (units + spare_units)).astype(np.int32)
    table, spare = np.split(order, [shape.batch * units])
    table = table.reshape(shape.batch, units)
    spec = CacheSpec(1, shape.kv_heads, shape.head_dim, len(order), shape.dtype, max(8, shape.batch))
    cache = backend.new_cache(spec, config.cache_config, device, kernels=kernels)
    for b in range(shape.batch):
        for start, k, v in _chunks(backend, source, device, b, drawn):
            tokens = np.arange(start, start + len(k))
            slots = table[b, tokens // unit].astype(np.int64) * unit + tokens % unit
            cache = backend.write_kv(cache, 0, k, v, slots)
            wait(cache)
    backend.check_finite(cache)
    k_new, v_new = (backend.from_numpy(part, shape.dtype, device) for part in source.tokens())
    slots = spare.reshape(shape.batch, spare_units, 1).astype(np.int64) * unit + np.arange(unit)
    return Layer(
        backend=backend, shape=shape, config=config, cache=cache, table=table,
        lengths=np.full(shape.batch, shape.context, np.int64),
        q=backend.from_numpy(source.queries(), shape.dtype, device), k_new=k_new, v_new=v_new,
        spare=slots.reshape(shape.batch, -1),
    )  # fmt: skip


def _chunks(
    backend: Backend, source: Source, device: str, sequence: int, drawn: tuple[Array, Array] | None
) -> Iterator[tuple[int, Array, Array]]:
    """(first token, keys, values [n, Hkv, D] on the device) of one sequence, in order."""
    shape = source.shape
    if drawn is None:
        for start, k, v in source.chunks(sequence):
            yield start, *(backend.from_numpy(part, shape.dtype, device) for part in (k, v))
        return
    for start in range(0, shape.context, CHUNK_TOKENS):
        yield start, *(part[sequence, :, start : start + CHUNK_TOKENS].swapaxes(0, 1) for part in drawn)
