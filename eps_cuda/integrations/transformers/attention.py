"""The attention "eps" of transformers: layers of our cache attend themselves, all else is its own sdpa."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from eps_core.errors import ConfigError

NAME = "eps"
_HANDLE = "_eps_layer"  # attribute of the key tensor that a layer of ours returns: no cache reaches the function below


def hand_over(key: Tensor, layer: Any) -> Tensor:
    """The key, by which `attention` finds the cache's layer."""
    setattr(key, _HANDLE, layer)
    return key


def attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """(out [B, N, Hq, D], no weights) as every attention function of transformers: query [B, Hq, N, D]."""
    if kwargs.get("s_aux") is not None:
        raise ConfigError(
            f'attention "{NAME}" cannot read the learned sinks of {type(module).__name__}: load the model with '
            'attn_implementation="eager"'
        )
    layer = getattr(key, _HANDLE, None)
    if layer is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)  # type: ignore[return-value]
    return layer.attend(module, query, attention_mask, **kwargs), None


def left_padding(mask: Tensor | None, batch: int, length: int) -> tuple[np.ndarray, bool]:
    """(hidden [B] int64, plain): of `length` tokens, how many come before the first that each row's last query may see;
    plain where it sees all from there on. A mask unlike sdpa's is not plain. Waits for the device once."""
    if mask is None:
        return np.zeros(batch, np.int64), True
    if mask.dtype != torch.bool or mask.ndim != 4 or mask.shape[1] != 1 or mask.shape[-1] != length:
        return np.zeros(batch, np.int64), False
    seen = mask[:, 0, -1].expand(batch, length)
    some = seen.any(dim=-1)
    first = torch.where(some, seen.int().argmax(dim=-1), length)
    plain = seen.sum(dim=-1) == length - first
    found = torch.stack([first, plain.to(first.dtype)]).cpu().numpy()
    return found[0].astype(np.int64), bool(found[1].all())


# the documented way to add an implementation: a name in a table, no model is touched
AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
