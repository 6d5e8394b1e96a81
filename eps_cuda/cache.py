"""Torch's cache (`eps_core.backend.cache`): how it is made and grown, and what waits for the device. Torch writes in
place."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from eps_core.backend import cache as shared
from eps_core.backend import pages
from eps_core.backend.ops import Ops
from eps_core.config.cache import CacheConfig, CacheSpec
from eps_core.load import resolve_kernels
from eps_cuda.device import DTYPES, device_of, gpu
from eps_cuda.kernels.choose import usable_kernels
from eps_cuda.ops import OPS
from eps_cuda.pools import check_pools


@dataclass
class Cache(shared.ArrayCache):
    ops: ClassVar[Ops] = OPS

    # triton: graph.StaticStep, numba: cpu_step.CpuStep, by model, batch and what is read; and what is kept of single
    # layers, by thread (kernels.kept). Oldest first
    steps: dict[Any, Any] = field(default_factory=dict)
    # numba: pools as numpy sees them, by their id, and the pools, which keep it theirs: a twentieth of a step of 2k
    views: dict[Any, tuple[Any, Any]] = field(default_factory=dict)

    def plain(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V as they are, for kernels that know no codes."""
        k, v = self.k[layer], self.v[layer]
        assert isinstance(k, Tensor) and isinstance(v, Tensor), "this kernel knows no codes"
        return k, v


@torch.inference_mode()
def new_cache(
    spec: CacheSpec,
    cache_config: CacheConfig,
    device: str = "auto",
    kernels: str = "auto",
    pools: Sequence[tuple[Tensor, Tensor]] | None = None,
) -> Cache:
    """An empty cache. With method off no summary, state or constant is allocated. `kernels` changes speed only: auto,
    or one of `usable_kernels`. `pools`: of each layer an engine's own K and V to live in, views [P, Hkv, U, D] (see
    `pools.check_pools`); what they hold is left as it is."""
    place = device_of(device)
    kernels = resolve_kernels(kernels, usable_kernels(place.type), place.type)
    shape = (spec.num_units, spec.num_kv_heads, cache_config.unit_tokens, spec.head_dim)
    dtype, layers = DTYPES[spec.dtype], range(spec.num_layers)
    if pools is None:
        bits = spec.k_bits, spec.v_bits
        own = [[pages.new_pool(OPS, place, shape, spec.dtype, one) for one in bits] for _ in layers]
    else:
        check_pools(pools, spec, shape, dtype, place.type)
        own = [list(pair) for pair in pools]
    cache = Cache(
        spec,
        cache_config,
        place.type,
        k=[k for k, _ in own],
        v=[v for _, v in own],
        finite=[torch.tensor(True, device=place) for _ in layers],
        kernels=kernels,
    )
    shared.add_all_summaries(cache)
    return cache


def span(name: str, cache: Cache) -> AbstractContextManager[Any]:
    """A range for profilers: NVTX (roctx on ROCm) on a GPU, nothing elsewhere."""
    return torch.cuda.nvtx.range(name) if cache.device == "cuda" else nullcontext()


def wait(cache: Cache, *arrays: Tensor) -> None:
    """Until everything so far is computed."""
    if cache.device != "cpu":
        gpu(cache.device).synchronize()


def to_host(cache: Cache, arrays: Sequence[Tensor]) -> list[np.ndarray]:
    """Arrays on the host, bfloat16 as float32: one copy for all of one shape and dtype."""
    alike: dict[Any, list[int]] = {}
    for i, array in enumerate(arrays):
        alike.setdefault((array.shape, array.dtype), []).append(i)
    values: list[np.ndarray] = [np.empty(0)] * len(arrays)
    for places in alike.values():
        stacked = torch.stack([arrays[i] for i in places])
        stacked = stacked.float() if stacked.dtype == torch.bfloat16 else stacked  # which numpy lacks
        for i, value in zip(places, stacked.cpu().numpy(), strict=True):
            values[i] = value
    return values


def grow(cache: Cache, num_units: int) -> Cache:
    """Room for `num_units` units in all; what the cache holds stays where it is."""
    shared.grow(OPS, cache, num_units)
    cache.steps.clear()  # captured graphs hold the old pools, and so do views
    cache.views.clear()
    return cache
