"""Verified decoding inside an engine: one round over a paged pool, and what the rounds of a model came to.

Sparse steps draft with the engine's own model, the engine's own attention then decides over the same K and V, and what
it refuses was never written: see eps_core.decode.verified, which this follows.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from eps_core.attention.protocol import Array
from eps_core.config.eps import EpsConfig
from eps_core.config.speculative import SpeculativeConfig
from eps_core.decode.accept import Said, round_record
from eps_core.decode.pace import Pace
from eps_core.errors import require
from eps_core.integrations.paged import Paged
from eps_core.kv_cache.pool import Sequence as PagedSequence
from eps_core.kv_cache.step_plan import StepPlan
from eps_core.metrics.rounds import RoundRecord
from eps_core.metrics.steps import StepRecord

logger = logging.getLogger("eps")
_COUNTED = ("drafted", "accepted", "new_tokens", "bytes_kv_draft", "bytes_summary_draft", "bytes_kv_verify",
            "bytes_kv_dense", "rolled_back")  # fmt: skip


def check_engine(verify: SpeculativeConfig, engine: str, num_sequences: int = 1) -> None:
    """Raises ConfigError for what no engine's own decoding can do, or not this one's, or not for so many prompts at
    once."""
    if not verify.enabled:
        return
    require(
        engine not in ("vLLM", "SGLang"),
        f"eps-verify: {engine} has no place for drafts over its own model's cache: leave it out, or take --engine own, "
        "mlx-lm or transformers",
    )
    require(num_sequences == 1, f"eps-verify drafts for one prompt at a time in {engine}, not for {num_sequences}")
    require(
        verify.weights == "full",
        f"eps-draft-weights {verify.weights} is of our own decoders alone: in {engine} use full",
    )


class Round:
    """One round of one sequence of a pool: reserved slots, which its drafts are placed in one by one and its verify
    pass places over. Nothing of it is found by anyone else until `commit`."""

    def __init__(self, paged: Paged, sequence: PagedSequence, config: EpsConfig, num_drafts: int) -> None:
        """`config`: how a draft reads."""
        self.paged, self.sequence, self.config = paged, sequence, config
        self.length = sequence.length  # tokens that are there for good
        self.verifying = False
        self._slots = paged.reserve(sequence, num_drafts + 1)
        self._kv: dict[int, tuple[Array, Array]] = {}  # of the verify pass, by layer
        self._where: StepPlan | None = None

    def slots(self, start: int, count: int) -> np.ndarray:
        """Return the slots of `count` tokens from position `start` of the sequence on."""
        first = start - self.length
        assert first >= 0 and first + count <= len(self._slots), f"tokens {start} to {start + count} of a round"
        return self._slots[first : first + count]

    def placed(self, layer: int, k: Array, v: Array) -> None:
        """K, V [N, Hkv, D] of one layer are in their slots: those of the verify pass are kept for `commit`."""
        if self.verifying:
            self._kv[layer] = k, v

    def plan(self, length: int) -> StepPlan:
        """A draft step of `length` tokens, the new one counted: one object for all layers."""
        if self._where is None or self._where.lengths[0] != length:
            table = self.paged.pool.table([self.sequence])
            self._where = StepPlan.of(self.config, table, np.array([length]))
        return self._where

    def commit(self, kept: int) -> None:
        """Writes the first `kept` rows of the verify pass for good, summaries and all; the other slots are given
        back."""
        slots = self._slots[:kept]
        try:
            for layer, (k, v) in sorted(self._kv.items()) if kept else ():
                self.paged.write(layer, k[:kept], v[:kept], slots)
        finally:  # K and V are there, whatever became of the summaries
            self.paged.pool.commit(self.sequence, [0] * kept)


@dataclass
class RoundCounts:
    """Counts and times of one round while it is under way."""

    length: int  # tokens of the sequence when it begins
    gamma: int  # drafts that pay
    drafts: int  # of this round
    reason: str | None  # why there are none
    started: float = field(default_factory=time.perf_counter)
    drafted_at: float | None = None
    read: Counter[str] = field(default_factory=Counter)  # bytes of the drafts


class Rounds:
    """Chooses the number of drafts of each round and counts the outcomes. Threads may each have a round of their own,
    over caches of their own."""

    def __init__(
        self, verify: SpeculativeConfig, weight_bytes: int, settle: Callable[[], None],
        write: Callable[[RoundRecord, Any], None], lock: Any,
    ) -> None:  # fmt: skip
        """`weight_bytes`: that one pass reads, see `decode.forward.Arithmetic`. `settle` has `saw_draft` called for
        every draft step that is over. `write` takes each record and its cache. `lock`: an RLock, which may be held."""
        self.verify, self.weight_bytes = verify, weight_bytes
        self._settle, self._write = settle, write
        self.pace = Pace(verify)
        self._lock = lock
        self._warned = False
        self.reset()

    def reset(self) -> None:
        with self._lock:
            self._total: Counter[str] = Counter()
            self._fallbacks: Counter[str] = Counter()
            self._read: dict[int, Counter[str]] = {}  # bytes of the draft steps of a round, by the cache's id
            self._begun = 0  # rounds

    def config(self, config: EpsConfig) -> EpsConfig:
        """Return the config of draft steps."""
        return EpsConfig.over(config.cache_config, self.verify.draft_selection(config.selection_config))

    def begin(self, config: EpsConfig, length: int, room: int, reason: str | None = None) -> RoundCounts:
        """Begin a round of a sequence that holds `length` tokens and may say `room` more. `reason`: why there can be no
        drafts."""
        with self._lock:
            self.pace.saw_load(1, length)
            gamma = self.pace.next()
        if gamma and reason is None:
            if length + 1 < config.selection_config.min_context:
                reason = "min_context"
            elif not length:
                reason = "empty"
        return RoundCounts(length, gamma, 0 if reason is not None else max(min(gamma, room - 1), 0), reason)

    def saw_draft(self, cache: Any, step: StepRecord) -> None:
        """Record what a draft step has read."""
        self._read.setdefault(id(cache), Counter()).update(
            kv=step.bytes_kv_read_est, summary=step.bytes_summary_read, reread=step.bytes_k_reread
        )

    def drafted(self, counts: RoundCounts, cache: Any) -> None:
        """Record that the round's drafts are made; waits for the device."""
        with self._lock:
            self._settle()
            counts.read = self.forget(cache)
        counts.drafted_at = time.perf_counter()

    def forget(self, cache: Any) -> Counter[str]:
        """Forget what draft steps of a cache have read, which is returned."""
        return self._read.pop(id(cache), Counter())

    def end(
        self, counts: RoundCounts, cache: Any, tokens: Sequence[int], accepted: int, margins: Sequence[float] = ()
    ) -> None:
        """The round is over: it said `tokens`, `accepted` drafts among them. `margins` of the tokens: nats to the
        runner-up, where tokens are the likeliest."""
        now, spec, drafts, reason = time.perf_counter(), cache.spec, counts.drafts, counts.reason
        verify_from = counts.started if counts.drafted_at is None else counts.drafted_at
        draft_ms, verify_ms = 1000 * (verify_from - counts.started), 1000 * (now - verify_from)
        with self._lock:
            if drafts:
                self.pace.saw_cost("draft", draft_ms / drafts)
                self.pace.saw_cost(drafts + 1, verify_ms)
                self.pace.saw_round([drafts], [accepted])
            elif self._begun:
                self.pace.saw_cost("dense", verify_ms)
            record = round_record(
                spec, [0], [drafts], [Said(list(tokens), list(margins), accepted)], [counts.length],
                step=self._begun, gamma=counts.gamma,
                bytes_kv_draft=counts.read["kv"], bytes_summary_draft=counts.read["summary"],
                bytes_kv_verify=spec.exact_kv_bytes([counts.length + drafts + 1]),
                bytes_k_reread=counts.read["reread"],
                weight_passes=drafts + 1, bytes_weights=(drafts + 1) * self.weight_bytes,
                draft_ms=draft_ms, verify_ms=verify_ms, round_ms=draft_ms + verify_ms,
                rolled_back=drafts + 1 - len(tokens), fallbacks={} if reason is None else {reason: 1},
            )  # fmt: skip
            record.check()
            self._begun += 1
            self._total["rounds"] += 1
            for name in _COUNTED:
                value = len(tokens) if name == "new_tokens" else getattr(record, name)
                self._total[name] += value[0] if isinstance(value, list) else value
            self._fallbacks.update(record.fallbacks)
            self._write(record, cache)

    def undrafted(self, reason: str) -> None:
        """Tells, once, that the engine decodes in a way that nothing is drafted for: it is dense."""
        if not self._warned:
            self._warned = True
            logger.warning("eps: %s is decoded densely: verified decoding drafts for single, plain prompts", reason)

    def stats(self) -> dict[str, Any]:
        """Counts since the start or `reset`. `bytes_ratio`: K, V and summaries read by drafts and verify passes over
        what dense decoding of the same tokens reads."""
        with self._lock:
            counts, fallbacks = Counter(self._total), dict(self._fallbacks)
        dense, drafted, rounds = counts["bytes_kv_dense"], counts["drafted"], counts["rounds"]
        read = counts["bytes_kv_draft"] + counts["bytes_summary_draft"] + counts["bytes_kv_verify"]
        return {
            "rounds": rounds,
            **{name: int(counts[name]) for name in _COUNTED},
            "acceptance": counts["accepted"] / drafted if drafted else None,
            "tokens_per_round": counts["new_tokens"] / rounds if rounds else None,
            "bytes_ratio": read / dense if dense else None,
            "fallbacks": fallbacks,
        }
