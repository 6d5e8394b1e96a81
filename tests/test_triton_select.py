"""Tests of the Triton kernels that choose groups: rows of many runs and many candidates, and what compilers make of
them. Lists are compared with the reference's in test_kernel_select.py."""

import pytest
import triton_interpreter  # noqa: F401  before any module that holds kernels
from test_kernel_select import TOPK, check_topk
from test_triton_attend import DEVICE, TRITON
from triton_aot import TARGETS, Job, compile_ahead

from eps_cuda.kernels import select as select_kernels


@pytest.mark.parametrize("name", TOPK)
def test_rows_of_many_runs_and_many_candidates(name, monkeypatch) -> None:
    for size, value in {"CHUNK": 128, "SAMPLE": 32, "BINS": 16, "CANDIDATES": 32}.items():
        monkeypatch.setattr(select_kernels, size, value)
    check_topk(TRITON, DEVICE, **TOPK[name])


POINTERS = {
    "valid": "*u8", "table": "*i32", "lengths": "*i32", "estimate": "*fp32", "listed_groups": "*i32",
    "counts": "*i32", "wanted": "*i32", "out_groups": "*i32", "out_counts": "*i32", "selected_mask": "*u8",
    "counters": "*i32", "state": "*i32", "scales": "*fp32", "candidates": "*fp32", "candidate_groups": "*i32",
    "chunk_counts": "*i32", "masses": "*fp32",
}  # fmt: skip


def job(name: str, constants: dict, options: dict) -> Job:
    """A kernel with its constexpr values; pointers by the names of its arguments, all others are numbers."""
    constants = dict.fromkeys({"OVERLAP"} & {*getattr(select_kernels, name).arg_names}, False) | constants
    arguments = [one for one in getattr(select_kernels, name).arg_names if one not in constants]
    types_of = {one: POINTERS.get(one, "i32") for one in arguments}
    return Job("eps_cuda.kernels.select", name, types_of, constants, options)


SIZES = {
    "S": 1, "SINK_RECENT": True,
    **{name: getattr(select_kernels, name) for name in ("CHUNK", "BINS", "COUNTERS", "STATE", "SCALES")},
}  # fmt: skip
AT_ONCE = {"CANDIDATES": select_kernels.CANDIDATES}
JOBS = {
    "bins": job("_count_bins", SIZES | {"SAMPLE": select_kernels.SAMPLE}, {}),
    "bins of finite": job("_count_bins", SIZES | {"SAMPLE": select_kernels.SAMPLE, "SINK_RECENT": False}, {}),
    "threshold": job("_find_threshold", SIZES | AT_ONCE, {}),
    "list": job("_list", SIZES | AT_ONCE, {}),
    "compact": job("_compact", {"LIST": 4096}, {"num_warps": 8}),
}  # fmt: skip


def test_kernels_compile_for_gpus() -> None:
    """For A100, H100 and MI300: what the interpreter does not show."""
    for name, compiled in zip(JOBS, compile_ahead(list(JOBS.values()), TARGETS), strict=True):
        for made in compiled:
            print(f"{name:>18} {made.target:>12} {made.registers:4} registers {made.spilled_bytes:5} B spilled "
                  f"{made.shared_bytes:6} B shared")  # fmt: skip
