"""What is Triton's own in its kernel for several rows of a sequence: what it reads and how often, and what compilers
make of it. Values are tested with all kernels, in test_rows.py."""

import numpy as np
import pytest
from kernel_scenes import Case, Filled, query
from test_triton_attend import DTYPES, TRITON, pool_constants, pool_types
from triton_aot import TARGETS, Job, compile_ahead
from triton_interpreter import DEVICE

from eps_cuda.kernels import attend as attend_module
from eps_cuda.kernels import rows as rows_module


@pytest.mark.skipif(DEVICE != "cpu", reason="only the interpreter says what is loaded")
@pytest.mark.parametrize("rows, passes", [((9, 4), 1), ((17, 4), 2)])
def test_rows_read_what_one_row_reads(monkeypatch, rows, passes):
    """Each element of K and V once for 64 queries; here, with 36 or 68 of them."""
    from triton.runtime.interpreter import InterpreterBuilder

    case = Case((600, 45), rows, num_heads=8, head_dim=64, dtype="bfloat16", block_size=64)
    one, load = Filled(TRITON, "cpu", case, np.random.default_rng(1)), InterpreterBuilder.create_masked_load
    pools = {
        name: (x.data_ptr(), x.data_ptr() + x.nbytes) for name, x in (("k", one.cache.k[0]), ("v", one.cache.v[0]))
    }
    loaded: dict[str, list[np.ndarray]] = {"k": [], "v": []}

    def counted(self, ptrs, mask, *rest):
        for name, (start, end) in pools.items():
            inside = ptrs.data[mask.data & (ptrs.data >= start) & (ptrs.data < end)]
            loaded[name].append(inside)
        return load(self, ptrs, mask, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", counted)
    TRITON.attend_rows(one.cache, 0, TRITON.from_numpy(query(case, one.rng), "bfloat16", "cpu"), one.rows())
    second = min(rows[0] - 16, 1) if passes == 2 else 0  # only sequence 0 has queries for a second program
    for name in loaded:
        addresses = np.concatenate(loaded[name])
        elements = [length * case.num_kv_heads * case.head_dim for length in case.lengths]
        assert len(np.unique(addresses)) == sum(elements)
        assert len(addresses) == sum(elements) + second * elements[0]


def split_job(
    vendor: str, dtype: str, q_dtype: str, head_dim: int, repeat: int, size: int, asked: bool,
    bits: tuple[int, int] = (16, 16),
) -> Job:  # fmt: skip
    sizes = rows_module.blocks(repeat, head_dim, size, DTYPES[dtype], DTYPES[q_dtype])
    types = {
        "q": f"*{q_dtype}", **pool_types(dtype, bits), "table": "*i32", "lengths": "*i32", "starts": "*i32",
        "part_out": "*fp32", "part_lse": "*fp32", "scale": "fp32", "table_width": "i32", "num_groups": "i32",
        **({"selected_mask": "*u8", "part_selected": "*fp32"} if asked else {}),
    }  # fmt: skip
    unit = max(64, size)
    constants = {
        "HKV": 8, "R": repeat, "D": head_dim, "U": unit, "S": size, "VISIT": asked,
        "WIDE_Q": dtype != "fp32" and dtype != q_dtype, **rows_module.constants(sizes, repeat, head_dim, size),
        **pool_constants(dtype, bits, unit, head_dim),
    }  # fmt: skip
    options = {"num_warps": sizes.num_warps, "num_stages": attend_module.STAGES[vendor]}
    return Job("eps_cuda.kernels.rows", "rows_split_kernel", types, constants, options)


def test_compiles_for_gpus_that_need_not_be_here():
    """With at most two registers spilled; with 16-byte copies into shared memory, through the tensor cores."""
    shapes = [
        ("bf16", "bf16", 128, 4, 2, False), ("bf16", "bf16", 128, 4, 2, True), ("bf16", "bf16", 128, 8, 128, True),
        ("bf16", "fp32", 128, 8, 2, False), ("fp16", "fp16", 256, 4, 16, False), ("fp32", "fp32", 128, 4, 2, True),
        ("bf16", "bf16", 128, 4, 2, True, (8, 8)), ("bf16", "bf16", 128, 8, 16, False, (4, 4)),
        ("fp16", "fp32", 64, 8, 2, False, (8, 4)), ("fp32", "fp32", 128, 4, 2, True, (16, 4)),
    ]  # fmt: skip
    for vendor in ("cuda", "hip"):
        jobs = [split_job(vendor, *shape) for shape in shapes]
        targets = tuple(target for target in TARGETS if target[0] == vendor)
        most_bytes = (96 if vendor == "cuda" else 64) * 1024  # of the smallest GPUs
        for job, results in zip(jobs, compile_ahead(jobs, targets), strict=True):
            for one in results:
                what = f"{job.constants} for {one.target}"
                print(f"{what}: {one.registers} registers, {one.spilled_bytes} B spilled, {one.shared_bytes} B shared")
                assert one.spilled_bytes <= 8 and one.shared_bytes <= most_bytes, what
                if vendor == "cuda":
                    narrow = one.text.count("cp.async.ca")  # codes of small blocks are dealt in smaller runs
                    if (job.constants["K_BITS"], job.constants["V_BITS"]) == (16, 16):
                        assert "cp.async.cg.shared.global" in one.text and not narrow, f"{what}: not in runs of 16 B"
                    assert "cp.async.c" in one.text, f"{what}: nothing runs ahead"
                assert ("mma" if vendor == "cuda" else "mfma") in one.text or job.constants["VALUES"] == "fp32", what
