"""Rotary position embeddings: what config.json may say of them, and the rotation that every backend applies."""

import math
from typing import Any

import numpy as np

from eps_core.errors import ConfigError, shown
from eps_core.models.fields import Fields
from eps_core.models.spec import ModelSpec, Rope

# each rope type with the numbers that it must have
ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
    "longrope": (),
}
_WITH_ORIGINAL = ("llama3", "yarn", "longrope")  # scaled from a context that they name
MOST_POSITIONS = 2**31
# keys by which some layers turn otherwise, or another part of a head does
_BY_LAYER = (
    "rope_local_base_freq", "local_rope_theta", "no_rope_layers", "no_rope_layer_interval", "qk_rope_head_dim",
    "rotary_dim", "rotary_pct",
)  # fmt: skip


def rope_of_layer(fields: Fields, layer: int) -> Rope | None:
    """Return the rotary settings of a layer in config.json: in `rope_parameters`, which may have a set for each kind of
    layer, or in rope_theta and rope_scaling; None where it names no base, or a kind that is not read here."""
    config = fields.values
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kinds = config.get("layer_types")
    if isinstance(given, dict) and any(isinstance(value, dict) for value in given.values()):
        given = given.get(kinds[layer]) if isinstance(kinds, list) and layer < len(kinds) else None
    if not isinstance(given, dict) or any(config.get(key) is not None for key in _BY_LAYER):
        return None
    within = config | given
    if within.get("rope_theta") is None:
        return None
    share = within.get("partial_rotary_factor")
    flat = {name: value for name, value in within.items() if name not in ("rope_parameters", "partial_rotary_factor")}
    plain = {name: value for name, value in given.items() if name not in ("rope_theta", "partial_rotary_factor")}
    flat["rope_scaling"] = plain
    try:
        read = Fields(flat, fields.file)
        theta, scaling, _ = read_rope(read, read.integer("max_position_embeddings", 2**20, MOST_POSITIONS))
        heads = read.integer("num_attention_heads", most=2**16)
        head_dim = read.integer("head_dim", max(read.integer("hidden_size") // heads, 1), 2**16)
    except ConfigError:
        return None
    rotated = head_dim if share is None else int(head_dim * share)
    return Rope(theta, scaling, head_dim, rotated, plain)


def read_rope(fields: Fields, max_positions: int) -> tuple[float, dict[str, Any] | None, int]:
    """(rope_theta, rope_scaling, tokens of context): `rope_parameters` of transformers 5, or rope_theta and
    rope_scaling beside it. The numbers of `yarn` are all there, its attention_factor settled."""
    config = fields.values
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise ConfigError(f"rope_parameters {shown(rope)} of {fields.file} is unsupported: EPS reads one flat set")
    within = Fields({key: config.get(key) for key in ("rope_theta", "partial_rotary_factor")} | rope, fields.file)
    if within.values["partial_rotary_factor"] not in (None, 1):
        raise within.unsupported("partial_rotary_factor", "1, the whole head rotated")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in ROPE_TYPES:
        raise ConfigError(f"rope type {shown(kind)} of {fields.file} is unsupported: EPS reads {', '.join(ROPE_TYPES)}")
    rope_theta = within.number("rope_theta", 10_000.0)
    if kind == "default":
        return rope_theta, None, max_positions
    scaling: dict[str, Any] = {"rope_type": kind, **{key: within.number(key) for key in ROPE_TYPES[kind]}}
    if kind in _WITH_ORIGINAL:
        # beside the set it comes first, and absent it is the whole context, as transformers has it
        outer = fields if config.get("original_max_position_embeddings") is not None else within
        original = outer.number("original_max_position_embeddings", max_positions)
        scaling["original_max_position_embeddings"] = original
    if kind == "llama3" and scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
        raise ConfigError(
            f"low_freq_factor {scaling['low_freq_factor']} of {fields.file} must be below "
            f"high_freq_factor {scaling['high_freq_factor']}"
        )
    if kind == "yarn":
        scaling |= _yarn_numbers(within, original, max_positions)
        # long Qwen models name the context that they were trained at, and by how much YaRN stretches it
        if outer.values.get("original_max_position_embeddings") is not None:
            max_positions = max(max_positions, math.floor(min(original * scaling["factor"], MOST_POSITIONS)))
    if kind == "longrope":
        scaling |= _longrope_numbers(within, original, max_positions)
    return rope_theta, scaling, max_positions


def _longrope_numbers(within: Fields, original: float, max_positions: int) -> dict[str, Any]:
    """Return the numbers of LongRoPE (arXiv 2402.13753): by what each pair's wavelength is stretched, and the factor of
    cosine and sine. There are `factors` for texts of up to the original context and others beyond it; a cached key
    keeps its rotation, so a model with a longer context takes the latter at every length."""
    long = max_positions > original
    factor = within.number("factor", max_positions / original)
    usual = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(max(original, 2)))
    lists = {key: within.numbers(key) for key in ("short_factor", "long_factor")}
    if len(lists["short_factor"]) != len(lists["long_factor"]):
        raise ConfigError(f"short_factor and long_factor of {within.file} must have the same length")
    return {
        "factors": lists["long_factor" if long else "short_factor"],
        "switches_at": original if long and lists["long_factor"] != lists["short_factor"] else None,
        "attention_factor": within.number("attention_factor", usual),
    }


def _yarn_numbers(within: Fields, original: float, max_positions: int) -> dict[str, Any]:
    """Return all that YaRN computes with, and transformers' defaults for what is absent."""
    # null, unlike a missing key, means the ratio of the contexts
    ratio = max_positions / original if "factor" in within.values else None
    factor = within.number("factor", ratio)

    def stretched(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    mscale, mscale_all_dim = within.number_or_none("mscale"), within.number_or_none("mscale_all_dim")
    if within.values.get("attention_factor") is not None:
        attention_factor = within.number("attention_factor")
    elif mscale and mscale_all_dim:
        attention_factor = stretched(mscale) / stretched(mscale_all_dim)
    else:
        attention_factor = stretched(1.0)
    return {
        "factor": factor,
        "attention_factor": attention_factor,
        "beta_fast": within.number_or_none("beta_fast") or 32.0,
        "beta_slow": within.number_or_none("beta_slow") or 1.0,
        "truncate": within.boolean("truncate") if "truncate" in within.values else True,
    }


def check_rope(spec: ModelSpec, fields: Fields) -> None:
    """Raises ConfigError where numbers that are fine one by one make no finite rotation."""
    for rope in spec.ropes:
        if len((rope.rope_scaling or {}).get("factors", ())) not in (0, rope.head_dim // 2):
            raise ConfigError(
                f"short_factor and long_factor of {fields.file} need a number for each of {rope.head_dim // 2} pairs"
            )
        numbers = np.append(inverse_frequencies(rope), attention_factor(rope))
        if not (np.isfinite(numbers) & (numbers >= 0)).all() or not attention_factor(rope):
            values = shown({"rope_theta": rope.rope_theta} | (rope.rope_scaling or {}))
            raise ConfigError(f"the rotary embeddings of {fields.file} overflow ({values}): fix its rope_parameters")


@np.errstate(all="ignore")  # what overflows is refused by `check_rope`
def inverse_frequencies(spec: ModelSpec | Rope) -> np.ndarray:
    """Radians per position of each rotated pair: [D/2] float64. Dimension i rotates with dimension i + D/2.

    `llama3` (Llama 3.1): wavelengths of more than original / low_freq_factor tokens are stretched by `factor`, those
    below original / high_freq_factor are kept, and between them the two are blended linearly. `yarn`: pairs that turn
    more than beta_fast times within the original context are kept, those that turn less than beta_slow times are
    stretched, and between them the two are blended linearly by dimension. `dynamic` stretches beyond the model's
    context alone, where it would turn every key again: EPS ends there, and within it the rotation is the plain one.
    `longrope`: each pair is stretched by a number of its own.
    """
    rotated = spec.rotated if isinstance(spec, Rope) else spec.head_dim
    frequencies = spec.rope_theta ** -(np.arange(0, rotated, 2, dtype=np.float64) / rotated)
    scaling = spec.rope_scaling
    if scaling is None or scaling["rope_type"] == "dynamic":
        return frequencies
    if scaling["rope_type"] == "longrope":
        return frequencies / np.array(scaling["factors"])
    stretched = frequencies / scaling["factor"]
    if scaling["rope_type"] == "linear":
        return stretched
    if scaling["rope_type"] == "llama3":
        turns = scaling["original_max_position_embeddings"] * frequencies / (2 * np.pi)
        kept = (turns - scaling["low_freq_factor"]) / (scaling["high_freq_factor"] - scaling["low_freq_factor"])
    else:
        assert scaling["rope_type"] == "yarn", scaling
        low, high = _yarn_dimensions(spec.rope_theta, rotated, scaling)
        kept = 1.0 - (np.arange(rotated // 2) - low) / (high - low)
    kept = np.clip(kept, 0.0, 1.0)
    return frequencies * kept + stretched * (1.0 - kept)


def _yarn_dimensions(theta: float, rotated: int, scaling: dict[str, Any]) -> tuple[float, float]:
    """Between which pairs YaRN blends, as its reference rounds them."""
    turns = np.array([scaling["beta_fast"], scaling["beta_slow"]])
    lengths = scaling["original_max_position_embeddings"] / (turns * 2 * np.pi)
    low, high = rotated * np.log(lengths) / (2 * np.log(np.float64(theta)))
    if scaling["truncate"]:
        low, high = np.floor(low), np.ceil(high)
    low, high = max(low, 0), min(high, rotated - 1)
    return low, high + 0.001 if low == high else high


def attention_factor(spec: ModelSpec | Rope) -> float:
    """Return the factor of cosine and sine, for queries and for keys: of YaRN and LongRoPE, else 1."""
    return 1.0 if spec.rope_scaling is None else spec.rope_scaling.get("attention_factor", 1.0)


def cos_sin(frequencies: np.ndarray, positions: np.ndarray, factor: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """`factor` times cos and sin [N, 1, D/2] float32 of turning pairs of `inverse_frequencies` [D/2] by positions [N],
    from float64: float32 angles lose a thousandth of a radian at 16k tokens."""
    angles = positions[:, None, None] * frequencies
    return (factor * np.cos(angles)).astype(np.float32), (factor * np.sin(angles)).astype(np.float32)
