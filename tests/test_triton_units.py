"""Triton kernels of codes about units' means, read in stages, against the oracle, and mutants of them against the same
checks. On a machine without a GPU they run in Triton's interpreter, and are compiled ahead of time."""

import math
import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
import triton_interpreter
from test_conformance import anchored
from test_triton_select import assert_near, mutant, put
from triton_aot import TARGETS, Compiled, Job, compile_ahead

from eps_core import reference
from eps_core.backend.summaries.rq import rotate, rounded_query
from eps_core.config.cache import CacheSpec
from eps_core.config.eps import EpsConfig
from eps_core.config.selection import COMBINES
from eps_core.kv_cache.step_plan import StepPlan
from eps_core.summaries.base import LARGEST_ESTIMATE
from eps_core.summaries.rq import QUERY_STEPS, part_dims, rq_signs
from eps_core.summaries.rq import rotate as rotate64
from eps_cuda.kernels import score as score_kernels
from eps_cuda.kernels import units
from eps_cuda.kernels.select import Depth
from eps_cuda.ops import OPS

DEVICE = triton_interpreter.DEVICE
KV_HEADS = 2


@dataclass(frozen=True)
class Case:
    """Random pools, a table of two ragged sequences of up to `num_units` units, and a query."""

    head_dim: int = 64
    repeat: int = 3
    size: int = 2
    mean_tokens: int = 32
    mean_bits: int = 4
    cascade: tuple[float, ...] = (0.25,)
    rescore: float = 0.125
    correction_tokens: int = 64
    num_units: int = 9
    combine: str = "max"
    repeated: bool = False  # a unit of the pool occurs several times: whole runs of equal estimates

    @property
    def config(self) -> EpsConfig:
        return EpsConfig.of(
            method="rq", group_size=self.size, mean_tokens=self.mean_tokens, mean_bits=self.mean_bits,
            cascade=self.cascade, rescore=self.rescore, correction_tokens=self.correction_tokens,
            budget=0.01, combine=self.combine,
        )  # fmt: skip


CASES = {
    "usual": Case(),
    "unit of the pool is one of a mean": Case(128, 4, mean_tokens=64, num_units=7),
    "whole codes": Case(128, 2, cascade=()),
    "three parts": Case(64, 4, mean_tokens=64, cascade=(0.5, 0.2), rescore=0.0625),
    "three parts of equal groups": Case(128, 1, cascade=(0.5, 0.2), repeated=True),
    "no rescoring bit": Case(64, 8, cascade=(0.5, 0.3), rescore=0.0, mean_bits=8),
    "all of them on and on": Case(32, 2, cascade=(1.0, 1.0), rescore=1.0, repeated=True),
    "no power of two": Case(80, 5, size=4, cascade=(0.25,), mean_bits=8),
    "odd head dim": Case(33, 2, size=16, mean_tokens=64, num_units=12),
    "parts of a byte": Case(16, 7, size=1, cascade=(0.4, 0.4), num_units=3),
    "less than a byte": Case(5, 2, size=8),
    "wide": Case(256, 16, size=1, mean_tokens=64, num_units=4),
    "two groups a unit": Case(64, 2, size=32, mean_tokens=64, num_units=30),
    "one unit": Case(64, 2, num_units=1),
    "summed": Case(combine="sum"),
    "summed at once": Case(64, 4, cascade=(), rescore=0.0, combine="sum"),
    "summed in three parts": Case(64, 4, mean_tokens=64, cascade=(0.5, 0.2), rescore=0.0625, combine="sum"),
    "summed, no power of two": Case(80, 5, size=4, cascade=(0.25,), mean_bits=8, combine="sum"),
}


class Filled:
    """An oracle's cache of random summaries, and what it says of a query."""

    def __init__(self, case: Case) -> None:
        rng = np.random.default_rng([case.head_dim, case.repeat])
        config, cache_config = case.config, case.config.cache_config
        total = 2 * case.num_units + 1
        self.case, self.config = case, config
        self.cache = reference.new_cache(CacheSpec(1, KV_HEADS, case.head_dim, total), cache_config)
        self.pools = self.cache.summaries[0]
        for name, pool in self.pools.items():
            if pool.dtype == np.float16:
                pool[:] = rng.uniform(0.01, 0.1, pool.shape)
            elif name in ("scale", "second_scale"):
                pool[:] = rng.integers(0x58, 0x70, pool.shape)  # of 1/64 to 1/2
            else:
                pool[:] = rng.integers(0, 256, pool.shape)
        self.pools["scale"][1::3, :, :, ::4] = 0  # a mean alone
        if case.repeated:  # sums with a mean would not tell equal ones apart alike everywhere
            self.pools["mean_scale"][:] = 0
        self.pools["mean_scale"][-1] = np.inf  # of the first unit of the first sequence
        # bits past the last dimension are 0
        for name, bits in (("mean", case.mean_bits), ("codes", 1), ("second", 1)):
            spare = -case.head_dim * bits % 8
            if name in self.pools and spare and (name != "codes" or len(part_dims(cache_config, case.head_dim)) == 1):
                last = self.pools[name][..., -1, :] if name == "codes" else self.pools[name][..., -1]
                last &= 0xFF >> spare
        self.table = rng.permutation(total)[: 2 * case.num_units].reshape(2, case.num_units).astype(np.int32)
        if case.num_units > 1:
            self.table[self.table == total - 1] = self.table[0, 0]
            self.table[0, 0] = total - 1
        if case.repeated:
            self.table[:, 1:] = self.table[:, 1:2]
        tokens = case.num_units * cache_config.unit_tokens
        self.lengths = np.array([tokens - cache_config.span_tokens // 2, max(tokens // 2 - 1, 1)])
        for b, length in enumerate(self.lengths):
            self.table[b, -(-length // cache_config.unit_tokens) :] = -1
        self.valid = rng.random(total * cache_config.spans_per_unit) < 0.9
        self.valid[-cache_config.spans_per_unit :] = True
        self.cache.state[0].fill[self.valid] = cache_config.span_tokens
        self.q = rng.normal(0, 3, (2, KV_HEADS * case.repeat, case.head_dim)).astype(np.float32)
        self.q[:, 0] *= 1e-6 if case.repeat > 1 else 1  # one head of another size than the others
        self.q[1, -1] *= case.repeat == 1
        self.cache.k[0][:] = rng.normal(0, 2, self.cache.k[0].shape)
        self.plan = StepPlan.of(config, self.table, self.lengths)
        with np.errstate(invalid="ignore"):
            self.expected = reference.score(self.cache, 0, self.q.astype(np.float64), self.plan).estimate

    def size(self) -> np.ndarray:
        """[B, Hkv]: what the magnitudes of an estimate's terms add up to."""
        turned = rotate64(self.q.astype(np.float64) / math.sqrt(self.case.head_dim), self.config.cache_config.seed)
        most = np.abs(turned).sum(axis=-1).reshape(2, KV_HEADS, -1).max(axis=-1)
        size = most * (2**self.case.mean_bits * 0.1 + 0.5 * 1.5)
        if self.case.combine == "max":
            return size
        products = np.abs(self.q * np.repeat(self.first_keys(), self.case.repeat, axis=1)).sum(axis=-1)
        return size + products.reshape(2, KV_HEADS, -1).max(axis=-1) / math.sqrt(self.case.head_dim)

    def first_keys(self) -> np.ndarray:
        """[B, Hkv, D]: keys of the sequences' first tokens."""
        return self.cache.k[0][self.table[:, 0], :, 0]

    def anchors(self) -> torch.Tensor | None:
        """`anchors` by another order of sums."""
        if self.case.combine == "max":
            return None
        heads = self.q.astype(np.float64).reshape(2, KV_HEADS, self.case.repeat, -1)
        found = np.einsum("bhrd,bhd->bhr", heads, self.first_keys().astype(np.float64))
        return put(anchored(found / math.sqrt(self.case.head_dim)).astype(np.float32))

    def estimate(self, kernels: ModuleType, **options: bool) -> torch.Tensor:
        cache_config, head_dim = self.config.cache_config, self.case.head_dim
        counts = [*self.plan.cascaded(head_dim), self.plan.rescored]
        *cascaded, rescored = ((put(one.astype(np.int32)), int(one.max())) for one in counts)
        query = kernels.round_queries(put(self.q), put(rq_signs(cache_config.seed, head_dim)), KV_HEADS)
        return kernels.score_units(
            query, {name: put(pool) for name, pool in self.pools.items()}, put(self.valid.astype(np.uint8)),
            put(self.table), put(self.lengths.astype(np.int32)), Depth(tuple(cascaded), rescored), self.anchors(),
            group_size=self.case.size, mean_bits=self.case.mean_bits, dims=part_dims(cache_config, head_dim), **options,
        )  # fmt: skip


filled_once = cache(Filled)


def check(kernels: ModuleType, case: "Case | Filled", **options: bool) -> None:
    filled = case if isinstance(case, Filled) else filled_once(case)
    found = filled.estimate(kernels, **options)
    large = filled.expected == LARGEST_ESTIMATE
    assert np.isfinite(filled.expected).any() and np.isposinf(filled.expected).any()
    assert large.any() or filled.case.num_units == 1
    assert (found.cpu().numpy()[large] == np.float32(LARGEST_ESTIMATE)).all()
    expected = np.where(large, 0.0, filled.expected)
    assert_near(torch.where(put(large), 0.0, found), expected, filled.size())


@pytest.mark.parametrize("name", CASES)
def test_estimates_are_the_oracle_s(name: str) -> None:
    check(units, CASES[name])


@pytest.mark.parametrize("combine", COMBINES)
@pytest.mark.parametrize("repeat", [1, 2, 3, 4, 7, 8, 9])
def test_query_heads(repeat: int, combine: str) -> None:
    check(units, Case(repeat=repeat, num_units=3, combine=combine))


def test_integers_are_converted_where_subnormals_are_flushed() -> None:
    for case in (CASES["usual"], CASES["odd head dim"]):
        check(units, case, subnormal=False)


def test_what_dropped_out_ranks_above_what_went_on() -> None:
    """Else a pass that chose among all groups would not be found."""
    filled = Filled(CASES["three parts of equal groups"])
    end = filled.estimate(units).cpu().numpy()
    filled.plan.__dict__["refined"] = np.zeros(2, np.int64)
    filled.plan._made.clear()
    filled.plan.once(("staged", 128), lambda: [np.zeros(2, np.int64)] * 2)
    start = filled.estimate(units).cpu().numpy()
    moved = start != end
    assert moved.any() and start[np.isfinite(start) & ~moved].max() > end[moved].min()


def check_queries(kernels: ModuleType) -> None:
    """Bit for bit what the array operations make, also where a quotient lies in the middle between two integers."""
    rng = np.random.default_rng(0)
    for head_dim in (1, 16, 33, 64, 96, 128, 256):
        signs = rq_signs(0, head_dim)
        q = rng.normal(size=(2, 6, head_dim)).astype(np.float32) * np.float32(10.0) ** rng.integers(-9, 9, (2, 6, 1))
        q[0, 0], q[1, 5, -1] = 0, 1e38
        if head_dim == 64:  # rotated without rounding: halves of a step of 1/8
            turned = (rng.integers(-61, 62, (2, 6, head_dim)) | 1) / 2
            turned[..., 0] = QUERY_STEPS
            q = (turned @ rotate64(np.eye(turned.shape[-1]), 0).T).astype(np.float32)
        q = q.astype(np.float32)
        found = kernels.round_queries(put(q), put(signs), KV_HEADS)
        a = torch.from_numpy(q).reshape(2, KV_HEADS, 3, head_dim) * (1 / math.sqrt(head_dim))
        turned32 = rotate(OPS, a, torch.from_numpy(signs))
        integers, step = rounded_query(OPS, turned32)
        assert torch.equal(found.turned.cpu(), turned32)
        assert torch.equal(found.steps.cpu(), step[..., 0])
        assert torch.equal(found.integers.cpu().float(), integers)
        if head_dim == 64:
            assert ((turned32 / step).abs() % 1 == 0.5).float().mean() > 0.9


def test_queries_are_rounded_as_everywhere() -> None:
    check_queries(units)


@pytest.mark.parametrize("combine", COMBINES)
def test_a_query_that_is_no_number_ranks_nothing_apart(combine: str) -> None:
    filled = Filled(Case(combine=combine))
    for value in (np.nan, np.inf):
        filled.q[0, 1, 3] = value
        found = filled.estimate(units)[0, 0].cpu().numpy()
        known = np.isfinite(filled.expected[0, 0])
        assert (found[known] == np.float32(LARGEST_ESTIMATE)).all()


def check_odd(kernels: ModuleType, combine: str, factor: float) -> None:
    """Queries whose masses are past float32, or all but equal."""
    filled = Filled(Case(combine=combine))
    filled.q = (filled.q * factor).astype(np.float32)
    with np.errstate(invalid="ignore"):
        filled.expected = reference.score(filled.cache, 0, filled.q.astype(np.float64), filled.plan).estimate
    check(kernels, filled)


@pytest.mark.parametrize("factor", [0.0, 1e-30, 1e6, 1e30])
@pytest.mark.parametrize("combine", COMBINES)
def test_queries_of_any_size(combine: str, factor: float) -> None:
    check_odd(units, combine, factor)


def check_usual(kernels: ModuleType) -> None:
    check(kernels, CASES["usual"])


def check_three(kernels: ModuleType) -> None:
    check(kernels, CASES["three parts of equal groups"])


def check_summed(kernels: ModuleType) -> None:
    check(kernels, CASES["summed"])


MUTANTS = {
    "halves rounded up": (
        "(tl.div_rn(t, tl.where(usable, step, 1.0)) + TO_INTEGER) - TO_INTEGER",
        "tl.floor(tl.div_rn(t, tl.where(usable, step, 1.0)) + 0.5)", check_queries,
    ),
    "a step more": ("STEPS=QUERY_STEPS", "STEPS=QUERY_STEPS + 1", check_queries),
    "rotated in another order": ("1, HEAD_DIM, DIM2, LOG_DIM)", "1, DIM2, DIM2, LOG_DIM)", check_queries),
    "query of the first head": ("* R + r) * stride_h", "* R) * stride_h", check_queries),
    "mean without its middle": ("MIDDLE: tl.constexpr = 1 << (BITS - 1)", "MIDDLE: tl.constexpr = 0", check_usual),
    "mean of the first unit": ("at = (row.to(tl.int64) * spans + span)", "at = (row.to(tl.int64) * spans + span * 0)",
                               check_usual),
    "another group's bytes": ("(BYTES * N) + g % N, there", "(BYTES * N) + (g + 1) % N, there", check_usual),
    "group by group": ("R, D, ROW, RP, DP, N, SUBNORMAL\n", "R, D, ROW, RP, DP, 1, SUBNORMAL\n", check_usual),
    "a part stands for itself": ("* (ROW / D)", "", check_usual),
    "ones alone": ("dots = ones - (", "dots = ones - 0.0 * (", check_usual),
    "scales of half an exponent": ("stored.to(tl.uint16) << 7", "stored.to(tl.uint16) << 6", check_usual),
    "open unit scored": ("groups, inside, N * S)", "groups, inside, S)", check_usual),
    "a rescoring bit as the first": ("listed, integers_row, 1, R", "listed, integers_row, 2, R", check_usual),
    "rescoring bits of ones alone": ("1.0 if second is None else 1.5", "1.0", check_usual),
    "rescoring bit with the first scale": ('"second_scale" if twice else "scale"', '"scale"', check_usual),
    "rest asks the first dimensions": ("integers_row + D + MORE", "integers_row + D", check_three),
    "rest left out": ("if rest is not None", "if False", check_usual),
    "lists name entries of the list before": ("if through is not None", "if False", check_three),
    "chosen among all groups": ("listed if named is None else named, left", "None, estimate", check_three),
    "lists of the pass before named": ("listed if named is None else named", "listed", check_three),
    "anchors forgotten": ("        base -= ", "        base -= 0.0 * ", check_summed),
    "anchors of the first sequence": ("anchors + row * R + r", "anchors + (row % kv_heads) * R + r", check_summed),
    "anchor of the first query head": ("anchors + row * R + r", "anchors + row * R + r * 0", check_summed),
    "the largest for the sum": ("anchors is not None}", "False}", check_summed),
    "the sum for the largest": ("anchors is not None}", "True}", check_usual),
    "one group more": ("row, counts, width=width", "row, counts + 1, width=width", check_three),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_checks_find_a_wrong_kernel(name: str, tmp_path: Path) -> None:
    old, new, verify = MUTANTS[name]  # each of which the right kernels pass above
    with pytest.raises(AssertionError):
        verify(mutant(units, old, new, tmp_path / "units_mutant.py"))


# ------------------------------------------------------------------------------------------------------ compiled ahead

POINTERS = {
    "q": "*bf16", "signs": "*fp32", "turned": "*fp32", "integers": "*fp16", "steps": "*fp32",
    "mean": "*u8", "mean_scale": "*fp16", "codes": "*u8", "more": "*u8", "rest": "*u8", "second": "*u8",
    "scale": "*u8", "valid": "*u8", "table": "*i32", "lengths": "*i32", "bases": "*fp32", "estimate": "*fp32",
    "left": "*fp32", "listed_groups": "*i32", "through": "*i32", "named": "*i32", "counts": "*i32",
    "anchors": "*fp32", "inverse_root": "fp32",
}  # fmt: skip


def job(name: str, constants: dict, absent: tuple[str, ...] = (), **options: int | bool) -> Job:
    """A kernel with its constexpr values and without some of its arrays."""
    arguments = [one for one in getattr(units, name).arg_names if one not in constants and one not in absent]
    kinds = {one: POINTERS.get(one, "i32") for one in arguments}
    return Job("eps_cuda.kernels.units", name, kinds, constants, options)


def shape(head_dim: int, dims: tuple[int, int, int], groups: int, block: int) -> dict:
    first, more, rest = dims
    return {
        "R": 4, "DP": head_dim, "D": first, "MORE": more, "REST": rest, "ROW": head_dim, "SUBNORMAL": True, "SPU": 1,
        "N": groups, "LARGEST": LARGEST_ESTIMATE, "SUM": False, "BLOCK": block, "RP": units.integer_columns(4),
    }  # fmt: skip


def first_of(constants: dict) -> dict:
    return {name: value for name, value in constants.items() if name not in ("MORE", "REST")} | {"S": 2, "BLOCK": 512}


HALVES, QUARTERS = shape(128, (64, 0, 64), 32, 256), shape(64, (16, 16, 32), 16, 256)
MEANS = {
    "R": 4, "D": 128, "RP": 4, "DP": 128, **score_kernels.code_shape(128, 4), "SUBNORMAL": True, "SPU": 1, "SPAN": 64,
    "LOG_S": math.log(2), "BLOCK": 256,
}  # fmt: skip
JOBS = {
    "queries": job(
        "_round_queries", {"R": 4, "HEAD_DIM": 128, "DIM2": 128, "LOG_DIM": 7, "STEPS": QUERY_STEPS}, num_warps=1,
        enable_fp_fusion=False,
    ),
    "means": job("_score_means", MEANS, ("anchors",)),
    "first of halves": job("_score_units", first_of(HALVES)),
    "first of quarters": job("_score_units", first_of(QUARTERS)),
    "rest": job("_read_on", HALVES, ("more", "second", "through", "named")),
    "quarters' rest": job("_read_on", QUARTERS, ("second",)),
    "rescoring bits": job("_read_on", HALVES, ("more", "left", "named")),
    "summed means": job("_score_means", MEANS),
    "summed first of halves": job("_score_units", first_of(HALVES) | {"SUM": True}),
    "summed rest": job("_read_on", HALVES | {"SUM": True}, ("more", "second", "through", "named")),
    "summed rescoring bits": job("_read_on", HALVES | {"SUM": True}, ("more", "left", "named")),
}  # fmt: skip


def check_compiled(name: str, made: Compiled) -> None:
    print(f"{name:>18} {made.target:>12} {made.registers:4} registers {made.spilled_bytes:5} B spilled "
          f"{made.shared_bytes:6} B shared")  # fmt: skip
    assert made.spilled_bytes == 0, (name, made.target)
    if name != "queries":  # the tensor cores of each
        assert any(word in made.text for word in ("wgmma", "mma.sync", "v_mfma")), name
    elif made.target.startswith("cuda"):  # integers are rounded from it
        inexact = re.findall(r"\b(?:fma\.|div\.full|div\.approx|(?:add|sub|mul)[.\w]*\.ftz).*", made.text)
        assert "div.rn.f32" in made.text and not inexact, inexact[:3]


def test_kernels_compile_for_gpus() -> None:
    """For A100, H100 and MI300: what the interpreter does not show."""
    # as the launchers ask for, where torch is built for AMD
    for_amd = [
        replace(one, constants={
            key: {"RP": max(8, 2 * value) if key == "RP" else None, "SUBNORMAL": False}.get(key, value)
            for key, value in one.constants.items()
        })
        for one in JOBS.values()
    ]  # fmt: skip
    for_nvidia = compile_ahead(list(JOBS.values()), TARGETS[:2])
    for name, first, second in zip(JOBS, for_nvidia, compile_ahead(for_amd, TARGETS[2:]), strict=True):
        for made in first + second:
            check_compiled(name, made)
    # neighbouring groups' bytes lie side by side, and are read so
    first = for_nvidia[list(JOBS).index("first of halves")][0].text
    assert len(re.findall(r"ld\.global\.v4\.b32", first)) >= 4 > len(re.findall(r"ld\.global\.b8 .*%rd1[0-2] ", first))
