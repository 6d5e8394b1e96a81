"""Mistral: a Llama whose layers have a sliding window, or those that `layer_types` names."""

from typing import Any

from eps_core.models.family import DEFAULT_WINDOW, SLIDING, Family, check_full, windows_that_cut
from eps_core.models.fields import Fields
from eps_core.models.spec import ModelSpec


def _read(fields: Fields, spec: ModelSpec) -> dict[str, Any]:
    if fields.values.get("sliding_window", DEFAULT_WINDOW) is None:
        check_full(fields)
        return {}
    kinds = fields.list_of_text("layer_types") or [SLIDING] * spec.num_layers
    return {"windows": windows_that_cut(fields, spec, kinds)}


FAMILY = Family("mistral", "MistralForCausalLM", _read)
