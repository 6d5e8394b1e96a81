"""Phi-3 and Phi-3.5 mini and medium: q, k and v in one projection, gate and up in another, longrope."""

from typing import Any

from eps_core.models.family import SLIDING, Family, windows_that_cut
from eps_core.models.fields import Fields
from eps_core.models.rope import read_rope
from eps_core.models.spec import ModelSpec

_OLD_NAMES = ("su", "yarn")  # of longrope, in the first config.json files


def _read(fields: Fields, spec: ModelSpec) -> dict[str, Any]:
    if fields.values.get("sliding_window") is None:
        return {}
    return {"windows": windows_that_cut(fields, spec, [SLIDING] * spec.num_layers)}


def _rope(fields: Fields, max_positions: int) -> tuple[float, dict[str, Any] | None, int]:
    config = dict(fields.values)
    for key in ("rope_scaling", "rope_parameters"):
        given = config.get(key)
        if isinstance(given, dict) and given.get("rope_type", given.get("type")) in _OLD_NAMES:
            config[key] = given | {"rope_type": "longrope"}
    return read_rope(Fields(config, fields.file), max_positions)


FAMILY = Family(
    "phi3",
    "Phi3ForCausalLM",
    _read,
    defaults={"original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    multi_head=True,
    rope=_rope,
    stacked={"self_attn.qkv_proj": ("q", "k", "v"), "mlp.gate_up_proj": ("gate", "up")},
)
