"""Facts of the host (its processor, threads, memory and caches), and numpy's part of a benchmark.

The backends' `bench.py` list the same functions as the part behind the second line: dense attention as good as it gets,
a clock, copies, cold caches.
"""

import functools
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

Variant = Callable[[], Any]
FLUSH_BYTES = 64 * 2**20  # where the size of the last cache is unknown
LARGEST_FLUSH_BYTES = 512 * 2**20


# --- the host, for every backend --------------------------------------------------------------------------------------


def host_threads() -> int:
    """Threads that the libraries here may use."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return min(int(asked), os.cpu_count() or 1) if asked.isdecimal() and int(asked) else os.cpu_count() or 1


def kernel_threads() -> int:
    """Threads of EPS's own CPU kernels where they are helpers of ours, which OMP_NUM_THREADS does not rule."""
    asked = os.environ.get("NUMBA_NUM_THREADS", "")
    return int(asked) if asked.isdecimal() and int(asked) else os.cpu_count() or 1


def flush_bytes(last_cache: int | None) -> int:
    """Twice the last cache, within reason."""
    return FLUSH_BYTES if last_cache is None else min(2 * last_cache, LARGEST_FLUSH_BYTES)


def host_name() -> str:
    """Return the name of the processor, for measurements."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return _sysctl("machdep.cpu.brand_string") or platform.processor() or platform.machine()


@functools.cache
def computes_bfloat16() -> bool:
    """Return whether the processor multiplies bfloat16 by itself, as far as Linux tells."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "avx512_bf16" in text or "amx_bf16" in text


def widens_bfloat16() -> bool:
    """Return whether the processor is an x86 that has to widen bfloat16 to multiply it. Decode steps, which wait for
    memory, are fastest in bfloat16 there, too; matrices of many rows are several times slower than in float32."""
    return platform.machine().lower() in ("x86_64", "amd64") and not computes_bfloat16()


def _sysctl(name: str) -> str | None:
    """Return macOS's value of a fact of the machine, or None."""
    try:
        done = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


# --- numpy's part of a benchmark --------------------------------------------------------------------------------------


def prepare(device: str) -> None:
    """Makes `device` the one that arrays without one go to."""


def dense_variants(k: np.ndarray, v: np.ndarray, q: np.ndarray) -> dict[str, Variant]:
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


def stopwatch(device: str, wait: Callable[..., None] = synchronize) -> Callable[[Variant], tuple[float, Any]]:
    """A function that calls another once and gives (milliseconds until its result is computed, the result)."""

    def timed(function: Variant) -> tuple[float, Any]:
        start = time.perf_counter_ns()
        result = function()
        wait(result)
        return (time.perf_counter_ns() - start) / 1e6, result

    return timed


def flusher(num_bytes: int, device: str) -> Variant:
    """A function that overwrites a buffer of `num_bytes`, so that nothing else is left in the device's caches."""
    buffer = np.zeros(num_bytes // 8, np.uint64)

    def flush() -> None:
        np.add(buffer, 1, out=buffer)

    return flush


def bandwidth_variants(num_bytes: int, device: str) -> dict[str, tuple[Variant, int]]:
    """Return calls that move memory as fast as the platform can, name -> (function, bytes of a call): here by as many
    threads as the libraries use, each in its own part of the buffer."""
    threads = host_threads()
    source, target = (np.array_split(np.ones(num_bytes // 4, np.float32), threads) for _ in range(2))
    pool = ThreadPoolExecutor(threads)
    return {
        "copy": (lambda: list(pool.map(np.copyto, target, source)), 2 * num_bytes),
        "read": (lambda: list(pool.map(np.max, source)), num_bytes),
    }


def stack_heads(parts: Sequence[np.ndarray]) -> np.ndarray:
    """B arrays [T, Hkv, D] as one contiguous [B, Hkv, T, D]."""
    return np.ascontiguousarray(np.stack([part.swapaxes(0, 1) for part in parts]))


def free_bytes(device: str) -> int | None:
    """Memory that new arrays may take; None: unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def last_cache_bytes(device: str) -> int | None:
    """Size of the device's last cache before memory, of all of them where it has several; None: unknown."""
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


def device_facts(device: str) -> dict[str, Any]:
    """Return the record's facts about the device."""
    return {"device_name": host_name(), "threads": host_threads()}


def capture(function: Variant) -> Variant | None:
    """The function as one recorded launch of the device; None where the platform has no such thing."""
    return None


def device_parts(cache: Any, q: Any, plan: Any) -> dict[str, Variant]:
    """The parts of a step from arrays on the device alone, which `capture` can record; empty where there are none."""
    return {}
