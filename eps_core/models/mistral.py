"""Mistral: a Llama of which every layer may have a sliding window."""

from typing import Any

from eps_core.models.family import DEFAULT_WINDOW, SLIDING, Family, check_full, windows_that_cut
from eps_core.models.fields import Fields
from eps_core.models.spec import ModelSpec


def _read(fields: Fields, spec: ModelSpec) -> dict[str, Any]:
    check_full(fields)
    if fields.values.get("sliding_window", DEFAULT_WINDOW) is None:
        return {}
    return {"windows": windows_that_cut(fields, spec, [SLIDING] * spec.num_layers)}


FAMILY = Family("mistral", "MistralForCausalLM", _read)
