"""Which code computes a cache's functions: array operations, or kernels. Both give the same values and visit lists."""

import importlib
from functools import cache
from typing import Any

from eps_core.attention.kernels import Kernel, KernelTable
from eps_core.cpu.usable import why_not
from eps_mlx.kernels import launch


def usable_kernels(device: str) -> list[str]:
    """Kernels that this installation has for a device, the fastest last."""
    usable = ["arrays"]
    if launch.available() and (device != "cpu" or launch.runner is not None):
        usable.append("metal")
    if device == "cpu" and why_not() is None:
        usable.append("numba")
    return usable


@cache
def kernels_of(kernels: str) -> KernelTable:
    """Return the table of a family of kernels; an empty one for array operations."""
    if kernels == "arrays":
        return KernelTable()
    # a family's libraries take seconds to import, and its modules import the cache, which imports this one
    module = {"numba": "cpu", "metal": "dispatch"}[kernels]
    found: KernelTable = importlib.import_module(f"eps_mlx.kernels.{module}").KERNELS
    return found


def kernel_of(cache: Any, name: str) -> Kernel | None:
    """Return the kernel of the backend's function of that name in the place of a cache's array operations, or None.
    Called, it returns None for what it does not support."""
    found: Kernel | None = getattr(kernels_of(cache.kernels), name)
    return found
