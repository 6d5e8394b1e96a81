"""Which code computes a cache's functions: array operations, or kernels. Both give the same values and visit lists."""

import importlib
import importlib.util
from functools import cache
from types import ModuleType

from eps_mlx.kernels import launch

_MODULES = {"numba": "eps_mlx.kernels.cpu", "metal": "eps_mlx.kernels.dispatch"}


def usable_kernels(device: str) -> list[str]:
    """Kernels that this installation has for a device, the fastest last."""
    usable = ["arrays"]
    if launch.available() and (device != "cpu" or launch.runner is not None):
        usable.append("metal")
    if device == "cpu" and importlib.util.find_spec("numba") is not None:
        usable.append("numba")
    return usable


@cache
def kernels_module(kernels: str) -> ModuleType | None:
    """The module whose `score`, `select`, `attend` and `attend_tail` come before the array operations of the same
    names, each of which may return None for what it does not cover; None for the array operations themselves. A GPU's
    also has `listing`, for masks that array operations made."""
    return importlib.import_module(_MODULES[kernels]) if kernels in _MODULES else None
