"""Launches that overlap (NVIDIA's programmatic dependent launch, from compute capability 9 on): a kernel is brought
onto the GPU while the one before it still runs, and waits there until all of that one's results are in memory."""

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # an older Triton
    gdc_launch_dependents = gdc_wait = None


@triton.jit
def wait(OVERLAP: tl.constexpr):
    """The first statement of a kernel that is launched with `overlap`: nothing may be read or written before it."""
    if OVERLAP:
        gdc_wait()


@triton.jit
def release(OVERLAP: tl.constexpr):
    """Late in such a kernel, or first in one whose few programs leave room: once each of its programs has come here or
    ended, the next kernel's programs may be placed, and take room from programs that do their work."""
    if OVERLAP:
        gdc_launch_dependents()


@lru_cache
def overlap(device: torch.device) -> dict[str, Any]:
    """Return the arguments of a launch on a device that let it overlap the one before, where that is possible."""
    if device.type != "cuda" or torch.version.hip or gdc_wait is None:
        return {}
    if torch.cuda.get_device_capability(device)[0] < 9:
        return {}
    return {"OVERLAP": True, "launch_pdl": True}
