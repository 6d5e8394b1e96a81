"""Named ranges for profilers of NVIDIA and AMD GPUs."""

from contextlib import AbstractContextManager, nullcontext

import torch


def span(name: str, device: str) -> AbstractContextManager:
    """An NVTX range (roctx on ROCm) on a GPU, nothing elsewhere."""
    return torch.cuda.nvtx.range(name) if device == "cuda" else nullcontext()
