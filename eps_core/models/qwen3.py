"""Qwen3: q and k are normed head by head."""

from typing import Any

from eps_core.models.family import Family
from eps_core.models.fields import Fields
from eps_core.models.qwen2 import qwen_windows
from eps_core.models.spec import ModelSpec


def _read(fields: Fields, spec: ModelSpec) -> dict[str, Any]:
    bias = fields.boolean("attention_bias")
    return {"qk_norm": True, "qkv_bias": bias, "o_bias": bias} | qwen_windows(fields, spec)


FAMILY = Family("qwen3", "Qwen3ForCausalLM", _read, defaults={"head_dim": 128})
