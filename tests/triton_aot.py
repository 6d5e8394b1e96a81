"""Compile Triton kernels ahead of time, on any machine, for GPUs that it need not have: what no interpreter shows.

`compile_ahead` runs this file in a process of its own, without TRITON_INTERPRET: under it a kernel is no kernel.
"""

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# (backend, architecture, warp size): A100, H100 and H200, MI300
TARGETS = (("cuda", 80, 32), ("cuda", 90, 32), ("hip", "gfx942", 64))


# arguments that have one type in every kernel; what is not here is an i32
ARGUMENTS = {
    "*i32": "table lengths slots starts counts listed_groups through named planes wanted out_groups out_counts "
    "own_groups counters state candidate_groups chunk_counts",
    "*fp32": "estimate lse skipped part_out part_lse part_selected scales candidates masses signs steps inverses "
    "head_sums bases left anchors sums",
    "*u8": "valid selected_mask finite codes more rest second second_scale unit_mean",
    "*fp16": "k_scale v_scale mean_scale unit_mean_scale integers halves",
    "fp32": "inverse_root",
}
TYPES = {name: kind for kind, names in ARGUMENTS.items() for name in names.split()}


@dataclass(frozen=True)
class Job:
    """One kernel with the types of its run-time arguments ("*bf16", "i32", ..) and the values of its constexpr ones, a
    dtype by its name ("bf16"); an argument in neither is a pointer that is None. `options`: num_warps and the like."""

    module: str
    kernel: str
    types: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, Any]


def job(
    kernel: Any, constants: dict[str, Any], types: dict[str, str] | None = None, absent: Iterable[str] = (),
    **options: int | bool,
) -> Job:  # fmt: skip
    """A launch of a kernel without some of its arrays. `types`: of arguments that differ by kernel."""
    if "OVERLAP" in kernel.arg_names:
        constants = {"OVERLAP": False, **constants}
    known = TYPES | (types or {})
    found = {one: known.get(one, "i32") for one in kernel.arg_names if one not in constants and one not in absent}
    return Job(kernel.fn.__module__, kernel.fn.__name__, found, constants, options)


@dataclass(frozen=True)
class Compiled:
    """What one target made of one job. Per thread: registers (vector ones on hip) and bytes spilled; per program:
    bytes of shared memory. `text` is PTX or AMD GCN assembly."""

    target: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    text: str

    def __str__(self) -> str:
        usage = f"{self.registers} registers, {self.spilled_bytes} B spilled, {self.shared_bytes} B shared"
        return f"{self.target}: {usage}"


def compile_ahead(jobs: list[Job], targets: tuple = TARGETS, timeout_s: float = 300) -> list[list[Compiled]]:
    """Of each job, one result per target. Raises AssertionError with the compiler's message if any does not compile."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = str(Path(__file__).parent.parent)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH", "")]))
    request = json.dumps({"jobs": [vars(job) for job in jobs], "targets": targets})
    done = subprocess.run(
        [sys.executable, __file__], input=request, capture_output=True, text=True, env=environment, timeout=timeout_s
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [[Compiled(**one) for one in results] for results in json.loads(done.stdout.splitlines()[-1])]


def _compile(job: Job, backend: str, architecture: Any, warp_size: int) -> Compiled:
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(job.module), job.kernel)
    names = kernel.arg_names
    unknown = (set(job.types) | set(job.constants)) - set(names)
    lacking = {one.name for one in kernel.params if one.is_constexpr} - set(job.constants)
    assert not unknown and not lacking, f"{job.kernel} has no {sorted(unknown)}, and its job no {sorted(lacking)}"
    values = {name: tl.dtype(value) if isinstance(value, str) else value for name, value in job.constants.items()}
    constants = {name: values.get(name) for name in names if name not in job.types}
    # as of whole tensors
    divisible = [name for name, kind in job.types.items() if kind.startswith("*")]
    source = ASTSource(
        kernel,
        {name: job.types.get(name, "constexpr") for name in names},
        constexprs=constants,
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in divisible},
    )
    made = triton.compile(source, target=GPUTarget(backend, architecture, warp_size), options=job.options)
    if backend == "hip":
        text = made.asm["amdgcn"]
        registers, spilled, scratch = (
            int(re.findall(rf"\.{name}:\s+(\d+)", text)[0])
            for name in ("vgpr_count", "vgpr_spill_count", "private_segment_fixed_size")
        )
        return Compiled(f"{backend} {architecture}", registers, max(4 * spilled, scratch), made.metadata.shared, text)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        shown = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    usage = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", shown.stdout)}
    spilled = usage["STACK"] + usage["LOCAL"]
    return Compiled(f"{backend} {architecture}", usage["REG"], spilled, made.metadata.shared, made.asm["ptx"])


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    print(json.dumps([[vars(_compile(Job(**job), *target)) for target in asked["targets"]] for job in asked["jobs"]]))
