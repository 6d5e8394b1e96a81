"""Facts of the host: its processor, threads, memory and caches."""

import os
import platform
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

Variant = Callable[[], Any]
FLUSH_BYTES = 64 * 2**20  # where the size of the last cache is unknown
LARGEST_FLUSH_BYTES = 512 * 2**20


# --- the host, for every backend --------------------------------------------------------------------------------------


def wall_clock(wait: Callable[..., None]) -> Callable[[Variant], tuple[float, Any]]:
    def timed(function: Variant) -> tuple[float, Any]:
        start = time.perf_counter_ns()
        result = function()
        wait(result)
        return (time.perf_counter_ns() - start) / 1e6, result

    return timed


def host_flusher(num_bytes: int) -> Variant:
    buffer = np.zeros(num_bytes // 8, np.uint64)

    def flush() -> None:
        np.add(buffer, 1, out=buffer)

    return flush


def host_threads() -> int:
    """Threads that the libraries here may use."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return min(int(asked), os.cpu_count() or 1) if asked.isdecimal() and int(asked) else os.cpu_count() or 1


def kernel_threads() -> int:
    """Threads of EPS's own CPU kernels where they are helpers of ours, which OMP_NUM_THREADS does not rule."""
    asked = os.environ.get("NUMBA_NUM_THREADS", "")
    return int(asked) if asked.isdecimal() and int(asked) else os.cpu_count() or 1


def host_bandwidth_variants(num_bytes: int) -> dict[str, tuple[Variant, int]]:
    """Copies and reductions by as many threads as the libraries use, each in its own part of the buffer."""
    threads = host_threads()
    source, target = (np.array_split(np.ones(num_bytes // 4, np.float32), threads) for _ in range(2))
    pool = ThreadPoolExecutor(threads)
    return {
        "copy": (lambda: list(pool.map(np.copyto, target, source)), 2 * num_bytes),
        "read": (lambda: list(pool.map(np.max, source)), num_bytes),
    }


def flush_bytes(last_cache: int | None) -> int:
    """Twice the last cache, within reason."""
    return FLUSH_BYTES if last_cache is None else min(2 * last_cache, LARGEST_FLUSH_BYTES)


def host_free_bytes() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def host_cache_bytes() -> int | None:
    """Return the bytes of all last caches together: a processor may have several."""
    sizes: dict[tuple[int, str], int] = {}  # level and the CPUs that share it -> bytes
    for index in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cache/index*"):
        try:
            level, shared, size = ((index / name).read_text().strip() for name in ("level", "shared_cpu_list", "size"))
            sizes[int(level), shared] = int(size[:-1]) * {"K": 2**10, "M": 2**20}[size[-1]]
        except (OSError, ValueError, KeyError):
            continue
    if sizes:
        last = max(level for level, _ in sizes)
        return sum(size for (level, _), size in sizes.items() if level == last)
    text = _sysctl("hw.perflevel0.l2cachesize") or _sysctl("hw.l2cachesize")
    return int(text) if text else None


def host_name() -> str:
    """Return the name of the processor, for measurements."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return _sysctl("machdep.cpu.brand_string") or platform.processor() or platform.machine()


def computes_bfloat16() -> bool:
    """Return whether the processor multiplies bfloat16 by itself, as far as Linux tells."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "avx512_bf16" in text or "amx_bf16" in text


def _sysctl(name: str) -> str | None:
    """Return macOS's value of a fact of the machine, or None."""
    try:
        done = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
