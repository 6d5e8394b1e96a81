"""A cache and its pool that grow on demand, for engines that leave allocation to their cache objects."""

from collections import deque
from collections.abc import Sequence

import numpy as np

from eps_core.attention.protocol import Array, Backend
from eps_core.config.cache import CacheConfig, CacheSpec
from eps_core.config.eps import EpsConfig
from eps_core.kv_cache.pool import PagePool
from eps_core.kv_cache.pool import Sequence as PagedSequence
from eps_core.kv_cache.step_plan import StepPlan

GROWTH = 1.5  # at least, so that copying what is there costs a constant share of what is written


class Paged:
    """K, V and summaries of all sequences of one model. Tokens are not known here: forks alone share units."""

    def __init__(
        self, backend: Backend, spec: CacheSpec, cache_config: CacheConfig, device: str = "auto", kernels: str = "auto"
    ) -> None:
        self.backend = backend
        self.cache = backend.new_cache(spec, cache_config, device, kernels)
        self.pool = PagePool(spec.num_units, cache_config.unit_tokens, shares=False)
        self.num_holders = 0  # who may be at work in here: see `give_up`
        # freed when the pool is next asked for anything: the garbage collector may come in any thread, and in the midst
        # of the pool's own work
        self.dead: deque[PagedSequence] = deque()

    @property
    def num_live(self) -> int:
        """Sequences that somebody holds."""
        self._collect()
        return self.pool.num_live

    def open(self) -> PagedSequence:
        """A new sequence without tokens."""
        self._collect()
        return self.pool.open()[0]

    def append(self, sequences: Sequence[PagedSequence], counts: Sequence[int]) -> np.ndarray:
        """Slots [sum(counts)] int64 of `counts` new tokens of each sequence, in order; the caller writes K and V of
        every layer to them before anything else is done with these sequences."""
        self._make_room(sequences, counts)
        slots = []
        for sequence, count in zip(sequences, counts, strict=True):
            found, copies = self.pool.append(sequence, [0] * count)
            self._copy(copies)
            slots.append(found)
        return np.concatenate(slots) if slots else np.zeros(0, np.int64)

    def reserve(self, sequence: PagedSequence, num_tokens: int) -> np.ndarray:
        """Slots [num_tokens] int64 of tokens that may be taken back: see `PagePool.reserve`."""
        self._make_room([sequence], [num_tokens])
        slots, copies = self.pool.reserve(sequence, num_tokens)
        self._copy(copies)
        return slots

    def place(self, layer: int, k: Array, v: Array, slots: np.ndarray) -> None:
        """k, v [N, Hkv, D] of one layer to reserved slots [N]; no summary hears of them."""
        self.cache = self.backend.write_kv_tentative(self.cache, layer, k, v, slots)

    def write(self, layer: int, k: Array, v: Array, slots: np.ndarray) -> None:
        """k, v [N, Hkv, D] of one layer to slots [N]."""
        self.cache = self.backend.write_kv(self.cache, layer, k, v, slots)

    def read(self, layer: int, sequence: PagedSequence, length: int) -> tuple[Array, Array]:
        """K, V [length, Hkv, D] of a sequence's first tokens, those in reserved slots counted; a copy."""
        (table,) = self.pool.table([sequence])
        k, v = self.backend.read_kv(self.cache, layer, table, length)
        return k, v

    def plan(self, config: EpsConfig, sequences: Sequence[PagedSequence]) -> StepPlan:
        """One step of these sequences, as `config` reads."""
        return StepPlan.of(config, self.pool.table(sequences), self.pool.lengths(sequences))

    def give_up(self, sequences: Sequence[PagedSequence]) -> bool:
        """One of `num_holders` has died with its sequences, which are freed at once where it was the last. Says whether
        it was."""
        self.dead.extend(sequences)
        self.num_holders -= 1
        if not self.num_holders:
            self._collect()
        return not self.num_holders

    def _collect(self) -> None:
        while self.dead:
            self.pool.free(self.dead.popleft())

    def _make_room(self, sequences: Sequence[PagedSequence], counts: Sequence[int]) -> None:
        self._collect()
        size = self.pool.unit_tokens
        needed = 0
        for sequence, count in zip(sequences, counts, strict=True):
            # one more: a fork's open unit is copied
            needed += max(-(-(sequence.length + count) // size) - len(sequence.table), 0) + 1
        if needed > self.pool.num_free:
            self._grow(self.pool.num_units + needed - self.pool.num_free)

    def _copy(self, copies: Sequence[tuple[int, int]]) -> None:
        if copies:
            self.cache = self.backend.copy_units(self.cache, *zip(*copies, strict=True))

    def _grow(self, least_units: int) -> None:
        num_units = max(least_units, int(GROWTH * self.pool.num_units))
        self.cache = self.backend.grow(self.cache, num_units)
        self.pool.grow(num_units)
