"""The formats of pages: every code, the oracle by brute force over Python's numbers, every backend by the oracle.
`test_kv_bits.py` tests caches of them."""

from collections.abc import Callable
from functools import partial
from importlib import import_module

import numpy as np
import pytest

from eps_core.backend import codes as arrays_codes
from eps_core.config import formats
from eps_core.config.formats import FORMATS, KV_BITS, FormatName
from eps_core.load import load_backend
from eps_core.reference import codes as oracle_codes

# the numbers of the two formats, by code: a sign bit, exponent, mantissa (Micikevicius et al. 2022; OCP MX 1.0)
E4M3 = [(c % 8) * 2.0**-9 if c < 8 else (1 + c % 8 / 8) * 2.0 ** (c // 8 - 7) for c in range(127)]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
NEW: tuple[FormatName, ...] = ("fp8", "nvfp4")
HEAD_DIMS: dict[FormatName, tuple[int, ...]] = {8: (16, 64, 96), 4: (16, 64, 96), "fp8": (32,), "nvfp4": (32,)}
BACKENDS = ("eps_core.reference", "eps_cuda", "eps_mlx")


def nearest(y: np.float32, numbers: list[float]) -> int:
    """Code without its sign: ties to the even one, past the end the last."""
    size = abs(float(y))
    return min(range(len(numbers)), key=lambda code: (abs(numbers[code] - size), code % 2))


def signed(y: np.float32, numbers: list[float]) -> int:
    return nearest(y, numbers) + (int(np.signbit(y)) << (len(numbers) - 1).bit_length())


def scale_of(row: np.ndarray, most: int) -> np.float16:
    """The least float16 that is at least max|x| / most."""
    wanted = np.float32(np.abs(row).max()) / np.float32(most)
    near = np.float16(wanted).view(np.uint16).astype(int) + np.arange(-1, 2)
    return next(f for f in near[near >= 0].astype(np.uint16).view(np.float16) if float(f) >= float(wanted))


def int_by_loop(row: np.ndarray, bits: int) -> tuple[list[int], np.float16]:
    """Bytes of codes from -most to most: of 4 bits two in one, 8 added to each."""
    codes, scale = [0] * len(row), np.float16(0)
    if np.abs(row).max() >= 2.0**-126:
        scale = scale_of(row, 2 ** (bits - 1) - 1)
        codes = [round(float(x / np.float32(scale))) for x in row]
    if bits == 8:
        return [code & 255 for code in codes], scale
    return [low + 8 + 16 * (high + 8) for low, high in zip(codes[::2], codes[1::2], strict=True)], scale


def fp8_by_loop(row: np.ndarray) -> tuple[list[int], np.float16]:
    if np.abs(row).max() < 2.0**-126:
        return [0] * len(row), np.float16(0)
    scale = scale_of(row, 448)
    return [signed(x / np.float32(scale), E4M3) for x in row], scale


def nvfp4_by_loop(row: np.ndarray) -> tuple[list[int], np.float16]:
    """Bytes of codes and then of blocks."""
    if np.abs(row).max() < 2.0**-126:
        return [0] * (len(row) * 9 // 16), np.float16(0)
    scale = scale_of(row, 6 * 448)
    codes, blocks = [], []
    for block in row.reshape(-1, 16):
        blocks.append(nearest(np.abs(block).max() / (np.float32(6) * np.float32(scale)), E4M3))
        step = np.float32(E4M3[blocks[-1]]) * np.float32(scale)
        codes += [signed(x / step, E2M1) if step else 0 for x in block]
    return [low + 16 * high for low, high in zip(codes[::2], codes[1::2], strict=True)] + blocks, scale


BY_LOOP: dict[FormatName, Callable[[np.ndarray], tuple[list[int], np.float16]]] = {
    8: partial(int_by_loop, bits=8),
    4: partial(int_by_loop, bits=4),
    "fp8": fp8_by_loop,
    "nvfp4": nvfp4_by_loop,
}


def hard_rows(head_dim: int, limit: float) -> np.ndarray:
    """[N, D] float32 of every size up to about `limit`: random, zero, denormal, one outlier, ties of codes."""
    rng = np.random.default_rng(head_dim)
    sizes = 10.0 ** rng.uniform(-44, np.log10(limit), (400, 1))
    random = rng.standard_normal((400, head_dim)) / 6 * sizes
    ties = rng.integers(-254, 255, (40, head_dim)) / 2 * 2.0 ** rng.integers(-20, 8, (40, 1))
    ties[:, 0] = 127 * 2.0 ** rng.integers(-20, 8, 40)
    outlier = rng.standard_normal((3, head_dim))
    outlier[np.arange(3), np.arange(3)] = (1e3, -1e4, limit)
    zero, denormal = np.zeros((1, head_dim)), np.full((1, head_dim), 1e-45)
    least = np.full((3, head_dim), 2.0**-126) * np.array([[1.0], [0.9999], [1.0001]])
    edge = np.full((2, head_dim), limit) * np.array([[1.0], [-1.0]])
    return np.concatenate([random, ties, outlier, zero, denormal, least, edge]).astype(np.float32)


def on_edges() -> np.ndarray:
    """[N, 32] float32: halfway between two codes and one rounding beside, in both formats, under scales of many sizes;
    zeros of both signs; blocks that are nothing beside the other."""
    rng = np.random.default_rng(0)
    rows = []
    for numbers, most in ((E4M3, 448.0), (E2M1, 6.0 * 448)):
        middle = (np.array(numbers[1:]) + np.array(numbers[:-1])) / 2 * most / numbers[-1]
        beside = np.concatenate([middle, *(np.nextafter(middle.astype(np.float32), np.float32(x)) for x in (0, 1e9))])
        drawn = rng.choice(beside, (60, 32)) * rng.choice([-1, 1], (60, 32))
        drawn[:, :2] = most, -0.0
        drawn[30:, 16:] = drawn[30:, 16:] * 2.0 ** rng.integers(-22, 0, (30, 1))
        rows.append(drawn * 2.0 ** rng.integers(-20, 6, (60, 1)))
    return np.concatenate(rows).astype(np.float32)


@pytest.mark.parametrize("bits", FORMATS)
def test_the_oracle_quantises_as_the_formula_says(bits: FormatName) -> None:
    for head_dim in HEAD_DIMS[bits]:
        rows = np.concatenate([hard_rows(head_dim, 4e5), *([on_edges()] if bits in NEW else [])])
        codes, scale = oracle_codes.quantise(rows, bits)
        assert codes.dtype == (np.int8 if bits == 8 else np.uint8)
        assert codes.shape[-1] == FORMATS[bits].code_bytes(head_dim)
        for row, got, step in zip(rows, codes.view(np.uint8), scale, strict=True):
            want, want_step = BY_LOOP[bits](row)
            assert step == want_step and got.tolist() == want


def values_of(name: str, codes: np.ndarray, scale: np.ndarray, bits: FormatName) -> np.ndarray:
    """Dequantised to float32 by one backend."""
    if name == BACKENDS[0]:
        return oracle_codes.dequantise(codes, scale, bits, np.float32)
    backend, ops = import_module(name), import_module(f"{name}.ops").OPS
    if name == "eps_cuda":
        import torch

        given, dtype = [torch.from_numpy(array.copy()) for array in (codes, scale)], torch.float32
    else:
        import mlx.core as mx

        given, dtype = [mx.array(array) for array in (codes, scale)], mx.float32
    return backend.to_numpy(arrays_codes.dequantise(ops, *given, bits, dtype))


@pytest.mark.parametrize("name", BACKENDS)
def test_every_byte_is_read_as_the_same_number(name: str) -> None:
    """Also such as `quantise` never makes, by the formats' tables."""
    every = np.arange(256)
    stored, scale = every.astype(np.uint8), np.array([0.3], np.float16)
    halves = np.stack([every % 16 - 8, every // 16 - 8], axis=1).reshape(-1)
    for bits, given, numbers in ((8, stored.view(np.int8), stored.view(np.int8)), (4, stored, halves)):
        wanted = numbers * scale.astype(np.float32)
        assert (values_of(name, given[None], scale, bits)[0] == wanted).all()
        assert (oracle_codes.dequantise(given[None], scale, bits, np.float16)[0] == wanted.astype(np.float16)).all()
    codes = np.array([code for code in every if code & 127 < 127], np.uint8)[None]
    want = np.array([E4M3[code & 127] * (1 - 2 * (code >> 7)) for code in codes[0].tolist()])
    assert (values_of(name, codes, np.array([0.25], np.float16), "fp8")[0] == want / 4).all()
    pairs = np.broadcast_to(every.astype(np.uint8).reshape(-1, 8), (127, 32, 8)).reshape(127, 256)
    blocks = np.repeat(np.arange(127, dtype=np.uint8)[:, None], 32, axis=1)
    got = values_of(name, np.concatenate([pairs, blocks], axis=1), np.full(127, 0.25, np.float16), "nvfp4")
    both = np.array([[E2M1[half & 7] * (1 - 2 * (half >> 3)) for half in (byte & 15, byte >> 4)] for byte in every])
    assert (got == np.array(E4M3)[:, None] * both.reshape(-1) / 4).all()


@pytest.mark.parametrize("bits", FORMATS)
def test_float32_rows_that_are_read_and_written_again_stay_what_they_are(bits: FormatName) -> None:
    """As where eviction moves them: where scales are normal numbers of float16 and, of blocks, whole."""
    rows = np.concatenate([hard_rows(32, 4e5), on_edges()])
    codes, scale = oracle_codes.quantise(rows, bits)
    again, same = oracle_codes.quantise(oracle_codes.dequantise(codes, scale, bits, np.float32), bits)
    normal = (scale >= 2.0**-14) | (scale == 0)
    if bits == "nvfp4":
        normal &= (codes[:, 16:] >= 3).all(axis=1)
    assert normal.sum() > 100 and (scale[normal] == same[normal]).all() and (codes[normal] == again[normal]).all()


def test_every_backend_codes_every_format() -> None:
    assert list(oracle_codes.CODERS) == list(arrays_codes.CODERS) == list(FORMATS)
    assert KV_BITS == (16, *FORMATS) == (16, 8, "fp8", 4, "nvfp4")
    assert [formats.words(bits, "float16") for bits in KV_BITS] == ["float16", "int8", "fp8", "int4", "nvfp4"]
    assert formats.described("float16", ("fp8", 16)) == "K fp8, V float16"


# ------------------------------------------------------------------------------------------------------- tests of tests


def wrong_int8(fault: str) -> Callable[[np.ndarray, FormatName], tuple[np.ndarray, np.ndarray]]:
    right = oracle_codes.quantise

    def wrong(rows: np.ndarray, bits: FormatName) -> tuple[np.ndarray, np.ndarray]:
        codes, scale = right(rows, bits)
        if fault == "rounds down":
            with np.errstate(divide="ignore", invalid="ignore"):
                codes = np.nan_to_num(np.floor(rows / scale.astype(np.float32)[..., None])).astype(np.int8)
        elif fault == "forgets the scale":
            scale = np.where(scale > 0, np.float16(1), scale)
        else:
            codes = np.maximum(codes, -100)
        return codes, scale

    return wrong


@pytest.mark.parametrize(
    ("bits", "fault"),
    [
        *((8, fault) for fault in ("rounds down", "forgets the scale", "asymmetric")),
        *(("nvfp4", x) for x in ("ties away from zero", "wraps around", "forgets zero's sign", "one block for all")),
    ],
)
def test_a_wrong_quantiser_fails_the_loop(bits: FormatName, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    to_e2m1, to_nvfp4 = oracle_codes._to_e2m1, oracle_codes._to_nvfp4
    if bits == 8:
        monkeypatch.setattr(oracle_codes, "quantise", wrong_int8(fault))
    elif fault == "one block for all":

        def whole(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
            codes = to_nvfp4(x, scale)
            codes[..., -1] = codes[..., -2]
            return codes

        monkeypatch.setitem(oracle_codes.CODERS, "nvfp4", (whole, oracle_codes._from_nvfp4))
    else:

        def wrong(y: np.ndarray) -> np.ndarray:
            if fault == "ties away from zero":
                return to_e2m1(y * np.float32(1 + 2.0**-20))
            if fault == "wraps around":
                return np.where(np.abs(y) > 6, 0, to_e2m1(y)).astype(np.uint8)
            return np.where(y == 0, 0, to_e2m1(y)).astype(np.uint8)

        monkeypatch.setattr(oracle_codes, "_to_e2m1", wrong)
    with pytest.raises(AssertionError):
        test_the_oracle_quantises_as_the_formula_says(bits)


@pytest.mark.parametrize("backend", ["eps_cuda", "eps_mlx"])
def test_a_library_has_every_operation(backend: str) -> None:
    ops = import_module(f"{backend}.ops").OPS
    names = {name for one in type(ops).__mro__ for name in vars(one).get("__annotations__", ())}
    assert len(names) > 50 and not {name for name in names if not hasattr(ops, name)}


@pytest.mark.parametrize("backend", ["cuda", "mlx"])
def test_float16_numbers_have_a_successor_and_a_byte(backend: str) -> None:
    module = load_backend(backend)
    ops, x = import_module(f"eps_{backend}.ops").OPS, np.arange(0x7BFF, dtype=np.uint16).view(np.float16)
    native = module.from_numpy(x, "float16", "cpu")
    assert np.array_equal(module.to_numpy(ops.next16(native)), np.nextafter(x, np.float16(np.inf)))
    stored = (np.arange(0xF8, dtype=np.uint16) << 7).view(np.float16).astype(np.float32)
    found = module.to_numpy(ops.from_byte(ops.to_byte(native)))
    gaps = np.abs(stored[None] - x.astype(np.float32)[:, None])
    assert np.isin(found, stored).all() and np.array_equal(np.abs(found - x.astype(np.float32)), gaps.min(axis=1))
