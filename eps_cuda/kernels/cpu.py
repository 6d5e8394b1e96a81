"""Torch's CPU arrays for the compiled kernels of `eps_core.cpu.kernels`, and back, without copies.

What kernels give is made of numpy arrays, so nothing is recorded for gradients and no call need enter inference mode.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eps_core.attention.kernels import Kernel
from eps_core.attention.protocol import FusedRead
from eps_core.backend import pages
from eps_core.backend.cache import place_kv
from eps_core.backend.cpu import CpuKernels, unsupported_layer
from eps_core.config.formats import READ_BITS
from eps_core.cpu import beside, calls, write
from eps_core.cpu.kernels import FusedOutput, fused_call
from eps_core.kv_cache.step_plan import StepPlan
from eps_cuda.device import DTYPES
from eps_cuda.kernels import kept
from eps_cuda.ops import OPS


def kernel_threads() -> int:
    """Threads of the compiled kernels."""
    return kernels.team.num_threads()


def _memory(array: Tensor) -> np.ndarray:
    """The array's own memory, with the strides that it has; bfloat16 as uint16."""
    if array.requires_grad:
        array = array.detach()
    if array.dtype == torch.bfloat16:
        array = array.view(torch.uint16)
    found: np.ndarray = array.numpy()
    return found


class KeptHost(calls.Host):
    """Shows what a cache keeps, found once: a layer asks for a dozen."""

    def __init__(self, views: dict[Any, Any]) -> None:
        super().__init__(_memory)
        self.views = views

    def __call__(self, array: Tensor) -> np.ndarray:
        return self._once("array", array, super().__call__)

    def flat(self, array: Tensor) -> np.ndarray:
        return self._once("flat", array, super().flat)

    def rows(self, pool: Any, dtype: str) -> tuple[Any, tuple[int, int, int]]:
        return self._once("rows", pool, super().rows, dtype)

    def _once(self, form: str, pool: Any, show: Callable[..., Any], *how: str) -> Any:
        found = self.views.get((form, id(pool)))
        if found is None:
            found = self.views[form, id(pool)] = pool, show(pool, *how)
        return found[1]


class TorchKernels(CpuKernels):
    ops = OPS

    def place(self, cache: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def host(self, array: Tensor) -> np.ndarray:
        return _memory(array if array.is_contiguous() else array.contiguous())

    def pools(self, cache: Any) -> calls.Host:
        return KeptHost(cache.views)

    def array(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array)

    def attend_fused(self, cache: Any, layer: int, q: Tensor, plan: StepPlan) -> FusedRead:
        if beside.is_preparing() or not self.team.serves(counted=False):
            return super().attend_fused(cache, layer, q, plan)
        return kept.attend(self, cache, layer, q, plan)

    def write_kv(self, cache: Any, layer: int, k: Tensor, v: Tensor, slots: np.ndarray) -> Any:
        """See `backend.cache.write_kv`: a decode step's tokens."""
        if not beside.is_preparing() and kept.write(self, cache, layer, k, v, slots):
            return cache
        return place_kv(OPS, cache, layer, k, v, slots)

    def place_rows(
        self, cache: Any, layer: int, k: Tensor, v: Tensor, slots: np.ndarray, draft: bool
    ) -> tuple[Tensor, Tensor]:
        """Return k, v [N, Hkv, D] as they were stored in slots [N]. A dozen Torch operations for a row take the time of
        a small product of matrices."""
        of = DTYPES[cache.spec.dtype]
        stored = k.to(of), v.to(of)
        narrows = k.dtype == v.dtype == torch.float32 and of == torch.bfloat16
        given = tuple(_memory(x.contiguous()) for x in ((k, v) if narrows else stored))
        call = self.placing(cache, layer, given, slots, self.pools(cache).flat(cache.finite[layer]))
        self.run(call.kernel, call.phases, *call.args, alone=True)
        if not cache.spec.quantised:
            return stored
        units, offsets = (OPS.index(cache, part) for part in np.divmod(slots, cache.cache_config.unit_tokens))
        return tuple(pages.rows_at(OPS, pool[layer], units, offsets) for pool in (cache.k, cache.v))

    def placing(
        self, cache: Any, layer: int, rows: Sequence[np.ndarray], slots: np.ndarray, finite: np.ndarray
    ) -> calls.Call:
        """Return the call that puts rows of K and V [N, Hkv, D] to slots [N], and makes finite [1] False where K is
        not. Rows are of the cache's dtype, or float32 for one in bfloat16."""
        host, unit_tokens = self.pools(cache), cache.cache_config.unit_tokens
        (k_pool, k_strides), (v_pool, v_strides) = (
            host.rows(pool[layer], cache.spec.dtype) for pool in (cache.k, cache.v)
        )
        stored = (k_pool[-1] if isinstance(k_pool, tuple) else k_pool).dtype
        k, v = (one.view(stored) if one.itemsize == stored.itemsize else one for one in rows)
        args = k_pool, v_pool, k_strides, v_strides, k, v, slots, unit_tokens, finite
        return calls.Call(write.place_rows, 1, args, alone=True)

    def attending(
        self, cache: Any, layer: int, q: np.ndarray, plan: StepPlan, skipped: np.ndarray, stamps: np.ndarray,
        filled: calls.Chosen | None = None,
    ) -> tuple[calls.Call, np.ndarray, FusedOutput | None]:  # fmt: skip
        """Return the call of a layer's attention for q [B, Hq, D] float32, its output and, where it is sparse, what
        else it gives, skipped [B, Hkv] and stamps [3] among it; `filled` as `calls.choosing` takes it."""
        host = self.pools(cache)
        if is_dense(plan, layer):
            call, state = calls.attending(cache, layer, q, plan, None, host)
            return call, state.out, None
        call, read = fused_call(cache, layer, q, plan, host, skipped, stamps, filled)
        return call, read.read.out, read

    def ready_layer(self, cache: Any, layer: int, q: Tensor, plan: StepPlan) -> Callable[[], None] | None:
        """Return a function that attends once more for q [B, Hq, D], as whole steps do (`cpu_step`). None where helpers
        are to run kernels (`Team.serves`)."""
        from eps_core.cpu import openmp

        if not self.team.serves():
            return None
        skipped = np.empty((len(q), cache.spec.num_kv_heads), np.float32)
        call, _, _ = self.attending(cache, layer, self.host(q.float()), plan, skipped, np.zeros(3, np.int64))
        made = openmp.Calls([call])
        return lambda: self.team.run_all(made)

    @functools.cached_property
    def team(self) -> Any:
        """Torch's own threads, which run kernels, or the helpers of ours where they cannot be reached."""
        from eps_core.cpu import openmp, threads

        library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
        return openmp.team_of(library, torch.get_num_threads) or threads

    def run(self, kernel: Any, phases: int, *args: Any, alone: bool = False) -> None:
        self.team.run(kernel, phases, *args, alone=alone)


def unsupported_whole(cache: Any, layer: int, q: Any, plan: StepPlan) -> str | None:
    """Return the part of a layer that no whole step supports, in a few words, or None."""
    cache_config, spec = cache.cache_config, cache.spec
    if not {spec.k_bits, spec.v_bits} <= READ_BITS or spec.dtype == "float16":
        return f"K and V in {spec.dtype}, {spec.k_bits} and {spec.v_bits} bits"
    if cache_config.has_bounds:
        return "bounds"
    if cache_config.enabled and not cache_config.method_spec.coded:
        return f"method {cache_config.method}"
    return None if is_dense(plan, layer) else unsupported_layer(cache, layer, q, plan)


def is_dense(plan: StepPlan, layer: int) -> bool:
    """Return whether a step scores nothing in a layer."""
    return not plan.config.cache_config.enabled or plan.reads_all(layer)


def _unsupported_rows(cache: Any, layer: int, k: Tensor, v: Tensor, slots: np.ndarray, draft: bool) -> str | None:
    if draft:
        return "tokens that may be taken back"
    spec = cache.spec
    return None if {spec.k_bits, spec.v_bits} <= READ_BITS else f"K in {spec.k_bits} and V in {spec.v_bits}"


kernels = TorchKernels()
KERNELS = replace(
    kernels.table(), write_kv=Kernel(kernels.write_kv), place_rows=Kernel(kernels.place_rows, _unsupported_rows),
    ready_layer=Kernel(kernels.ready_layer, unsupported_whole),
)  # fmt: skip
