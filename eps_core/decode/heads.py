"""The head policy: what calibration found about one model, as a strict JSON file, and what it makes each head do.

Classes are of kv heads, because a kv head's K and V are read once for all of its query heads. `retrieval` and
`streaming` are DuoAttention's (Xiao et al. 2024, arXiv 2410.10819), found here without training (`calibrate`).
"""

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from eps_core.config.eps import EpsConfig
from eps_core.errors import ConfigError, require, shown
from eps_core.io import inputs
from eps_core.io.records import Share, read_record
from eps_core.io.schema import current_modes
from eps_core.models.config import read_spec
from eps_core.models.folder import weight_files
from eps_core.models.spec import ModelSpec

FORMAT_VERSION = 1
CLASSES = ("retrieval", "streaming")
_FINGERPRINT_BYTES = 2**20


@dataclass(frozen=True)
class HeadPolicy:
    """L layers, Hkv kv heads, C points of a curve. Fractions and shares are between 0 and 1."""

    format_version: int
    model: str  # name of its directory, or demo; for people
    fingerprint: str  # `model_fingerprint`
    num_layers: int
    num_kv_heads: int
    head_dim: int
    settings: dict[str, Any]  # context, steps, text, summary configuration and limits
    fractions: tuple[Share, ...]  # C fractions of the groups, rising
    curves: tuple[tuple[tuple[Share, ...], ...], ...]  # [L][Hkv][C] share that the best groups hold, masses known
    fraction_needed: tuple[tuple[Share, ...], ...]  # [L][Hkv] of the groups, for settings["mass"] of the softmax
    outside_share: tuple[tuple[Share, ...], ...]  # [L][Hkv] share outside the first and last tokens
    classes: tuple[tuple[str, ...], ...]  # [L][Hkv] of CLASSES
    dense_layers: tuple[int, ...]  # not sparse: it would not pay there
    head_modes: tuple[tuple[str, ...], ...]  # [L][Hkv], as EpsConfig.head_modes


def modes_of(classes: tuple[tuple[str, ...], ...], dense_layers: tuple[int, ...]) -> tuple[tuple[str, ...], ...]:
    """Return the mode of each kv head under `--eps-heads retrieval`, [L][Hkv], of classes [L][Hkv]: retrieval heads
    are read sparsely, streaming heads and the layers that are not sparse stay dense."""
    return tuple(
        tuple("sparse" if kind == "retrieval" and layer not in dense_layers else "dense" for kind in heads)
        for layer, heads in enumerate(classes)
    )


def model_fingerprint(path: Path) -> str:
    """sha256 of what config.json says of the model and of the first MiB of weights in its first file (by name): cheap,
    and another for another model or another training."""
    spec = read_spec(path)
    digest = hashlib.sha256(json.dumps(asdict(spec), sort_keys=True).encode())
    first = path / weight_files(path)[0]
    try:
        with open(first, "rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            file.seek(8 + header_bytes)
            digest.update(file.read(_FINGERPRINT_BYTES))
    except FileNotFoundError:
        raise ConfigError(f"{path} holds no weights: there is no {first.name}; give a complete model") from None
    except (OSError, OverflowError) as error:  # a header's length that no file has
        raise ConfigError(f"{first} cannot be read ({error}): check it, or download it again") from error
    return digest.hexdigest()


def load_policy(path: Path) -> HeadPolicy:
    """The policy in a JSON file, checked field by field."""
    values = inputs.read_json(path, "head policy", "make one with eps-proto calibrate")
    if not isinstance(values, dict) or "format_version" not in values:
        raise ConfigError(f"{path} is JSON but no head policy: make one with eps-proto calibrate")
    version = values["format_version"]
    if version != FORMAT_VERSION:
        raise ConfigError(f"{path} has head policy format {shown(version)}, this is {FORMAT_VERSION}: calibrate again")
    policy = read_record(HeadPolicy, values, f"head policy {path}", "calibrate again")
    policy = replace(policy, head_modes=current_modes(policy.head_modes))
    if fault := _fault(policy):
        raise ConfigError(f"head policy {path}: {fault}; calibrate again")
    return policy


def _fault(policy: HeadPolicy) -> str | None:
    """Return the fault of values that are of the right kinds, or None."""
    shape = (policy.num_layers, policy.num_kv_heads)
    if min(*shape, policy.head_dim) < 1:
        return f"its shape {(*shape, policy.head_dim)} is not three positive integers"
    if list(policy.fractions) != sorted(set(policy.fractions)):
        return "its fractions do not rise"
    for name in ("curves", "fraction_needed", "outside_share", "classes", "head_modes"):
        grid = getattr(policy, name)
        if len(grid) != shape[0]:
            return f"{name} is not of {shape[0]} layers"
        if any(len(heads) != shape[1] for heads in grid):
            return f"{name} is not of {shape[1]} kv heads in every layer"
    curves = [curve for heads in policy.curves for curve in heads]
    if any(len(curve) != len(policy.fractions) for curve in curves):
        return f"its curves are not of {len(policy.fractions)} shares each"
    if any(list(curve) != sorted(curve) for curve in curves):
        return "a curve falls: more groups cannot hold less"
    if unknown := [kind for heads in policy.classes for kind in heads if kind not in CLASSES]:
        return f"class {shown(unknown[0])} is none of {', '.join(CLASSES)}"
    layers = policy.dense_layers
    if any(not 0 <= layer < shape[0] for layer in layers):
        return f"dense_layers {layers!r} are not layers 0 to {shape[0] - 1}"
    if policy.head_modes != modes_of(policy.classes, layers):
        return "head_modes do not follow from its classes and dense_layers"
    return None


def check_policy(policy: HeadPolicy, model: Path, spec: ModelSpec) -> None:
    """Raises ConfigError where the policy is of another shape or of another model than the one in `model`."""
    found = (policy.num_layers, policy.num_kv_heads, policy.head_dim)
    wanted = (spec.num_layers, spec.num_kv_heads, spec.head_dim)
    if found != wanted:
        raise ConfigError(
            "the head policy is of {} layers x {} kv heads of {}, the model has {} x {} of {}: "
            "calibrate this model".format(*found, *wanted)
        )
    if policy.fingerprint != model_fingerprint(model):
        raise ConfigError(
            f"the head policy was made for another model ({policy.model}) of the same shape: calibrate this model"
        )


def check_modes(config: EpsConfig, spec: ModelSpec) -> None:
    """Raises ConfigError where head modes that take effect are of another shape than the model."""
    modes = config.selection_config.head_modes if config.cache_config.enabled else None
    found = (len(modes), len(modes[0])) if modes else (spec.num_layers, spec.num_kv_heads)
    require(
        found == (spec.num_layers, spec.num_kv_heads),
        "head_modes are of {} layers x {} kv heads, the model has {} x {}: calibrate this model".format(
            *found, spec.num_layers, spec.num_kv_heads
        ),
    )
