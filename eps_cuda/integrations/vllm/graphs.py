"""Decode batches as vLLM's full CUDA graphs need them: one token of each row, computed from arrays of the device alone.

vLLM captures a forward for each number of rows, and replays it without a line of Python. So what a layer reads lies at
fixed addresses: vLLM's own tables, lengths and slots, and budgets that each batch's metadata brings, from the lengths
that the host knows. What the host must know afterwards, how much was read and which slots were written, is copied on
the device before the next batch and read once in `HELD` batches, or when one of another kind comes.

Rows that read everything, of a short context or the last token of a prompt, do so by the same kernels.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.utils.platform_utils import is_pin_memory_available

from eps_core.attention.layer import LayerRead, dense_read
from eps_core.config.eps import EpsConfig
from eps_core.errors import require
from eps_core.integrations.layers import STEPS_HELD
from eps_core.kv_cache.step_plan import StepPlan
from eps_cuda.graph import attend_static
from eps_cuda.integrations.paged import scaled
from eps_cuda.integrations.vllm.forward import HostArrays, first_rows, on_host
from eps_cuda.kernels import dispatch
from eps_cuda.kernels.score import Depth
from eps_cuda.kernels.thresholds import STATE

HELD = STEPS_HELD  # batches whose slots may wait on the device


@dataclass(frozen=True)
class DecodeBatch:
    """Arrays of the device for B rows of one token each, padding included: those of `graph.StaticStep.buffers` that a
    layer reads."""

    graphs: "DecodeGraphs"
    slots: Tensor  # [B] int64, -1 where a row is padding
    lengths: Tensor  # [B] int32, 0 where a row is padding
    table: Tensor  # [B, M] int32 units, which are vLLM's blocks
    wanted: Tensor  # [B] int32 groups
    depth: Depth

    def attend(self, place: int, impl: Any, query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> None:
        """Write K and V of a layer and attend, to the first rows of output [tokens, Hq, D]."""
        graphs, rows = self.graphs, len(self.lengths)
        cache, kv_heads = graphs.cache, graphs.cache.spec.num_kv_heads
        into = dispatch.Into(
            first_rows(output, rows), graphs.skipped[place, :rows], graphs.state[place, : rows * kv_heads]
        )
        query, key, value = (first_rows(one, rows) for one in (query, key, value))
        query = scaled(query, impl.scale, impl.head_size)
        attend_static(graphs.config, cache, place, query, key, value, self, self.depth, graphs.most_groups, into=into)


class DecodeGraphs:
    """State that all decode batches of a worker share."""

    def __init__(self, runtime: Any, most_rows: int, most_tokens: int) -> None:
        require(
            runtime.cache.kernels == "triton",
            f"vLLM's CUDA graphs cannot hold kernels {runtime.cache.kernels}: start it with "
            """--compilation-config '{"cudagraph_mode": "PIECEWISE"}'""",
        )
        self.runtime, self.cache = runtime, runtime.cache
        self.config: EpsConfig = runtime.sparse.config  # what is captured: of it budget and budget_floor may change
        spec, cache_config, device = self.cache.spec, self.config.cache_config, self.cache.valid[0].device
        self.most_groups = -(-most_tokens // cache_config.unit_tokens) * cache_config.groups_per_unit
        most = [*self.config.cascade_groups(most_tokens, spec.head_dim), self.config.rescored_groups(most_tokens)]
        self._most = [self.most_groups if count else 0 for count in most]  # whatever the budget becomes
        # groups that a row selects, and of which each further part of codes and the rescoring bit are read
        self._budgets = torch.zeros((1 + len(self._most), most_rows), dtype=torch.int32, device=device)
        self.skipped = torch.zeros((spec.num_layers, most_rows, spec.num_kv_heads), device=device)
        self.state = torch.zeros(
            (spec.num_layers, most_rows * spec.num_kv_heads, STATE), dtype=torch.int32, device=device
        )
        self._before: tuple[StepPlan, np.ndarray] | None = None  # of the last batch, and the rows that it counts
        self._slots: list[Tensor] = []
        self.unseen = True  # whether rows may have come whose K EPS did not see, where there is such (`runtime.lazy`)

    @torch.inference_mode()
    def begin(self, common: Any) -> DecodeBatch | None:
        """Return the next batch by vLLM's metadata; None: no graph serves it, as it has rows of several tokens, say.
        Waits for the device once in `HELD` batches, and where rows came whose K EPS may not have seen."""
        runtime, rows = self.runtime, len(common.seq_lens)
        most_rows = runtime.vllm_config.compilation_config.max_cudagraph_capture_size
        if common.max_query_len != 1 or common.causal is not True or rows > (most_rows or rows):
            self.settle()
            self.unseen = True
            return None
        self._take()
        lengths, prefilling = np.zeros(rows, np.int64), np.zeros(rows, bool)
        known = common.seq_lens_cpu_upper_bound
        for target, source in (
            (lengths, common.seq_lens if known is None else known),
            (prefilling, common.is_prefilling),
        ):
            if source is not None:
                found = on_host(source)[:rows]
                target[: len(found)] = found
        adopts = runtime.lazy and runtime.sparse.on and self.unseen
        if adopts or len(self._slots) >= HELD:
            self.settle()
        self.unseen = bool(prefilling.any())
        if adopts:
            self._adopt(common, lengths)

        # budgets may have changed since the capture: they are the host's
        plan = StepPlan.of(runtime.sparse.config, np.zeros((rows, 1), np.int32), lengths)
        wanted = plan.ends if not runtime.sparse.on else np.where(prefilling, plan.ends, plan.budget(plan.ends * 0))
        counts = [wanted, *plan.cascaded(self.cache.spec.head_dim), plan.rescored]
        packed = torch.zeros(self._budgets.shape, dtype=torch.int32, pin_memory=is_pin_memory_available())
        packed[:, :rows] = torch.from_numpy(np.stack(counts))
        self._budgets.copy_(packed, non_blocking=True)
        parts = [(part, most) for part, most in zip(self._budgets[1:, :rows], self._most, strict=True)]
        depth = Depth(tuple(parts[:-1]), parts[-1], self.config.selection_config.reads_at_once)

        # a row past its prompt has two tokens at least: one alone is of a batch that vLLM makes up
        decoding = ~prefilling & (lengths > 1)
        if prefilling.any() or decoding.any():
            runtime.counts["prefill_rows"] += int(prefilling.sum())
            runtime.count_forward()
        self._before = plan, np.flatnonzero(decoding if runtime.sparse.on else decoding & False)
        self._slots.append(common.slot_mapping[:rows].clone())
        return DecodeBatch(
            self, common.slot_mapping[:rows], common.seq_lens, common.block_table_tensor, self._budgets[0, :rows], depth
        )

    def batch_of(self, layer: Any) -> DecodeBatch | None:
        """Return the batch of the forward that runs; None: no graph serves it, or it has no metadata (a dummy)."""
        found = (get_forward_context().attn_metadata or {}).get(layer.layer_name)
        batch: DecodeBatch | None = getattr(found, "eps_decode", None)
        return batch

    def drop(self) -> None:
        """Count nothing of the batch that was begun last: it is made to be captured, and all its rows are padding."""
        self._before = None

    @torch.inference_mode()
    def settle(self) -> None:
        """Tell the host's state of all writes so far; waits for the device where there are any."""
        slots, self._slots = self._slots, []
        try:
            for one in np.split(on_host(torch.cat(slots)), np.cumsum([len(one) for one in slots])) if slots else []:
                written = one[one >= 0]
                for place in range(self.cache.spec.num_layers):
                    self.runtime.mark_written(place, written)
                if len(written):
                    dispatch.plan_step(self.cache, written)
        except Exception as error:
            self.runtime.fail(error, "failed_writes")
        self._take()

    def _take(self) -> None:
        """Keep what the batch before has left, which the next one overwrites."""
        before, self._before = self._before, None
        if before is None or not len(before[1]):
            return
        plan, counted = before
        rows: Any = slice(len(counted))
        if counted[-1] >= len(counted):  # not padding alone is left out
            rows = torch.from_numpy(counted).to(self.state.device, non_blocking=True)
        skipped = self.skipped[:, rows].clone()
        state = self.state.unflatten(1, (-1, self.cache.spec.num_kv_heads))[:, rows].clone()
        plan = StepPlan.of(plan.config, plan.table[counted], plan.lengths[counted])
        reads: dict[int, LayerRead] = {}
        for place in range(self.cache.spec.num_layers):
            read = reads[place] = dense_read(self.cache, plan)
            read.stats.summary_bytes_read = plan.summary_bytes(self.cache.spec)
            read.pending = {
                "counts": state[place, :, :, 2], "skipped_mass": skipped[place],
                "always_selected": state[place, :, 0, 4],
            }  # fmt: skip
        self.runtime.sparse.add_step(self.cache, plan, reads)

    def _adopt(self, common: Any, lengths: np.ndarray) -> None:
        """Summarise what lies below the batch's tokens and was not seen; these are not written yet."""
        host = HostArrays(common, self.cache.cache_config.unit_tokens, exact=True)
        table, slots = host.read(common.block_table_tensor), host.read(common.slot_mapping)[: len(lengths)]
        real = np.flatnonzero((slots >= 0) & (lengths > 1))
        units = -(-lengths // self.cache.cache_config.unit_tokens)
        inside = np.arange(table.shape[1]) < units[:, None]
        plan = StepPlan.of(self.runtime.sparse.config, np.where(inside, table, -1)[real], lengths[real] - 1)
        try:
            for place in range(self.cache.spec.num_layers):
                self.runtime.mark_written(place, slots[real])
                self.runtime.adopt(place, plan)
        except Exception as error:
            self.runtime.fail(error, "failed_adoptions")
