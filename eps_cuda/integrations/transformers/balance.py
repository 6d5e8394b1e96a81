"""Balanced keys in a model of transformers: see eps_core.integrations.balance."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from eps_core.config.cache import CacheConfig
from eps_core.decode.balance import Measure
from eps_core.integrations.balance import balance_loaded
from eps_cuda.integrations.transformers.attention import NAME, hand_over
from eps_cuda.integrations.transformers.names import CACHE


@torch.no_grad()
def balance(model: Any, path: Path, config: CacheConfig) -> None:
    """Balances the keys of a model that was loaded from `path`, whose logits keep their bits."""

    def run(tokens: Sequence[int], measure: Measure) -> None:
        cache, before = DynamicCache(config=model.config), model.config._attn_implementation
        cache.layers = [
            _Measured(measure, place) if type(layer) is DynamicLayer else layer
            for place, layer in enumerate(cache.layers)
        ]
        model.set_attn_implementation(NAME)
        try:
            model(torch.tensor([tokens], device=model.device), use_cache=True, logits_to_keep=1, **{CACHE: cache})
        finally:
            model.set_attn_implementation(before)

    def multiply(name: str, first: int, factors: np.ndarray) -> None:
        rows = model.get_parameter(name)[first : first + len(factors)]
        rows.mul_(torch.from_numpy(factors).to(rows).view(-1, *[1] * (rows.ndim - 1)))

    weights = {
        name: (len(array), str(array.dtype).removeprefix("torch."))
        for name, array in model.named_parameters()
        if array.ndim and array.device.type != "meta"
    }
    balance_loaded(path, config, weights, run, multiply)


class _Measured(DynamicLayer):
    """A layer's K and V, whose attention shows its queries and keys."""

    def __init__(self, measure: Measure, place: int) -> None:
        super().__init__()
        self.measure, self.place = measure, place

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.handed = keys, values = super().update(key_states, value_states, *args, **kwargs)
        return hand_over(keys, self), values

    def attend(self, module: torch.nn.Module, query: Tensor, mask: Tensor | None, **kwargs: Any) -> Tensor:
        keys, values = self.handed
        self.measure(self.place, *(one[0].transpose(0, 1).float().cpu().numpy() for one in (query, keys)))
        return sdpa_attention_forward(module, query, keys, values, mask, **kwargs)[0]
