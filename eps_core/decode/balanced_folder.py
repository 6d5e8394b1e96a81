"""A copy of a model whose keys are balanced in its files, for engines, which read their weights themselves."""

import os
import shutil
from pathlib import Path

import numpy as np

from eps_core.decode.balance import key_factors
from eps_core.decode.session import Session
from eps_core.errors import require
from eps_core.io import tensors
from eps_core.models.folder import weight_files
from eps_core.models.weights import weight_names


def write_balanced(session: Session, out: Path) -> int:
    """Writes the model of a session that balances keys to the folder `out`, in the dtypes in which it is stored, or
    nothing. Returns how many RoPE pairs of a kv head were multiplied. Raises ConfigError where `out` is there already,
    and where the family's norms are stored about 1, so that a power of two cannot be multiplied into them exactly."""
    require(not out.exists(), f"{out} is there already: give another folder")
    _ = session.decoder
    exponents = session.exponents
    assert exponents is not None, "a session that balances no keys"
    names = weight_names(session.spec)
    factors: dict[str, list[tuple[int, np.ndarray]]] = {}  # of a tensor: first row, factors
    for layer in range(session.spec.num_layers):
        for short, rows in key_factors(session.spec, layer, exponents[layer]).items():
            stored = names[short]
            require(
                stored.offset == 0,
                f"model_type {session.spec.family} stores its norms about {stored.offset:g}, where powers of two are "
                "not exact: leave it as it is; EPS's own decoders balance it when they open it",
            )
            factors.setdefault(stored.name, []).append((stored.first, rows))
    made = out.with_name(f".{out.name}-{os.getpid()}")  # until it is whole
    made.mkdir(parents=True)
    try:
        weights = weight_files(session.path)
        shutil.copytree(session.path, made, dirs_exist_ok=True, ignore=lambda _, files: set(files) & set(weights))
        for name in weights:
            metadata, arrays, _ = tensors.read(session.path / name)
            for tensor in arrays.keys() & factors.keys():
                for first, rows in factors[tensor]:
                    part = arrays[tensor][first : first + len(rows)]
                    part[...] = part * rows.astype(part.dtype).reshape(-1, *[1] * (part.ndim - 1))
            layout = {tensor: (list(array.shape), array.dtype.name) for tensor, array in arrays.items()}
            with open(made / name, "wb") as file:
                file.write(tensors.header(metadata, layout)[0])
                for array in arrays.values():
                    file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        made.rename(out)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    return int(np.count_nonzero(exponents))
