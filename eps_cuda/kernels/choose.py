"""Which code computes a cache's functions: array operations, or kernels. Both give the same values and visit lists."""

import importlib
import importlib.util
import os
from functools import cache
from types import ModuleType

_MODULES = {"numba": "eps_cuda.kernels.cpu", "triton": "eps_cuda.kernels.dispatch"}


def interpreted() -> bool:
    """Whether Triton kernels run in Triton's interpreter: slow, for tests on a machine without a GPU."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def usable_kernels(device: str) -> list[str]:
    """Kernels that this installation has for a device, the fastest last."""
    usable = ["arrays"]
    if importlib.util.find_spec("triton") is not None and (device != "cpu" or interpreted()):
        usable.append("triton")
    if device == "cpu" and importlib.util.find_spec("numba") is not None:
        usable.append("numba")
    return usable


@cache
def kernels_module(kernels: str) -> ModuleType | None:
    """The module whose `score`, `select`, `attend` and `attend_tail` come before the array operations of the same
    names, each of which may return None for what it does not cover; None for the array operations themselves. A GPU's
    also has `listing`, for masks that array operations made."""
    return importlib.import_module(_MODULES[kernels]) if kernels in _MODULES else None
