"""The MLX backend: Apple GPUs through Metal, and CPUs; see eps_core.attention.protocol.Backend."""

import platform
from functools import partial
from importlib.metadata import version

import numpy as np

from eps_core.attention import kernels as shared_kernels
from eps_core.backend import attention as shared_attention
from eps_core.backend import cache as shared_cache
from eps_core.backend import error_bounds, moves, scoring, selection
from eps_mlx.attention import attend, attend_chunk
from eps_mlx.cache import Cache, grow, import_units, new_cache, read_kv, span, to_host
from eps_mlx.cache import evaluate as wait
from eps_mlx.device import device_name, devices, from_numpy, to_numpy
from eps_mlx.kernels.choose import usable_kernels
from eps_mlx.model import load_model
from eps_mlx.ops import OPS

# what both array libraries share
kernel_of = partial(shared_kernels.kernel_of, OPS)
attend_own = partial(shared_attention.attend_own, OPS)
attend_rows = partial(shared_attention.attend_rows, OPS)
merge = partial(shared_attention.merge, OPS)
unread_share = partial(shared_attention.unread_share, OPS)
weights = partial(shared_attention.weights, OPS)
check_finite = partial(shared_cache.check_finite, OPS)
write_kv = partial(shared_cache.write_kv, OPS)
write_kv_tentative = partial(shared_cache.write_kv_tentative, OPS)
bound_error = partial(error_bounds.bound_error, OPS)
bounds = partial(error_bounds.bounds, OPS)
extend_selection = partial(error_bounds.extend_selection, OPS)
copy_units = partial(moves.copy_units, OPS)
export_units = partial(moves.export_units, OPS)
move_kv = partial(moves.move_kv, OPS)
take = partial(moves.take, OPS)
visits = partial(moves.visits, OPS)
score = partial(scoring.score, OPS)
select = partial(selection.select, OPS)
skipped_mass = partial(selection.skipped_mass, OPS)


def versions() -> dict[str, str]:
    return {"mlx": version("mlx"), "numpy": np.__version__, "python": platform.python_version()}
