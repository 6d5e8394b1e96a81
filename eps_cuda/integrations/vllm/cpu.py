"""vLLM's CPU backend with EPS: `AttentionBackendEnum.CPU_ATTN`."""

from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from eps_cuda.integrations.vllm.backends import hooked
from eps_cuda.integrations.vllm.blocks import PackedBlocks
from eps_cuda.integrations.vllm.rows import PlainRows

Backend = hooked(CPUAttentionBackend, PlainRows, PackedBlocks, __name__)
