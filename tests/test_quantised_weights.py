"""Quantised weights: the groups and rows that the oracle defines, every library's product over them, and the models."""

import importlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import tiny_models
from test_model import TOLERANCE, assert_close, load, run
from tiny_models import tokens_of

from eps_core.config.cache import DTYPE_BYTES
from eps_core.decode.forward import Decoder
from eps_core.decode.quantised_weights import GROUP_SIZES, HEAD, group_size, quantised_layers
from eps_core.load import load_backend
from eps_core.models.config import read_spec
from eps_core.models.weights import weight_names
from eps_core.reference.model import Model
from eps_core.reference.quantised_weights import LARGEST_CODE, LEVELS, affine, symmetric

# tied and untied heads, biases, norms of q and k, rows of 64, 96 and 128 weights
NAMES = ("llama2", "llama2-linear-biased", "llama3.1-tied-sharded", "qwen2-tied", "qwen3-tied-biased")
LIBRARIES = ("eps_cuda", "eps_mlx")
EPSILON = {"float32": 2**-23, "float16": 2**-10, "bfloat16": 2**-7}


def dtype_of_products(library: str, dtype: str, bits: int) -> str:
    """Return the dtype in which a library computes its product in a model of `dtype`, steps and offsets included."""
    return "bfloat16" if library == "eps_cuda" and bits == 4 else dtype


def groups_of_weights(rows: int, width: int) -> np.ndarray:
    """Weights whose groups differ in spread, and some odd rows: zero, constant, one-sided, symmetric, one large."""
    rng = np.random.default_rng(rows * width)
    weight = 0.05 * rng.standard_normal((rows, width)) * rng.uniform(0.2, 3.0, (rows, 1))
    odd = [np.zeros(width), np.full(width, 0.3), 1 + 0.1 * rng.random(width), -1 - 0.1 * rng.random(width)]
    odd += [np.linspace(-1, 1, width), np.where(np.arange(width) % 32 == 5, -4.0, 0.01)]
    weight[: len(odd)] = odd[:rows]
    return weight


@pytest.mark.parametrize("size", GROUP_SIZES)
def test_affine_groups_keep_what_they_promise(size: int) -> None:
    weight = groups_of_weights(24, 4 * size)
    codes, steps, offsets = affine(weight, size)
    groups = weight.reshape(codes.shape)
    held = steps * codes + offsets
    assert np.array_equal(codes, np.round(codes)) and codes.min() == 0 and codes.max() == LEVELS
    error, half = np.abs(held - groups), np.abs(steps) / 2
    assert (error <= 2 * half * (1 + 1e-12)).all()
    assert (error <= half * (1 + 1e-12) + 1e-15)[codes < LEVELS].all(), "only the far edge may be clipped"
    largest = np.take_along_axis(groups, np.abs(groups).argmax(-1)[..., None], -1)
    np.testing.assert_allclose(np.take_along_axis(held, np.abs(groups).argmax(-1)[..., None], -1), largest, rtol=1e-12)
    zero = np.round(-offsets / steps)
    np.testing.assert_allclose(steps * zero + offsets, 0, atol=1e-12)


def test_symmetric_rows_keep_what_they_promise() -> None:
    weight = groups_of_weights(24, 96)
    codes, steps = symmetric(weight)
    assert np.array_equal(codes, np.round(codes)) and np.abs(codes).max() == LARGEST_CODE
    assert (np.abs(steps * codes - weight) <= steps / 2 * (1 + 1e-12)).all() and not codes[0].any()


@pytest.mark.parametrize(("width", "size"), [(2048, 64), (96, 32), (64, 64), (32, 32), (48, None), (16, None)])
def test_group_sizes(width: int, size: int | None) -> None:
    assert group_size(width) == size


# Products


def packed_and_held(library: str, weight: np.ndarray, bits: int, dtype: str) -> tuple[Any, np.ndarray]:
    """(packed weight, what it holds in float64) of a weight in `dtype`."""
    module = importlib.import_module(f"{library}.quantised_weights")
    array, size = (
        load_backend(library.removeprefix("eps_")).from_numpy(weight, dtype, "cpu"),
        group_size(weight.shape[1]),
    )
    if library == "eps_mlx":
        packed = module.pack_rows(array, "cpu") if bits == 8 else module.pack_groups(array, size, "cpu")
        affinities = (one.astype(mx.float32) for one in (packed.steps, packed.offsets))
        held = mx.dequantize(packed.codes, *affinities, group_size=size, bits=bits)
        return packed, np.array(held).astype(np.float64)
    if bits == 8:
        packed = module.pack_rows(array)
        return packed, (packed.codes.double() * packed.steps.double()[:, None]).numpy()
    packed = module.pack_groups(array, size)
    codes, _, _ = module.affine(array, size)
    steps, zeros = (packed.steps_zeros[:, : len(weight), i].T.double() for i in (0, 1))
    held = (codes.double().unflatten(1, (-1, size)) - 8) * steps[..., None] + zeros[..., None]
    return packed, held.flatten(1).numpy()


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("dtype", DTYPE_BYTES)
@pytest.mark.parametrize(("rows", "width"), [(70, 32), (300, 64), (96, 96), (4200, 128)])
def test_packed_weights_hold_the_oracles_groups(library: str, dtype: str, rows: int, width: int) -> None:
    size = group_size(width)
    weight = load_backend("numpy").from_numpy(groups_of_weights(rows, width), dtype).astype(np.float64)
    _, held = packed_and_held(library, weight, 4, dtype)
    codes, steps, offsets = affine(weight, size)
    groups, held = weight.reshape(codes.shape), held.reshape(codes.shape)
    # a step of its own is rounded, and what it starts from: twice where the library moves it to the middle
    rounding = EPSILON[dtype_of_products(library, dtype, 4)] * (LEVELS * np.abs(steps) + 2 * np.abs(offsets)) + 1e-6
    near = np.abs(held - (steps * codes + offsets)) <= rounding
    # float32 and float64 may round a code, or the steps from an edge to 0, to two sides
    ties = np.abs(np.abs((groups - offsets) / steps % 1) - 0.5) < 1e-4
    low, high = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
    even = np.abs(np.abs(LEVELS * offsets / np.maximum(high - low, 1e-7)) % 1 - 0.5) < 1e-4
    assert (near | ties | even).all() and (ties | even).mean() < 0.2
    assert (np.abs(held - groups) <= np.abs(steps) * 8 / 7 + rounding).all()


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("dtype", DTYPE_BYTES)
@pytest.mark.parametrize(("rows", "width"), [(70, 32), (300, 64), (96, 96), (4200, 128)])
def test_packed_weights_hold_the_oracles_rows(library: str, dtype: str, rows: int, width: int) -> None:
    weight = load_backend("numpy").from_numpy(groups_of_weights(rows, width), dtype).astype(np.float64)
    _, held = packed_and_held(library, weight, 8, dtype)
    _, steps = symmetric(weight)
    # codes are about the step as it is stored: what that is short of is missing at the largest weight alone
    short = EPSILON[dtype] * np.abs(weight).max(-1, keepdims=True)
    assert (
        np.abs(held - weight) <= steps / 2 * (1 + EPSILON[dtype] + 1e-5) + short * (np.abs(weight) > 126 * steps)
    ).all()
    assert (np.abs(held[6:] - weight[6:]).max(-1) > steps[6:, 0] / 4).all(), "8 bits lose nothing"


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("dtype", DTYPE_BYTES)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("rows", "width"), [(16, 32), (300, 64), (96, 96), (4200, 512)])
@pytest.mark.parametrize("count", [1, 9])
def test_products_are_those_of_the_held_weights(
    library: str, dtype: str, bits: int, rows: int, width: int, count: int
) -> None:
    backend = load_backend(library.removeprefix("eps_"))
    packed, held = packed_and_held(library, groups_of_weights(rows, width), bits, dtype)
    rng = np.random.default_rng(count)
    x, bias = (backend.from_numpy(rng.standard_normal(shape), dtype, "cpu") for shape in ((count, width), (rows,)))
    inner = dtype_of_products(library, dtype, bits)
    taken = backend.from_numpy(backend.to_numpy(x), inner, "cpu")
    exact_x, exact_bias = (backend.to_numpy(one).astype(np.float64) for one in (taken, bias))
    exact = exact_x @ held.T
    # the plain product of the same weights, rounded to the dtype, float32 sums, and the rounding of the result
    plain = taken @ backend.from_numpy(held, inner, "cpu").T
    error = np.abs(backend.to_numpy(plain).astype(np.float64) - exact).max()
    floor = EPSILON["float32"] * (np.abs(exact_x) @ np.abs(held).T).max() + EPSILON[inner] * np.abs(exact).max()
    product = packed(x, None)
    assert product.dtype == x.dtype and product.shape == (count, rows)
    assert np.abs(backend.to_numpy(product).astype(np.float64) - exact).max() <= 2 * error + floor
    shifted = backend.to_numpy(packed(x, bias)).astype(np.float64)
    assert np.abs(shifted - exact - exact_bias).max() <= 2 * error + 2 * floor


# Models


def assert_are_the_oracles(
    target: tuple, dtype: str, bits: int, logits: np.ndarray, expected: np.ndarray, full: np.ndarray
) -> None:
    """Logits are those of the oracle's quantised weights; `full` are those of the full ones. In 16 bits they are near
    by a tenth of what 4 bits change. Not by more: few different numbers make groups with edges +w and -w, in which two
    steps serve equally, and float32 may take the other one. Of 8 bits, float32 and float64 may round a code to two
    sides."""
    if bits == 8:
        assert np.abs(logits - expected).max() < 0.1 * np.abs(full - expected).max()
    elif dtype_of_products(target[0].__name__, dtype, bits) == "float32":
        assert_close(logits, expected)
    else:
        assert ((logits - expected) ** 2).mean() <= 0.1**2 * ((full - expected) ** 2).mean()


@pytest.mark.parametrize(
    ("name", "dtype", "bits"),
    [
        *((name, "float32", bits) for name in NAMES for bits in (4, 8)),
        *((name, dtype, 4) for name in ("llama2", "qwen2-tied") for dtype in ("float16", "bfloat16")),
    ],
)
def test_logits_are_those_of_the_oracles_quantised_model(
    name: str, dtype: str, bits: int, target: tuple, saved: Callable
) -> None:
    tokens, oracle = tokens_of(name), (load_backend("numpy"), "cpu")
    judge = load(oracle, saved(name), dtype)
    (_, expected), (_, full) = (run(oracle, one, tokens, dtype=dtype) for one in (judge.quantised(bits), judge))
    _, logits = run(target, load(target, saved(name), dtype).quantised(bits), tokens, dtype=dtype)
    assert_are_the_oracles(target, dtype, bits, logits, expected, full)
    least = {4: 100, 8: 10}[bits] * TOLERANCE * expected.std()
    assert np.abs(full - expected).max() > least, f"{bits} bits change nothing"


@pytest.mark.parametrize("name", ["llama2", "qwen2-tied"])
def test_the_full_model_stays_as_it_was_and_shares_its_arrays(name: str, target: tuple, saved: Callable) -> None:
    decoder = load(target, saved(name))
    model: Any = decoder.model
    before, weights, read = run(target, decoder, tokens_of(name))[1], dict(model.weights), model.weight_bytes
    drafts = model.quantised(4)
    assert np.array_equal(run(target, decoder, tokens_of(name))[1], before)
    assert model.weights.keys() == weights.keys() and all(model.weights[one] is weights[one] for one in weights)
    assert model.weight_bytes == read and drafts.full is model and drafts.quantised(8).full is model
    assert drafts.spec is model.spec and (drafts.dtype, drafts.device) == (model.dtype, model.device)
    layers = quantised_layers(model.spec, 4)
    assert "embed" not in layers and HEAD in layers and not any("norm" in one or "bias" in one for one in layers)
    shared = weights.keys() - layers.keys()
    assert shared <= drafts.weights.keys() and all(drafts.weights[one] is weights[one] for one in shared)
    if target[0].__name__ != "eps_core.reference":  # which holds them dequantised
        assert drafts.weights.keys() == shared and drafts.packed.keys() == layers.keys()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama2", "qwen2-tied"])
def test_weight_bytes(name: str, dtype: str, target: tuple, saved: Callable) -> None:
    model: Any = load(target, saved(name), dtype).model
    spec, number_bytes = model.spec, DTYPE_BYTES[dtype]
    kv_width = spec.num_kv_heads * spec.head_dim
    wide = 2 * 64 * 64 + 2 * kv_width * 64 + 2 * 96 * 64  # weights of a layer in groups of 64
    narrow = 64 * 96  # of down, whose rows have 96
    biases = (64 + 2 * kv_width) if spec.qkv_bias else 0
    vectors = spec.num_layers * (biases + 2 * 64) + 64
    head = tiny_models.VOCAB_SIZE * 64
    assert model.weight_bytes == number_bytes * (spec.num_layers * (wide + narrow) + head + vectors)
    library = target[0].__name__
    pair_bytes = 2 * (4 if library == "eps_mlx" and target[1] == "cpu" else number_bytes)  # step and offset
    if library == "eps_cuda":
        pair_bytes = 4
        head = 304 * 64  # 300 rows filled up to a multiple of 16

    def packed(count: int, size: int) -> int:
        return count // 2 + count // size * pair_bytes

    layers = spec.num_layers * (packed(wide, 64) + packed(narrow, 32))
    assert model.quantised(4).weight_bytes == layers + packed(head, 64) + vectors * number_bytes
    rows = spec.num_layers * (2 * 64 + 2 * kv_width + 2 * 96 + 64) + tiny_models.VOCAB_SIZE
    weights = spec.num_layers * (wide + narrow) + tiny_models.VOCAB_SIZE * 64
    # MLX repeats a row's step, and has an offset, for each of its groups
    steps = weights // 64 + spec.num_layers * (narrow // 64) if library == "eps_mlx" else rows
    step_bytes = pair_bytes if library == "eps_mlx" else number_bytes
    assert model.quantised(8).weight_bytes == weights + steps * step_bytes + vectors * number_bytes


# What is not fit


def odd_model(backend: Any, device: str, path: Path, **shape: int) -> Any:
    """A random model of a tiny model's spec with another shape, as the backend's Model."""
    spec, rng = replace(read_spec(path), **shape), np.random.default_rng(0)
    arrays = {
        name: np.ones(one.shape) if len(one.shape) == 1 else tiny_models.WEIGHT_STD * rng.standard_normal(one.shape)
        for name, one in weight_names(spec).items()
    }
    model = importlib.import_module(f"{backend.__name__}.model").Model
    if model is Model:
        return model(spec, arrays, "float32")
    weights = {k: backend.from_numpy(v, "float32", device) for k, v in arrays.items()}
    return model(spec, weights, "float32", device)


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_that_no_group_divides_keep_full_weights(
    bits: int, target: tuple, saved: Callable, capsys: pytest.CaptureFixture
) -> None:
    backend, device = target
    model = odd_model(backend, device, saved("llama2"), intermediate_size=80)
    drafts = model.quantised(bits)
    assert capsys.readouterr().err.count("layers with 80 weights a row") == 1
    assert not any(name.endswith("down") for name in quantised_layers(model.spec, bits))
    assert all(drafts.weights[f"layers.{i}.down"] is model.weights[f"layers.{i}.down"] for i in range(2))
    judge = odd_model(load_backend("numpy"), "cpu", saved("llama2"), intermediate_size=80).quantised(bits)
    tokens = tokens_of("odd")
    (_, logits), (_, full), (_, expected) = (
        run(one, Decoder(one[0], model), tokens)
        for one, model in ((target, drafts), (target, model), ((load_backend("numpy"), "cpu"), judge))
    )
    assert_are_the_oracles(target, "float32", bits, logits, expected, full)
