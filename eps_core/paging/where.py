"""Where a step's tokens lie, and what the host knows of their groups before any score: guards, budgets, groups without
a summary. Integers only, computed once a step and not once a layer.

Every array backend shares this; the oracle's per-sequence `selection.guards` is written apart and judges it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Self

import numpy as np

from eps_core.config.bytes import scoring_bytes, sealed_bytes
from eps_core.config.eps import EpsConfig
from eps_core.config.store import CacheSpec, Store
from eps_core.paging.groups import GroupState
from eps_core.paging.shared import Shared


@dataclass(frozen=True, eq=False)
class Where(Shared):
    """One step: of B sequences the units that they lie in and their lengths, the new token counted, and how to read
    them."""

    config: EpsConfig  # the cache's store, and this step's read
    table: np.ndarray  # [B, M] int32 pool units, padding -1
    lengths: np.ndarray  # [B] int64 tokens

    @classmethod
    def of(cls, config: EpsConfig, table: np.ndarray, lengths: np.ndarray) -> Self:
        return cls(config, np.ascontiguousarray(table, np.int32), np.ascontiguousarray(lengths, np.int64))

    @classmethod
    def dense(cls, store: Store, table: np.ndarray, lengths: np.ndarray) -> Self:
        """For reading everything, whatever the cache keeps."""
        return cls.of(_off(store.unit_tokens), table, lengths)

    @cached_property
    def num_groups(self) -> int:
        """G of the table, padding included."""
        return self.table.shape[1] * self.config.store.groups_per_unit

    @cached_property
    def ends(self) -> np.ndarray:
        """Groups of each sequence, the open one included [B] int64."""
        return -(-self.lengths // self.config.store.S)

    @cached_property
    def inside(self) -> np.ndarray:
        """[B, G] bool: not past the sequence's end."""
        return np.arange(self.num_groups) < self.ends[:, None]

    @cached_property
    def guards(self) -> np.ndarray:
        """[B, 2] int64: groups below the first and from the second on (to the end) are forced. The open group is always
        among the last."""
        read, size = self.config.read, self.config.store.S
        first = -(-np.minimum(read.first_tokens, self.lengths) // size)
        last = np.maximum(self.lengths - read.last_tokens, 0) // size
        first = np.where(self.lengths < read.min_context, self.ends, first)
        return np.stack([first, np.maximum(np.minimum(last, self.ends), first)], axis=1)

    @cached_property
    def forced(self) -> np.ndarray:
        """The guards as a mask [B, G] bool: the first and last tokens, the open group, everything below `min_context`.
        Groups without a summary are forced too, but known from the scores."""
        index = np.arange(self.num_groups)
        return ((index < self.guards[:, :1]) | (index >= self.guards[:, 1:])) & self.inside

    @cached_property
    def num_forced(self) -> np.ndarray:
        """Guards of each sequence [B] int64."""
        return self.guards[:, 0] + self.ends - self.guards[:, 1]

    @cached_property
    def refined(self) -> np.ndarray:
        """Groups of each sequence, per kv head, whose second bit scoring reads [B] int64."""
        return np.array([self.config.refined_groups(int(length)) for length in self.lengths], np.int64)

    @cached_property
    def num_open(self) -> np.ndarray:
        """Groups of each sequence that have no summary yet because not all that is summarised with them is written [B]
        int64."""
        store = self.config.store
        return -(-(self.lengths % store.sealed_tokens) // store.S)

    def staged(self, head_dim: int) -> list[np.ndarray]:
        """Groups of each sequence, per kv head, of which scoring reads each further part of codes: [B] int64 each."""

        def count() -> list[np.ndarray]:
            counts = [self.config.staged_groups(int(length), head_dim) for length in self.lengths]
            return [np.array(part, np.int64) for part in zip(*counts, strict=True)]

        return self.once(("staged", head_dim), count)

    def sums_after(self, passes: int, head_dim: int) -> bool:
        """Whether estimates are sums over query heads once `passes` further parts of codes, second bits among them,
        are read: of the last that is read."""
        read = self.config.read
        return read.combine == "sum" and passes == len(self.staged(head_dim)) + (read.refine > 0)

    def budget(self, num_forced: np.ndarray) -> np.ndarray:
        """Groups that topk visits of each sequence [B] int64: the budget, but all of the `num_forced` [B] and none past
        the end."""
        return np.minimum(np.maximum(self._budgets, num_forced), self.ends)

    @cached_property
    def _budgets(self) -> np.ndarray:
        return np.array([self.config.budget_groups(int(length)) for length in self.lengths], np.int64)

    # The ledger: every byte that a step's records count is counted by these four

    def dense_kv_bytes(self, spec: CacheSpec) -> int:
        """Return the bytes of K and V that dense attention reads in one layer."""
        return int(self.lengths.sum()) * spec.num_kv_heads * spec.kv_token_bytes

    def kv_bytes(self, spec: CacheSpec, num_selected: int) -> int:
        """Return the bytes of K and V of `num_selected` groups, summed over sequences and kv heads of one layer. A
        group is read whole, however many of its tokens are written."""
        return num_selected * self.config.store.S * spec.kv_token_bytes

    def summary_bytes(self, spec: CacheSpec) -> int:
        """Return the bytes that scoring reads of summaries in one layer: `bytes.scoring_bytes` of each kv head."""

        def count() -> int:
            return spec.num_kv_heads * scoring_bytes(self.config, spec.head_dim, self.lengths.tolist())

        return self.once(("summary_bytes", spec.head_dim, spec.num_kv_heads), count)

    def bound_bytes(self, spec: CacheSpec, num_skipped: int) -> int:
        """Return the bytes of key codes that bounds of `num_skipped` groups read, summed as in `kv_bytes`."""
        store = self.config.store
        return num_skipped * store.S * sealed_bytes(store.bound_store, spec.head_dim)

    def reads_all(self, layer: int) -> bool:
        """Whether the step needs no score in a layer: see `EpsConfig.reads_all`."""
        modes = self.config.read.head_modes
        key = "reads_all", None if modes is None else modes[layer]
        return self.once(key, lambda: self.config.reads_all(layer, self.lengths.tolist()))

    def fallbacks(self, layers: Sequence[int], windowed: Sequence[int] = ()) -> dict[str, int]:
        """reason -> layer calls of a gated step that attend densely: of `layers`, because the config says so; all of
        `windowed`, because they have a sliding window."""
        read = self.config.read
        dense_layers = sum(read.dense_layer(layer) for layer in layers)
        found = {
            "min_context": int((self.lengths < read.min_context).sum()) * len(layers),
            "dense_layer": dense_layers * len(self.lengths),
            "sliding_window": len(windowed) * len(self.lengths),
        }
        return {reason: calls for reason, calls in found.items() if calls}

    def missing(self, state: GroupState) -> np.ndarray:
        """Groups of each sequence without a valid summary [B, G] bool (False past its end): open (all of one mean
        together) or overwritten. Layers that were written alike share one answer."""

        def find() -> np.ndarray:
            missing = np.repeat(self._missing_seals(state), state.groups_per_seal, axis=1)
            size = state.group_tokens // state.groups_per_seal
            inside: np.ndarray = np.arange(missing.shape[1]) * size < self.lengths[:, None]
            return missing & inside

        return self.once(self._of_state("missing", state), find)

    def num_missing(self, state: GroupState) -> np.ndarray:
        """How many of these no guard covers [B] int64: they must be visited too."""

        def count() -> np.ndarray:
            missing = self._missing_seals(state)
            first = np.arange(missing.shape[1]) * state.groups_per_seal
            begin = np.maximum(first, self.guards[:, :1])
            end = np.minimum(first + state.groups_per_seal, self.guards[:, 1:])  # which is not past the sequence's end
            found: np.ndarray = (np.maximum(end - begin, 0) * missing).sum(axis=1)
            return found

        return self.once(self._of_state("num_missing", state), count)

    def num_always_selected_after_write(self, state: GroupState, finalizes: bool) -> np.ndarray:
        """Return how many groups of each sequence are always selected [B] int64 once the step has written its token,
        which `state` does not know of yet. `finalizes`: a group that the token fills gets its summary."""
        store = self.config.store
        together = np.arange(self.num_groups) // store.groups_per_seal
        written = (together == ((self.lengths - 1) // store.sealed_tokens)[:, None]) & self.inside
        fills = (self.lengths % store.sealed_tokens == 0)[:, None] & finalizes
        missing = np.where(written, ~fills, self.missing(state)) & ~self.forced
        found: np.ndarray = self.num_forced + missing.sum(axis=1)
        return found

    def _missing_seals(self, state: GroupState) -> np.ndarray:
        """What is summarised together and has no valid summary [B, G / groups_per_seal] bool."""

        def find() -> np.ndarray:
            per_unit = state.groups_per_unit
            seals = np.maximum(self.table, 0)[:, :, None] * per_unit + np.arange(per_unit)
            seals = seals.reshape(len(self.table), -1)
            ends = -(-self.lengths // state.group_tokens)
            index = np.arange(seals.shape[1])
            is_open = (index == ends[:, None] - 1) & (self.lengths % state.group_tokens != 0)[:, None]
            valid = state.valid(seals)
            missing: np.ndarray = (index < ends[:, None]) & (~valid | is_open)
            return missing

        return self.once(self._of_state("missing seals", state), find)

    @staticmethod
    def _of_state(what: str, state: GroupState) -> tuple[object, ...]:
        shape = state.group_tokens, state.groups_per_seal, state.groups_per_unit
        return what, *shape, state.history


@cache
def _off(unit_tokens: int) -> EpsConfig:
    return EpsConfig.of(method="off", block_size=unit_tokens)


def check_units(store: Store, nested: Store) -> None:
    """Raises ValueError unless summaries beside a cache's own (of bounds, of tails) lie in the same pool units."""
    if nested.unit_tokens != store.unit_tokens:
        raise ValueError(f"summaries in units of {nested.unit_tokens} tokens beside a cache of {store.unit_tokens}")
