"""Kernels that an engine may trust: compared with array operations before they are used, once a process and shape."""

import logging
from functools import cache
from typing import Any

from eps_core.attention.protocol import Backend
from eps_core.config.cache import CacheConfig, CacheSpec
from eps_core.config.eps import EpsConfig
from eps_core.decode.kernel_check import disagreement
from eps_core.errors import ConfigError
from eps_core.load import resolve_kernels

logger = logging.getLogger("eps")


def checked_kernels(
    backend: Backend, kernels: str, device: str, spec: CacheSpec, num_heads: int, cache_config: CacheConfig
) -> str:
    """The kernels asked for, if they say what array operations say on this device; of auto, array operations then take
    the place. Raises ConfigError for named ones. A fault that a device finds later would go unseen, and late
    compilation would hold up a text: so kernels are tried, and compiled, now."""
    found = resolve_kernels(kernels, backend.usable_kernels(device), device)
    if found == "arrays" or (device == "cpu" and found != "numba"):  # a GPU's kernels in a test
        return found
    module: Any = backend
    shape = CacheSpec(1, spec.num_kv_heads, spec.head_dim, 1, spec.dtype)
    fault = _fault(module, device, found, shape, num_heads, cache_config)
    if fault is None:
        return found
    if kernels != "auto":
        raise ConfigError(f"{fault}: choose --kernels arrays")
    return "arrays"


@cache
def _fault(
    backend: Any, device: str, kernels: str, spec: CacheSpec, num_heads: int, cache_config: CacheConfig
) -> str | None:
    fault = disagreement(backend, device, kernels, spec, num_heads, EpsConfig.reading(cache_config, device))
    if fault is None:
        return None
    line = f"kernels {kernels} failed their check on this device ({fault})"
    logger.warning("%s: array operations instead", line)
    return line
