"""Runs one compiled kernel on every core: the caller works, helper threads join when they come.

A kernel is compiled without the GIL and called alike by every thread, with the same arguments. Its work is cut into
phases of tasks: `take` hands out the next task of a phase, `finish` says that one is done, and `wait` lasts until all
of a phase are, which the next phase may need. Whoever comes first does the work, so a core that is busy elsewhere
delays nothing but the task in hand. That is why there is no `prange` here: OpenMP gives each thread its share and
waits for it, and numba's OpenMP beside the array library's own are two pools whose idle threads spin for milliseconds
on the cores that the other needs (measured with two cores: calls of 0.4 ms took up to 88 ms).
"""

import atexit
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from eps_core.cpu import beside
from eps_core.cpu.compile import kernel
from eps_core.cpu.vectors import emits, i32, i64

_LINE = 8  # int64 of a cache line: counters of different phases and kinds share none
_TAKEN, _DONE = 0, _LINE
FAILED, FINISHED = _LINE - 1, 2 * _LINE - 1  # whether a thread raised, in every phase; of phase 0: `openmp`

CLOCK = getattr(time, "CLOCK_MONOTONIC", 1)

_Job = tuple[list[Any], Any]  # the call, taken by whoever pops it, and a lock until its arguments are released
_helpers: "list[queue.SimpleQueue[_Job]]" = []
_held: list[Any] = []  # locks of jobs whose arrays a helper may still hold
_changing = threading.Lock()  # held by who changes either list


def num_threads() -> int:
    """One per core unless NUMBA_NUM_THREADS says otherwise (OMP_NUM_THREADS is the array library's)."""
    return int(numba.config.NUMBA_NUM_THREADS)


def new_progress(phases: int) -> np.ndarray:
    """The counters of `take`, `finish` and `wait`, before anything was taken."""
    return np.zeros((phases, 2 * _LINE), np.int64)


def run(kernel: Callable[..., None], phases: int, *args: Any, alone: bool = False) -> None:
    """Calls kernel(progress, *args) here and, unless `alone`, in the helpers, and returns when its phases are done. May
    be called from several threads at once."""
    progress = new_progress(phases)
    if beside.is_recording():
        return beside.record(kernel, (progress, *args))
    jobs: list[_Job] = []
    with _changing:
        _held[:] = [left for left in _held if left.locked()]
    for helper in () if alone else _crew():
        left = threading.Lock()
        left.acquire()
        jobs.append(([(kernel, (progress, *args))], left))
        helper.put(jobs[-1])
    try:
        kernel(progress, *args)
    except BaseException:
        progress[:, FAILED] = 1  # helpers must not wait for what this thread took
        raise
    finally:
        for work, left in jobs:
            try:
                work.pop()  # a helper that comes too late finds nothing
            except IndexError:
                with _changing:
                    _held.append(left)  # it came, and releases the arrays when it next runs Python
    check(progress)


def serves(counted: bool = True) -> bool:
    """Return whether several calls can be made as one, as `openmp.Team` does. They cannot: helpers that come late would
    read arrays that the next step fills."""
    return False


def check(progress: np.ndarray) -> None:
    """Raises RuntimeError where a thread of a call failed."""
    if progress[0, FAILED]:
        raise RuntimeError(
            "a thread of a compiled CPU kernel failed, most likely for want of memory: try --kernels arrays"
        )


def settle() -> None:
    """Waits until no helper holds an array of an earlier call: a second holder would make MLX copy a whole pool to
    write a row. Helpers release by themselves; waiting for that in every call would double the time of short ones."""
    with _changing:
        held = list(_held)
    for left in held:
        with left:
            pass


def _crew() -> "list[queue.SimpleQueue[_Job]]":
    if len(_helpers) < num_threads() - 1:
        with _changing:
            while len(_helpers) < num_threads() - 1:
                jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
                threading.Thread(target=_help, args=(jobs,), name="eps-helper", daemon=True).start()
                _helpers.append(jobs)
    return _helpers


def _help(jobs: "queue.SimpleQueue[_Job]") -> None:
    while True:
        work, left = jobs.get()
        try:
            kernel, args = work.pop()
        except IndexError:
            continue
        try:
            kernel(*args)
        except Exception:  # the caller reports it
            args[0][:, FAILED] = 1
        finally:
            del kernel, args
            left.release()


def _renew() -> None:
    """Forget the threads of the parent, and what they held: a forked child has no threads but its own."""
    global _changing
    _changing = threading.Lock()
    _helpers.clear()
    _held.clear()


# at the end no thread may be on its way back into Python
atexit.register(settle)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


def _counter(builder, progress, phase, which: int):
    return builder.at(progress, (phase, 2 * _LINE), which)


@emits(types.int64)
def take(builder, progress, phase):
    """The next task of a phase; at least their number when all are taken."""
    counter = _counter(builder, progress, phase, _TAKEN)
    return builder.atomic_rmw("add", counter, i64(1), "monotonic")


@kernel()
def owner(starts, task):
    """The last row whose tasks, starts[row] to starts[row + 1] - 1, begin at `task` or before."""
    low, high = 0, len(starts) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if starts[middle] <= task:
            low = middle
        else:
            high = middle - 1
    return low


@emits()
def finish(builder, progress, phase):
    """Says that a task of a phase is done and what it wrote may be read."""
    counter = _counter(builder, progress, phase, _DONE)
    builder.atomic_rmw("add", counter, i64(1), "release")


@emits()
def wait(builder, progress, phase, total):
    """Lasts until `total` tasks of a phase are done, or a thread failed. Those not done are in hand elsewhere: tens of
    microseconds."""
    counter = _counter(builder, progress, phase, _DONE)
    failed = builder.at(progress, FAILED)
    again, waits, after = (builder.append_basic_block(name) for name in ("again", "waits", "done"))
    builder.branch(again)
    builder.position_at_end(again)
    done = builder.load_atomic(counter, ordering="acquire", align=8)
    broken = builder.load_atomic(failed, ordering="monotonic", align=8)
    waiting = builder.icmp_signed("<", done, total)
    builder.cbranch(builder.and_(waiting, builder.icmp_signed("==", broken, broken.type(0))), waits, after)
    builder.position_at_end(waits)
    # with fewer cores than threads, whoever has the task may be waiting for this one
    builder.call_named("sched_yield", i32)
    builder.branch(again)
    builder.position_at_end(after)


def note_time_at(builder, place):
    """Puts the monotonic clock's nanoseconds at a pointer to int64, unless another thread did."""
    with builder.if_then(builder.icmp_signed("==", builder.load(place), i64(0))):
        now = cgutils.alloca_once(builder, ir.ArrayType(i64, 2))  # struct timespec
        builder.call_named("clock_gettime", i32, i32(CLOCK), now)
        seconds, rest = (builder.extract_value(builder.load(now), i) for i in (0, 1))
        builder.store(builder.add(builder.mul(seconds, i64(10**9)), rest), place)


@emits()
def note_time(builder, stamps, index):
    """stamps[index] int64, 0 before, becomes the monotonic clock's nanoseconds at the first thread's call."""
    note_time_at(builder, builder.at(stamps, index))
