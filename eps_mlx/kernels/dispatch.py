"""The functions of the backend through Metal kernels (see `eps_core.backend.gpu`). The codes of rq are read in stages,
each by one kernel over what the one before left. One kernel writes a decode step's K and V, as they are."""

from typing import Any

import mlx.core as mx
import numpy as np

from eps_core.attention.kernels import Kernel, unread_codes, unsupported_choice
from eps_core.attention.protocol import FusedRead, Selection
from eps_core.backend import scoring
from eps_core.backend.gpu import GpuKernels, unsupported_scoring
from eps_core.backend.pages import CodePool
from eps_core.kv_cache.rows import Rows
from eps_core.kv_cache.step_plan import StepPlan
from eps_mlx.cache import Cache
from eps_mlx.kernels import attend as attend_kernels
from eps_mlx.kernels import rows as rows_kernels
from eps_mlx.kernels import select as select_kernels
from eps_mlx.kernels.turn_units import turn_units
from eps_mlx.kernels.units import read_on, score_units
from eps_mlx.kernels.values import OpenPool
from eps_mlx.kernels.write import write_tokens
from eps_mlx.open_units import OpenUnits
from eps_mlx.ops import OPS


class MetalKernels(GpuKernels):
    family, ops = "metal", OPS
    attend_groups = attend_kernels.attend_groups
    attend_all_rows = rows_kernels.attend_rows
    select_topk = select_kernels.select_topk
    compact = select_kernels.compact

    def pools(self, cache: Cache, layer: int, plan: StepPlan | Rows) -> tuple[Any, Any, mx.array]:
        opened: OpenUnits = cache.k.opened
        units = opened.units[layer]
        if not len(units):
            return super().pools(cache, layer, plan)
        (k, v), (k_open, v_open) = opened.pools, opened.held[layer]
        key = "open", cache.device, units.tobytes()
        table = plan.once(key, lambda: mx.array(opened.places(layer, plan.table)))
        return OpenPool(k[layer], k_open), OpenPool(v[layer], v_open), table

    def attend_fused(self, cache: Cache, layer: int, q: mx.array, plan: StepPlan) -> FusedRead:
        """A layer whose K and V are written: the parts, but what was skipped is summed where groups are chosen."""
        with OPS.place(cache):
            table, lengths = self.on_device(cache, plan)
            always_selected, common_counts, wanted = self.wanted(cache, layer, plan)
            estimate = self.estimates(cache, layer, q, plan, table, lengths)
            width = max(int(common_counts.max()), 1)
            groups, counts, mask, skipped = self.choose(plan.config, estimate, wanted, lengths, width)
            selection = Selection(groups, counts, common_counts, always_selected, selected_mask=OPS.boolean(mask))
            return FusedRead(*self.attend(cache, layer, q, plan, selection), selection, skipped, None)

    def place_rows(
        self, cache: Cache, layer: int, k: mx.array, v: mx.array, slots: np.ndarray, draft: bool
    ) -> tuple[mx.array, mx.array] | None:
        """K and V [N, Hkv, D] as they were stored in the units that are open from now on; None of tokens that share a
        unit, and of pools of codes: no kernel writes these. Pools of summaries that must follow may be written then."""
        opened: OpenUnits = cache.k.opened
        with OPS.place(cache):
            found = None if cache.spec.quantised else opened.open(layer, slots)
            if found is None:
                return None
            *written, finite = write_tokens(k, v, *found, cache.finite[layer])
            opened.held[layer], dtype = tuple(written), OPS.dtypes[cache.spec.dtype]
            if not draft:
                cache.finite[layer] = finite
                if not ((slots + 1) % cache.cache_config.unit_tokens).all():
                    opened.close(layer)
                elif any(not ((slots + 1) % one.cache_config.span_tokens).all() for one in cache.parts()):
                    opened.settle(layer)
            return OPS.cast(k, dtype), OPS.cast(v, dtype)

    def estimates(
        self, cache: Cache, layer: int, q: mx.array, plan: StepPlan, table: mx.array, lengths: mx.array
    ) -> mx.array:
        cache_config, summary = cache.cache_config, cache.summaries[layer]
        selection_config = plan.config.selection_config
        pool, _, places = self.pools(cache, layer, plan)
        summed, codes = selection_config.combine == "sum", isinstance(pool, CodePool)
        first = (pool, places) if summed and not codes else None
        query = turn_units(q, cache.fixed[layer]["signs"], cache.spec.num_kv_heads, first)
        if summed and codes:  # which that kernel does not read
            anchor = scoring.anchors(OPS, cache, layer, q, OPS.index(q, plan.table[:, 0]), selection_config)
            query = query._replace(anchor=anchor)
        estimate, base = score_units(
            query, summary, cache.valid[layer], table, lengths, group_size=cache_config.S,
            sums=plan.sums_after(0, cache.spec.head_dim),
        )  # fmt: skip
        # the groups still in the race: of the first stage all
        values, groups = estimate, None
        for passes, (parts, wanted, most) in enumerate(_stages(cache, plan), start=1):
            picked, counts = select_kernels.select_best(values, wanted, width=max(most, 1))
            estimate, values, groups = read_on(
                query, base, summary, table, estimate, groups, picked, counts, parts=parts,
                sums=plan.sums_after(passes, cache.spec.head_dim),
            )  # fmt: skip
        return estimate


def _stages(cache: Cache, plan: StepPlan) -> list[tuple[int | None, mx.array, int]]:
    """(parts of the codes that it reads, None for the rescoring bit; of how many groups of each sequence [B] int32, and
    at most) of each stage after the first: copied to the device once for all layers."""

    def copy() -> list[tuple[int | None, mx.array, int]]:
        found: list[tuple[int | None, np.ndarray]] = list(enumerate(plan.cascaded(cache.spec.head_dim), start=2))
        if plan.config.selection_config.rescore:
            found.append((None, plan.rescored))
        return [(parts, mx.array(wanted.astype(np.int32)), int(wanted.max())) for parts, wanted in found]

    return plan.once(("cascade", cache.device, cache.spec.head_dim), copy)


def _unsupported_layer(cache: Cache, layer: int, q: mx.array, plan: StepPlan) -> str | None:
    if cache.cache_config.has_bounds:
        return "bounds"
    return unread_codes(cache) or unsupported_choice(None, plan, layer) or unsupported_scoring(cache, layer, q, plan)


kernels = MetalKernels()
KERNELS = kernels.table(
    place_rows=Kernel(kernels.place_rows),
    attend_fused=Kernel(kernels.attend_fused, _unsupported_layer),
)
