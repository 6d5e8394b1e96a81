"""A Hugging Face model directory as every backend reads it: its shape, its weights, its tokenizer.

`read_spec` names whatever is not supported instead of computing something else. Weights come through the safetensors
library, tensor by tensor, in the dtype in which they are stored.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - registers bfloat16 with numpy, which safetensors then returns
import numpy as np
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

import eps_core
from eps_core.config.store import DTYPE_BYTES
from eps_core.errors import ConfigError

DEMO_MODEL = Path(eps_core.__file__).parent / "demo_model"
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# each rope type with the numbers that it needs
ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
WEIGHT_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
_STORED_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class ModelSpec:
    """What the decoders need to know of a model; the same for every backend."""

    family: str  # a key of ARCHITECTURES
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None  # "rope_type" and the numbers that ROPE_TYPES lists; None: plain RoPE
    max_context: int  # tokens
    tie_embeddings: bool  # the output projection is the embedding
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool  # RMSNorm over head_dim on q and k, before RoPE
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]  # of config.json, then of generation_config.json
    stored_dtype: str  # a key of config.DTYPE_BYTES


def read_spec(path: str | Path) -> ModelSpec:
    """The model of a Hugging Face directory, from its config.json of transformers 4 or 5. Raises `ConfigError`, which
    names the field, for whatever this project does not compute."""
    path = Path(path)
    if not path.is_dir():
        raise ConfigError(f"model {str(path)!r} is no directory: give the folder with config.json and weights")
    file = path / "config.json"
    config = _read_json(file)
    fields = _Fields(config, file)

    family = config.get("model_type")
    if not isinstance(family, str) or family not in ARCHITECTURES:
        raise fields.unsupported("model_type", f"one of {', '.join(ARCHITECTURES)}")
    architectures = config.get("architectures")
    if architectures and ARCHITECTURES[family] not in architectures:
        raise fields.unsupported("architectures", ARCHITECTURES[family])
    for key in ("quantization_config", "quantization"):
        if config.get(key) is not None:
            raise fields.unsupported(key, "none: give the unquantised float32, float16 or bfloat16 weights")
    if config.get("hidden_act", "silu") != "silu":
        raise fields.unsupported("hidden_act", "silu")
    _refuse_sliding_window(family, fields)

    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", num_heads if family == "llama" else None)
    if num_heads % num_kv_heads:
        raise fields.unsupported("num_key_value_heads", f"a divisor of num_attention_heads {num_heads}")
    hidden_size = fields.integer("hidden_size")
    # transformers gives a Qwen3 without head_dim 128, whatever its other sizes
    head_dim = fields.integer("head_dim", 128 if family == "qwen3" else max(hidden_size // num_heads, 1))
    if head_dim % 2:
        raise ConfigError(f"head_dim {head_dim} of {file} is odd: rotary embeddings need an even number")
    rope_theta, rope_scaling = _read_rope(fields)
    attention_bias = fields.boolean("attention_bias") if family in ("llama", "qwen3") else False
    return ModelSpec(
        family=family,
        num_layers=fields.integer("num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=fields.integer("vocab_size"),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        max_context=fields.integer("max_position_embeddings"),
        tie_embeddings=fields.boolean("tie_word_embeddings"),
        qkv_bias=family == "qwen2" or attention_bias,
        o_bias=attention_bias,
        mlp_bias=family == "llama" and fields.boolean("mlp_bias"),
        qk_norm=family == "qwen3",
        bos_token_id=next(iter(fields.token_ids("bos_token_id")), None),
        eos_token_ids=_eos_token_ids(path, fields),
        stored_dtype=_stored_dtype(fields),
    )


@dataclass(frozen=True)
class _Fields:
    """A JSON object whose fields are checked as they are read, and the file that errors name."""

    values: dict[str, Any]
    file: Path

    def unsupported(self, key: str, supported: str) -> ConfigError:
        value = self.values.get(key)
        shown = f"of {len(value)} entries" if isinstance(value, dict) else repr(value)
        return ConfigError(f"{key} {shown} of {self.file} is unsupported: EPS reads {supported}")

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise ConfigError(f"{self.file} lacks {key!r}: give a complete Hugging Face config.json")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{key} {value!r} of {self.file} must be an integer of at least 1")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise ConfigError(f"{key} {value!r} of {self.file} must be a positive number")
        return float(value)

    def boolean(self, key: str) -> bool:
        value = self._get(key, False)
        if not isinstance(value, bool):
            raise ConfigError(f"{key} {value!r} of {self.file} must be true or false")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        value = self.values.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(token, bool) or not isinstance(token, int) or token < 0 for token in ids):
            raise ConfigError(f"{key} {value!r} of {self.file} must be a token id or a list of them")
        return tuple(ids)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"{file} is missing: give the folder of a complete Hugging Face model") from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({error.strerror}): check its permissions") from error
    except (ValueError, RecursionError) as error:  # JSONDecodeError, UnicodeDecodeError
        raise ConfigError(f"{file} is not JSON ({_one_line(error)}): download it again") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file} holds a {type(values).__name__}, not a JSON object: download it again")
    return values


def _refuse_sliding_window(family: str, fields: _Fields) -> None:
    config = fields.values
    # a Mistral config.json without the key means a window of 4096, as transformers reads it
    if family == "mistral" and config.get("sliding_window", 4096) is not None:
        window = config.get("sliding_window", "4096 (the default where the key is missing)")
        raise ConfigError(
            f"sliding_window {window} of {fields.file} is unsupported: EPS reads full attention, sliding_window null"
        )
    if family in ("qwen2", "qwen3") and config.get("use_sliding_window"):
        raise fields.unsupported("use_sliding_window", "full attention, use_sliding_window false")
    if any(kind != "full_attention" for kind in config.get("layer_types") or ()):
        raise fields.unsupported("layer_types", "full_attention in every layer")


def _read_rope(fields: _Fields) -> tuple[float, dict[str, Any] | None]:
    """(rope_theta, rope_scaling): `rope_parameters` of transformers 5, or rope_theta and rope_scaling beside it."""
    config = fields.values
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise ConfigError(f"rope_parameters {rope!r} of {fields.file} is unsupported: EPS reads one flat set of them")
    within = _Fields({key: config.get(key) for key in ("rope_theta", "partial_rotary_factor")} | rope, fields.file)
    if within.values["partial_rotary_factor"] not in (None, 1):
        raise within.unsupported("partial_rotary_factor", "1, the whole head rotated")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in ROPE_TYPES:
        raise ConfigError(f"rope type {kind!r} of {fields.file} is unsupported: EPS reads {', '.join(ROPE_TYPES)}")
    rope_theta = within.number("rope_theta", 10_000.0)
    if kind == "default":
        return rope_theta, None
    scaling: dict[str, Any] = {"rope_type": kind, **{key: within.number(key) for key in ROPE_TYPES[kind]}}
    if kind == "llama3" and scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
        raise ConfigError(
            f"low_freq_factor {scaling['low_freq_factor']} of {fields.file} must be below "
            f"high_freq_factor {scaling['high_freq_factor']}"
        )
    return rope_theta, scaling


def _eos_token_ids(path: Path, fields: _Fields) -> tuple[int, ...]:
    ids = fields.token_ids("eos_token_id")
    file = path / "generation_config.json"
    if file.exists():
        ids += _Fields(_read_json(file), file).token_ids("eos_token_id")
    return tuple(dict.fromkeys(ids))


def _stored_dtype(fields: _Fields) -> str:
    key = "dtype" if fields.values.get("dtype") is not None else "torch_dtype"
    value = fields.values.get(key)
    value = "float32" if value is None else value
    if not isinstance(value, str) or value not in DTYPE_BYTES:
        raise fields.unsupported(key, ", ".join(DTYPE_BYTES))
    return value


def inverse_frequencies(spec: ModelSpec) -> np.ndarray:
    """Radians per position of each rotated pair: [D/2] float64. Dimension i rotates with dimension i + D/2.

    `llama3` (Llama 3.1): wavelengths of more than original / low_freq_factor tokens are stretched by `factor`, those
    below original / high_freq_factor are kept, and between them the two are blended linearly.
    """
    frequencies = spec.rope_theta ** -(np.arange(0, spec.head_dim, 2, dtype=np.float64) / spec.head_dim)
    scaling = spec.rope_scaling
    if scaling is None:
        return frequencies
    if scaling["rope_type"] == "linear":
        return frequencies / scaling["factor"]
    assert scaling["rope_type"] == "llama3", scaling
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    kept = (turns - scaling["low_freq_factor"]) / (scaling["high_freq_factor"] - scaling["low_freq_factor"])
    kept = np.clip(kept, 0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / scaling["factor"])


def weight_names(spec: ModelSpec) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Our short name of every weight -> (Hugging Face name, shape); matrices are [out, in].

    "embed", "norm", "lm_head" (absent where tied) and, for each layer i, "layers.i." with input_norm, q, k, v, o,
    post_norm, gate, up, down, where the model has them their biases "q_bias" .., and q_norm, k_norm.
    """
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q_width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    names: dict[str, tuple[str, tuple[int, ...]]] = {
        "embed": ("model.embed_tokens.weight", (spec.vocab_size, hidden)),
        "norm": ("model.norm.weight", (hidden,)),
    }
    if not spec.tie_embeddings:
        names["lm_head"] = ("lm_head.weight", (spec.vocab_size, hidden))
    # short name: module, out, in, whether it has a bias
    linear = {
        "q": ("self_attn.q_proj", q_width, hidden, spec.qkv_bias),
        "k": ("self_attn.k_proj", kv_width, hidden, spec.qkv_bias),
        "v": ("self_attn.v_proj", kv_width, hidden, spec.qkv_bias),
        "o": ("self_attn.o_proj", hidden, q_width, spec.o_bias),
        "gate": ("mlp.gate_proj", inner, hidden, spec.mlp_bias),
        "up": ("mlp.up_proj", inner, hidden, spec.mlp_bias),
        "down": ("mlp.down_proj", hidden, inner, spec.mlp_bias),
    }
    norms = {"input_norm": ("input_layernorm", hidden), "post_norm": ("post_attention_layernorm", hidden)}
    if spec.qk_norm:
        norms["q_norm"] = ("self_attn.q_norm", spec.head_dim)
        norms["k_norm"] = ("self_attn.k_norm", spec.head_dim)
    for i in range(spec.num_layers):
        for short, (module, width) in norms.items():
            names[f"layers.{i}.{short}"] = (f"model.layers.{i}.{module}.weight", (width,))
        for short, (module, rows, columns, bias) in linear.items():
            names[f"layers.{i}.{short}"] = (f"model.layers.{i}.{module}.weight", (rows, columns))
            if bias:
                names[f"layers.{i}.{short}_bias"] = (f"model.layers.{i}.{module}.bias", (rows,))
    return names


def load_weights(path: str | Path, spec: ModelSpec) -> dict[str, np.ndarray]:
    """Short name of `weight_names` -> array in its stored dtype (float32, float16, or ml_dtypes' bfloat16)."""
    path = Path(path)
    located = _locate_weights(path)
    names = weight_names(spec)
    known = {name for name, _ in names.values()} | {"lm_head.weight"}
    for name in located:
        # a bias or a layer that config.json does not speak of would change the result if it were left out
        if name not in known and not name.endswith("rotary_emb.inv_freq"):
            raise ConfigError(
                f"weight {name} in {located[name]} has no place in this {spec.family} of {spec.num_layers} layers: "
                "config.json and weights do not match"
            )
    by_file: dict[Path, list[str]] = {}
    for short, (name, _) in names.items():
        if name not in located:
            raise ConfigError(
                f"weight {name} is missing in {path}: config.json does not match, or the download is incomplete"
            )
        by_file.setdefault(located[name], []).append(short)
    weights = {}
    for file, shorts in by_file.items():
        for short, array in _reading(file, partial(_read_tensors, names=names, shorts=shorts)):
            weights[short] = array
    return {short: weights[short] for short in names}


def _locate_weights(path: Path) -> dict[str, Path]:
    """Hugging Face name of every stored tensor -> its file."""
    if (path / WEIGHT_FILE).exists():
        return dict.fromkeys(_reading(path / WEIGHT_FILE, lambda opened: list(opened.keys())), path / WEIGHT_FILE)
    index = path / INDEX_FILE
    if not index.exists():
        if any(path.glob("pytorch_model*.bin")):
            raise ConfigError(f"{path} holds weights only as pytorch_model.bin: convert them to safetensors")
        raise ConfigError(f"{path} holds no weights: neither {WEIGHT_FILE} nor {INDEX_FILE} is there")
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise ConfigError(f"{index} lacks a 'weight_map' of tensor names to files: download it again")
    for shard in sorted(set(weight_map.values())):
        if not (path / shard).is_file():
            raise ConfigError(f"shard {shard} that {index} names is missing: download it again")
    return {name: path / shard for name, shard in weight_map.items()}


def _reading(file: Path, read: Callable[[Any], Any]) -> Any:
    """read(opened safetensors file), with the library's errors as one line that names the file."""
    try:
        with safe_open(file, framework="numpy") as opened:
            return read(opened)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file} is truncated or corrupt ({_one_line(error)}): download it again") from error


def _read_tensors(
    opened: Any, names: dict[str, tuple[str, tuple[int, ...]]], shorts: list[str]
) -> list[tuple[str, np.ndarray]]:
    stored, tensors = set(opened.keys()), []
    for short in shorts:
        name, expected = names[short]
        if name not in stored:
            raise ConfigError(f"weight {name} is missing in the shard that the index names for it: download it again")
        header = opened.get_slice(name)
        found, dtype = tuple(header.get_shape()), header.get_dtype()
        if found != expected:
            raise ConfigError(
                f"weight {name} has shape {found} where {expected} is expected: config.json and weights do not match"
            )
        if dtype not in _STORED_DTYPES:
            raise ConfigError(
                f"weight {name} has dtype {dtype}: EPS reads {', '.join(_STORED_DTYPES)}; convert the weights"
            )
        tensors.append((short, opened.get_tensor(name)))
    return tensors


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a Hugging Face directory, from its tokenizer.json."""
    file = Path(path) / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(f"{file} is missing: save the model's fast tokenizer there")
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(
            f"{file} is no tokenizer of the tokenizers library ({_one_line(error)}): download it again"
        ) from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
