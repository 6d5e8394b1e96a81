"""Llama 2, 3 and 3.1, and what is published in their form (SmolLM, Yi)."""

from typing import Any

from eps_core.models.family import Family, check_full
from eps_core.models.fields import Fields
from eps_core.models.spec import ModelSpec


def _read(fields: Fields, spec: ModelSpec) -> dict[str, Any]:
    check_full(fields)
    bias = fields.boolean("attention_bias")
    return {"qkv_bias": bias, "o_bias": bias, "mlp_bias": fields.boolean("mlp_bias")}


FAMILY = Family("llama", "LlamaForCausalLM", _read, multi_head=True)
