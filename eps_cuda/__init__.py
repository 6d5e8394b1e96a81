"""The Torch backend: CUDA, ROCm and Intel GPUs, and CPUs. See eps_core.attention.protocol.Backend."""

import platform

import numpy as np
import torch

from eps_core.cpu import forks
from eps_cuda.attention import (
    add_correction,
    attend,
    attend_chunk,
    attend_correction,
    attend_own,
    attend_rows,
    merge,
    moved_by,
    unread_share,
    weights,
)
from eps_cuda.cache import (
    Cache,
    check_finite,
    grow,
    new_cache,
    read_kv,
    span,
    to_host,
    wait,
    write_kv,
)
from eps_cuda.device import device_name, devices, from_numpy, to_numpy
from eps_cuda.drafts import take, visits, write_kv_tentative
from eps_cuda.error_bounds import bound_error, bounds, extend_selection
from eps_cuda.kernels.choose import kernel_of, usable_kernels
from eps_cuda.model import load_model
from eps_cuda.moves import copy_units, export_units, import_units, move_kv
from eps_cuda.scoring import score
from eps_cuda.selection import select, skipped_mass

forks.watch()  # whatever Torch does from here on may make threads


def versions() -> dict[str, str]:
    return {"torch": torch.__version__, "numpy": np.__version__, "python": platform.python_version()}
