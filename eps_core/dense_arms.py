"""What a benchmark needs of the platform: dense attention as good as it gets, a clock, copies, cold caches.

The backends' `dense_arms.py` list the same functions; this one is numpy's, and what it says of the host serves them.
"""

import math
import os
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

Arm = Callable[[], Any]
FLUSH_BYTES = 64 * 2**20  # where the size of the last cache is unknown
LARGEST_FLUSH_BYTES = 512 * 2**20


def prepare(device: str) -> None:
    """Makes `device` the one that arrays without one go to."""


def dense_arms(k: np.ndarray, v: np.ndarray, q: np.ndarray) -> dict[str, Arm]:
    """Dense attention by name, each () -> out [B, Hq, D]: k, v [B, Hkv, T, D] contiguous, q [B, Hq, D] unscaled."""
    batch, kv_heads, _, head_dim = k.shape
    rows = q.astype(np.float32).reshape(batch, kv_heads, -1, head_dim) / math.sqrt(head_dim)

    def grouped_matmul() -> np.ndarray:
        logits = rows @ k.astype(np.float32).swapaxes(-1, -2)
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
        return (weights @ v.astype(np.float32) / weights.sum(axis=-1, keepdims=True)).reshape(q.shape)

    return {"grouped matmul": grouped_matmul}


def synchronize(*results: Any) -> None:
    """Waits until `results` are computed and the device has nothing left to do."""


def stopwatch(device: str) -> Callable[[Arm], tuple[float, Any]]:
    """A function that calls another once and gives (milliseconds until its result is computed, the result)."""
    return wall_clock(synchronize)


def flusher(num_bytes: int, device: str) -> Arm:
    """A function that overwrites a buffer of `num_bytes`, so that nothing else is left in the device's caches."""
    return host_flusher(num_bytes)


def bandwidth_arms(num_bytes: int, device: str) -> dict[str, tuple[Arm, int]]:
    """What moves memory as fast as the platform can: name -> (function, bytes that one call reads and writes)."""
    return host_bandwidth_arms(num_bytes)


def stack_heads(parts: Sequence[np.ndarray]) -> np.ndarray:
    """B arrays [T, Hkv, D] as one contiguous [B, Hkv, T, D]."""
    return np.ascontiguousarray(np.stack([part.swapaxes(0, 1) for part in parts]))


def free_bytes(device: str) -> int | None:
    """Memory that new arrays may take; None: unknown."""
    return host_free_bytes()


def last_cache_bytes(device: str) -> int | None:
    """Size of the device's last cache before memory; None: unknown."""
    return host_cache_bytes()


def device_facts(device: str) -> dict[str, Any]:
    """What the record says of the device."""
    return {"device_name": host_name(), "threads": host_threads()}


def capture(function: Arm) -> Arm | None:
    """The function as one recorded launch of the device; None where the platform has no such thing."""
    return None


def device_parts(cache: Any, config: Any, q: Any, table: np.ndarray, lengths: np.ndarray) -> dict[str, Arm]:
    """The parts of a step from arrays on the device alone, which `capture` can record; empty where there are none."""
    return {}


# --- the host, for every backend --------------------------------------------------------------------------------------


def wall_clock(wait: Callable[..., None]) -> Callable[[Arm], tuple[float, Any]]:
    def timed(function: Arm) -> tuple[float, Any]:
        start = time.perf_counter_ns()
        result = function()
        wait(result)
        return (time.perf_counter_ns() - start) / 1e6, result

    return timed


def host_flusher(num_bytes: int) -> Arm:
    buffer = np.zeros(num_bytes // 8, np.uint64)

    def flush() -> None:
        np.add(buffer, 1, out=buffer)

    return flush


def host_threads() -> int:
    """Threads that the libraries here may use."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return min(int(asked), os.cpu_count() or 1) if asked.isdigit() and int(asked) else os.cpu_count() or 1


def kernel_threads() -> int:
    """Threads of EPS's own CPU kernels where they are helpers of ours, which OMP_NUM_THREADS does not rule."""
    asked = os.environ.get("NUMBA_NUM_THREADS", "")
    return int(asked) if asked.isdigit() and int(asked) else os.cpu_count() or 1


def host_bandwidth_arms(num_bytes: int) -> dict[str, tuple[Arm, int]]:
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
    """Of all last caches together: a processor may have several."""
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
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return _sysctl("machdep.cpu.brand_string") or platform.processor() or platform.machine()


def _sysctl(name: str) -> str | None:
    """What macOS says of the machine."""
    try:
        done = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
