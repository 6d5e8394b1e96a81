"""The kernels of a backend: one table for each family (numba, triton, metal), and array operations for the rest.

A table names every function of the backend that the family computes, and each entry says which arguments it does not
support. Kernels change speed only: array operations give the same values, up to float rounding.
"""

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

from eps_core.attention.protocol import Array
from eps_core.config.formats import READ_BITS
from eps_core.kv_cache.step_plan import StepPlan

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger("eps")


@dataclass
class Kernel:
    """A kernel in the place of the array function of the same name, with the same arguments and results.

    `unsupported` takes these arguments and returns in a few words what the kernel does not support, or None. A `timed`
    `attend_fused` says when its parts began."""

    run: Callable[..., Any]
    unsupported: Callable[..., str | None] = lambda *arguments, **named: None
    timed: bool = False

    def __call__(self, *arguments: Any) -> Any:
        """Return the kernel's result, or None where it does not support the arguments."""
        return self.run(*arguments) if self.unsupported(*arguments) is None else None


@dataclass
class KernelTable:
    """The kernels of one family. None: the family leaves this function to the array operations."""

    family: str = "arrays"
    write_kv: Kernel | None = None  # tokens of a decode step, each in a unit of its own
    # (.., draft): rows of K and V where they belong, and whether K is finite unless they are drafts: `backend.cache`
    place_rows: Kernel | None = None
    build_summary: Kernel | None = None  # of methods that code every token
    score: Kernel | None = None
    select: Kernel | None = None
    attend: Kernel | None = None
    attend_rows: Kernel | None = None
    skipped_mass: Kernel | None = None
    attend_fused: Kernel | None = None  # a whole layer; the functions above serve where it does not
    attend_prefill: Kernel | None = None  # a chunk of a prompt, from the pool; `attend_chunk` serves where it does not
    # a layer's attention made ready once, as whole steps repeat it: a function that computes it again
    ready_layer: Kernel | None = None
    # groups [B, Hkv, width] and counts [B, Hkv] of a mask [B, Hkv, G] of array operations: (selected_mask, width=)
    listing: Callable[..., tuple[Array, Array]] | None = None
    settle: Callable[[], None] | None = None  # waits until no kernel reads a pool that is about to be written

    def serving(self, operation: str, *arguments: Any, **named: Any) -> Kernel | None:
        """Return this table's kernel of an operation if it supports the arguments. Otherwise array operations serve,
        and a warning names the operation and the reason, once in a process."""
        kernel: Kernel | None = getattr(self, operation)
        if kernel is None:
            return None
        reason = kernel.unsupported(*arguments, **named)
        if reason is None:
            return kernel
        _name_fallback(self.family, operation, reason)
        return None


@cache
def kernels_of(package: str, kernels: str) -> KernelTable:
    """Return the table of a family of kernels of a backend's package; an empty one for array operations."""
    if kernels == "arrays":
        return KernelTable()
    # a family's libraries take seconds to import, and its modules import the cache, which imports this one
    module = {"numba": "cpu", "triton": "dispatch", "metal": "dispatch"}[kernels]
    found: KernelTable = importlib.import_module(f"{package}.kernels.{module}").KERNELS
    return found


def kernel_of(ops: Any, cache: Any, name: str) -> Kernel | None:
    """Return the kernel of the backend's function of that name in the place of a cache's array operations, or None.
    Called, it returns None for what it does not support."""
    found: Kernel | None = getattr(ops.kernels_of(cache.kernels), name)
    return found


@cache
def _name_fallback(family: str, operation: str, reason: str) -> None:
    logger.warning("kernels %s do not support %s of %s: array operations instead", family, operation, reason)


def kernel_first(arrays: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function over arrays whose first argument is the library's `Ops` and whose second, a cache or scores,
    names its `kernels`: the entry of that name in their table comes first where it supports the arguments."""
    operation = arrays.__name__.lstrip("_")

    @wraps(arrays)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        ops: Any = args[0]
        cache: Any = args[1]
        table: KernelTable = ops.kernels_of(cache.kernels)
        kernel = table.serving(operation, *args[1:], **kwargs)
        return arrays(*args, **kwargs) if kernel is None else kernel.run(*args[1:], **kwargs)

    return call


def unread_codes(cache: Any, *arguments: Any, **named: Any) -> str | None:
    """Return the formats of K and V of a cache that attention kernels do not read, or None."""
    spec = cache.spec
    if spec.quantised and not {spec.k_bits, spec.v_bits} <= READ_BITS:
        return f"K in {spec.k_bits} and V in {spec.v_bits}"
    return None


def unsupported_choice(scores: Any, plan: StepPlan, layer: int = 0) -> str | None:
    """Return the part of a layer's choice of groups that is not topk per kv head, which kernels support, or None."""
    selection_config = plan.config.selection_config
    if selection_config.policy != "topk":
        return f"policy {selection_config.policy}"
    if selection_config.scope != "kv-head":
        return f"scope {selection_config.scope}"
    modes = set(selection_config.head_modes[layer]) - {"sparse"} if selection_config.head_modes else set()
    return f"head modes {', '.join(sorted(modes))}" if modes else None
