"""Triton kernels of scoring and selection against array operations and oracle, and mutants of them against the same
checks. On a machine without a GPU they run in Triton's interpreter, and are compiled ahead of time."""

import math
import os
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported (conftest.py, where pytest runs)

from places import place  # noqa: E402
from triton_aot import TARGETS, Job, compile_ahead  # noqa: E402

from eps_core.attention.protocol import Scores  # noqa: E402
from eps_core.config.eps import EpsConfig  # noqa: E402
from eps_core.reference import selection as oracle  # noqa: E402
from eps_core.summaries.base import LARGEST_ESTIMATE  # noqa: E402
from eps_cuda import arrays  # noqa: E402
from eps_cuda.kernels import score as score_kernels  # noqa: E402
from eps_cuda.kernels import select as select_kernels  # noqa: E402

torch.set_num_threads(1)
Kernels = types.ModuleType


def put(array: np.ndarray) -> "torch.Tensor":
    return torch.from_numpy(np.ascontiguousarray(array)).to(DEVICE)


def lists(groups: "torch.Tensor", counts: "torch.Tensor") -> list[list[list[int]]]:
    """The listed groups of each row, after a check of their form."""
    result = []
    for rows, numbers in zip(groups.cpu().numpy(), counts.cpu().numpy(), strict=True):
        result.append([])
        for row, number in zip(rows, numbers, strict=True):
            assert (row[number:] == -1).all() and (np.diff(row[:number]) > 0).all()
            result[-1].append(row[:number].tolist())
    return result


# ----------------------------------------------------------------------------------------------------------- selection


def estimates(
    seed: int, batch: int, kv_heads: int, lengths: list[int], groups: int, size: int, kind: str
) -> np.ndarray:
    rng = np.random.default_rng(seed)
    estimate = rng.normal(0.0, 4.0, (batch, kv_heads, groups)).astype(np.float32)
    if kind == "quantised":
        estimate = np.round(estimate)  # -0.0 and 0.0 among them
    elif kind == "close":
        estimate = (1 + 2.0**-23 * rng.integers(0, 999, estimate.shape)).astype(np.float32)
    elif kind == "equal":
        estimate[:] = -1.5
    elif kind == "missing":
        estimate[:] = np.inf
    elif kind == "wide":
        estimate = (estimate * np.float32(10.0) ** rng.integers(-30, 30, estimate.shape)).astype(np.float32)
        estimate[rng.random(estimate.shape) < 0.05] = LARGEST_ESTIMATE
    else:
        estimate[rng.random(estimate.shape) < 0.03] = np.inf
    for b, length in enumerate(lengths):
        ends = -(-length // size)
        if length % size:
            estimate[b, :, ends - 1] = np.inf
        estimate[b, :, ends:] = -np.inf
    return estimate


SELECTIONS = [
    # size, first, last, min_context, budget, lengths, kind
    (2, 4, 32, 0, 0.05, [2000, 37, 1], "normal"),
    (2, 4, 32, 0, 0.05, [1999, 640], "quantised"),
    (2, 0, 0, 0, 0.25, [1000, 64], "quantised"),
    (1, 0, 0, 0, 1, [300, 5], "normal"),
    (3, 10, 7, 0, 0.3, [100, 299, 3], "wide"),
    (5, 16, 128, 0, 0.1, [700, 130, 20], "equal"),
    (16, 16, 128, 0, 200.0, [5000, 160], "quantised"),
    (16, 0, 0, 100, 0.1, [99, 100, 1600], "normal"),
    (48, 200, 300, 0, 0.2, [1000, 480], "missing"),
    (2, 0, 0, 0, 1.0, [500, 41], "quantised"),
    (2, 4, 32, 0, 0.05, [9990], "normal"),
    (2, 4, 32, 0, 0.125, [9990], "quantised"),
    (256, 16, 128, 0, 0.1, [100], "normal"),
    (2, 4, 32, 0, 0.25, [1300, 900], "close"),
]


def check_topk(kernels: Kernels, case: tuple, row_groups: int | None = None) -> None:
    size, first, last, least, share, lengths, kind = case
    block = next(b for b in (16, size, size * 2) if b % size == 0)
    config = EpsConfig.of(
        method="box", group_size=size, block_size=block, budget=share, num_sink_tokens=first, num_recent_tokens=last,
        min_context=least, correction_tokens=0,
    )  # fmt: skip
    groups, kv_heads = -(-max(lengths) // size) + 3, 2
    estimate = estimates(size, len(lengths), kv_heads, lengths, groups, size, kind)
    ends = -(-np.array(lengths) // size)
    plan = place(config, lengths, groups)
    always_selected = plan.always_selected
    # a group without a summary is one for all heads: as the state says
    missing = np.isposinf(estimate).any(axis=1)
    estimate[np.broadcast_to(missing[:, None], estimate.shape)] = np.inf
    num_missing = (missing & ~always_selected & (np.arange(groups) < ends[:, None])).sum(axis=1)
    wanted = plan.budget(plan.num_always_selected + num_missing)
    options = {} if row_groups is None else {"row_groups": row_groups}
    listed, counts, selected_mask = kernels.select_topk(
        put(estimate), put(wanted.astype(np.int32)), put(np.array(lengths, np.int32)), group_size=size,
        num_sink_tokens=first, num_recent_tokens=last, min_context=least, width=max(int(wanted.max()), 1), **options,
    )  # fmt: skip
    scores = Scores(put(estimate), None, None, num_missing)
    expected = arrays.select(scores, plan)
    assert torch.equal(counts, expected.counts)
    assert torch.equal(listed, expected.groups)
    found = lists(listed, counts)
    for b, length in enumerate(lengths):
        for h in range(kv_heads):
            by_oracle = oracle.selected(config, estimate[b, h, : ends[b]].astype(np.float64), length)[0]
            assert found[b][h] == np.flatnonzero(by_oracle).tolist()
            assert np.flatnonzero(selected_mask[b, h].cpu().numpy()).tolist() == found[b][h]


@pytest.mark.parametrize("case", SELECTIONS, ids=lambda case: f"S{case[0]}-{case[-1]}-{max(case[-2])}")
def test_topk_lists_equal_arrays_and_oracle(case: tuple) -> None:
    check_topk(select_kernels, case)


def test_rows_too_long_for_registers() -> None:
    for case in SELECTIONS[1:5]:
        check_topk(select_kernels, case, row_groups=128)


def check_best(kernels: Kernels, row_groups: int = 1 << 15) -> None:
    for kind in ("normal", "quantised", "equal", "missing", "wide", "close"):
        for groups in (1, 7, 700):
            lengths = [2 * groups, max(3 * groups // 2, 1)]
            estimate = estimates(groups, 2, 2, lengths, groups, 2, kind)
            for counts_wanted in ([0, 1], [groups // 2, groups * 5 // 8], [groups // 8 + 1, groups]):
                width = max(*counts_wanted, 1)
                found = lists(
                    *kernels.select_best(
                        put(estimate), put(np.array(counts_wanted, np.int32)), width=width, row_groups=row_groups
                    )
                )
                for b, h in np.ndindex(2, 2):
                    order = np.argsort(-estimate[b, h], kind="stable")
                    order = order[np.isfinite(estimate[b, h][order])][: counts_wanted[b]]
                    assert found[b][h] == np.sort(order).tolist(), (kind, groups, counts_wanted)


def test_best_takes_finite_estimates_lower_index_first() -> None:
    check_best(select_kernels)
    check_best(select_kernels, row_groups=256)


def check_few(kernels: Kernels) -> None:
    """Counts below the number of always selected groups, which no budget asks for, and above all groups."""
    estimate = put(np.array([[[5.0, np.inf, 1.0, np.inf, 9.0, -np.inf]]], np.float32))
    for count, expected in ((0, []), (1, [0]), (2, [0, 1]), (3, [0, 1, 3]), (4, [0, 1, 3, 4]), (9, [0, 1, 2, 3, 4])):
        listed, counts, _ = kernels.select_topk(
            estimate, put(np.array([count], np.int32)), put(np.array([5], np.int32)), group_size=1, num_sink_tokens=1,
            num_recent_tokens=0, min_context=0, width=6,
        )  # fmt: skip
        assert lists(listed, counts) == [[expected]]
    for least, expected in ((5, [1, 3, 4]), (6, [0, 1, 2])):
        listed, counts, _ = kernels.select_topk(
            estimate, put(np.array([3], np.int32)), put(np.array([5], np.int32)), group_size=1, num_sink_tokens=0,
            num_recent_tokens=0, min_context=least, width=6,
        )  # fmt: skip
        assert lists(listed, counts) == [[expected]]


def test_topk_counts_none_fewer_than_forced_and_more_than_all() -> None:
    check_few(select_kernels)


def check_compact(kernels: Kernels) -> None:
    rng = np.random.default_rng(0)
    for groups in (1, 3, 64, 5000):
        selected_mask = rng.random((2, 3, groups)) < 0.3
        selected_mask[1, 2], selected_mask[0, 0] = True, False
        for mask in (put(selected_mask), put(selected_mask.astype(np.uint8))):
            found = lists(*kernels.compact(mask, width=groups))
            for b, h in np.ndindex(2, 3):
                assert found[b][h] == np.flatnonzero(selected_mask[b, h]).tolist()


def test_compact_lists_what_is_set() -> None:
    check_compact(select_kernels)


# ------------------------------------------------------------------------------------------------------------- scoring


def pool(seed: int, dtype: type, *shape: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if dtype == np.float16:
        return rng.uniform(0.001, 0.5, shape).astype(np.float16)
    info = np.iinfo(dtype)
    return rng.integers(info.min, info.max + 1, shape).astype(dtype)


class Case:
    """A random pool of `units`, a table of two ragged sequences, a query and the reference's results, by a seed."""

    def __init__(self, head_dim: int, repeat: int, size: int, per_unit: int, units: int, seed: int = 0) -> None:
        rng = np.random.default_rng([seed, head_dim, repeat])
        self.head_dim, self.repeat, self.size, self.per_unit, self.kv_heads = head_dim, repeat, size, per_unit, 2
        total, heads = 2 * units + 1, 2 * repeat
        self.shape = (total, 2, per_unit)
        self.q = rng.normal(0, 3, (2, heads, head_dim)).astype(np.float32)
        self.q[:, 0] *= 1e-6  # one head of another size than the others
        self.table = rng.permutation(total)[: 2 * units].reshape(2, units).astype(np.int32)
        self.lengths = np.array([units * per_unit * size - size // 2, max(units * per_unit * size // 2 - 1, 1)])
        for b, length in enumerate(self.lengths):
            self.table[b, -(-length // (size * per_unit)) :] = -1
        self.valid = (rng.random(total * per_unit) < 0.95).astype(np.uint8)
        self.groups = units * per_unit

    def place(self, b: int, g: int) -> tuple[int, int]:
        return max(int(self.table[b, g // self.per_unit]), 0), g % self.per_unit

    def gathered(self, array: np.ndarray, b: int, h: int) -> np.ndarray:
        """Pool [P, Hkv, GPU, ..] -> [G, ..] of one row."""
        return np.stack([array[u, h, s] for u, s in (self.place(b, g) for g in range(self.groups))])

    def settle(self, estimate: np.ndarray, b: int) -> np.ndarray:
        """[R, G] of each head -> [G] with +inf and -inf."""
        best = np.where(np.isfinite(estimate), estimate, LARGEST_ESTIMATE).max(axis=0)
        length, index = self.lengths[b], np.arange(self.groups)
        ends = -(-length // self.size)
        valid = np.array([self.valid[u * self.per_unit + s] for u, s in (self.place(b, g) for g in index)]) != 0
        known = valid & ~((index == ends - 1) & (length % self.size != 0))
        return np.where(index >= ends, -np.inf, np.where(known, best, np.inf))

    def heads(self, b: int, h: int) -> np.ndarray:
        """a [R, D] float64 of one kv head."""
        rows = self.q[b, h * self.repeat : (h + 1) * self.repeat].astype(np.float64)
        return rows / math.sqrt(self.head_dim)


def assert_near(found: "torch.Tensor", expected: np.ndarray, size: np.ndarray) -> None:
    """Equal infinities, and float32's errors: `size` is what the largest sum of magnitudes is, of each row."""
    found_array = found.cpu().numpy().astype(np.float64)
    infinite = ~np.isfinite(expected)
    assert (np.isfinite(found_array) == ~infinite).all() and (found_array[infinite] == expected[infinite]).all()
    error = np.abs(np.where(infinite, 0, found_array) - np.where(infinite, 0, expected))
    assert (error <= 2.0**-20 * (size[..., None] + np.abs(np.where(infinite, 0, expected)))).all(), error.max()


# ------------------------------------------------------------------------------------------------------------- mutants


def mutant(module: Kernels, old: str, new: str, path: Path) -> Kernels:
    """The module with `old` replaced everywhere. A file, as kernels read their own source."""
    assert module.__file__ is not None
    source = Path(module.__file__).read_text()
    assert old in source, f"no {old!r} to mutate"
    path.write_text(source.replace(old, new))
    changed = types.ModuleType(path.stem)
    changed.__file__ = str(path)
    exec(compile(path.read_text(), str(path), "exec"), changed.__dict__)
    return changed


SELECT_MUTANTS: dict[str, tuple[str, str, Callable[[Kernels], None]]] = {
    "tie to the higher index": (
        "(rank <= room)", "(rank > between_before + tl.sum(between.to(tl.int32), axis=0) - room)",
        lambda kernels: check_topk(kernels, SELECTIONS[1]),
    ),
    "first guard one short": (
        "num_sink_tokens, length) + S - 1) // S", "num_sink_tokens, length) - 1) // S",
        lambda kernels: check_topk(kernels, SELECTIONS[6]),
    ),
    "last guard one late": (
        "length - num_recent_tokens, 0) // S", "length - num_recent_tokens, 0) // S + 1",
        lambda kernels: check_topk(kernels, SELECTIONS[0]),
    ),
    "min_context ignored": (
        " | (length < min_context)", "", check_few,
    ),
    "search ends four keys early": (
        "high - low > 1)", "high - low > 4)", lambda kernels: check_topk(kernels, SELECTIONS[-1]),
    ),
    "low byte of the key skipped": (
        "    return tl.where(tl.abs(estimate) < float(\"inf\"), key, LOWEST)",
        "    return tl.where(tl.abs(estimate) < float(\"inf\"), key & -65536, LOWEST)", check_best,
    ),
    "zeros of two signs apart": (
        "tl.where(estimate == 0, 0.0, estimate)", "estimate", lambda kernels: check_best(kernels),
    ),
    "negative estimates in falling order": ("^ ((bits >> 31) & 0x7FFFFFFF)", "^ 0", check_best),
    "length of another sequence": (
        "lengths + row // kv_heads", "lengths + row % kv_heads", lambda kernels: check_topk(kernels, SELECTIONS[1]),
    ),
    "running base lost": ("before += tl.sum(taken, axis=0)", "before += 0", check_compact),
}  # fmt: skip


@pytest.mark.parametrize("name", SELECT_MUTANTS)
def test_checks_find_wrong_selection(name: str, tmp_path: Path) -> None:
    old, new, check = SELECT_MUTANTS[name]
    check(select_kernels)
    with pytest.raises(AssertionError):
        check(mutant(select_kernels, old, new, tmp_path / "select_mutant.py"))


# ------------------------------------------------------------------------------------------------------ compiled ahead

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
