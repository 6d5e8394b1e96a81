"""What is Triton's own in its kernels of codes about units' means: rounded queries to the bit, and what the compilers
make of them. Estimates are tested with all kernels, in test_kernel_scores.py."""

import ast
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
from test_kernel_scores import CASES, KV_HEADS, Filled, check
from test_triton_attend import DEVICE, TRITON
from triton_aot import TARGETS, Compiled, Job, compile_ahead, job

from eps_core.backend.summaries.rq import rotate, rounded_query
from eps_core.config.selection import ANCHOR_SPREAD
from eps_core.summaries.base import LARGEST_ESTIMATE
from eps_core.summaries.rq import QUERY_STEPS, rq_signs
from eps_core.summaries.rq import rotate as rotate64
from eps_cuda.kernels import bits, score, units
from eps_cuda.ops import OPS


def put(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(DEVICE)


@pytest.mark.parametrize("name", ["usual", "odd head dim"])
def test_integers_are_converted_where_subnormals_are_flushed(name, monkeypatch) -> None:
    scored = units.score_units
    monkeypatch.setattr(units, "score_units", lambda *args, **named: scored(*args, subnormal=False, **named))
    check(TRITON, DEVICE, Filled(CASES[name]))


@pytest.mark.parametrize("name", ["usual", "summed, read at once", "no power of two, read at once"])
def test_a_program_takes_many_units(name, monkeypatch) -> None:
    """Long contexts give each program many units; here one multiprocessor does."""
    monkeypatch.setattr(units, "processors", lambda device: 1)
    for module in (units, bits):
        monkeypatch.setattr(module, "MEANS", 2)
    check(TRITON, DEVICE, Filled(CASES[name]))


def test_queries_are_rounded_as_everywhere() -> None:
    """Bit for bit what the array operations make, also where a quotient lies in the middle between two integers; of
    whole words the integers' planes, too."""
    rng = np.random.default_rng(0)
    for head_dim in (1, 16, 32, 33, 64, 96, 128, 256):
        signs = rq_signs(0, head_dim)
        q = rng.normal(size=(2, 6, head_dim)).astype(np.float32) * np.float32(10.0) ** rng.integers(-9, 9, (2, 6, 1))
        q[0, 0], q[1, 5, -1] = 0, 1e38
        if head_dim == 64:  # rotated without rounding: halves of a step of 1/8
            turned = (rng.integers(-61, 62, (2, 6, head_dim)) | 1) / 2
            turned[..., 0] = QUERY_STEPS
            q = (turned @ rotate64(np.eye(turned.shape[-1]), 0).T).astype(np.float32)
        q = q.astype(np.float32)
        found = units.round_queries(put(q), put(signs), KV_HEADS, with_planes=head_dim % 32 == 0)
        a = torch.from_numpy(q).reshape(2, KV_HEADS, 3, head_dim) * (1 / math.sqrt(head_dim))
        turned32 = rotate(OPS, a, torch.from_numpy(signs))
        integers, step = rounded_query(OPS, turned32)
        halves = found.halves.cpu().float() * found.inverses.cpu()[..., None, None]
        np.testing.assert_allclose(halves.sum(3), turned32, rtol=0, atol=2**-21 * float(turned32.abs().max()))
        np.testing.assert_allclose(
            found.head_sums.cpu(), turned32.sum(-1), rtol=0, atol=1e-5 * float(turned32.abs().max())
        )
        assert torch.equal(found.steps.cpu(), step[..., 0])
        assert torch.equal(found.integers.cpu().float(), integers)
        if head_dim == 64:
            assert ((turned32 / step).abs() % 1 == 0.5).float().mean() > 0.9
        if head_dim % 32 == 0:
            words = found.planes.cpu().numpy().view(np.uint32)  # [B, Hkv, R, planes, words]
            ones = (words[..., None] >> np.arange(32, dtype=np.uint32)) & 1
            weights = np.array([1, 2, 4, 8, 16, -32])
            of_planes = (ones.reshape(*words.shape[:4], head_dim) * weights[:, None]).sum(axis=3)
            assert (of_planes == integers.numpy()).all()
            assert (of_planes.sum(-1) == found.sums.cpu().numpy()).all()


# What compilers make of them


def shape(head_dim: int, dims: tuple[int, int, int], groups: int) -> dict:
    first, more, rest = dims
    return {
        "R": 4, "DP": head_dim, "D": first, "MORE": more, "REST": rest, "ROW": head_dim, "SUBNORMAL": True, "SPU": 1,
        "N": groups, "LARGEST": LARGEST_ESTIMATE, "SUM": False, "ASM": True, "M": units.READ_ON_GROUPS,
        "RP": units.integer_columns(4),
    }  # fmt: skip


def first_of(constants: dict) -> dict:
    return {name: value for name, value in constants.items() if name not in ("MORE", "REST", "M")} | {
        "S": 2, "NP": constants["N"], "MEAN_RP": 4, "DK": constants["ROW"], "LOG_S": math.log(2), "BLOCK": score.MEANS,
        "FILL": True,
    }  # fmt: skip


HALVES, QUARTERS = shape(128, (64, 0, 64), 32), shape(64, (16, 16, 32), 16)
WHOLE = shape(128, (128, 0, 0), 64)
HELD = {"scale": "*u8", "mean": "*u8"}
ON_ITS_OWN = "more", "second", "through", "named"
JOBS = {
    "queries": job(
        units._round_queries,
        {"R": 4, "HEAD_DIM": 128, "DIM2": 128, "LOG_DIM": 7, "STEPS": QUERY_STEPS, "SPREAD": ANCHOR_SPREAD,
         "PLANES": bits.PLANES, "COUNTERS": 133, "COUNTERS_PADDED": 256},
        {"q": "*bf16", "k_pool": "*bf16"}, num_warps=1, enable_fp_fusion=False,
    ),
    **{
        name: job(units._score_units, constants, HELD, absent, num_warps=1)
        for name, constants, absent in (
            ("first of halves", first_of(HALVES), ["second", "anchors"]),
            ("first of quarters", first_of(QUARTERS), ["second", "anchors"]),
            ("whole codes", first_of(WHOLE), ["second", "anchors"]),
            ("whole codes and rescoring bits", first_of(WHOLE) | {"SUM": True, "FILL": False}, []),
            ("summed first of halves", first_of(HALVES) | {"SUM": True}, ["second"]),
        )
    },
    **{
        name: job(units._read_on, constants, HELD, absent, num_warps=1)
        for name, constants, absent in (
            ("rescoring bits of whole codes", WHOLE | {"SUM": True}, ["more", "rest", "left", "through", "named"]),
            ("rest", HALVES, ON_ITS_OWN),
            ("quarters' rest", QUARTERS, ["second"]),
            ("rescoring bits", HALVES, ["more", "left", "named"]),
            ("summed rest", HALVES | {"SUM": True}, ON_ITS_OWN),
            ("summed rescoring bits", HALVES | {"SUM": True}, ["more", "left", "named"]),
        )
    },
}  # fmt: skip


BITS = {
    "R": 4, "D": 128, "RP": 4, "DK": 128, "WORDS": 4, "SPU": 1, "S": 1, "PLANES": bits.PLANES, "SUM": True, "ASM": True,
    "LARGEST": LARGEST_ESTIMATE, "LOG_S": 0.0, "BLOCK": score.MEANS, "FILL": False,
}  # fmt: skip
WIDE = {"codes": "*i64", "second": "*i32", "scale": "*i64", "mean": "*u8"}  # as products of bits take them


def check_compiled(name: str, made: Compiled) -> None:
    print(name, made)
    assert made.spilled_bytes == 0, (name, made.target)
    if name != "queries":  # the tensor cores of each
        assert any(word in made.text for word in ("wgmma", "mma.sync", "v_mfma")), name
    elif made.target.startswith("cuda"):  # integers are rounded from it
        inexact = re.findall(r"\b(?:fma\.|div\.full|div\.approx|(?:add|sub|mul)[.\w]*\.ftz).*", made.text)
        assert "div.rn.f32" in made.text and not inexact, inexact[:3]


def for_amd(one: Job) -> Job:
    """As launchers ask for it where torch is built for AMD."""
    changed = {"RP": 16, "MEAN_RP": 8, "SUBNORMAL": False, "ASM": False}
    return replace(one, constants={key: changed.get(key, value) for key, value in one.constants.items()})


def test_kernels_compile_for_gpus() -> None:
    """Every variant for H100, some for A100 and MI300: what the interpreter does not show."""
    names, old = list(JOBS), ("first of halves", "queries", "rest")
    for_nvidia = compile_ahead(list(JOBS.values()), TARGETS[1:2])
    further = compile_ahead([JOBS[name] for name in old], TARGETS[:1])
    made = [*zip(names, for_nvidia, strict=True), *zip(old, further, strict=True)]
    amd = [for_amd(JOBS[name]) for name in names[::2]]
    made += zip(names[::2], compile_ahead(amd, TARGETS[2:]), strict=True)
    for name, (one,) in made:
        check_compiled(name, one)
    # neighbouring groups' bytes lie side by side, and are read so
    first = further[0][0].text
    assert len(re.findall(r"ld\.global\.v4\.b32", first)) >= 4 > len(re.findall(r"ld\.global\.b8 .*%rd1[0-2] ", first))


@pytest.mark.parametrize(
    ("repeat", "head_dim", "products"),
    [(4, 128, 24), (1, 160, 48), (bits.MOST_HEADS, 128, 96)],
)
def test_products_of_bits_compile_for_nvidia(repeat: int, head_dim: int, products: int) -> None:
    """Every lane holds one element of what products take, as their assembly expects: with more, a product would be
    compiled several times."""
    constants = BITS | {
        "R": repeat, "WORDS": head_dim // 32, "D": head_dim, "RP": score._padded_heads(repeat),
        "DK": triton.next_power_of_2(head_dim),
    }  # fmt: skip
    plain = compile_ahead([job(bits._score_bits, constants, WIDE, num_warps=1)], TARGETS[:2])[0]
    early = compile_ahead([job(bits._score_bits, constants | {"OVERLAP": True}, WIDE, num_warps=1)], TARGETS[1:2])[0]
    for made in plain + early:
        print(made)
        assert made.spilled_bytes == 0
        assert made.text.count("mma.sync.aligned.m16n8k128.row.col.s32.b1.b1.s32.and.popc") == products
    assert "griddepcontrol.wait" in early[0].text and "griddepcontrol" not in plain[1].text


def test_kernels_that_overlap_wait_first() -> None:
    """A kernel that reads before it waits may read what the kernel before it has not written yet."""
    found = []
    for file in sorted(Path(units.__file__).parent.glob("*.py")):
        for one in ast.parse(file.read_text()).body:
            if isinstance(one, ast.FunctionDef) and "OVERLAP" in [arg.arg for arg in one.args.args[1:]]:
                lines = [ast.unparse(line) for line in one.body]
                assert lines[1] == "wait(OVERLAP)", one.name  # after its docstring
                assert "release(OVERLAP)" in "\n".join(lines), one.name
                found.append(one.name)
    assert len(found) == 12


def run_assembly(inputs: list[np.ndarray]) -> list[np.ndarray]:
    """Return $0 to $3 of `bits.ASSEMBLY` for $4 to $14, int32 [32] each, a lane an element: what PTX says of its six
    instructions."""
    names: dict[str, np.ndarray] = {f"${4 + at}": one.astype(np.int32) for at, one in enumerate(inputs)}

    def value(name: str) -> np.ndarray:
        if name in names:
            return names[name]
        return np.full(32, np.uint32(int(name[2:], 16)).view(np.float32) if name[:2] == "0f" else int(name, 0))

    for line in bits.ASSEMBLY.value.strip("{}\n").split(";"):
        words = re.findall(r"[$\w.-]+", line)
        if not words or words[0] == ".reg":
            continue
        operation, *places = words
        if operation.startswith("mma"):
            assert operation == "mma.sync.aligned.m16n8k128.row.col.s32.b1.b1.s32.and.popc"
            first, second, columns = (value(name).view(np.uint32).reshape(8, 4) for name in places[4:7])
            rows = np.concatenate([first, second])  # [16, 4]: row g is lane 4 g's, and row g + 8
            shared = np.ascontiguousarray(rows[:, None] & columns[None]).view(np.uint8)
            ones = np.unpackbits(shared, axis=-1).sum(-1, dtype=np.int32).reshape(2, 8, 4, 2)
            for at, name in enumerate(places[:4]):
                names[name] = (ones[at // 2, :, :, at % 2].ravel() + value(places[7 + at])).astype(np.int32)
            continue
        target, *values = places[0], *(value(name) for name in places[1:])
        if operation == "prmt.b32":
            stored = np.concatenate([one.astype("<i4").view(np.uint8).reshape(32, 4) for one in values[:2]], axis=1)
            picks = [int(places[3], 16) >> 4 * at & 7 for at in range(4)]
            names[target] = np.ascontiguousarray(stored[:, picks]).view("<i4").ravel()
        elif operation == "mad.lo.s32":
            names[target] = (values[0] * values[1] + values[2]).astype(np.int32)
        elif operation == "add.s32":
            names[target] = (values[0] + values[1]).astype(np.int32)
        elif operation == "mov.b32":
            names[target] = values[0].view(np.float32) if target == "f" else values[0].astype(np.int32)
        else:
            assert operation == "sub.f32", operation
            names[target] = values[0] - values[1].astype(np.float32)
    return [names[f"${at}"] for at in range(4)]


def test_the_assembly_of_products_sums_codes() -> None:
    """Against codes and integers as such; on a GPU the estimates of test_kernel_scores.py go through it."""
    rng = np.random.default_rng(2)
    codes, second = (rng.integers(0, 2, (32, 128)) for _ in range(2))  # of the groups 4 g + j of eight lanes g
    integers = rng.integers(-QUERY_STEPS, QUERY_STEPS + 1, (4, 128))
    packed, finer = (np.packbits(one, axis=1, bitorder="little").reshape(8, 4, 4, 4) for one in (codes, second))
    byte_rows = [np.ascontiguousarray(packed[..., at].swapaxes(1, 2)).view("<i4").ravel() for at in range(4)]
    words = [np.ascontiguousarray(finer[:, j]).view("<i4").ravel() for j in range(4)]
    planes = [np.packbits(integers >> at & 1, axis=1, bitorder="little").view("<i4") for at in range(bits.PLANES)]
    columns = [np.stack(planes[at : at + 2], axis=1).ravel() for at in (0, 2, 4)]  # column 2 r and 2 r + 1 of head r
    found = run_assembly([*byte_rows, *words, *columns])
    expected = (2 * codes + second) @ integers.T  # [32 groups, 4 heads]
    assert np.array_equal(np.stack(found, axis=1).reshape(8, 4, 4).swapaxes(1, 2).reshape(32, 4), expected)
