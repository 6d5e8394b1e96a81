"""What is Triton's own in its kernels that choose groups: rows too long for registers, and what the
compilers make of them. Values are tested with all kernels, in test_kernel_select.py."""

from functools import partial

import pytest
import triton_interpreter  # noqa: F401  before any module that holds kernels
from test_kernel_select import TOPK, check_topk
from test_triton_attend import DEVICE, TRITON
from triton_aot import TARGETS, Job, compile_ahead

from eps_cuda.kernels import dispatch
from eps_cuda.kernels import select as select_kernels


@pytest.mark.parametrize("name", ["no sink and recent tokens", "odd groups", "all equal", "last bits"])
def test_rows_too_long_for_registers(name, monkeypatch) -> None:
    short = staticmethod(partial(select_kernels.select_topk, row_groups=128))
    monkeypatch.setattr(dispatch.TritonKernels, "select_topk", short)
    check_topk(TRITON, DEVICE, **TOPK[name])


POINTERS = {
    "valid": "*u8", "table": "*i32", "lengths": "*i32", "estimate": "*fp32", "listed_groups": "*i32",
    "counts": "*i32", "wanted": "*i32", "out_groups": "*i32", "out_counts": "*i32", "selected_mask": "*u8",
}  # fmt: skip


def job(name: str, constants: dict, options: dict) -> Job:
    """A kernel with its constexpr values; pointers by the names of its arguments, all others are numbers."""
    arguments = [one for one in getattr(select_kernels, name).arg_names if one not in constants]
    types_of = {one: POINTERS.get(one, "i32") for one in arguments}
    return Job("eps_cuda.kernels.select", name, types_of, constants, options)


JOBS = {
    **{
        f"select {block} {'held' if held else 'read again'}": job(
            "_select",
            {"S": 2, "SINK_RECENT": selectable, "VISIT": selectable, "BLOCK": block, "RESIDENT": held,
             "LIST": min(block, 4096)},
            {"num_warps": warps},
        )
        for block, selectable, held, warps in (
            (32768, True, True, 16), (8192, False, False, 16)
        )
    },
    "compact": job("_compact", {"LIST": 4096}, {"num_warps": 8}),
}  # fmt: skip


def test_kernels_compile_for_gpus() -> None:
    """For A100, H100 and MI300: what the interpreter does not show."""
    for name, compiled in zip(JOBS, compile_ahead(list(JOBS.values()), TARGETS), strict=True):
        for made in compiled:
            print(f"{name:>18} {made.target:>12} {made.registers:4} registers {made.spilled_bytes:5} B spilled "
                  f"{made.shared_bytes:6} B shared")  # fmt: skip
