"""Qwen2 and Qwen2.5: biases of q, k and v, and sliding windows from some layer on."""

from typing import Any

from eps_core.models.family import DEFAULT_WINDOW, FULL, SLIDING, Family, windows_that_cut
from eps_core.models.fields import Fields
from eps_core.models.spec import ModelSpec

_DEFAULT_FULL_LAYERS = 28  # where config.json has no max_window_layers, as in transformers


def qwen_windows(fields: Fields, spec: ModelSpec) -> dict[str, Any]:
    """`ModelSpec.windows` as transformers reads them: `layer_types`, else all layers from max_window_layers on."""
    kinds = fields.list_of_text("layer_types")
    if not fields.boolean("use_sliding_window"):
        if SLIDING in kinds:
            raise fields.unsupported("layer_types", f"{FULL} in every layer without use_sliding_window")
        return {}
    if fields.values.get("sliding_window", DEFAULT_WINDOW) is None:
        return {}
    first = fields.integer("max_window_layers", _DEFAULT_FULL_LAYERS, least=0)
    kinds = kinds or [FULL if layer < first else SLIDING for layer in range(spec.num_layers)]
    return {"windows": windows_that_cut(fields, spec, kinds)}


def _read(fields: Fields, spec: ModelSpec) -> dict[str, Any]:
    return {"qkv_bias": True} | qwen_windows(fields, spec)


FAMILY = Family("qwen2", "Qwen2ForCausalLM", _read)
