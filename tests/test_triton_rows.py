"""What is Triton's own in its kernel for several rows of a sequence: what it reads and how often, and what compilers
make of it. Values are tested with all kernels, in test_rows.py."""

import numpy as np
import pytest
from kernel_scenes import Case, Filled, query
from test_triton_attend import DTYPES, TRITON, check_compiled, pools
from triton_aot import Job, job
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
    held = {name: (x.data_ptr(), x.data_ptr() + x.nbytes) for name, x in (("k", one.cache.k[0]), ("v", one.cache.v[0]))}
    loaded: dict[str, list[np.ndarray]] = {"k": [], "v": []}

    def counted(self, ptrs, mask, *rest):
        for name, (start, end) in held.items():
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
    held = pools(dtype, bits, max(64, size), head_dim)
    constants = held["constants"] | {
        "HKV": 8, "R": repeat, "D": head_dim, "U": max(64, size), "S": size, "VISIT": asked,
        "WIDE_Q": dtype != "fp32" and dtype != q_dtype,
        **rows_module.block_constants(repeat, head_dim, size, DTYPES[dtype], DTYPES[q_dtype]),
    }  # fmt: skip
    absent = held["absent"] + ([] if asked else ["selected_mask", "part_selected"])
    options = {"num_warps": rows_module.NUM_WARPS, "num_stages": attend_module.STAGES[vendor]}
    return job(rows_module.rows_split_kernel, constants, held["types"] | {"q": f"*{q_dtype}"}, absent, **options)


def test_compiles_for_gpus_that_need_not_be_here():
    """With at most two registers spilled."""
    shapes = [
        ("bf16", "bf16", 128, 4, 2, True), ("fp16", "fp16", 256, 4, 16, False),
        ("bf16", "bf16", 128, 8, 16, False, (4, 4)), ("bf16", "bf16", 128, 4, 2, False),
        ("bf16", "bf16", 128, 8, 128, True), ("bf16", "bf16", 128, 4, 2, True, (8, 8)),
        ("bf16", "fp32", 128, 8, 2, False), ("fp32", "fp32", 128, 4, 2, True),
        ("fp16", "fp32", 64, 8, 2, False, (8, 4)), ("fp32", "fp32", 128, 4, 2, True, (16, 4)),
    ]  # fmt: skip
    check_compiled(lambda vendor: [split_job(vendor, *shape) for shape in shapes], [], 8)
