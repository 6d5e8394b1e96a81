"""The MLX backend: Apple GPUs through Metal, and CPUs; see eps_core.attention.protocol.Backend."""

import platform
from importlib.metadata import version

import numpy as np

from eps_mlx.arrays import (
    attend_own,
    attend_rows,
    bound_error,
    bounds,
    check_finite,
    copy_units,
    export_units,
    extend_selection,
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
from eps_mlx.attention import attend, attend_chunk
from eps_mlx.cache import Cache, grow, import_units, new_cache, span, to_host
from eps_mlx.cache import evaluate as wait
from eps_mlx.device import device_name, devices, from_numpy, to_numpy
from eps_mlx.kernels.choose import kernel_of, usable_kernels
from eps_mlx.model import load_model


def versions() -> dict[str, str]:
    return {"mlx": version("mlx"), "numpy": np.__version__, "python": platform.python_version()}
