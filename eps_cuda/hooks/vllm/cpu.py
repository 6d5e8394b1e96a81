"""vLLM's CPU backend with EPS: `AttentionBackendEnum.CPU_ATTN`."""

from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from eps_cuda.hooks.vllm.backends import hooked
from eps_cuda.hooks.vllm.blocks import PackedBlocks
from eps_cuda.hooks.vllm.rows import PlainRows

Backend = hooked(CPUAttentionBackend, PlainRows, PackedBlocks)
