"""Devices, dtypes, and arrays from and to the host."""

import mlx.core as mx
import numpy as np

from eps_core.cpu.host import host_name
from eps_core.errors import ConfigError

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


def devices() -> list[str]:
    """Usable devices by their CLI names."""
    return ["cpu", "mps"] if mx.metal.is_available() else ["cpu"]


def device_name(device: str) -> str:
    """Return the name that the device gives itself, for measurements."""
    return str(mx.device_info()["device_name"]) if device_of(device) == mx.Device(mx.gpu) else host_name()


def device_of(device: str) -> mx.Device:
    """The MLX device of a CLI name; auto is the GPU where there is one."""
    usable = devices()
    if device == "auto":
        device = usable[-1]
    if device not in usable:
        raise ConfigError(f"device {device!r} is absent: this MLX has {', '.join(usable)}; use --device {usable[-1]}")
    return mx.Device(mx.cpu if device == "cpu" else mx.gpu)


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
