"""Several new tokens of each of several sequences, to be attended in one dense pass: which token each row is, and what
it sees. Integers only, computed once a pass and not once a layer."""

from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np

from eps_core.config.cache import CacheSpec
from eps_core.kv_cache.shared import Shared


@dataclass(frozen=True, eq=False)
class Rows(Shared):
    """The last `num_rows` tokens of each of B sequences, T in all: those of a sequence lie together, in order."""

    table: np.ndarray  # [B, M] int32 pool units, padding -1
    lengths: np.ndarray  # [B] int64 tokens of each sequence, all of its rows counted
    num_rows: np.ndarray  # [B] int64, at least 1 each

    @classmethod
    def of(cls, table: np.ndarray, lengths: np.ndarray, num_rows: np.ndarray) -> Self:
        """Raises ValueError unless every sequence has a row, and no more of them than tokens."""
        lengths, num_rows = (np.ascontiguousarray(one, np.int64) for one in (lengths, num_rows))
        if len(lengths) != len(table) or len(num_rows) != len(table):
            raise ValueError(f"{len(table)} tables for {len(lengths)} lengths and {len(num_rows)} numbers of rows")
        if (num_rows < 1).any() or (num_rows > lengths).any():
            raise ValueError(f"rows {num_rows.tolist()} of sequences of {lengths.tolist()} tokens: 1 to all of them")
        return cls(np.ascontiguousarray(table, np.int32), lengths, num_rows)

    @classmethod
    def in_blocks(cls, table: np.ndarray, length: int, num_rows: int, block_rows: int) -> Self:
        """The last `num_rows` tokens of one sequence of `length`, table [M], as if each `block_rows` of them were
        a sequence that ends there."""
        first = length - num_rows
        ends = np.append(np.arange(first + block_rows, length, block_rows), length)
        return cls.of(np.repeat(table[None], len(ends), axis=0), ends, np.diff(ends, prepend=first))

    def kv_bytes(self, spec: CacheSpec) -> int:
        """Return the bytes of K and V that the pass reads in one layer: a sequence's once for all of its rows."""
        return int(self.lengths.sum()) * spec.num_kv_heads * spec.kv_token_bytes

    @cached_property
    def total(self) -> int:
        """T."""
        return int(self.num_rows.sum())

    @cached_property
    def starts(self) -> np.ndarray:
        """[B + 1] int64: rows starts[b] to starts[b + 1] - 1 are of sequence b."""
        return np.concatenate([[0], np.cumsum(self.num_rows)])

    @cached_property
    def sequence(self) -> np.ndarray:
        """[T] int64: whose token each row is."""
        return np.repeat(np.arange(len(self.lengths)), self.num_rows)

    @cached_property
    def seen(self) -> np.ndarray:
        """[T] int64: tokens that each row attends to, itself included."""
        ends = self.lengths[self.sequence] - self.num_rows[self.sequence]
        return ends + np.arange(self.total) - self.starts[self.sequence] + 1
