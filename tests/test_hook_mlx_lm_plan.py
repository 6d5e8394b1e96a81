"""Which layers of an mlx-lm model EPS leaves dense, by the name it gives for it. Refused families are in
test_hook_mlx_lm.py."""

from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm_models import prompts, teacher_forced, tiny

from eps_core.errors import ConfigError
from eps_mlx.hooks.mlx_lm import eps

SMALL = {"method": "rq", "first_tokens": 4, "last_tokens": 16}


class OwnMask(llama.Attention):
    """Attention that hides its first token from a step, whatever mask it is given."""

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        if x.shape[1] == 1 and cache.offset:
            mask = mx.arange(cache.offset + 1)[None] > 0
        return super().__call__(x, mask, cache)


class Twice(llama.Attention):
    """Attention that comes twice, each time with keys of its own."""

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        half = mask if mask is None or isinstance(mask, str) else None
        return super().__call__(x, half, cache) + super().__call__(x, half, cache)


class Shared(llama.Attention):
    """Attention of the keys that the last layer with its own left in a list."""

    def __init__(self, args: Any, keys: list[Any]) -> None:
        super().__init__(args)
        self._keys = keys

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        batch, length, _ = x.shape
        queries = self.q_proj(x).reshape(batch, length, self.n_heads, -1).transpose(0, 2, 1, 3)
        keys, values, theirs = self._keys
        out = llama.scaled_dot_product_attention(queries, keys, values, cache=theirs, scale=self.scale, mask=mask)
        return self.o_proj(out.transpose(0, 2, 1, 3).reshape(batch, length, -1))


class Lends(llama.Attention):
    """The attention whose keys `Shared` reads."""

    def __init__(self, args: Any, keys: list[Any]) -> None:
        super().__init__(args)
        self._keys = keys

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        return super().__call__(x, mask, _Noted(cache, self._keys))


def with_layers(*layers: Any, **more: Any) -> Any:
    """A Llama with these attentions, made of its arguments; None: its own."""
    model = tiny("llama", num_hidden_layers=len(layers), **more)
    for block, make in zip(model.layers, layers, strict=True):
        if make is not None:
            block.self_attn = make(model.args)
            block.self_attn.update(weights(block.self_attn))
    mx.eval(model.parameters())
    return model
