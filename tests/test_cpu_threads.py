"""Threads of compiled CPU kernels: tasks that are taken, helpers that come late, the team of Torch, forks, faults."""

import ctypes
import functools
import importlib
import os
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import bound
from numba import njit
from test_conformance import Case, eps
from test_cpu_kernels import backend as backend
from test_cpu_kernels import filled, kernels_of, run_code
from test_cpu_kernels import several_threads as several_threads

from eps_core.config.cache import CacheSpec
from eps_core.config.eps import EpsConfig
from eps_core.cpu import attend, calls, openmp
from eps_core.cpu import threads as threads_cpu
from eps_core.cpu.threads import finish, take, wait


def test_calls_from_several_threads(backend):
    """Callers do not disturb each other, and give what one of them gives alone."""
    kernels, s = kernels_of(backend), filled(backend, Case((600, 290), eps("rq", group_size=2)))
    host, right = calls.Host(kernels.host), []

    def results(q):
        attending, (out, _) = calls.attending(s.cache, 0, q, s.plan, None, host)
        estimate = np.empty((len(q), s.case.num_kv_heads, s.plan.num_groups), np.float32)
        for call in (attending, calls.scoring(s.cache, 0, q, s.plan, host, estimate)):
            kernels.run(call.kernel, call.phases, *call.args)
        return out, estimate

    queries = [s.q * np.float32(factor) for factor in (1, -1, 0.5, 2)]
    expected = [results(q) for q in queries]

    def call(q, wanted) -> None:
        for _ in range(100):
            right.append(all(map(np.array_equal, results(q), wanted)))

    threads = [threading.Thread(target=call, args=pair) for pair in zip(queries, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * 400


def test_every_task_that_is_taken_is_waited_for(monkeypatch):
    """A kernel that returns while a helper still writes gives half an answer, now and then."""
    kernels = set()

    def counted(kernel, phases, *args, alone=False):
        progress = threads_cpu.new_progress(phases)
        kernel(progress, *args)
        if kernel.__name__ == "score_and_read":  # of its last phases a row each no task is taken
            together, rows = args[2][0], args[3][4].shape[0] * args[3][4].shape[1]
            assert (progress[-rows:, threads_cpu._DONE] == (not together)).all()
            progress = progress[:-rows]
        taken, done = progress[:, threads_cpu._TAKEN], progress[:, threads_cpu._DONE]
        # the last `take` of a phase finds nothing; a kernel may be given more phases than its settings have
        used = taken > 0
        last = used.sum()
        assert last > 0 and not done[~used].any(), kernel.__name__
        assert used[:last].all() or kernel.__name__ == "score_and_read", kernel.__name__  # of more than one kernel
        assert (done[used] > 0).all() and (done[used] == taken[used] - 1).all(), kernel.__name__
        kernels.add(kernel.__name__)

    backend = bound("cuda", "numba")
    monkeypatch.setattr(openmp.Team, "serves", lambda self, **how: False)  # calls that are kept go past `run`
    monkeypatch.setattr(kernels_of(backend), "run", counted)
    for config, whole_rows in (
        (EpsConfig.of(method="rq"), False),
        (EpsConfig.of(method="rq", mean_tokens=64), True),
        (EpsConfig.of(method="rq", mean_tokens=64, rescore=0), False),
    ):  # fmt: skip
        monkeypatch.setattr(calls, "ROWS_PER_THREAD", 0 if whole_rows else 3)
        s = filled(backend, Case((600,), config))
        scores = backend.score(s.cache, 0, s.native, s.plan)
        selection = backend.select(scores, s.plan)
        backend.attend(s.cache, 0, s.native, s.plan, selection)
        backend.attend(s.cache, 0, s.native, s.plan, None)
        kernels_of(backend).table().attend_fused(s.cache, 0, s.native, s.plan)
        backend.skipped_mass(scores, selection)
    read = {"score_units", "select_topk", "attend", "skipped_mass", "score_and_read"}
    assert kernels == read | {"place_rows", "build_units"}


def test_a_thread_waits_for_tasks_in_other_hands_and_a_prompt_is_given_to_all(monkeypatch):
    calls_made = {}

    def noted(kernel, phases, *args, alone=False):
        progress = threads_cpu.new_progress(phases)
        kernel(progress, *args)
        calls_made[kernel.__name__] = kernel, args, alone, int(progress[0, threads_cpu._DONE])

    backend = bound("cuda", "numba")
    monkeypatch.setattr(kernels_of(backend), "run", noted)
    config = EpsConfig.of(method="rq").cache_config
    cache = backend.new_cache(CacheSpec(1, 2, 64, 4, "bfloat16"), config, "cpu", "numba")
    k = backend.from_numpy(np.random.default_rng(0).normal(size=(256, 2, 64)), "bfloat16", "cpu")
    backend.write_kv(cache, 0, k, k, np.arange(256))
    writers = {name: calls_made[name] for name in ("place_rows", "build_units")}
    assert not writers["build_units"][2]
    for kernel, args, _, tasks in writers.values():
        progress = threads_cpu.new_progress(1)
        progress[0, threads_cpu._TAKEN] = 1
        thread = threading.Thread(target=kernel, args=(progress, *args))
        thread.start()
        while progress[0, threads_cpu._DONE] < tasks - 1:
            time.sleep(0.001)
        thread.join(0.1)
        waits, progress[0, threads_cpu._DONE] = thread.is_alive(), tasks
        thread.join()
        assert waits, kernel.__name__


def test_attention_waits_for_the_row_of_its_task():
    """A task waits until the groups of its row are listed, and reads nothing where the thread of the row failed."""
    backend = bound("cuda", "numba")
    s = filled(backend, Case((600,), EpsConfig.of(method="rq")))
    scores = backend.score(s.cache, 0, s.native, s.plan)
    chosen = backend.select(scores, s.plan)
    module = kernels_of(backend)
    call, state = calls.attending(
        s.cache, 0, s.native.numpy(), s.plan, (chosen.groups.numpy(), chosen.counts.numpy()), module.pools(s.cache)
    )
    call.kernel(threads_cpu.new_progress(call.phases), *call.args)
    expected, rows = state.out.copy(), chosen.counts.numel()
    for failed in (False, True):
        ready = threads_cpu.new_progress(rows)
        ready[: rows - 1, threads_cpu._DONE] = 1
        state.out[:] = np.nan
        caller = threading.Thread(
            target=call.kernel, args=(threads_cpu.new_progress(call.phases), ready, *call.args[1:]), daemon=True
        )
        caller.start()
        caller.join(0.1)
        assert caller.is_alive() and np.isnan(state.out).all()
        if failed:
            ready[:, threads_cpu.FAILED] = 1
        else:
            ready[rows - 1, threads_cpu._DONE] = 1
        caller.join(30)
        assert not caller.is_alive()
        assert np.isnan(state.out).all() if failed else np.array_equal(state.out, expected)


def test_no_array_is_held_after_a_call():
    """A view that outlives it makes MLX copy the pool at the next write."""
    estimate, selected_mask = np.zeros((1, 8, 60_000), np.float32), np.zeros((1, 8, 60_000), np.uint8)
    work = attend.skipped_mass, 1, estimate, selected_mask, np.zeros((1, 8), np.float32)
    before = sys.getrefcount(estimate)
    for _ in range(50):
        threads_cpu.run(*work)
        threads_cpu.settle()
        assert sys.getrefcount(estimate) == before
    for _ in range(50):
        threads_cpu.run(*work)
    assert len(threads_cpu._held) <= 2 * threads_cpu.num_threads()  # calls do not pile up


def idle(progress):
    """A kernel that does nothing."""


def test_a_lock_that_another_thread_may_wait_for_is_not_taken(monkeypatch):
    left = threading.Lock()
    monkeypatch.setattr(threads_cpu, "_held", [left])
    threads_cpu.run(idle, 1)
    assert not left.locked()


def test_a_helper_that_comes_late_while_another_thread_calls_is_waited_for(monkeypatch):
    """By every thread that settles."""
    late = []

    class Late:
        def put(self, job):
            work, left = job
            work.pop()
            late.append(left)

    class Held(list):
        def __setitem__(self, where, found):
            if not other.ident:  # the other thread calls between the look at the locks and what follows from it
                other.start()
                other.join(0.2)
            super().__setitem__(where, found)

    other = threading.Thread(target=threads_cpu.run, args=(idle, 1))
    monkeypatch.setattr(threads_cpu, "_held", Held())
    monkeypatch.setattr(threads_cpu, "_crew", lambda: [Late()])
    threads_cpu.run(idle, 1, alone=True)
    other.join()
    settling = [threading.Thread(target=threads_cpu.settle) for _ in range(2)]
    for one in settling:
        one.start()
        one.join(0.05)
    waiting = [one.is_alive() for one in settling]
    late[0].release()
    for one in settling:
        one.join(10)
    assert waiting == [True, True] and not any(one.is_alive() for one in settling)


def test_a_call_that_fails_leaves_the_crew_alive(monkeypatch):
    monkeypatch.setattr(threads_cpu, "_helpers", [])  # another test's may be of another number of threads

    def broken(progress, x):
        raise ValueError("no")

    def alive():
        return sum(thread.name == "eps-helper" and thread.is_alive() for thread in threading.enumerate())

    before = alive()
    for _ in range(5):
        with pytest.raises(ValueError, match="no"):
            threads_cpu.run(broken, 1, np.zeros(3))
    assert len(threads_cpu._crew()) == alive() - before == threads_cpu.num_threads() - 1


@njit(nogil=True)
def _count_members(progress, seen):
    seen[take(progress, 0)] = 1


def in_team(number: int, progress: np.ndarray, *made: tuple) -> None:
    """Calls kernels in a team of Torch's, one after another: of each the kernel, how many rows of progress are its own,
    and its other arguments."""
    calls_made, rooms, begin = np.empty((len(made), 2), np.int64), [np.empty(4096, np.uint8) for _ in made], 0
    for call, room, (called, phases, *args) in zip(calls_made, rooms, made, strict=True):
        assert packing_of(called)(room, call, progress[begin : begin + phases], *args) <= len(room)
        begin += phases
    openmp._start(torch_parallel(), number, calls_made, progress)


@functools.cache
def packing_of(called):
    return njit(lambda room, call, *args: openmp.pack(called, room, call, args))


def torch_parallel() -> int | None:
    library = ctypes.CDLL(str(Path(importlib.import_module("torch").__file__).parent / "lib" / "libtorch_cpu.so"))
    return ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value


def test_torch_lends_its_threads():
    """As many members as asked for, each called once."""
    for number in (1, 2, 5):
        progress, seen = threads_cpu.new_progress(1), np.zeros(9, np.int64)
        in_team(number, progress, (_count_members, 1, seen))
        assert seen.sum() == number == progress[0, threads_cpu._TAKEN] and seen[:number].all()


def test_a_library_without_openmp_has_no_team():
    code = """if True:
        import _ctypes
        from pathlib import Path
        from eps_core.cpu.openmp import team_of
        for library in (Path("/nowhere/lib.so"), Path(_ctypes.__file__)):
            assert team_of(library, lambda: 2) is None
    """
    run_code(code)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.parametrize("before", ["attend()", "torch.ones(10**7).add_(1)"])
def test_a_forked_child_does_not_wait_for_the_team_of_its_parent(before):
    """Whether kernels or only Torch had a team before."""
    code = f"""if True:
        import os, signal, sys
        import numpy as np, torch
        from eps_core.config.cache import CacheSpec
        from eps_core.config.eps import EpsConfig
        from eps_core.load import load_backend
        from eps_core.kv_cache.step_plan import StepPlan
        torch.set_num_threads(2)
        backend, rng = load_backend("cuda"), np.random.default_rng(0)
        cache = backend.new_cache(CacheSpec(1, 2, 16, 3000), EpsConfig.of(method="box").cache_config, "cpu", "numba")
        k = backend.from_numpy(rng.normal(size=(40000, 2, 16)), "float32", "cpu")
        cache = backend.write_kv(cache, 0, k, k, np.arange(40000))
        q = backend.from_numpy(rng.normal(size=(1, 4, 16)), "float32", "cpu")
        plan = StepPlan.of(EpsConfig.of(method="box"), np.arange(3000)[None], np.array([40000]))
        def attend():
            return backend.attend(cache, 0, q, plan, None)[0].numpy()
        {before}
        child = os.fork()
        if not child:
            signal.alarm(60)
            attend()
            os._exit(0)
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    run_code(code)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_does_not_wait_for_what_another_thread_of_its_parent_changed():
    code = """if True:
        import os, signal, sys
        from eps_core.cpu import threads
        threads._changing.acquire()
        child = os.fork()
        if not child:
            signal.alarm(20)
            threads.run(lambda progress: None, 1)
            os._exit(0)
        threads._changing.release()
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    run_code(code)


@pytest.mark.skipif(sys.platform != "linux", reason="GOMP_parallel is looked up on Linux")
def test_kernels_run_on_the_team_that_torch_has():
    """The same threads: a kernel after a parallel operation of Torch makes none."""
    code = """if True:
        import os, numpy as np, torch
        from eps_core.cpu import attend as cpu_attend, openmp as cpu_openmp, threads as cpu_threads
        from eps_cuda.kernels import cpu
        torch.set_num_threads(3)
        torch.ones(10**7).add_(1)
        threads = len(os.listdir("/proc/self/task"))
        assert cpu.kernels.team is not cpu_threads
        cpu_openmp.LATE_NS = 10**12  # a busy machine must not bring helpers
        estimate, shares = np.zeros((2, 8, 60_000), np.float32), np.zeros((2, 8), np.float32)
        cpu.kernels.run(cpu_attend.skipped_mass, 1, estimate, np.zeros(estimate.shape, np.uint8), shares)
        assert (shares > 0.999).all() and len(os.listdir("/proc/self/task")) == threads, threads
    """
    run_code(code)


def test_late_members_are_not_waited_for_again_and_again():
    patience, late = openmp.Patience(), 2 * openmp.LATE_NS
    for _ in range(5):  # a member that slept is late once
        patience.note(late)
        assert patience.asks_team()
        patience.note(1000)
    for avoided in (16, 32, 64):
        for _ in range(2):
            assert patience.asks_team()
            patience.note(late)
        assert [patience.asks_team() for _ in range(avoided + 1)] == [False] * avoided + [True]
    for _ in range(7):
        patience.note(1000)
        assert patience.asks_team()
    assert patience.avoid == 0


def test_a_thread_that_fails_is_not_waited_for_and_said():
    """Scratch that cannot be had: an error, not half an answer, on the team and on helpers."""
    out, progress = np.zeros(4), threads_cpu.new_progress(1)
    in_team(3, progress, (_fails, 1, out, 2**48))
    with pytest.raises(RuntimeError, match="a thread of a compiled CPU kernel failed"):
        threads_cpu.check(progress)
    in_team(3, threads_cpu.new_progress(1), (_fails, 1, out, 8))
    assert (out == 1).all()
    with pytest.raises(MemoryError):
        threads_cpu.run(_fails, 1, out, 2**48)
    threads_cpu.run(_fails, 1, out, 8)


@njit(nogil=True)
def _fails(progress, out, size):
    while True:
        task = take(progress, 0)
        if task >= len(out):
            break
        scratch = np.ones(size)
        out[task] = scratch[task]
        finish(progress, 0)
    wait(progress, 0, len(out))


def test_what_follows_a_call_that_failed_is_not_begun():
    """And who began it does not wait in it for ever."""
    out, other, seen = np.zeros(4), np.zeros(4), np.zeros(9, np.int64)
    for _ in range(20):
        progress = threads_cpu.new_progress(3)
        in_team(3, progress, (_fails, 1, out, 8), (_fails, 1, other, 2**48), (_count_members, 1, seen))
        assert (out == 1).all() and not other.any() and not seen.any()
        assert progress[:, threads_cpu.FAILED].all()


def test_a_call_whose_arguments_have_no_room_is_not_made():
    seen, room, call = np.zeros(9, np.int64), np.full(4096, 7, np.uint8), np.full(2, -1)
    size = packing_of(_count_members)(room, call, threads_cpu.new_progress(1), seen)
    assert 0 < size < 4096 and (call > 0).all() and (room[size:] == 7).all()
    call[:] = -1
    assert packing_of(_count_members)(room[: size - 1], call, threads_cpu.new_progress(1), seen) == size
    assert (call == -1).all()
