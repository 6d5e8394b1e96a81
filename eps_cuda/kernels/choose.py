"""Which code computes a cache's functions: array operations, or kernels. Both give the same values and visit lists."""

import importlib.util
import os
from functools import partial

from eps_core.attention import kernels
from eps_core.cpu.usable import why_not

kernels_of = partial(kernels.kernels_of, "eps_cuda")


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
