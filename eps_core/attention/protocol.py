"""The functions of a backend module, and the data that they exchange.

A backend is a module, not a class. Arrays are the backend's own (numpy, mlx or torch); everything that describes
*where* data lives (slots, tables, lengths) is numpy integers on the host, because the allocator that makes it is.
State is plain data: functions return the new cache and callers must rebind it (MLX copies on slice assignment, torch
aliases).

Letters: B sequences, N tokens in hand, Hq query heads, Hkv kv heads, R = Hq / Hkv, D head dim, P pool units,
U tokens per unit, S tokens per group, M units of a table, G groups of a table (M * U / S).
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from eps_core.config.cache import CacheConfig, CacheSpec
from eps_core.config.selection import SelectionConfig
from eps_core.kv_cache.rows import Rows
from eps_core.kv_cache.step_plan import StepPlan

Array = Any
State = tuple[Array, Array]  # out [.., D] and lse [..] of attention over a set of keys


@dataclass(frozen=True)
class Scores:
    """Scores of every group of every (sequence, kv head): the natural log of its softmax mass (scaled logits).

    `estimate` [B, Hkv, G] float32 speaks of max over the R query heads of log A_p, A_p = sum over the group of
    exp(scale q.k); or, where `SelectionConfig.combine` is "sum", of A_p / exp(anchor), and of the groups whose codes
    were read to the last of the log of its sum over the heads. A head's anchor is the logit of the sequence's first
    token, but at most `ANCHOR_SPREAD` from the mean of the heads', or a head without mass there would choose alone. It
    ranks (higher reads first) and is no bound. +inf marks a group without a valid summary (open or overwritten), -inf a
    group past the sequence's end.
    `lower` <= log A_p <= `upper`, each [B, Hkv, R, G] float32, hold for every q, query head by query head; None for a
    method without bounds. -inf and +inf where nothing is known, both -inf past the end.
    `slack` [B, Hkv, R] float32, nats: what float32 logits of any key of this cache may be off by (None as bounds are).
    `num_missing` [B] int64, host: groups without a valid summary beyond sink and recent tokens; also selected.
    """

    estimate: Array
    lower: Array | None
    upper: Array | None
    num_missing: np.ndarray
    slack: Array | None = None
    kernels: str = "arrays"  # the cache's, for the calls that take scores and no cache


@dataclass(frozen=True)
class Selection:
    """Selected groups: `groups` [B, Hkv, W] int32 ascending, then padding (-1); `counts` [B, Hkv] int32 (device).

    `common_counts` [B] int64, host: groups that every kv head of a sequence selects, where the number is the same for
    all and follows from shapes (topk per kv head), so that using it needs no synchronisation; else None.
    `always_selected` [B] int64, host: how many of the selected groups were sink and recent tokens or had no summary.
    `counts_before_union` [B, Hkv] int32 (device): groups each kv head alone selected, under scope union; else None.
    `selected_mask` [B, Hkv, G] bool (device): the same groups as a mask, where a kernel made the list; else None.

    Every policy selects at least one group. Where `common_counts` are given a partial group is always listed.
    """

    groups: Array
    counts: Array
    common_counts: np.ndarray | None
    always_selected: np.ndarray
    counts_before_union: Array | None = None
    selected_mask: Array | None = None


@dataclass(frozen=True)
class FusedRead:
    """A sparse layer computed at once: what the parts give one by one.

    `out` [B, Hq, D] in q's dtype and `lse` [B, Hq] float32; `skipped` [B, Hkv] float32: the estimated share of the
    softmax left unread; `stamps` [3] int64, on the host: when scoring began, attention began, and all ended, in ns, or
    None where the kernel is not `timed`. `selection` may lack lists until `lasting`.
    """

    out: Array
    lse: Array
    selection: Selection
    skipped: Array
    stamps: np.ndarray | None

    def lasting(self) -> "FusedRead":
        """Return the same with lists, in arrays that no later layer fills again, as this read's are."""
        return self


@dataclass(frozen=True)
class ErrorBound:
    """Bounds of what sparse attention may have left out, from valid bounds alone: both hold for every query.

    `mass` [B, Hkv] float32: the share of the softmax that was not read is at most this, for each of the R query heads.
    `error` [B, Hkv] float32: the output of each of them is within this of the dense one, in the L2 norm: of
    what was left out, not of the rounding that both share. Where a kv head read everything both are exactly 0.
    """

    mass: Array
    error: Array


@dataclass(frozen=True)
class RowsRead:
    """Dense attention of T rows (`kv_cache.rows.Rows`), each over every token before it and itself.

    `out` [T, Hq, D] in q's dtype; `lse` [T, Hq] float32: natural log of a row's softmax mass (scaled logits).
    `selected_lse` [T, Hq] float32: the same over the groups of `visit` alone, -inf where it has none, and by kernels
    also where those hold less than about e^-87 of the row's mass; None where no `visit` was given.
    """

    out: Array
    lse: Array
    selected_lse: Array | None = None


class Backend(Protocol):
    """The functions of a backend module, in the order in which each sibling file lists them."""

    def new_cache(self, spec: CacheSpec, cache_config: CacheConfig, device: str, kernels: str = "auto") -> Any: ...
    def usable_kernels(self, device: str) -> list[str]: ...
    def kernel_of(self, cache: Any, name: str) -> Callable[..., Any] | None: ...  # `attend_fused` is a kernel alone
    def write_kv(self, cache: Any, layer: int, k: Array, v: Array, slots: np.ndarray) -> Any: ...
    def write_kv_tentative(self, cache: Any, layer: int, k: Array, v: Array, slots: np.ndarray) -> Any: ...
    def move_kv(self, cache: Any, layer: int, src: np.ndarray, dst: np.ndarray) -> Any: ...
    def copy_units(self, cache: Any, src: Sequence[int], dst: Sequence[int]) -> Any: ...
    def export_units(self, cache: Any, units: Sequence[int]) -> dict[str, np.ndarray]: ...
    def import_units(self, cache: Any, units: Sequence[int], arrays: dict[str, np.ndarray]) -> Any: ...
    def grow(self, cache: Any, num_units: int) -> Any: ...
    def read_kv(self, cache: Any, layer: int, table: np.ndarray, length: int) -> tuple[Array, Array]: ...
    def score(self, cache: Any, layer: int, q: Array, plan: StepPlan) -> Scores: ...
    def select(self, scores: Scores, plan: StepPlan, layer: int = 0) -> Selection: ...
    def attend(self, cache: Any, layer: int, q: Array, plan: StepPlan, selection: Selection | None) -> State: ...
    def attend_rows(
        self, cache: Any, layer: int, q: Array, rows: Rows, selected_mask: Array | None = None
    ) -> RowsRead: ...
    def visits(self, cache: Any, drafts: Sequence[tuple[Selection, int] | None], num_groups: int) -> Array: ...
    def attend_own(self, cache: Any, q: Array, k: Array, v: Array) -> State: ...
    def attend_chunk(self, cache: Any, q: Array, k: Array, v: Array, seen: np.ndarray | None = None) -> Array: ...
    def weights(self, cache: Any, q: Array, k: Array, seen: np.ndarray) -> Array: ...
    def merge(self, first: State, second: State) -> State: ...
    def unread_share(self, lse: Array, lse_all: Array, kv_heads: int) -> Array: ...
    def bounds(
        self, cache: Any, layer: int, q: Array, plan: StepPlan, scores: Scores, selection: Selection
    ) -> Scores: ...
    def bound_error(
        self, cache: Any, layer: int, scores: Scores, selected: Selection, out: Array, lse: Array
    ) -> ErrorBound: ...
    def extend_selection(
        self, selection_config: SelectionConfig, scores: Scores, selection: Selection, lse: Array
    ) -> tuple[Selection, Selection]: ...
    def skipped_mass(self, scores: Scores, selection: Selection) -> Array: ...
    def check_finite(self, cache: Any) -> None: ...
    def span(self, name: str, cache: Any) -> AbstractContextManager[Any]: ...
    def take(self, cache: Any, array: Array, index: np.ndarray) -> Array: ...
    def wait(self, cache: Any, *arrays: Array) -> None: ...
    def to_host(self, cache: Any, arrays: Sequence[Array]) -> list[np.ndarray]: ...
    def load_model(self, path: Path, spec: Any, dtype: str, device: str) -> Any: ...  # decode.forward.Arithmetic
    def to_numpy(self, array: Array) -> np.ndarray: ...
    def from_numpy(self, array: np.ndarray, dtype: str, device: str) -> Array: ...
    def devices(self) -> list[str]: ...
    def device_name(self, device: str) -> str: ...
    def versions(self) -> dict[str, str]: ...
