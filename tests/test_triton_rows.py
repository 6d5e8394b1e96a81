"""The Triton kernel for several rows of a sequence, in Triton's interpreter where there is no GPU: values against
float64, what it reads and how often, that a row's bits are its own, what the compilers make of it, and that the checks
notice deliberate mistakes."""

from dataclasses import dataclass, replace
from functools import lru_cache
from types import ModuleType

import numpy as np
import pytest
import torch
from test_triton_attend import (
    DTYPES,
    FLOAT32_ERROR,
    NOTICED,
    ROUNDING,
    check_close,
    held,
    mutant,
    pool_constants,
    pool_types,
    uninitialised_memory_is_nan,  # noqa: F401
    wide,
)
from triton_aot import TARGETS, Job, compile_ahead
from triton_interpreter import DEVICE

import eps_cuda
from eps_core.backend import attention
from eps_core.backend.pages import Pool
from eps_core.config.cache import CacheSpec
from eps_core.config.eps import EpsConfig
from eps_core.kv_cache.rows import Rows
from eps_core.kv_cache.step_plan import StepPlan
from eps_cuda.kernels import attend as attend_module
from eps_cuda.kernels import rows as rows_module


@dataclass(frozen=True)
class Case:
    """Shapes of one scene: `lengths` and `rows` of each sequence, `units` of U = `unit` tokens in the table."""

    dtype: str = "fp32"
    head_dim: int = 16
    repeat: int = 2
    size: int = 2  # S
    unit: int = 16
    units: int = 12
    kv_heads: int = 2
    lengths: tuple[int, ...] = (180, 45)
    rows: tuple[int, ...] = (9, 4)
    q_dtype: str | None = None
    asked: bool = True  # for visits
    loud: float = 1.5  # of q's entries
    spoilt: bool = False  # the last token of each sequence has NaN in V
    bits: tuple[int, int] = (16, 16)  # of K and of V

    def __str__(self) -> str:
        rows = "+".join(map(str, self.rows))
        codes = "" if self.bits == (16, 16) else f"-K{self.bits[0]}V{self.bits[1]}"
        return f"{self.dtype}-{self.q_dtype or self.dtype}-D{self.head_dim}-R{self.repeat}-S{self.size}-N{rows}{codes}"


@dataclass
class Scene:
    """Inputs of one call on the device. Whatever no row may read is NaN."""

    case: Case
    q: torch.Tensor
    k: Pool
    v: Pool
    table: torch.Tensor
    rows: Rows
    selected_mask: torch.Tensor | None

    def run(self, module: ModuleType = rows_module) -> tuple[torch.Tensor | None, ...]:
        return module.attend_rows(
            self.q, self.k, self.v, self.table, device(self.rows.lengths), device(self.rows.starts),
            most_rows=int(self.rows.num_rows.max()), group_size=self.case.size, selected_mask=self.selected_mask,
        )  # fmt: skip


def device(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array.astype(np.int32))).to(DEVICE)


def scene(case: Case, seed: int = 0) -> Scene:
    rng = np.random.default_rng(seed)
    batch = len(case.lengths)
    pool = batch * case.units + 3
    values = rng.normal(size=(pool, case.kv_heads, case.unit, case.head_dim)) + 0.5
    table, order = np.full((batch, case.units), -1, np.int32), rng.permutation(np.arange(1, pool))
    inside = np.zeros((pool, 1, case.unit, 1), bool)
    for b, length in enumerate(case.lengths):
        used = -(-length // case.unit)
        table[b, :used], order = order[:used], order[used:]
        tokens = np.arange(length)
        inside[table[b, tokens // case.unit], 0, tokens % case.unit] = True
        if case.spoilt:
            values[table[b, (length - 1) // case.unit], :, (length - 1) % case.unit, 3] = np.nan
    shape = (pool, case.kv_heads, case.unit, case.head_dim)
    # one token far above the others makes the running maximum move
    k = rng.normal(size=shape) * (1 + 2 * (rng.random(shape[:3]) < 0.1))[..., None]
    total, groups = sum(case.rows), case.units * case.unit // case.size
    q = rng.normal(size=(total, case.kv_heads * case.repeat, case.head_dim)) * case.loud
    selected_mask = rng.random((total, case.kv_heads, groups)) < 0.3
    selected_mask[0] = False  # a row of which nothing was visited

    def native(array: np.ndarray, kind: str) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(DEVICE, DTYPES[kind])

    return Scene(
        case,
        native(q, case.q_dtype or case.dtype),
        held(native(np.where(inside, k, np.nan), case.dtype), case.bits[0]),
        held(native(np.where(inside, values, np.nan), case.dtype), case.bits[1]),
        torch.from_numpy(table).to(DEVICE),
        Rows.of(table, np.array(case.lengths), np.array(case.rows)),
        torch.from_numpy(selected_mask).to(DEVICE) if case.asked else None,
    )


def check(module: ModuleType, case: Case) -> None:
    """Values as float64's, within the roundings that the kernels' documentation states."""
    one = scene(case)
    out, lse, selected = one.run(module)
    assert out.dtype == one.q.dtype and lse.dtype == torch.float32 and out.shape == one.q.shape
    q, k, v = wide(one.q), wide(one.k), wide(one.v)
    stored, same = ROUNDING[DTYPES[case.dtype]], one.q.dtype == one.k.dtype
    groups = case.units * case.unit // case.size
    for t, head in np.ndindex(q.shape[:2]):
        b, h, seen = int(one.rows.sequence[t]), head // case.repeat, int(one.rows.seen[t])
        tokens = np.arange(seen)
        at = (one.rows.table[b, tokens // case.unit], h, tokens % case.unit)
        logits = k[at] @ q[t, head] / np.sqrt(case.head_dim)
        reach = (np.abs(k[at]) @ np.abs(q[t, head])).max() / np.sqrt(case.head_dim)
        of_logits, of_weights = reach * 2.0**-22 + FLOAT32_ERROR, 0.0
        if case.dtype != "fp32":
            of_logits += 0 if same else reach * stored**2
            of_weights = stored if same else stored**2
        if case.spoilt and seen == one.rows.lengths[b]:
            assert torch.isnan(out[t, head]).all(), "a broken value changed the result of no row that sees it"
            continue
        weights = np.exp(logits - logits.max())
        mass = logits.max() + np.log(weights.sum())
        weights /= weights.sum()
        rounding = 2 * of_logits + of_weights + ROUNDING[one.q.dtype]
        check_close(wide(out[t, head]), weights @ v[at], weights @ np.abs(v[at]) * rounding)
        allowed = of_logits + FLOAT32_ERROR * (1 + np.abs(logits).max())
        check_close(wide(lse[t, head]), mass, allowed)
        if not case.asked:
            continue
        of_group = np.full(groups, -np.inf)
        np.logaddexp.at(of_group, tokens // case.size, logits)
        listed = of_group[one.selected_mask[t, h].cpu().numpy()]
        check_close(wide(selected[t, head]), np.logaddexp.reduce(listed, initial=-np.inf), allowed)


BASE = Case()
CASES = [
    BASE,
    replace(BASE, spoilt=True, asked=False),
    Case("bf16", 64, 4, 2, 64, 3, lengths=(190, 65, 1), rows=(9, 5, 1)),
    Case("fp16", 128, 8, 3, 48, 3, lengths=(143, 48), rows=(9, 48)),  # several tiles of queries
    Case("bf16", 80, 16, 16, 64, 2, kv_heads=1, lengths=(100,), rows=(33,)),
    Case("fp16", 96, 3, 48, 96, 2, lengths=(7, 190), rows=(7, 2)),  # rows that see nothing else; lanes without token
    Case("bf16", 256, 1, 128, 128, 2, lengths=(130, 256), rows=(3, 17)),  # groups of several blocks
    Case("fp32", 33, 3, 1, 16, 40, kv_heads=1, lengths=(600, 17), rows=(2, 1)),  # several splits
    Case("fp32", 16, 4, 80, 80, 9, kv_heads=1, lengths=(700, 200), rows=(5, 9)),
    Case("bf16", 20, 17, 5, 20, 4, lengths=(77,), rows=(5,)),
    Case("bf16", 64, 4, 2, 64, 3, lengths=(150, 70), rows=(9, 1), q_dtype="fp32"),
    Case("fp32", 64, 4, 2, 64, 3, lengths=(150, 70), rows=(3, 3), q_dtype="bf16", asked=False),
    Case("bf16", 64, 4, 2, 64, 3, lengths=(190, 65, 1), rows=(9, 5, 1), bits=(8, 4)),
    Case("fp16", 128, 8, 16, 64, 2, lengths=(100,), rows=(3,), bits=(4, 8), loud=0.5),
    Case("fp32", 34, 3, 1, 16, 6, kv_heads=1, lengths=(90, 17), rows=(2, 1), bits=(4, 4)),
    Case("bf16", 80, 1, 16, 64, 2, lengths=(100,), rows=(5,), q_dtype="fp32", bits=(16, 8)),
    Case(spoilt=True, asked=False, bits=(8, 8)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_equal_their_definition(case):
    check(rows_module, case)


def alone(one: Scene, t: int, width: int) -> Scene:
    """Row t as the only one of a batch of one, in a table of `width` units."""
    b = int(one.rows.sequence[t])
    table = np.full((1, width), -1, np.int32)
    used = min(width, one.rows.table.shape[1])
    table[0, :used] = one.rows.table[b, :used]
    return replace(
        one, q=one.q[t : t + 1], table=torch.from_numpy(table).to(DEVICE), selected_mask=None,
        case=replace(one.case, asked=False), rows=Rows.of(table, one.rows.seen[t : t + 1], np.array([1])),
    )  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [
        Case("fp32", 32, 4, 3, 48, 30, kv_heads=1, lengths=(1111, 530, 40), rows=(9, 4, 17)),
        Case("bf16", 64, 8, 16, 64, 18, kv_heads=1, lengths=(1030, 515), rows=(17, 9)),
        Case("fp16", 64, 2, 2, 64, 10, lengths=(520, 515), rows=(33, 1), q_dtype="fp32"),
        Case("bf16", 64, 2, 16, 64, 10, kv_heads=1, lengths=(515, 70), rows=(9, 4), bits=(8, 4)),
    ],
    ids=str,
)
def test_the_bits_of_a_row_are_its_own(case):
    """Neither the batch, nor the other rows, nor the table's width, nor what else is asked for changes them."""
    one = scene(case)
    out, lse, *_ = one.run()
    other = replace(one, selected_mask=None, case=replace(case, asked=False))
    order = np.arange(len(case.lengths))[::-1]
    back = np.concatenate([np.flatnonzero(one.rows.sequence == b) for b in order])
    table = one.rows.table[order]
    turned = replace(
        other, q=one.q[torch.from_numpy(back)], table=torch.from_numpy(table.copy()).to(DEVICE),
        rows=Rows.of(table, one.rows.lengths[order], one.rows.num_rows[order]),
    )  # fmt: skip
    out_turned, lse_turned, *_ = turned.run()
    assert torch.equal(out_turned, out[torch.from_numpy(back)]) and torch.equal(lse_turned, lse[torch.from_numpy(back)])
    for t in {0, 1, 7, 8, one.rows.total - 1, *one.rows.starts[:-1].tolist()}:
        needed = -(-int(one.rows.seen[t]) // case.unit)
        for width in (needed, case.units + 33 * rows_module.SPLIT_TOKENS // case.unit):  # a second block of the merge
            got, mass, *_ = alone(one, t, width).run()
            assert torch.equal(got[0], out[t]) and torch.equal(mass[0], lse[t]), (t, width)


@pytest.mark.skipif(DEVICE != "cpu", reason="only the interpreter says what is loaded")
@pytest.mark.parametrize("rows, passes", [((9, 4), 1), ((17, 4), 2)])
def test_rows_read_what_one_row_reads(monkeypatch, rows, passes):
    """Each element of K and V once for 64 queries; here, with 36 or 68 of them."""
    from triton.runtime.interpreter import InterpreterBuilder

    case = Case("bf16", 64, 4, 2, 64, 10, lengths=(600, 45), rows=rows)
    one, load = scene(case), InterpreterBuilder.create_masked_load
    pools = {name: (x.data_ptr(), x.data_ptr() + x.nbytes) for name, x in (("k", one.k), ("v", one.v))}
    loaded: dict[str, list[np.ndarray]] = {"k": [], "v": []}

    def counted(self, ptrs, mask, *rest):
        for name, (start, end) in pools.items():
            inside = ptrs.data[mask.data & (ptrs.data >= start) & (ptrs.data < end)]
            loaded[name].append(inside)
        return load(self, ptrs, mask, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", counted)
    one.run()
    second = min(rows[0] - 16, 1) if passes == 2 else 0  # only sequence 0 has queries for a second program
    for name in loaded:
        addresses = np.concatenate(loaded[name])
        elements = [length * case.kv_heads * case.head_dim for length in case.lengths]
        assert len(np.unique(addresses)) == sum(elements)
        assert len(addresses) == sum(elements) + second * elements[0]


def made_cache(
    kernels: str, method: str = "meanstd", bits: tuple[int, int] = (16, 16)
) -> tuple[eps_cuda.Cache, torch.Tensor]:
    config = EpsConfig.of(method=method, block_size=16, group_size=4)
    spec = CacheSpec(1, 2, 16, 4, "float32", k_bits=bits[0], v_bits=bits[1])
    cache = eps_cuda.new_cache(spec, config.cache_config, DEVICE, kernels)
    rng = np.random.default_rng(0)
    rows = torch.from_numpy(rng.normal(size=(40, 2, 16)).astype(np.float32)).to(DEVICE)
    return eps_cuda.write_kv(cache, 0, rows, rows, np.arange(40)), rows


@pytest.mark.parametrize("bits", [(16, 16), (8, 4), (16, 8)], ids=str)
def test_a_cache_with_kernels_goes_through_them(monkeypatch, bits):
    """Two launches, and no array operation reads K or V."""
    cache, keys = made_cache("triton", bits=bits)
    launched = []
    split = (rows_module, "rows_split_kernel"), (attend_module, "attend_split_kernel")
    for module, name in (*split, (rows_module, "merge_kernel")):
        kernel = getattr(module, name)

        class Counted:
            def __init__(self, kernel, name):
                self.kernel, self.name = kernel, name

            def __getitem__(self, grid):
                launched.append(self.name)
                return self.kernel[grid]

        monkeypatch.setattr(module, name, Counted(kernel, name))

    def refuse(*args):
        raise AssertionError("K and V are read by array operations")

    monkeypatch.setattr(attention, "read_kv", refuse)
    rows = Rows.of(np.arange(3)[None], np.array([40]), np.array([5]))
    eps_cuda.attend_rows(cache, 0, keys[:5].repeat(1, 2, 1), rows, None)
    assert launched == ["rows_split_kernel", "merge_kernel"]
    assert {key[0] for key in rows._made} == {"device", "starts"}, "copied once a pass"
    plan = StepPlan.dense(cache.cache_config, np.arange(3)[None], np.array([40]))
    eps_cuda.attend(cache, 0, keys[:1].repeat(1, 2, 1), plan, None)
    assert launched[2:] == ["attend_split_kernel"]


def test_placing_needs_no_kernel_and_kernels_see_no_summary():
    """`write_kv_tentative` is array operations; the flags that kernels go by are those of the host's state."""
    cache, keys = made_cache("triton")
    plain, _ = made_cache("arrays")
    for one in (cache, plain):
        eps_cuda.write_kv_tentative(one, 0, keys[:9] + 1, keys[:9] - 1, np.arange(18, 27))
    groups = np.arange(16)
    np.testing.assert_array_equal(cache.valid[0].cpu().numpy(), cache.state[0].valid(groups))
    np.testing.assert_array_equal(np.flatnonzero(cache.valid[0].cpu().numpy()), [0, 1, 2, 3, 7, 8, 9])
    for a, b in ((cache.k, plain.k), (cache.v, plain.v)):
        assert torch.equal(a[0], b[0])
    plan = StepPlan.of(EpsConfig.of(method="meanstd", block_size=16, group_size=4), np.arange(3)[None], np.array([40]))
    scores = eps_cuda.score(cache, 0, keys[:1].repeat(1, 2, 1), plan)
    assert torch.isposinf(scores.estimate[0, :, 4:7]).all() and torch.isfinite(scores.estimate[0, :, :4]).all()


# ---------------------------------------------------------------------------------------------------------- mistakes

SPOILT = replace(BASE, spoilt=True, asked=False)
LONG = Case("fp32", 16, 2, 2, 16, 40, kv_heads=1, lengths=(620, 150), rows=(3, 9), asked=False)
WIDE = Case("bf16", 64, 4, 2, 64, 1, lengths=(60,), rows=(3,), q_dtype="fp32", loud=0.1, asked=False)
CODES = replace(BASE, bits=(8, 4), asked=False)

MUTANTS = {
    "sees the next row": ("length - num_rows + row + 1", "length - num_rows + row + 2", BASE),
    "sees one token less": ("length - num_rows + row + 1", "length - num_rows + row", BASE),
    "reads lanes past the group": ("(lane % S_PAD < S) & ", "", Case(size=3, unit=12, units=15)),
    "takes the other rows' queries": ("pair_row = (first_row + row)", "pair_row = (row)", BASE),
    "interleaves query heads": ("head = pair_row * R + r", "head = (first_row + row) * HKV * R + r * HKV + h", BASE),
    "reads the first kv head": ("places(unit, here, h, U,", "places(unit, here, 0, U,", BASE),
    "keeps old sums unscaled": ("acc = acc * shrink[:, None]", "acc = acc * 1.0", LONG),
    "keeps old totals unscaled": ("total = total * shrink", "total = total", LONG),
    "leaves NaN in unseen values": ("value = tl.where(finite, value, 0.0)", "value = tl.where(finite, value, value)",
                                    SPOILT),
    "forgets values that it took out": ("visible & spoilt[None, :]", "visible & (spoilt[None, :] & False)", SPOILT),
    "drops a block": ("tl.cdiv(tl.maximum(last - first, 0), GROUPS * S)",
                      "(tl.maximum(last - first, 0) // (GROUPS * S))", BASE),
    "drops the second tile": ("tiles = triton.cdiv(", "tiles = min(1, ", Case(rows=(9, 33))),
    "rounds a wider q": ("tl.dot(query_low, ", "tl.dot(query_low * 0, ", WIDE),
    "rounds weights under a wider q": ("tl.dot(weight_low, ", "tl.dot(weight_low * 0, ", WIDE),
    "visits everything": ("listed = asked != 0", "listed = asked >= 0", BASE),
    "forgets earlier visits": ("selected_largest, selected_total, new,", "selected_largest, selected_total * 0, new,",
                               BASE),
    "forgets V's scale": ("load_values(v, place, value_scale,", "load_values(v, place, value_scale * 0 + 1,", CODES),
    "takes V's scale for K's": ("load_values(k, place, key_scale,", "load_values(k, place, value_scale,", CODES),
    "forgets the base of a logarithm": ("* 0.6931471805599453", "* 1.0", BASE),
}  # fmt: skip


@lru_cache
def passes(case: Case) -> None:
    check(rows_module, case)


@pytest.mark.parametrize("name", MUTANTS)
def test_checks_notice(name, tmp_path):
    old, new, case = MUTANTS[name]
    passes(case)
    with pytest.raises(AssertionError, match=NOTICED):
        check(mutant(rows_module, old, new, tmp_path), case)


# ------------------------------------------------------------------------------------------------------ ahead of time


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
