"""Which code computes a cache's functions: array operations, or kernels. Both give the same values and visit lists."""

import importlib
from collections.abc import Callable
from functools import cache, wraps
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

from eps_core.cpu.usable import why_not
from eps_mlx.kernels import launch

P = ParamSpec("P")
R = TypeVar("R")
_MODULES = {"numba": "eps_mlx.kernels.cpu", "metal": "eps_mlx.kernels.dispatch"}
TOUCH_KV = ("attend", "attend_rows", "attend_gated")
READ_BITS = {16, 8, 4}  # of K and of V: as they are, and the codes that kernels know
# kernels -> those of TOUCH_KV that read such codes, too
READ_CODES = {"numba": ("attend", "attend_rows", "attend_gated"), "metal": ("attend", "attend_rows")}


def usable_kernels(device: str) -> list[str]:
    """Kernels that this installation has for a device, the fastest last."""
    usable = ["arrays"]
    if launch.available() and (device != "cpu" or launch.runner is not None):
        usable.append("metal")
    if device == "cpu" and why_not() is None:
        usable.append("numba")
    return usable


@cache
def kernels_module(kernels: str) -> ModuleType | None:
    """The module whose functions come before the array operations of the same names (see `routed`); None for the array
    operations themselves. A GPU's also has `listing`, for masks that array operations made."""
    return importlib.import_module(_MODULES[kernels]) if kernels in _MODULES else None


def kernel_of(cache: Any, name: str) -> Callable[..., Any] | None:
    """The kernel that comes before the array function of its name, of a cache or of scores; None where there is none.
    Those that read or write K and V know them as they are; codes only where READ_CODES says so."""
    spec = getattr(cache, "spec", None)  # of a cache
    if spec is not None and spec.quantised and name in TOUCH_KV:
        known = name in READ_CODES.get(cache.kernels, ()) and {spec.k_bits, spec.v_bits} <= READ_BITS
        if not known:
            return None
    return getattr(kernels_module(cache.kernels), name, None)


def routed(plain: Callable[P, R]) -> Callable[P, R]:
    """A function over arrays whose first argument names its kernels: their function of the same name comes first, where
    there is one (`kernel_of`), and what it answers with None is done by `plain`."""
    name = plain.__name__.lstrip("_")

    @wraps(plain)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        fast = kernel_of(args[0], name)
        result = None if fast is None else fast(*args, **kwargs)
        return plain(*args, **kwargs) if result is None else result

    return call
