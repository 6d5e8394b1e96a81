"""What is Triton's own in its attention kernels: splits, strides, and what the compilers make of them.
Values are tested with all kernels, in test_kernel_attention.py."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import bound
from kernel_scenes import Case, Filled, check_state, query, selection_of
from triton_aot import TARGETS, Job, compile_ahead, job
from triton_interpreter import DEVICE

from eps_core import reference
from eps_cuda.kernels import attend as attend_module

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


# What compilers make of them


def pools(dtype: str, bits: tuple[int, int], unit: int, head_dim: int) -> dict[str, Any]:
    """Arguments of `job` for K and V, of 8 kv heads: `arguments.pool_constants` with a dtype by its name."""
    codes = {16: f"*{dtype}", 8: "*i8", 4: "*u8"}
    row = head_dim if bits == (16, 16) else 1
    strides = {"UNIT_STRIDE": 8 * unit * row, "HEAD_STRIDE": unit * row, "TOKEN_STRIDE": row}
    return {
        "constants": {**strides, "K_BITS": bits[0], "V_BITS": bits[1], "VALUES": dtype},
        "types": {"k": codes[bits[0]], "v": codes[bits[1]], "scale": "fp32"},
        "absent": [name for name, one in zip(("k_scale", "v_scale"), bits, strict=True) if one == 16],
    }


def split_job(
    vendor: str, dtype: str, head_dim: int, repeat: int, size: int, sparse: bool, q_dtype: str,
    bits: tuple[int, int] = (16, 16),
) -> Job:  # fmt: skip
    chosen = attend_module.plan(8, 4096, head_dim, DTYPES[dtype], 132, None, codes=bits != (16, 16))
    held = pools(dtype, bits, max(64, size), head_dim)
    constants = held["constants"] | {
        "HKV": 8, "R": repeat, "D": head_dim, "U": max(64, size), "S": size, "SPARSE": sparse,
        "WIDE_Q": dtype != "fp32" and dtype != q_dtype, **attend_module.padding(repeat, head_dim),
        "BLOCK_N": chosen.block_tokens,
    }  # fmt: skip
    types = held["types"] | {"q": f"*{q_dtype}", "groups": "*i32"}
    absent = held["absent"] + ([] if sparse else ["groups", "counts"])
    options = {"num_warps": chosen.num_warps, "num_stages": attend_module.STAGES[vendor]}
    return job(attend_module.attend_split_kernel, constants, types, absent, **options)


def merge_job(head_dim: int) -> Job:
    block = {"BLOCK_S": attend_module.MERGE_SPLITS, "BLOCK_D": attend_module.merge_channels(head_dim)}
    return job(attend_module.merge_kernel, {"D": head_dim, **block}, {"out": "*bf16"})


# most bytes of shared memory, the smallest of all (consumer GPUs that run sm_80 code have 99 KiB), and what multiplies
LIMITS = {"cuda": (96 * 1024, "mma"), "hip": (64 * 1024, "mfma")}


def check_compiled(splits_for: Callable[[str], list[Job]], others: list[Job], most_spilled: int) -> None:
    """Of kernels for each vendor: what is spilled, and of those that read K and V also that 16-bit ones come by 16-byte
    copies into shared memory, and go through the tensor cores. The first two of these are compiled for every target,
    each other for one of them, in turn."""
    for number, target in enumerate(TARGETS):
        vendor = target[0]
        most_bytes, product = LIMITS[vendor]
        splits = [one for i, one in enumerate(splits_for(vendor)) if i < 2 or i % len(TARGETS) == number]
        jobs = [*splits, *others]
        for one, (made,) in zip(jobs, compile_ahead(jobs, (target,)), strict=True):
            what = f"{one.kernel} {one.constants} for {made}"
            print(what)
            assert made.spilled_bytes <= most_spilled and made.shared_bytes <= most_bytes, what
            if one not in splits:
                continue
            if vendor == "cuda":
                narrow = made.text.count("cp.async.ca")  # codes of small blocks are dealt in smaller runs
                if (one.constants["K_BITS"], one.constants["V_BITS"]) == (16, 16):
                    assert "cp.async.cg.shared.global" in made.text and not narrow, f"{what}: not in runs of 16 B"
                assert "cp.async.c" in made.text, f"{what}: nothing runs ahead"
            assert product in made.text or one.constants["VALUES"] == "fp32", what


def test_compiles_for_gpus_that_need_not_be_here():
    shapes = [
        ("bf16", 128, 4, 2, True, "fp32"), ("fp16", 256, 4, 16, True, "fp16"),
        ("bf16", 128, 4, 16, False, "bf16", (4, 4)), ("fp16", 64, 8, 2, True, "fp32", (8, 4)),
        ("bf16", 128, 4, 16, False, "bf16"), ("fp32", 128, 4, 2, True, "fp32"),
        ("bf16", 128, 4, 2, True, "bf16", (8, 8)), ("fp32", 128, 4, 2, True, "fp32", (4, 8)),
        ("bf16", 80, 16, 2, True, "bf16"), ("bf16", 128, 4, 2, True, "bf16", (16, 8)),
    ]  # fmt: skip
    check_compiled(lambda vendor: [split_job(vendor, *shape) for shape in shapes], [merge_job(80)], 0)
