"""The MLX backend: Apple GPUs through Metal, and CPUs. Array operations only; see eps_core.gate.protocol.Backend."""

import platform
from importlib.metadata import version

import numpy as np

from eps_mlx.attention import add_tail, attend, attend_tail, merge
from eps_mlx.cache import Cache, check_finite, copy_units, new_cache, read_kv, write_kv
from eps_mlx.certify import bounds, certify, escalate
from eps_mlx.device import device_name, devices, from_numpy, to_numpy
from eps_mlx.kernels.choose import usable_kernels
from eps_mlx.model import load_model
from eps_mlx.score import score
from eps_mlx.selection import select, skipped_mass

__all__ = [
    "Cache",
    "add_tail",
    "attend",
    "attend_tail",
    "bounds",
    "certify",
    "check_finite",
    "copy_units",
    "device_name",
    "devices",
    "escalate",
    "from_numpy",
    "load_model",
    "merge",
    "new_cache",
    "read_kv",
    "score",
    "select",
    "skipped_mass",
    "to_numpy",
    "usable_kernels",
    "versions",
    "write_kv",
]


def versions() -> dict[str, str]:
    return {"mlx": version("mlx"), "numpy": np.__version__, "python": platform.python_version()}
