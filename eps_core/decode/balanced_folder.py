"""A copy of a model whose keys are balanced in its files, for engines that read their weights themselves."""

import os
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from eps_core.decode.balance import key_factors
from eps_core.decode.session import Session
from eps_core.errors import require
from eps_core.models.folder import weight_files
from eps_core.models.weights import opened_weights, weight_names


def write_balanced(session: Session, out: Path) -> int:
    """Writes the model of a session that balances keys to the new folder `out`, each tensor in its stored dtype; a
    folder that is not finished never has that name. Returns how many RoPE pairs of the KV heads' keys were multiplied.
    Raises ConfigError where `out` exists or lies in the model's folder, and for weights in which powers of two are not
    exact: float16, and norms that are stored about 1."""
    spec, source = session.spec, session.path.resolve()
    require(not out.exists(), f"{out} exists: give a new folder")
    require(not out.resolve().is_relative_to(source), f"{out} lies in the model's own folder: give another")
    require(spec.stored_dtype != "float16", f"{session.path} is stored in float16, {INEXACT}")
    names = weight_names(spec)
    offset = names["layers.0.k_norm"].offset if spec.qk_norm else 0.0
    require(offset == 0, f"model_type {spec.family} stores its norms about {offset:g}, {INEXACT}")
    session.load()
    exponents = session.exponents
    assert exponents is not None, "a session that balances no keys"
    factors: dict[str, list[tuple[int, np.ndarray]]] = {}  # of a tensor: first row, factors
    for layer in range(spec.num_layers):
        for short, rows in key_factors(spec, layer, exponents[layer]).items():
            factors.setdefault(names[short].name, []).append((names[short].first, rows))
    weights = weight_files(session.path)
    for name in weights:
        with opened_weights(session.path / name) as opened:
            for tensor in factors.keys() & set(opened.keys()):  # whatever config.json says
                short = opened.get_slice(tensor).get_dtype() == "F16"
                require(not short, f"{tensor} of {session.path} is stored in float16, {INEXACT}")
    made = out.with_name(f".{out.name}-{os.getpid()}")
    made.mkdir(parents=True)
    try:
        shutil.copytree(session.path, made, dirs_exist_ok=True, ignore=lambda _, files: set(files) & set(weights))
        for name in weights:
            with opened_weights(session.path / name) as opened:
                arrays, metadata = {key: opened.get_tensor(key) for key in opened.keys()}, opened.metadata()  # noqa: SIM118
            for tensor in arrays.keys() & factors.keys():
                for first, rows in factors[tensor]:
                    part = arrays[tensor][first : first + len(rows)]
                    part *= rows.astype(part.dtype).reshape(-1, *[1] * (part.ndim - 1))
            save_file(arrays, made / name, metadata)
        made.rename(out)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    return int(np.count_nonzero(exponents))


INEXACT = (
    "where a power of two is not always exact: engines take it as it is, and EPS's own decoders balance what they can "
    "when they open it"
)
