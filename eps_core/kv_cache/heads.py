"""Where tokens of evicting caches live: every (layer, kv head) of a sequence holds other ones, in pages of its own.

The cache beneath has one kv head: a kv head of a sequence is to it a sequence of its own, so that heads may keep
different numbers of tokens, whole pages come free, and everything that reads a batch of ragged sequences reads these,
too (per-head block tables, as KV-Compress has them: Rehg 2024, arXiv 2410.00161).

Letters as in `kv_cache.pool`; L layers, H kv heads, T rows that a head holds.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Literal

import numpy as np

from eps_core.config.cache import CacheConfig
from eps_core.config.eps import EpsConfig
from eps_core.kv_cache.pool import PagePool, Sequence
from eps_core.kv_cache.step_plan import StepPlan

Compaction = Literal["repack", "fill"]
COMPACTIONS: tuple[Compaction, ...] = ("repack", "fill")


@dataclass(eq=False)
class HeadSequence:
    """One sequence: how many tokens it has had, and what each head still holds of them. Only `HeadPools` changes it."""

    length: int
    heads: list[list[Sequence]]  # [L][H]; their tokens are placeholders
    positions: list[list[np.ndarray]]  # [L][H] of each row its token's position [T] int64; ascend but for filled holes

    @property
    def num_rows(self) -> int:
        """Rows of all layers and heads."""
        return sum(head.length for layer in self.heads for head in layer)


@dataclass(frozen=True, eq=False)
class HeadTables:
    """The units and rows of B sequences, to be read as B * H sequences in each layer."""

    sequences: tuple[HeadSequence, ...]
    tables: tuple[np.ndarray, ...]  # [L] of [B * H, M] int32, padding -1
    lengths: tuple[np.ndarray, ...]  # [L] of [B * H] int64

    def wheres(self, cache_config: CacheConfig, config: EpsConfig | None) -> list[StepPlan]:
        """Return how each layer's cache is read: as `config` says, or everything of it; one for layers that lie
        alike."""
        found: list[StepPlan] = []
        for layer, (table, lengths) in enumerate(zip(self.tables, self.lengths, strict=True)):
            if layer and table is self.tables[layer - 1] and lengths is self.lengths[layer - 1]:
                found.append(found[-1])
            elif config is None:
                found.append(StepPlan.dense(cache_config, table, lengths))
            else:
                found.append(StepPlan.of(config, table, lengths))
        return found


@dataclass(frozen=True)
class Compacted:
    """The new order of a head's rows: its i-th row is the one that was `order[i]`. Rows `written` [W], whole units of
    them, go from slots `sources` [W] to `slots` [W]; the others lie where they lay."""

    order: np.ndarray  # [n] int64
    written: np.ndarray
    sources: np.ndarray
    slots: np.ndarray
    rows_moved: int  # rows that lie elsewhere now: fewest when holes are filled
    units_freed: int


class HeadPools:
    """A `PagePool` a layer, of which every kv head of a sequence takes a sequence. Has what the decode loop asks of a
    `PagePool`. Nothing is found again by its tokens, and no two sequences share a page."""

    def __init__(self, num_layers: int, num_kv_heads: int, num_units: int, unit_tokens: int) -> None:
        self.num_kv_heads, self.unit_tokens = num_kv_heads, unit_tokens
        self.pools = [PagePool(num_units, unit_tokens, shares=False) for _ in range(num_layers)]

    def open(self) -> HeadSequence:
        """A new sequence without tokens."""
        heads = [[pool.open()[0] for _ in range(self.num_kv_heads)] for pool in self.pools]
        return HeadSequence(0, heads, [[np.zeros(0, np.int64) for _ in layer] for layer in heads])

    def append(self, sequence: HeadSequence, tokens: Items[int]) -> tuple[np.ndarray, list[tuple[int, int]]]:
        """Slots [N, L, H] int64 of tokens that every head takes, and no copies, as no page is shared. Raises
        ConfigError where a layer's free units do not suffice, and changes nothing."""
        count = len(tokens)
        self.require(sequence, [[count] * self.num_kv_heads for _ in self.pools])
        new = np.arange(sequence.length, sequence.length + count)
        slots = np.empty((count, len(self.pools), self.num_kv_heads), np.int64)
        for layer, pool in enumerate(self.pools):
            for head, one in enumerate(sequence.heads[layer]):
                slots[:, layer, head], _ = pool.append(one, [0] * count)
                sequence.positions[layer][head] = np.append(sequence.positions[layer][head], new)
        sequence.length += count
        return slots, []

    def require(self, sequence: HeadSequence, rows: Items[Items[int]]) -> None:
        """Raises ConfigError unless every layer has the units for `rows[l][h]` more rows of each head."""
        for layer, pool in enumerate(self.pools):
            needed = 0
            for head, count in zip(sequence.heads[layer], rows[layer], strict=True):
                needed += max(-(-(head.length + count) // self.unit_tokens) - len(head.table), 0)
            pool.require(needed, f"layer {layer} of a sequence of {sequence.length} tokens")

    def fill(self, sequence: HeadSequence, length: int, kept: Items[Items[np.ndarray]]) -> list[list[np.ndarray]]:
        """Gives a new sequence of `length` tokens those that each head keeps, positions `kept[l][h]`: their slots."""
        assert not sequence.length, "tokens are kept of a sequence that has none yet"
        self.require(sequence, [[len(one) for one in layer] for layer in kept])
        sequence.length = length
        slots = []
        for layer, pool in enumerate(self.pools):
            sequence.positions[layer] = [np.array(one, np.int64) for one in kept[layer]]
            pairs = zip(sequence.heads[layer], kept[layer], strict=True)
            slots.append([pool.append(head, [0] * len(one))[0] for head, one in pairs])
        return slots

    def compact(
        self, sequence: HeadSequence, layer: int, head: int, keep: np.ndarray, how: Compaction = "repack"
    ) -> Compacted:
        """Lets go of all rows of a head but `keep` [n] (ascending) and gives whole units back. The caller carries the
        result out at once."""
        one, pool, size = sequence.heads[layer][head], self.pools[layer], self.unit_tokens
        keep = np.asarray(keep, np.int64)
        assert len(keep) and (np.diff(keep) > 0).all() and keep[0] >= 0 and keep[-1] < one.length, "rows to keep"
        order = new_order(keep, how)
        moved = np.flatnonzero(order != np.arange(len(order)))
        table = np.array(one.table, np.int64)
        pool.truncate(one, len(keep))
        sequence.positions[layer][head] = sequence.positions[layer][head][order]
        written = np.arange(len(order))
        written = written[np.isin(written // size, moved // size)]
        sources, slots = self._slots(table, order[written]), self._slots(table, written)
        return Compacted(order, written, sources, slots, len(moved), len(table) - len(one.table))

    def _slots(self, table: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Slots [N] of rows [N] of a head with this table [M]."""
        return table[rows // self.unit_tokens] * self.unit_tokens + rows % self.unit_tokens

    def free(self, sequence: HeadSequence) -> None:
        for pool, layer in zip(self.pools, sequence.heads, strict=True):
            for one in layer:
                pool.free(one)

    def table(self, sequences: Items[HeadSequence]) -> HeadTables:
        """Return the tables of a step. Layers whose heads lie alike, as in even policies, share arrays."""
        tables: list[np.ndarray] = []
        lengths: list[np.ndarray] = []
        for layer, pool in enumerate(self.pools):
            rows = [head for sequence in sequences for head in sequence.heads[layer]]
            table, held = pool.table(rows), pool.lengths(rows)
            if tables and np.array_equal(table, tables[-1]) and np.array_equal(held, lengths[-1]):
                table, held = tables[-1], lengths[-1]
            tables.append(table)
            lengths.append(held)
        return HeadTables(tuple(sequences), tuple(tables), tuple(lengths))

    def lengths(self, sequences: Iterable[HeadSequence]) -> np.ndarray:
        """Tokens that each sequence has had [B] int64, evicted ones counted: what positions follow."""
        return np.array([sequence.length for sequence in sequences], np.int64)


def new_order(keep: np.ndarray, how: Compaction) -> np.ndarray:
    """Which row each place takes, of rows `keep` [n] (ascending): [n] int64. `repack` keeps the order of the tokens;
    `fill` moves only those that lie past the n-th place, into the holes before it, lowest to lowest."""
    if how == "repack":
        return keep
    places = np.arange(len(keep))
    order = places.copy()
    order[np.setdiff1d(places, keep, assume_unique=True)] = keep[keep >= len(keep)]
    return order
