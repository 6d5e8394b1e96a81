"""Checks of tensors that launchers make, and how pools of K and V become arguments of a kernel."""

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from eps_core.backend import pages
from eps_core.backend.pages import Pool
from eps_cuda.pools import strides

TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def pool_arrays(k_pool: Pool, v_pool: Pool) -> list[Tensor | None]:
    """K, V and their scales as a kernel takes them; None for those of K and V as they are."""
    pairs = [pages.arrays_of(pool) for pool in (k_pool, v_pool)]
    return [pair[0] for pair in pairs] + [pair[1] if len(pair) > 1 else None for pair in pairs]


def pool_constants(k_pool: Pool, v_pool: Pool) -> dict[str, Any]:
    """Return how both pools lie, and what they hold, compiled into a kernel. Raises ValueError as `pools.strides` and
    `check_layout`."""
    bits = {"K_BITS": bits_of(k_pool), "V_BITS": bits_of(v_pool), "VALUES": TYPES[k_pool.dtype]}
    if isinstance(k_pool, Tensor) and isinstance(v_pool, Tensor):
        return {**stride_constants(k_pool, v_pool), **bits}
    names = ("k", "v", "k_scale", "v_scale")
    arrays = zip(names, pool_arrays(k_pool, v_pool), strict=True)
    check_layout(**{name: array for name, array in arrays if array is not None})
    _, kv_heads, unit_tokens, _ = k_pool.shape
    return {"UNIT_STRIDE": kv_heads * unit_tokens, "HEAD_STRIDE": unit_tokens, "TOKEN_STRIDE": 1, **bits}


def held_as_codes(k_pool: Pool, v_pool: Pool) -> bool:
    """Return whether K or V are."""
    return bits_of(k_pool) != 16 or bits_of(v_pool) != 16


def bits_of(pool: Pool) -> int:
    """Return the bits of an element: 16 of a pool that holds K or V as they are, in whatever dtype."""
    return 16 if isinstance(pool, Tensor) else int(pool.bits)


def stride_constants(k_pool: Tensor, v_pool: Tensor) -> dict[str, int]:
    """Return how both pools lie, compiled into a kernel: the pools of a cache do not move. Raises ValueError as
    `pools.strides`."""
    return dict(zip(("UNIT_STRIDE", "HEAD_STRIDE", "TOKEN_STRIDE"), strides(k_pool, v_pool), strict=True))


def check_shapes(q: Tensor, k_pool: Pool, v_pool: Pool, group_size: int) -> None:
    """Raises ValueError unless q [.., Hq, D] and pools [P, Hkv, U, D] agree, and units hold whole groups."""
    _, num_heads, head_dim = q.shape
    _, kv_heads, unit_tokens, _ = k_pool.shape
    if k_pool.shape != v_pool.shape or k_pool.dtype != v_pool.dtype or k_pool.shape[3] != head_dim:
        raise ValueError(f"k {list(k_pool.shape)} and v {list(v_pool.shape)} must agree, also with q {list(q.shape)}")
    if num_heads % kv_heads or unit_tokens % group_size:
        raise ValueError(
            f"{num_heads} query heads must be a multiple of {kv_heads} kv heads, and units of {unit_tokens} tokens of "
            f"groups of {group_size}"
        )


def check_layout(**tensors: Tensor) -> None:
    """Raises ValueError for a tensor that is not contiguous: kernels compute addresses from shapes."""
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} {list(tensor.shape)} is not contiguous: pass {name}.contiguous()")
