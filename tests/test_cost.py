"""Where sparse attention pays: the break-even of measured costs, what is kept of it, and what `run` does with it."""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from command import outcome

from eps_core.bench.layer import Bench
from eps_core.bench.plan import BenchRequest
from eps_core.cli.main import cli
from eps_core.config.cache import CacheSpec
from eps_core.config.eps import EpsConfig
from eps_core.decode import cost
from eps_core.decode.cost import Cost, cost_of, measure
from eps_core.decode.session import Session
from eps_core.evaluation.capture import open_capture
from eps_core.io import caches
from eps_core.load import load_backend

SPEC = CacheSpec(4, 2, 16, 1)
CONFIG = EpsConfig.of(method="rq")


@pytest.fixture(autouse=True)
def cache_config(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(caches.VARIABLE, "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cost, "CONTEXTS", (256, 512))
    monkeypatch.setattr(cost, "ROUNDS", 1)


@pytest.mark.parametrize(
    ("contexts", "dense", "sparse", "expected"),
    [
        ((2048, 8192, 32768), (1, 4, 16), (2, 3, 6), 5120),  # -1 at 2,048 and +1 at 8,192: midway
        ((2048, 8192, 32768), (3, 4, 16), (2, 3, 6), 0),
        # -4 at 8,192 and -2 at 32,768: as much again
        ((2048, 8192, 32768), (1, 2, 10), (3, 6, 12), 32768 + 24576),
        ((2048, 8192, 32768), (1, 2, 4), (3, 6, 12), None),  # falls behind ever further
        ((2048, 8192, 32768), (1, 4, 16), (2, 3, 18), None),  # ahead once, behind at the largest: that one decides
        # rounded up to whole steps
        ((1000, 2000), (1.0, 3.0), (2.0, 3.0), 2048),
        ((1000, 2000), (1.0, 3.2), (2.0, 3.0), 2048),  # 1,833 lies between
        # one context tells no slope
        ((2048,), (1.0,), (2.0,), None),
        ((2048,), (2.0,), (1.0,), 0),
    ],
)
def test_break_even(contexts: tuple, dense: tuple, sparse: tuple, expected: int | None) -> None:
    assert Cost(contexts, dense, sparse).min_context == expected


def test_caches_are_emptied_before_each_call(monkeypatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(cost.host, "flusher", lambda num_bytes, device: lambda: calls.append("flush"))
    dense, sparse = cost._medians(
        [lambda: calls.append("dense"), lambda: calls.append("sparse")], cost.host.flusher(1, "cpu")
    )
    assert min(dense, sparse) > 0 and calls == ["flush", "dense", "flush", "sparse"] * (2 + cost.ROUNDS)
    calls.clear()
    measure(load_backend("numpy"), "cpu", "arrays", SPEC, 4, CONFIG, 256)
    assert calls.count("flush") == 2 * (2 + cost.ROUNDS)  # of a CPU


def test_measures_every_backend_once_and_keeps_it(target, monkeypatch) -> None:
    backend, device = target
    got, was_kept = cost_of(backend, device, "auto", SPEC, 4, CONFIG, 2048)
    assert not was_kept and got.contexts == (256, 512)
    assert min(got.dense_ms + got.sparse_ms) > 0
    monkeypatch.setattr(cost, "measure", None)  # not called again
    assert cost_of(backend, device, "auto", SPEC, 4, CONFIG, 2048) == (got, True)
    with pytest.raises(TypeError):  # another head count is another entry
        cost_of(backend, device, "auto", SPEC, 2, CONFIG, 2048)


def test_what_is_timed_is_sparse_although_the_config_says_dense(target, monkeypatch) -> None:
    backend, device = target
    selections = []

    def select(scores, plan, layer=0):
        selections.append(real(scores, plan, layer))
        return selections[-1]

    real = backend.select
    monkeypatch.setattr(backend, "select", select)
    measure(
        backend,
        device,
        "auto",
        SPEC,
        4,
        EpsConfig.of(method="rq", group_size=16, mean_tokens=32, budget=0.05, min_context=10**6),
        2048,
    )
    assert len(selections) == 2 * (2 + cost.ROUNDS)
    assert all(int(np.asarray(s.common_counts).max()) < 128 for s in selections)  # of 128 and 256 groups


def test_a_layer_is_timed_as_whole_steps_repeat_it(monkeypatch) -> None:
    """Where they do: not in an engine, nor over K and V in formats that no kernel reads."""
    from eps_core.cpu import openmp
    from eps_cuda.kernels import kept
    from eps_cuda.kernels.cpu import TorchKernels

    made: list[openmp.Calls] = []
    real = openmp.Team.run_all
    monkeypatch.setattr(openmp.Team, "run_all", lambda self, calls: (made.append(calls), real(self, calls)))
    monkeypatch.setattr(openmp, "LATE_NS", 10**12)  # a busy machine must not bring helpers
    backend, config = load_backend("cuda"), EpsConfig.of(method="rq", budget=0.05, budget_floor=1)
    monkeypatch.setattr(backend.kernel_of(backend.new_cache(SPEC, config.cache_config, "cpu", "numba"), "ready_layer")
                        .run.__self__.team, "patience", openmp.Patience())  # fmt: skip
    measure(backend, "cpu", "numba", SPEC, 4, config, 2048, whole_steps=True)
    assert len(made) == 2 * 2 * (2 + cost.ROUNDS)  # contexts, dense and sparse
    dense, sparse, *_ = (calls._held[0][1] for calls in made)
    assert len(dense) > len(sparse)  # arguments of attention alone, and of a whole sparse layer
    made.clear()
    # an engine's layers have kept calls of their own
    monkeypatch.setattr(kept, "attend", lambda kernels, *at: super(TorchKernels, kernels).attend_fused(*at))
    measure(backend, "cpu", "numba", SPEC, 4, config, 2048)
    measure(backend, "cpu", "numba", CacheSpec(4, 2, 16, 1, k_bits="fp8", v_bits=8), 4, config, 2048, whole_steps=True)
    assert not made


def test_a_store_that_cannot_be_written_is_no_error(target, monkeypatch, tmp_path) -> None:
    backend, device = target
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert not cost_of(backend, device, "auto", SPEC, 4, CONFIG, 512)[1]


def paying(pays_from: int | None) -> Cost:
    if pays_from is None:
        return Cost((256,), (1.0,), (2.0,))
    return Cost((0, 2 * pays_from), (1.0, 3.0), (2.0, 2.0))


@pytest.mark.parametrize(("pays_from", "dense"), [(None, True), (10_240, True), (256, False)])
def test_run_is_sparse_from_where_it_pays(monkeypatch, pays_from: int | None, dense: bool) -> None:
    monkeypatch.setattr("eps_core.evaluation.compare.cost_of", lambda *a: (paying(pays_from), False))
    flags = ["--backend", "cuda", "--eps-method", "rq", "--eps-min-context", "auto", "--max-new-tokens", "2"]
    done = CliRunner().invoke(cli, ["run", *flags, "--prompt", "It was a dark and stormy night. " * 50])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout.splitlines()[-1])
    assert bool(result["eps"]["fallbacks"].get("min_context")) is dense
    assert (result["eps"]["pages_skipped"] == 0) is dense
    assert ("at no context" if pays_from is None else f"from {pays_from:,} tokens on") in done.output


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_caches_of_16_bits_are_measured_too(target, dtype) -> None:
    backend, device = target
    cost = measure(backend, device, "auto", CacheSpec(1, 2, 32, 1, dtype), 4, EpsConfig.of(method="rq"), 512)
    assert cost.contexts == (256, 512) and min(cost.dense_ms + cost.sparse_ms) > 0


def test_a_context_that_the_budget_covers_saves_nothing(target) -> None:
    backend, device = target
    cost = measure(backend, device, "auto", CacheSpec(1, 2, 32, 1), 4, EpsConfig.of(method="rq", budget=512.0), 512)
    assert cost.sparse_ms == cost.dense_ms and cost.min_context is None


def test_kernels_are_compiled_before_costs_are_measured(monkeypatch) -> None:
    """What compiles within them would be kept for ever."""
    order: list[str] = []
    monkeypatch.setattr(Session, "check_kernels", lambda self, cache_config, verified=False: order.append("kernels"))
    monkeypatch.setattr("eps_core.evaluation.compare.cost_of", lambda *a: order.append("costs") or (paying(256), False))
    flags = ["--backend", "cuda", "--method", "rq", "--eps-min-context", "auto", "--max-new-tokens", "1"]
    assert CliRunner().invoke(cli, ["run", *flags, "--prompt", "It was a dark and stormy night."]).exit_code == 0
    assert order.index("costs") == 2 and order[:2] == ["kernels"] * 2


def test_every_way_in_asks_what_pays_on_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = set()

    def recorded(config: EpsConfig, device: str) -> EpsConfig:
        asked.add((sys._getframe(1).f_globals["__name__"], device))
        return config

    monkeypatch.setattr(EpsConfig, "for_device", recorded)
    here = ["--backend", "cuda", "--device", "cpu"]
    run = ["run", "--device", "cpu", "--prompt", "It was a dark night. " * 20, "--max-new-tokens", "2"]
    for flags in (
        [*run, "--backend", "cuda"], [*run, "--engine", "transformers"],
        ["evaluate", *here, "--context", "256", "--tasks", "none", "--samples", "1",
         "--text-steps", "2", "--no-oracle"],
    ):  # fmt: skip
        done = CliRunner().invoke(cli, flags)
        assert done.exit_code == 0, done.output
    places = "decode.session", "evaluation.compare", "evaluation.measure"
    assert asked >= {(f"eps_core.{place}", "cpu") for place in places}
    assert ("eps_cuda.integrations.transformers.cache", "cpu") in asked


def test_what_measures_a_device_reads_as_it_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = EpsConfig.for_device
    monkeypatch.setattr(EpsConfig, "for_device", lambda config, device: real(config, "cuda"))
    here, text = ["--backend", "cuda", "--device", "cpu"], ["--context", "160", "--steps", "1"]
    for flags in (
        ["capture", *text, "--method", "rq", "--layers", "0", "-o", "c.safetensors"],
        ["calibrate", *text, "-o", "p.json"],
        ["replay", "c.safetensors", "--budgets", "0.5", "-o", "r.jsonl"],
    ):
        done = outcome([*flags, *here], tmp_path)
        assert done.code in (None, 0), done.err
    bench = Bench(BenchRequest(contexts=(256,), methods=("rq",), device="cpu", backend="cuda"))
    _, replayed = map(json.loads, (tmp_path / "r.jsonl").read_text().splitlines()[:2])
    captured = open_capture(tmp_path / "c.safetensors").info.config
    policy = json.loads((tmp_path / "p.json").read_text())["settings"]["config"]
    for config in (captured, policy, replayed["config"], *(one.to_dict() for one in bench.configs)):
        assert (config["cascade"], config["rescore"]) == ([], 1.0)
