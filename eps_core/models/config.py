"""A Hugging Face model directory as every backend reads it: its shape, from config.json.

`read_spec` names whatever is not supported instead of computing something else.
"""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from eps_core.config.cache import DTYPE_BYTES
from eps_core.errors import ConfigError
from eps_core.models.fields import Fields, read_if_there
from eps_core.models.folder import quantisation, quantisation_fix
from eps_core.models.registry import FAMILIES, engine_note
from eps_core.models.rope import MOST_POSITIONS, check_rope, read_rope
from eps_core.models.spec import ModelSpec
from eps_core.models.tokenizer import end_tokens

DEMO_MODEL = Path(__file__).parent.parent / "demo_model"
_MOST_LAYERS, _MOST_HEADS = 2**12, 2**16


def read_spec(path: str | Path) -> ModelSpec:
    """The model of a Hugging Face directory, from its config.json of transformers 4 or 5. Raises `ConfigError`, which
    names the field, for whatever this project does not compute."""
    path = Path(path)
    fields = Fields.of(path / "config.json")
    config, file = fields.values, fields.file

    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise fields.unsupported("model_type", f"one of {', '.join(FAMILIES)}{engine_note(kind)}")
    family = FAMILIES[kind]
    architectures = fields.list_of_text("architectures")
    if architectures and family.architecture not in architectures:
        raise fields.unsupported("architectures", family.architecture)
    quantised = quantisation(path, config)
    if quantised is not None:
        raise ConfigError(f"{path} is quantised: {quantised}, which EPS does not decode: {quantisation_fix(quantised)}")
    if (config.get(family.activation_key) or family.activation) != family.activation:
        raise fields.unsupported(family.activation_key, family.activation)
    missing = {key: value for key, value in family.defaults.items() if config.get(key) is None}
    fields = Fields(config | missing, file)

    num_heads = fields.integer("num_attention_heads", most=_MOST_HEADS)
    num_kv_heads = fields.integer("num_key_value_heads", num_heads if family.multi_head else None, _MOST_HEADS)
    if num_heads % num_kv_heads:
        raise fields.unsupported("num_key_value_heads", f"a divisor of num_attention_heads {num_heads}")
    hidden_size = fields.integer("hidden_size")
    head_dim = fields.integer("head_dim", max(hidden_size // num_heads, 1), _MOST_HEADS)
    if head_dim % 2:
        raise ConfigError(f"head_dim {head_dim} of {file} is odd: rotary embeddings need an even number")
    max_positions = fields.integer("max_position_embeddings", most=MOST_POSITIONS)
    rope_theta, rope_scaling, max_context = family.rope(fields, max_positions)
    spec = ModelSpec(
        family=family.model_type,
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
        activation=family.activation,
        bos_token_id=next(iter(fields.token_ids("bos_token_id")), None),
        eos_token_ids=_eos_token_ids(path, fields) or end_tokens(path),
        stored_dtype=_stored_dtype(fields),
    )
    spec = replace(spec, **family.read(fields, spec))
    check_rope(spec, fields)
    return spec


def read_limits(path: str | Path) -> tuple[int, tuple[int, ...]]:
    """(tokens of context, ids of the tokens that end a text) of a model of any family, as its config.json has them: for
    engines, which compute more families than this project does."""
    path = Path(path)
    fields = Fields.of(path / "config.json")
    text = fields.text
    ends = _eos_token_ids(path, fields) or _eos_token_ids(path, text) or end_tokens(path)
    context = text.integer("max_position_embeddings", most=MOST_POSITIONS)
    with suppress(ConfigError):  # rotary embeddings that are not read here
        context = read_rope(text, context)[2]
    return context, ends


def read_heads(path: str | Path) -> tuple[int, int, int]:
    """(query heads, kv heads, head dim) of a model of any family, as its config.json has them."""
    text = Fields.of(Path(path) / "config.json").text
    heads = text.integer("num_attention_heads", most=_MOST_HEADS)
    head_dim = text.integer("head_dim", max(text.integer("hidden_size") // heads, 1), _MOST_HEADS)
    return heads, text.integer("num_key_value_heads", heads, _MOST_HEADS), head_dim


def _eos_token_ids(path: Path, fields: Fields) -> tuple[int, ...]:
    ids = fields.token_ids("eos_token_id")
    file = path / "generation_config.json"
    return tuple(dict.fromkeys(ids + Fields(read_if_there(file), file).token_ids("eos_token_id")))


def _stored_dtype(fields: Fields) -> str:
    key = "dtype" if fields.values.get("dtype") is not None else "torch_dtype"
    value = "float32" if fields.values.get(key) is None else fields.values[key]
    if not isinstance(value, str) or value not in DTYPE_BYTES:
        raise fields.unsupported(key, ", ".join(DTYPE_BYTES))
    return value
