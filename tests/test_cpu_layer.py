"""Tests of the compiled calls of a layer besides attention. They follow the float64 reference, and the bits of a row do
not depend on the other rows."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch

import eps_cuda
from eps_core import reference
from eps_core.cpu import layer as calls
from eps_core.cpu import threads
from eps_core.decode.kernel_check import rows_disagreement
from eps_core.models.config import read_spec
from eps_cuda.few_rows import MOST_ROWS, FewRows
from eps_cuda.kernels import cpu

ROWS = 1, calls.TOGETHER, MOST_ROWS - 1, MOST_ROWS


def load(backend: Any, name: str, dtype: str | None = None, bits: int | None = None) -> Any:
    path = tiny_models.saved(name)
    model = backend.load_model(path, read_spec(path), dtype or tiny_models.MODELS[name].dtype, "cpu")
    return model if bits is None else model.quantised(bits)


def pass_of(model: Any, rows: int, attended: np.ndarray, as_array: Callable[[np.ndarray], Any]) -> list[np.ndarray]:
    """q, k, v, the residual stream after each layer, the logits: of a pass whose attention gives `attended`."""
    with model.scope() if hasattr(model, "scope") else torch.inference_mode():
        x, turn = model.embed(np.arange(rows) * 7 % tiny_models.VOCAB_SIZE), model.rotation(np.arange(rows) * 11 + 3)
        found: list[Any] = []
        for layer in range(model.spec.num_layers):
            found += model.project(layer, x, turn)
            x = model.after_attention(layer, x, as_array(attended))
            found.append(x)
        found.append(model.logits(x))
        return [one.float().numpy() if isinstance(one, torch.Tensor) else np.asarray(one) for one in found]


@pytest.mark.parametrize("outputs", [16, 17, 18, 19, 2 * calls.TASK_BYTES // (32 * 4) + 18])
def test_any_number_of_outputs(outputs: int) -> None:
    rng = np.random.default_rng(outputs)
    weight, x = (rng.standard_normal(shape, np.float32) for shape in ((outputs, 32), (3, 32)))
    bias, found = rng.standard_normal(outputs, np.float32), np.full((3, outputs), np.nan, np.float32)
    norm, none = np.ones(32, np.float32), np.empty(0, np.float32)
    cpu.kernels.run(calls.head, calls.AROUND, x, norm, np.float32(0), weight.reshape(-1), none, bias, found)
    normed = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True))
    np.testing.assert_allclose(found, normed @ weight.T + bias, rtol=0, atol=1e-4)


def attended_of(model: Any, rows: int) -> np.ndarray:
    shape = rows, model.spec.num_heads, model.spec.head_dim
    return np.random.default_rng(5).standard_normal(shape).astype(np.float32)


@pytest.fixture(params=("team", "helpers", "alone"))
def ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Torch's own threads, in three of ours, or in the caller's alone."""
    if request.param != "team":
        alone = request.param == "alone"
        monkeypatch.setattr(threads, "num_threads", lambda: 3)
        monkeypatch.setattr(
            cpu.TorchKernels, "run",
            lambda self, kernel, phases, *args, **how: threads.run(kernel, phases, *args, alone=alone),
        )  # fmt: skip


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    ("name", "dtype", "bits"),
    [
        *((name, None, None) for name in tiny_models.NAMES), ("llama2", "bfloat16", None), ("qwen3", "float16", None),
        ("llama2-linear-biased", "float32", 8), ("qwen2-tied", "float32", 8),
    ],
)  # fmt: skip
def test_a_pass_is_the_reference_s(name: str, dtype: str | None, bits: int | None, rows: int) -> None:
    model = load(eps_cuda, name, dtype, bits)
    few, truth = model.for_rows("numba", rows), load(reference, name, dtype, bits)
    assert isinstance(few, FewRows)
    attended = attended_of(model, rows)
    got = pass_of(few, rows, attended, torch.from_numpy)
    expected = pass_of(truth, rows, attended.astype(np.float64), lambda array: array)
    # q, k, v and x of each layer, then logits; queries of a window are of the model's dtype, all else is float32
    for index, (value, true) in enumerate(zip(got, expected, strict=True)):
        short = index % 4 == 0 and index // 4 in model.spec.windowed and model.dtype == "bfloat16"
        assert value.shape == true.shape
        assert np.abs(value - true).max() <= (2**-8 if short else 3e-6) * np.abs(true).max(), index


@pytest.mark.usefixtures("ways")
@pytest.mark.parametrize("name", ["gemma3-256-scaled-capped", "llama2-linear-biased"])
def test_a_row_s_bits_are_its_own(name: str) -> None:
    model = load(eps_cuda, name)
    few, attended = FewRows.of(model), attended_of(model, MOST_ROWS)
    assert few is not None
    whole = pass_of(few, MOST_ROWS, attended, torch.from_numpy)
    for rows in (1, calls.TOGETHER + 1):
        part = pass_of(few, rows, attended[:rows], torch.from_numpy)
        assert all(np.array_equal(one, every[:rows]) for one, every in zip(part, whole, strict=True))


def test_no_phase_begins_before_every_task_of_the_one_before_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    model, waited = load(eps_cuda, "llama2"), []
    few, attended = model.for_rows("numba", 2), attended_of(model, 2)
    pass_of(few, 2, attended, torch.from_numpy)  # compiles

    def run(self: Any, kernel: Any, phases: int, *args: Any, **how: Any) -> None:
        for phase in range(phases):
            progress = threads.new_progress(phases)
            progress[phase, threads._TAKEN] = 1  # by a thread that is late
            caller = threading.Thread(target=kernel, args=(progress, *args))
            caller.start()
            caller.join(0.05)
            waited.append(caller.is_alive())
            progress[phase, threads._DONE] += 1
            caller.join(30)
            assert not caller.is_alive()

    monkeypatch.setattr(cpu.TorchKernels, "run", run)
    pass_of(few, 2, attended, torch.from_numpy)
    assert waited == [True] * (model.spec.num_layers * (calls.AROUND + calls.AFTER) + calls.AROUND)


def test_queries_of_a_window_have_the_models_dtype() -> None:
    few = load(eps_cuda, "gemma3-256-scaled-capped").for_rows("numba", 1)
    x, turn = few.embed(np.array([5])), few.rotation(np.array([9]))
    dtypes = [few.project(layer, x, turn)[0].dtype for layer in range(few.spec.num_layers)]
    assert dtypes == [torch.bfloat16, torch.float32] * 2  # every second layer attends to everything


def test_other_shapes_rows_and_kernels_are_the_models_own() -> None:
    model = load(eps_cuda, "llama2")
    assert model.for_rows("arrays", 1) is model and model.for_rows("numba", MOST_ROWS + 1) is model
    assert isinstance(model.for_rows("numba", MOST_ROWS), FewRows)
    groups = model.quantised(4)
    assert groups.for_rows("numba", 1) is groups, "4-bit weights lie as Torch's kernel wants them"
    spec = model.spec
    for name in ("hidden_size", "intermediate_size", "head_dim"):
        size = getattr(spec, name)
        object.__setattr__(spec, name, size + 2)
        assert FewRows.of(model) is None, name
        object.__setattr__(spec, name, size)
    assert FewRows.of(model) is not None


def test_what_the_model_itself_overflows_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(eps_cuda, "llama2")
    few = model.for_rows("numba", 5)
    for which, fault in ((model, None), (few, "logits of a model's rows differ by nan")):
        with monkeypatch.context() as patched:
            real = which.logits
            patched.setattr(which, "logits", lambda x, real=real: real(x).index_fill(1, torch.tensor([0]), torch.nan))
            assert rows_disagreement(eps_cuda, model, "numba") == fault


@pytest.mark.parametrize(
    ("call", "says"), [("before_attention", "queries of"), ("after_attention", "logits of"), ("head", "logits of")]
)
def test_a_wrong_call_is_named(monkeypatch: pytest.MonkeyPatch, call: str, says: str) -> None:
    model = load(eps_cuda, "llama2")
    assert rows_disagreement(eps_cuda, model, "numba") is None
    assert rows_disagreement(eps_cuda, model, "arrays") is None
    real = cpu.TorchKernels.run

    def run(self: Any, kernel: Any, phases: int, *args: Any, **how: Any) -> None:
        real(self, kernel, phases, *args, **how)
        if kernel is getattr(calls, call):
            filled = args[-1][0] if isinstance(args[-1], tuple) else args[-1]  # queries, keys and values
            filled[:, ::2] *= 1.05

    monkeypatch.setattr(cpu.TorchKernels, "run", run)
    fault = rows_disagreement(eps_cuda, model, "numba")
    assert fault is not None and says in fault
    monkeypatch.setattr(cpu.TorchKernels, "run", lambda *args, **how: (_ for _ in ()).throw(RuntimeError("no such")))
    assert rows_disagreement(eps_cuda, model, "numba") == "RuntimeError: no such"
