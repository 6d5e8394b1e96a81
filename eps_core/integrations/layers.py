"""One model's sparse attention inside an engine: the call itself, what it falls back to, and what it read."""

import atexit
import logging
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

from eps_core.attention.layer import LayerRead, collect, dense_read, sparse_attention
from eps_core.attention.protocol import Array, Backend
from eps_core.attention.stats import StepOutput
from eps_core.config.cache import CacheSpec
from eps_core.config.eps import EpsConfig
from eps_core.config.speculative import SpeculativeConfig
from eps_core.errors import ConfigError, fault_line, one_line, require
from eps_core.integrations.plan import Plan
from eps_core.integrations.verified import Rounds
from eps_core.io.outputs import JsonlWriter, Output
from eps_core.kv_cache.step_plan import StepPlan
from eps_core.load import backend_name
from eps_core.metrics import provenance
from eps_core.metrics.rounds import RoundRecord
from eps_core.metrics.steps import AUDIT_FACTOR, StepRecord, audit_step, step_record

logger = logging.getLogger("eps")
STEPS_HELD = 32  # whose numbers may wait on the device: a step itself never waits for them
_SUMMED = {  # counter -> field of a step's record
    "groups_total": "pages_total",
    "groups_selected": "pages_visited",
    "groups_always_selected": "pages_always_selected",
    "bytes_kv_read": "bytes_kv_read_est",
    "bytes_kv_dense": "bytes_kv_dense",
    "bytes_summary_read": "bytes_summary_read",
    "bytes_k_reread": "bytes_k_reread",
    "extensions": "extensions",
    "audits": "audited",
    "audit_alarms": "audit_alarms",
}


@dataclass
class _Step:
    """One forward of the engine: every sparse layer of the same rows."""

    cache: Any
    plan: StepPlan
    audited: bool
    reads: dict[int, LayerRead] = field(default_factory=dict)
    fallbacks: Counter[str] = field(default_factory=Counter)
    k_reread: int = 0  # bytes since the cache's step before this; those of a prefill are the next step's


class SparseAttention:
    """Runs sparse attention for an engine's decode rows and counts. `on` is the live switch; `config` may be replaced
    by one that keeps the same. Nothing that fails in here ends the engine's call: it attends densely and logs."""

    def __init__(
        self,
        backend: Backend,
        config: EpsConfig,
        plan: Plan,
        metrics: Path | None = None,
        audit_every: int = 0,
        keep_records: bool = False,
        keep_lists: bool = False,
        model: str = "",
        device: str = "",
        verify: SpeculativeConfig = SpeculativeConfig(),  # noqa: B008  frozen
        weight_bytes: int = 0,
        append_metrics: bool = False,
    ) -> None:
        """`metrics`: a JSONL file of steps, as of `eps-proto run`; `close` writes its summary, at the latest when the
        process ends. Every `audit_every`-th step also reads everything, for the true unread mass. `keep_records` and
        `keep_lists` are for tests and comparisons. `weight_bytes`: that one pass of the model reads, for `verify`.
        `append_metrics`: the file keeps what it holds."""
        self.backend, self.plan, self.on = backend, plan, True
        self.ended = False  # whether what made the caches is over
        self.audit_every, self.keep_records, self.keep_lists = audit_every, keep_records, keep_lists
        self.model, self.device = model, device
        self._lock = threading.RLock()
        # of verified decoding, where it is on: then nothing is sparse but its drafts
        self.rounds: Rounds | None = None
        if verify.enabled:
            self.rounds = Rounds(verify, weight_bytes, self.settle, self._round, self._lock)
        self._config = plan.of_sparse(config)
        self._num_kv_heads: int | None = None  # once known
        self.spec: CacheSpec | None = None  # of the cache, once there was a step or a round
        self._steps: dict[int, _Step] = {}  # under way, by the cache's id: threads may each have a forward of their own
        self._held: list[_Step] = []
        self._warned: set[str] = set()
        self._output = None if metrics is None else Output(metrics, "metrics file")
        self._writer = None if self._output is None else JsonlWriter(self._output, None if append_metrics else 0)
        if self._writer is not None:
            atexit.register(self.close)  # not every engine says when it is done
        self._run_line_written = False
        self._begun = 0  # steps
        self.reset()

    @property
    def config(self) -> EpsConfig:
        """Head modes are those of the sparse layers; it may be set to those of all layers of the model, too."""
        return self._config

    @config.setter
    def config(self, config: EpsConfig) -> None:
        if config.cache_config != self._config.cache_config:
            raise ConfigError(
                "a running engine keeps the summaries that it began with: change how they are read (budget, policy, "
                "min_context, ..), or start it again"
            )
        config = self.plan.of_sparse(config)
        self._check_heads(config)
        self._config = config

    def fits(self, num_kv_heads: int) -> None:
        """Raises ConfigError where head modes, from now on too, are not of so many kv heads."""
        self._num_kv_heads = num_kv_heads
        self._check_heads(self._config)

    def _check_heads(self, config: EpsConfig) -> None:
        modes, heads = config.selection_config.head_modes, self._num_kv_heads
        require(
            modes is None or heads is None or len(modes[0]) == heads,
            f"head modes of {len(modes[0]) if modes else 0} kv heads do not fit layers of {heads}: calibrate it",
        )

    def attend(self, cache: Any, layer: int, q: Array, plan: StepPlan, dense: Callable[[], Array]) -> Array:
        """out [B, Hq, D] of one decode token of each of B rows: q [B, Hq, D], whose K and V are in `cache` already.
        `layer` is the cache's; `dense()` gives out as the engine itself attends: where everything would be read, while
        `on` is False, and where EPS fails."""
        if not self.on:
            return dense()
        own_faults: list[Exception] = []

        def engine() -> Array:
            try:
                return dense()
            except Exception as error:
                own_faults.append(error)
                raise

        try:
            step = self._step_of(cache, layer, plan)
            passing = not self.keep_lists
            out, read = sparse_attention(
                self.backend, cache, layer, q, plan, step.audited, dense=engine, passing=passing
            )
        except Exception as error:
            if own_faults:
                raise
            self.tell(error)
            self.fall_back(cache, layer, plan, "error")
            return dense()
        if passing:
            read.selection = read.lse = None
        with self._lock:
            step.reads[layer] = read
        return out

    def add_step(self, cache: Any, plan: StepPlan, reads: dict[int, LayerRead]) -> None:
        """Counts a step that was computed elsewhere: the reads of all its layers."""
        with self._lock:
            if id(cache) in self._steps:
                self._end(self._steps[id(cache)])
            self._begun += 1
            self._steps[id(cache)] = step = _Step(cache, plan, False, reads)
            self._end(step)

    def fall_back(self, cache: Any, layer: int, plan: StepPlan, reason: str) -> None:
        """Counts a sparse layer's call that the engine attends densely."""
        with self._lock:
            step = self._step_of(cache, layer, plan)
            step.reads[layer] = dense_read(cache, plan)
            step.fallbacks[reason] += len(plan.lengths)

    def settle(self) -> None:
        """Counts every step of which all layers were there, and releases their caches; waits for the device once. A
        forward may be under way: it is counted when it is over."""
        with self._lock:
            self._end_whole()
            self._collect()

    def let_go(self, cache: Any) -> None:
        """End the unfinished step of a cache that is given back, and release the cache; waits for the device once."""
        with self._lock:
            if id(cache) in self._steps:
                self._end(self._steps[id(cache)])
            self._collect()
            if self.rounds is not None:
                self.rounds.forget(cache)

    def pending(self) -> list[Array]:
        """Arrays of steps under way that nobody else may ask for, of a library that computes lazily."""
        reads = [read for step in self._steps.values() for read in step.reads.values()]
        return [array for read in reads for array in read.pending.values()]

    def stats(self) -> dict[str, Any]:
        """Counts since the start or `reset`: plain numbers, of decode rows of sparse layers alone. `bytes_ratio` is K,
        V and summaries read over what dense attention of these layers reads; where others stay dense,
        `bytes_ratio_model` is that of the whole model's K and V."""
        with self._lock:
            self.settle()
            counts = self._counts
            dense = counts["bytes_kv_dense"]
            read = counts["bytes_kv_read"] + counts["bytes_summary_read"]
            found: dict[str, Any] = {"on": self.on, "steps": counts["steps"], "rows": counts["rows"]}
            found |= {name: int(counts[name]) for name in _SUMMED}
            found["bytes_ratio"] = read / dense if dense else None
            if self.plan.dense and self.rounds is None:
                tokens = counts["tokens"], counts["dense_tokens"]
                found["bytes_ratio_model"] = self.plan.ratio_of_model(read, dense, *tokens)
            found["fallbacks"] = dict(self._fallbacks)
            if self.rounds is not None:
                found["verified"] = self.rounds.stats()
            return found

    def reset(self) -> None:
        with self._lock:
            self._steps.clear()
            self._held = []
            self._counts: Counter[str] = Counter()
            self._fallbacks: Counter[str] = Counter()
            self.records: list[StepRecord] = []
            self.round_records: list[RoundRecord] = []  # of verified decoding, instead
            # of each step, by layer of the cache: the groups selected [B][Hkv], ascending; None: everything
            self.lists: list[dict[int, list[list[np.ndarray]] | None]] = []
            if self.rounds is not None:
                self.rounds.reset()

    def take_records(self) -> list[StepRecord]:
        """Return and clear the records kept so far."""
        with self._lock:
            self.settle()
            records, self.records = self.records, []
            return records

    def take_rounds(self) -> list[RoundRecord]:
        """Return and clear the rounds of verified decoding kept so far."""
        with self._lock:
            rounds, self.round_records = self.round_records, []
            return rounds

    def close(self) -> None:
        """Writes what is held and the summary, and lets the metrics file go."""
        with self._lock:
            for step in list(self._steps.values()):
                self._end(step)
        stats = self.stats()
        if self._writer is not None and self._run_line_written:
            self._tell_file({"type": "summary", **stats})
        self._let_go()

    def _let_go(self) -> None:
        writer, output, self._writer, self._output = self._writer, self._output, None, None
        if writer is not None and output is not None:
            atexit.unregister(self.close)
            try:
                writer.close()
            finally:
                output.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _step_of(self, cache: Any, layer: int, plan: StepPlan) -> _Step:
        """The step that a layer's call belongs to: a new one where this layer was there already, or others' rows."""
        with self._lock:
            step = self._steps.get(id(cache))
            if step is None or layer in step.reads or step.plan is not plan:
                if step is not None:
                    self._end(step)
                self._end_whole()  # of caches that may be gone
                audited = self.audit_every > 0 and self._begun % self.audit_every == 0
                step = self._steps[id(cache)] = _Step(cache, plan, audited)
                self._begun += 1
            return step

    def _end_whole(self) -> None:
        """Ends the steps of which all layers were there."""
        for step in list(self._steps.values()):
            if len(step.reads) == step.cache.spec.num_layers:
                self._end(step)

    def _end(self, step: _Step) -> None:
        del self._steps[id(step.cache)]
        step.k_reread = step.cache.newly_reread()
        self._held.append(step)
        if len(self._held) >= STEPS_HELD:
            self._collect()

    def tell(self, error: Exception) -> None:
        """Logs what failed inside EPS, each kind once."""
        line = fault_line(error)
        if line not in self._warned:
            self._warned.add(line)
            logger.error("EPS failed and attends densely (each kind is told once): %s", line, exc_info=error)

    def _collect(self) -> None:
        """Makes records of the steps held; waits for the device once."""
        steps, self._held = self._held, []
        if not steps:
            return
        collect(self.backend, steps[-1].cache, [read for step in steps for read in step.reads.values()])
        for step in steps:
            self._record(step)

    def _record(self, step: _Step) -> None:
        cache, plan = step.cache, step.plan
        spec = self.spec = cache.spec
        layers = []
        for layer in range(spec.num_layers):
            if layer not in step.reads:  # the engine ended its forward early
                step.reads[layer] = dense_read(cache, plan)
                step.fallbacks["unseen"] += len(plan.lengths)
            layers.append(step.reads[layer].stats)
        step.fallbacks.update(plan.fallbacks(range(spec.num_layers)))
        kv_bytes = sum(one.kv_bytes_read for one in layers)
        output = StepOutput(np.zeros((0, 0), np.float32), kv_bytes, layers, dict(step.fallbacks))
        record = step_record(
            self._counts["steps"],
            range(len(plan.lengths)),
            [],
            plan.lengths.tolist(),
            output,
            spec,
            plan.config,
            None,
            step.k_reread,
            audit=audit_step(output, AUDIT_FACTOR) if step.audited else None,
        )
        self._counts["steps"] += 1
        self._counts["rows"] += len(plan.lengths)
        self._counts["tokens"] += int(plan.lengths.sum())
        self._counts["dense_tokens"] += sum(map(self.plan.dense_tokens, plan.lengths.tolist()))
        self._fallbacks.update(step.fallbacks)
        for name, key in _SUMMED.items():
            self._counts[name] += getattr(record, key)
        if self.rounds is not None:  # the file gets these, and no draft steps
            self.rounds.saw_draft(cache, record)
        else:
            self._write(record, cache)
            if self.keep_records:
                self.records.append(record)
        if self.keep_lists:
            self.lists.append({layer: self._lists(read) for layer, read in sorted(step.reads.items())})

    def _lists(self, read: LayerRead) -> list[list[np.ndarray]] | None:
        if read.selection is None:
            return None
        groups, counts = (self.backend.to_numpy(part) for part in (read.selection.groups, read.selection.counts))
        return [
            [head[:count] for head, count in zip(row, numbers, strict=True)]
            for row, numbers in zip(groups, counts, strict=True)
        ]

    def _round(self, record: RoundRecord, cache: Any) -> None:
        """A round of verified decoding is over."""
        self.spec = cache.spec
        self._write(record, cache)
        if self.keep_records:
            self.round_records.append(record)

    def _write(self, record: StepRecord | RoundRecord, cache: Any) -> None:
        if self._writer is None:
            return
        lines = [record.to_dict()]
        if not self._run_line_written:
            self._run_line_written = True
            device, more = self.device or cache.device, self.plan.to_dict()
            name, versions = backend_name(self.backend), self.backend.versions()
            lines.insert(0, provenance.run_line(self.config, cache.spec, name, device, self.model, versions, **more))
        self._tell_file(*lines)

    def _tell_file(self, *lines: dict[str, Any]) -> None:
        """Write to the metrics file. The engine's call goes on where that fails, and no more is written."""
        assert self._writer is not None
        try:
            self._writer.write(*lines)
        except ConfigError as error:
            logger.error("EPS writes no more to its metrics file: %s", one_line(error))
            with suppress(ConfigError):  # the same again
                self._let_go()
