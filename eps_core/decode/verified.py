"""Verified decoding: sparse steps draft, one dense pass verifies all drafts at once and overwrites what they wrote.

The text is the dense one whatever the drafts were (prior art: self-speculation with the target's own
sparse cache, as in TriForce, MagicDec, SparseSpec and Vegas). After every round cache, summaries and pool are those of
a run that never drafted: drafts are placed in reserved slots, the verify pass places over them, and only what was
accepted is written.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from eps_core.attention.protocol import Selection
from eps_core.attention.stats import StepOutput, VerifyOutput
from eps_core.config.selection import SelectionConfig
from eps_core.config.speculative import SpeculativeConfig
from eps_core.decode.accept import Said, accept, draft_audit, round_record
from eps_core.decode.forward import Decoder
from eps_core.decode.generate import check_prompts, prefill, take_step
from eps_core.decode.pace import Pace
from eps_core.decode.sampling import Sampling, draw, drawable
from eps_core.errors import ConfigError
from eps_core.kv_cache.pool import PagePool
from eps_core.kv_cache.pool import Sequence as PagedSequence
from eps_core.kv_cache.rows import Rows
from eps_core.metrics.rounds import RoundRecord


@dataclass
class _Drafted:
    """One sequence's part of a round."""

    index: int  # of its prompt
    length: int  # tokens whose K and V are in the cache for good
    wanted: int  # drafts
    slots: np.ndarray  # wanted + 1 reserved ones
    tokens: list[int] = field(default_factory=list)
    logits: list[np.ndarray] = field(default_factory=list)  # [V] of each draft step
    selected: list[tuple[int, int]] = field(default_factory=list)  # of each: which draft step, which of its sequences


class Verifier:
    """One verified run: what it decodes with and what it has learnt."""

    def __init__(
        self,
        decoder: Decoder,
        cache: Any,
        pool: PagePool,
        sampling: Sampling,
        selection_config: SelectionConfig,
        verify: SpeculativeConfig,
        stop_tokens: Collection[int] = (),
        drafter: Decoder | None = None,
        clock: Callable[[], float] = time.perf_counter,
        ends: Callable[[int, int], bool] = lambda prompt, token: False,
    ) -> None:
        self.decoder, self.drafter = decoder, drafter or decoder
        self.cache, self.pool, self.sampling, self.verify = cache, pool, sampling, verify
        self.min_context, self.selection_config = selection_config.min_context, verify.draft_selection(selection_config)
        self.stop, self.clock, self.ends = frozenset(stop_tokens), clock, ends
        self.ended: set[int] = set()  # sequences by prompt number
        self.pace = Pace(verify)
        self.num_rounds = 0

    def round(self, sequences: dict[int, PagedSequence], fed: dict[int, int], room: dict[int, int]) -> RoundRecord:
        """One round of sequences by prompt number: `fed` is the token of each that is not in the cache yet and becomes
        its last one, `room` how many more it may say. The sequences grow by what they said, the last token excepted."""
        started, fallbacks = self.clock(), Counter[str]()
        self.pace.saw_load(len(sequences), sum(one.length for one in sequences.values()))
        gamma = self.pace.next()
        wanted = {i: self._wanted(gamma, sequences[i].length, room[i], fallbacks) for i in sorted(sequences)}
        parts = self._reserve(sequences, wanted, fallbacks) if any(wanted.values()) else None
        reread_bytes = self.cache.bytes_k_reread
        if parts is None:
            record = self._dense_round(sequences, fed)
        else:
            record = self._drafted_round(sequences, fed, parts, fallbacks)
        record.bytes_k_reread = self.cache.bytes_k_reread - reread_bytes
        record.step, record.gamma, record.fallbacks = self.num_rounds, gamma, dict(fallbacks)
        record.round_ms = 1000 * (self.clock() - started)
        record.check()
        self.num_rounds += 1
        return record

    def _ends(self, index: int, token: int) -> bool:
        """Return whether a sequence ends with its new token."""
        if self.ends(index, token) or token in self.stop:
            self.ended.add(index)
        return index in self.ended

    # ---- before ----

    def _wanted(self, gamma: int, length: int, room: int, fallbacks: Counter[str]) -> int:
        """Drafts for one sequence of `length` tokens, and why fewer than asked."""
        if gamma and (length + 1 < self.min_context or not length):
            fallbacks["min_context" if length + 1 < self.min_context else "empty"] += 1
            return 0
        return min(gamma, room - 1) if gamma else 0

    def _reserve(
        self, sequences: dict[int, PagedSequence], wanted: dict[int, int], fallbacks: Counter[str]
    ) -> list[_Drafted] | None:
        """Slots for the drafts and one token more of each sequence; None, and nothing held, where the pool has too
        few: a dense step may still do."""
        parts: list[_Drafted] = []
        copies: list[tuple[int, int]] = []
        for index, drafts in wanted.items():
            sequence = sequences[index]
            try:
                slots, more = self.pool.reserve(sequence, drafts + 1)
            except ConfigError:
                self._copy(copies)  # the tables name the copies from here on
                for part in parts:
                    self.pool.release(sequences[part.index])
                fallbacks["pool"] += 1
                return None
            copies += more
            parts.append(_Drafted(index, sequence.length, drafts, slots))
        self._copy(copies)
        return parts

    def _copy(self, copies: list[tuple[int, int]]) -> None:
        if copies:
            self.cache = self.decoder.backend.copy_units(self.cache, *zip(*copies, strict=True))

    # ---- without drafts ----

    def _dense_round(self, sequences: dict[int, PagedSequence], fed: dict[int, int]) -> RoundRecord:
        alive, started = sorted(sequences), self.clock()
        self.cache, output, spent = take_step(
            self.decoder, self.cache, self.pool, [sequences[i] for i in alive], [fed[i] for i in alive]
        )
        lengths = spent.lengths.tolist()
        said = [
            accept(output.logits[row : row + 1], (), self.sampling, index, lengths[row], self._ends)
            for row, index in enumerate(alive)
        ]
        if self.num_rounds:
            self.pace.saw_cost("dense", 1000 * (self.clock() - started))
        return round_record(
            self.cache.spec, alive, [0] * len(alive), said, [length - 1 for length in lengths],
            bytes_kv_verify=output.kv_bytes_read, verify_ms=spent.decode_ms, **self._weights(0),
        )  # fmt: skip

    # ---- with drafts ----

    def _drafted_round(
        self, sequences: dict[int, PagedSequence], fed: dict[int, int], parts: list[_Drafted], fallbacks: Counter[str]
    ) -> RoundRecord:
        table = self.pool.table([sequences[part.index] for part in parts])
        try:
            started = self.clock()
            outputs = self._draft(parts, fed, table, fallbacks)
            draft_ms = 1000 * (self.clock() - started)
            if outputs:
                self.pace.saw_cost("draft", draft_ms / len(outputs))
            for part in parts:
                part.slots = part.slots[: len(part.tokens) + 1]
            num_rows = np.array([len(part.slots) for part in parts])
            lengths = np.array([part.length for part in parts]) + num_rows
            rows = Rows.of(table, lengths, num_rows)
            started = self.clock()
            tokens = [token for part in parts for token in (fed[part.index], *part.tokens)]
            slots = np.concatenate([part.slots for part in parts])
            self.cache, done = self.decoder.verify(
                self.cache, np.array(tokens), slots, rows, self._visited(parts, outputs)
            )
            verify_ms = 1000 * (self.clock() - started)
            said = [
                accept(own, part.tokens, self.sampling, part.index, part.length + 1, self._ends)
                for part, own in zip(parts, np.split(done.logits, rows.starts[1:-1]), strict=True)
            ]  # fmt: skip
            self._commit(parts, sequences, fed, said, rows, done)
        except BaseException:
            for part in parts:
                self.pool.release(sequences[part.index])
            raise
        drafted = [len(part.tokens) for part in parts]
        audit = draft_audit([part.logits for part in parts], done.logits, rows, done.unread)
        # what a round pays for the pass: drawing, writing and the audit, whole vocabularies on the host, included
        pass_ms = 1000 * (self.clock() - started)
        if any(drafted):
            self.pace.saw_cost(int(num_rows.max()), pass_ms)
            self.pace.saw_round(drafted, [one.accepted for one in said])
        elif self.num_rounds:
            self.pace.saw_cost("dense", pass_ms)
        return round_record(
            self.cache.spec, [part.index for part in parts], drafted, said, [part.length for part in parts],
            bytes_kv_draft=sum(output.kv_bytes_read for output in outputs),
            bytes_summary_draft=sum(layer.summary_bytes_read for output in outputs for layer in output.layers),
            bytes_kv_verify=done.kv_bytes_read, draft_ms=draft_ms, verify_ms=verify_ms,
            rolled_back=int(num_rows.sum()) - sum(len(one.tokens) for one in said),
            **audit, **self._weights(len(outputs)),
        )  # fmt: skip

    def _draft(
        self, parts: list[_Drafted], fed: dict[int, int], table: np.ndarray, fallbacks: Counter[str]
    ) -> list[StepOutput]:
        """Fills `tokens` and `logits` of the parts, a sparse step at a time; a sequence leaves at a stop token, or
        where its logits are not finite."""
        outputs: list[StepOutput] = []
        while active := [i for i, part in enumerate(parts) if len(part.tokens) == len(outputs) < part.wanted]:
            depth = len(outputs)
            now = [parts[i] for i in active]
            lengths = np.array([part.length + depth + 1 for part in now])
            self.cache, output = self.drafter.step(
                self.cache,
                np.array([part.tokens[-1] if depth else fed[part.index] for part in now]),
                np.array([part.slots[depth] for part in now]),
                table[active],
                lengths,
                self.selection_config,
                draft=True,
            )
            outputs.append(output)
            for row, part in enumerate(now):
                logits = output.logits[row]
                if not drawable(logits):
                    fallbacks["non_finite"] += 1
                    continue
                token = draw(logits, self.sampling, part.index, int(lengths[row])).token
                part.tokens.append(token)
                part.logits.append(logits)
                part.selected.append((depth, row))
                if token in self.stop:
                    part.wanted = depth + 1
        return outputs

    def _visited(self, parts: list[_Drafted], outputs: list[StepOutput]) -> list[list[tuple[Selection, int] | None]]:
        """Return, of each layer and row, what the draft of its token selected; nothing where drafts do not say."""
        if not outputs or not all(output.selections for output in outputs):
            return []
        found: list[list[tuple[Selection, int] | None]] = []
        for layer in range(self.cache.spec.num_layers):
            rows: list[tuple[Selection, int] | None] = []
            for part in parts:
                for depth, row in part.selected:
                    selection = outputs[depth].selections[layer]
                    rows.append(None if selection is None else (selection, row))
                rows.append(None)  # the last row's token was not drafted from
            found.append(rows)
        return found

    def _commit(
        self, parts: list[_Drafted], sequences: dict[int, PagedSequence], fed: dict[int, int], said: list[Said],
        rows: Rows, done: VerifyOutput,
    ) -> None:  # fmt: skip
        """Writes what stays: of each sequence the token it was fed and all that it said but the last."""
        kept = np.concatenate([rows.starts[i] + np.arange(len(one.tokens)) for i, one in enumerate(said)])
        slots = np.concatenate([part.slots[: len(one.tokens)] for part, one in zip(parts, said, strict=True)])
        self.cache = self.decoder.commit(self.cache, done, kept, slots)
        for part, one in zip(parts, said, strict=True):
            self.pool.commit(sequences[part.index], [fed[part.index], *one.tokens[:-1]])

    def _weights(self, drafts: int) -> dict[str, int]:
        """Return the bytes of weights that so many draft steps and one dense pass read."""
        num_bytes = drafts * self.drafter.model.weight_bytes + self.decoder.model.weight_bytes
        return {"weight_passes": drafts + 1, "bytes_weights": num_bytes}


def verified(
    decoder: Decoder,
    cache: Any,
    pool: PagePool,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling,
    selection_config: SelectionConfig,
    verify: SpeculativeConfig,
    stop_tokens: Collection[int] = (),
    written: Sequence[PagedSequence] | None = None,
    drafter: Decoder | None = None,
    ends: Callable[[int, int], bool] = lambda prompt, token: False,
) -> Generator[RoundRecord, None, Any]:
    """`generate` whose text is the dense one, a round at a time: `selection_config` says how drafts read the cache,
    `verify` how they are made, `drafter` with which decoder (of the same cache; None: this one). Everything else as
    there."""
    check_prompts(prompts)
    sequences = dict(enumerate(written or ()))
    own = written is None
    try:
        for index, prompt in enumerate(prompts if own else ()):
            sequences[index], cache = prefill(decoder, cache, pool, prompt[:-1])
        run = Verifier(decoder, cache, pool, sampling, selection_config, verify, stop_tokens, drafter, ends=ends)
        fed = {index: int(prompt[-1]) for index, prompt in enumerate(prompts)}
        room = dict.fromkeys(sequences, max_new_tokens)
        while max_new_tokens and sequences:
            record = run.round(sequences, fed, room)
            for index, token in zip(record.sequences, record.tokens, strict=True):
                fed[index] = token
                room[index] -= 1
            yield record
            for index in [i for i in sequences if not room[i] or i in run.ended]:
                left = sequences.pop(index)
                if own:
                    pool.free(left)
        return run.cache
    finally:
        for sequence in sequences.values() if own else ():
            pool.free(sequence)
