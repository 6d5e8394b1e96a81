"""A model family: what its config.json says, and how its weights are named, beyond what every family shares."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from eps_core.models.fields import Fields
from eps_core.models.rope import read_rope
from eps_core.models.spec import ModelSpec

FULL, SLIDING = "full_attention", "sliding_attention"
DEFAULT_WINDOW = 4096  # tokens, where config.json has no sliding_window, as in transformers


@dataclass(frozen=True)
class Family:
    """One `model_type` of config.json. All but the first three default to Llama's."""

    model_type: str
    architecture: str  # of `architectures` in config.json
    # (config, what every family shares) -> the further fields of `ModelSpec`; refuses what is unsupported
    read: Callable[[Fields, ModelSpec], dict[str, Any]]
    defaults: Mapping[str, Any] = field(
        default_factory=dict
    )  # of keys that config.json lacks, as transformers has them
    multi_head: bool = False  # without num_key_value_heads there are as many as query heads
    activation: str = "silu"
    activation_key: str = "hidden_act"
    # (config, max_position_embeddings) -> (rope_theta, rope_scaling, tokens of context)
    rope: Callable[[Fields, int], tuple[float, dict[str, Any] | None, int]] = read_rope
    # our short name of each norm over hidden_size -> module of a layer
    norms: Mapping[str, str] = field(
        default_factory=lambda: {"input_norm": "input_layernorm", "post_norm": "post_attention_layernorm"}
    )
    norm_offset: float = 0.0  # added to the stored weights of every norm
    stacked: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # module -> the linear layers in it, in order


def windows(fields: Fields, spec: ModelSpec, kinds: Sequence[str]) -> tuple[int | None, ...]:
    """`ModelSpec.windows` of layers of these kinds. Raises ConfigError for another kind or number."""
    if len(kinds) != spec.num_layers or not set(kinds) <= {FULL, SLIDING}:
        raise fields.unsupported("layer_types", f"{FULL} or {SLIDING} for each of {spec.num_layers} layers")
    if SLIDING not in kinds:
        return ()
    window = fields.integer("sliding_window", DEFAULT_WINDOW)
    return tuple(window if kind == SLIDING else None for kind in kinds)


def windows_that_cut(fields: Fields, spec: ModelSpec, kinds: Sequence[str]) -> tuple[int | None, ...]:
    """As `windows`, but () where the window is as long as the context: full attention, which EPS can read sparsely."""
    found = windows(fields, spec, kinds)
    return found if any(size is not None and size < spec.max_context for size in found) else ()


def check_full(fields: Fields) -> None:
    """Raises ConfigError where config.json names a layer that does not have full attention."""
    if any(kind != FULL for kind in fields.list_of_text("layer_types")):
        raise fields.unsupported("layer_types", f"{FULL} in every layer")
