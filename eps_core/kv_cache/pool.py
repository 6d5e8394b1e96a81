"""Where tokens live: the pool of units, their sequences, and how full each group is. Integers only, on the host.

A unit is a page of `block_size` tokens, or the whole group where a group spans pages (PagedAttention, Kwon et al.
2023, sections 4.3 and 4.4; prefix sharing by chained hashes as in vLLM). Slot s of the pool is token s % U of unit
s // U; group row g holds slots [g * S, (g + 1) * S) because S divides U.

Letters: P units of the pool, U tokens per unit, S tokens per group, B sequences, M units of a table, N tokens in hand.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np

from eps_core.errors import ConfigError

ROOT = bytes(8)  # the parent hash of a sequence's first unit


@dataclass(eq=False)
class Sequence:
    """One sequence's tokens and the units that hold them. Only `PagePool` changes it.

    n = length, U tokens per unit; units of `table` by what their tokens are:

        [0, p)           full, shareable: K and V are written and the hash is published; p = len(hashes)
        [p, n // U)      full by the last append, whose K and V may not be written yet: not shareable
        [n // U, ..)     the open unit where n % U != 0: written in place, or copied first if a fork shares it; then
                         those that `rewind` emptied, to be filled again, and those of reserved slots
    """

    tokens: list[int] = field(default_factory=list)
    table: array = field(default_factory=lambda: array("i"))  # int32: numpy reads it without a copy
    hashes: list[bytes] = field(default_factory=list)  # chained, one per published unit

    @property
    def length(self) -> int:
        return len(self.tokens)


class PagePool:
    """Hands out the P units of a cache: free list, reference counts, prefix sharing, fork and copy-on-write.

    Contract on what is written: units are shared only once their K and V are. `append(s)`, `fork(s)` and `publish(s)`
    tell the pool that everything appended to s before is written; `open` tells it of every live sequence. `free` tells
    nothing: a caller that fails between `append` and its write frees too, so full units of an unwritten last append
    are forgotten.
    """

    def __init__(self, num_units: int, unit_tokens: int, shares: bool = True) -> None:
        """With `shares` False nothing is found again by its tokens, which then need not be the real ones."""
        if num_units < 1 or unit_tokens < 1:
            raise ValueError(f"a pool of {num_units} units of {unit_tokens} tokens: both must be at least 1")
        self.num_units = num_units
        self.unit_tokens = unit_tokens
        self.shares = shares
        self.ref_counts = [0] * num_units  # tables that hold each unit
        # Reuse is from the front: units that nobody can find again first, then those with a hash, oldest first
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_units))
        self._hash_of: list[bytes | None] = [None] * num_units
        self._unit_of: dict[bytes, int] = {}
        self._live: dict[Sequence, None] = {}
        self._reserved: dict[Sequence, tuple[int, int]] = {}  # units that a sequence had before, slots reserved

    @property
    def num_free(self) -> int:
        """Units in no table, those that still hold a findable prefix included."""
        return len(self._free)

    @property
    def num_live(self) -> int:
        """Sequences that were opened or forked and not freed."""
        return len(self._live)

    def open(self, tokens: Items[int] = ()) -> tuple[Sequence, int]:
        """A new sequence that shares the longest run of full units already holding the start of `tokens`.

        Returns (sequence, number of tokens it has already, a multiple of U); the caller appends and computes the rest,
        `tokens[number:]`. The last token is never shared, because its logits are wanted. Allocates nothing.
        """
        for live in self._live:
            self.publish(live)
        sequence = Sequence()
        parent = ROOT
        for start in range(0, len(tokens) - self.unit_tokens, self.unit_tokens):
            content = [int(token) for token in tokens[start : start + self.unit_tokens]]
            parent = unit_hash(parent, content)
            unit = self._unit_of.get(parent)
            if unit is None:
                break
            self._take(unit)
            sequence.tokens += content
            sequence.table.append(unit)
            sequence.hashes.append(parent)
        self._live[sequence] = None
        return sequence, sequence.length

    def append(self, sequence: Sequence, token_ids: Iterable[int]) -> tuple[np.ndarray, list[tuple[int, int]]]:
        """Slots [N] int64 for tokens at the end of a sequence, and unit copies [(src, dst)], at most one.

        The caller runs the copies (`backend.copy_units`) and then writes K and V to the slots, before any further call
        about this sequence. Raises ConfigError and changes nothing where the free units do not suffice.
        """
        self._check_held(sequence, "append to")
        new = [int(token) for token in token_ids]
        slots, copies = self._lengthen(sequence, len(new))
        sequence.tokens += new
        return slots, copies

    def reserve(self, sequence: Sequence, num_tokens: int) -> tuple[np.ndarray, list[tuple[int, int]]]:
        """The slots and copies that `append` of as many tokens would give, for tokens that may be taken back: nothing
        is appended, and what is written to the slots is neither found by `open` nor taken by `fork`. `commit` or
        `release` must come before anything else about this sequence but `fork` and `free`. Raises ConfigError and
        changes nothing where the free units do not suffice."""
        self._check_held(sequence, "reserve for")
        num_units = len(sequence.table)
        slots, copies = self._lengthen(sequence, num_tokens)
        self._reserved[sequence] = num_units, num_tokens
        return slots, copies

    def commit(self, sequence: Sequence, token_ids: Iterable[int]) -> None:
        """Appends tokens whose K and V lie in the first of the reserved slots, summaries included, and gives back the
        units that none of them needs."""
        num_units, num_reserved = self._reserved.get(sequence, (0, -1))
        new = [int(token) for token in token_ids]
        assert len(new) <= num_reserved, f"commit of {len(new)} tokens to {max(num_reserved, 0)} reserved slots"
        sequence.tokens += new
        kept = max(num_units, -(-sequence.length // self.unit_tokens))
        for unit in reversed(sequence.table[kept:]):
            self._drop(unit)
        del sequence.table[kept:], self._reserved[sequence]

    def release(self, sequence: Sequence) -> None:
        """Gives the reserved slots back, where there are any, whatever was written there."""
        if sequence in self._reserved:
            self.commit(sequence, ())

    def require(self, num_units: int, what: str) -> None:
        """Raises ConfigError, which says that `what` needs them, unless so many units are free."""
        if num_units > self.num_free:
            raise ConfigError(
                f"{what} needs {num_units} more units of {self.unit_tokens} tokens, {self.num_free} of the pool's "
                f"{self.num_units} are free: raise --pool-tokens or shorten the prompt"
            )

    def _lengthen(self, sequence: Sequence, num_tokens: int) -> tuple[np.ndarray, list[tuple[int, int]]]:
        """Units for `num_tokens` more tokens: (their slots [N] int64, unit copies), or ConfigError and no change."""
        before, after = sequence.length, sequence.length + num_tokens
        is_open = before % self.unit_tokens != 0
        first = before // self.unit_tokens
        copy_open = bool(num_tokens) and is_open and self.ref_counts[sequence.table[first]] > 1
        num_new = max(-(-after // self.unit_tokens) - len(sequence.table), 0) + copy_open
        self.require(num_new, f"a sequence of {after} tokens")
        self.publish(sequence)
        fresh = self._allocate(num_new)
        copies = []
        if copy_open:
            shared, own = sequence.table[first], fresh.pop(0)
            self._drop(shared)
            sequence.table[first] = own
            copies.append((shared, own))
        elif num_tokens and is_open:
            self._forget(sequence.table[first])  # of a unit that was full before `truncate`
        sequence.table.extend(fresh)
        positions = np.arange(before, after)
        units = np.array(sequence.table[first:], dtype=np.int64)
        return units[positions // self.unit_tokens - first] * self.unit_tokens + positions % self.unit_tokens, copies

    def fork(self, sequence: Sequence) -> Sequence:
        """A second sequence with the same tokens in the same units. Whoever first appends to a shared open unit gets
        its own copy of that unit; full units stay shared."""
        self.publish(sequence)
        written = sequence.table[: -(-sequence.length // self.unit_tokens)]
        child = Sequence(list(sequence.tokens), written, list(sequence.hashes))
        for unit in child.table:
            self._take(unit)
        self._live[child] = None
        return child

    def rewind(self, sequence: Sequence, length: int) -> None:
        """Takes the tokens after the first `length` back: what is appended next is written over them, in the same
        units, which stay the sequence's. Nobody else may hold those units."""
        self._check_held(sequence, "rewind of")
        kept = length // self.unit_tokens
        for unit in sequence.table[kept:]:
            assert self.ref_counts[unit] == 1, f"unit {unit} is another sequence's too: it cannot be written over"
            self._forget(unit)
        del sequence.tokens[length:], sequence.hashes[kept:]

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Takes the tokens after the first `length` back and gives their units up. Forks that hold these keep them: the
        unit that `length` ends in is then copied before it is written again."""
        self._check_held(sequence, "truncate of")
        assert 0 <= length <= sequence.length, f"{length} is no length of a sequence of {sequence.length} tokens"
        kept = -(-length // self.unit_tokens)
        for unit in reversed(sequence.table[kept:]):
            self._drop(unit)
        del sequence.table[kept:], sequence.tokens[length:], sequence.hashes[length // self.unit_tokens :]

    def grow(self, num_units: int) -> None:
        """Makes room for `num_units` in all; the caller's cache must have them."""
        assert num_units >= self.num_units, f"a pool of {self.num_units} units cannot shrink to {num_units}"
        for unit in range(self.num_units, num_units):
            self._free[unit] = None
            self._free.move_to_end(unit, last=False)  # before units that can still be found
            self.ref_counts.append(0)
            self._hash_of.append(None)
        self.num_units = num_units

    def publish(self, sequence: Sequence) -> None:
        """Says that K and V of all the sequence's tokens are written: `open` may share its full units from now on."""
        assert sequence in self._live, "the sequence was freed or belongs to another pool"
        if not self.shares:
            return
        size = self.unit_tokens
        for index in range(len(sequence.hashes), sequence.length // size):
            parent = sequence.hashes[-1] if sequence.hashes else ROOT
            content = unit_hash(parent, sequence.tokens[index * size : (index + 1) * size])
            sequence.hashes.append(content)
            # Two sequences may have computed the same unit at the same time: the first one found stays the one shared
            if content not in self._unit_of:
                unit = sequence.table[index]
                self._unit_of[content] = unit
                self._hash_of[unit] = content

    def free(self, sequence: Sequence) -> None:
        """Gives the sequence's units back and empties it. A published unit that nobody holds keeps its content, and can
        be revived by `open`, until it is reused."""
        assert sequence in self._live, "the sequence was freed already or belongs to another pool"
        # From the end: the start of a prompt is what a later one shares, so it is reused last
        for unit in reversed(sequence.table):
            self._drop(unit)
        del self._live[sequence]
        self._reserved.pop(sequence, None)
        sequence.tokens, sequence.table, sequence.hashes = [], array("i"), []

    def table(self, sequences: Items[Sequence]) -> np.ndarray:
        """Units of each sequence in token order, [B, M] int32, padded with -1; M is the longest table."""
        width = max((len(sequence.table) for sequence in sequences), default=0)
        table = np.full((len(sequences), width), -1, dtype=np.int32)
        for row, sequence in zip(table, sequences, strict=True):
            row[: len(sequence.table)] = sequence.table
        return table

    def lengths(self, sequences: Items[Sequence]) -> np.ndarray:
        """Tokens of each sequence, [B] int64."""
        return np.array([sequence.length for sequence in sequences], dtype=np.int64)

    def check(self) -> None:
        """Raises AssertionError unless every unit is free or used, never both, and counts, tables and hashes agree."""
        references = [0] * self.num_units
        assert self._reserved.keys() <= self._live.keys(), "a sequence that is not live has reserved slots"
        for sequence, (_, num_tokens) in self._reserved.items():
            assert len(sequence.table) * self.unit_tokens >= sequence.length + num_tokens, "reserved slots have no unit"
        for sequence in self._live:
            size, num_full = self.unit_tokens, sequence.length // self.unit_tokens
            assert len(sequence.table) >= -(-sequence.length // size), "a table is shorter than its tokens"
            assert len(set(sequence.table)) == len(sequence.table), "a table holds a unit twice"
            assert len(sequence.hashes) <= num_full, "an open unit was published"
            parent = ROOT
            for index, unit in enumerate(sequence.table):
                references[unit] += 1
                if index < len(sequence.hashes):
                    parent = unit_hash(parent, sequence.tokens[index * size : (index + 1) * size])
                    assert sequence.hashes[index] == parent, f"unit {unit}: its hash is not its content's"
                    assert self._hash_of[unit] in (None, parent), f"unit {unit} is published with other content"
                elif index != num_full:  # what a truncated unit held is there until it is written again
                    assert self._hash_of[unit] is None, f"unit {unit} is published before it is written"
        assert references == self.ref_counts, "reference counts are not the tables' references"
        unused = {unit for unit in range(self.num_units) if not references[unit]}
        assert set(self._free) == unused, "the free list is not the units without a reference"
        published = {content: unit for unit, content in enumerate(self._hash_of) if content is not None}
        assert published == self._unit_of, "the two directions of the hash map differ"

    def _check_held(self, sequence: Sequence, act: str) -> None:
        assert sequence in self._live, f"{act} a sequence that was freed or belongs to another pool"
        assert sequence not in self._reserved, f"{act} a sequence with reserved slots: commit or release first"

    def _take(self, unit: int) -> None:
        if not self.ref_counts[unit]:
            del self._free[unit]
        self.ref_counts[unit] += 1

    def _drop(self, unit: int) -> None:
        self.ref_counts[unit] -= 1
        if not self.ref_counts[unit]:
            self._free[unit] = None
            if self._hash_of[unit] is None:
                self._free.move_to_end(unit, last=False)

    def _allocate(self, num_units: int) -> list[int]:
        """The next units for reuse, ascending (consecutive units are cheaper to read); their content is forgotten."""
        units = sorted(self._free.popitem(last=False)[0] for _ in range(num_units))
        for unit in units:
            self.ref_counts[unit] = 1
            self._forget(unit)
        return units

    def _forget(self, unit: int) -> None:
        """Forget where the unit's content is found; a live sequence's unit with the same content takes its place."""
        content, self._hash_of[unit] = self._hash_of[unit], None
        if content is None:
            return
        del self._unit_of[content]
        for live in self._live:
            if content in live.hashes and (other := live.table[live.hashes.index(content)]) != unit:
                self._unit_of[content], self._hash_of[other] = other, content
                return


def unit_hash(parent: bytes, content: list[int]) -> bytes:
    """Names a full unit by its tokens and all before it. A cryptographic hash: a collision would mix up
    two prompts."""
    return hashlib.blake2b(parent + np.array(content, dtype="<i8").tobytes(), digest_size=16).digest()
