"""The Torch backend: CUDA, ROCm and Intel GPUs, and CPUs. See eps_core.attention.protocol.Backend."""

import platform

import numpy as np
import torch

from eps_core.cpu import forks
from eps_cuda.arrays import (
    attend_own,
    attend_rows,
    bound_error,
    bounds,
    check_finite,
    copy_units,
    export_units,
    extend_selection,
    import_units,
    merge,
    move_kv,
    read_kv,
    score,
    select,
    skipped_mass,
    take,
    unread_share,
    visits,
    weights,
    write_kv,
    write_kv_tentative,
)
from eps_cuda.attention import attend, attend_chunk
from eps_cuda.cache import Cache, grow, new_cache, span, to_host, wait
from eps_cuda.device import device_name, devices, from_numpy, to_numpy
from eps_cuda.kernels.choose import kernel_of, usable_kernels
from eps_cuda.model import load_model

forks.watch()  # whatever Torch does from here on may make threads


def versions() -> dict[str, str]:
    return {"torch": torch.__version__, "numpy": np.__version__, "python": platform.python_version()}
