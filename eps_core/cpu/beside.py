"""Processes that compile the same kernels at the same time: what one compiles, others wait for. And a second process
that compiles what a check of kernels is about to call, from the last call to the first, while the check compiles in
order, which halves the wait of a first run: numba compiles one function at a time in a process.

For the second process the calls are made once without kernels, whose names and types of arguments are noted. Whatever
fails here costs time alone.
"""

import fcntl
import functools
import os
import pickle
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numba
import numpy as np

LONGEST_WAIT_S = 60.0  # for what another process compiles
HOLDS = ".held"
# safely from where this process imports; the list follows
_PROGRAM = (
    "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); "
    "from eps_core.cpu.openmp import compile_all; compile_all()"
)


class _State(threading.local):
    """A thread's: the calls of others are not noted."""

    calls: Callable[[], object] | None = None  # of a check, until a second process was asked for
    preparing = False
    # while calls are noted: module and name of a kernel, whether it is packed for a team, types of arguments
    recorded: list[tuple[str, str, bool, tuple[Any, ...]]] | None = None
    child: "subprocess.Popen[bytes] | None" = None


_state = _State()
_held: set[Path] = set()  # files that this process holds


@contextmanager
def preparing(calls: Callable[[], object]) -> Iterator[None]:
    """While it lasts, a kernel is called every way that later calls may take (`openmp`), so that all of them are
    compiled; where one has to be, a second process compiles what `calls` calls."""
    before, _state.preparing, _state.calls = _state.preparing, True, calls
    try:
        yield
    finally:
        _state.preparing, _state.calls = before, None
        for path in list(_held):  # of a compilation that failed
            release(path)
        if _state.child is not None:
            _state.child.kill()  # the rest of its list is not needed
            _state.child.wait()
            _state.child = None


def is_preparing() -> bool:
    return _state.preparing


def is_recording() -> bool:
    return _state.recorded is not None


def record(kernel: Any, args: tuple[Any, ...], packed: bool = False) -> None:
    """Notes a call kernel(*args), or of what packs these arguments."""
    if _state.recorded is not None:
        _state.recorded.append((kernel.__module__, kernel.__name__, packed, tuple(map(numba.typeof, args))))


def begin() -> None:
    """Something has to be compiled: starts the second process, once in a check and where there is a core for it."""
    calls, _state.calls = _state.calls, None
    if calls is None or num_cores() < 2 or not sys.executable or getattr(sys, "frozen", False):
        return
    recorded = _state.recorded = []
    try:
        with suppress(Exception), warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            calls()  # which may refuse what no kernel filled
    finally:
        _state.recorded = None
    quiet = subprocess.DEVNULL
    with suppress(Exception):
        given = pickle.dumps(sys.path) + pickle.dumps(recorded[::-1])
        child = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM], stdin=subprocess.PIPE, stdout=quiet, stderr=quiet
        )
        _state.child = child
        assert child.stdin is not None
        with child.stdin as to:
            to.write(given)


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def _holds(folder: Path) -> int:
    """Return a file of which a process holds a byte for each function that it compiles, until it ends."""
    return os.open(folder / HOLDS, os.O_CREAT | os.O_RDWR, 0o600)


def hold(path: Path) -> bool:
    """Wait while another process compiles the function that is kept there, and hold it for this one. False where files
    cannot be locked, or for too long: both compile it."""
    until = time.monotonic() + LONGEST_WAIT_S
    while time.monotonic() < until:
        try:
            fcntl.lockf(_holds(path.parent), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, int(path.name[-12:], 16))
        except BlockingIOError:
            time.sleep(0.01)
        except OSError:
            return False
        else:
            _held.add(path)
            return True
    return False


def release(path: Path) -> None:
    _held.discard(path)
    with suppress(OSError):
        fcntl.lockf(_holds(path.parent), fcntl.LOCK_UN, 1, int(path.name[-12:], 16))
