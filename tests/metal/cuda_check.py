"""The bodies of Metal kernels behind `CUDA_HEADER`, compiled as CUDA: for NVIDIA's GPUs, see eps_mlx.kernels.launch."""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from eps_mlx.kernels import launch

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is absent: kernels are not compiled as CUDA")
_TYPES = {mx.float32: "float", mx.float16: "__half", mx.bfloat16: "__nv_bfloat16", mx.bool_: "bool"}


def errors(calls: Sequence[tuple[launch.Kernel, dict[str, Any], list[mx.array], list[mx.Dtype]]], folder: Path) -> str:
    """What nvcc says of the kernels, templates, inputs and dtypes of outputs of some launches, with signatures as
    `mx.fast.cuda_kernel` makes them; empty where it takes them all."""
    source = "#include <cstdint>\n#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n" + launch.CUDA_HEADER
    for number, (kernel, template, inputs, dtypes) in enumerate(calls):
        cuda = [_TYPES.get(x, f"{str(x).removeprefix('mlx.core.')}_t") for x in [y.dtype for y in inputs] + dtypes]
        names = [f"const {t}* {n}" for t, n in zip(cuda, kernel.inputs, strict=False)]
        names += [f"{t}* {n}" for t, n in zip(cuda[len(inputs) :], kernel.outputs, strict=True)]
        constants = "".join(
            f"using {name} = {_TYPES.get(value, str(value).removeprefix('mlx.core.') + '_t')};\n"
            if isinstance(value, mx.Dtype)
            else f"constexpr {type(value).__name__} {name} = {str(value).lower()};\n"
            for name, value in template.items()
        )
        source += f"__global__ void {kernel.name}_{number}({', '.join(names)}) {{\n{constants}{kernel.source}}}\n"
    path = folder / "kernels.cu"
    path.write_text(source)
    done = subprocess.run(
        ["nvcc", "-std=c++17", "-arch=sm_90", "-ptx", str(path), "-o", str(folder / "kernels.ptx")],
        capture_output=True, text=True,
    )  # fmt: skip
    return done.stderr if done.returncode else ""
