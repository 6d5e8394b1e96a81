"""A whole sparse layer by one kernel: what its parts give one by one, in every configuration that it takes, whatever
runs it; and what it does where a thread fails."""

import importlib
import inspect
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import bound
from numba import njit
from test_conformance import Case, FilledCase, eps
from test_cpu_kernels import filled, kernels_of, writable
from test_cpu_kernels import several_threads as several_threads
from test_cpu_threads import in_team

from eps_core.attention import layer as attention_layer
from eps_core.config.eps import EpsConfig
from eps_core.cpu import calls, fused, openmp
from eps_core.cpu import threads as threads_cpu
from eps_core.cpu.threads import FAILED, finish, take, wait
from eps_core.decode.session import Session
from eps_core.evaluation.runner import Document, decode
from eps_core.kv_cache.step_plan import StepPlan

CASES = [
    Case((700, 300), eps("rq", group_size=2), num_heads=8, head_dim=128),
    Case((700, 300), eps("rq", group_size=2), num_heads=8, head_dim=128, dtype="bfloat16"),
    Case((500, 64, 70), eps("rq", group_size=2, mean_tokens=64, cascade=(0.5, 0.3)), 10, 2, 64),
    Case((600, 290), eps("rq", group_size=2), dtype="float16", head_dim=80, chunk=200),
    Case((300,), eps("rq", group_size=4), num_heads=6, num_kv_heads=2),
    Case((150, 64, 1), eps("rq", num_sink_tokens=0, num_recent_tokens=0, budget=0.1)),
    Case((310, 100), eps("rq", group_size=2, rescore=0.2), 4, 2, 64, "bfloat16", 150, bits=(8, 4)),
    Case((400, 129), eps("rq", group_size=2, block_size=192), kind="ties"),
    Case((100, 37), eps("rq", group_size=2)),  # one full unit, and none
    Case((290, 41), eps("rq", group_size=2, min_context=100, top_pages=29)),
    Case((300, 80), eps("rq", group_size=2, head_modes=(("sparse", "sparse"),))),
    Case((700, 300), EpsConfig.of(method="rq", budget=0.1), num_heads=14, num_kv_heads=2, head_dim=64),
]
SUMMED = Case(
    (500, 290),
    eps("rq", mean_tokens=64, group_size=2, cascade=(0.5, 0.2), rescore=0.1, combine="sum"),
    num_heads=6,
    head_dim=64,
)
REFUSED = [
    Case((150,), eps("box")),  # bounds
    Case((150,), eps("meanstd")),  # no kernel scores it
    Case((150,), eps("rq", group_size=2, policy="threshold", top_pages=9)),
    Case((150,), eps("rq", group_size=2, scope="union")),
    Case((150,), eps("rq", group_size=2, head_modes=(("sparse", "window"),))),
    Case((300,), eps("rq", mean_tokens=32, group_size=4, cascade=(0.25,))),  # groups that fill no register
    Case((150,), eps("jl")),  # no kernel scores it
]


@pytest.fixture(params=("cuda", "mlx"))
def backend(request: pytest.FixtureRequest):
    return bound(request.param, "numba")


def by_parts(backend, s: FilledCase) -> dict[str, np.ndarray]:
    """What the layer gives, by the backend's own parts."""
    at, plan = (s.cache, 0, s.native, s.plan), s.plan
    scores = backend.score(*at)
    selection = backend.select(scores, plan)
    out, lse = backend.attend(*at, selection)
    return found(backend, out, lse, selection, backend.skipped_mass(scores, selection))


def found(backend, out, lse, selection, skipped) -> dict[str, np.ndarray]:
    arrays = {"out": out, "lse": lse, "skipped": skipped}
    arrays |= {"groups": selection.groups, "counts": selection.counts, "visit": selection.selected_mask}
    host = {name: backend.to_numpy(array) for name, array in arrays.items()}
    return host | {"common_counts": selection.common_counts, "always_selected": selection.always_selected}


def at_once(backend, s: FilledCase, plan: StepPlan | None = None) -> dict[str, np.ndarray]:
    one = kernels_of(backend).attend_fused(s.cache, 0, s.native, plan or s.plan)
    return found(backend, one.out, one.lse, one.selection, one.skipped)


def check_same(got: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    for name, array in wanted.items():
        np.testing.assert_array_equal(got[name], array, err_msg=name)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_layer_is_its_parts_to_the_last_bit(backend, case):
    s = filled(backend, case)
    check_same(at_once(backend, s), by_parts(backend, s))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", CASES[:3], ids=str)
def test_short_queries_are_rounded_as_the_parts_round(backend, case, dtype):
    s = filled(backend, case)
    s.native = backend.from_numpy(s.q, dtype, "cpu")
    check_same(at_once(backend, s), by_parts(backend, s))


@pytest.mark.parametrize("heads, head_dim", [(5, 128), (8, 64), (8, 256)])
def test_a_query_of_another_shape_is_refused(backend, heads, head_dim):
    s = filled(backend, CASES[0])
    q = backend.from_numpy(np.ones((2, heads, head_dim), np.float32), "float32", "cpu")
    with pytest.raises(ValueError, match=f"q has {heads} heads of {head_dim}"):
        attention_layer.sparse_attention(backend, s.cache, 0, q, s.plan)


def test_views_end_with_what_they_show():
    """Torch: pools that grew are seen again, and nothing keeps the old ones."""
    backend = bound("cuda", "numba")
    s = filled(backend, CASES[0])
    wanted = at_once(backend, s)
    assert s.cache.views
    held = len(s.cache.views)
    check_same(at_once(backend, s), wanted)
    assert len(s.cache.views) == held
    old = s.cache.k[0].data_ptr()
    s.cache = backend.grow(s.cache, 2 * s.cache.spec.num_units)
    assert not s.cache.views and s.cache.k[0].data_ptr() != old
    with writable(backend):
        s.cache.k[0].mul_(0)  # in the new pool
    assert not np.array_equal(at_once(backend, s)["out"], wanted["out"])


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_what_it_does_not_take_is_left_to_the_parts(backend, case):
    s = filled(backend, case)
    assert kernels_of(backend).table().attend_fused(s.cache, 0, s.native, s.plan) is None


def test_codes_that_kernels_do_not_read_are_left_to_the_parts(backend):
    case = Case((150,), eps("rq", group_size=2), bits=(8, 8), dtype="bfloat16")
    cache = filled(backend, case).cache
    kernel, plan = backend.kernel_of(cache, "attend_fused"), StepPlan.of(case.config, np.zeros((1, 5), np.int32), [150])
    assert kernel.unsupported(cache, 0, None, plan) is None
    odd = replace(cache, spec=replace(cache.spec, k_bits="fp8"))
    assert kernel.unsupported(odd, 0, None, plan) == "K in fp8 and V in 8"


def test_sparse_layers_take_it(backend):
    """`sparse_attention` asks no part for what one kernel does, timed or not."""
    s, asked = filled(backend, CASES[0]), list[str]()
    wanted = by_parts(backend, s)

    def counted(name: str):
        real = getattr(backend, name)
        return lambda *args, **kwargs: (asked.append(name), real(*args, **kwargs))[1]

    parts = ("score", "select", "attend", "skipped_mass")
    own = SimpleNamespace(**vars(backend) | {name: counted(name) for name in parts})

    def taken(**how) -> list[str]:
        asked.clear()
        out, read = attention_layer.sparse_attention(own, s.cache, 0, s.native, s.plan, **how)
        (stats,), (out, lse) = attention_layer.collect(own, s.cache, [read], out, read.lse)
        got = {"out": out, "lse": lse, "counts": stats.counts, "skipped": stats.skipped_mass}
        got["always_selected"] = stats.always_selected
        check_same(got, {name: wanted[name] for name in got})
        assert stats.summary_bytes_read == s.plan.summary_bytes(s.cache.spec) > 0
        timed = stats.prepass_ms, stats.attention_ms
        assert timed == (None, None) if "clock" not in how else min(timed) > 0 and sum(timed) == pytest.approx(1000)
        return sorted(asked)

    assert taken() == [] and taken(audit=True) == ["attend"]  # the audit's dense read
    seconds = iter([5.0, 6.0])
    assert taken(clock=lambda cache, *arrays: next(seconds)) == []


def test_a_layer_is_timed_by_the_kernels_own_stamps(backend, monkeypatch):
    """Scoring and selecting took 200 of 1,000 ns, so 0.2 s of the layer's second."""
    monkeypatch.setattr(openmp.Team, "serves", lambda self, **how: False)  # calls that are kept go past `run`
    s, module = filled(backend, CASES[0]), kernels_of(backend)
    real = module.run

    def run(kernel, phases, *args, **about):
        real(kernel, phases, *args, **about)
        if kernel is fused.score_and_read:
            stamps, *_ = args
            assert 0 < stamps[0] < stamps[1] < stamps[2]
            stamps[:] = 100, 300, 1100

    monkeypatch.setattr(module, "run", run)
    seconds = iter([5.0, 6.0])
    _, read = attention_layer.sparse_attention(
        backend, s.cache, 0, s.native, s.plan, clock=lambda cache, *arrays: next(seconds)
    )
    assert read.stats.prepass_ms == pytest.approx(200) and read.stats.attention_ms == pytest.approx(800)


@pytest.mark.parametrize("whole", [True, False])
def test_a_run_takes_it_in_every_layer_of_every_step(whole, monkeypatch):
    """A CPU times every step, whether it is one call or runs layer by layer."""
    monkeypatch.setattr(openmp, "LATE_NS", 10**12)  # a busy machine must not bring helpers
    monkeypatch.setattr(kernels_of(bound("cuda", "numba")).team, "patience", openmp.Patience())
    steps_made, run_all = [], openmp.Team.run_all
    monkeypatch.setattr(openmp.Team, "run_all", lambda self, made: steps_made.append(run_all(self, made)))
    if not whole:
        monkeypatch.setattr(openmp.Team, "serves", lambda self, **how: False)
    session, config = Session.open(None, "cuda", "cpu", kv_dtype="bfloat16"), EpsConfig.of(method="rq")
    cache, pool = session.cache(config.cache_config, 1300)
    kernel, taken = session.backend.kernel_of(cache, "attend_fused"), []
    real = kernel.run
    monkeypatch.setattr(kernel, "run", lambda *at: taken.append(real(*at)) or taken[-1])
    document = Document([1 + i % 90 for i in range(1200)], 5)
    outcome, _ = decode(session, cache, pool, [document], config.selection_config, time_every=session.time_every)
    steps = len(outcome.records)
    assert session.time_every == 1 and steps >= 4
    assert len(steps_made) == steps * whole
    assert len(taken) == steps * session.spec.num_layers * (not whole) and all(one is not None for one in taken)
    for record in outcome.records:
        assert record.timed and record.eps_prepass_ms > 0 and record.attention_ms > 0
        assert record.eps_prepass_ms + record.attention_ms < record.decode_ms


@pytest.mark.parametrize("number", [1, 2, 4])
@pytest.mark.parametrize("whole_rows", [False, True])
@pytest.mark.parametrize("case", [CASES[2], SUMMED], ids=str)
def test_bits_do_not_depend_on_what_runs_it(case, number, whole_rows, monkeypatch):
    """Torch's team of any size, threads of our own, the caller alone."""
    backend = bound("cuda", "numba")
    torch, module = importlib.import_module("torch"), kernels_of(backend)
    s = filled(backend, case)
    wanted = at_once(backend, s)
    monkeypatch.setattr(calls, "ROWS_PER_THREAD", 0 if whole_rows else 100)
    monkeypatch.setattr(threads_cpu, "num_threads", lambda: number)
    monkeypatch.setattr(threads_cpu, "_helpers", [])  # those of this number end with nobody who asks them
    torch.set_num_threads(number)
    for alone in (True, False):
        library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
        for team in (openmp.team_of(library, torch.get_num_threads), threads_cpu):
            assert team is not None

            def running(kernel, phases, *args, run=team.run, alone=alone, **about):
                run(kernel, phases, *args, alone=alone)

            monkeypatch.setattr(module, "run", running)
            check_same(at_once(backend, s, StepPlan.of(case.config, s.table, s.lengths)), wanted)
    threads_cpu.settle()


@njit(nogil=True)
def _fails(progress, which, members):
    """Once all members are there, the one that came as number `which` fails, and the others wait in a second part for
    what it took."""
    number, part = take(progress, 0), progress[1:]
    finish(progress, 0)
    wait(progress, 0, members)
    if number == which:
        raise ValueError
    wait(part, 0, 1)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("runner", ["team", "helpers"])
def test_a_thread_that_failed_ends_the_waits_of_every_part(runner, which, monkeypatch):
    monkeypatch.setattr(threads_cpu, "num_threads", lambda: 2)
    monkeypatch.setattr(threads_cpu, "_helpers", [])
    monkeypatch.setattr(threads_cpu, "_held", [])
    found = []

    def call():
        if runner == "team":
            progress = threads_cpu.new_progress(3)
            in_team(2, progress, (_fails, 3, which, 2))
            assert (progress[:, FAILED] == 1).all()
            with pytest.raises(RuntimeError, match="failed"):
                threads_cpu.check(progress)
        else:
            with pytest.raises((RuntimeError, ValueError)):
                threads_cpu.run(_fails, 3, which, 2)
            while threads_cpu._held:
                assert threads_cpu._held.pop().acquire(timeout=20), "a helper still waits"
        found.append(True)

    for _ in range(5):
        thread = threading.Thread(target=call, daemon=True)  # which may wait for ever
        thread.start()
        thread.join(60)
        assert found.pop()


@pytest.mark.parametrize(("failing", "together"), [
    ("score_units", True), ("select_topk", True), ("attend", True), ("score_units", False), ("attend", False),
])  # fmt: skip
def test_what_a_failed_thread_left_is_followed_by_nobody(failing, together):
    """Lists that were never filled name any group: no later part may run. Rows that a thread scores whole it selects,
    too."""
    scope: dict[str, object] = {}
    exec(compile(inspect.getsource(fused).replace("@kernel(fastmath=FAST)\n", ""), fused.__file__, "exec"), scope)
    ran = []

    def part(name: str):
        def run(progress, *args):
            ran.append(name)
            if name == "attend":  # waits for rows where no part before did
                assert len(args[0]) == (0 if together else 2)
            if name == failing:
                progress.base[:, FAILED] = 1

        return run

    order = ["score_units", *(["select_topk"] if together else []), "attend", "skipped_mass"]
    scope |= {name: part(name) for name in ("select_topk", *order)}
    scope |= {"note_time": lambda stamps, index: None, "call_by_name": lambda kernel, args: kernel(*args)}
    scope["score_and_read"](threads_cpu.new_progress(10), None, 4, (together,), (), (), ())
    assert ran == order[: order.index(failing) + 1]
