"""safetensors files: the header, and files that are read whole or not at all."""

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path

import ml_dtypes
import numpy as np

from eps_core.errors import one_line
from eps_core.io.inputs import parse_json

Layout = Mapping[str, tuple[list[int], str]]  # name -> (shape, dtype) of every tensor, in file order

NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "uint16": "U16", "uint32": "U32",
}  # fmt: skip
_DTYPES = {
    name: np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype) for dtype, name in NAMES.items()
}  # fmt: skip


def header(metadata: Mapping[str, str], layout: Layout) -> tuple[bytes, int]:
    """(what stands before the tensors' bytes, how many these are) of a file."""
    values: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, (shape, dtype) in layout.items():
        size = prod(shape) * _DTYPES[NAMES[dtype]].itemsize
        values[name] = {"dtype": NAMES[dtype], "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    encoded = json.dumps(values).encode()
    encoded += b" " * (-len(encoded) % 8)  # the format wants data aligned to 8 bytes
    return len(encoded).to_bytes(8, "little") + encoded, offset


def read(path: Path) -> tuple[dict[str, str], dict[str, np.ndarray], bytearray]:
    """(metadata, tensors in file order, their bytes, which they are views of) of a file. Raises ValueError, which says
    what is wrong with it, for one that is truncated, too long or no safetensors file; OSError where it cannot be
    read."""
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or 8 + length > size:
            raise ValueError("truncated, or no safetensors file")
        try:
            values = parse_json(file.read(length).decode())
            metadata = values.pop("__metadata__", {})
            places = {name: (_DTYPES[one["dtype"]], one["shape"], one["data_offsets"]) for name, one in values.items()}
            end = 0
            for dtype, shape, (first, last) in places.values():
                if any(type(number) is not int for number in (*shape, first, last)):
                    raise ValueError("shapes and places are whole numbers")
                if first != end or last - first != prod(shape) * dtype.itemsize or min(shape, default=0) < 0:
                    raise ValueError("its tensors do not lie one behind the other")
                end = last
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"damaged, or no safetensors file: {one_line(error)[:100]}") from error
        if 8 + length + end != size:
            raise ValueError(f"truncated or overlong: {size} bytes instead of {8 + length + end}")
        data = bytearray(end)
        if file.readinto(data) != end:
            raise ValueError("truncated")
    arrays = {
        name: np.frombuffer(data, dtype, prod(shape), first).reshape(shape)
        for name, (dtype, shape, (first, _)) in places.items()
    }
    return metadata, arrays, data
