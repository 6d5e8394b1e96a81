"""The one paged pool of a hooked model, and its sequences: shared by all caches, layers and batches of that model."""

import weakref
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from eps_core.config.cache import CacheSpec
from eps_core.integrations.layers import SparseAttention
from eps_core.integrations.paged import Paged
from eps_core.integrations.rows import EngineRows
from eps_core.integrations.verified import Round
from eps_core.kv_cache.pool import Sequence as PagedSequence
from eps_core.kv_cache.step_plan import StepPlan
from eps_mlx.cache import pending
from eps_mlx.device import DTYPES
from eps_mlx.ops import OPS

FIRST_TOKENS = 1024  # room that a pool begins with
OPEN_GROUPS = 32  # mlx-lm's batches by default


class Row:
    """One sequence of a pool, without tokens at first. Whoever holds the row holds the sequence: it is freed when the
    last cache has released."""

    def __init__(self, rows: "Rows", sequence: PagedSequence) -> None:
        self.sequence = sequence
        self.edits = 0  # how often tokens were appended or taken back
        self._copies: list[tuple[weakref.ref[Row], int, set[int]]] = []
        weakref.finalize(self, rows.paged.dead.append, sequence).atexit = False

    @property
    def length(self) -> int:
        return self.sequence.length


class Rows(EngineRows):
    """The pool that the caches of a hooked model write and read, and what they share in a step: places, tables,
    lengths. `spec`: of its sparse layers. Not for several threads at once, but rows may die in any."""

    ops = OPS

    def __init__(self, sparse: SparseAttention, spec: CacheSpec, device: str, kernels: str) -> None:
        super().__init__(sparse)
        self.closed = False  # EPS was taken off the model
        self.paged = Paged(sparse.backend, spec, sparse.config.cache_config, device, kernels)
        self._mask: weakref.ref[mx.array] | None = None  # the last one that a cache of this model made
        self._version = 0  # of tables and lengths; a row that is made is another one, whatever its id
        self._step: tuple[Any, StepPlan] | None = None
        self._loaded: tuple[list[weakref.ref[Row]], set[int]] = [], set()
        self._places: tuple[Any, np.ndarray] | None = None

    @property
    def spec(self) -> CacheSpec:
        spec: CacheSpec = self.paged.cache.spec
        return spec

    @property
    def num_live(self) -> int:
        """Sequences that some cache still holds."""
        return self.paged.num_live

    @property
    def dtype(self) -> mx.Dtype:
        return DTYPES[self.spec.dtype]

    def made(self, mask: Any) -> Any:
        """Remembers a mask of one of these caches, and returns it."""
        self._mask = weakref.ref(mask) if isinstance(mask, mx.array) else None
        return mask

    def has_made(self, mask: Any) -> bool:
        return self._mask is not None and self._mask() is mask

    def open(self) -> Row:
        self._version += 1
        return Row(self, self.paged.open())

    def adopted(self, layer: int, lengths: Sequence[int]) -> list[Row]:
        """Rows for what one layer's loaded cache holds: those of the layers loaded just before, where these are as
        long and none was this layer's."""
        rows = [found for one in self._loaded[0] if (found := one()) is not None]
        shared = layer not in self._loaded[1] and [row.length for row in rows] == list(lengths)
        if not shared or any(row.edits > 1 for row in rows):
            rows = [self.open() for _ in lengths]
            self._loaded = [weakref.ref(row) for row in rows], set()
        self._loaded[1].add(layer)
        return rows

    def copy(self, row: Row, layer: int) -> Row:
        """A row with the same tokens, for one layer's cache. Layers copy one after the other: those that find the same
        row as it was share the copy. (Any other order costs memory, never truth.)"""
        row._copies = [one for one in row._copies if one[0]() is not None]
        for found, edits, taken in row._copies:
            copied = found()
            if copied is not None and edits == row.edits and not copied.edits and layer not in taken:
                taken.add(layer)
                return copied
        self._version += 1
        copied = Row(self, self.paged.pool.fork(row.sequence))
        row._copies.append((weakref.ref(copied), row.edits, {layer}))
        return copied

    def truncate(self, row: Row, length: int) -> None:
        """The first layer that trims does it for all."""
        if length < row.length:
            self.paged.pool.truncate(row.sequence, length)
            row.edits += 1
            self._version += 1

    def write(
        self, layer: int, rows: Sequence[Row], starts: Sequence[int], counts: Sequence[int], k: mx.array, v: mx.array
    ) -> None:
        """k, v [sum(counts), Hkv, D] of one layer at `counts` positions from `starts` on of each row. The first layer
        to come makes the room."""
        self.write_slots(layer, k, v, self._slots(rows, starts, counts))

    def _slots(self, rows: Sequence[Row], starts: Sequence[int], counts: Sequence[int]) -> np.ndarray:
        if self.round is not None:
            (row,), (start,), (count,) = rows, starts, counts
            assert row.sequence is self.round.sequence, "another prompt came in the middle of a round"
            return self.round.slots(start, count)
        if self._places is not None and self._places[0] == self._key(rows, starts, counts):
            return self._places[1]
        grown = [max(start + count - row.length, 0) for row, start, count in zip(rows, starts, counts, strict=True)]
        if any(start > row.length for row, start in zip(rows, starts, strict=True)):
            raise RuntimeError("a layer's cache is ahead of its sequence: trim the caches of all layers alike")
        if any(grown):
            self.paged.append([row.sequence for row in rows], grown)
            self._version += 1
            for row in rows:
                row.edits += 1
        size, slots = self.paged.pool.unit_tokens, []
        for row, start, count in zip(rows, starts, counts, strict=True):
            units, offsets = np.divmod(np.arange(start, start + count), size)
            slots.append(np.asarray(row.sequence.table, np.int64)[units] * size + offsets)
        found = np.concatenate(slots)
        self._places = self._key(rows, starts, counts), found
        return found

    def _key(self, rows: Sequence[Row], *numbers: Sequence[int]) -> tuple[Any, ...]:
        return self._version, tuple(map(id, rows)), *map(tuple, numbers)

    def read(self, layer: int, row: Row, length: int) -> tuple[mx.array, mx.array]:
        """K, V [length, Hkv, D] of one layer's first tokens, copies."""
        pool = self.paged.pool
        k, v = self.sparse.backend.read_kv(self.paged.cache, layer, pool.table([row.sequence])[0], length)
        return k, v

    def plan(self, rows: Sequence[Row], lengths: Sequence[int]) -> StepPlan:
        """One decode step of rows of these lengths, the new token counted: the same object for every layer. A config
        that was replaced meanwhile is the next step's."""
        if self.round is not None:
            return self.round.plan(lengths[0])
        key = self._key(rows, lengths)
        if self._step is None or self._step[0] != key:
            table = self.paged.pool.table([row.sequence for row in rows])
            self._step = key, StepPlan.of(self.sparse.config, table, np.asarray(lengths))
        return self._step[1]

    def end_round(self, num_kept: int) -> Round:
        self._version += 1
        return super().end_round(num_kept)

    def pending(self) -> list[mx.array]:
        """Return the arrays of this step that nobody else may ask for: evaluated with the step, or they would hold the
        pool's old buffers through the next one's writes."""
        return [*pending(self.paged.cache), *self.sparse.pending()]

    def num_bytes(self, rows: Sequence[Row]) -> int:
        """Bytes of one layer's K, V and summaries in the units of these rows, shared ones counted each time."""
        cache, units = self.paged.cache, sum(len(row.sequence.table) for row in rows)
        pools = [pools[0] for pools in cache.k.opened.pools]
        for one in cache.parts():
            pools += one.summaries[0].values()
        return units * sum(pool.nbytes // len(pool) for pool in pools)
