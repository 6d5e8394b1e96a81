"""Keys of a model's config.json that mlx-lm does not read: sought in the model that it made, and refused or warned of.

mlx-lm takes the keys that its model class names and drops all others. A folder saved by transformers 5 has the base and
the scaling of its rotary embeddings in `rope_parameters`, which several of its classes, Llama and Qwen2 among them, do
not know: the model then turns its keys by a default base.
"""

import json
import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache

from eps_core.errors import ConfigError
from eps_core.integrations.plan import ranges
from eps_core.models.fields import Fields
from eps_core.models.rope import attention_factor, inverse_frequencies, rope_of_layer
from eps_core.models.spec import Rope

logger = logging.getLogger("eps")
POSITIONS = (1, 64, 1000)
TOLERANCE = 0.02  # of a cosine or sine; float32 angles lose a thousandth at these positions
_ROPE = re.compile(r"\blayers\.(\d+)\.(?:.*\.)?(?:rope|rotary_emb)$")


def check_read(model: Any, config: dict[str, Any], path: str | Path, stock: Sequence[Any]) -> None:
    """Raises ConfigError where a model of mlx-lm computes otherwise than its config.json says; `stock` are its own
    empty caches. Layers that attend everything where config.json says a sliding window are logged: up to the window
    both are the same."""
    fields = Fields(config, Path(path) / "config.json").text
    _check_rope(model, fields, path)
    _check_head(model, config, path)
    windows = _windows(fields.values, len(stock))
    dropped = [layer for layer, one in enumerate(stock) if windows.get(layer) and type(one) is KVCache]
    if dropped:
        logger.warning(
            "eps: mlx-lm drops the sliding window of %s tokens (layers %s) of %s and attends everything: other text "
            "than its model's past it", windows[dropped[0]], ranges(dropped), path,
        )  # fmt: skip


def _check_rope(model: Any, fields: Fields, path: str | Path) -> None:
    for layer, module in ropes(model):
        rope = rope_of_layer(fields, layer)
        if rope is None:  # of a kind that is not known here
            continue
        end = fields.values.get("max_position_embeddings")
        positions = [p for p in POSITIONS if not isinstance(end, int) or p < end]
        got = np.array([_turned(module, rope.head_dim, position) for position in positions])
        want = np.array([_expected(rope, position, interleaved(module)) for position in positions])
        if got.shape == want.shape and (np.abs(got - want) <= TOLERANCE).all():
            continue
        wanted: dict[str, Any] = {"rope_theta": rope.rope_theta}
        if rope.rope_scaling is not None:
            wanted["rope_scaling"] = rope.given
        missing = {key: value for key, value in wanted.items() if fields.values.get(key) != value}
        fix = f"add {json.dumps(missing)[1:-1]} to its config.json" if missing else "use --engine transformers"
        kind = "" if rope.rope_scaling is None else f" with {rope.rope_scaling['rope_type']} scaling"
        kind += "" if rope.rotated == rope.head_dim else f" over {rope.rotated} of {rope.head_dim} dimensions"
        raise ConfigError(
            f"mlx-lm does not turn keys as config.json says: layer {layer} of {path} has rotary embeddings of "
            f"{_base(module, rope)} and should have base {rope.rope_theta:,.0f}{kind} (its class may read rope_theta "
            f"and rope_scaling but not rope_parameters): {fix}"
        )


def ropes(model: Any) -> Iterator[tuple[int, Any]]:
    """The rotary embeddings of each layer of a model."""
    found_by_layer: dict[int, Any] = {}
    for name, module in model.named_modules():
        found = _ROPE.search(name)
        if found and callable(module):
            found_by_layer[int(found[1])] = module
    yield from sorted(found_by_layer.items())


def interleaved(module: Any) -> bool:
    """Return whether dimension 2i turns with 2i + 1, and not with i + D/2."""
    return bool(getattr(module, "traditional", False))


def _turned(module: Any, head_dim: int, position: int) -> np.ndarray:
    """Return a head of ones [D] as rotary embeddings turn it at a position."""
    made = module(mx.ones((1, 1, 1, head_dim), mx.float32), offset=position)
    return np.array(made.astype(mx.float32)).reshape(-1)


def _expected(rope: Rope, position: int, interleaved: bool) -> np.ndarray:
    """The same by config.json."""
    angles = position * inverse_frequencies(rope)
    turned = attention_factor(rope) * np.stack([np.cos(angles) - np.sin(angles), np.cos(angles) + np.sin(angles)])
    flat = turned.T.reshape(-1) if interleaved else turned.reshape(-1)
    return np.concatenate([flat, np.ones(rope.head_dim - len(flat))])


def _base(module: Any, rope: Rope) -> str:
    """The base that rotary embeddings turn by, from the angle of their second pair at position 1; scaling counts in
    it."""
    made = _turned(module, rope.head_dim, 1)
    first, second = (2, 3) if interleaved(module) else (1, 1 + rope.rotated // 2)
    angle = float(np.arctan2(made[second] - made[first], made[second] + made[first]))
    base = angle ** (-rope.rotated / 2) if angle > 0 else float("inf")
    return f"base {base:,.0f}" if 1 < base < 1e12 else "another kind"


def _check_head(model: Any, config: dict[str, Any], path: str | Path) -> None:
    """Raises ConfigError where a stored output head is dropped that config.json does not tie to the embeddings: many
    classes of mlx-lm tie them where the key is missing, and transformers does not."""
    named: Any = tree_flatten(model.parameters())
    tied = config.get("tie_word_embeddings", False)
    if tied or any("lm_head" in name for name, _ in named):
        return
    stored = set()
    for file in sorted(Path(path).glob("model*.safetensors")):
        with open(file, "rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            stored |= set(json.loads(opened.read(size)))
    if "lm_head.weight" in stored:
        raise ConfigError(
            f"mlx-lm drops the output head of {path} and uses the embeddings, as config.json does not say "
            'tie_word_embeddings: add "tie_word_embeddings": false to its config.json'
        )


def _windows(config: dict[str, Any], num_layers: int) -> dict[int, int]:
    """Layer -> tokens of its sliding window, as transformers reads a config."""
    window = config.get("sliding_window")
    if not isinstance(window, int):
        return {}
    kinds, family = config.get("layer_types"), config.get("model_type")
    if isinstance(kinds, list):
        sliding = [layer for layer, kind in enumerate(kinds) if kind == "sliding_attention"]
    elif family == "mistral":
        sliding = list(range(num_layers))
    elif family in ("qwen2", "qwen3") and config.get("use_sliding_window"):
        sliding = list(range(config.get("max_window_layers", 28), num_layers))
    else:
        sliding = []
    return dict.fromkeys(sliding, window)
