"""Balanced keys in a model that an engine has loaded: `decode.balance` over the engine's own weights."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from eps_core.config.cache import CacheConfig
from eps_core.decode.balance import Measure, balance, key_factors
from eps_core.errors import ConfigError
from eps_core.models.config import read_spec
from eps_core.models.weights import weight_names

_EXACT = ("float32", "bfloat16")  # dtypes in which a product with a power of two is exact


def balance_loaded(
    path: Path,
    config: CacheConfig,
    weights: Mapping[str, tuple[int, str]],
    run: Callable[[Sequence[int], Measure], None],
    multiply: Callable[[str, int, np.ndarray], None],
) -> None:
    """Balances the keys of the model of a folder whose `weights` an engine holds: rows and dtype of each tensor, by its
    name in the model's files. `run` is as in `decode.balance`; `multiply(name, first, factors)` multiplies the rows of
    a tensor from `first` on.

    The model is left as it is where no code is asked for and where EPS's own decoders do not read it (another family, a
    GGUF file, quantised weights). So it is where a power of two is not always exact (float16, norms that are stored
    about 1), and where the engine does not hold the weights whole and by themselves (adapters, shards, offloading)."""
    if not config.mean_tokens:
        return
    try:
        spec = read_spec(path)
    except ConfigError:
        return
    stored, no_exponents = weight_names(spec), np.zeros((spec.num_kv_heads, spec.head_dim // 2), np.int8)
    names = {short: stored[short] for layer in spec.full for short in key_factors(spec, layer, no_exponents)}
    for one in names.values():
        rows, dtype = weights.get(one.name, (0, ""))
        if one.offset or rows != one.stored_shape[0] or dtype not in _EXACT:
            return
    balance(spec, config.mean_tokens, run, lambda one, rows: multiply(names[one].name, names[one].first, rows))
