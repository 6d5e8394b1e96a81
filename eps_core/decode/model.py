"""A Hugging Face model directory as every backend reads it: its shape, from config.json.

`read_spec` names whatever is not supported instead of computing something else.
"""

import os
from pathlib import Path

import eps_core
from eps_core.config.store import DTYPE_BYTES
from eps_core.decode.fields import Fields
from eps_core.decode.rope import MOST_POSITIONS, check_rope, read_rope
from eps_core.decode.spec import ARCHITECTURES, ModelSpec
from eps_core.errors import ConfigError, shown

DEMO_MODEL = Path(eps_core.__file__).parent / "demo_model"
_MOST_LAYERS, _MOST_HEADS = 2**12, 2**16


def read_spec(path: str | Path) -> ModelSpec:
    """The model of a Hugging Face directory, from its config.json of transformers 4 or 5. Raises `ConfigError`, which
    names the field, for whatever this project does not compute."""
    path = Path(path)
    fields = Fields.of(path / "config.json")
    config, file = fields.values, fields.file

    family = config.get("model_type")
    if not isinstance(family, str) or family not in ARCHITECTURES:
        raise fields.unsupported("model_type", f"one of {', '.join(ARCHITECTURES)}")
    architectures = fields.list_of_text("architectures")
    if architectures and ARCHITECTURES[family] not in architectures:
        raise fields.unsupported("architectures", ARCHITECTURES[family])
    for key in ("quantization_config", "quantization"):
        if config.get(key) is not None:
            raise fields.unsupported(key, "none: give the unquantised float32, float16 or bfloat16 weights")
    if config.get("hidden_act", "silu") != "silu":
        raise fields.unsupported("hidden_act", "silu")
    _refuse_sliding_window(family, fields)

    num_heads = fields.integer("num_attention_heads", most=_MOST_HEADS)
    num_kv_heads = fields.integer("num_key_value_heads", num_heads if family == "llama" else None, _MOST_HEADS)
    if num_heads % num_kv_heads:
        raise fields.unsupported("num_key_value_heads", f"a divisor of num_attention_heads {num_heads}")
    hidden_size = fields.integer("hidden_size")
    # transformers gives a Qwen3 without head_dim 128, whatever its other sizes
    default_dim = 128 if family == "qwen3" else max(hidden_size // num_heads, 1)
    head_dim = fields.integer("head_dim", default_dim, _MOST_HEADS)
    if head_dim % 2:
        raise ConfigError(f"head_dim {head_dim} of {file} is odd: rotary embeddings need an even number")
    max_positions = fields.integer("max_position_embeddings", most=MOST_POSITIONS)
    rope_theta, rope_scaling, max_context = read_rope(fields, max_positions)
    attention_bias = fields.boolean("attention_bias") if family in ("llama", "qwen3") else False
    spec = ModelSpec(
        family=family,
        num_layers=fields.integer("num_hidden_layers", most=_MOST_LAYERS),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=fields.integer("vocab_size"),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        max_context=max_context,
        tie_embeddings=fields.boolean("tie_word_embeddings"),
        qkv_bias=family == "qwen2" or attention_bias,
        o_bias=attention_bias,
        mlp_bias=family == "llama" and fields.boolean("mlp_bias"),
        qk_norm=family == "qwen3",
        bos_token_id=next(iter(fields.token_ids("bos_token_id")), None),
        eos_token_ids=_eos_token_ids(path, fields),
        stored_dtype=_stored_dtype(fields),
    )
    check_rope(spec, fields)
    return spec


def read_limits(path: str | Path) -> tuple[int, tuple[int, ...]]:
    """(tokens of context, ids of the tokens that end a text) of a model of any family, as its config.json has them: for
    engines, which compute more families than this project does."""
    path = Path(path)
    fields = Fields.of(path / "config.json")
    text = fields.text
    ends = _eos_token_ids(path, fields) or _eos_token_ids(path, text)
    return text.integer("max_position_embeddings", most=MOST_POSITIONS), ends


def read_heads(path: str | Path) -> tuple[int, int, int]:
    """(query heads, kv heads, head dim) of a model of any family, as its config.json has them."""
    text = Fields.of(Path(path) / "config.json").text
    heads = text.integer("num_attention_heads", most=_MOST_HEADS)
    head_dim = text.integer("head_dim", max(text.integer("hidden_size") // heads, 1), _MOST_HEADS)
    return heads, text.integer("num_key_value_heads", heads, _MOST_HEADS), head_dim


def _refuse_sliding_window(family: str, fields: Fields) -> None:
    config = fields.values
    # a Mistral config.json without the key means a window of 4096, as transformers reads it
    if family == "mistral" and config.get("sliding_window", 4096) is not None:
        missing = "sliding_window" not in config
        window = "4096 (the default where the key is missing)" if missing else shown(config["sliding_window"])
        raise ConfigError(
            f"sliding_window {window} of {fields.file} is unsupported: EPS reads full attention, sliding_window null"
        )
    if family in ("qwen2", "qwen3") and fields.boolean("use_sliding_window"):
        raise fields.unsupported("use_sliding_window", "full attention, use_sliding_window false")
    if any(kind != "full_attention" for kind in fields.list_of_text("layer_types")):
        raise fields.unsupported("layer_types", "full_attention in every layer")


def _eos_token_ids(path: Path, fields: Fields) -> tuple[int, ...]:
    ids = fields.token_ids("eos_token_id")
    file = path / "generation_config.json"
    if os.path.lexists(file):
        ids += Fields.of(file).token_ids("eos_token_id")
    return tuple(dict.fromkeys(ids))


def _stored_dtype(fields: Fields) -> str:
    key = "dtype" if fields.values.get("dtype") is not None else "torch_dtype"
    value = fields.values.get(key)
    value = "float32" if value is None else value
    if not isinstance(value, str) or value not in DTYPE_BYTES:
        raise fields.unsupported(key, ", ".join(DTYPE_BYTES))
    return value
