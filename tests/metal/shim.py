"""Metal kernels on a CPU: the exact text that MLX would hand to Metal's compiler, compiled with g++ and run by fibres.

`runner` stands in for a GPU behind `eps_mlx.kernels.launch`. It finds, besides wrong numbers: lanes of a simdgroup that
meet at different simd operations, barriers that not all threads reach, accesses out of bounds, misaligned reads, writes
to inputs, bytes of outputs that two threads write, races in threadgroup memory, more of it than a GPU has. It poisons
threadgroup memory before each threadgroup and outputs before each launch. Any of these raises `ShimError`.

It cannot know: time, occupancy, registers, races between threadgroups other than through outputs, Metal's own rounding
of exp and log, and whether Metal's front end takes the text (see clang_check).
"""

import contextlib
import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from eps_mlx.kernels import launch
from eps_mlx.kernels.launch import METAL_HEADER, Kernel, Sizes

HERE = Path(__file__).parent
FOLDER = Path(tempfile.gettempdir()) / f"eps_metal_shim_{os.getuid() if hasattr(os, 'getuid') else ''}"
COMPILER = shutil.which("g++")
# tsan's instrumentation reports every access of the kernel to shim.cpp; its runtime library is not linked
KERNEL_FLAGS = ["-std=c++20", "-O1", "-fPIC", "-w", "-ffp-contract=off", "-fsanitize=thread"]
RUNTIME_FLAGS = ["-std=c++20", "-O2", "-fPIC", "-U_FORTIFY_SOURCE", "-shared"]
SCHEDULES = ("forward", "backward")
GUARD_BYTES = 4096  # around every buffer, so that what lies outside of one is outside of all


class ShimError(AssertionError):
    """What a kernel must not do on any GPU."""


@dataclass(frozen=True)
class Statistics:
    """Of one launch, by array name: `read` distinct bytes of inputs, `loaded` and `stored` bytes by all threads, with
    repeats."""

    read: dict[str, int]
    loaded: dict[str, int]
    stored: dict[str, int]
    threadgroups: int


# the latest launch of each kernel, by the kernel's name
last: dict[str, Statistics] = {}
# orders in which threads run between barriers; with both, outputs must be equal to the bit
schedules: tuple[str, ...] = SCHEDULES[:1]


def runner(
    kernel: Kernel,
    inputs: list[mx.array],
    template: dict[str, Any],
    grid: Sizes,
    threadgroup: Sizes,
    output_shapes: Sequence[tuple[int, ...]],
    output_dtypes: Sequence[mx.Dtype],
) -> list[mx.array]:
    """`launch.launch` without a GPU. Synchronises."""
    text = generated_text(kernel, inputs, template, output_dtypes)
    entry = _compiled(text)
    arrays = [_guarded(_to_numpy(array)) for array in inputs]
    results = []
    for schedule in schedules:
        outputs = [
            _guarded(np.full(int(np.prod(shape)) * dtype.size, 0xFF, np.uint8))
            for shape, dtype in zip(output_shapes, output_dtypes, strict=True)
        ]
        last[kernel.name] = _run(kernel, entry, arrays, outputs, grid, threadgroup, schedule == "backward")
        results.append(outputs)
    for outputs in results[1:]:
        for name, one, other in zip(kernel.outputs, results[0], outputs, strict=True):
            if not np.array_equal(one, other):
                raise ShimError(f"{kernel.name}: {name} depends on the order in which threads run")
    return [
        _from_numpy(output, shape, dtype)
        for output, shape, dtype in zip(results[0], output_shapes, output_dtypes, strict=True)
    ]


@contextlib.contextmanager
def installed(orders: tuple[str, ...] = SCHEDULES[:1]) -> Iterator[dict[str, Statistics]]:
    """Within it `launch` runs everything here, in each of `orders`. Yields `last`, emptied."""
    global schedules
    before, before_schedules = launch.runner, schedules
    launch.runner, schedules = runner, orders
    last.clear()
    try:
        yield last
    finally:
        launch.runner, schedules = before, before_schedules


@pytest.fixture
def metal_shim() -> Iterator[dict[str, Statistics]]:
    """Metal kernels run here, in both orders, for a test; its value holds the latest statistics of each kernel."""
    if COMPILER is None:
        pytest.skip("g++ is absent: Metal kernels run on a CPU only with it")
    with installed(SCHEDULES) as statistics:
        yield statistics


_texts: dict[tuple, str] = {}


def generated_text(
    kernel: Kernel, inputs: Sequence[mx.array], template: dict[str, Any], output_dtypes: Sequence[mx.Dtype]
) -> str:
    """What MLX gives Metal's compiler for such inputs: it prints the text while it traces, also where Metal is absent.
    The text depends on the inputs' dtypes, and on which are scalars or have fewer than 8 elements."""
    kinds = tuple((x.dtype, x.ndim == 0, x.size < 8) for x in inputs)
    key = (kernel, tuple(template.items()), kinds, tuple(output_dtypes))
    if key not in _texts:
        examples = [mx.zeros(() if scalar else (7,) if few else (8,), dtype) for dtype, scalar, few in kinds]

        def call(*arrays: mx.array) -> list[mx.array]:
            return launch.compiled(kernel)(
                inputs=list(arrays),
                template=list(template.items()),
                grid=(32, 1, 1),
                threadgroup=(32, 1, 1),
                output_shapes=[(1,)] * len(output_dtypes),
                output_dtypes=list(output_dtypes),
                verbose=True,
            )

        found = re.search(r"```\n(.*?)\n```", _printed(call, examples), re.S)
        assert found, "MLX printed no source"
        _texts[key] = found.group(1)
    return _texts[key]


def _printed(call: Any, examples: list[mx.array]) -> str:
    """What MLX's C++ prints on the process's stdout while it traces."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryDirectory() as folder:
        sys.stdout.flush()
        saved = os.dup(1)
        os.dup2(out.fileno(), 1)
        try:
            mx.export_function(f"{folder}/traced.mlxfn", call, *examples)
            ctypes.CDLL(None).fflush(None)
        finally:
            os.dup2(saved, 1)
            os.close(saved)
        out.seek(0)
        return out.read().decode()


def _host_source(text: str) -> str:
    """The text as C++ with `shim_entry`, which runs one thread."""
    assert METAL_HEADER in text, "launch.METAL_HEADER is not at the top of the generated text"
    text = text.replace(METAL_HEADER, "")
    signature = re.search(r"\[\[kernel\]\] void (\w+)\(\n(.*?)\) \{\n", text, re.S)
    assert signature, "no kernel in the generated text"
    name, parameters = signature.group(1), signature.group(2).split(",\n")
    instance = re.search(r"decltype\(\w+<([^>]*)>\)", text)
    text = re.sub(r"\ntemplate \[\[host_name.*?;\n?", "\n", text, flags=re.S)
    # the name lists dtypes and template values: without it, equal texts are compiled once
    text = re.sub(rf"\b{name}\b", "kernel_body", text)
    # one array for all threads of a threadgroup, since those are fibres of one thread, with room around it
    text = re.sub(
        r"\bthreadgroup\s+(\w+)\s+(\w+)\s*((?:\[[^;\]]*\])*)\s*;",
        r"static struct { char before[256]; \1 \2\3; char after[256]; } shim_\2; auto& \2 = shim_\2.\2; "
        r"SHIM_SHARE(\2);",
        text,
    )
    text = re.sub(r"\bthreadgroup\s+(?=\w)", "", text)
    text = text.replace("[[kernel]] void", "static void")
    arguments, buffer = [], 0
    for parameter in parameters:
        found = re.match(r"\s*(.*?)\s*\[\[(\w+)(?:\(\d+\))?\]\]", parameter)
        assert found, parameter
        declaration, kind = found.groups()
        if kind != "buffer":
            arguments.append(f"place->{kind}")
            continue
        # a further buffer may be an input's shape, strides or dimensions
        pointee = re.sub(r"[*&]\s*\w+$|\b(device|constant)\b", "", declaration).strip()
        deref = "*" if "&" in declaration else ""
        arguments.append(f"{deref}({pointee}*)buffers[{buffer}]")
        buffer += 1
    text = re.sub(r" \[\[\w+(\(\d+\))?\]\]", "", text)
    values = f"<{instance.group(1)}>" if instance else ""
    return (
        f'#include "shim.h"\n{text}\nSHIM_ENTRY(void** buffers, const ShimPlace* place) {{\n'
        f"  kernel_body{values}({', '.join(arguments)});\n}}\n"
    )


@cache
def _compiled(text: str) -> Any:
    """The address of the kernel's entry."""
    _runtime()  # before the library that refers to its functions
    headers = [(HERE / name).read_text() for name in ("shim.h", "place.h")]
    path = _build(_host_source(text), "".join(headers), KERNEL_FLAGS, ["-c"])
    return ctypes.cast(ctypes.CDLL(str(path)).shim_entry, ctypes.c_void_p)


@cache
def _runtime() -> ctypes.CDLL:
    path = _build((HERE / "shim.cpp").read_text(), (HERE / "place.h").read_text(), RUNTIME_FLAGS, [])
    library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    library.shim_launch.restype = ctypes.c_char_p
    return library


def _build(source: str, headers: str, flags: list[str], compile_only: list[str]) -> Path:
    """The shared library of `source`, kept by its content. With `compile_only` it is linked apart from the flags."""
    if COMPILER is None:
        raise ShimError("g++ is absent: Metal kernels run on a CPU only with it")
    digest = hashlib.sha256("\0".join((source, headers, *flags)).encode()).hexdigest()[:24]
    library = FOLDER / f"{digest}.so"
    if library.exists():
        return library
    FOLDER.mkdir(mode=0o700, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        path, built = Path(folder) / "kernel.cpp", Path(folder) / "built"
        path.write_text(source)
        _compile([COMPILER, *flags, *compile_only, f"-I{HERE}", str(path), "-o", str(built)], source)
        if compile_only:
            linked = Path(folder) / "linked"
            _compile([COMPILER, "-shared", "-x", "none", str(built.rename(f"{built}.o")), "-o", str(linked)], source)
            built = linked
        built.rename(library)  # atomic: others may build the same
    return library


def _compile(command: list[str], source: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ShimError(f"{done.stderr[:4000]}\n{source}")


def _run(
    kernel: Kernel,
    entry: Any,
    inputs: list[np.ndarray],
    outputs: list[np.ndarray],
    grid: Sizes,
    threadgroup: Sizes,
    backward: bool,
) -> Statistics:
    arrays, names = inputs + outputs, [*kernel.inputs, *kernel.outputs]
    count = len(arrays)
    numbers = (ctypes.c_uint64 * (3 * count))()
    sizes = ctypes.c_uint32 * 3
    error = _runtime().shim_launch(
        entry,
        count,
        (ctypes.c_void_p * count)(*[array.ctypes.data for array in arrays]),
        (ctypes.c_uint64 * count)(*[array.nbytes for array in arrays]),
        (ctypes.c_char_p * count)(*[name.encode() for name in names]),
        len(inputs),
        sizes(*grid),
        sizes(*threadgroup),
        int(backward),
        numbers,
    )
    if error is not None:
        raise ShimError(f"{kernel.name}: {error.decode()}")
    read, loaded, stored = (dict(zip(names, numbers[i::3], strict=True)) for i in range(3))
    groups = int(np.prod([-(-g // min(t, g)) for g, t in zip(grid, threadgroup, strict=True)]))
    return Statistics(read, loaded, stored, groups)


def _guarded(array: np.ndarray) -> np.ndarray:
    """Its bytes, aligned to 256 like a GPU's buffers, with room around them that no other buffer uses."""
    whole = np.empty(array.nbytes + 2 * GUARD_BYTES + 256, np.uint8)
    start = GUARD_BYTES + -(whole.ctypes.data + GUARD_BYTES) % 256
    inside = whole[start : start + array.nbytes]
    inside[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return inside


def _to_numpy(array: mx.array) -> np.ndarray:
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def _from_numpy(data: np.ndarray, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    if dtype == mx.bfloat16:
        return mx.array(data.view(np.uint16).reshape(shape)).view(mx.bfloat16)
    return mx.array(data.view(str(dtype).removeprefix("mlx.core.").replace("bool", "bool_")).reshape(shape))
