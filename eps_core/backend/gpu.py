"""A GPU's kernels (Triton, Metal) over the arrays of a backend: what each supports, and the arrays it is handed.

Nothing here waits for the device. Kernels score `rq` unless it has bounds of its own: where array operations make
bounds they make the estimate with them, and a kernel of the estimate alone would save nothing. Kernels choose groups by
topk per kv head; the masks of other policies, of scope union and of head modes come from array operations, and a kernel
lists them (`listing`). Attention, of rows too, has kernels whatever was chosen.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from eps_core.attention.kernels import Kernel, KernelTable, unread_codes, unsupported_choice
from eps_core.attention.protocol import Array, RowsRead, Scores, Selection, State
from eps_core.backend.ops import Ops
from eps_core.config.eps import EpsConfig
from eps_core.kv_cache.rows import Rows
from eps_core.kv_cache.step_plan import StepPlan


class GpuKernels:
    """A backend's functions by a GPU's kernels, with the signatures of the array functions of the same names.

    A backend fills in its kernels, and what it does with its own arrays: everything up to `estimates`."""

    family: ClassVar[str]
    ops: ClassVar[Ops]
    attend_groups: ClassVar[Callable[..., State]]
    attend_all_rows: ClassVar[Callable[..., tuple[Array, Array, Array | None]]]
    select_topk: ClassVar[Callable[..., tuple[Array, ...]]]
    compact: ClassVar[Callable[..., tuple[Array, Array]]]

    def estimates(self, cache: Any, layer: int, q: Array, plan: StepPlan, table: Array, lengths: Array) -> Array:
        """Return the estimates [B, Hkv, G] of rq: table [B, M] and lengths [B] of `plan` on the device."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------ the backend's functions

    def on_device(self, cache: Any, plan: StepPlan | Rows) -> tuple[Array, Array]:
        """A step's or pass's table [B, M] and lengths [B] int32 on the device, copied once for all layers."""
        return plan.once(
            ("device", cache.device),
            lambda: (self.ops.on(cache, plan.table), self.ops.on(cache, plan.lengths.astype(np.int32))),
        )

    def pools(self, cache: Any, layer: int, plan: StepPlan | Rows) -> tuple[Any, Any, Array]:
        """Return K, V and the table [B, M] of a step or pass as attention's kernels read them."""
        return cache.k[layer], cache.v[layer], self.on_device(cache, plan)[0]

    def wanted(self, cache: Any, layer: int, plan: StepPlan) -> tuple[np.ndarray, np.ndarray, Array]:
        """Return how many groups of each sequence a layer always selects [B], and how many in all [B]: int64 on the
        host, and int32 on the device, copied once for all layers without a summary of the same groups."""
        always_selected = plan.num_always_selected + np.asarray(plan.num_missing(cache.state[layer]), np.int64)
        counts = plan.budget(always_selected)
        key = "wanted", cache.device, counts.tobytes()
        return always_selected, counts, plan.once(key, lambda: self.ops.on(cache, counts.astype(np.int32)))

    def score(self, cache: Any, layer: int, q: Array, plan: StepPlan) -> Scores:
        num_missing = plan.num_missing(cache.state[layer])
        with self.ops.place(cache):
            estimate = self.estimates(cache, layer, q, plan, *self.on_device(cache, plan))
        return Scores(estimate, None, None, num_missing, kernels=cache.kernels)

    def select(self, scores: Scores, plan: StepPlan, layer: int = 0) -> Selection:
        always_selected = plan.num_always_selected + np.asarray(scores.num_missing, np.int64)
        common_counts, estimate = plan.budget(always_selected), scores.estimate
        wanted, lengths = (self.ops.on(estimate, part.astype(np.int32)) for part in (common_counts, plan.lengths))
        width = max(int(common_counts.max()), 1)
        groups, counts, selected_mask, *_ = self.choose(plan.config, estimate, wanted, lengths, width)
        return Selection(groups, counts, common_counts, always_selected, selected_mask=self.ops.boolean(selected_mask))

    def choose(
        self, config: EpsConfig, estimate: Array, wanted: Array, lengths: Array, width: int
    ) -> tuple[Array, ...]:
        """Return groups [B, Hkv, width] int32, counts [B, Hkv] int32 and the mask [B, Hkv, G] uint8 of the `wanted` [B]
        int32 best groups of estimate [B, Hkv, G], from device arrays alone, and what else a kernel finds with them."""
        selection_config = config.selection_config
        return type(self).select_topk(
            estimate, wanted, lengths, group_size=config.cache_config.S,
            num_sink_tokens=selection_config.num_sink_tokens, num_recent_tokens=selection_config.num_recent_tokens,
            min_context=selection_config.min_context, width=width,
        )  # fmt: skip

    def attend(self, cache: Any, layer: int, q: Array, plan: StepPlan, selection: Selection | None) -> State:
        listed, counts = (None, None) if selection is None else (selection.groups, selection.counts)
        with self.ops.place(cache):
            k, v, table = self.pools(cache, layer, plan)
            lengths = self.on_device(cache, plan)[1]
            return type(self).attend_groups(q, k, v, table, lengths, listed, counts, group_size=cache.cache_config.S)

    def attend_rows(self, cache: Any, layer: int, q: Array, rows: Rows, selected_mask: Array | None = None) -> RowsRead:
        with self.ops.place(cache):
            k, v, table = self.pools(cache, layer, rows)
            lengths = self.on_device(cache, rows)[1]
            starts = rows.once(("starts", cache.device), lambda: self.ops.on(cache, rows.starts.astype(np.int32)))
            return RowsRead(
                *type(self).attend_all_rows(
                    q, k, v, table, lengths, starts,
                    most_rows=int(rows.num_rows.max()), group_size=cache.cache_config.S, selected_mask=selected_mask,
                )
            )  # fmt: skip

    def table(self, **more: Kernel) -> KernelTable:
        return KernelTable(
            self.family,
            score=Kernel(self.score, unsupported_scoring),
            select=Kernel(self.select, unsupported_choice),
            attend=Kernel(self.attend, unread_codes),
            attend_rows=Kernel(self.attend_rows, unread_codes),
            listing=type(self).compact,
            **more,
        )


def covers_codes(cache: Any) -> bool:
    """Return True where kernels score a cache by its codes: rq without bounds of its own."""
    return bool(cache.cache_config.method_spec.coded and not cache.cache_config.rq_bounds)


def unsupported_scoring(cache: Any, layer: int, q: Array, plan: StepPlan) -> str | None:
    if covers_codes(cache):
        return None
    return "rq with bounds of its own" if cache.cache_config.rq_bounds else f"method {cache.cache_config.method}"
