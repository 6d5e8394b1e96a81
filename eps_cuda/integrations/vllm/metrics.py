"""EPS's counters as Prometheus reads them: on the server's own /metrics, though they are counted in other processes.

The first process of a server names a folder, which its workers inherit; each worker writes its counters to a file there
once a second at most, the last ones a second or two later, and the registries of the server's API processes read them
when they are asked. A batch that was computed by a CUDA graph counts once the next one comes.
"""

import json
import logging
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from eps_core.errors import one_line

logger = logging.getLogger("eps")
FOLDER = "EPS_METRICS_FOLDER"  # of the environment; set by `export`
SECONDS = 1.0
COUNTERS = {  # counter of `eps_stats` -> what it counts
    "steps": "decode steps with sparse layers",
    "rows": "decode rows of them",
    "groups_total": "groups of the contexts, over layers and kv heads",
    "groups_selected": "groups read",
    "groups_always_selected": "groups read whatever their score",
    "bytes_kv_read": "bytes of K and V read",
    "bytes_kv_dense": "bytes of K and V that dense attention reads",
    "bytes_summary_read": "bytes of summaries read",
    "bytes_k_reread": "bytes of K read again to summarise it",
    "tokens_adopted": "tokens summarised that EPS had not seen written",
    "failed_writes": "writes without summaries after a fault",
    "failed_adoptions": "adoptions left after a fault",
    "verified_rows": "rows past the prompt attended densely (drafts, recomputed tokens)",
}


def worker_number(vllm_config: Any) -> int:
    """Return the number of this worker among all of a server, tensor and data parallel ones."""
    parallel = vllm_config.parallel_config
    # the rank in data parallelism is 0 where replicas know nothing of each other; the index is not
    return int(parallel.data_parallel_index * parallel.world_size + parallel.rank)


class Shown:
    """Writes a worker's counters where the server finds them."""

    def __init__(self, vllm_config: Any) -> None:
        folder = os.environ.get(FOLDER)
        self.file = None if folder is None else Path(folder) / f"{worker_number(vllm_config)}.json"
        self._last, self._lock = -SECONDS, threading.Lock()
        self._told = False  # that they cannot be written
        self._later: threading.Timer | None = None  # writes what came within a second of the last time

    def update(self, runtime: Any) -> None:
        if self.file is None:
            return
        if time.monotonic() - self._last >= SECONDS:
            self._write(self.file, runtime)
        elif self._later is None or not self._later.is_alive():
            self._later = threading.Timer(2 * SECONDS, self._write, [self.file, runtime])
            self._later.daemon = True
            self._later.start()

    def _write(self, file: Path, runtime: Any) -> None:
        with self._lock:
            self._last = time.monotonic()
            part = file.with_suffix(".part")
            try:
                part.write_text(json.dumps(runtime.stats()))
                part.replace(file)
            except Exception as error:  # of a forward, which must not end for it
                if not self._told:
                    logger.error("EPS's counters on /metrics are out of date (logged once): %s", one_line(error))
                self._told = True


class Workers:
    """A collector of what workers wrote to `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        found = {file.stem: json.loads(file.read_text()) for file in sorted(self.folder.glob("*.json"))}
        for name, meaning in COUNTERS.items():
            family = CounterMetricFamily(f"eps_{name}", meaning, labels=["worker"])
            for worker, stats in found.items():
                family.add_metric([worker], stats.get(name, 0))
            yield family
        family = CounterMetricFamily("eps_fallbacks", "layer rows attended densely", labels=["reason", "worker"])
        for worker, stats in found.items():
            for reason, number in stats.get("fallbacks", {}).items():
                family.add_metric([reason, worker], number)
        yield family
        gauge = GaugeMetricFamily("eps_on", "whether decode steps are sparse", labels=["worker"])
        for worker, stats in found.items():
            gauge.add_metric([worker], int(stats["on"]))
        yield gauge


@cache
def export() -> Any:
    """Adds what workers write to this process's Prometheus registry, and to what is collected of several API processes,
    for which vLLM and its web framework make registries of their own; once. Returns the folder, to be held until this
    process ends, where it is made here."""
    from prometheus_client import REGISTRY
    from prometheus_client.multiprocess import MultiProcessCollector

    folder = None if FOLDER in os.environ else tempfile.TemporaryDirectory(prefix="eps-metrics-")
    if folder is not None:
        os.environ[FOLDER] = folder.name
    workers, stock = Workers(Path(os.environ[FOLDER])), MultiProcessCollector.collect
    REGISTRY.register(workers)
    MultiProcessCollector.collect = lambda self: [*stock(self), *workers.collect()]
    return folder
