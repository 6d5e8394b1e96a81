"""The numpy backend: the float64 oracle under the Backend Protocol's names. Slow on purpose, never optimised.

K and V lie in the cache's dtype (bfloat16 through ml_dtypes); every statistic and every attention is computed in
float64 from what lies there.
"""

from eps_core.reference.attention import (
    attend,
    attend_chunk,
    attend_own,
    attend_rows,
    unread_share,
    weights,
)
from eps_core.reference.cache import (
    Cache,
    check_finite,
    copy_units,
    device_name,
    devices,
    export_units,
    from_numpy,
    grow,
    import_units,
    kernel_of,
    move_kv,
    new_cache,
    read_kv,
    span,
    take,
    to_host,
    to_numpy,
    usable_kernels,
    versions,
    wait,
    write_kv,
    write_kv_tentative,
)
from eps_core.reference.formulas import merge
from eps_core.reference.model import load_model
from eps_core.reference.scoring import bound_error, bounds, extend_selection, score, select, skipped_mass, visits
