"""The names in mlx-lm that a hook rebinds, and back: counted, so that several models can have EPS on at once."""

import sys
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step as stock_step
from mlx_lm.models import base
from mlx_lm.models import cache as caches

from eps_core.errors import ConfigError

ATTENTION = "scaled_dot_product_attention"
STEP = "generate_step"
HANDLE = "_eps_hook"  # on a model that has EPS on
stock_attention = base.scaled_dot_product_attention


class Attends:
    """A cache that attends itself: what the rebound name looks for."""

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any, sinks: mx.array | None
    ) -> mx.array:
        raise NotImplementedError


def attention(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """mlx-lm's `scaled_dot_product_attention`, which goes to the cache where that is one of ours."""
    if isinstance(cache, Attends):
        return cache.attend(queries, keys, values, scale, mask, sinks)
    return stock_attention(queries, keys, values, cache, scale=scale, mask=mask, sinks=sinks)


def swap(old: Callable[..., Any], new: Callable[..., Any], name: str = ATTENTION) -> list[str]:
    """Rebinds a name, the attention's, in every loaded module that has it; the modules' names."""
    found = []
    for place, module in list(sys.modules.items()):
        if getattr(module, "__dict__", {}).get(name) is old:
            setattr(module, name, new)
            found.append(place)
    return found


_verifying: list[Callable[..., Any]] = []  # one a model


def rebind_step(step: Callable[..., Any]) -> None:
    """Sends mlx-lm's loop of one prompt through `step`, which knows its models. Each call asks for one
    `restore_step`."""
    if not _verifying:
        swap(stock_step, step, STEP)
    _verifying.append(step)


def restore_step() -> None:
    step = _verifying.pop()
    if not _verifying:
        swap(step, stock_step, STEP)


_users = 0
_classes: tuple[type, ...] = ()


def rebind(classes: tuple[type, ...]) -> None:
    """Sends every model's attention through `attention` and lets mlx-lm find cache `classes` by their names when it
    loads a prompt cache. Each call asks for one `restore`. Raises ConfigError where no model can be reached."""
    global _users, _classes
    found = swap(stock_attention, attention)
    if not _users:
        if not [name for name in found if name != base.__name__]:
            swap(attention, stock_attention)
            raise ConfigError(
                f"no loaded model binds mlx-lm's {ATTENTION}: load the model with mlx_lm before EPS is put on it"
            )
        _classes = classes
        for one in classes:
            setattr(caches, one.__name__, one)
    _users += 1


def restore() -> None:
    """Takes one `rebind` back; with the last one every name is what it was."""
    global _users
    assert _users, "restore without rebind"
    _users -= 1
    if _users:
        return
    swap(attention, stock_attention)
    for one in _classes:
        delattr(caches, one.__name__)
