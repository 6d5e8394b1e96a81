"""The MLX backend: Apple GPUs through Metal, and CPUs. Array operations only; see
eps_core.attention.protocol.Backend."""

import platform
from importlib.metadata import version

import numpy as np

from eps_mlx.attention import (
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
from eps_mlx.cache import (
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
from eps_mlx.device import device_name, devices, from_numpy, to_numpy
from eps_mlx.drafts import take, visits, write_kv_tentative
from eps_mlx.error_bounds import bound_error, bounds, extend_selection
from eps_mlx.kernels.choose import kernel_of, usable_kernels
from eps_mlx.model import load_model
from eps_mlx.moves import copy_units, export_units, import_units, move_kv
from eps_mlx.scoring import score
from eps_mlx.selection import select, skipped_mass


def versions() -> dict[str, str]:
    return {"mlx": version("mlx"), "numpy": np.__version__, "python": platform.python_version()}
