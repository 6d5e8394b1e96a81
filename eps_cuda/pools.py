"""Pools [P, Hkv, U, D] that are an engine's own memory: what a cache asks of them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from eps_core.config.cache import CacheSpec


def check_pools(
    pools: Sequence[tuple[Tensor, Tensor]], spec: CacheSpec, shape: tuple[int, ...], dtype: torch.dtype, device: str
) -> None:
    """Raises ValueError unless an engine's K and V of every layer, views [P, Hkv, U, D], are as a cache needs them: of
    its shape, dtype and device, no codes, both with the same strides, and the elements of a row together."""
    if spec.quantised:
        raise ValueError("pools of an engine's own hold K and V as they are: no cache of codes can live in them")
    if len(pools) != spec.num_layers:
        raise ValueError(f"pools of {len(pools)} layers for a cache of {spec.num_layers}: give one pair per layer")
    for k, v in pools:
        for name, pool in (("k", k), ("v", v)):
            if tuple(pool.shape) != shape or pool.dtype != dtype or pool.device.type != device:
                raise ValueError(
                    f"pool {name} is {list(pool.shape)} of {pool.dtype} on {pool.device}: the cache needs "
                    f"{list(shape)} of {dtype} on {device}"
                )
        strides(k, v)


def strides(k: Tensor, v: Tensor) -> tuple[int, int, int]:
    """Return the strides of a unit, a kv head and a token, in elements. Raises ValueError where pools k and v
    [P, Hkv, U, D] do not lie alike, or the elements of a row not together."""
    if k.stride() != v.stride() or (k.stride(3) != 1 and k.shape[3] > 1):
        raise ValueError(
            f"pools k and v have strides {k.stride()} and {v.stride()}: they must lie alike, and the elements of a row "
            "together"
        )
    return k.stride(0), k.stride(1), k.stride(2)
