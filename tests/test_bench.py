"""`eps-proto bench`: what it times is what it says, and it refuses to time anything else."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import lines_of, outcome, refused
from conftest import REQUESTED

from eps_core.bench import layer as layer_module
from eps_core.bench.data import CHUNK_TOKENS, Shape, Source, fill
from eps_core.bench.plan import SCALING_CONTEXTS, BenchRequest, budgeted
from eps_core.bench.proof import require_same, run_step
from eps_core.config.eps import EpsConfig
from eps_core.cpu import host
from eps_core.errors import ConfigError
from eps_core.kv_cache.step_plan import StepPlan
from eps_core.load import load_backend

HEADS, HEAD_DIM, GROUPED = 2, 32, 4  # kv heads, their dimensions, query heads
TINY = (
    "--context", "256", "--q-heads", "4", "--kv-heads", "2", "--head-dim", "32", "--repeats", "2",
    "--warm-seconds", "0", "--fraction", "0.25",
)  # fmt: skip
FIRST = REQUESTED[0]
# every kernel that a device of a backend has; an interpreter is too slow for more than one cell
CASES = [
    (name, device, kernels)
    for name in REQUESTED
    for device in load_backend(name).devices()
    for kernels in load_backend(name).usable_kernels(device)
]


class Bench:
    """Runs the command in this process, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, *args: object) -> tuple[str, dict[str, Any], list[dict[str, Any]]]:
        """(stdout, the run's line, those of the cells) of a run that must succeed."""
        done = outcome(["bench", *map(str, args), "--output", "bench.jsonl"], self.folder)
        assert done.code in (None, 0), done.err
        run, *cells = lines_of(self.folder / "bench.jsonl")
        return done.out, run, cells

    def refused(self, words: str, *args: object) -> str:
        """Return the one line that says why; nothing was printed that could be a time."""
        return refused(["bench", *args], self.folder, words)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bench:
    # how fast the memory is and how cold the caches are is of no interest here
    for name, value in (("COPIES", 1), ("COPY_SECONDS", 0.0), ("LARGEST_COPY_BYTES", 2**22)):
        monkeypatch.setattr(f"eps_core.bench.layer.{name}", value)
    monkeypatch.setattr("eps_core.bench.layer.flush_bytes", lambda last_cache: 2**20)
    return Bench(tmp_path)


@pytest.mark.parametrize(("backend", "device", "kernels"), CASES, ids=["-".join(case) for case in CASES])
def test_times_every_part_on_every_backend(bench: Bench, tmp_path: Path, backend, device, kernels) -> None:
    slow = kernels == "triton" and device == "cpu"
    methods = "rq@2" if slow else "rq@2,box@16"
    out, run, cells = bench(
        *TINY, "--backend", backend, "--device", device, "--kernels", kernels, "--method", methods,
        "--plot", tmp_path / "plots", "--repeats", 1 if slow else 2,
    )  # fmt: skip
    summary = json.loads(out.splitlines()[-1])
    assert run["type"] == "run" and run["backend"] == backend and run["device"] == device
    assert run["versions"]["numpy"] == np.__version__ and run["git_commit"] and run["data"]
    bandwidth = run["bandwidth"]
    assert bandwidth["roof_gbps"] == max(bandwidth["copy_gbps"], bandwidth["read_gbps"]) > 0
    assert run["interpreted"] is slow and ("INTERPRETED" in out) is slow
    assert [f"{cell['method']}@{cell['group_size']}" for cell in cells] == methods.split(",")
    assert [cell["method"] for cell in summary["cells"]] == [cell["method"] for cell in cells]
    for cell in cells:
        parts = {"score", "select", "attend", "write", "step", "step_with_write", "eps dense", "grouped matmul"}
        variants = cell["arms"]
        assert parts <= set(variants) and cell["kernels"] == kernels and not cell["failed_variants"], cell[
            "failed_variants"
        ]
        assert cell["check"]["computed_by"]["attend"] == kernels
        assert cell["check"]["out_error"] < 1e-3 and cell["groups_selected"] < cell["groups_total"]
        for variant in variants.values():
            samples = variant["samples_ms"]
            assert len(samples) == cell["rounds"] and min(samples) > 0
            assert variant["least_ms"] <= variant["p10_ms"] <= variant["ms"] <= variant["p90_ms"]
            assert variant["ms"] == pytest.approx(np.median(samples))
            assert variant["gbps"] == pytest.approx(variant["bytes"] / variant["ms"] / 1e6)
            assert variant["share_of_bandwidth"] == pytest.approx(variant["gbps"] / bandwidth["roof_gbps"])
        dense = {name: variant["ms"] for name, variant in variants.items() if variant["kind"] == "dense"}
        assert cell["best_dense"] == min(dense, key=lambda name: dense[name])
        assert cell["speedup"] == pytest.approx(cell["best_dense_ms"] / cell["step_ms"])
    for name in ("roofline.svg", "scaling.svg"):
        assert (tmp_path / "plots" / name).read_text().startswith("<?xml")


@pytest.mark.parametrize("backend", REQUESTED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_counts_bytes_exactly(bench: Bench, backend: str, dtype: str) -> None:
    context, batch = 320, 2
    _, _, (cell,) = bench(
        *TINY, "--backend", backend, "--device", "cpu", "--kernels", "arrays", "--context", context, "--batch", batch,
        "--dtype", dtype, "--method", "rq@2", "--repeats", 1,
    )  # fmt: skip
    token = 2 * HEAD_DIM * {"float32": 4, "bfloat16": 2}[dtype]
    groups, rows = context // 2, batch * HEADS
    assert cell["dense_bytes"] == rows * context * token
    assert cell["groups_total"] == rows * groups and cell["groups_selected"] == rows * groups // 4
    assert cell["kv_bytes"] == cell["arms"]["attend"]["bytes"] == rows * groups // 4 * 2 * token
    # of 64 tokens a mean in 8 bits, 32 scales of a byte and half of 32 codes of 32 dimensions; the other half and the
    # rescoring bit, with its scale, of twice what is selected, or of more where that is usual
    usual = EpsConfig.of(method="rq").selection_config
    more, finer = (max(math.ceil(share * groups), groups // 2) for share in (*usual.cascade, usual.rescore))
    assert cell["summary_bytes"] == rows * (context // 64 * (32 + 2 + 32 + 64) + more * 2 + finer * 5)
    assert cell["bytes_read"] == cell["kv_bytes"] + cell["summary_bytes"]
    assert cell["bytes_ratio"] == pytest.approx(cell["bytes_read"] / cell["dense_bytes"])
    assert cell["arms"]["write"]["bytes"] == rows * token


def test_the_whole_context_is_timed_where_it_is_asked_for(bench: Bench) -> None:
    _, _, (cell,) = bench(*TINY, "--backend", FIRST, "--fraction", 1, "--method", "box@16")
    # a step that would read every group scores none
    assert cell["selected_ratio"] == 1 and cell["bytes_ratio"] == 1 and cell["summary_bytes"] > 0


@pytest.mark.parametrize("method", ["rq", "box"])
@pytest.mark.parametrize("share", [0.1, 0.3, 0.7])
def test_bytes_are_as_many_groups_as_fit(method: str, share: float) -> None:
    from eps_core.config.bytes import scoring_bytes

    shape = Shape(4096, 2, 8, 2, 128, "bfloat16")
    config = EpsConfig.of(method=method)
    solved = budgeted(config, shape, "bytes", share)

    def ratio(groups: int) -> float:
        return (scoring_bytes(config.replace(top_pages=groups), 128, [4096]) + groups * config.cache_config.S * 512) / (
            4096 * 512
        )

    most = solved.selection_config.top_pages
    assert most is not None and ratio(most) <= share < ratio(most + 1)
    with pytest.raises(ConfigError, match=r"bytes 0\.01 cannot hold") as refusal:
        budgeted(config, shape, "bytes", 0.01)
    least = float(re.search(r"are (\d\.\d{3}) of", str(refusal.value))[1])  # type: ignore[index]
    assert budgeted(config, shape, "bytes", least + 0.001)
    with pytest.raises(ConfigError):
        budgeted(config, shape, "bytes", least - 0.001)


@pytest.mark.parametrize("backend", REQUESTED)
def test_a_wrong_kernel_is_not_timed(bench: Bench, monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    module = load_backend(backend)
    right = module.attend

    def off_by_two_percent(cache, layer, q, plan, selection):
        out, lse = right(cache, layer, q, plan, selection)
        return (out if selection is None else out * 1.02), lse

    def mass_too_small(cache, layer, q, plan, selection):
        out, lse = right(cache, layer, q, plan, selection)
        return out, (lse if selection is None else lse - 0.01)

    def one_head_for_another(cache, layer, q, plan, selection):
        if selection is None:
            return right(cache, layer, q, plan, selection)
        return right(cache, layer, q[:, [1, 0, 2, 3]], plan, selection)

    for wrong in (off_by_two_percent, mass_too_small, *([one_head_for_another] if backend == "numpy" else [])):
        monkeypatch.setattr(module, "attend", wrong)
        error = bench.refused("is wrong", *TINY, "--backend", backend, "--device", "cpu", "--method", "box@16")
        assert "nothing was timed" in error


def everything(plan: StepPlan) -> StepPlan:
    return StepPlan.of(plan.config.replace(top_pages=None, budget=1.0), plan.table, plan.lengths)


@pytest.mark.parametrize("backend", REQUESTED)
def test_a_step_that_skips_nothing_is_not_timed(bench: Bench, monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    module, args = load_backend(backend), (*TINY, "--backend", backend, "--device", "cpu", "--method", "box@16")
    attend, select = module.attend, module.select
    with monkeypatch.context() as patch:
        patch.setattr(module, "attend", lambda *given: attend(*given[:4], None))
        bench.refused("against float64 attention over the same groups", *args)
    with monkeypatch.context() as patch:
        patch.setattr(module, "select", lambda scores, plan, layer=0: select(scores, everything(plan), layer))
        bench.refused("attention was not sparse: it selects all 16 groups", *args)
    calls = 0

    def dense_after_a_while(cache, layer, q, plan, selection):
        nonlocal calls
        calls += selection is not None
        return attend(cache, layer, q, plan, None if calls > 6 else selection)

    with monkeypatch.context() as patch:
        patch.setattr(module, "attend", dense_after_a_while)
        bench.refused("after the last timed call of", *args)
    assert calls > 6


def test_kernels_are_compared_with_arrays_in_every_part(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The estimates and the list of kernels are compared, too: float64 attention says nothing of these."""
    found = [case for case in CASES if case[2] not in ("arrays", "triton")]
    if not found:
        pytest.skip("no kernels but arrays here")
    backend, device, kernels = found[0]
    module = load_backend(backend)
    args = (*TINY, "--backend", backend, "--device", device, "--kernels", kernels, "--method", "rq@2")
    score, select = module.score, module.select

    def only(kernel_call: Any, array_call: Any) -> Any:
        """`kernel_call` for the kernels, `array_call` for what they are compared with."""
        return lambda first, *more: (array_call if first.kernels == "arrays" else kernel_call)(first, *more)

    def shifted(*given: Any) -> Any:
        scores = score(*given)
        return replace(scores, estimate=scores.estimate + 0.5)

    def worse(scores: Any, *more: Any) -> Any:
        return select(replace(scores, estimate=-scores.estimate), *more)

    for name, wrong, right, word in (
        ("score", shifted, score, "of the estimates differ"),
        ("select", worse, select, "selected differ"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, only(wrong, right))
            bench.refused(word, *args)


def test_a_kernel_that_fails_is_one_line(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: Any) -> Any:
        raise RuntimeError("an illegal\nmemory access")

    monkeypatch.setattr(load_backend(FIRST), "attend", broken)
    error = bench.refused("box@16 by kernels", *TINY, "--backend", FIRST, "--method", "box@16")
    assert "an illegal memory access" in error


def test_dense_arms_that_fail_or_are_wrong_are_reported(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    right = host.dense_variants

    def with_bad_ones(k: np.ndarray, v: np.ndarray, q: np.ndarray) -> dict[str, Any]:
        variants = right(k, v, q)

        def absent() -> None:
            raise ImportError("no such library")

        return {"absent": absent, "wrong": lambda: q * 0.5, **variants}

    monkeypatch.setattr(host, "dense_variants", with_bad_ones)
    out, _, (cell,) = bench(*TINY, "--backend", "numpy", "--method", "box")
    assert cell["failed_variants"]["absent"] == "ImportError: no such library"
    assert cell["failed_variants"]["wrong"].startswith("wrong: relative error")
    assert "note: absent: ImportError: no such library" in out and "absent" not in cell["arms"]


def test_what_a_graph_records_is_the_step_that_is_timed() -> None:
    """`capture` needs a GPU; what it records runs anywhere, if need be interpreted."""
    if not any(kernels == "triton" for _, _, kernels in CASES):
        pytest.skip("no Triton kernels here")
    from eps_cuda import bench as platform

    backend, shape = load_backend("cuda"), Shape(256, 2, 4, 2, 32, "float32")
    device = backend.devices()[-1]
    for method in ("rq", "box"):
        config = EpsConfig.of(method=method, top_pages=8)
        layer = fill(backend, Source(shape), config, device, "triton", 16, platform.synchronize)
        step = run_step(layer, config, platform.synchronize)
        parts = platform.device_parts(layer.cache, layer.q, layer.plan(config))
        assert {"select", "attend"} <= set(parts) and ("step" in parts) >= (method == "rq")
        for name in {"attend", "step"} & set(parts):
            require_same(layer, parts[name](), step.read, name)
        if "score" in parts:
            np.testing.assert_allclose(
                backend.to_numpy(parts["score"]()), backend.to_numpy(step.scores.estimate), rtol=1e-5
            )


def test_writes_go_to_fresh_slots() -> None:
    backend, shape = load_backend("numpy"), Shape(100, 3, 4, 2, 16, "float32")
    config = EpsConfig.of(method="rq")
    layer = fill(backend, Source(shape), config, "cpu", "arrays", 40, lambda *results: None)
    used = {int(unit) for row in layer.table for unit in row}
    before = layer.cache.k[0].copy()
    written = set()
    for _ in range(40):
        slots = layer.spare[:, layer.written].tolist()
        layer.write()
        assert not written & set(slots) and len(set(slots)) == 3
        written |= set(slots)
    assert not used & {slot // config.cache_config.unit_tokens for slot in written}
    untouched = sorted(used)
    np.testing.assert_array_equal(layer.cache.k[0][untouched], before[untouched])


def test_keys_are_the_same_from_the_host_and_from_the_device() -> None:
    backend, shape = load_backend("numpy"), Shape(CHUNK_TOKENS + 30, 1, 2, 1, 4, "bfloat16")
    config, source = EpsConfig.of(method="oracle"), Source(shape)
    first = fill(backend, source, config, "cpu", "arrays", 16, lambda *results: None)
    k, v = (part.swapaxes(0, 1)[None] for part in backend.read_kv(first.cache, 0, first.table[0], shape.context))
    second = fill(backend, source, config, "cpu", "arrays", 16, lambda *results: None, (k, v))
    for one, other in zip(
        backend.read_kv(first.cache, 0, first.table[0], shape.context),
        backend.read_kv(second.cache, 0, second.table[0], shape.context),
        strict=True,
    ):
        np.testing.assert_array_equal(one, other)


def test_few_groups_hold_most_of_the_mass() -> None:
    """The drawn keys are worth selecting among: an eighth of the groups holds most of the softmax."""
    shape = Shape(4096, 1, 4, 2, 128, "float32")
    source = Source(shape)
    _, k, _ = next(source.chunks(0))
    a = source.queries()[0] / math.sqrt(128)
    for head in range(4):
        masses = np.exp(k[:, head // 2] @ a[head]).reshape(-1, 2).sum(axis=1)
        best = np.sort(masses)[::-1]
        assert 0.5 < best[: len(best) // 8].sum() / best.sum() < 1


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--method", "off"), "method off is dense"),
        (("--method", "magic"), "method 'magic' is unknown: choose among off, jl"),
        (("--method", "rq@x"), "'rq@x' has no group size in tokens"),
        (("--method", "rq@3"), "a group of 3 tokens neither divides the page"),
        (("--group-size", "512"), "a group of 512 tokens is outside 1 to 256"),
        (("--fraction", "0"), "--fraction"),
        (("--fraction", "1.5"), "--fraction"),
        (("--fraction", "0.1", "--bytes", "0.1"), "--fraction and --bytes"),
        (("--bytes", "0.001"), "raise --bytes above that"),
        (("--context", "four"), "--context"),
        (("--context", "64,64"), "names a value twice"),
        (("--context", "2147483647"), "lower --context or --batch"),
        (("--scaling", "--context", "64"), "--scaling and --context"),
        (("--scaling", "--dtype", "float32,bfloat16"), "--scaling is of one dtype"),
        (("--repeats", "2", "--seconds", "1"), "--repeats and --seconds"),
        (("--q-heads", "5"), "q-heads 5 is not a multiple of kv-heads 8"),
        (("--dtype", "float64"), "--dtype"),
        (("--kernels", "metal"), "kernels metal are not there for this backend on cpu"),
        (("--device", "mps"), "device mps is not there"),
        (("--output", "/nowhere/at/all.jsonl"), "there is no directory"),
        (("--plot", "/nowhere/at/all"), "there is no directory"),
        (("--context", "16", "--fraction", "0.5"), "attention was not sparse"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_bad_input_is_one_line(bench: Bench, args: tuple[str, ...], words: str) -> None:
    bench.refused(words, "--backend", "numpy", *args)


def test_scaling_is_a_preset_of_contexts(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[BenchRequest] = []

    def record(request: BenchRequest, progress: Any) -> None:
        asked.append(request)
        raise ConfigError("recorded")

    monkeypatch.setattr("eps_core.cli.bench.Bench", record)
    bench.refused("recorded", "--scaling", "--bytes", "0.1", "--method", "rq@2,box@128", "--dtype", "bfloat16")
    assert asked[0].contexts == SCALING_CONTEXTS == (4096, 8192, 16384, 32768, 65536, 131072)
    assert asked[0].shares() == [("bytes", 0.1)]
    assert [(config.cache_config.method, config.cache_config.S) for config in asked[0].configs()] == [
        ("rq", 2),
        ("box", 128),
    ]


def test_the_headline_is_a_checked_step_beside_the_fastest_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = BenchRequest(
        contexts=(512,), fractions=(0.1,), dtypes=("float32",), methods=("rq",), q_heads=4, kv_heads=2, head_dim=32,
        backend="cuda", device="cpu", repeats=3, warm_seconds=0.0,
    )  # fmt: skip
    given: list[tuple[int, int, str]] = []
    found = layer_module.Bench(tiny, lambda *told_now: given.append(told_now)).headline()
    assert (found["context"], found["method"], found["group_size"]) == (512, "rq", 1)
    assert found["speedup"] == pytest.approx(found["best_dense_ms"] / found["step_ms"]) and found["step_ms"] > 0
    # a tenth of the tokens, and codes
    assert 0.1 < found["bytes_ratio"] < 0.3
    assert given[0][:2] == (0, 2) and given[-1][:2] == (2, 2)

    def wrong(*args: Any, **more: Any) -> Any:
        raise layer_module.CheckError("nothing was skipped")

    monkeypatch.setattr(layer_module, "check_sparse", wrong)
    with pytest.raises(ConfigError, match="nothing was skipped"):
        layer_module.Bench(tiny).headline()
