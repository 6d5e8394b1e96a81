"""The functions of the backend through Metal kernels (see `eps_core.backend.gpu`). The codes of rq are read in stages,
each by one kernel over what the one before left; writes have no kernels."""

import mlx.core as mx
import numpy as np

from eps_core.backend import scoring
from eps_core.backend.gpu import GpuKernels
from eps_core.kv_cache.step_plan import StepPlan
from eps_mlx.cache import Cache
from eps_mlx.kernels import attend as attend_kernels
from eps_mlx.kernels import rows as rows_kernels
from eps_mlx.kernels import select as select_kernels
from eps_mlx.kernels.turn_units import turn_units
from eps_mlx.kernels.units import read_on, score_units
from eps_mlx.ops import OPS


class MetalKernels(GpuKernels):
    family, ops = "metal", OPS
    attend_groups = attend_kernels.attend_groups
    attend_all_rows = rows_kernels.attend_rows
    select_topk = select_kernels.select_topk
    compact = select_kernels.compact

    def estimates(
        self, cache: Cache, layer: int, q: mx.array, plan: StepPlan, table: mx.array, lengths: mx.array
    ) -> mx.array:
        cache_config, summary = cache.cache_config, cache.summaries[layer]
        query = turn_units(q, cache.fixed[layer]["signs"], cache.spec.num_kv_heads)
        anchor = scoring.anchors(OPS, cache, layer, q, OPS.index(q, plan.table[:, 0]), plan.config.selection_config)
        estimate, base = score_units(
            query, summary, cache.valid[layer], table, lengths, anchor, group_size=cache_config.S,
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


kernels = MetalKernels()
KERNELS = kernels.table()
