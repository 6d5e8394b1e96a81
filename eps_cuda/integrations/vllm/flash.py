"""vLLM's FlashAttention backend with EPS: `AttentionBackendEnum.FLASH_ATTN`."""

from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

from eps_cuda.integrations.vllm.backends import hooked
from eps_cuda.integrations.vllm.blocks import StridedBlocks
from eps_cuda.integrations.vllm.rows import StridedRows

Backend = hooked(FlashAttentionBackend, StridedRows, StridedBlocks, __name__)
