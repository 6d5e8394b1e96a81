"""Gemma 3, text: most layers have a sliding window and rotary embeddings of their own."""

import math
from typing import Any

from eps_core.models.family import FULL, SLIDING, Family, windows
from eps_core.models.fields import Fields
from eps_core.models.rope import read_rope
from eps_core.models.spec import ModelSpec, Rope

_GLOBAL_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0
_PATTERN = 6  # every sixth layer is global where config.json has no layer_types


def _read(fields: Fields, spec: ModelSpec) -> dict[str, Any]:
    for key in ("attn_logit_softcapping", "use_bidirectional_attention"):
        if fields.values.get(key):
            raise fields.unsupported(key, "none, as every published Gemma 3 has it")
    pattern_key = "sliding_window_pattern" if "sliding_window_pattern" in fields.values else "_sliding_window_pattern"
    pattern = fields.integer(pattern_key, _PATTERN)
    kinds = fields.list_of_text("layer_types")
    kinds = kinds or [SLIDING if (layer + 1) % pattern else FULL for layer in range(spec.num_layers)]
    theta, scaling, _ = _rope_of(SLIDING, fields, spec.max_context)
    bias = fields.boolean("attention_bias")
    return {
        "qk_norm": True,
        "output_norms": True,
        "qkv_bias": bias,
        "o_bias": bias,
        "embed_scale": math.sqrt(spec.hidden_size),
        "query_scale": math.sqrt(spec.head_dim / fields.number("query_pre_attn_scalar")),
        "logit_cap": fields.number_or_none("final_logit_softcapping"),
        # a window as long as the context stays one: its layers turn by their own base
        "windows": windows(fields, spec, kinds),
        "window_rope": Rope(theta, scaling, spec.head_dim, spec.head_dim, {}) if SLIDING in kinds else None,
    }


def _rope(fields: Fields, max_positions: int) -> tuple[float, dict[str, Any] | None, int]:
    return _rope_of(FULL, fields, max_positions)


def _rope_of(kind: str, fields: Fields, max_positions: int) -> tuple[float, dict[str, Any] | None, int]:
    """`read_rope` of the layers of a kind: a set each in `rope_parameters` (transformers 5), else rope_theta and
    rope_scaling of the global ones, rope_local_base_freq of the others."""
    sets, scaling = (fields.values.get(key) or {} for key in ("rope_parameters", "rope_scaling"))
    if not isinstance(sets, dict) or not all(isinstance(one, dict | None) for one in sets.values()):
        raise fields.unsupported("rope_parameters", "a set for each kind of layer")
    if not isinstance(scaling, dict):
        raise fields.unsupported("rope_scaling", "the set of the global layers")
    key, theta = ("rope_theta", _GLOBAL_THETA) if kind == FULL else ("rope_local_base_freq", _LOCAL_THETA)
    own = {"rope_theta": fields.number(key, theta)} | (sets.get(kind) or {}) | (scaling if kind == FULL else {})
    return read_rope(Fields(fields.values | {"rope_scaling": own, "rope_parameters": None}, fields.file), max_positions)


FAMILY = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    _read,
    defaults={"head_dim": 256, "query_pre_attn_scalar": 256, "tie_word_embeddings": True},
    activation="gelu_pytorch_tanh",
    activation_key="hidden_activation",
    rope=_rope,
    norms={
        "input_norm": "input_layernorm",
        "attention_norm": "post_attention_layernorm",
        "post_norm": "pre_feedforward_layernorm",
        "feed_forward_norm": "post_feedforward_layernorm",
    },
    norm_offset=1.0,
)
