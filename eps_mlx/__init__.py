"""The MLX backend: Apple GPUs through Metal, and CPUs. Array operations only; see eps_core.interface.Backend."""

import platform

import mlx.core as mx
import numpy as np

from eps_mlx.attention import attend, merge
from eps_mlx.cache import DTYPES, Cache, check_finite, copy_units, device_of, devices, new_cache, read_kv, write_kv
from eps_mlx.model import load_model
from eps_mlx.selection import select, skipped_mass
from eps_mlx.summaries import score

__all__ = [
    "Cache",
    "attend",
    "check_finite",
    "copy_units",
    "devices",
    "from_numpy",
    "load_model",
    "merge",
    "new_cache",
    "read_kv",
    "score",
    "select",
    "skipped_mass",
    "to_numpy",
    "versions",
    "write_kv",
]


def to_numpy(array: mx.array) -> np.ndarray:
    """A host copy; bfloat16, which numpy lacks, comes as float32. Synchronises."""
    return np.array(array.astype(mx.float32) if array.dtype == mx.bfloat16 else array)


def from_numpy(array: np.ndarray, dtype: str, device: str = "auto") -> mx.array:
    """The array in `dtype` (float32, float16 or bfloat16) for computing on `device`."""
    with mx.stream(device_of(device)):
        if array.dtype.name == "bfloat16":
            native = mx.array(np.ascontiguousarray(array).view(np.uint16)).view(mx.bfloat16)
        else:
            native = mx.array(array if array.dtype == np.float16 else np.asarray(array, np.float32))
        return native.astype(DTYPES[dtype])


def versions() -> dict[str, str]:
    return {"mlx": mx.__version__, "numpy": np.__version__, "python": platform.python_version()}
