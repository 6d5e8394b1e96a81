"""The weights of a Hugging Face model directory, under short names: where they lie and that they are the right ones.

They come through the safetensors library, tensor by tensor, in the dtype in which they are stored.
"""

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - registers bfloat16 with numpy, which safetensors then returns
import numpy as np
from safetensors import SafetensorError, safe_open

from eps_core.errors import ConfigError, one_line, shown
from eps_core.models.folder import INDEX_FILE, WEIGHT_FILE, check_weights_there, weight_map
from eps_core.models.spec import ModelSpec

_STORED_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_HEAD = "lm_head.weight"


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
        names["lm_head"] = (_HEAD, (spec.vocab_size, hidden))
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
    """Short name of `weight_names` -> array in its stored dtype (float32, float16, or ml_dtypes' bfloat16).

    Where config.json ties the embeddings and an output projection is stored that is not the embedding, the weights hold
    it as "lm_head", with one line on stderr: transformers 5 reads such a folder so, mlx-lm and transformers 4 drop it.
    """
    path = Path(path)
    names, by_file = _plan(path, spec)
    weights = {}
    for file, shorts in by_file.items():
        for short, array in _reading(file, partial(_read_tensors, names=names, shorts=shorts)):
            weights[short] = array
    if spec.tie_embeddings and "lm_head" in weights:
        if _same_bytes(weights["lm_head"], weights["embed"]):
            del names["lm_head"]
        else:
            print(
                f"{path} stores a {_HEAD} of its own beside tie_word_embeddings true: it is used, as in transformers 5",
                file=sys.stderr,
            )
    return {short: weights[short] for short in names}


def check_weights(path: Path, spec: ModelSpec) -> None:
    """Raises the ConfigError that `load_weights` would, from the files' headers, in milliseconds."""
    names, by_file = _plan(path, spec)
    for file, shorts in by_file.items():
        _reading(file, partial(_check_tensors, names=names, shorts=shorts))


def _plan(path: Path, spec: ModelSpec) -> tuple[dict[str, tuple[str, tuple[int, ...]]], dict[Path, list[str]]]:
    """(`weight_names` with a stored output projection, the short names that each file holds)."""
    located = _locate_weights(path)
    names = weight_names(spec)
    if spec.tie_embeddings and _HEAD in located:
        names["lm_head"] = (_HEAD, names["embed"][1])
    known = {name for name, _ in names.values()}
    for name in located:
        # a bias or a layer that config.json does not speak of would change the result if it were left out
        if name not in known and not name.endswith("rotary_emb.inv_freq"):
            raise ConfigError(
                f"weight {shown(name)} in {located[name]} has no place in this {spec.family} of {spec.num_layers} "
                "layers: config.json and weights do not match"
            )
    by_file: dict[Path, list[str]] = {}
    for short, (name, _) in names.items():
        if name not in located:
            raise ConfigError(
                f"weight {name} is missing in {path}: config.json does not match, or the download is incomplete"
            )
        by_file.setdefault(located[name], []).append(short)
    return names, by_file


def _same_bytes(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and np.array_equal(a.view(np.uint8), b.view(np.uint8))


def _locate_weights(path: Path) -> dict[str, Path]:
    """Hugging Face name of every stored tensor -> its file."""
    check_weights_there(path)
    file = path / WEIGHT_FILE
    if os.path.lexists(file):
        return dict.fromkeys(_reading(file, lambda opened: list(opened.keys())), file)
    return {name: path / shard for name, shard in weight_map(path / INDEX_FILE).items()}


def _reading(file: Path, read: Callable[[Any], Any]) -> Any:
    """read(opened safetensors file), with the library's errors as one line that names the file."""
    try:
        with open(file, "rb"):  # the library does not say why it cannot open a file
            pass
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({error.strerror}): check what it is and its permissions") from error
    try:
        with safe_open(file, framework="numpy") as opened:
            return read(opened)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file} is truncated or corrupt ({one_line(error)}): download it again") from error


def _read_tensors(
    opened: Any, names: dict[str, tuple[str, tuple[int, ...]]], shorts: list[str]
) -> list[tuple[str, np.ndarray]]:
    _check_tensors(opened, names, shorts)
    return [(short, opened.get_tensor(names[short][0])) for short in shorts]


def _check_tensors(opened: Any, names: dict[str, tuple[str, tuple[int, ...]]], shorts: list[str]) -> None:
    stored = set(opened.keys())
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
