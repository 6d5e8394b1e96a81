"""Tests of the Triton kernels that choose groups: rows of many runs and many candidates, and what compilers make of
them. Lists are compared with the reference's in test_kernel_select.py."""

import pytest
import triton_interpreter  # noqa: F401  before any module that holds kernels
from test_kernel_select import TOPK, check_topk
from test_triton_attend import DEVICE, TRITON
from triton_aot import compile_ahead, job

from eps_cuda.kernels import select as select_kernels
from eps_cuda.kernels import thresholds


@pytest.mark.parametrize("name", TOPK)
def test_rows_of_many_runs_and_many_candidates(name, monkeypatch) -> None:
    for size, value in {"CHUNK": 128, "SAMPLE": 32, "BINS": 16, "CANDIDATES": 32}.items():
        monkeypatch.setattr(thresholds, size, value)
    check_topk(TRITON, DEVICE, **TOPK[name])


SIZES = {
    "S": 1, "SINK_RECENT": True, "HIP": False,
    **{name: getattr(thresholds, name) for name in ("CHUNK", "BINS", "COUNTERS", "STATE", "SCALES")},
}  # fmt: skip
COUNTED, AT_ONCE = ({name: getattr(thresholds, name)} for name in ("SAMPLE", "CANDIDATES"))
JOBS = {
    "bins": job(thresholds._count_bins, SIZES | COUNTED | {"ALWAYS": True}),
    "bins of finite": job(thresholds._count_bins, SIZES | COUNTED | {"ALWAYS": False, "SINK_RECENT": False}),
    "threshold": job(thresholds._find_threshold, SIZES | AT_ONCE),
    "list": job(select_kernels._list, SIZES | AT_ONCE),
    "compact": job(select_kernels._compact, {"LIST": 4096}, num_warps=8),
}


def test_kernels_compile_for_gpus() -> None:
    """For A100, H100 and MI300: what the interpreter does not show."""
    for name, compiled in zip(JOBS, compile_ahead(list(JOBS.values())), strict=True):
        print(name, *compiled, sep="\n  ")
