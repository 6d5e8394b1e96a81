"""Tests of the tests of verified decoding: a verifier that is wrong in one thing fails a named assertion."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from verified_runs import DRAWN, GREEDY, Drafter, check_rounds, eps, judge, prompt

from eps_core.config.speculative import SpeculativeConfig
from eps_core.decode import accept as accepting
from eps_core.decode import sampling, verified
from eps_core.decode.accept import Said
from eps_core.decode.forward import Decoder
from eps_core.decode.pace import Pace
from eps_core.decode.verified import Verifier
from eps_core.kv_cache.pool import PagePool
from eps_core.kv_cache.rows import Rows

CONFIG = eps("meanstd", budget=0.3)
PROMPTS = (prompt(44), prompt(21, 1))
TOKENS = 14

right_accept, right_verify, right_commit = accepting.accept, Decoder.verify, Decoder.commit
right_draw, right_pool_commit = sampling.draw, PagePool.commit


def accepts(change: Callable[[Said, list, list], None]) -> list[Any]:
    """`accept` whose answer is changed: change(said, drafts, logits)."""

    def accept(logits: Any, drafts: Any, *rest: Any) -> Said:
        said = right_accept(logits, drafts, *rest)
        change(said, drafts, logits)
        return said

    return [patch.object(verified, "accept", accept)]


def one_too_many(said: Said, drafts: list, logits: Any) -> None:
    if said.accepted < len(drafts):
        said.tokens[-1] = drafts[said.accepted]
        said.accepted += 1


def the_draft_instead(said: Said, drafts: list, logits: Any) -> None:
    if said.accepted < len(drafts):
        said.tokens[-1] = drafts[said.accepted]


def no_bonus(said: Said, drafts: list, logits: Any) -> None:
    if drafts and len(said.tokens) > len(drafts):
        said.tokens.pop()
        said.margins.pop()


def one_less(said: Said, drafts: list, logits: Any) -> None:
    if said.accepted > 1:
        del said.tokens[-1], said.margins[-1]
        said.accepted -= 1


def draws(change: Callable[..., tuple]) -> list[Any]:
    """The verifier's draws alone are changed: change(sampling, sequence, position)."""

    def draw(logits: Any, sampling: Any, sequence: int, position: int) -> Any:
        return right_draw(logits, *change(sampling, sequence, position))

    return [patch.object(accepting, "draw", draw)]


def keeps_the_drafts_cache() -> list[Any]:
    """K and V of accepted drafts stay what their draft steps made of a sparse attention."""

    def verify(self: Any, cache: Any, tokens: Any, slots: Any, rows: Rows, *rest: Any) -> Any:
        units, offsets = np.divmod(slots, cache.cache_config.unit_tokens)
        made = [
            [pool[layer][units, :, offsets].copy() for pool in (cache.k, cache.v)]
            for layer in range(cache.spec.num_layers)
        ]
        cache, done = right_verify(self, cache, tokens, slots, rows, *rest)
        last = rows.starts[1:] - 1  # nobody drafted from these
        for (k, v), (draft_k, draft_v) in zip(done.kv, made, strict=True):
            draft_k[last], draft_v[last] = k[last], v[last]
        return cache, replace(done, kv=[tuple(pair) for pair in made])

    return [patch.object(Decoder, "verify", verify)]


def verifies_at(change: Callable[[Rows], np.ndarray]) -> list[Any]:
    """Rows that see change(rows) tokens, and lie where that says."""

    def verify(self: Any, cache: Any, tokens: Any, slots: Any, rows: Rows, *rest: Any) -> Any:
        rows = Rows.of(rows.table, rows.lengths, rows.num_rows)
        rows.__dict__["seen"] = change(rows)  # as a cached property keeps it
        return right_verify(self, cache, tokens, slots, rows, *rest)

    return [patch.object(Decoder, "verify", verify)]


def turned_by_one() -> list[Any]:
    """Positions that are off by one, where what is seen is right."""
    rotation = judge().decoder.model.rotation

    def verify(self: Any, *given: Any) -> Any:
        with patch.object(self.model, "rotation", lambda positions: rotation(positions + 1)):
            return right_verify(self, *given)

    return [patch.object(Decoder, "verify", verify)]


def places_no_drafts() -> list[Any]:
    """The verify pass attends to what the drafts left in the cache."""

    def verify(self: Any, *given: Any) -> Any:
        with patch.object(self.backend, "write_kv_tentative", lambda cache, *rest: cache):
            return right_verify(self, *given)

    return [patch.object(Decoder, "verify", verify)]


def commits_rejected_rows() -> list[Any]:
    """Summaries follow what was taken back."""
    slots_of: dict[int, np.ndarray] = {}

    def verify(self: Any, cache: Any, tokens: Any, slots: np.ndarray, *rest: Any) -> Any:
        cache, done = right_verify(self, cache, tokens, slots, *rest)
        slots_of[id(done)] = slots
        return cache, done

    def commit(self: Any, cache: Any, done: Any, kept: Any, slots: Any) -> Any:
        return right_commit(self, cache, done, np.arange(len(done.logits)), slots_of[id(done)])

    return [patch.object(Decoder, "verify", verify), patch.object(Decoder, "commit", commit)]


def commits(change: Callable[[np.ndarray, np.ndarray], tuple]) -> list[Any]:
    """Rows and slots [N] that are written for good are changed."""

    def commit(self: Any, cache: Any, done: Any, kept: np.ndarray, slots: np.ndarray) -> Any:
        return right_commit(self, cache, done, *change(kept, slots))

    return [patch.object(Decoder, "commit", commit)]


def keeps_the_units() -> list[Any]:
    def commit(self: PagePool, sequence: Any, tokens: Any) -> None:
        table = sequence.table[:]
        right_pool_commit(self, sequence, tokens)
        for unit in table[len(sequence.table) :]:
            self._take(unit)
            sequence.table.append(unit)

    return [patch.object(PagePool, "commit", commit)]


def appends_the_last_token_too() -> list[Any]:
    def commit(self: Any, parts: Any, sequences: Any, fed: Any, said: Any, *rest: Any) -> None:
        right(self, parts, sequences, fed, said, *rest)
        for part, one in zip(parts, said, strict=True):
            if len(one.tokens) == len(part.slots) and part.tokens:
                sequences[part.index].tokens[-1] = one.tokens[-1]

    right = Verifier._commit
    return [patch.object(Verifier, "_commit", commit)]


TEXT, STATE = "says other than dense decoding", "Not equal to tolerance"
FILLS, COUNTS, REFUSED = "Arrays are not equal", "too few or too many", "a right draft was refused"
WRONG: dict[str, tuple[Callable[[], list[Any]], str]] = {
    "accepts one too many": (lambda: accepts(one_too_many), TEXT),
    "says the draft where it was wrong": (lambda: accepts(the_draft_instead), TEXT),
    "forgets the bonus token": (lambda: accepts(no_bonus), COUNTS),
    "accepts one too few": (lambda: accepts(one_less), REFUSED),
    "draws with the noise of the next position": (lambda: draws(lambda s, i, at: (s, i, at + 1)), TEXT),
    "draws with the noise of the next sequence": (lambda: draws(lambda s, i, at: (s, i + 1, at)), TEXT),
    "draws without temperature": (
        lambda: draws(lambda s, i, at: (replace(s, temperature=1.0), i, at)), TEXT
    ),
    "draws without top-p": (lambda: draws(lambda s, i, at: (replace(s, top_p=0.3), i, at)), TEXT),
    "keeps K and V of the drafts": (keeps_the_drafts_cache, STATE),
    "sees all rows of its sequence": (
        lambda: verifies_at(lambda rows: np.repeat(rows.lengths, rows.num_rows)), TEXT + "|" + STATE
    ),
    "sees one token too few": (
        lambda: verifies_at(lambda rows: np.maximum(rows.seen - 1, 1)), TEXT + "|" + STATE
    ),
    "turns by the next position": (turned_by_one, TEXT + "|" + STATE),
    "attends to the drafts' K and V": (places_no_drafts, TEXT + "|" + STATE),
    "commits summaries of rejected rows": (commits_rejected_rows, FILLS),
    "forgets to commit the last row": (lambda: commits(lambda kept, slots: (kept[:-1], slots[:-1])), FILLS),
    "commits the next row's K and V": (lambda: commits(lambda kept, slots: (np.roll(kept, -1), slots)), STATE),
    # summaries speak of drafts
    "writes what it should place": (
        lambda: [patch.object(judge().backend, "write_kv_tentative", judge().backend.write_kv)],
        "K was read back more often|" + FILLS,
    ),
    "keeps the units of rejected drafts": (keeps_the_units, "units are held"),
    "appends the last token too": (appends_the_last_token_too, "the sequences differ"),
    "ignores stop tokens": (
        lambda: [patch.object(verified, "accept", lambda *given: right_accept(*given[:-1], lambda *said: False))],
        "goes on after its end",
    ),
    "drafts past the last token": (
        lambda: [patch.object(Verifier, "_wanted", lambda self, gamma, *rest: gamma)], "more than it was asked for"
    ),
    "drafts more than it is asked to": (
        lambda: [patch.object(Pace, "next", lambda self: self.fixed + 1)], "more drafts than"
    ),
}  # fmt: skip


def half_right(logits: np.ndarray) -> np.ndarray:
    """Dense logits of a drafter, reversed every third step or so: some drafts stay, some do not."""
    return -logits if int(1e4 * abs(float(logits[0, 0]))) % 3 == 0 else logits


def run(stop: tuple[int, ...]) -> None:
    model, verify = judge(), SpeculativeConfig("tokens", 4)
    for record in check_rounds(model, PROMPTS, CONFIG, TOKENS, DRAWN, verify, Drafter(model, dense=True), stop=stop):
        assert record.accepted == record.drafted, "a right draft was refused"
    for sampling_, drafter in (
        (DRAWN, Drafter(model, half_right, dense=True)),
        (GREEDY, Drafter(model, half_right, dense=True)),
        (DRAWN, Drafter(model)),
    ):
        check_rounds(model, PROMPTS, CONFIG, TOKENS, sampling_, verify, drafter, stop=stop)


def stop_token() -> tuple[int, ...]:
    """A token that the first sequence says in the middle."""
    return (judge().dense(PROMPTS, CONFIG, TOKENS, DRAWN).said[0][6],)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_verifier_is_found(name: str) -> None:
    patches, found = WRONG[name]
    stop = stop_token() if "stop" in name else ()
    with ExitStack() as stack:
        for one in patches():
            stack.enter_context(one)
        with pytest.raises(AssertionError, match=found):
            run(stop)


def test_the_right_verifier_passes() -> None:
    run(())
    run(stop_token())
