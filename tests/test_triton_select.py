"""What is Triton's own in its kernels that choose groups and score `meanstd`: rows too long for registers, and what the
compilers make of them. Values are tested with all kernels, in test_kernel_select.py and test_kernel_scores.py."""

from dataclasses import replace
from functools import partial

import pytest
import triton_interpreter  # noqa: F401  before any module that holds kernels
from test_kernel_select import TOPK, check_topk
from test_triton_attend import DEVICE, TRITON
from triton_aot import TARGETS, Job, compile_ahead

from eps_core.summaries.base import LARGEST_ESTIMATE
from eps_cuda.kernels import dispatch
from eps_cuda.kernels import score as score_kernels
from eps_cuda.kernels import select as select_kernels


@pytest.mark.parametrize("name", ["no sink and recent tokens", "odd groups", "all equal", "last bits"])
def test_rows_too_long_for_registers(name, monkeypatch) -> None:
    short = staticmethod(partial(select_kernels.select_topk, row_groups=128))
    monkeypatch.setattr(dispatch.TritonKernels, "select_topk", short)
    check_topk(TRITON, DEVICE, **TOPK[name])


POINTERS = {
    "valid": "*u8", "table": "*i32", "lengths": "*i32", "estimate": "*fp32", "listed_groups": "*i32",
    "counts": "*i32", "wanted": "*i32", "out_groups": "*i32", "out_counts": "*i32", "selected_mask": "*u8",
    "q": "*bf16",
    "mean": "*i8", "mean_scale": "*fp16",
    "std": "*u8", "std_scale": "*fp16",
}  # fmt: skip
NUMBERS = {"inverse_root": "fp32"}
SCORE, SELECT = "eps_cuda.kernels.score", "eps_cuda.kernels.select"
MODEL = {"R": 4, "D": 128, "RP": 4, "DP": 128}


def job(module: str, name: str, constants: dict, options: dict | None = None) -> Job:
    """A kernel with its constexpr values; pointers and numbers by the names of its arguments."""
    source = getattr(score_kernels if module == SCORE else select_kernels, name)
    arguments = [argument for argument in source.arg_names if argument not in constants]
    types_of = {a: POINTERS.get(a, NUMBERS.get(a, "i32")) for a in arguments}
    return Job(module, name, types_of, constants, options or {})


JOBS = {
    "score meanstd": job(
        SCORE, "_score_meanstd", {**MODEL, "GPU": 4, "S": 16, "LARGEST": LARGEST_ESTIMATE, "BLOCK": 128}
    ),
    **{
        f"select {block} {'held' if held else 'read again'}": job(
            SELECT, "_select",
            {"S": 2, "SINK_RECENT": selectable, "VISIT": selectable, "BLOCK": block, "RESIDENT": held,
             "LIST": min(block, 4096)},
            {"num_warps": warps},
        )
        for block, selectable, held, warps in (
            (32768, True, True, 16), (8192, False, False, 16)
        )
    },
    "compact": job(SELECT, "_compact", {"LIST": 4096}, {"num_warps": 8}),
}  # fmt: skip


def test_kernels_compile_for_gpus() -> None:
    """For A100, H100 and MI300: what the interpreter does not show."""
    # as the launchers ask for, where torch is built for AMD
    for_amd = [
        replace(one, constants={n: {"RP": 8, "SUBNORMAL": False}.get(n, value) for n, value in one.constants.items()})
        if one.constants.get("RP") == 4
        else one
        for one in JOBS.values()
    ]
    for_nvidia = compile_ahead(list(JOBS.values()), TARGETS[:2])
    for name, first, second in zip(JOBS, for_nvidia, compile_ahead(for_amd, TARGETS[2:]), strict=True):
        for made in first + second:
            print(f"{name:>18} {made.target:>12} {made.registers:4} registers {made.spilled_bytes:5} B spilled "
                  f"{made.shared_bytes:6} B shared")  # fmt: skip
            # the tensor cores of each
            if name.startswith("score"):
                assert any(word in made.text for word in ("wgmma", "mma.sync", "v_mfma")), name
