"""The numpy backend: the float64 oracle under the Backend Protocol's names. Slow on purpose, never optimised.

K and V lie in the cache's dtype (bfloat16 through ml_dtypes); every statistic and every attention is computed in
float64 from what lies there.
"""

from eps_core.oracle.attend import add_tail, attend, attend_own, attend_tail, merge
from eps_core.oracle.cache import (
    Cache,
    check_finite,
    copy_units,
    device_name,
    devices,
    from_numpy,
    new_cache,
    read_kv,
    to_numpy,
    usable_kernels,
    versions,
    write_kv,
)
from eps_core.oracle.decoder import load_model
from eps_core.oracle.score import bounds, certify, escalate, score, select, skipped_mass

__all__ = [
    "Cache",
    "add_tail",
    "attend",
    "attend_own",
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
