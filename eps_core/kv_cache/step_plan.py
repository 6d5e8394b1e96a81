"""Where a step's tokens lie, and what the host knows of their groups before any score: sink and recent tokens, budgets,
groups without a summary. Integers only, computed once a step and not once a layer.

Every array backend shares this; the oracle's own, `reference.selection`, is written apart and judges it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Self

import numpy as np

from eps_core.config.bytes import scoring_bytes, span_bytes
from eps_core.config.cache import CacheConfig, CacheSpec
from eps_core.config.eps import EpsConfig
from eps_core.kv_cache.groups import GroupState
from eps_core.kv_cache.shared import Shared


@dataclass(frozen=True, eq=False)
class StepPlan(Shared):
    """One step: of B sequences the units that they lie in and their lengths, the new token counted, and how to read
    them."""

    config: EpsConfig  # what the cache keeps, and this step's read
    table: np.ndarray  # [B, M] int32 pool units, padding -1
    lengths: np.ndarray  # [B] int64 tokens

    @classmethod
    def of(cls, config: EpsConfig, table: np.ndarray, lengths: np.ndarray) -> Self:
        return cls(config, np.ascontiguousarray(table, np.int32), np.ascontiguousarray(lengths, np.int64))

    @classmethod
    def dense(cls, cache_config: CacheConfig, table: np.ndarray, lengths: np.ndarray) -> Self:
        """For reading everything, whatever the cache keeps."""
        return cls.of(_off(cache_config.unit_tokens), table, lengths)

    @cached_property
    def num_groups(self) -> int:
        """G of the table, padding included."""
        return self.table.shape[1] * self.config.cache_config.groups_per_unit

    @cached_property
    def ends(self) -> np.ndarray:
        """Groups of each sequence, the open one included [B] int64."""
        return -(-self.lengths // self.config.cache_config.S)

    @cached_property
    def inside(self) -> np.ndarray:
        """[B, G] bool: not past the sequence's end."""
        return np.arange(self.num_groups) < self.ends[:, None]

    @cached_property
    def selectable(self) -> np.ndarray:
        """[B, 2] int64: groups below the first and from the second on (to the end) are always selected. The partial
        group is always among the last."""
        selection_config, size = self.config.selection_config, self.config.cache_config.S
        first = -(-np.minimum(selection_config.num_sink_tokens, self.lengths) // size)
        last = np.maximum(self.lengths - selection_config.num_recent_tokens, 0) // size
        first = np.where(self.lengths < selection_config.min_context, self.ends, first)
        return np.stack([first, np.maximum(np.minimum(last, self.ends), first)], axis=1)

    @cached_property
    def always_selected(self) -> np.ndarray:
        """A mask [B, G] bool of the groups always selected: the first and last tokens, the partial group, everything
        below `min_context`. Groups without a summary are always selected too, but known from the scores."""
        index = np.arange(self.num_groups)
        return ((index < self.selectable[:, :1]) | (index >= self.selectable[:, 1:])) & self.inside

    @cached_property
    def num_always_selected(self) -> np.ndarray:
        """Sink and recent tokens of each sequence [B] int64."""
        return self.selectable[:, 0] + self.ends - self.selectable[:, 1]

    @cached_property
    def rescored(self) -> np.ndarray:
        """Groups of each sequence, per kv head, whose rescoring bit scoring reads [B] int64."""
        return np.array([self.config.rescored_groups(int(length)) for length in self.lengths], np.int64)

    @cached_property
    def num_open(self) -> np.ndarray:
        """Groups of each sequence that have no summary yet because not all that is summarised with them is written [B]
        int64."""
        cache_config = self.config.cache_config
        return -(-(self.lengths % cache_config.span_tokens) // cache_config.S)

    def cascaded(self, head_dim: int) -> list[np.ndarray]:
        """Groups of each sequence, per kv head, of which scoring reads each further part of codes: [B] int64 each."""

        def count() -> list[np.ndarray]:
            counts = [self.config.cascade_groups(int(length), head_dim) for length in self.lengths]
            return [np.array(part, np.int64) for part in zip(*counts, strict=True)]

        return self.once(("staged", head_dim), count)

    def sums_after(self, passes: int, head_dim: int) -> bool:
        """Return whether estimates are sums over query heads once `passes` further parts of codes, rescoring bits among
        them, are read: of the last that is read."""
        last = len(self.cascaded(head_dim)) + (self.config.selection_config.rescore > 0)
        return self.config.selection_config.combine == "sum" and passes == last

    def budget(self, num_always_selected: np.ndarray) -> np.ndarray:
        """Groups that topk selects of each sequence [B] int64: the budget, but all of the `num_always_selected` [B] and
        none past the end."""
        return np.minimum(np.maximum(self._budgets, num_always_selected), self.ends)

    @cached_property
    def _budgets(self) -> np.ndarray:
        return np.array([self.config.budget_groups(int(length)) for length in self.lengths], np.int64)

    # The ledger: every byte that a step's records count is counted by these four

    def dense_kv_bytes(self, spec: CacheSpec) -> int:
        """Return the bytes of K and V that dense attention reads in one layer."""
        return self._num_tokens * spec.num_kv_heads * spec.kv_token_bytes

    @cached_property
    def _num_tokens(self) -> int:
        return int(self.lengths.sum())

    def kv_bytes(self, spec: CacheSpec, num_selected: int) -> int:
        """Return the bytes of K and V of `num_selected` groups, summed over sequences and kv heads of one layer. A
        group is read whole, however many of its tokens are written."""
        return num_selected * self.config.cache_config.S * spec.kv_token_bytes

    def summary_bytes(self, spec: CacheSpec) -> int:
        """Return the bytes that scoring reads of summaries in one layer: `bytes.scoring_bytes` of each kv head."""
        each = self.once(
            ("summary_bytes", spec.head_dim), lambda: scoring_bytes(self.config, spec.head_dim, self.lengths.tolist())
        )
        return spec.num_kv_heads * each

    def bound_bytes(self, spec: CacheSpec, num_skipped: int) -> int:
        """Return the bytes of key codes that bounds of `num_skipped` groups read, summed as in `kv_bytes`."""
        cache_config = self.config.cache_config
        return num_skipped * cache_config.S * span_bytes(cache_config.bound_store, spec.head_dim)

    def reads_all(self, layer: int) -> bool:
        """Return whether the step needs no score in a layer: see `EpsConfig.reads_all`."""
        modes = self.config.selection_config.head_modes
        key = "reads_all", None if modes is None else modes[layer]
        return self.once(key, lambda: self.config.reads_all(layer, self.lengths.tolist()))

    def fallbacks(self, layers: Sequence[int], windowed: Sequence[int] = ()) -> dict[str, int]:
        """reason -> layer calls of a sparse step that attend densely: of `layers`, because the config says so; all of
        `windowed`, because they have a sliding window."""
        selection_config = self.config.selection_config
        dense_layers = sum(selection_config.dense_layer(layer) for layer in layers)
        found = {
            "min_context": int((self.lengths < selection_config.min_context).sum()) * len(layers),
            "dense_layer": dense_layers * len(self.lengths),
            "sliding_window": len(windowed) * len(self.lengths),
        }
        return {reason: calls for reason, calls in found.items() if calls}

    def missing(self, state: GroupState) -> np.ndarray:
        """Groups of each sequence without a valid summary [B, G] bool (False past its end): open (all of one mean
        together) or overwritten. Layers that were written alike share one answer."""

        def find() -> np.ndarray:
            missing = np.repeat(self._missing_spans(state), state.groups_per_span, axis=1)
            size = state.group_size // state.groups_per_span
            inside: np.ndarray = np.arange(missing.shape[1]) * size < self.lengths[:, None]
            return missing & inside

        return self.once(self._of_state("missing", state), find)

    def num_missing(self, state: GroupState) -> np.ndarray:
        """Return how many of these are not sink or recent tokens [B] int64: they must be selected too."""
        key = self._of_state("num_missing", state)
        return self.once(key, lambda: self._num_selectable(state, self._missing_spans(state)))

    def num_always_selected_after_write(self, state: GroupState, finalizes: bool) -> np.ndarray:
        """Return how many groups of each sequence are always selected [B] int64 once the step has written its token,
        which `state` does not know of yet. `finalizes`: a group that the token fills gets its summary."""
        missing, span_tokens = self._missing_spans(state).copy(), self.config.cache_config.span_tokens
        fills = (self.lengths % span_tokens == 0) & finalizes
        missing[np.arange(len(missing)), (self.lengths - 1) // span_tokens] = ~fills
        return self.num_always_selected + self._num_selectable(state, missing)

    def _num_selectable(self, state: GroupState, spans: np.ndarray) -> np.ndarray:
        """Groups of each sequence that lie in the spans of a mask and are not sink or recent tokens [B] int64."""
        first = np.arange(spans.shape[1]) * state.groups_per_span
        begin = np.maximum(first, self.selectable[:, :1])
        end = np.minimum(first + state.groups_per_span, self.selectable[:, 1:])  # not past the sequence's end
        found: np.ndarray = (np.maximum(end - begin, 0) * spans).sum(axis=1)
        return found

    def _missing_spans(self, state: GroupState) -> np.ndarray:
        """Return which spans have no valid summary [B, G / groups_per_span] bool."""

        def find() -> np.ndarray:
            per_unit = state.groups_per_unit
            spans = np.maximum(self.table, 0)[:, :, None] * per_unit + np.arange(per_unit)
            spans = spans.reshape(len(self.table), -1)
            ends = -(-self.lengths // state.group_size)
            index = np.arange(spans.shape[1])
            is_open = (index == ends[:, None] - 1) & (self.lengths % state.group_size != 0)[:, None]
            valid = state.valid(spans)
            missing: np.ndarray = (index < ends[:, None]) & (~valid | is_open)
            return missing

        return self.once(self._of_state("missing spans", state), find)

    @staticmethod
    def _of_state(what: str, state: GroupState) -> tuple[object, ...]:
        shape = state.group_size, state.groups_per_span, state.groups_per_unit
        return what, *shape, state.history


@cache
def _off(unit_tokens: int) -> EpsConfig:
    return EpsConfig.of(method="off", block_size=unit_tokens)


def check_units(cache_config: CacheConfig, nested: CacheConfig) -> None:
    """Raises ValueError unless summaries beside a cache's own, of bounds, lie in the same pool units."""
    if nested.unit_tokens != cache_config.unit_tokens:
        raise ValueError(
            f"summaries in units of {nested.unit_tokens} tokens beside a cache of {cache_config.unit_tokens}"
        )
