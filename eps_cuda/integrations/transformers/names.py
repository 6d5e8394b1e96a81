"""The name by which models of this version of transformers take and return a cache."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from transformers.generation import GenerateDecoderOnlyOutput

_NAMES = ("cache", "past_key_values")  # from 5.24 on, and before: newer versions still take the second, and rename it
CACHE = next(name for name in _NAMES if name in {field.name for field in fields(GenerateDecoderOnlyOutput)})


def cache_in(arguments: Mapping[str, Any]) -> Any:
    """Return the cache among the named arguments of a model's call, None where there is none."""
    return next((arguments[name] for name in _NAMES if arguments.get(name) is not None), None)
