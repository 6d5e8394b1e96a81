"""Decode steps under Metal kernels write no pool: the open units beside it, what reads them, and what closes them."""

import copy
import re
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from conftest import bound
from metal.shim import metal_shim  # noqa: F401
from mlx_lm_models import alone, prompts, tiny, together
from test_conformance import Case, FilledCase, Pages, eps

from eps_core.attention.layer import sparse_attention
from eps_core.config.cache import CacheSpec
from eps_core.config.eps import EpsConfig
from eps_core.errors import ConfigError
from eps_core.kv_cache.rows import Rows
from eps_core.kv_cache.step_plan import StepPlan
from eps_mlx import open_units
from eps_mlx.cache import pending
from eps_mlx.integrations.mlx_lm import eps as eps_on
from eps_mlx.kernels import dispatch, launch

METAL, ARRAYS = bound("mlx", "metal"), bound("mlx", "arrays")
UNIT, LAYERS, UNITS = 64, 2, 1024
# which chooses in its first unit, too
SHORT = eps("rq", group_size=2, mean_tokens=32, combine="sum", budget_floor=0, num_sink_tokens=2, num_recent_tokens=2)


class Steps:
    """Decode steps of one sequence, made while a command buffer holds what the kernels of the step before read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, length: int, kernels: str = "metal", **settings: Any) -> None:
        self.config = EpsConfig.of(**{"method": "rq", "budget": 0.3, "budget_floor": 0, **settings})
        spec = CacheSpec(LAYERS, 2, 64, UNITS, "float32")
        self.backend = {"metal": METAL, "arrays": ARRAYS}[kernels]
        self.cache = self.backend.new_cache(spec, self.config.cache_config, "cpu")
        self.pool_bytes, self.length = UNITS * 2 * UNIT * 64 * 4, length
        self.table = np.arange(UNITS, dtype=np.int32)[None, : length // UNIT + 3]
        for layer in range(LAYERS):
            k, v = self.drawn(length, 2), self.drawn(length, 2)
            METAL.write_kv(self.cache, layer, k, v, np.arange(length))
        mx.eval(pending(self.cache))
        self.held: list[mx.array] = []  # by this step
        self.before: list[mx.array] = []  # by the one before
        runner = launch.runner

        def run(kernel: Any, inputs: list[mx.array], *arguments: Any) -> list[mx.array]:
            found = runner(kernel, inputs, *arguments)
            # another array of the same data, as a command buffer has: a write to the input itself leaves it behind
            self.held += [copy.copy(array) for array in inputs]
            return found

        monkeypatch.setattr(launch, "runner", run)

    def drawn(self, *shape: int) -> mx.array:
        return METAL.from_numpy(np.random.default_rng(0).standard_normal((*shape, 64), np.float32), "float32", "cpu")

    def extra_bytes(self, write: Any = METAL.write_kv) -> int:
        """The most memory that a step takes beyond what there was."""
        q, k = self.drawn(1, 4), self.drawn(1, 2)
        mx.eval(q, k)
        self.before, self.held = self.held, []
        active = mx.get_active_memory()
        mx.reset_peak_memory()
        self.length += 1
        plan = StepPlan.of(self.config, self.table, np.array([self.length]))
        for layer in range(LAYERS):
            self.cache = write(self.cache, layer, k, k, np.array([self.length - 1]))
            out, read = sparse_attention(self.backend, self.cache, layer, q, plan)
            mx.eval(out, *read.pending.values(), *pending(self.cache))
        return mx.get_peak_memory() - active


def test_no_step_copies_a_pool_and_those_that_end_a_unit_wait(
    metal_shim: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither K and V nor summaries, the largest of whose arrays is 1/32 of K; small pools, too."""
    run, waits = Steps(monkeypatch, length=2 * UNIT - 5), []

    def wait(stream: Any = None) -> None:
        waits.append(run.length)
        run.held, run.before = [], []

    monkeypatch.setattr(open_units, "GPU", "cpu")
    monkeypatch.setattr(open_units.mx, "synchronize", wait)
    field = max(array.nbytes for array in run.cache.summaries[0].values())
    run.extra_bytes()  # which opens a unit
    assert run.extra_bytes(METAL.write_kv_tentative) < field <= run.pool_bytes / 32
    run.length -= 1
    assert max(run.extra_bytes() for _ in range(UNIT + 8)) < field
    # once in a unit of both layers
    assert waits == [2 * UNIT, 3 * UNIT]
    METAL.read_kv(run.cache, 0, run.table[0], run.length)  # an engine's own attention leaves units open
    assert len(run.cache.k.opened.units[0]) and len(run.cache.k[0]) == UNITS
    assert not len(run.cache.k.opened.units[0]) and len(waits) == 3
    # without the wait this test sees a copy
    monkeypatch.setattr(open_units, "GPU", "mps")
    monkeypatch.setattr(dispatch.KERNELS, "place_rows", None)
    run.extra_bytes()
    assert run.extra_bytes() >= run.pool_bytes


@pytest.mark.parametrize("settings", [{"method": "box", "group_size": 1}, {"kernels": "arrays"}], ids=str)
def test_what_is_written_in_every_step_waits_where_it_is_large(
    settings: dict[str, Any],
    metal_shim: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Summaries of one token, and K and V by array operations: one wait for both layers."""
    run, waits = Steps(monkeypatch, length=UNIT, **settings), []
    monkeypatch.setattr(open_units, "GPU", "cpu")
    monkeypatch.setattr(open_units.mx, "synchronize", lambda stream=None: waits.append(run.length))
    num_bytes = sum(array.nbytes for array in run.cache.k.opened.arrays())
    monkeypatch.setattr(open_units, "HELD_BYTES", num_bytes)
    run.extra_bytes()
    run.extra_bytes()
    assert waits == [UNIT + 1, UNIT + 2]
    monkeypatch.setattr(open_units, "HELD_BYTES", num_bytes + 1)
    run.extra_bytes()
    assert len(waits) == 2


# The same bytes, lists and outputs as array operations, whatever closes the units


def exported(one: Any, num_units: int) -> dict[str, np.ndarray]:
    return one.backend.export_units(one.cache, np.arange(num_units))


def check_same(ours: Any, plain: Any, num_units: int) -> None:
    """K and V to the bit, and summaries but for the rounding of a scale."""
    got, want = exported(ours, num_units), exported(plain, num_units)
    assert got.keys() == want.keys()
    for name, array in want.items():
        assert np.array_equal(got[name], array), name


@pytest.mark.parametrize(
    "case",
    [
        Case((75, 33, 65), SHORT, head_dim=64, dtype="float16", steps=20),
        Case((150, 61), eps("rq", group_size=2, mean_tokens=64, combine="sum", cascade=(), rescore=0.0), steps=3),
        Case((41, 3), eps("box"), steps=35, head_dim=33, dtype="bfloat16"),
        Case((50, 21), eps("meanstd"), num_heads=6, num_kv_heads=1, steps=20),
        Case((50, 20), eps("oracle"), steps=20),  # which reads keys
        Case((50, 70), eps("rq", group_size=2, mean_tokens=32, rq_bounds=True), head_dim=64, steps=25),
        Case((50, 70), eps("rq", group_size=2, mean_tokens=32, bound_bits=8), head_dim=64, steps=25),
    ],
    ids=str,
)
def test_ragged_rows_fill_units(case: Case, metal_shim: Any) -> None:  # noqa: F811
    """All rows in a step, some of which begin a unit, until some have ended."""
    ours, plain = (FilledCase(backend, "cpu", case) for backend in (METAL, ARRAYS))
    layers = []
    for one in (ours, plain):
        out, read = sparse_attention(one.backend, one.cache, 0, one.native, one.plan)
        layers.append([*map(one.host, (out, read.lse, read.selection.groups, *read.pending.values()))])
    assert layers[0][4].max() > 0  # the share that was skipped
    for got, want in zip(*layers, strict=True):
        np.testing.assert_allclose(got, want, atol=4 * ours.allowance + 1e-6)
    ours.attended(None)
    for b, length in enumerate(case.lengths):
        for got, want in zip(
            METAL.read_kv(ours.cache, 0, ours.table[b], length),
            ARRAYS.read_kv(plain.cache, 0, plain.table[b], length),
            strict=True,
        ):
            assert np.array_equal(METAL.to_numpy(got), ARRAYS.to_numpy(want))
    assert case.config.cache_config.method_spec.reads_keys or len(ours.cache.k.opened.units[0])
    check_same(ours, plain, case.spec.num_units)


def test_rows_of_a_batch_change_places_and_units_are_imported(metal_shim: Any) -> None:  # noqa: F811
    """Steps of three sequences in any order, some of which stay away; then an open unit is another one's."""
    caches, config = [], EpsConfig.of("rq", budget=0.5, budget_floor=0)
    for backend in (METAL, ARRAYS):
        rng = np.random.default_rng(3)
        cache = backend.new_cache(CacheSpec(1, 2, 16, 8), config.cache_config, "cpu")
        lengths = np.zeros(3, np.int64)
        for _ in range(3 * UNIT):
            rows = rng.permutation(3)[: rng.integers(1, 4)]
            k, v = (
                backend.from_numpy(rng.standard_normal((len(rows), 2, 16), np.float32), "float32", "cpu") for _ in "kv"
            )
            cache = backend.write_kv(cache, 0, k, v, rows * 2 * UNIT + lengths[rows])
            lengths[rows] += 1
            lengths %= 2 * UNIT
        given = backend.export_units(cache, [0])
        cache = backend.write_kv(cache, 0, k, v, np.arange(len(rows)) * 2 * UNIT)
        if backend is METAL:
            assert len(cache.k.opened.units[0])
        cache = backend.import_units(cache, [2], given)
        caches.append(backend.export_units(cache, range(8)))
    for name, array in caches[1].items():
        assert np.array_equal(caches[0][name], array), name


def test_nan_is_noted_by_whatever_writes_it(metal_shim: Any) -> None:  # noqa: F811
    cache = METAL.new_cache(CacheSpec(1, 2, 16, 4), eps("rq").cache_config, "cpu")
    draft = METAL.from_numpy(np.full((1, 2, 16), np.nan), "float32", "cpu")
    cache = METAL.write_kv_tentative(cache, 0, draft, draft, np.array([0]))
    for token, value in enumerate((1.0, np.nan, 1.0, 1.0)):
        k = np.ones((1, 2, 16), np.float32)
        k[0, 1, 15] = value
        given = METAL.from_numpy(k, "float32", "cpu")
        cache = METAL.write_kv(cache, 0, given, given, np.array([token]))
        if token in (1, 2):  # it stays noted until somebody asks
            continue
        with pytest.raises(ConfigError, match="NaN or Inf in K") if token == 3 else nullcontext():
            METAL.check_finite(cache)
    METAL.check_finite(cache)


def decoded(backend: Any, say: Any) -> Pages:
    """A sequence through all that may happen to open units; `say(one, sequence)` looks after each."""
    rng = np.random.default_rng(7)
    kv = rng.normal(size=(2, 200, 2, 16)).astype(np.float32)
    one = Pages(backend, "cpu", eps("rq", group_size=2, mean_tokens=32, num_recent_tokens=4))
    first, _ = one.pool.open([])
    one.append(first, kv[:, :50], 0)
    one.append(first, kv[:, 50:53], 50, step=1)
    say(one, first)
    second = one.pool.fork(first)
    one.append(first, kv[:, 53:55], 53, step=1)  # into a copy of the unit that is open
    one.append(second, kv[:, 60:63], 60, step=1)
    say(one, first)
    say(one, second)
    one.append(first, kv[:, 55:60], 55, step=5)  # several at once
    one.append(first, kv[:, 70:90], 70, step=1)
    one.pool.truncate(first, 66)
    one.append(first, kv[:, 90:95], 90, step=1)
    say(one, first)
    one.pool.grow(80)
    one.cache = one.backend.grow(one.cache, 80)
    one.append(first, kv[:, 100:102], 100, step=1)
    # drafts that may be taken back, the verify pass over them, and what is kept of them
    slots, _ = one.pool.append(first, range(200, 203))
    for i, slot in enumerate(slots):
        k, v = (one.give(x[i : i + 1]) for x in kv[:, 110:113])
        one.cache = one.backend.write_kv_tentative(one.cache, 0, k, v, np.array([slot]))
    say(one, first)
    one.cache = one.backend.write_kv(one.cache, 0, one.give(kv[0, 110:111]), one.give(kv[1, 110:111]), slots[:1])
    one.pool.rewind(first, first.length - 2)
    say(one, first)
    source = one.pool.table([first])[0, :1] * one.pool.unit_tokens
    one.cache = one.backend.move_kv(one.cache, 0, slots[:1], source)
    say(one, first)
    one.append(first, kv[:, 120:140], 120, step=1)
    say(one, first)
    return one


def test_what_closes_open_units_sees_what_they_hold(metal_shim: Any) -> None:  # noqa: F811
    seen: list[list[np.ndarray]] = []

    def say(one: Pages, sequence: Any) -> None:
        q = one.give(np.random.default_rng(1).normal(size=(3, 4, 16)).astype(np.float32))
        plan = one.plan(sequence)
        rows = Rows.of(plan.table, plan.lengths, np.array([3]))
        read = one.backend.attend_rows(one.cache, 0, q, rows)
        seen.append([*one.read(sequence, q[:1]), *(one.backend.to_numpy(x) for x in (read.out, read.lse))])

    ours = decoded(METAL, say)
    got, seen = seen, []
    plain = decoded(ARRAYS, say)
    for one, other in zip(got, seen, strict=True):
        for x, y in zip(one, other, strict=True):
            np.testing.assert_allclose(x, y, atol=2e-5)
    check_same(ours, plain, 80)


def test_mlx_lm_says_the_same(metal_shim: Any) -> None:  # noqa: F811
    """A batch that others join and leave, whose dense layers' attention is mlx-lm's own, and verified decoding."""
    settings = {"method": "rq", "budget": 0.3, "num_sink_tokens": 4, "num_recent_tokens": 16}
    model, first, later = tiny("llama"), prompts(60, 127, 2), prompts(1, seed=1)
    want = together(model, first, later, most=5)
    with eps_on(model, **settings | {"budget": 1}, kernels="metal") as sparse:
        assert together(model, first, later, most=5)[0] == want[0] and sparse.stats()["bytes_ratio"] == 1
    with eps_on(model, **settings, kernels="arrays"):
        want = together(model, first, later, most=5)
    with eps_on(model, **settings, kernels="metal") as sparse:
        tokens, logprobs = together(model, first, later, most=5)
        assert sparse.stats()["bytes_ratio"] < 0.8 and not sparse.stats()["fallbacks"]
    assert metal_shim["eps_write"].threadgroups and tokens == want[0]
    for index, rows in want[1].items():
        np.testing.assert_allclose(np.array(logprobs[index]), np.array(rows), atol=2e-4)
    plain = alone(model, first[1], most=8)[0]
    with eps_on(model, **settings, verify="tokens", draft=3, kernels="metal"):
        steps = sys.modules["mlx_lm.generate"].generate_step(mx.array(first[1]), model, max_tokens=8)
        assert [int(token) for token, _ in steps] == plain


# Launches and other operations


def operations(arrays: list[mx.array]) -> list[str]:
    """MLX's own operations that are still to be computed for arrays, by name."""
    with tempfile.NamedTemporaryFile(suffix=".dot") as file:
        mx.export_to_dot(file.name, *arrays)
        return sorted(re.findall(r'label ?= ?"([A-Za-z]+)"', Path(file.name).read_text()))


@pytest.mark.parametrize(
    ("settings", "launches"),
    [({}, 9), ({"cascade": (), "rescore": 0.0}, 5), ({"combine": "max"}, 9), ({"budget": 1.0}, 2)],
)
def test_a_layer_takes_so_many_launches(
    settings: dict,
    launches: int,
    metal_shim: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A token, a query, scores, the choice and attention, of a list too short to be split; in stages two more for each.
    MLX computes nothing beside them."""
    run = Steps(monkeypatch, length=UNIT + 7, **settings)
    run.extra_bytes()
    names, asked = [], []

    def stand_in(kernel: Any, inputs: Any, template: Any, grid: Any, group: Any, shapes: Any, dtypes: Any) -> Any:
        names.append(kernel.name)
        asked.extend(inputs)
        found = [mx.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
        mx.eval(found)
        return found

    monkeypatch.setattr(launch, "runner", stand_in)
    q, k = run.drawn(1, 4), run.drawn(1, 2)
    mx.eval(q, k)
    plan = StepPlan.of(run.config, run.table, np.array([run.length + 1]))
    METAL.write_kv(run.cache, 0, k, k, np.array([run.length]))
    assert names == ["eps_write"]
    out, read = sparse_attention(METAL, run.cache, 0, q, plan)
    assert len(names) == launches, names
    assert operations([*asked, out, read.lse, *read.pending.values(), *pending(run.cache)]) == []
    assert operations([q + q]) == ["Add"]
