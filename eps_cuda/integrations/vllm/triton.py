"""vLLM's Triton backend with EPS: `AttentionBackendEnum.TRITON_ATTN`."""

from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

from eps_cuda.integrations.vllm.backends import hooked
from eps_cuda.integrations.vllm.blocks import StridedBlocks
from eps_cuda.integrations.vllm.rows import StridedRows

Backend = hooked(TritonAttentionBackend, StridedRows, StridedBlocks, __name__)
