"""The Triton attention kernels against float64, in Triton's interpreter where there is no GPU: values, what is never
read, what the compilers make of them, and that `check` and `check_tail` notice deliberate mistakes."""

import importlib.util
import math
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from types import ModuleType

import ml_dtypes
import numpy as np
import pytest
import torch
from triton_aot import TARGETS, Job, compile_ahead
from triton_interpreter import DEVICE

from eps_core.backend.pages import CodePool, Pool
from eps_core.reference import pages as oracle_pages
from eps_cuda.kernels import attend as attend_module
from eps_cuda.kernels import correction as tail_module

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
NUMPY = {torch.float32: np.float32, torch.float16: np.float16, torch.bfloat16: ml_dtypes.bfloat16}
ROUNDING = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
FLOAT32_ERROR = 2.0**-20  # of a float32 exponential or sum of some hundred


@dataclass(frozen=True)
class Case:
    """Shapes of one scene. `lengths` are ragged; `units`: M, of U = `unit` tokens."""

    dtype: str = "fp32"
    head_dim: int = 16
    repeat: int = 2
    size: int = 2  # S
    unit: int = 16
    units: int = 4
    kv_heads: int = 2
    lengths: tuple[int, ...] = (61, 1, 30)
    share: float = 0.4  # of the groups, listed
    empty: bool = False  # the last list of all
    sparse: bool = True
    q_dtype: str | None = None
    splits: int | None = 3
    correction: int = 8  # tokens of a skipped-mass correction group
    loud: float = 1.5  # of q's entries
    bits: tuple[int, int] = (16, 16)  # of K and of V

    def __str__(self) -> str:
        values = (f"{name}{getattr(self, name)}" for name in ("head_dim", "repeat", "size") if getattr(self, name))
        codes = "" if self.bits == (16, 16) else f"-K{self.bits[0]}V{self.bits[1]}"
        return (
            "-".join([self.dtype, self.q_dtype or "", *values, "gated" if self.sparse else "dense"]).replace("--", "-")
            + codes
        )


@dataclass
class Scene:
    """Inputs of one call on the device, and which rows [P, Hkv, U] of the pools it may read."""

    case: Case
    q: torch.Tensor
    k: Pool
    v: Pool
    table: torch.Tensor
    lengths: torch.Tensor
    groups: torch.Tensor | None
    counts: torch.Tensor | None
    listed: np.ndarray  # [B, Hkv, G] bool
    read: np.ndarray = field(repr=False)
    noise: np.random.Generator = field(repr=False)


def scene(case: Case, seed: int = 0) -> Scene:
    rng = np.random.default_rng(seed)
    batch, num_groups = len(case.lengths), case.units * case.unit // case.size
    pool = batch * case.units + 3  # some belong to nobody; unit 0 never is anyone's
    table = np.full((batch, case.units), -1, np.int32)
    order = rng.permutation(np.arange(1, pool))
    for b, length in enumerate(case.lengths):
        used = -(-length // case.unit)
        table[b, :used], order = order[:used], order[used:]
    inside = np.arange(num_groups) < -(-np.array(case.lengths)[:, None, None] // case.size)
    listed = (rng.random((batch, case.kv_heads, num_groups)) < case.share) & inside
    for b, length in enumerate(case.lengths):
        listed[b, :, max(length - 1, 0) // case.size] = length > 0  # the partial group, where there is one
    listed[-1, -1] &= not case.empty
    listed |= inside & (not case.sparse)
    width = max(int(listed.sum(axis=-1).max()), 1) + 1
    groups = np.full((batch, case.kv_heads, width), -1, np.int32)
    read = np.zeros((pool, case.kv_heads, case.unit), bool)
    for b, h, group in np.argwhere(listed):
        tokens = np.arange(group * case.size, min((group + 1) * case.size, case.lengths[b]))
        read[table[b, tokens // case.unit], h, tokens % case.unit] = True
        groups[b, h, listed[b, h, :group].sum()] = group
    dtype = DTYPES[case.dtype]
    shape = (pool, case.kv_heads, case.unit, case.head_dim)
    # one token far above the others makes the running maximum move
    k = rng.normal(size=shape) * (1 + 2 * (rng.random(shape[:3]) < 0.1))[..., None]
    q = rng.normal(size=(batch, case.kv_heads * case.repeat, case.head_dim)) * case.loud

    def native(array: np.ndarray, kind: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(DEVICE, kind)

    return Scene(
        case,
        native(q, DTYPES[case.q_dtype or case.dtype]),
        held(native(k, dtype), case.bits[0]),
        held(native(rng.normal(size=shape) + 0.5, dtype), case.bits[1]),
        native(table, torch.int32),
        native(np.array(case.lengths), torch.int32),
        native(groups, torch.int32) if case.sparse else None,
        native(listed.sum(axis=-1), torch.int32) if case.sparse else None,
        listed,
        read,
        rng,
    )


def held(rows: torch.Tensor, bits: int) -> Pool:
    """A pool of rows [P, Hkv, U, D], its codes made by the judge's quantiser."""
    if bits == 16:
        return rows
    codes, scale = oracle_pages.quantise(rows.float().cpu().numpy(), bits)
    return CodePool(torch.from_numpy(codes).to(DEVICE), torch.from_numpy(scale).to(DEVICE), bits, rows.dtype)


def wide(tensor: Pool) -> np.ndarray:
    """In float64 what a tensor or pool is read as, of codes by the judge's definition."""
    if isinstance(tensor, CodePool):
        codes, scale = tensor.codes.cpu().numpy(), tensor.scale.cpu().numpy()
        return oracle_pages.dequantise(codes, scale, tensor.bits, NUMPY[tensor.dtype]).astype(np.float64)
    return tensor.double().cpu().numpy()


def reference(one: Scene) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(out, sum_i p_i |v_i|, lse, largest sum of |q_d k_d| / sqrt(D)) in float64, from the definition."""
    case, table = one.case, one.table.cpu().numpy()
    q, k, v = wide(one.q), wide(one.k), wide(one.v)
    out, size, lse, reach = np.zeros(q.shape), np.zeros(q.shape), np.full(q.shape[:2], -np.inf), np.zeros(q.shape[:2])
    for b, head in np.ndindex(*lse.shape):
        h = head // case.repeat
        tokens = np.flatnonzero(np.repeat(one.listed[b, h], case.size)[: case.lengths[b]])
        if not len(tokens):
            continue
        unit, row = table[b, tokens // case.unit], tokens % case.unit
        logits = k[unit, h, row] @ q[b, head] / np.sqrt(case.head_dim)
        reach[b, head] = (np.abs(k[unit, h, row]) @ np.abs(q[b, head])).max() / np.sqrt(case.head_dim)
        weights = np.exp(logits - logits.max())
        lse[b, head] = logits.max() + np.log(weights.sum())
        weights /= weights.sum()
        out[b, head], size[b, head] = weights @ v[unit, h, row], weights @ np.abs(v[unit, h, row])
    return out, size, lse, reach


def poisoned(one: Scene) -> Scene:
    """The same with NaN or something huge in every row of K and V that must not be read."""
    shape = one.read.shape
    bad = np.where(one.noise.random((2, *shape)) < 0.5, np.nan, 3e4)

    def hide(pool: Pool, values: np.ndarray) -> Pool:
        if isinstance(pool, CodePool):
            read = torch.from_numpy(one.read).to(DEVICE)
            scale = torch.where(read, pool.scale, torch.from_numpy(values).to(DEVICE, pool.scale.dtype))
            return replace(pool, codes=torch.where(read[..., None], pool.codes, 77), scale=scale)
        given = torch.from_numpy(values[..., None]).to(DEVICE, pool.dtype)
        return torch.where(torch.from_numpy(one.read[..., None]).to(DEVICE), pool, given)

    return replace(one, k=hide(one.k, bad[0]), v=hide(one.v, bad[1]))


@pytest.fixture(autouse=True)
def uninitialised_memory_is_nan():
    """What torch.empty gives, while a test runs."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def attended(module: ModuleType, one: Scene) -> tuple[torch.Tensor, torch.Tensor]:
    return module.attend_groups(
        one.q, one.k, one.v, one.table, one.lengths, one.groups, one.counts, group_size=one.case.size,
        num_splits=one.case.splits,
    )  # fmt: skip


def check_close(got: np.ndarray, want: np.ndarray, allowed: np.ndarray) -> None:
    with np.errstate(invalid="ignore"):
        far = np.where(got == want, 0, np.abs(got - want)) - allowed
    assert (far <= 0).all(), f"off by {np.nanmax(far):.3g} more than allowed, {np.isnan(far).sum()} NaN"


def check_states(one: Scene, out: torch.Tensor, lse: torch.Tensor, want: tuple[np.ndarray, ...]) -> None:
    """Within the roundings that the kernels' documentation states."""
    case, (mean, size, mass, reach) = one.case, want
    assert out.dtype == one.q.dtype and lse.dtype == torch.float32 and out.shape == one.q.shape
    stored, same = ROUNDING[DTYPES[case.dtype]], one.q.dtype == one.k.dtype
    of_logits, of_weights = reach * 2.0**-22, 0.0
    if case.dtype != "fp32":
        of_logits = of_logits + (0 if same else reach * stored**2)
        of_weights = stored if same else stored**2
    of_logits = of_logits + FLOAT32_ERROR
    check_close(wide(out), mean, size * (2 * of_logits[..., None] + of_weights + ROUNDING[one.q.dtype]))
    check_close(wide(lse), mass, of_logits + FLOAT32_ERROR * np.abs(np.where(np.isneginf(mass), 0, mass)))


def check(module: ModuleType, case: Case) -> None:
    """Values as the definition's, and bit for bit independent of everything that must not be read."""
    one = scene(case)
    out, lse = attended(module, one)
    check_states(one, out, lse, reference(one))
    for got, want in zip(attended(module, poisoned(one)), (out, lse), strict=True):
        assert torch.equal(got, want), "what must not be read changed the result"


BASE = Case()
CASES = [
    BASE,
    Case("bf16", 64, 4, 2, 64, 3, lengths=(190, 1, 65), empty=True),
    Case("fp16", 128, 8, 3, 48, 3, lengths=(143, 48)),
    Case("bf16", 80, 16, 16, 64, 2, lengths=(100,)),
    Case("fp16", 96, 3, 48, 96, 2, lengths=(1, 190), empty=True),
    Case("bf16", 256, 1, 128, 128, 2, lengths=(130, 256)),
    Case("fp32", 33, 3, 1, 16, 4, lengths=(64, 17)),
    Case("fp32", 80, 4, 256, 256, 1, kv_heads=1, lengths=(256, 200, 1)),
    Case("bf16", 20, 17, 5, 20, 4, lengths=(77,)),
    Case("bf16", 128, 4, 2, 64, 4, lengths=(255,), splits=1, share=0.9),
    Case("fp32", 16, 2, 2, 16, 8, kv_heads=1, lengths=(127,), splits=40, share=0.9),
    Case("fp16", 16, 1, 2, 16, 4, lengths=(0, 5), splits=None),
    Case("fp32", 64, 4, 2, 64, 3, lengths=(150, 1), sparse=False, splits=None),
    Case("bf16", 80, 3, 16, 64, 3, lengths=(129, 64, 0), sparse=False, splits=2),
    Case("bf16", 64, 4, 2, 64, 3, lengths=(150, 70), q_dtype="fp32"),
    Case("fp16", 64, 4, 2, 64, 3, lengths=(150, 70), q_dtype="fp32"),
    Case("fp32", 64, 4, 2, 64, 3, lengths=(150, 70), q_dtype="bf16"),
]
CODES = [
    Case("bf16", 64, 4, 2, 64, 3, lengths=(190, 1, 65), empty=True, bits=(8, 8)),
    Case("bf16", 128, 8, 16, 64, 2, lengths=(100, 64), bits=(4, 4)),
    # not loud: where codes of V are 0, float16 weights below 2^-14 would be a channel's largest
    Case("fp16", 64, 4, 2, 64, 3, lengths=(150, 3), bits=(8, 4), loud=0.5),
    Case("fp16", 128, 1, 3, 48, 3, kv_heads=3, lengths=(143, 48), bits=(4, 8)),
    Case("fp32", 64, 2, 4, 16, 5, lengths=(75, 0, 17), bits=(8, 4)),
    Case("fp32", 34, 3, 1, 16, 4, lengths=(64, 17), bits=(4, 4)),
    Case("fp16", 80, 16, 16, 64, 2, lengths=(100,), bits=(4, 8), splits=1),
    Case("bf16", 96, 3, 48, 96, 2, lengths=(1, 190), empty=True, bits=(8, 16)),
    Case("fp32", 33, 3, 2, 16, 4, lengths=(61, 30), bits=(16, 8)),
    Case("bf16", 20, 17, 5, 20, 4, lengths=(77,), bits=(16, 4)),
    Case("bf16", 64, 4, 2, 64, 3, lengths=(150, 70), q_dtype="fp32", bits=(8, 4)),
    Case("fp32", 64, 4, 2, 64, 3, lengths=(150, 1), sparse=False, splits=None, bits=(8, 8)),
    Case("bf16", 128, 4, 16, 64, 3, lengths=(129, 64, 0), sparse=False, splits=2, bits=(4, 8)),
]


@pytest.mark.parametrize("case", [*CASES, *CODES], ids=str)
def test_attention_equals_its_definition(case):
    check(attend_module, case)


@pytest.mark.parametrize("bits", [8, 4])
def test_codes_stay_within_float16_and_nan_stays(bits):
    """The scale of the largest float16 rounds up, and its code times that is beyond; a scale may be NaN or Inf."""
    one = scene(Case("fp16", lengths=(61,), kv_heads=1, bits=(bits, bits), share=1.0))
    for value in (65504.0, -65504.0, math.nan, math.inf):
        v = held(torch.full(one.v.shape, value, dtype=torch.float16, device=DEVICE), bits)
        out, _ = attended(attend_module, replace(one, v=v))
        assert (out == value).all() if math.isfinite(value) else out.isnan().all()


def test_splits_change_rounding_alone():
    one = scene(replace(BASE, share=0.9, kv_heads=1))
    want = reference(one)
    for splits in (1, 2, 33):
        check_states(one, *attended(attend_module, replace(one, case=replace(one.case, splits=splits))), want)


def test_lists_may_come_in_strides_and_tables_may_not():
    one = scene(BASE)
    want = attended(attend_module, one)
    padded = torch.nn.functional.pad(one.groups, (0, 3), value=-1)[..., :-3]
    q = one.q.transpose(1, 2).contiguous().transpose(1, 2)
    assert not padded.is_contiguous() and not q.is_contiguous()
    for got, same in zip(attended(attend_module, replace(one, groups=padded, q=q)), want, strict=True):
        assert torch.equal(got, same)
    with pytest.raises(ValueError, match="lie alike"):
        attended(attend_module, replace(one, k=one.k.transpose(2, 3).contiguous().transpose(2, 3)))
    codes = scene(CODES[0])
    for name in ("codes", "scale"):
        cut = getattr(codes.v, name).repeat(2, *[1] * (getattr(codes.v, name).ndim - 1))[::2]
        with pytest.raises(ValueError, match="is not contiguous"):
            attended(attend_module, replace(codes, v=replace(codes.v, **{name: cut})))
    with pytest.raises(ValueError, match="must agree"):
        attended(attend_module, replace(codes, q=codes.q[..., :32]))
    with pytest.raises(ValueError, match="is not contiguous"):
        attended(attend_module, replace(one, table=one.table.repeat(1, 2)[:, : one.table.shape[1]]))
    with pytest.raises(ValueError, match="must agree"):
        attended(attend_module, replace(one, q=one.q[..., :8]))
    with pytest.raises(ValueError, match="multiple"):
        attended(attend_module, replace(one, q=one.q[:, :3]))


def test_plans_fill_large_gpus_from_static_sizes_alone():
    for processors in (108, 132, 304):
        dense = attend_module.plan(8, 32768, 128, torch.bfloat16, processors, None)
        assert 2 * processors <= 8 * dense.num_splits < 2 * processors + 8
    few = attend_module.plan(8, 100, 128, torch.bfloat16, 132, None)
    assert few.num_splits == 2 and attend_module.plan(8, 0, 128, torch.bfloat16, 132, None).num_splits == 1
    assert attend_module.plan(8, 32768, 128, torch.bfloat16, 132, 5).num_splits == 5


# ----------------------------------------------------------------------------------------------------------- correction


@dataclass
class TailScene:
    """What a correction needs besides the scene `read`; estimate and selected_mask are [B, Hkv, G]."""

    read: Scene
    estimate: torch.Tensor
    selected_mask: torch.Tensor
    mean: torch.Tensor
    mean_scale: torch.Tensor
    valid: torch.Tensor
    usable: np.ndarray = field(repr=False)  # [B, T] bool: full and valid


def tail_scene(case: Case, offset: float = 0.0) -> TailScene:
    """`offset`: what visited groups' estimates are too high by."""
    one = scene(case)
    rng, lengths = one.noise, np.array(case.lengths)
    kv_heads, num_groups = one.listed.shape[1:]
    per_unit, pool = case.unit // case.correction, len(one.k)
    estimate = rng.normal(size=one.listed.shape) * 3 + np.where(one.listed, 3 + offset, 0)
    estimate[rng.random(estimate.shape) < 0.05] = np.inf
    estimate[rng.random(estimate.shape) < 0.02] = np.nan
    estimate = np.where(np.arange(num_groups) < -(-lengths[:, None, None] // case.size), estimate, -np.inf)
    valid = rng.random((pool, per_unit)) < 0.8
    corrections = np.arange(case.units * per_unit)
    unit = np.maximum(one.table.cpu().numpy(), 0)[:, corrections // per_unit]
    usable = valid[unit, corrections % per_unit] & ((corrections + 1) * case.correction <= lengths[:, None])

    def native(array: np.ndarray, kind: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(DEVICE, kind)

    return TailScene(
        one,
        native(estimate, torch.float32),
        native(one.listed, torch.bool),
        native(rng.integers(-127, 128, (pool, kv_heads, per_unit, case.head_dim)), torch.int8),
        native(rng.random((pool, kv_heads, per_unit)) / 64, torch.float16),
        native(valid.ravel(), torch.uint8),
        usable,
    )


def tail_reference(one: TailScene, lse: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(out, sum of weighted |means|, lse) in float64 of the correction, where lse [B, Hq] is what was read."""
    case, table = one.read.case, one.read.table.cpu().numpy()
    mean = wide(one.mean) * wide(one.mean_scale)[..., None]
    estimate, selected_mask = wide(one.estimate), one.read.listed
    per_unit, per_correction = case.unit // case.correction, case.correction // case.size
    out, size = np.zeros((*lse.shape, case.head_dim)), np.zeros((*lse.shape, case.head_dim))
    correction = np.full(lse.shape, -np.inf)
    for b, head in np.ndindex(*lse.shape):
        h = head // case.repeat
        known = np.isfinite(estimate[b, h])
        seen = np.logaddexp.reduce(estimate[b, h][known & selected_mask[b, h]], initial=-np.inf)
        counted = np.flatnonzero(known & ~selected_mask[b, h] & np.repeat(one.usable[b], per_correction))
        if not len(counted):
            continue
        mass = np.logaddexp.reduce(estimate[b, h][counted])
        weights = np.exp(estimate[b, h][counted] - mass)
        index = counted // per_correction
        means = mean[table[b, index // per_unit], h, index % per_unit]
        out[b, head], size[b, head] = weights @ means, weights @ np.abs(means)
        correction[b, head] = mass - (max(seen - lse[b, head], 0) if seen > -np.inf else 0)
    return out, size, correction


def tailed(module: ModuleType, one: TailScene, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return module.attend_correction(
        one.estimate, one.selected_mask, lse, one.mean, one.mean_scale, one.valid, one.read.table, one.read.lengths,
        group_size=one.read.case.size, correction_tokens=one.read.case.correction, num_splits=one.read.case.splits,
    )  # fmt: skip


def fused(module: ModuleType, one: TailScene) -> tuple[torch.Tensor, torch.Tensor]:
    read = one.read
    return module.attend_with_correction(
        read.q, read.k, read.v, read.table, read.lengths, read.groups, read.counts, one.estimate,
        one.selected_mask.to(torch.uint8), one.mean, one.mean_scale, one.valid, group_size=read.case.size,
        correction_tokens=read.case.correction, num_splits=read.case.splits,
    )  # fmt: skip


def check_tail(module: ModuleType, case: Case, offset: float = 0.0) -> None:
    """Both ways to a correction, as the definition says, and bit for bit independent of means that do not count."""
    one = tail_scene(case, offset)
    read, read_size, mass, reach = reference(one.read)
    lse = torch.from_numpy(mass).to(DEVICE, torch.float32)
    out, correction = tailed(module, one, lse)
    want, size, want_tail = tail_reference(one, mass)
    assert out.dtype == correction.dtype == torch.float32
    check_close(wide(out), want, size * 4 * FLOAT32_ERROR)
    check_close(
        wide(correction), want_tail, 4 * FLOAT32_ERROR * (1 + np.abs(np.where(np.isneginf(want_tail), 0, want_tail)))
    )

    with np.errstate(invalid="ignore"):
        both = np.logaddexp(mass, want_tail)
        share = np.where(np.isneginf(both), 0, np.exp(mass - both))[..., None]
        rest = np.where(np.isneginf(both), 0, np.exp(want_tail - both))[..., None]
    merged = fused(module, one)
    check_states(one.read, *merged, (share * read + rest * want, share * read_size + rest * size, mass, reach))

    table, corrections = one.read.table.cpu().numpy(), np.arange(one.usable.shape[1])
    per_unit = case.unit // case.correction
    uncounted = np.ones((len(one.mean), 1, per_unit), bool)
    for b, index in np.argwhere(one.usable):
        uncounted[table[b, corrections[index] // per_unit], 0, corrections[index] % per_unit] = False
    scale = one.mean_scale.masked_fill(torch.from_numpy(uncounted).to(DEVICE), float("nan"))
    other = replace(one, mean_scale=scale, read=poisoned(one.read))
    for got, same in zip((*tailed(module, other, lse), *fused(module, other)), (out, correction, *merged), strict=True):
        assert torch.equal(got, same), "what does not count changed the result"


TAIL_CASES = [
    Case(lengths=(61, 1, 30)),
    Case("bf16", 64, 4, 2, 64, 3, lengths=(190, 64, 65), correction=64, empty=True),
    Case("fp16", 80, 3, 3, 48, 3, lengths=(143, 48), correction=24),
    Case("fp32", 33, 8, 5, 60, 2, lengths=(119,), correction=60),
    Case("bf16", 128, 16, 16, 64, 2, kv_heads=1, lengths=(128,), correction=16),
    Case("fp32", 16, 2, 2, 16, 40, kv_heads=1, lengths=(640,), correction=4, share=0.1, splits=2),
]


@pytest.mark.parametrize(("case", "offset"), [*((case, 3.0) for case in TAIL_CASES), (TAIL_CASES[3], -9.0)], ids=str)
def test_tail_equals_its_definition(case, offset):
    check_tail(tail_module, case, offset)


def test_nothing_skipped_is_bit_for_bit_without_a_tail():
    one = tail_scene(replace(BASE, share=1.0))
    want = attended(attend_module, one.read)
    assert torch.isneginf(tailed(tail_module, one, want[1])[1]).all()
    for got, same in zip(fused(tail_module, one), want, strict=True):
        assert torch.equal(got, same)


def test_largest_estimates_do_not_overflow():
    one = tail_scene(BASE)
    high = torch.where(torch.isfinite(one.estimate), 1e38, one.estimate)
    _, lse = attended(attend_module, one.read)
    one = replace(one, estimate=high)
    for out, correction in (tailed(tail_module, one, lse), fused(tail_module, one)):
        assert torch.isfinite(out).all() and not torch.isnan(correction).any()


# ------------------------------------------------------------------------------------------------------ tests of tests

LONG = Case("fp32", 16, 2, 2, 16, 12, lengths=(191, 150), splits=1, share=0.9)
TWICE = replace(LONG, splits=3)
WIDE = Case("bf16", 64, 4, 2, 64, 1, lengths=(60,), q_dtype="fp32", share=0.2, loud=0.1)
MIXED = replace(BASE, bits=(8, 4))
EXACT = replace(BASE, bits=(8, 8))
MANY = next(case for case in CASES if case.splits == 40)

NOTICED = r"off by|changed the result"
ATTEND_MUTANTS = {
    "reads one token past the end": ("position < length)", "position <= length)", BASE),
    "keeps old sums unscaled": ("acc = acc * shrink[:, None]", "acc = acc * 1.0", LONG),
    "keeps old totals unscaled": ("total = total * shrink + tl.sum(weight, axis=1)",
                                  "total = total + tl.sum(weight, axis=1)", LONG),
    "interleaves query heads": ("head = pair.to(tl.int64) * R + r",
                                "head = (b * HKV * R + r * HKV + h).to(tl.int64)", BASE),
    "reads the first kv head": ("+ h * HEAD_STRIDE", "", BASE),
    "reads the group after": ("group * S + token % S", "(group + 1) * S + token % S", BASE),
    "takes the tile's place for the unit's": ("position % U * TOKEN_STRIDE", "position % 2 * TOKEN_STRIDE", BASE),
    "reads masked rows": ("mask = live[:, None]", "mask = (start >= 0)[:, None]", BASE),
    "lets dead tokens count": ("tl.where(live[None, :], logits * scale", "tl.where(row[None, :] > -9, logits * scale",
                               BASE),
    "forgets the base of its logarithm": ("* 0.6931471805599453", "* 1.0", BASE),
    "prefetches the wrong block": ("group = load_groups(groups, token + BLOCK_N, last, S, SPARSE)\n    for",
                                   "group = load_groups(groups, token, last, S, SPARSE)\n    for", LONG),
    "reads blocks twice": ("num_blocks * (split + 1) // num_splits", "num_blocks * (split + 2) // num_splits", TWICE),
    "drops a split": ("inside = split < num_splits", "inside = split < num_splits - 1", TWICE),
    "merges unscaled": ("acc = acc * shrink + tl.sum(tl.where(", "acc = acc + tl.sum(tl.where(", MANY),
    "trusts what empty splits left": ("tl.where(weight[:, None] > 0, weight[:, None] * out, 0.0)",
                                      "weight[:, None] * out", MANY),
    "rounds a wider q": ("tl.dot(query_low, ", "tl.dot(query_low * 0, ", WIDE),
    "rounds weights under a wider q": ("tl.dot(weight_low, ", "tl.dot(weight_low * 0, ", WIDE),
    "forgets V's scale": ("load_values(v, row, value_scale,", "load_values(v, row, value_scale * 0 + 1,", MIXED),
    "takes K's scale for V's": ("load_values(v, row, value_scale,", "load_values(v, row, key_scale,", MIXED),
    "takes the block's scales before": ("row = places(unit, position, h, U, UNIT_STRIDE, HEAD_STRIDE, TOKEN_STRIDE)\n"
                                        "            key_scale", "key_scale", replace(LONG, bits=(8, 8))),
    "swaps the codes of a byte": ("tl.interleave(pairs & 15, pairs >> 4)", "tl.interleave(pairs >> 4, pairs & 15)",
                                  MIXED),
    "takes 4-bit codes for unsigned": (".to(tl.float32) - 8.0", ".to(tl.float32)", MIXED),
    "reads 4-bit rows at every second place": ("row * (D // 2)", "row * D", MIXED),
    "keeps float32 values": ("return values.to(VALUES)", "return (values * 1.004).to(VALUES)", EXACT),
}  # fmt: skip

FEW, LARGE = replace(TAIL_CASES[0], lengths=(61, 30), splits=2), TAIL_CASES[-1]
TAIL_MUTANTS = {
    "counts the open correction group": ("(correction + 1) * TAIL <= length", "correction * TAIL < length", FEW, 3.0),
    "counts invalid correction groups": ("mask=usable, other=0) != 0", "mask=usable, other=0) >= 0", FEW, 3.0),
    "counts what was read": ("known & (selected == 0) & usable[:, None]", "known & usable[:, None]", FEW, 3.0),
    "has seen everything": ("seen = tl.where(known & selected", "seen = tl.where(known", FEW, 3.0),
    "never lowers": ("tl.where(seen > read_mass, seen - read_mass, 0.0)", "tl.where(seen > read_mass, 0.0, 0.0)", FEW,
                     3.0),
    "raises too": ("tl.where(seen > read_mass, seen - read_mass, 0.0)", "(seen - read_mass)", FEW, -9.0),
    "takes infinities for estimates": ("tl.abs(value) < float(\"inf\")", "value == value", FEW, 3.0),
    "forgets the scale": ("(weight * scale)[:, None] * code", "weight[:, None] * code", FEW, 3.0),
    "takes the first head's means": ("(unit * HKV + h) * PER_UNIT", "(unit * HKV) * PER_UNIT", FEW, 3.0),
    "takes another head's correction": ("pair = head // R", "pair = head // R // 2", FEW, 3.0),
    "keeps old sums unscaled": ("acc = acc * shrink + tl.sum", "acc = acc + tl.sum", LARGE, 3.0),
    "drops a split of what was seen": ("mask=split < num_splits, other", "mask=split < num_splits - 1, other", LARGE,
                                       3.0),
    "merges without what was read": ("+ read * (weight_read / total)", "+ read * 0.0", FEW, 3.0),
}  # fmt: skip


def mutant(module: ModuleType, old: str, new: str, folder: Path) -> ModuleType:
    """The module with a piece of its source replaced, built again."""
    assert module.__file__ is not None
    source = Path(module.__file__).read_text()
    assert source.count(old) >= 1, f"{old!r} is no longer in {module.__name__}"
    file = folder / f"mutant_{module.__name__.rpartition('.')[2]}.py"
    file.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    built = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(built)
    return built


@lru_cache
def passes(case: Case, offset: float | None = None) -> None:
    """Raises unless the real kernels pass what a mutant of them must not."""
    if offset is None:
        check(attend_module, case)
    else:
        check_tail(tail_module, case, offset)


@pytest.mark.parametrize("name", ATTEND_MUTANTS)
def test_attention_checks_notice(name, tmp_path):
    old, new, case = ATTEND_MUTANTS[name]
    passes(case)
    with pytest.raises(AssertionError, match=NOTICED):
        check(mutant(attend_module, old, new, tmp_path), case)


@pytest.mark.parametrize("name", TAIL_MUTANTS)
def test_tail_checks_notice(name, tmp_path):
    old, new, case, offset = TAIL_MUTANTS[name]
    passes(case, offset)
    with pytest.raises(AssertionError, match=NOTICED):
        check_tail(mutant(tail_module, old, new, tmp_path), case, offset)


def test_an_unchanged_copy_passes(tmp_path):
    check(mutant(attend_module, "S", "S", tmp_path), BASE)
    check_tail(mutant(tail_module, "S", "S", tmp_path), FEW, 3.0)


# ------------------------------------------------------------------------------------------------------ ahead of time


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
