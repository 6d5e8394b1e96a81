"""A stand-in for a GPU's backend that runs on a CPU: K and V in vLLM's blocks as plain rows, side by side, and a kernel
that attends over a block table. With it the routes of GPUs run inside vLLM, but for Triton and the waits for a device.
"""

from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from eps_cuda.integrations.vllm.backends import hooked
from eps_cuda.integrations.vllm.blocks import StridedBlocks
from eps_cuda.integrations.vllm.rows import StridedRows

CALLS: list[int] = []  # tokens of context that each call of the kernel was given


class PlainImpl(CPUAttentionBackendImpl):
    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        blocks, offsets = slot_mapping // kv_cache.shape[2], slot_mapping % kv_cache.shape[2]
        kv_cache[blocks, :, offsets] = torch.cat([key, value], dim=-1)[: len(slot_mapping)]

    def forward(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, attn_metadata: Any,
        output: Tensor, output_scale: Any = None, output_block_scale: Any = None,
    ) -> Tensor:  # fmt: skip
        if attn_metadata is None:
            return output
        starts, lengths = attn_metadata.query_start_loc.tolist(), attn_metadata.seq_lens.tolist()
        CALLS.append(sum(lengths))
        for row, length in enumerate(lengths):
            tokens = slice(starts[row], starts[row + 1])
            count = tokens.stop - tokens.start
            table = attn_metadata.block_table[row, : -(-length // kv_cache.shape[2])]
            rows = kv_cache[table].transpose(0, 1).flatten(1, 2)[:, : max(length, 1)]  # [Hkv, T, 2 D]
            k, v = rows.float().repeat_interleave(self.num_queries_per_kv, dim=0).chunk(2, dim=-1)
            logits = query[tokens].transpose(0, 1).float() @ k.mT * self.scale
            hidden = torch.ones(count, k.shape[1], dtype=torch.bool).triu(k.shape[1] - count + 1)
            out = logits.masked_fill(hidden, -torch.inf).softmax(-1) @ v
            output[tokens] = out.transpose(0, 1).to(output.dtype)
        return output


class PlainBackend(CPUAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[PlainImpl]:
        return PlainImpl


Backend = hooked(PlainBackend, StridedRows, StridedBlocks, __name__, "Backend")
