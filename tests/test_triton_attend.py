"""What is Triton's own in its attention kernels: splits, strides, the merge with a correction, and what the compilers
make of them. Values are tested with all kernels, in test_kernel_attention.py."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import bound
from kernel_scenes import Case, Filled, check_state, query, selection_of
from test_conformance import Case as CacheCase
from test_conformance import FilledCase, eps
from triton_aot import TARGETS, Job, compile_ahead
from triton_interpreter import DEVICE

import eps_cuda
from eps_core import reference
from eps_core.attention.protocol import Scores
from eps_cuda.kernels import attend as attend_module
from eps_cuda.kernels import correction as tail_module

TRITON = bound("cuda", "triton")
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class Scene:
    """Arguments of `attend_groups` of one call; `attended` changes some of them."""

    def __init__(self, case: Case) -> None:
        self.one = Filled(TRITON, DEVICE, case, np.random.default_rng(1))
        self.q = query(case, self.one.rng, len(case.lengths))
        native = torch.from_numpy(self.q).to(DEVICE)
        self.listed = self.one.listed()
        self.selection = selection_of(native, self.listed)
        table, lengths = (torch.from_numpy(x.astype(np.int32)).to(DEVICE) for x in (self.one.table, self.one.lengths))
        self.arguments = {
            "q": native, "k": self.one.cache.k[0], "v": self.one.cache.v[0], "table": table, "lengths": lengths,
            "groups": self.selection.groups, "counts": self.selection.counts,
        }  # fmt: skip

    def attended(self, num_splits: int | None = 3, **changed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        arguments = (self.arguments | changed).values()
        return attend_module.attend_groups(*arguments, group_size=self.one.case.group_size, num_splits=num_splits)


@pytest.mark.parametrize("bits", [(16, 16), (8, 8)], ids=str)
def test_splits_change_rounding_alone(bits):
    scene = Scene(Case((191, 150), num_kv_heads=1, share=0.9, bits=bits))
    host = selection_of(scene.q, scene.listed)
    want = reference.attend(scene.one.judge, 0, scene.q.astype(np.float64), scene.one.plan, host)
    for splits in (1, 2, 33):
        got = [x.cpu().numpy() for x in scene.attended(splits)]
        check_state(scene.one.case, scene.q, "float32", got, want)


def test_lists_may_come_in_strides_and_tables_may_not():
    scene = Scene(Case((61, 30)))
    q, k, table, groups = (scene.arguments[name] for name in ("q", "k", "table", "groups"))
    padded = torch.nn.functional.pad(groups, (0, 3), value=-1)[..., :-3]
    strided = q.transpose(1, 2).contiguous().transpose(1, 2)
    assert not padded.is_contiguous() and not strided.is_contiguous()
    for got, same in zip(scene.attended(groups=padded, q=strided), scene.attended(), strict=True):
        assert torch.equal(got, same)
    codes = Scene(Case((61, 30), head_dim=64, dtype="bfloat16", bits=(8, 8)))
    for name in ("codes", "scale"):
        pool = codes.arguments["v"]
        cut = getattr(pool, name).repeat(2, *[1] * (getattr(pool, name).ndim - 1))[::2]
        with pytest.raises(ValueError, match="is not contiguous"):
            codes.attended(v=replace(pool, **{name: cut}))
    with pytest.raises(ValueError, match="must agree"):
        codes.attended(q=codes.arguments["q"][..., :32])
    for match, wrong in (
        ("lie alike", {"k": k.transpose(2, 3).contiguous().transpose(2, 3)}),
        ("is not contiguous", {"table": table.repeat(1, 2)[:, : table.shape[1]]}),
        ("must agree", {"q": q[..., :8]}),
        ("multiple", {"q": q[:, :3]}),
    ):
        with pytest.raises(ValueError, match=match):
            scene.attended(**wrong)


def test_plans_fill_large_gpus_from_static_sizes_alone():
    for processors in (108, 132, 304):
        dense = attend_module.plan(8, 32768, 128, torch.bfloat16, processors, None)
        assert 2 * processors <= 8 * dense.num_splits < 2 * processors + 8
    few = attend_module.plan(8, 100, 128, torch.bfloat16, 132, None)
    assert few.num_splits == 2 and attend_module.plan(8, 0, 128, torch.bfloat16, 132, None).num_splits == 1
    assert attend_module.plan(8, 32768, 128, torch.bfloat16, 132, 5).num_splits == 5


@pytest.mark.parametrize("share", [0.3, 1.0])
@pytest.mark.parametrize("largest", [None, 1e38])
def test_one_kernel_merges_the_correction(share, largest):
    """As `merge` does; where nothing is skipped, bit for bit what was read; the largest estimates do not overflow."""
    case = CacheCase((640, 64, 65), eps("meanstd", group_size=2, block_size=4, correction_tokens=4), 8, chunk=640)
    one = FilledCase(TRITON, DEVICE, case)
    scores = TRITON.score(one.cache, 0, one.native, one.plan)
    estimate = scores.estimate if largest is None else torch.where(scores.estimate.isfinite(), largest, scores.estimate)
    listed = (np.random.default_rng(2).random(tuple(estimate.shape)) < share) & one.plan.inside[:, None]
    selection, inner = selection_of(one.native, listed), one.cache.correction
    state = TRITON.attend(one.cache, 0, one.native, one.plan, selection)
    scores = Scores(estimate, None, None, scores.num_missing, kernels="triton")
    want = eps_cuda.merge(state, TRITON.attend_correction(one.cache, 0, one.plan, scores, selection, state[1]))
    table, lengths = (torch.from_numpy(x.astype(np.int32)).to(DEVICE) for x in (one.table, one.lengths))
    arguments = (one.native, one.cache.k[0], one.cache.v[0], table, lengths, selection.groups, selection.counts)
    out, lse = tail_module.attend_with_correction(
        *arguments, estimate,
        torch.from_numpy(listed.astype(np.uint8)).to(DEVICE), inner.summaries[0]["mean"],
        inner.summaries[0]["mean_scale"], inner.valid[0], group_size=2, correction_tokens=4, num_splits=2,
    )  # fmt: skip
    assert torch.isfinite(out).all()
    torch.testing.assert_close(out, want[0], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(lse, state[1], rtol=1e-5, atol=1e-4)  # of what was read
    if share == 1:
        read = attend_module.attend_groups(*arguments, group_size=2, num_splits=2)
        assert torch.equal(out, read[0])


# What compilers make of them


def pool_types(dtype: str, bits: tuple[int, int]) -> dict[str, str]:
    """Of K, V and their scales."""
    codes = {16: f"*{dtype}", 8: "*i8", 4: "*u8"}
    scales = {name: "*fp16" for name, one in zip(("k_scale", "v_scale"), bits, strict=True) if one != 16}
    return {"k": codes[bits[0]], "v": codes[bits[1]], **scales}


def pool_constants(dtype: str, bits: tuple[int, int], unit: int, head_dim: int) -> dict[str, int | str]:
    """Of pools of 8 kv heads: `arguments.pool_constants` with a dtype by its name."""
    row = head_dim if bits == (16, 16) else 1
    strides = {"UNIT_STRIDE": 8 * unit * row, "HEAD_STRIDE": unit * row, "TOKEN_STRIDE": row}
    return {**strides, "K_BITS": bits[0], "V_BITS": bits[1], "VALUES": dtype}


def split_job(
    vendor: str, dtype: str, head_dim: int, repeat: int, size: int, sparse: bool, q_dtype: str,
    bits: tuple[int, int] = (16, 16),
) -> Job:  # fmt: skip
    chosen = attend_module.plan(8, 4096, head_dim, DTYPES[dtype], 132, None, codes=bits != (16, 16))
    lists = {"groups": "*i32", "counts": "*i32"} if sparse else {}
    types = {
        "q": f"*{q_dtype}", **pool_types(dtype, bits), "table": "*i32", "lengths": "*i32", **lists,
        "part_out": "*fp32", "part_lse": "*fp32", "scale": "fp32", "list_width": "i32", "table_width": "i32",
    }  # fmt: skip
    constants = {
        "HKV": 8, "R": repeat, "D": head_dim, "U": max(64, size), "S": size, "SPARSE": sparse,
        "WIDE_Q": dtype != "fp32" and dtype != q_dtype, **attend_module.padding(repeat, head_dim),
        "BLOCK_N": chosen.block_tokens, **pool_constants(dtype, bits, max(64, size), head_dim),
    }  # fmt: skip
    options = {"num_warps": chosen.num_warps, "num_stages": attend_module.STAGES[vendor]}
    return Job("eps_cuda.kernels.attend", "attend_split_kernel", types, constants, options)


def merge_job(head_dim: int) -> Job:
    types = {"part_out": "*fp32", "part_lse": "*fp32", "out": "*bf16", "lse": "*fp32", "num_splits": "i32"}
    block = {"BLOCK_S": attend_module.MERGE_SPLITS, "BLOCK_D": attend_module.merge_channels(head_dim)}
    return Job("eps_cuda.kernels.attend", "merge_kernel", types, {"D": head_dim, **block})


def tail_jobs(head_dim: int, per_correction: int) -> list[Job]:
    pad, block = tail_module.correction_blocks(per_correction)
    inputs = {
        "estimate": "*fp32",
        "selected_mask": "*u8",
        "mean": "*i8",
        "mean_scale": "*fp16",
        "correction_valid": "*u8",
    }
    parts = {"part_out": "*fp32", "part_lse": "*fp32", "part_seen": "*fp32"}
    split = Job(
        "eps_cuda.kernels.correction",
        "correction_split_kernel",
        inputs | parts | {"table": "*i32", "lengths": "*i32", "num_corrections": "i32", "table_width": "i32"},
        {
            "HKV": 8, "D": head_dim, "TAIL": 64, "PER_UNIT": 1, "PER_CORRECTION": per_correction,
            "GROUPS_PAD": pad, "D_PAD": max(16, 1 << (head_dim - 1).bit_length()), "BLOCK_T": block,
        },
    )  # fmt: skip
    merged = {"part_tail": "*fp32", "part_tail_lse": "*fp32", "part_seen": "*fp32", "lse": "*fp32"}
    splits = {"num_splits": "i32", "num_correction_splits": "i32"}
    fixed = {
        "R": 4, "D": head_dim, "BLOCK_S": attend_module.MERGE_SPLITS, "BLOCK_D": attend_module.merge_channels(head_dim)
    }  # fmt: skip
    both = {"part_out": "*fp32", "part_lse": "*fp32", "out": "*bf16"}
    alone = {"out": "*fp32", "correction_lse": "*fp32"}
    return [
        split,
        Job("eps_cuda.kernels.correction", "finish_kernel", merged | splits | both, {**fixed, "ALONE": False}),
        Job("eps_cuda.kernels.correction", "finish_kernel", merged | splits | alone, {**fixed, "ALONE": True}),
    ]


def test_compiles_for_gpus_that_need_not_be_here():
    """Without spills; a decode of 16-bit K and V with 16-byte copies into shared memory, through the tensor cores."""
    shapes = [
        ("bf16", 128, 4, 2, True, "fp32"), ("bf16", 80, 16, 2, True, "bf16"), ("fp16", 256, 4, 16, True, "fp16"),
        ("bf16", 128, 4, 16, False, "bf16"), ("fp32", 128, 4, 2, True, "fp32"),
        ("bf16", 128, 4, 2, True, "bf16", (8, 8)), ("bf16", 128, 4, 16, False, "bf16", (4, 4)),
        ("fp16", 64, 8, 2, True, "fp32", (8, 4)), ("bf16", 128, 4, 2, True, "bf16", (16, 8)),
        ("fp32", 128, 4, 2, True, "fp32", (4, 8)),
    ]  # fmt: skip
    for vendor in ("cuda", "hip"):
        splits = [split_job(vendor, *shape) for shape in shapes]
        jobs = [*splits, merge_job(80), *tail_jobs(128, 32)]
        targets = tuple(target for target in TARGETS if target[0] == vendor)
        # the smallest of all: consumer GPUs that run sm_80's code have 99 KiB
        most_bytes = (96 if vendor == "cuda" else 64) * 1024
        for job, results in zip(jobs, compile_ahead(jobs, targets), strict=True):
            for one in results:
                what = f"{job.kernel} {job.constants} for {one.target}"
                print(f"{what}: {one.registers} registers, {one.spilled_bytes} B spilled, {one.shared_bytes} B shared")
                assert one.spilled_bytes == 0 and one.shared_bytes <= most_bytes, what
                if job not in splits:
                    continue
                if vendor == "cuda":
                    narrow = one.text.count("cp.async.ca")  # codes of small blocks are dealt in smaller runs
                    if (job.constants["K_BITS"], job.constants["V_BITS"]) == (16, 16):
                        assert "cp.async.cg.shared.global" in one.text and not narrow, f"{what}: not in runs of 16 B"
                    assert "cp.async.c" in one.text, f"{what}: nothing runs ahead"
                assert ("mma" if vendor == "cuda" else "mfma") in one.text or job.constants["VALUES"] == "fp32", what
