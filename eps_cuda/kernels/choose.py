"""Which code computes a cache's functions: array operations, or kernels. Both give the same values and visit lists."""

import importlib
import importlib.util
import os
from functools import cache
from typing import Any

from eps_core.attention.kernels import Kernel, KernelTable
from eps_core.cpu.usable import why_not


def interpreted() -> bool:
    """Return whether Triton kernels run in Triton's interpreter: slow, for tests on a machine without a GPU."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def usable_kernels(device: str) -> list[str]:
    """Kernels that this installation has for a device, the fastest last."""
    usable = ["arrays"]
    if _compiles(device):
        usable.append("triton")
    if device == "cpu" and why_not() is None:
        usable.append("numba")
    return usable


def _compiles(device: str) -> bool:
    """Return whether the installed Triton, if any, has a compiler for a device; Intel's is in a build of its own."""
    if importlib.util.find_spec("triton") is None:
        return False
    if device == "xpu":
        return importlib.util.find_spec("triton.backends.intel") is not None
    return device != "cpu" or interpreted()


@cache
def kernels_of(kernels: str) -> KernelTable:
    """Return the table of a family of kernels; an empty one for array operations."""
    if kernels == "arrays":
        return KernelTable()
    # a family's libraries take seconds to import, and its modules import the cache, which imports this one
    module = {"numba": "cpu", "triton": "dispatch"}[kernels]
    found: KernelTable = importlib.import_module(f"eps_cuda.kernels.{module}").KERNELS
    return found


def kernel_of(cache: Any, name: str) -> Kernel | None:
    """Return the kernel of the backend's function of that name in the place of a cache's array operations, or None.
    Called, it returns None for what it does not support."""
    found: Kernel | None = getattr(kernels_of(cache.kernels), name)
    return found
