"""Attention over the best groups where they lie is attention over their list: with ties, with nothing to take, in one
run and in many. Lists are compared with the reference's in test_kernel_select.py, attention in
test_kernel_attention.py."""

import re
import sys

import numpy as np
import pytest
import torch
from test_kernel_select import TOPK, estimates
from test_triton_attend import DTYPES, check_compiled, pools
from test_triton_write import start_job
from triton_aot import TARGETS, Job, compile_ahead, job
from triton_interpreter import DEVICE

import eps_cuda
from eps_core.attention.protocol import Scores, Selection
from eps_cuda.kernels import attend as attend_module
from eps_cuda.kernels import attend_best as best
from eps_cuda.kernels import select, thresholds

HEAD_DIM = 16


def on(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(DEVICE)


def scene(lengths=(701, 400), kv_heads=2, size=2, kind="gauss", share=0.1, first=4, last=64, min_context=0, spare=0):
    """(q, K, V, table, lengths, estimate, wanted, what is always selected) of a row of cases of `check_topk`."""
    rng, unit = np.random.default_rng(len(kind) + size), 16 * size
    lengths = np.array(lengths, np.int32)
    ends = -(-lengths // size)
    units = -(-(int(ends.max()) + spare) // 16)
    estimate = estimates(kind, (len(lengths), kv_heads, units * 16), ends, rng)
    table = rng.permutation(len(lengths) * units).astype(np.int32).reshape(len(lengths), units)
    k, v = rng.normal(size=(2, table.size, kv_heads, unit, HEAD_DIM)).astype(np.float32)
    # nothing past a sequence's end may be read
    for b, length in enumerate(lengths):
        for array in (k, v):
            flat = array[table[b]].transpose(1, 0, 2, 3).reshape(kv_heads, -1, HEAD_DIM)
            flat[:, length:] = np.nan
            array[table[b]] = flat.reshape(kv_heads, units, unit, HEAD_DIM).transpose(1, 0, 2, 3)
    q = rng.normal(size=(len(lengths), 3 * kv_heads, HEAD_DIM)).astype(np.float32)
    wanted = np.maximum(ends * share if share <= 1 else np.minimum(share // size, ends), 1).astype(np.int32)
    sinks = min(first, 2**31 - 1), min(last, 2**31 - 1), min_context
    return [on(one) for one in (q, k, v, table, lengths, estimate, wanted)], (size, *sinks)


def check(settings: dict, dtype=torch.float32, q_dtype=torch.float32, atol=2e-5) -> None:
    (q, k, v, table, lengths, estimate, wanted), selectable = scene(**settings)
    q, k, v = q.to(q_dtype), k.to(dtype), v.to(dtype)
    width = max(int(wanted.max()), 1)
    names = "group_size", "num_sink_tokens", "num_recent_tokens", "min_context"
    listed, counts, mask = select.select_topk(
        estimate, wanted, lengths, **dict(zip(names, selectable, strict=True)), width=width
    )
    want = attend_module.attend_groups(q, k, v, table, lengths, listed, counts, group_size=selectable[0])
    found = thresholds.find_thresholds(estimate, lengths, wanted, width, selectable)
    out, lse, skipped = best.attend_best(q, k, v, table, lengths, estimate, found, with_lse=True)
    for got, right in zip((out, lse), want, strict=True):
        torch.testing.assert_close(got, right, rtol=0, atol=atol)
    one, _, other = best.attend_best(q, k, v, table, lengths, estimate, thresholds.find_thresholds(
        estimate, lengths, wanted, width, selectable))  # fmt: skip
    assert torch.equal(one, out) and torch.equal(other, skipped)
    scores = Scores(estimate, None, None, np.zeros(len(lengths), np.int64))
    selection = Selection(listed, counts, wanted.cpu().numpy(), wanted.cpu().numpy(), selected_mask=mask.bool())
    torch.testing.assert_close(skipped, eps_cuda.skipped_mass(scores, selection), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", TOPK)
def test_attends_to_what_would_be_listed(name, monkeypatch) -> None:
    monkeypatch.setattr(best, "MERGED_RUNS", 4)
    for size, value in {"CHUNK": 128, "SAMPLE": 32, "BINS": 16, "CANDIDATES": 32}.items():
        monkeypatch.setattr(thresholds, size, value)
    for run, most_splits in ((1024, 64), (64, 64), (64, 3)):
        monkeypatch.setattr(best, "RUN_GROUPS", run)
        monkeypatch.setattr(best, "MOST_SPLITS", most_splits)
        check(TOPK[name])


@pytest.mark.parametrize("head_dim", [80, 128])
@pytest.mark.parametrize("q_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_in_other_types_and_widths(q_dtype, head_dim, monkeypatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "HEAD_DIM", head_dim)
    monkeypatch.setattr(best, "RUN_GROUPS", 64)
    check(TOPK["usual"], torch.bfloat16, q_dtype, 1e-5 if q_dtype == torch.float32 else 0.01)


@pytest.mark.parametrize(("run", "chunk"), [(1024, 2048), (64, 128)])
def test_tables_wider_than_a_sequence_and_sequences_of_nothing_change_nothing(run, chunk, monkeypatch) -> None:
    """Captured steps have one table for all lengths: kernels read nothing past an end, and padding is empty."""
    monkeypatch.setattr(best, "RUN_GROUPS", run)
    monkeypatch.setattr(thresholds, "CHUNK", chunk)
    (q, k, v, table, lengths, estimate, wanted), selectable = scene(spare=300)
    ends = -(-lengths // selectable[0])
    past = torch.arange(estimate.shape[2]) >= ends[:, None, None]
    read = []
    for fill, kept in ((-float("inf"), lengths), (1e9, lengths), (1e9, lengths * torch.tensor([1, 0]))):
        one = torch.where(past, fill, estimate)
        found = thresholds.find_thresholds(one, kept.int(), wanted, 4000, selectable)
        read.append(best.attend_best(q, k, v, table, kept.int(), one, found, with_lse=True))
    for first, second, third in zip(*read, strict=True):
        assert torch.equal(first, second) and torch.equal(first[0], third[0])
    out, lse, skipped = (part[1] for part in read[2])
    assert (out == 0).all() and (lse == -float("inf")).all() and (skipped == 0).all()


def test_all_that_is_always_selected_is_read_where_the_host_does_not_know_how_much_that_is() -> None:
    (q, k, v, table, lengths, estimate, wanted), selectable = scene()
    estimate[estimate == float("inf")] = 0
    estimate[0, 1, 100:140] = float("inf")  # without a summary
    read = {}
    for name, wish, always in (("few", wanted * 0 + 3, True), ("cut off", wanted * 0 + 3, False), ("all", None, True)):
        number = torch.tensor([2**20, 2**20], dtype=torch.int32) if wish is None else wish
        state = torch.full((4, thresholds.STATE), -1, dtype=torch.int32)
        out, skipped = torch.zeros(q.shape, dtype=torch.bfloat16), torch.zeros(2, 2)
        found = thresholds.find_thresholds(estimate, lengths, number, 2**20, selectable, state=state, always=always)
        assert found.state is state
        read[name] = best.attend_best(q, k, v, table, lengths, estimate, found, out=out, skipped=skipped)
        assert read[name][0] is out and read[name][2] is skipped
        read[name] = out, skipped, state[:, 2].tolist(), state[:, 4].tolist()
    size, sinks, recent, _ = selectable
    ends = -(-lengths // size)
    selected = (sinks // size + ends - (lengths - recent) // size).tolist()
    always = [selected[0], selected[0] + 40, selected[1], selected[1]]
    assert read["few"][2] == read["few"][3] == always and read["cut off"][2] == [3] * 4
    assert read["all"][2] == ends.repeat_interleave(2).tolist() and (read["all"][1] == 0).all()
    listed = select.select_topk(
        estimate[:1, 1:].contiguous(), torch.tensor([always[1]], dtype=torch.int32), lengths[:1], group_size=size,
        num_sink_tokens=sinks, num_recent_tokens=recent, min_context=0, width=2**10,
    )  # fmt: skip
    heads = slice(3, 6)  # of the second kv head
    want, _ = attend_module.attend_groups(
        q[:1, heads].contiguous(), k[:, 1:].contiguous(), v[:, 1:].contiguous(), table[:1], lengths[:1], *listed[:2],
        group_size=size,
    )  # fmt: skip
    torch.testing.assert_close(read["few"][0][:1, heads].float(), want, rtol=0, atol=0.01)


def test_programs_fill_large_gpus_and_take_whole_runs() -> None:
    for rows, groups in ((8, 32768), (32, 65536), (8, 131072), (64, 131072), (1, 1), (8, 1025)):
        runs_each, splits = best._split(rows, groups, 132)
        assert (splits - 1) * runs_each < best.num_runs(groups) <= splits * runs_each
        assert rows * splits >= 256 or runs_each == 1
        assert splits <= best.MOST_SPLITS


def best_job(vendor: str, dtype: str, head_dim: int, repeat: int, size: int, q_dtype: str) -> Job:
    chosen = attend_module.plan(8, 4096, head_dim, DTYPES[dtype], 132, None)
    held = pools(dtype, (16, 16), max(64, size), head_dim)
    constants = held["constants"] | {
        "HKV": 8, "R": repeat, "D": head_dim, "U": max(64, size), "S": size,
        "WIDE_Q": dtype != "fp32" and dtype != q_dtype, **attend_module.padding(repeat, head_dim),
        "BLOCK_N": chosen.block_tokens, "RUN": best.RUN_GROUPS, "PIECE": best.PIECE_GROUPS, "SINK_RECENT": True,
        "R_POWER": repeat, "BLOCK_S": max(best.MERGED // (repeat * head_dim), 1), "RUNS": best.MERGED_RUNS,
        "HIP": vendor == "hip",
        **{name: getattr(thresholds, name) for name in ("BINS", "COUNTERS", "STATE", "SCALES")},
    }  # fmt: skip
    types = held["types"] | {"q": f"*{q_dtype}", "out": f"*{q_dtype}"}
    options = {"num_warps": chosen.num_warps, "num_stages": attend_module.STAGES[vendor]}
    return job(best.attend_best_kernel, constants, types, [], **options)


def test_compiles_for_gpus_that_need_not_be_here() -> None:
    shapes = [
        ("bf16", 128, 4, 1, "bf16"), ("bf16", 64, 8, 2, "fp32"), ("fp16", 256, 4, 16, "fp16"),
        ("bf16", 128, 16, 1, "bf16"), ("fp32", 128, 4, 2, "fp32"),
    ]  # fmt: skip
    check_compiled(lambda vendor: [best_job(vendor, *shape) for shape in shapes], [], 0)
    others = (("cuda", 86, 32), ("cuda", 89, 32))
    for one in compile_ahead([best_job("cuda", *shapes[0]), start_job("cuda")], others):
        assert all(made.spilled_bytes == 0 for made in one), one
    (made,) = compile_ahead([best_job("hip", *shapes[0])], TARGETS[2:])[0]
    waits = re.findall(r"#ASMSTART\s+s_waitcnt vmcnt\(0\)(?:.*\n)*?.*s_barrier", made.text)
    assert len(waits) == 2, "a program waits before it reads its own groups, and before it tells the others of its part"
