"""Statistics of what one decode step read, layer by layer."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class LayerStats:
    """Statistics of one layer in one decode step. Host values, filled after the step's only synchronisation."""

    counts: np.ndarray  # [B, Hkv] groups selected
    groups: np.ndarray  # [B] groups of each sequence; [B, Hkv] where each head keeps its own tokens
    always_selected: np.ndarray  # [B] of those selected, always (every kv head alike); [B, Hkv] as above
    skipped_mass: np.ndarray | None  # [B, Hkv] estimated share of the softmax left unread; None: no estimate
    kv_bytes_read: int  # of K and V, all sequences and kv heads (`StepPlan.kv_bytes`)
    summary_bytes_read: int  # of summaries and codes (`StepPlan.summary_bytes`, `StepPlan.bound_bytes`)
    prepass_ms: float | None = None
    attention_ms: float | None = None
    counts_before_union: np.ndarray | None = None  # [B, Hkv] groups each kv head alone selected; None: not scope union
    skipped_mass_bound: np.ndarray | None = None  # [B, Hkv] bound of the share left unread; None: no bounds
    output_error_bound: np.ndarray | None = None  # [B, Hkv] bound of the L2 error of a query head's output
    skipped_mass_true: np.ndarray | None = None  # [B, Hkv] share left unread, from a dense read; audits only
    extended: np.ndarray | None = None  # [B, Hkv] groups of `counts` that strict mode added


@dataclass(frozen=True)
class Eviction:
    """Statistics of a cache that evicts: what it holds of a step's sequences, and the rows and units it evicted."""

    bytes_kept: int  # K and V of the rows of all layers and heads, before this step's evictions
    rows_moved: int
    units_freed: int  # of the pool: `CacheConfig.unit_tokens` rows of one head each


@dataclass
class StepOutput:
    """Result of one decode step. `logits` [B, V] float32 on the host; `layers` empty where nothing was sparse.
    `kv_bytes_read` counts K and V of all layers."""

    logits: np.ndarray
    kv_bytes_read: int
    layers: list[LayerStats] = field(default_factory=list)
    fallbacks: dict[str, int] = field(default_factory=dict)  # reason -> layer calls that attended densely
    dense_logits: np.ndarray | None = None  # [B, V] of a dense step over the same cache; audits only
    # of a draft: what each layer selected, on the device; None: everything
    selections: list[Any] = field(default_factory=list)
    eviction: Eviction | None = None  # None: everything is kept


@dataclass
class VerifyOutput:
    """Result of one verify pass over T rows (`kv_cache.rows.Rows`)."""

    logits: np.ndarray  # [T, V] float32, host
    kv_bytes_read: int  # of all layers; once for all rows of a sequence, in layers with a window once a row
    kv: list[tuple[Any, Any]]  # of each layer k, v [T, Hkv, D] on the device: what `Decoder.commit` writes
    # [L, T, Hkv] of the dense softmax the share outside the groups that were asked for, the largest of the query heads
    unread: np.ndarray | None = None
