"""Balanced keys in a model that an engine has loaded: `decode.balance` over the engine's own weights."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from eps_core.config.cache import CacheConfig
from eps_core.decode.balance import Measure, balance
from eps_core.errors import ConfigError
from eps_core.models.config import read_spec
from eps_core.models.weights import weight_names


def balance_loaded(
    path: Path,
    config: CacheConfig,
    dtype: str,
    run: Callable[[Sequence[int], Measure], None],
    multiply: Callable[[str, int, np.ndarray], None],
) -> None:
    """Balances the keys of the model of a folder that an engine holds in `dtype`. `run` is as in `decode.balance`;
    `multiply(name, first, factors)` multiplies the rows of a tensor, by its name in the model's files, from `first` on.
    The model is left as it is where no code is asked for, where EPS's own decoders do not read it (another family,
    quantised weights), and where a power of two is not always exact: float16, and norms that are stored about 1."""
    if not config.mean_tokens or dtype == "float16":
        return
    try:
        spec = read_spec(path)
    except ConfigError:
        return
    names = weight_names(spec)
    if spec.qk_norm and names["layers.0.k_norm"].offset:
        return
    balance(spec, config.mean_tokens, run, lambda one, rows: multiply(names[one].name, names[one].first, rows))
