"""4-bit draft weights: the affine groups that the oracle defines, every library's product over them, and the models."""

import importlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import tiny_models
import torch
from test_model import TOLERANCE, assert_close, load, run, tokens_of

from eps_core.config.cache import DTYPE_BYTES
from eps_core.decode.draft_weights import BITS, FLAG, GROUP_SIZES, HEAD, group_size, quantised_layers
from eps_core.decode.forward import Decoder
from eps_core.errors import ConfigError
from eps_core.load import load_backend
from eps_core.models.config import read_spec
from eps_core.models.weights import weight_names
from eps_core.reference.draft_weights import LEVELS, affine
from eps_core.reference.model import Model

# tied and untied heads, biases, norms of q and k, rows of 64, 96 and 128 weights
NAMES = ("llama2", "llama2-linear-biased", "llama3.1-tied-sharded", "qwen2-tied", "qwen3-tied-biased")
LIBRARIES = ("eps_cuda", "eps_mlx")
EPSILON = {"float32": 2**-23, "float16": 2**-10, "bfloat16": 2**-7}


def dtype_of_products(library: str, dtype: str) -> str:
    """What a library's 4-bit product takes and gives in a model of `dtype`, steps and offsets included."""
    return "bfloat16" if library == "eps_cuda" else dtype


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


@pytest.mark.parametrize(("width", "size"), [(2048, 64), (96, 32), (64, 64), (32, 32), (48, None), (16, None)])
def test_group_sizes(width: int, size: int | None) -> None:
    assert group_size(width) == size


# Products


def packed_and_held(library: str, weight: np.ndarray, size: int, dtype: str) -> tuple[Any, np.ndarray]:
    """(packed weight, what it holds in float64) of a weight in `dtype`."""
    module = importlib.import_module(f"{library}.draft_weights")
    array = load_backend(library.removeprefix("eps_")).from_numpy(weight, dtype, "cpu")
    if library == "eps_mlx":
        packed = module.pack(array, size, "cpu")
        held = mx.dequantize(
            packed.codes, packed.steps.astype(mx.float32), packed.offsets.astype(mx.float32), group_size=size, bits=BITS
        )
        return packed, np.array(held).astype(np.float64)
    packed = module.pack(array, size)
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
    _, held = packed_and_held(library, weight, size, dtype)
    codes, steps, offsets = affine(weight, size)
    groups, held = weight.reshape(codes.shape), held.reshape(codes.shape)
    # a step of its own is rounded, and what it starts from: twice where the library moves it to the middle
    rounding = EPSILON[dtype_of_products(library, dtype)] * (LEVELS * np.abs(steps) + 2 * np.abs(offsets)) + 1e-6
    near = np.abs(held - (steps * codes + offsets)) <= rounding
    # float32 and float64 may round a code, or the steps from an edge to 0, to two sides
    ties = np.abs(np.abs((groups - offsets) / steps % 1) - 0.5) < 1e-4
    low, high = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
    symmetric = np.abs(np.abs(LEVELS * offsets / np.maximum(high - low, 1e-7)) % 1 - 0.5) < 1e-4
    assert (near | ties | symmetric).all() and (ties | symmetric).mean() < 0.2
    assert (np.abs(held - groups) <= np.abs(steps) * 8 / 7 + rounding).all()


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("dtype", DTYPE_BYTES)
@pytest.mark.parametrize(("rows", "width"), [(16, 32), (300, 64), (96, 96), (4200, 512)])
@pytest.mark.parametrize("count", [1, 9])
def test_products_are_those_of_the_held_weights(library: str, dtype: str, rows: int, width: int, count: int) -> None:
    backend = load_backend(library.removeprefix("eps_"))
    packed, held = packed_and_held(library, groups_of_weights(rows, width), group_size(width), dtype)
    rng = np.random.default_rng(count)
    x, bias = (backend.from_numpy(rng.standard_normal(shape), dtype, "cpu") for shape in ((count, width), (rows,)))
    inner = dtype_of_products(library, dtype)
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


def drafts_of(decoder: Decoder) -> Decoder:
    return Decoder(decoder.backend, decoder.model.quantised())


def assert_are_the_oracles(
    target: tuple, dtype: str, logits: np.ndarray, expected: np.ndarray, full: np.ndarray
) -> None:
    """Drafts' logits are the oracle's 4-bit ones; `full` are those of the full weights. In 16 bits they are near by a
    tenth of what 4 bits change. Not by more: few different numbers make groups with edges +w and -w, in which two steps
    serve equally, and float32 may take the other one."""
    if dtype_of_products(target[0].__name__, dtype) == "float32":
        assert_close(logits, expected)
    else:
        assert ((logits - expected) ** 2).mean() <= 0.1**2 * ((full - expected) ** 2).mean()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "float32") for name in NAMES),
        *((name, dtype) for name in ("llama2", "qwen2-tied") for dtype in ("float16", "bfloat16")),
    ],
)
def test_logits_are_those_of_the_oracles_4_bit_model(name: str, dtype: str, target: tuple, saved: Callable) -> None:
    tokens, oracle = tokens_of(name), (load_backend("numpy"), "cpu")
    judge = load(oracle, saved(name), dtype)
    (_, expected), (_, full) = (run(oracle, one, tokens, dtype=dtype) for one in (drafts_of(judge), judge))
    _, logits = run(target, drafts_of(load(target, saved(name), dtype)), tokens, dtype=dtype)
    assert_are_the_oracles(target, dtype, logits, expected, full)
    assert np.abs(full - expected).max() > 100 * TOLERANCE * expected.std(), "4 bits change nothing"


@pytest.mark.parametrize("name", ["llama2", "qwen2-tied"])
def test_the_full_model_stays_as_it_was_and_shares_its_arrays(name: str, target: tuple, saved: Callable) -> None:
    decoder = load(target, saved(name))
    model: Any = decoder.model
    before, weights, read = run(target, decoder, tokens_of(name))[1], dict(model.weights), model.weight_bytes
    drafts = model.quantised()
    assert np.array_equal(run(target, decoder, tokens_of(name))[1], before)
    assert model.weights.keys() == weights.keys() and all(model.weights[one] is weights[one] for one in weights)
    assert model.weight_bytes == read and drafts.quantised() is drafts
    assert drafts.spec is model.spec and (drafts.dtype, drafts.device) == (model.dtype, model.device)
    layers = quantised_layers(model.spec)
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
    assert model.quantised().weight_bytes == layers + packed(head, 64) + vectors * number_bytes


# What is not fit for 4 bits


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


def test_rows_that_no_group_divides_keep_full_weights(
    target: tuple, saved: Callable, capsys: pytest.CaptureFixture
) -> None:
    backend, device = target
    model = odd_model(backend, device, saved("llama2"), intermediate_size=80)
    drafts = model.quantised()
    assert capsys.readouterr().err.count("layers with 80 weights a row") == 1
    assert not any(name.endswith("down") for name in quantised_layers(model.spec))
    assert all(drafts.weights[f"layers.{i}.down"] is model.weights[f"layers.{i}.down"] for i in range(2))
    judge = odd_model(load_backend("numpy"), "cpu", saved("llama2"), intermediate_size=80).quantised()
    tokens = tokens_of("odd")
    (_, logits), (_, full), (_, expected) = (
        run(one, Decoder(one[0], model), tokens)
        for one, model in ((target, drafts), (target, model), ((load_backend("numpy"), "cpu"), judge))
    )
    assert_are_the_oracles(target, "float32", logits, expected, full)


def test_a_model_without_any_fit_layer_is_refused(target: tuple, saved: Callable) -> None:
    backend, device = target
    model = odd_model(backend, device, saved("llama2"), hidden_size=48, intermediate_size=80, head_dim=12)
    with pytest.raises(ConfigError, match=f"rows have 48, 80: add {FLAG}"):
        model.quantised()


def test_torch_on_a_gpu_is_refused_before_anything_is_packed(saved: Callable) -> None:
    model: Any = load((load_backend("cuda"), "cpu"), saved("llama2")).model
    model.device = "cuda"
    with pytest.raises(ConfigError, match=f"on cuda: add {FLAG}"):
        model.quantised()
    assert not model.packed and torch.is_tensor(model.weights["layers.0.q"])
