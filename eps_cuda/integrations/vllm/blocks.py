"""Route stock: vLLM's own kernel over the block tables of what is selected. Groups are blocks, and all kv heads of a
layer visit the same ones: for kernels that cannot gather smaller groups. Bit-equal to stock where all is selected.
"""

from collections import OrderedDict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eps_core.attention.protocol import Selection
from eps_core.kv_cache.groups import WritePlan
from eps_core.kv_cache.step_plan import StepPlan
from eps_cuda.adopt import summarise_rows
from eps_cuda.integrations.vllm.rows import StridedRows, changed


class StockKernel:
    """The backend module, but for `attend`, which the engine's kernel does; `call` is the sparse layer's."""

    def __init__(self, backend: Any, compacted: Any) -> None:
        self._eps, self._compacted = backend, compacted
        self.call: tuple[Any, ...] = ()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._eps, name)

    def attend(self, cache: Any, layer: int, q: Tensor, plan: StepPlan, selection: Selection) -> tuple[Tensor, None]:
        forward, impl, engine_layer, metadata, output, stock = self.call
        groups, counts = (self._eps.to_numpy(part[:, 0]) for part in (selection.groups, selection.counts))
        stock(attn_metadata=self._compacted(forward, impl, engine_layer, metadata, groups, counts))
        return forward.rows_of(output), None


class StridedBlocks(StridedRows):
    """On a GPU: K is there to be read, so any method can finalize a block."""

    def __init__(self, backend: Any) -> None:
        super().__init__(backend)
        self.backend = StockKernel(backend, self.compacted)

    def forward(
        self, runtime: Any, place: int, impl: Any, layer: Any, query: Tensor, metadata: Any, output: Tensor, stock: Any
    ) -> None:
        forward = runtime.forward_of(metadata)
        if forward.plan is None:
            stock(attn_metadata=metadata)
            return

        def dense() -> Tensor:
            stock(attn_metadata=metadata)
            return forward.rows_of(output)

        self.backend.call = forward, impl, layer, metadata, output, stock
        try:
            runtime.attend(place, forward.rows_of(query), forward.plan, dense)
        finally:
            self.backend.call = ()

    def compacted(
        self, forward: Any, impl: Any, layer: Any, metadata: Any, groups: np.ndarray, counts: np.ndarray
    ) -> Any:
        """Metadata whose decode rows have the blocks of groups [B, W] alone, the first counts [B]: a last block that is
        not full is always among them, and last, so that the kernel's causal mask hides nothing of them."""
        table, lengths = metadata.block_table.clone(), metadata.seq_lens.clone()
        size = forward.plan.config.cache_config.S
        for row, listed, count in zip(forward.decode.tolist(), groups, counts.tolist(), strict=True):
            kept = torch.from_numpy(listed[:count].astype(np.int64)).to(table.device, non_blocking=True)
            table[row, :count] = metadata.block_table[row, kept]
            lengths[row] = (count - 1) * size + min(int(forward.lengths[row]) - int(listed[count - 1]) * size, size)
        return self.scheduled(impl, layer, metadata, table, lengths)

    def scheduled(self, impl: Any, layer: Any, metadata: Any, table: Tensor, lengths: Tensor) -> Any:
        return changed(metadata, block_table=table, seq_lens=lengths)


class PackedBlocks(StridedBlocks):
    """On a CPU: K is packed and cannot be read again, so the keys of blocks that are not full wait beside the cache."""

    readable = False

    def __init__(self, backend: Any) -> None:
        super().__init__(backend)
        self.waiting: dict[int, OpenBlocks] = {}

    def pools(self, tensor: Tensor, head_dim: int, unit_tokens: int) -> tuple[Tensor, Tensor]:
        """Return pools of the right shape; nobody reads or writes through them."""
        blocks, kv_heads, block_tokens, _ = tensor.shape
        self.waiting = {}
        k, v = tensor.view(blocks, kv_heads, 2 * block_tokens, head_dim).chunk(2, dim=2)
        return k, v

    def write(self, runtime: Any, place: int, key: Tensor, value: Tensor, slot_mapping: Tensor, stock: Any) -> None:
        stock()
        key, _, slots = self.real_rows(key, value, slot_mapping)
        cache = runtime.cache
        if place not in self.waiting:
            self.waiting[place] = OpenBlocks(cache.spec.max_open_groups, cache.cache_config.S, cache.k[place])
        waiting = self.waiting[place]

        def summarise() -> None:
            runtime.mark_written(place, slots)
            blocks, keys, lost = waiting.add(cache.state[place].plan(slots), key)
            cache.state[place].reopen(lost)
            summarise_rows(cache, place, blocks, keys)

        runtime.summarise(summarise)

    def forget(self) -> None:
        super().forget()
        self.waiting = {}

    def scheduled(self, impl: Any, layer: Any, metadata: Any, table: Tensor, lengths: Tensor) -> Any:
        """With the schedule of the CPU's kernel, which holds the lengths."""
        from vllm import _custom_ops as ops
        from vllm import envs

        schedule = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(lengths), num_heads=impl.num_heads, num_kv_heads=impl.num_kv_heads, head_dim=impl.head_size,
            seq_lens=lengths, dtype=layer.dtype, query_start_loc=metadata.query_start_loc, causal=True,
            sliding_window_size=-1, isa=layer.isa, enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
            kv_cache_dtype=impl.kv_cache_dtype,
        )  # fmt: skip
        return changed(metadata, block_table=table, seq_lens=lengths, scheduler_metadata=schedule)


class OpenBlocks:
    """The keys [num, S, Hkv, D] of blocks that are not full yet, oldest claim first; one that must give way to others
    gets no summary, and is always selected."""

    def __init__(self, num_blocks: int, block_tokens: int, pool: Tensor) -> None:
        self.keys = pool.new_empty((num_blocks, block_tokens, pool.shape[1], pool.shape[3]))
        self.held: OrderedDict[int, tuple[int, int]] = OrderedDict()  # block -> (place, tokens)
        self.free = list(range(num_blocks))

    def add(self, plan: WritePlan, key: Tensor) -> tuple[np.ndarray, Tensor, np.ndarray]:
        """(blocks [F] that are full now, their keys [F, Hkv, S, D], full blocks [..] whose first keys are not known)
        after a write of key [N, Hkv, D]."""
        for block in plan.full_groups.tolist():
            self._drop(block)
        full, lost = plan.full_groups.tolist(), []
        keys = [key[torch.from_numpy(plan.full_tokens)]]
        parts = zip(plan.part_groups.tolist(), plan.part_tokens, plan.part_before.tolist(), plan.finalized, strict=True)
        for block, tokens, before, finalized in parts:
            if before == 0:
                self._drop(block)
                if not self.free:
                    self._drop(next(iter(self.held)))
                self.held[block] = self.free.pop(), 0
            place, known = self.held.get(block, (-1, -1))
            if known >= before:
                tokens = tokens[tokens >= 0]
                self.keys[place, before : before + len(tokens)] = key[torch.from_numpy(tokens)]
                self.held[block] = place, before + len(tokens)
            if finalized and known >= before:
                full.append(block)
                keys.append(self.keys[place : place + 1].clone())
            elif finalized:
                lost.append(block)
            if finalized:
                self._drop(block)
        return np.array(full, np.int64), torch.cat(keys).transpose(1, 2), np.array(lost, np.int64)

    def _drop(self, block: int) -> None:
        if block in self.held:
            self.free.append(self.held.pop(block)[0])
