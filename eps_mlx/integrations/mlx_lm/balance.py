"""Balanced keys in a model of mlx-lm: see eps_core.integrations.balance."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache

from eps_core.decode.balance import Measure
from eps_core.integrations.balance import balance_loaded
from eps_mlx.device import DTYPES
from eps_mlx.integrations.mlx_lm.dropped import interleaved, ropes
from eps_mlx.integrations.mlx_lm.hook import Hook
from eps_mlx.integrations.mlx_lm.names import Attends, stock_attention


def balance(hook: Hook, path: Path) -> None:
    """Balances the keys of a model that was loaded from `path`, whose logits keep their bits. Not where dimension 2i
    turns with 2i + 1: there, one factor for i and i + D/2 would change logits."""
    model = hook.model
    if hook.pool is None or any(interleaved(module) for _, module in ropes(model)):
        return

    def run(tokens: Sequence[int], measure: Measure) -> None:
        stock = enumerate(hook.stock_caches())
        cache = [_Measured(measure, place) if type(one) is KVCache else one for place, one in stock]
        mx.eval(model(mx.array([tokens]), cache=cache))

    def multiply(name: str, first: int, factors: np.ndarray) -> None:
        weight = dict(tree_flatten(model.parameters()))[name]
        whole = np.ones(len(weight), np.float32)
        whole[first : first + len(factors)] = factors
        column = mx.array(whole).astype(weight.dtype).reshape(-1, *[1] * (weight.ndim - 1))
        model.load_weights([(name, weight * column)], strict=False)

    flat: Any = tree_flatten(model.parameters())
    kinds = {dtype: name for name, dtype in DTYPES.items()}
    weights = {name: (len(array), kinds.get(array.dtype, "")) for name, array in flat if array.ndim}
    balance_loaded(path, hook.sparse.config.cache_config, weights, run, multiply)
    mx.eval(model.parameters())


class _Measured(KVCache, Attends):
    """A layer's K and V, whose attention shows its queries and keys."""

    def __init__(self, measure: Measure, place: int) -> None:
        super().__init__()
        self.measure, self.place = measure, place

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any, sinks: mx.array | None
    ) -> mx.array:
        self.measure(self.place, *(np.array(one[0].swapaxes(0, 1).astype(mx.float32)) for one in (queries, keys)))
        return stock_attention(queries, keys, values, self, scale=scale, mask=mask, sinks=sinks)
