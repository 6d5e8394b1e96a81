"""Which code computes a cache's functions: array operations, or kernels. Both give the same values and visit lists."""

from functools import partial

from eps_core.attention import kernels
from eps_core.cpu.usable import why_not
from eps_mlx.kernels import launch

kernels_of = partial(kernels.kernels_of, "eps_mlx")


def usable_kernels(device: str) -> list[str]:
    """Kernels that this installation has for a device, the fastest last."""
    usable = ["arrays"]
    if launch.available() and (device != "cpu" or launch.runner is not None):
        usable.append("metal")
    if device == "cpu" and why_not() is None:
        usable.append("numba")
    return usable
