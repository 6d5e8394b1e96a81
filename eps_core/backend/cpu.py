"""The compiled CPU kernels (`eps_core.cpu`) over the arrays of a backend that lie in the memory of the host."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import numpy as np

from eps_core.attention.kernels import Kernel, KernelTable, unread_codes, unsupported_choice
from eps_core.attention.protocol import Array, FusedRead, RowsRead, Scores, Selection, State
from eps_core.backend.ops import Ops
from eps_core.config.cache import CacheConfig
from eps_core.cpu import calls, kernels, write
from eps_core.cpu.calls import Call, Chosen, Host
from eps_core.kv_cache.counts import check_query
from eps_core.kv_cache.rows import Rows
from eps_core.kv_cache.step_plan import StepPlan
from eps_core.summaries.rq import part_dims


class CpuKernels:
    """A backend's functions by compiled kernels, with the signatures of the array functions of the same names.

    A backend fills in what it does with its own arrays: the methods up to `run`."""

    ops: ClassVar[Ops]

    def place(self, cache: Any) -> AbstractContextManager[Any]:
        """Return the context in which the arrays of a cache are computed."""
        return self.ops.place(cache)

    def host(self, array: Array) -> np.ndarray:
        """Return the array's own memory; bfloat16 as uint16."""
        raise NotImplementedError

    def array(self, array: np.ndarray) -> Array:
        """Return the backend's array of a host array."""
        raise NotImplementedError

    def pools(self, cache: Any) -> Host:
        """Return what shows the arrays that a cache keeps."""
        return Host(self.host)

    def run(self, kernel: Any, phases: int, *args: Any, alone: bool = False) -> None:
        """Run a kernel in every thread."""
        from eps_core.cpu import threads

        threads.run(kernel, phases, *args, alone=alone)

    # ------------------------------------------------------------------------------------------ the backend's functions

    def score(self, cache: Any, layer: int, q: Array, plan: StepPlan) -> Scores:
        with self.place(cache):
            query = self._query(q)
            estimate = np.empty((len(query), cache.spec.num_kv_heads, plan.num_groups), np.float32)
            self._run(calls.scoring(cache, layer, query, plan, self.pools(cache), estimate))
            missing = plan.num_missing(cache.state[layer])
            return Scores(self.array(estimate), None, None, missing, kernels=cache.kernels)

    def select(self, scores: Scores, plan: StepPlan, layer: int = 0) -> Selection:
        call, chosen = calls.choosing(plan, self.host(scores.estimate), scores.num_missing)
        self._run(call)
        return self.selection(chosen)

    def attend_fused(self, cache: Any, layer: int, q: Array, plan: StepPlan) -> FusedRead:
        """Return the results of `score`, `select`, `attend` and `skipped_mass` for q [B, Hq, D], unscaled, to the last
        bit. Raises ValueError for q that does not fit the cache."""
        check_query(cache.spec, q.shape)
        with self.place(cache):
            query = self._query(q)
            skipped, stamps = np.empty((len(query), cache.spec.num_kv_heads), np.float32), np.zeros(3, np.int64)
            call, found = kernels.fused_call(cache, layer, query, plan, self.pools(cache), skipped, stamps)
            self._run(call)
            out, lse = found.read
            chosen = self.selection(found.chosen)
            return FusedRead(
                self.ops.cast(self.array(out), q.dtype), self.array(lse), chosen, self.array(skipped), stamps
            )

    def attend(self, cache: Any, layer: int, q: Array, plan: StepPlan, selection: Selection | None) -> State:
        with self.place(cache):
            listed = None if selection is None else (self.host(selection.groups), self.host(selection.counts))
            query = self._query(q)
            call, (out, lse) = calls.attending(cache, layer, query, plan, listed, self.pools(cache))
            self._run(call)
            return self.ops.cast(self.array(out), q.dtype), self.array(lse)

    def attend_prefill(self, cache: Any, layer: int, q: Array, table: np.ndarray, length: int) -> Array:
        """See `attention.layer.attend_prefill`: attention of rows, block by block of the chunk. Raises ValueError for q
        that does not fit the cache, or more tokens than the table holds."""
        check_query(cache.spec, q.shape)
        held = len(table) * cache.cache_config.unit_tokens
        if not len(q) <= length <= held:
            raise ValueError(f"{len(q)} tokens of {length} in a table of {held}")
        block_rows = max(kernels.PREFILL_LANES * cache.spec.num_kv_heads // q.shape[1], 1)
        about = {
            "task_tokens": kernels.PREFILL_TASK_TOKENS,
            "weight_parts": 1 if q.dtype == self.ops.dtypes["bfloat16"] else 2,
        }
        outs = []
        for start in range(0, len(q), kernels.PREFILL_ROWS):
            piece = q[start : start + kernels.PREFILL_ROWS]
            rows = Rows.in_blocks(table, length - len(q) + start + len(piece), len(piece), block_rows)
            outs.append(self.attend_rows(cache, layer, piece, rows, **about).out)
        return outs[0] if len(outs) == 1 else self.ops.concatenate(outs)

    def attend_rows(
        self, cache: Any, layer: int, q: Array, rows: Rows, selected_mask: Array | None = None, **more: int
    ) -> RowsRead:
        with self.place(cache):
            listed = None if selected_mask is None else self.host(self.ops.boolean(selected_mask))
            query, is_short = self._query(q), q.dtype == self.ops.dtypes["bfloat16"]
            out, lse, selected = kernels.attend_rows(
                cache, layer, query, is_short, rows, listed, self.pools(cache), self.run, **more
            )
            selected_lse = None if selected is None else self.array(selected)
            return RowsRead(self.ops.cast(self.array(out), q.dtype), self.array(lse), selected_lse)

    def skipped_mass(self, scores: Scores, selection: Selection) -> Array:
        estimate = self.host(scores.estimate)
        shares = np.empty(estimate.shape[:2], np.float32)
        self._run(calls.summing_skipped(estimate, self.host(selection.selected_mask), shares))
        return self.array(shares)

    def build_summary(self, cache_config: CacheConfig, constants: dict[str, Array], k: Array) -> dict[str, Array]:
        """See `summaries.table.build_summary`: k [F, Hkv, U, D] of units of U tokens."""
        keys = self.host(self.ops.float32(k.swapaxes(1, 2)))
        dims = part_dims(cache_config, keys.shape[-1])
        fields = write.build(
            keys, cache_config.S, self.host(constants["signs"]), dims, cache_config.second_bit, self.run
        )
        return {name: self.array(field) for name, field in fields.items()}

    def table(self, settle: Callable[[], None] | None = None) -> KernelTable:
        return KernelTable(
            "numba",
            build_summary=Kernel(self.build_summary, _unsupported_building),
            score=Kernel(self.score, lambda cache, layer, q, plan: calls.unsupported_scoring(cache, plan)),
            select=Kernel(self.select, unsupported_choice),
            attend=Kernel(self.attend, unread_codes),
            attend_rows=Kernel(self.attend_rows, unread_codes),
            skipped_mass=Kernel(self.skipped_mass, _unsupported_sum),
            attend_fused=Kernel(self.attend_fused, unsupported_layer, timed=True),
            attend_prefill=Kernel(self.attend_prefill, unread_codes),
            settle=settle,
        )

    def _query(self, q: Array) -> np.ndarray:
        """Return q in float32, contiguous."""
        return np.ascontiguousarray(self.host(self.ops.float32(q)))

    def _run(self, call: Call) -> None:
        self.run(call.kernel, call.phases, *call.args, alone=call.alone)

    def selection(self, chosen: Chosen) -> Selection:
        groups, counts, selected_mask = map(self.array, (chosen.groups, chosen.counts, chosen.selected_mask))
        return Selection(groups, counts, chosen.common_counts, chosen.always_selected, selected_mask=selected_mask)


def _unsupported_building(cache_config: CacheConfig, constants: dict[str, Array], k: Array) -> str | None:
    return "rq with bounds of its own" if cache_config.rq_bounds else None


def _unsupported_sum(scores: Scores, selection: Selection) -> str | None:
    return "groups that array operations chose" if selection.selected_mask is None else None


def unsupported_layer(cache: Any, layer: int, q: Array, plan: StepPlan) -> str | None:
    if cache.cache_config.has_bounds:
        return "bounds"
    return unread_codes(cache) or unsupported_choice(None, plan, layer) or calls.unsupported_scoring(cache, plan)
