"""The check whether the compiled CPU kernels can be used here. Does not import numba, which takes a second."""

import importlib.util
import os

from eps_core.errors import install


def why_not() -> str | None:
    """Return why the kernels of `cpu.kernels` cannot be used here, in a few words, or None."""
    if importlib.util.find_spec("numba") is None:
        return f"numba is not installed: {install('cuda')}"
    if os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):
        return "NUMBA_DISABLE_JIT is set: unset it"
    threads = os.environ.get("NUMBA_NUM_THREADS")
    if threads is not None and not (threads.isdecimal() and int(threads)):
        return f"NUMBA_NUM_THREADS {threads!r} is no number of threads: set 1 or more, or unset it"
    return None
