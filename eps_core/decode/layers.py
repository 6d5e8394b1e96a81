"""The attention of one layer in every kind of pass: over everything, which EPS reads sparsely, or over a sliding
window, which is dense. The cache keeps all keys and values of both; a window reads the last of them."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eps_core.attention.layer import Clock, LayerRead, attend_prefill, dense_read, sparse_attention
from eps_core.attention.protocol import Array, Backend, RowsRead, Selection
from eps_core.kv_cache.rows import Rows
from eps_core.kv_cache.step_plan import StepPlan
from eps_core.models.spec import ModelSpec

Drafts = Sequence[tuple[Selection, int] | None]  # of each row what a draft step selected, None: everything


@dataclass(frozen=True)
class FullLayer:
    """A layer whose tokens attend to all before them. Letters as in `attention.protocol`."""

    backend: Backend
    layer: int

    def chunk(self, cache: Any, q: Array, table: np.ndarray, length: int) -> Array:
        """`attention.attend_prefill`."""
        return attend_prefill(self.backend, cache, self.layer, q, table, length)

    def dense(self, cache: Any, q: Array, plan: StepPlan) -> Array:
        """out [B, Hq, D] of a dense step, whose K and V are in the cache."""
        return self.backend.attend(cache, self.layer, q, plan, None)[0]

    def dense_kv_bytes(self, cache: Any, plan: StepPlan) -> int:
        """Return the bytes of K and V that a dense step reads."""
        return plan.dense_kv_bytes(cache.spec)

    def rows_kv_bytes(self, cache: Any, rows: Rows) -> int:
        """Return the bytes of K and V that a verify pass reads."""
        return rows.kv_bytes(cache.spec)

    def sparse(
        self, cache: Any, q: Array, plan: StepPlan, audit: bool = False, clock: Clock | None = None
    ) -> tuple[Array, LayerRead]:
        """`attention.sparse_attention`."""
        return sparse_attention(self.backend, cache, self.layer, q, plan, audit, clock)

    def before(self, cache: Any, q: Array, k: Array, v: Array, plan: StepPlan, slots: np.ndarray) -> tuple[Any, Array]:
        """(cache, out [B, Hq, D]) of a dense step whose K and V [B, Hkv, D] are not written yet, nor here."""
        before = plan.once("before", lambda: StepPlan.dense(cache.cache_config, plan.table, plan.lengths - 1))
        earlier = self.backend.attend(cache, self.layer, q, before, None)
        return cache, self.backend.merge(earlier, self.backend.attend_own(cache, q, k, v))[0]

    def rows(self, cache: Any, q: Array, rows: Rows, drafts: Drafts | None) -> RowsRead:
        """A verify pass; `drafts` as `Decoder.verify` has them."""
        num_groups = rows.table.shape[1] * cache.cache_config.groups_per_unit
        selected_mask = None if drafts is None else self.backend.visits(cache, drafts, num_groups)
        return self.backend.attend_rows(cache, self.layer, q, rows, selected_mask)


@dataclass(frozen=True)
class WindowLayer(FullLayer):
    """A layer whose tokens attend to the last `window` tokens, themselves included."""

    window: int

    def chunk(self, cache: Any, q: Array, table: np.ndarray, length: int) -> Array:
        k, v = self.backend.read_kv(cache, self.layer, table, length)
        out = q * 1
        for start in range(0, len(q), self.window):  # more queries at a time read more keys that none of them sees
            rows, begin = q[start : start + self.window], length - len(q) + start
            seen = slice(max(begin - self.window + 1, 0), begin + len(rows))
            mask = _within(self.window, len(rows), begin - seen.start)
            out[start : start + len(rows)] = self.backend.attend_chunk(cache, rows, k[seen], v[seen], mask)
        return out

    def dense(self, cache: Any, q: Array, plan: StepPlan) -> Array:
        unit, out = cache.cache_config.unit_tokens, q * 1
        for row, length in enumerate(plan.lengths.tolist()):
            first = max(length - self.window, 0)
            skipped = first // unit  # units that lie before the window
            k, v = self.backend.read_kv(cache, self.layer, plan.table[row, skipped:], length - skipped * unit)
            first -= skipped * unit
            out[row : row + 1] = self.backend.attend_chunk(cache, q[row : row + 1], k[first:], v[first:])
        return out

    def dense_kv_bytes(self, cache: Any, plan: StepPlan) -> int:
        return self._cut(cache, plan).dense_kv_bytes(cache.spec)

    def rows_kv_bytes(self, cache: Any, rows: Rows) -> int:
        return self.dense_kv_bytes(cache, _one_by_one(cache, rows))

    def sparse(
        self, cache: Any, q: Array, plan: StepPlan, audit: bool = False, clock: Clock | None = None
    ) -> tuple[Array, LayerRead]:
        """(out, what was read) of dense attention within the window."""
        started = None if clock is None else clock(cache, q)
        with self.backend.span("eps.attention", cache):
            out = self.dense(cache, q, plan)
        read = dense_read(cache, self._cut(cache, plan))
        nothing = np.zeros((len(plan.lengths), cache.spec.num_kv_heads))
        if cache.cache_config.has_bounds:
            read.stats.skipped_mass_bound = read.stats.output_error_bound = nothing
        if audit:
            read.stats.skipped_mass_true = nothing
        if clock is not None and started is not None:
            read.stats.prepass_ms, read.stats.attention_ms = 0.0, 1000 * (clock(cache, out) - started)
        return out, read

    def before(self, cache: Any, q: Array, k: Array, v: Array, plan: StepPlan, slots: np.ndarray) -> tuple[Any, Array]:
        """K and V are placed, which the step's own write repeats."""
        cache = self.backend.write_kv_tentative(cache, self.layer, k, v, slots)
        return cache, self.dense(cache, q, plan)

    def rows(self, cache: Any, q: Array, rows: Rows, drafts: Drafts | None) -> RowsRead:
        """Row by row, as steps attend; `lse` is None, and no draft left anything out."""
        return RowsRead(self.dense(cache, q, _one_by_one(cache, rows)), None)

    def _cut(self, cache: Any, plan: StepPlan) -> StepPlan:
        """The same sequences as if they had the window's tokens alone: for what is counted."""
        return plan.once(
            ("window", self.window),
            lambda: StepPlan.dense(cache.cache_config, plan.table, np.minimum(plan.lengths, self.window)),
        )


@functools.lru_cache(maxsize=1)  # all layers and most chunks ask for one
def _within(window: int, num_rows: int, num_before: int) -> np.ndarray:
    """Return which of `num_before` tokens and of the N rows themselves each row has in its window, [N, before + N]
    bool. The array is shared between layers: do not write to it."""
    ages = np.arange(num_before, num_before + num_rows)[:, None] - np.arange(num_before + num_rows)
    return (ages >= 0) & (ages < window)


def _one_by_one(cache: Any, rows: Rows) -> StepPlan:
    """Every row of a verify pass as a sequence of its own."""
    return rows.once("one by one", lambda: StepPlan.dense(cache.cache_config, rows.table[rows.sequence], rows.seen))


def layers_of(backend: Backend, spec: ModelSpec) -> list[FullLayer]:
    """The attention of every layer of a model."""
    windows = spec.windows or (None,) * spec.num_layers
    return [
        FullLayer(backend, layer) if window is None else WindowLayer(backend, layer, window)
        for layer, window in enumerate(windows)
    ]


def run_layers(model: Any, x: Array, turn: Any, attention: Callable[[int, Array, Array, Array], Array]) -> Array:
    """Return the residual stream [N, hidden] after all layers of a `decode.forward.Arithmetic`: the one loop of every
    pass. `turn` is the model's rotation of the N positions; `attention` takes (layer, q [N, Hq, D], k, v [N, Hkv, D]),
    writes K and V where the pass needs that, and returns out [N, Hq, D]."""
    for layer in range(model.spec.num_layers):
        out = attention(layer, *model.project(layer, x, turn))
        x = model.after_attention(layer, x, out)
    return x
