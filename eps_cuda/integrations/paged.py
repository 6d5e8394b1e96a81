"""EPS over the K and V that an engine's worker keeps in pages of its own: writes, decode rows, faults, live knobs."""

import logging
import math
from collections import Counter
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

import numpy as np
from torch import Tensor

from eps_core.errors import fault_line, require
from eps_core.integrations.layers import SparseAttention
from eps_core.integrations.settings import Settings
from eps_core.kv_cache.step_plan import StepPlan
from eps_core.load import load_backend
from eps_cuda import adopt

logger = logging.getLogger("eps")
COUNTS = ("forwards", "prefill_rows", "verified_rows", "tokens_adopted", "failed_writes", "failed_adoptions")


class PagedRuntime:
    """One worker's settings, sparse layers and cache; `settings`, `sparse` and `cache` are set by the subclass once the
    engine's layers and pages are known."""

    def __init__(self) -> None:
        self.backend: Any = load_backend("cuda")
        self.settings: Settings | None = None
        self.sparse: SparseAttention | None = None
        self.cache: Any = None
        self.counts: Counter[str] = Counter()
        self.lazy = False  # whether pages may hold what EPS never saw
        self._warned: set[str] = set()

    @property
    def readable(self) -> bool:
        """Return whether K and V lie in the pages as plain rows."""
        return True

    def described(self) -> dict[str, Any]:
        """Return what the engine adds to settings and counters."""
        return {}

    # ------------------------------------------------------------------------------------------------------ each step

    def write(self, place: int, key: Tensor, value: Tensor, slots: np.ndarray, plain: Callable[[], None]) -> None:
        """K and V [N, Hkv, D] of a layer to slots [N] with all summaries; `plain` alone where EPS is off, or fails."""

        def work() -> None:
            self.mark_written(place, slots)
            self.cache = self.backend.write_kv(self.cache, place, key, value, slots)

        self.summarise(work, plain)

    def summarise(self, work: Callable[[], None], plain: Callable[[], None] = lambda: None) -> None:
        """Runs `work`, which makes the summaries of a write; where EPS is off, or fails, `plain`."""
        assert self.sparse is not None
        if self.sparse.on:
            try:
                work()
                return
            except Exception as error:
                self.fail(error, "failed_writes")
        plain()

    def mark_written(self, place: int, slots: np.ndarray) -> None:
        """See `adopt.mark_written`: needed where pages may hold what EPS never saw."""
        if self.lazy:
            adopt.mark_written(self.cache, place, slots)

    def attend(self, place: int, q: Tensor, plan: StepPlan, dense: Callable[[], Tensor]) -> Tensor:
        """out [B, Hq, D] of decode rows: see `SparseAttention.attend`."""
        assert self.sparse is not None
        if self.lazy and self.sparse.on:
            try:
                self.adopt(place, plan)
            except Exception as error:
                self.fail(error, "failed_adoptions")
                self.sparse.fall_back(self.cache, place, plan, "error")
                return dense()
        return self.sparse.attend(self.cache, place, q, plan, dense)

    def adopt(self, place: int, plan: StepPlan) -> None:
        """Summarise what a layer holds of a step's sequences without EPS having seen it written."""
        if not self.readable:
            return  # what has no summary is always selected
        missing = plan.missing(self.cache.state[place]).sum(axis=1)
        if (missing > plan.num_open).any():
            self.counts["tokens_adopted"] += adopt.adopt(self.cache, place, plan.table, plan.lengths)

    def fail(self, error: Exception, counter: str) -> None:
        """Count and log an error, and adopt everything again: what EPS did not write it does not know."""
        self.counts[counter] += 1
        line = fault_line(error)
        if line not in self._warned:
            self._warned.add(line)
            logger.error("EPS failed and goes on without summaries (logged once): %s", line, exc_info=error)
        self.forget()

    def forget(self) -> None:
        """Forget all summaries: from here on, K and V may be written past EPS, and are read once when needed."""
        if self.cache is not None:
            adopt.forget(self.cache)
        self.lazy = True

    def wanted(self, flat: dict[str, Any]) -> Settings:
        """Return the settings of flat ones that are given while the server runs. Raises ConfigError for what it cannot
        have."""
        return Settings.of(flat)

    # ------------------------------------------------------------------------------------------------- what users call

    def set(self, on: bool | None = None, **flat: Any) -> dict[str, Any]:
        """Live knobs: `on`, and settings of how groups are read. Returns those in force. Raises ConfigError for what is
        kept, or misspelt."""
        assert self.sparse is not None and self.settings is not None
        require(on is None or isinstance(on, bool), f"on {on!r} is not true or false")
        if flat:
            wanted = self.wanted(self.settings.flat(asked=True) | flat)
            fixed = "metrics", "audit_every", "kernels", "verify"
            require(
                all(getattr(wanted, name) == getattr(self.settings, name) for name in fixed),
                f"{', '.join(fixed[:-1])} and {fixed[-1]} are fixed when the server starts",
            )
            self.sparse.config = wanted.config
            self.settings = wanted
        if on is not None and on != self.sparse.on:
            self.sparse.on = on
            self.forget()  # K that is written while it is off has no summary, but may lie where there was one
        return {"on": self.sparse.on, **self.described(), **self.settings.flat()}

    def stats(self) -> dict[str, Any]:
        """Counters since the start or `reset`, plain numbers: `SparseAttention.stats` and this worker's own."""
        if self.sparse is None:
            return {"on": False}
        memory, cache = 0, self.cache  # another thread may release it
        if cache is not None:
            for one in cache.parts():
                memory += sum(pool.nbytes for fields in one.summaries for pool in fields.values())
        return {
            **self.sparse.stats(), **{name: int(self.counts[name]) for name in COUNTS}, **self.described(),
            "summary_memory_bytes": memory, **self.sparse.plan.to_dict(),
        }  # fmt: skip

    def reset(self) -> None:
        if self.sparse is not None:
            self.sparse.reset()
        self.counts.clear()


def scaled(query: Tensor, scaling: float, head_dim: int) -> Tensor:
    """Return queries as EPS takes them, which scales by 1 / sqrt(D) itself, of an engine that scales by `scaling`."""
    factor = scaling * math.sqrt(head_dim)
    return query if math.isclose(factor, 1.0, rel_tol=1e-6) else query.float() * factor


def check_plugin(engine: str, group: str, allowed: str | None) -> None:
    """Raises ConfigError where an engine's processes would not load EPS from its entry points `group`; `allowed`: the
    names of plugins that they load, None: all."""
    found = any(point.name == "eps" for point in entry_points(group=group))
    require(found, f"{engine} does not see EPS in this environment: install it there (pip install -e .)")
    require(
        allowed is None or "eps" in allowed.split(","),
        f"{engine.upper()}_PLUGINS {allowed!r} leaves EPS out: add eps to it, or unset it",
    )
