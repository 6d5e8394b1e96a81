"""How one cell of a grid is measured.

Its quality and its time are measured on the decode path, token by token, beside a dense decode of the same documents:
a teacher-forced prefill would be dense. The dense prefill of a document and what a dense decode says of it are shared
by every cell that needs them, within one process; dense times are not: a machine's speed wanders by a half within an
hour, so each cell decodes its texts densely again, in turn with its own decode.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from shared import answer_steps, answers

from eps_core.attention.protocol import Backend
from eps_core.attention.stats import LayerStats, StepOutput
from eps_core.config.eps import EpsConfig
from eps_core.config.speculative import SpeculativeConfig
from eps_core.decode.forward import Arithmetic, Decoder
from eps_core.decode.prefix import Prefix
from eps_core.decode.sampling import Sampling
from eps_core.decode.session import Session
from eps_core.errors import ConfigError
from eps_core.evaluation.runner import Document, Outcome, run_batch
from eps_core.metrics.steps import StepRecord, percentile, steady, summarise, untimed
from eps_core.tasks.corpus import corpus
from eps_core.tasks.needle import VALUE_DIGITS
from eps_core.tasks.questions import text_window
from experiments.grid.grid_settings import Setting
from experiments.grid.grid_verified import Measured, decode_both, needle_numbers
from experiments.methods.texts import needle_tokens

MAX_MASS_PAIRS = 200  # (bounded, true) pairs that one cell keeps for the report's scatter
# of the summary of all steps, as it is
_SUMMED = (
    "bytes_ratio", "kv_ratio", "summary_ratio", "selected_ratio", "selected_ratio_by_layer_and_head",
    "skipped_mass_mean", "extensions", "fallbacks",
)  # fmt: skip
Key = tuple[str, int, int]  # of a document: its kind, context and index


@dataclass(frozen=True)
class Plan:
    """Settings that every cell of a grid shares."""

    needles: int = 20  # questions
    texts: int = 2  # windows of real text, rounded up to whole batches
    text_steps: int = 64  # decode steps of each window
    repeat: int = 1  # times that each window is decoded, densely and sparse, for more timings
    audit_every: int = 16  # steps between dense second reads, which measure the true skipped mass; 0: none
    kv_dtype: str = "bfloat16"
    prefill_chunk: int = 2048  # tokens
    seed: int = 0


@dataclass
class _Measured:
    """Results of the decodes of one cell, dense or sparse."""

    records: list[StepRecord] = field(default_factory=list)
    layers: list[list[LayerStats]] = field(default_factory=list)
    timings: list[StepRecord] = field(default_factory=list)  # the steady steps of text

    def add(self, decoded: Outcome, layers: Sequence[list[LayerStats]]) -> None:
        self.records += decoded.records
        self.layers += layers[: len(decoded.records)]

    def times(self) -> dict[str, float | None]:
        """p50 and p95 of the three clocks, ms a step."""
        clocks = {
            "prepass_ms": [r.eps_prepass_ms for r in self.timings if r.eps_prepass_ms is not None],
            "attention_ms": [r.attention_ms for r in self.timings if r.attention_ms is not None],
            "decode_ms": [r.decode_ms for r in untimed(self.timings) if r.decode_ms is not None],
        }
        return {
            f"{name}_p{percent}": percentile(values, percent) for name, values in clocks.items() for percent in (50, 95)
        }


class Bench:
    """A loaded model that measures cells. `store_bytes` bounds the K and V of prefilled documents that are kept, on
    the device; documents beyond it are prefilled again for every cell."""

    def __init__(self, session: Session, plan: Plan, store_bytes: int = 2**32) -> None:
        self.session, self.plan, self.store_bytes = session, plan, store_bytes
        self._text = corpus()
        sample = self._text[: 2**16].decode("ascii")
        self._bytes_per_token = len(sample) / max(len(session.encode(sample)), 1)  # of documents as they were drawn
        self._documents: dict[Key, tuple[Document, str]] = {}
        self._prefixes: dict[Key, Prefix] = {}
        self._dense: dict[tuple[str, int, tuple[int, ...]], Outcome] = {}
        self._group: tuple[int, int] | None = None

    def why_not(self, setting: Setting, config: EpsConfig) -> str | None:
        """Return why the model or the machine cannot run a cell."""
        steps = max(self.plan.text_steps, answer_steps(self.session.encode, "0" * VALUE_DIGITS, VALUE_DIGITS))
        spec = self.session.spec
        if setting.context > spec.max_context:
            return f"context {setting.context} is past the model's {spec.max_context} tokens{spec.context_note}"
        if setting.context <= steps:
            return f"context {setting.context} leaves no prompt before {steps} decode steps"
        if config.selection_config.head_modes is not None:
            shape = (len(config.selection_config.head_modes), len(config.selection_config.head_modes[0]))
            if shape != (spec.num_layers, spec.num_kv_heads):
                return f"the head policy is of {shape[0]} layers x {shape[1]} kv heads: of another model"
        try:
            self.session.cache_spec(config.cache_config, [setting.context] * setting.batch)
        except ConfigError as error:
            return str(error)
        return None

    def measure_verified(self, setting: Setting, config: EpsConfig, verify: SpeculativeConfig) -> dict[str, Any]:
        """The numbers of one cell of verified decoding (see `cell_line`)."""
        self.session.load(verify)  # a drafter that cannot be costs no prefill
        self._turn_to(setting)
        plan, batch, context = self.plan, setting.batch, setting.context
        measured = Measured(plan.seed)
        sampling = Sampling(setting.temperature, seed=plan.seed)
        for indices in _batches(-(-plan.texts // batch) * batch, batch):
            measured.add(*self._both("text", context, indices, config, verify, sampling), len(indices))
        answered: list[tuple[bool, bool]] = []
        for indices in _batches(plan.needles, batch):
            both = self._both("needle", context, indices, config, verify, Sampling())
            answered += self._answered(context, indices, *both)
        return {**measured.numbers(), **needle_numbers(answered)}

    def _both(
        self, kind: str, context: int, indices: tuple[int, ...], config: EpsConfig, verify: SpeculativeConfig,
        sampling: Sampling,
    ) -> tuple[Outcome, Outcome]:  # fmt: skip
        return decode_both(self.session, *self._batch(kind, context, indices), config, verify, sampling)

    def _answered(
        self, context: int, indices: tuple[int, ...], before: Outcome, now: Outcome
    ) -> list[tuple[bool, bool]]:
        """Return of each needle whether the outcomes answer it."""
        found = []
        for row, index in enumerate(indices):
            _, answer = self._document("needle", context, index)
            said = [answers(self.session.decode(one.said[row]), answer) for one in (before, now)]
            found.append((said[0], said[1]))
        return found

    def _turn_to(self, setting: Setting) -> None:
        """Lets go of what cells of another context or batch shared."""
        if self._group != (setting.context, setting.batch):
            self._group = (setting.context, setting.batch)
            self._dense.clear()  # whole vocabularies: only the cells of one context and batch share them
            self._prefixes = {key: kept for key, kept in self._prefixes.items() if key[1] == setting.context}

    def measure(self, setting: Setting, config: EpsConfig) -> dict[str, Any]:
        """The numbers of one cell (see `cell_line`)."""
        self._turn_to(setting)
        plan, batch = self.plan, setting.batch
        sparse, dense = _Measured(), _Measured()
        divergences: list[float] = []
        agreements: list[bool] = []
        for indices in _batches(-(-plan.texts // batch) * batch, batch):
            reference = self._decode_dense("text", setting.context, indices)
            for one in self._decode("text", setting.context, indices, EpsConfig(), plan.repeat, reference)[0]:
                dense.timings += steady(one.records)
            decoded, layers = self._decode("text", setting.context, indices, config, plan.repeat, reference)
            for one in decoded:
                sparse.timings += steady(one.records)
            sparse.add(decoded[0], layers)
            assert decoded[0].kl is not None and decoded[0].agree is not None
            divergences += np.maximum(decoded[0].kl, 0).ravel().tolist()
            agreements += decoded[0].agree.ravel().tolist()
        answered: list[tuple[bool, bool]] = []  # (densely, sparse)
        for indices in _batches(plan.needles, batch):
            before = self._decode_dense("needle", setting.context, indices)
            (now,), layers = self._decode("needle", setting.context, indices, config)
            sparse.add(now, layers)
            answered += self._answered(setting.context, indices, before, now)
        summary = summarise(sparse.records)
        pages_total = summary["pages_total"]
        return {
            **{name: summary[name] for name in _SUMMED},
            "always_selected_ratio": summary["pages_always_selected"] / pages_total if pages_total else None,
            "kl_mean": float(np.mean(divergences)) if divergences else None,
            "kl_max": max(divergences, default=None),
            "top1_agreement": float(np.mean(agreements)) if agreements else None,
            "num_positions": len(divergences),
            **needle_numbers(answered),
            **sparse.times(),
            **{f"dense_{name}": value for name, value in dense.times().items()},
            "timed_steps": len(sparse.timings),
            **masses(sparse.layers),
        }

    # -- documents

    def _batch(self, kind: str, context: int, indices: tuple[int, ...]) -> tuple[list[Document], list[Prefix]]:
        documents = [self._document(kind, context, index)[0] for index in indices]
        return documents, [self._prefix(kind, context, index) for index in indices]

    def _document(self, kind: str, context: int, index: int) -> tuple[Document, str]:
        """(document, the answer to its question)"""
        key = (kind, context, index)
        if key not in self._documents:
            self._documents[key] = (self._new_text if kind == "text" else self._new_needle)(context, index)
        return self._documents[key]

    def _new_text(self, context: int, index: int) -> tuple[Document, str]:
        """A window of held-out text, decoded along its own tokens up to `context` of them."""
        rng, encode = np.random.default_rng([self.plan.seed, 1, index]), self.session.encode
        num_bytes = math.ceil(1.25 * context * self._bytes_per_token) + 64
        return Document.along(text_window(self._text, encode, context, rng, num_bytes), self.plan.text_steps), ""

    def _new_needle(self, context: int, index: int) -> tuple[Document, str]:
        """A needle document whose answer ends at `context` tokens; depths spread evenly, 0 to 3 distractors."""
        depth, seed = (index + 0.5) / max(self.plan.needles, 1), self.plan.seed + 3_000_000 + index
        steps = answer_steps(self.session.encode, "0" * VALUE_DIGITS, VALUE_DIGITS)
        made, answer = needle_tokens(self._text, context - steps, self.session.encode, seed, depth, index % 4)
        return Document(made, steps), answer

    # -- decoding

    def _prefix(self, kind: str, context: int, index: int) -> Prefix:
        key = (kind, context, index)
        if key in self._prefixes:
            return self._prefixes[key]
        document, _ = self._document(*key)
        prefix = self.session.prefix(document.prompt[:-1], self.plan.prefill_chunk)
        if sum(kept.num_bytes for kept in self._prefixes.values()) + prefix.num_bytes <= self.store_bytes:
            self._prefixes[key] = prefix
        return prefix

    def _decode_dense(self, kind: str, context: int, indices: tuple[int, ...]) -> Outcome:
        """The dense decode, once for all cells."""
        key = (kind, context, indices)
        if key not in self._dense:
            (self._dense[key],), _ = self._decode(*key, EpsConfig())
        return self._dense[key]

    def _decode(
        self,
        kind: str,
        context: int,
        indices: tuple[int, ...],
        config: EpsConfig,
        repeat: int = 1,
        dense: Outcome | None = None,
    ) -> tuple[list[Outcome], list[list[LayerStats]]]:
        """Return decodes of a batch, along the text's tokens or greedily for an answer, and the layers' statistics of
        all their steps in order."""
        documents, prefixes = self._batch(kind, context, indices)
        every = self.plan.audit_every if kind == "text" else 0
        variants = dict.fromkeys(range(repeat), config)
        decoder = Watched(self.session.backend, self.session.decoder.model)
        found = run_batch(
            self.session, documents, variants, prefixes, dense, audit_every=every, time_every=self.session.time_every,
            decoder=decoder,
        )  # fmt: skip
        return list(found.values()), decoder.kept_layers


class Watched(Decoder):
    """A decoder that keeps the layers' statistics of every step."""

    def __init__(self, eps: Backend, model: Arithmetic) -> None:
        super().__init__(eps, model)
        self.kept_layers: list[list[LayerStats]] = []

    def step(self, *args: Any) -> tuple[Any, StepOutput]:
        """See `Decoder.step`."""
        cache, output = super().step(*args)
        self.kept_layers.append(output.layers)
        return cache, output


def _batches(count: int, batch: int) -> Iterator[tuple[int, ...]]:
    for start in range(0, count, batch):
        yield tuple(range(start, min(start + batch, count)))


def masses(layers: Sequence[Sequence[LayerStats]]) -> dict[str, Any]:
    """Certified and true shares of the softmax left unread, over all steps, layers, sequences and kv heads."""
    flat = [layer for step in layers for layer in step]
    certified = [layer.skipped_mass_bound for layer in flat if layer.skipped_mass_bound is not None]
    true = [layer.skipped_mass_true for layer in flat if layer.skipped_mass_true is not None]
    pairs: list[tuple[float, float]] = []
    for layer in flat:
        if layer.skipped_mass_bound is not None and layer.skipped_mass_true is not None:
            both = zip(layer.skipped_mass_bound.ravel(), layer.skipped_mass_true.ravel(), strict=True)
            pairs += [(float(bound), float(share)) for bound, share in both]
    stride = max(1, -(-len(pairs) // MAX_MASS_PAIRS))
    found: dict[str, Any] = {}
    for name, values in (("bound", certified), ("true", true)):
        joined = np.concatenate([value.ravel() for value in values]) if values else np.zeros(0)
        found[f"skipped_mass_{name}_mean"] = float(joined.mean()) if len(joined) else None
        found[f"skipped_mass_{name}_max"] = float(joined.max()) if len(joined) else None
    return {**found, "mass_pairs": pairs[::stride]}
