"""Devices, dtypes, and arrays from and to the host."""

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from eps_core.cpu.host import host_name
from eps_core.cpu.memory import advise_huge_pages
from eps_core.errors import ConfigError

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
GPUS = ("cuda", "xpu")  # the first of them that is there is auto's; ROCm's Torch calls its device cuda, too


def devices() -> list[str]:
    """Usable devices by their CLI names."""
    return ["cpu", *(name for name in GPUS if gpu(name).is_available())]


def device_name(device: str) -> str:
    """Return the name that the device gives itself, for measurements."""
    place = device_of(device).type
    return host_name() if place == "cpu" else gpu(place).get_device_name()


def gpu(device: str) -> Any:
    """Torch's module of a kind of GPU, torch.cuda or torch.xpu: they name alike what both have."""
    return getattr(torch, device)


def device_of(device: str) -> torch.device:
    """The Torch device of a CLI name; auto is the GPU where there is one."""
    usable = devices()
    best = usable[1] if len(usable) > 1 else "cpu"
    if device == "auto":
        device = best
    if device not in usable:
        raise ConfigError(
            f"device {device!r} is absent: this torch {torch.__version__} has {', '.join(usable)}; use --device {best}"
        )
    return torch.device(device)


def to_numpy(array: Tensor) -> np.ndarray:
    """A host array; bfloat16, which numpy lacks, comes as ml_dtypes' bfloat16. Synchronises."""
    host = array.detach().cpu()
    if host.dtype == torch.bfloat16:
        return host.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return host.numpy()


def from_numpy(array: np.ndarray, dtype: str, device: str = "auto") -> Tensor:
    """The array in `dtype` (float32, float16 or bfloat16) on `device`; on the CPU it may share the array's memory."""
    if array.dtype.name == "bfloat16":
        native = torch.from_numpy(np.require(array.view(np.int16), requirements=["C", "W"])).view(torch.bfloat16)
    else:
        kept = array.dtype if array.dtype == np.float16 else np.dtype(np.float32)
        native = torch.from_numpy(np.require(array, dtype=kept, requirements=["C", "W"]))
    return native.to(device=device_of(device), dtype=DTYPES[dtype])


def empty_pool(shape: Sequence[int], dtype: torch.dtype, place: torch.device) -> Tensor:
    """An array that is read in scattered tiles, not yet written: on the CPU in huge pages where there are any."""
    pool = torch.empty(tuple(shape), dtype=dtype, device=place)
    if place.type == "cpu":
        advise_huge_pages(pool.data_ptr(), pool.nbytes)
    return pool
