"""The weights of a Hugging Face model directory, under short names: where they lie and that they are the right ones.

They come through the safetensors library, tensor by tensor, in the dtype in which they are stored.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - registers bfloat16 with numpy, which safetensors then returns
import numpy as np
from safetensors import SafetensorError, safe_open

from eps_core.errors import ConfigError, one_line, shown
from eps_core.models.folder import INDEX_FILE, WEIGHT_FILE, check_weights_there, weight_map
from eps_core.models.registry import FAMILIES
from eps_core.models.spec import ModelSpec

_STORED_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_HEAD = "lm_head.weight"


@dataclass(frozen=True)
class Stored:
    """Where one of our arrays lies: it is `scale` * (`offset` + rows `first` to `first` + shape[0] of a tensor)."""

    name: str  # of the Hugging Face tensor
    shape: tuple[int, ...]  # of our array; matrices are [out, in]
    first: int = 0
    rows: int | None = None  # of the tensor in all; None: shape[0]
    offset: float = 0.0
    scale: float = 1.0

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return self.shape if self.rows is None else (self.rows, *self.shape[1:])

    def read(self, opened: Any) -> np.ndarray:
        """The array, from an open safetensors file: as stored, but float32 where it is not the stored numbers."""
        array: np.ndarray = (
            opened.get_tensor(self.name)
            if self.rows is None
            else opened.get_slice(self.name)[self.first : self.first + self.shape[0]]
        )
        if (self.offset, self.scale) == (0.0, 1.0):
            return array
        return np.float32(self.scale) * (np.float32(self.offset) + array.astype(np.float32))


def weight_names(spec: ModelSpec) -> dict[str, Stored]:
    """Return where each weight lies, by our short name.

    "embed", "norm", "lm_head" (absent where tied) and, for each layer i, "layers.i." with input_norm, q, k, v, o,
    post_norm, gate, up, down, where the model has them their biases "q_bias" .., q_norm and k_norm, and the norms of
    what the two blocks add, attention_norm and feed_forward_norm. Queries come with `ModelSpec.query_scale` in them: in
    q_norm where there is one.
    """
    family, hidden, inner = FAMILIES[spec.family], spec.hidden_size, spec.intermediate_size
    q_width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    names = {
        "embed": Stored("model.embed_tokens.weight", (spec.vocab_size, hidden)),
        "norm": Stored("model.norm.weight", (hidden,), offset=family.norm_offset),
    }
    if not spec.tie_embeddings:
        names["lm_head"] = Stored(_HEAD, (spec.vocab_size, hidden))
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
    stacked: dict[str, tuple[str, int, int]] = {}  # short name: module, its first row there, rows in all
    for module, parts in family.stacked.items():
        ends = np.cumsum([linear[part][1] for part in parts]).tolist()
        for part, end in zip(parts, ends, strict=True):
            stacked[part] = module, end - linear[part][1], ends[-1]
    norms = {short: (module, hidden) for short, module in family.norms.items()}
    if spec.qk_norm:
        norms |= {f"{one}_norm": (f"self_attn.{one}_norm", spec.head_dim) for one in "qk"}
    scales = {"q_norm" if spec.qk_norm else "q": spec.query_scale}
    for i in range(spec.num_layers):
        layer = f"model.layers.{i}"
        for short, (module, width) in norms.items():
            names[f"layers.{i}.{short}"] = Stored(
                f"{layer}.{module}.weight", (width,), offset=family.norm_offset, scale=scales.get(short, 1.0)
            )
        for short, (own, rows, columns, bias) in linear.items():
            module, first, all_rows = stacked.get(short, (own, 0, None))
            scale = scales.get(short, 1.0)
            names[f"layers.{i}.{short}"] = Stored(
                f"{layer}.{module}.weight", (rows, columns), first, all_rows, scale=scale
            )
            if bias:
                names[f"layers.{i}.{short}_bias"] = Stored(
                    f"{layer}.{module}.bias", (rows,), first, all_rows, scale=scale
                )
    return names


def load_weights(path: str | Path, spec: ModelSpec) -> dict[str, np.ndarray]:
    """Short name of `weight_names` -> array in its stored dtype (float32, float16, or ml_dtypes' bfloat16);
    float32 where it is not the stored numbers.

    Where config.json ties the embeddings and an output projection is stored that is not the embedding, the weights hold
    it as "lm_head", with one line on stderr: transformers 5 reads such a folder so, mlx-lm and transformers 4 drop it.
    """
    path = Path(path)
    names, by_file = _plan(path, spec)
    weights: dict[str, np.ndarray] = {}
    for file, shorts in by_file.items():
        with opened_weights(file) as opened:
            _check_tensors(opened, names, shorts)
            weights |= {short: names[short].read(opened) for short in shorts}
    if spec.tie_embeddings and "lm_head" in weights:
        head, embed = weights["lm_head"], weights["embed"]
        if head.dtype == embed.dtype and np.array_equal(head.view(np.uint8), embed.view(np.uint8)):
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
        with opened_weights(file) as opened:
            _check_tensors(opened, names, shorts)


def _plan(path: Path, spec: ModelSpec) -> tuple[dict[str, Stored], dict[Path, list[str]]]:
    """(`weight_names` with a stored output projection, the short names that each file holds)."""
    located = _locate_weights(path)
    names = weight_names(spec)
    if spec.tie_embeddings and _HEAD in located:
        names["lm_head"] = Stored(_HEAD, names["embed"].shape)
    known = {one.name for one in names.values()}
    for name in located:
        # a bias or a layer that config.json does not speak of would change the result if it were left out
        if name not in known and not name.endswith("rotary_emb.inv_freq"):
            raise ConfigError(
                f"weight {shown(name)} in {located[name]} has no place in this {spec.family} of {spec.num_layers} "
                "layers: config.json and weights do not match"
            )
    by_file: dict[Path, list[str]] = {}
    for short, one in names.items():
        if one.name not in located:
            raise ConfigError(
                f"weight {one.name} is missing in {path}: config.json does not match, or the download is incomplete"
            )
        by_file.setdefault(located[one.name], []).append(short)
    return names, by_file


def _locate_weights(path: Path) -> dict[str, Path]:
    """Hugging Face name of every stored tensor -> its file."""
    check_weights_there(path)
    file = path / WEIGHT_FILE
    if os.path.lexists(file):
        with opened_weights(file) as opened:
            return dict.fromkeys(opened.keys(), file)
    return {name: path / shard for name, shard in weight_map(path / INDEX_FILE).items()}


@contextmanager
def opened_weights(file: Path) -> Iterator[Any]:
    """The opened safetensors file, with the library's errors as one line that names the file."""
    try:
        with open(file, "rb"):  # the library does not say why it cannot open a file
            pass
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({error.strerror}): check what it is and its permissions") from error
    try:
        with safe_open(file, framework="numpy") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file} is truncated or corrupt ({one_line(error)}): download it again") from error


def _check_tensors(opened: Any, names: dict[str, Stored], shorts: list[str]) -> None:
    stored = set(opened.keys())
    for short in shorts:
        name, expected = names[short].name, names[short].stored_shape
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
