"""A second process that compiles what a check of kernels is about to call, from the last call to the first, while the
check compiles in order: a first run waits for about half as long. numba compiles one function at a time in a process.

The calls are made once without kernels, whose names and types of arguments are noted. What both processes need, the one
compiles that comes first (`compile`). Whatever fails here costs time alone.
"""

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numba


class _State(threading.local):
    """A thread's: the calls of others are not noted."""

    calls: Callable[[], object] | None = None  # of a check, until a second process was asked for
    preparing = False
    # while calls are noted: module and name of a kernel, whether it is packed for a team, types of arguments
    recorded: list[tuple[str, str, bool, tuple[Any, ...]]] | None = None
    child: "subprocess.Popen[bytes] | None" = None


_state = _State()


@contextmanager
def preparing(calls: Callable[[], object]) -> Iterator[None]:
    """While it lasts, a kernel is called every way that later calls may take (`openmp`), so that all of them are
    compiled; where one has to be, a second process compiles what `calls` calls."""
    before, _state.preparing, _state.calls = _state.preparing, True, calls
    try:
        yield
    finally:
        _state.preparing, _state.calls = before, None
        if _state.child is not None:
            _state.child.kill()  # nobody waits for what is left
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
    if calls is None or (os.cpu_count() or 1) < 2:
        return
    recorded = _state.recorded = []
    try:
        with suppress(Exception):  # what no kernel filled may be refused
            calls()
    finally:
        _state.recorded = None
    program, quiet = "from eps_core.cpu.openmp import compile_all; compile_all()", subprocess.DEVNULL
    with suppress(OSError):
        child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=quiet, stderr=quiet)
        _state.child = child
        assert child.stdin is not None
        with child.stdin as given:
            given.write(pickle.dumps(recorded[::-1]))
