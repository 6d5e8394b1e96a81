"""Calls of layers that are kept from step to step, as engines ask for them: to the last bit what calls give that are
made for one step, and arrays that no later step fills."""

import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from test_cpu_kernels import several_threads as several_threads

import eps_cuda
from eps_core.attention.layer import sparse_attention
from eps_core.config.cache import CacheSpec
from eps_core.config.eps import EpsConfig
from eps_core.cpu import openmp
from eps_core.errors import ConfigError
from eps_core.kv_cache.step_plan import StepPlan
from eps_cuda.kernels import cpu, kept

LAYERS, HEADS, STEPS = 3, 6, 24
RQ = EpsConfig.of(method="rq", budget=0.2, budget_floor=1, num_recent_tokens=16, group_size=2, mean_tokens=64)
SPEC = CacheSpec(LAYERS, 2, 32, 40, "bfloat16")
STARTS = (300, 190)  # tokens before the first step: the first ends a mean's 64 at 320, the second at 192


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine must not bring helpers."""
    monkeypatch.setattr(openmp, "LATE_NS", 10**12)
    monkeypatch.setattr(cpu.kernels.team, "patience", openmp.Patience())


class Run:
    """Decode steps of two sequences, layer by layer; `passing` as `sparse_attention` takes it."""

    passing = False

    def __init__(self, spec: CacheSpec = SPEC, config: EpsConfig = RQ, dtype: torch.dtype = torch.bfloat16) -> None:
        self.rng, self.config, self.dtype, self.spec = np.random.default_rng(3), config, dtype, spec
        self.cache: Any = eps_cuda.new_cache(spec, config.cache_config, "cpu", "numba")
        unit = config.cache_config.unit_tokens
        self.tables = np.stack([np.arange(10), np.arange(10, 20)]).astype(np.int32)
        self.lengths = np.array(STARTS)
        for layer in range(LAYERS):
            for table, length in zip(self.tables, STARTS, strict=True):
                slots = table[np.arange(length) // unit].astype(np.int64) * unit + np.arange(length) % unit
                eps_cuda.write_kv(self.cache, layer, self.rows(length), self.rows(length), slots)

    def rows(self, number: int, heads: int = SPEC.num_kv_heads) -> torch.Tensor:
        return torch.from_numpy(self.rng.standard_normal((number, heads, SPEC.head_dim), np.float32)).to(self.dtype)

    def step(self, rows: slice = slice(0, 2), skip: int | None = None) -> list[Any]:
        """Write a token of each sequence and attend, in every layer but that `skip` is written alone."""
        unit, lengths = self.config.cache_config.unit_tokens, self.lengths[rows]
        tables = self.tables[rows]
        slots = tables[np.arange(len(lengths)), lengths // unit].astype(np.int64) * unit + lengths % unit
        self.lengths[rows] += 1
        plan = StepPlan.of(self.config, tables[:, : -(-int(self.lengths[rows].max()) // unit)], self.lengths[rows])
        reads = []
        for layer in range(LAYERS):
            eps_cuda.write_kv(self.cache, layer, self.rows(len(slots)), self.rows(len(slots)), slots)
            q = self.rows(len(slots), HEADS)
            if layer != skip:
                out, read = sparse_attention(eps_cuda, self.cache, layer, q, plan, passing=self.passing)
                lse, selection = read.lse, read.selection
                assert selection is not None
                if self.passing:
                    lists = {name: getattr(selection, name).clone() for name in ("groups", "selected_mask")}
                    lse, selection = lse.clone(), replace(selection, **lists)
                reads.append((out, lse, selection, read.pending["skipped_mass"]))
        return reads


def arrays(reads: list[list[Any]]) -> list[np.ndarray]:
    found = []
    for step in reads:
        for out, lse, selection, skipped in step:
            found += [out.float(), lse, skipped, selection.groups, selection.counts, selection.selected_mask]
            found += [torch.from_numpy(selection.common_counts), torch.from_numpy(selection.always_selected)]
    return [one.numpy() for one in found]


def both(monkeypatch: pytest.MonkeyPatch, work: Any, **about: Any) -> tuple[Run, Run]:
    """`work` of a run by calls that are kept, and of one without; the same results, K, V, states and summaries."""
    runs, results = [], []
    for is_kept in (True, False):
        with monkeypatch.context() as patch:
            if not is_kept:
                patch.setattr(kept, "attend", lambda kernels, *at: super(cpu.TorchKernels, kernels).attend_fused(*at))
                patch.setattr(kept, "write", lambda *at: False)
            runs.append(Run(**about))
            results.append(arrays(work(runs[-1])))  # what earlier steps gave is read after the last one
    assert len(results[0]) == len(results[1]) > 0
    for got, wanted in zip(*results, strict=True):
        np.testing.assert_array_equal(got, wanted)
    one, other = (run.cache for run in runs)
    for layer in range(LAYERS):
        assert torch.equal(one.k[layer], other.k[layer]) and torch.equal(one.v[layer], other.v[layer])
        assert one.state[layer].history == other.state[layer].history
        assert np.array_equal(one.state[layer].fill, other.state[layer].fill)
        for name, array in one.summaries[layer].items():
            assert torch.equal(array.view(torch.uint8), other.summaries[layer][name].view(torch.uint8)), name
    return runs[0], runs[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("stored", ["bfloat16", "float32"])
def test_steps_give_what_calls_of_their_own_give(dtype: torch.dtype, stored: str, monkeypatch: Any) -> None:
    """Over steps that end a mean's tokens, open a unit and widen the lists."""
    work = lambda run: [run.step() for _ in range(STEPS)]  # noqa: E731
    run, _ = both(monkeypatch, work, dtype=dtype, spec=replace(SPEC, dtype=stored))
    layers, rows = (run.cache.steps.get((name, threading.get_ident())) for name in ("layers", "rows"))
    assert len(layers.layers) == LAYERS and layers.first is not layers.asked, "no call was kept"
    if stored == "float32" and dtype == torch.bfloat16:  # rows that are widened first
        assert rows is None
    else:
        assert len(rows.calls) == LAYERS and rows.first[3] is run.cache.state[0]


def test_lists_that_pass_are_those_that_last() -> None:
    """Those that last are read after the last step; of those that pass, copies from before the next layer."""
    lasting, passing = Run(), Run()
    passing.passing = True
    for one, other in zip(*(arrays([run.step() for _ in range(4)]) for run in (lasting, passing)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_else_may_change_makes_other_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of sequences, how groups are read, a cache that grows, a unit that is copied."""

    def work(run: Run) -> list[list[Any]]:
        found = [run.step(slice(0, number)) for number in (2, 2, 1, 1, 2)]
        run.config = run.config.replace(budget=0.4)
        found += [run.step(), run.step()]
        run.cache = eps_cuda.grow(run.cache, SPEC.num_units + 5)
        found += [run.step(), run.step()]
        unit = int(run.tables[1, -1])
        run.cache = eps_cuda.copy_units(run.cache, (int(run.tables[1, 3]),), (unit,))
        run.tables[1, 3] = unit
        return [*found, run.step(), run.step()]

    both(monkeypatch, work)


@pytest.mark.parametrize("later", range(14, 20))
def test_a_layer_that_is_asked_later_does_not_take_the_numbers_of_the_first_step(later: int, monkeypatch: Any) -> None:
    """As where helpers attend in its place for a while."""
    both(monkeypatch, lambda run: [run.step(skip=1 if step < later else None) for step in range(STEPS)])


def test_layers_that_were_written_otherwise_select_their_own_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(run: Run) -> list[list[Any]]:
        found = [run.step()]
        unit = run.config.cache_config.unit_tokens
        run.cache.state[1].reopen(np.array([int(run.tables[0, 1]) * unit // 64]))  # 64 tokens without a summary
        return [*found, run.step(), run.step()]

    run, _ = both(monkeypatch, work)
    counts = [run.cache.state[layer].fill.sum() for layer in range(LAYERS)]
    assert counts[0] == counts[2] != counts[1]


def test_threads_have_calls_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(run: Run) -> list[list[Any]]:
        found, threads, may_end = [], [], threading.Event()

        def turn() -> None:
            found.append(run.step())
            may_end.wait()  # another thread may have the name of one that is gone

        for number in range(1, 7):
            threads.append(threading.Thread(target=turn))
            threads[-1].start()
            while len(found) < 2 * number - 1:
                time.sleep(0.001)
            found.append(run.step())
        may_end.set()
        for thread in threads:
            thread.join()
        assert len(run.cache.steps) <= kept.MOST_STEPS
        return found

    both(monkeypatch, work)


def test_inference_mode_may_come_and_go_and_gradients_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(run: Run) -> list[list[Any]]:
        with torch.inference_mode():
            found = [run.step()]
        found += [run.step() for _ in range(3)]
        plain = run.rows
        run.rows = lambda *at: plain(*at).requires_grad_()  # type: ignore[method-assign]
        found.append(run.step())
        assert not found[-1][0][0].requires_grad
        run.rows = plain  # type: ignore[method-assign]
        with torch.inference_mode():
            return [*found, run.step()]

    both(monkeypatch, work)


def test_a_key_that_is_not_finite_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    run.step()
    plain = run.rows
    run.rows = lambda *at: plain(*at) * torch.nan  # type: ignore[method-assign]
    run.step()
    with pytest.raises(ConfigError, match="K of layer 0"):
        eps_cuda.check_finite(run.cache)
