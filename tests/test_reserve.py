"""Slots for tokens that may be taken back, against a naive model: reserve, commit, release, and all else meanwhile."""

from itertools import takewhile

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from test_blocks import Memory, snapshot

from eps_core.errors import ConfigError
from eps_core.kv_cache.pool import PagePool, Sequence

DRAFT = 1000  # tokens above are drafts, which nobody may ever find


class Drafts(Memory):
    """A memory in which drafts are placed before it is known which of them stay."""

    def reserve(self, sequence: Sequence, num_tokens: int) -> tuple[np.ndarray, list[tuple[int, int]]]:
        slots, copies = self.pool.reserve(sequence, num_tokens)
        for src, dst in copies:
            self.slots[dst] = self.slots[src]
        assert slots.dtype == np.int64 and slots.shape == (num_tokens,)
        self.slots.reshape(-1)[slots] = DRAFT + np.arange(num_tokens)
        return slots, copies

    def commit(self, sequence: Sequence, slots: np.ndarray, tokens: list[int]) -> None:
        """What was accepted is written before the pool is told."""
        self.slots.reshape(-1)[slots[: len(tokens)]] = tokens
        self.pool.commit(sequence, tokens)


def state_of(memory: Drafts, *sequences: Sequence) -> tuple:
    return snapshot(memory.pool, *sequences), dict(memory.pool._reserved)


# ---- by hand ----


def test_reserved_slots_are_those_of_append() -> None:
    memory, other = Drafts(8, 4), Drafts(8, 4)
    for length, count in ((0, 3), (3, 1), (3, 9), (8, 4)):
        one, two = (each.open(list(range(length)))[0] for each in (memory, other))
        slots, copies = memory.pool.reserve(one, count)
        want, want_copies = other.pool.append(two, range(count))
        np.testing.assert_array_equal(slots, want)
        assert copies == want_copies and one.table == two.table and one.length == length
        memory.pool.check()
        memory.pool.release(one)
        memory.pool.check()
        for each, sequence in ((memory, one), (other, two)):
            each.pool.free(sequence)


def test_units_that_were_there_before_stay() -> None:
    """Those that `rewind` emptied are the sequence's, whatever a round held besides."""
    memory = Drafts(8, 4)
    sequence, _ = memory.open(list(range(14)))
    memory.pool.rewind(sequence, 5)
    units = list(sequence.table)
    slots, _ = memory.reserve(sequence, 13)
    assert len(sequence.table) == 5
    memory.commit(sequence, slots, [50])
    assert list(sequence.table) == units and memory.read(sequence) == [*range(5), 50]
    memory.pool.check()


def test_misuse_is_an_assertion() -> None:
    pool, other = PagePool(8, 4), PagePool(8, 4)
    sequence, _ = pool.open()
    pool.append(sequence, range(5))
    pool.reserve(sequence, 3)
    calls = {
        "append": lambda: pool.append(sequence, [1]),
        "reserve": lambda: pool.reserve(sequence, 1),
        "rewind": lambda: pool.rewind(sequence, 2),
        "truncate": lambda: pool.truncate(sequence, 2),
        "commit of 4 tokens to 3": lambda: pool.commit(sequence, range(4)),
        "belongs to another pool": lambda: other.reserve(sequence, 1),
    }
    before = snapshot(pool, sequence), dict(pool._reserved)
    for said, call in calls.items():
        with pytest.raises(AssertionError, match=said):
            call()
        assert (snapshot(pool, sequence), dict(pool._reserved)) == before
    pool.release(sequence)
    pool.release(sequence)  # where nothing is held, nothing is given back
    with pytest.raises(AssertionError, match="to 0 reserved slots"):
        pool.commit(sequence, [1])
    with pytest.raises(AssertionError):
        pool.commit(sequence, [])
    pool.check()


def test_check_finds_reserved_slots_without_a_unit() -> None:
    for damage in (lambda pool, s: s.table.pop(), lambda pool, s: pool._live.pop(s)):
        pool = PagePool(8, 4)
        sequence, _ = pool.open()
        pool.reserve(sequence, 5)
        pool.check()
        damage(pool, sequence)
        with pytest.raises(AssertionError):
            pool.check()


# ---- random programs ----


class ReserveMachine(RuleBasedStateMachine):
    """Random programs against lists of tokens: sequences stay readable whatever was drafted, the pool never miscounts,
    and nothing of a draft is ever found."""

    @initialize(
        num_units=st.integers(1, 24),
        unit_tokens=st.sampled_from([1, 2, 3, 4, 16]),
        shares=st.sampled_from([True, True, True, False]),
    )
    def start(self, num_units: int, unit_tokens: int, shares: bool) -> None:
        self.memory = Drafts(num_units, unit_tokens)
        self.memory.pool = PagePool(num_units, unit_tokens, shares)
        self.model: dict[Sequence, list[int]] = {}
        self.held: dict[Sequence, np.ndarray] = {}
        self.written: set[tuple[int, ...]] = set()  # every beginning of full units that was ever wholly written

    def pick(self, data, among) -> Sequence:
        return data.draw(st.sampled_from(list(among)), label="sequence")

    def idle(self) -> list[Sequence]:
        return [sequence for sequence in self.model if sequence not in self.held]

    def note_written(self, sequence):
        size, tokens = self.memory.pool.unit_tokens, self.model[sequence]
        self.written |= {tuple(tokens[:end]) for end in range(size, len(tokens) + 1, size)}

    def lengthen(self, call, sequence, given):
        """The slots that the call gave, or None where the pool refused, named the numbers and left all as it was."""
        pool, num_new = self.memory.pool, given if isinstance(given, int) else len(given)
        before = state_of(self.memory, *self.model)
        tables = {other: other.table[:] for other in self.model if other is not sequence}
        open_unit = sequence.table[-1] if sequence.length % pool.unit_tokens else None
        expected_copies = bool(num_new) and open_unit is not None and pool.ref_counts[open_unit] > 1
        units = -(-(sequence.length + num_new) // pool.unit_tokens) - len(sequence.table) + expected_copies
        if units > pool.num_free:
            with pytest.raises(ConfigError, match=f"needs {units} more units .* {pool.num_free} of the pool's"):
                call(sequence, given)
            assert state_of(self.memory, *self.model) == before
            return None
        slots, copies = call(sequence, given)
        self.note_written(sequence)
        assert len(copies) == expected_copies and all(src == open_unit for src, _ in copies)
        assert {other: other.table for other in tables} == tables
        return slots

    # two token values and short prompts: beginnings meet often
    @rule(tokens=st.lists(st.integers(0, 1), max_size=24))
    def open(self, tokens):
        for live in self.model:
            self.note_written(live)
        free, size = self.memory.pool.num_free, self.memory.pool.unit_tokens
        sequence, num_shared = self.memory.pool.open(tokens)
        assert num_shared % size == 0 and num_shared < max(len(tokens), 1)
        # what it shares was written for good
        assert num_shared == 0 or tuple(tokens[:num_shared]) in self.written
        assert self.memory.read(sequence) == tokens[:num_shared]
        assert free - self.memory.pool.num_free <= len(sequence.table)
        # what a live sequence holds is always found
        for held in self.model.values() if self.memory.pool.shares else ():
            same = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(tokens, held, strict=False))))
            assert num_shared >= min(same, len(tokens) - 1) // size * size
        self.model[sequence] = tokens[:num_shared]
        if self.lengthen(self.memory.append, sequence, tokens[num_shared:]) is not None:
            self.model[sequence] = tokens

    @precondition(lambda self: self.idle())
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), max_size=9))
    def grow(self, data, tokens):
        sequence = self.pick(data, self.idle())
        if self.lengthen(self.memory.append, sequence, tokens) is not None:
            self.model[sequence] += tokens

    @precondition(lambda self: self.idle())
    @rule(data=st.data())
    def truncate(self, data):
        sequence = self.pick(data, self.idle())
        length = data.draw(st.integers(0, sequence.length), label="length")
        self.memory.pool.truncate(sequence, length)
        del self.model[sequence][length:]

    @precondition(lambda self: self.idle())
    @rule(data=st.data(), count=st.integers(0, 9))
    def reserve(self, data, count):
        sequence = self.pick(data, self.idle())
        slots = self.lengthen(self.memory.reserve, sequence, count)
        if slots is not None:
            assert len(set(slots.tolist())) == count
            self.held[sequence] = slots

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def commit(self, data):
        sequence = self.pick(data, self.held)
        slots = self.held.pop(sequence)
        tokens = data.draw(st.lists(st.integers(0, 1), max_size=len(slots)))
        self.memory.commit(sequence, slots, tokens)
        self.model[sequence] += tokens
        size = self.memory.pool.unit_tokens
        assert len(sequence.table) == -(-len(self.model[sequence]) // size)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data):
        sequence = self.pick(data, self.held)
        del self.held[sequence]
        self.memory.pool.release(sequence)
        assert len(sequence.table) == -(-sequence.length // self.memory.pool.unit_tokens)

    @precondition(lambda self: self.model and len(self.model) < 6)
    @rule(data=st.data())
    def fork(self, data):
        parent = self.pick(data, self.model)
        self.note_written(parent)
        free = self.memory.pool.num_free
        child = self.memory.pool.fork(parent)
        assert self.memory.pool.num_free == free and child.table == parent.table[: len(child.table)]
        self.model[child] = list(self.model[parent])

    @precondition(lambda self: self.model)
    @rule(data=st.data(), written=st.booleans())
    def free(self, data, written):
        sequence = self.pick(data, self.model)
        if written:
            self.memory.pool.publish(sequence)
            self.note_written(sequence)
        del self.model[sequence]
        self.held.pop(sequence, None)
        self.memory.pool.free(sequence)

    @invariant()
    def holds(self):
        if not hasattr(self, "memory"):
            return
        pool = self.memory.pool
        pool.check()
        for sequence, tokens in self.model.items():
            assert sequence.tokens == tokens and self.memory.read(sequence) == tokens
        distinct = {unit for sequence in self.model for unit in sequence.table}
        assert pool.num_free == pool.num_units - len(distinct)
        assert pool.shares or not pool._unit_of
        # reserved slots are one sequence's alone, but for an open unit that a fork took in mid-round
        taken = [slot for slots in self.held.values() for slot in slots.tolist()]
        assert len(set(taken)) == len(taken)
        for unit, content in enumerate(pool._hash_of):
            assert content is None or (self.memory.slots[unit] < DRAFT).all(), "a drafted unit can be found"


ReserveMachine.TestCase.settings = settings(
    max_examples=200, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
TestReserveMachine = ReserveMachine.TestCase
