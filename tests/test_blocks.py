"""The allocator by hand, and the fill of groups against a naive model. Integers only: no backend is needed."""

import random
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eps_core.config.eps import EpsConfig
from eps_core.errors import ConfigError
from eps_core.kv_cache.groups import GroupState, WritePlan
from eps_core.kv_cache.pool import PagePool, Sequence


class Memory:
    """What a cache would hold: one token a slot, written and copied exactly as a caller is told to."""

    def __init__(self, num_units: int, unit_tokens: int) -> None:
        self.pool = PagePool(num_units, unit_tokens)
        self.slots = np.full((num_units, unit_tokens), -1)

    def open(self, prompt: list[int]) -> tuple[Sequence, int]:
        """A sequence that holds all of `prompt`, and how many of its tokens were shared."""
        sequence, num_shared = self.pool.open(prompt)
        self.append(sequence, prompt[num_shared:])
        return sequence, num_shared

    def append(self, sequence: Sequence, tokens: list[int]) -> tuple[np.ndarray, list[tuple[int, int]]]:
        slots, copies = self.pool.append(sequence, tokens)
        assert slots.dtype == np.int64 and slots.shape == (len(tokens),)
        for src, dst in copies:
            self.slots[dst] = self.slots[src]
        self.slots.reshape(-1)[slots] = tokens
        return slots, copies

    def read(self, sequence: Sequence) -> list[int]:
        table, length = self.pool.table([sequence])[0], self.pool.lengths([sequence])[0]
        return self.slots[table].reshape(-1)[:length].tolist()


def snapshot(pool: PagePool, *sequences: Sequence) -> tuple:
    """All that a refused call must leave as it was."""
    held = [(s.tokens[:], s.table.tolist(), s.hashes[:]) for s in sequences]
    return pool.ref_counts[:], list(pool._free), pool._hash_of[:], dict(pool._unit_of), len(pool._live), held


# ---- the pool ----


def test_slots_tables_and_lengths():
    memory = Memory(8, 4)
    first, _ = memory.open([])
    second, _ = memory.open([])
    slots, copies = memory.pool.append(first, range(6))
    assert copies == [] and slots.tolist() == [0, 1, 2, 3, 4, 5]
    assert memory.pool.append(second, np.arange(3))[0].tolist() == [8, 9, 10]
    assert memory.pool.append(first, [6, 7, 8])[0].tolist() == [6, 7, 12]
    table, lengths = memory.pool.table([first, second]), memory.pool.lengths([first, second])
    assert table.dtype == np.int32 and table.tolist() == [[0, 1, 3], [2, -1, -1]]
    assert lengths.dtype == np.int64 and lengths.tolist() == [9, 3]
    assert memory.pool.num_free == 4
    assert memory.pool.append(first, [])[0].shape == (0,)
    assert memory.pool.table([]).shape == (0, 0)


def test_out_of_units_names_the_numbers_and_changes_nothing():
    memory = Memory(6, 4)
    first, _ = memory.open(list(range(10)))
    second = memory.pool.fork(first)
    before = snapshot(memory.pool, first, second)
    # 26 tokens are 7 units: 2 are shared, the open one is copied, 4 are new, and 3 are free
    with pytest.raises(ConfigError) as error:
        memory.pool.append(second, range(16))
    assert str(error.value) == (
        "a sequence of 26 tokens needs 5 more units of 4 tokens, 3 of the pool's 6 are free: "
        "raise --pool-tokens or shorten the prompt"
    )
    assert snapshot(memory.pool, first, second) == before
    memory.append(second, list(range(8)))  # three units exactly: a copy and two new ones
    before = snapshot(memory.pool, first, second)
    with pytest.raises(ConfigError):
        memory.pool.append(first, range(3))
    assert snapshot(memory.pool, first, second) == before
    memory.append(first, [10, 11])
    assert memory.read(first) == list(range(12))
    memory.pool.check()


def test_reuse_drops_the_hash_and_takes_the_end_of_a_prompt_first():
    memory = Memory(4, 4)
    prompt = list(range(13))  # three full units and an open one, which is reused first
    first, _ = memory.open(prompt)
    memory.pool.publish(first)
    memory.pool.free(first)
    for still_shared in (12, 8, 4, 0):
        memory.open([100 + still_shared])
        memory.pool.check()
        probe, shared = memory.pool.open(prompt)
        assert shared == still_shared
        memory.pool.free(probe)
    with pytest.raises(ConfigError):
        memory.open([7])


def test_unwritten_units_are_never_shared():
    """A caller that fails between append and the write of K and V frees; nobody may find what was not written."""
    pool = PagePool(16, 4)
    prompt = list(range(13))
    first, _ = pool.open(prompt)
    pool.append(first, prompt[:8])  # written
    pool.append(first, prompt[8:])  # fails before it is written
    pool.check()
    pool.free(first)
    pool.check()
    assert pool.open(prompt)[1] == 8


@pytest.mark.parametrize("length", [0, 3, 4, 9])
def test_what_was_rewound_is_written_over_in_the_same_units(length):
    memory = Memory(5, 4)
    prompt = list(range(14))
    sequence, _ = memory.open(prompt)
    memory.pool.publish(sequence)
    units = sequence.table.tolist()
    memory.pool.rewind(sequence, length)
    memory.pool.check()
    assert memory.read(sequence) == prompt[:length] and sequence.table.tolist() == units
    # nobody finds what will be written over
    probe, shared = memory.pool.open(prompt)
    assert shared == length // 4 * 4
    memory.pool.free(probe)
    assert memory.append(sequence, [50, 51])[1] == [] and memory.append(sequence, [52] * (18 - length))[1] == []
    assert memory.read(sequence) == [*prompt[:length], 50, 51, *[52] * (18 - length)]
    assert sequence.table[:4].tolist() == units and len(sequence.table) == 5
    memory.pool.check()
    memory.pool.free(sequence)
    assert memory.pool.num_free == 5


def test_a_fork_takes_no_unit_that_was_emptied_and_a_shared_one_is_not_cut():
    memory = Memory(8, 4)
    parent, _ = memory.open(list(range(14)))
    memory.pool.rewind(parent, 6)
    child = memory.pool.fork(parent)
    assert len(child.table) == 2 and len(parent.table) == 4
    assert memory.append(parent, [7, 8, 9])[1] == [(child.table[1], parent.table[1])]
    assert memory.read(child) == list(range(6)) and memory.read(parent) == [*range(6), 7, 8, 9]
    memory.pool.check()
    with pytest.raises(AssertionError, match="another sequence's too"):
        memory.pool.rewind(child, 3)


def test_misuse_is_an_assertion():
    pool, other = PagePool(4, 4), PagePool(4, 4)
    sequence, _ = pool.open()
    pool.append(sequence, [1, 2])
    for call in (lambda: other.append(sequence, [3]), lambda: other.fork(sequence), lambda: other.free(sequence)):
        with pytest.raises(AssertionError):
            call()
    pool.free(sequence)
    assert sequence.length == 0 and not sequence.table
    with pytest.raises(AssertionError):
        pool.free(sequence)
    with pytest.raises(ValueError, match="0 units"):
        PagePool(0, 16)


DAMAGES = {
    "a unit counted twice": lambda pool, s: pool.ref_counts.__setitem__(s.table[0], 2),
    "a free unit lost": lambda pool, s: pool._free.popitem(),
    "a used unit freed": lambda pool, s: pool._free.update({s.table[0]: None}),
    "a token changed": lambda pool, s: s.tokens.__setitem__(0, s.tokens[0] + 1),
    "the open unit published": lambda pool, s: pool._hash_of.__setitem__(s.table[-1], b"open"),
    "one direction forgotten": lambda pool, s: pool._unit_of.popitem(),
    "a table shortened": lambda pool, s: s.table.pop(),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_check_finds_damage(name):
    memory = Memory(8, 4)
    sequence, _ = memory.open(list(range(10)))
    memory.pool.publish(sequence)
    memory.pool.check()
    DAMAGES[name](memory.pool, sequence)
    with pytest.raises(AssertionError):
        memory.pool.check()


# ---- the fill of groups ----


def config_of(group_size: int) -> EpsConfig:
    return EpsConfig.of(method="box", group_size=group_size, block_size=16)


class SlowState:
    """The rules of GroupState, a token at a time: which slots of each group are written, and who has an open slot."""

    def __init__(self, num_groups: int, size: int, max_open: int) -> None:
        self.size, self.max_open = size, max_open
        self.held: list[list[int]] = [[] for _ in range(num_groups)]
        self.claims: list[int] = []  # group rows with an open slot, oldest first

    def write(self, slots: list[int]) -> dict[int, dict]:
        """Touched groups, ascending: their tokens (indices into slots), what they held before, whether they follow."""
        touched: dict[int, dict] = {}
        for index, slot in enumerate(slots):
            group, offset = divmod(slot, self.size)
            entry = touched.setdefault(group, {"before": offset, "tokens": [], "old": len(self.held[group])})
            entry["tokens"].append(index)
            assert offset <= len(self.held[group])
            del self.held[group][offset:]
            self.held[group].append(slot)
        touched = dict(sorted(touched.items()))
        for group, entry in touched.items():
            if entry["before"] < entry["old"] and group in self.claims:
                self.claims.remove(group)
        for group, entry in touched.items():
            if entry["before"] == 0 and len(entry["tokens"]) < self.size:
                if len(self.claims) == self.max_open:
                    self.claims.pop(0)
                self.claims.append(group)
        for group, entry in touched.items():
            entry["follows"] = group in self.claims
            if len(self.held[group]) == self.size and group in self.claims:
                self.claims.remove(group)
        return touched

    def copy(self, src: int, dst: int) -> None:
        self.held[dst] = list(self.held[src])
        if dst in self.claims:
            self.claims.remove(dst)

    def claim_copy(self, src: int, dst: int) -> bool:
        if src not in self.claims:
            return False
        if len(self.claims) == self.max_open:
            self.claims.pop(0)
        self.claims.append(dst)
        return True


def check_plan(plan: WritePlan, expected: dict[int, dict], size: int) -> None:
    for item in fields(plan):
        assert getattr(plan, item.name).dtype == (bool if item.name == "finalized" else np.int64)
    full = {g: e["tokens"] for g, e in expected.items() if len(e["tokens"]) == size}
    part = {g: e for g, e in expected.items() if len(e["tokens"]) < size}
    assert plan.full_groups.tolist() == list(full)
    assert plan.full_tokens.shape == (len(full), size) and plan.full_tokens.tolist() == list(full.values())
    assert plan.part_groups.tolist() == list(part)
    width = max((len(e["tokens"]) for e in part.values()), default=0)
    padded = [e["tokens"] + [-1] * (width - len(e["tokens"])) for e in part.values()]
    assert plan.part_tokens.shape == (len(part), width) and plan.part_tokens.tolist() == padded
    assert plan.part_before.tolist() == [e["before"] for e in part.values()]
    assert plan.finalized.tolist() == [e["before"] + len(e["tokens"]) == size for e in part.values()]
    assert (plan.part_open >= 0).tolist() == [e["follows"] for e in part.values()]
    used = plan.part_open[plan.part_open >= 0].tolist()
    assert len(set(used)) == len(used)


class Accumulators:
    """A caller's open slots: each holds the tokens it was given, which must be those of its group."""

    def __init__(self, max_open: int) -> None:
        self.tokens: list[list[int]] = [[-1]] * max_open

    def follow(self, plan: WritePlan, slots: np.ndarray, held: list[list[int]]) -> None:
        rows = zip(plan.part_groups, plan.part_tokens, plan.part_before, plan.part_open, strict=True)
        # all are gathered, then all are scattered, as a vectorised backend does
        result = {}
        for group, tokens, before, slot in rows:
            if slot >= 0:
                old = self.tokens[slot] if before else []
                result[slot] = (group, old + slots[tokens[tokens >= 0]].tolist())
        for slot, (group, tokens) in result.items():
            assert tokens == held[group]
            self.tokens[slot] = tokens


SIZES = [1, 2, 4, 8, 16, 32, 128]


def random_slots(rng: random.Random, slow: SlowState, num_groups: int) -> list[int]:
    """One call's slots: groups continued, begun again or overwritten, some of them whole, interleaved at random."""
    runs = []
    for group in rng.sample(range(num_groups), rng.randint(0, min(6, num_groups))):
        fill, size = len(slow.held[group]), slow.size
        start = rng.choice([0, min(fill, size - 1), rng.randint(0, min(fill, size - 1))])
        end = rng.choice([start + 1, size, rng.randint(start + 1, size)])
        runs.append([group * size + offset for offset in range(start, end)])
    if rng.random() < 0.5:  # one sequence after another
        return [slot for run in runs for slot in run]
    slots = []
    while runs := [run for run in runs if run]:
        slots.append(rng.choice(runs).pop(0))
    return slots


@settings(max_examples=120, deadline=None)
@given(size=st.sampled_from(SIZES), max_open=st.integers(1, 5), num_units=st.integers(2, 4), seed=st.integers(0, 2**32))
def test_plan_against_a_token_at_a_time(size, max_open, num_units, seed):
    rng, config = random.Random(seed), config_of(size)
    per_unit = config.cache_config.groups_per_unit
    state = GroupState(num_units, config.cache_config, max_open)
    slow = SlowState(num_units * per_unit, size, max_open)
    running = Accumulators(max_open)
    for _ in range(25):
        if rng.random() < 0.15:
            src, dst = rng.sample(range(num_units), 2)
            pairs = state.copy(src, dst)
            for sub in range(per_unit):
                slow.copy(src * per_unit + sub, dst * per_unit + sub)
            copied = [slow.claim_copy(src * per_unit + sub, dst * per_unit + sub) for sub in range(per_unit)]
            assert len(pairs) == sum(copied)
            for src_open, dst_open in pairs:
                # the accumulators follow the tokens, by the slots they have in the new unit
                moved = [slot + (dst - src) * config.cache_config.unit_tokens for slot in running.tokens[src_open]]
                running.tokens[dst_open] = moved
            for sub in range(per_unit):
                group = dst * per_unit + sub
                slow.held[group] = [slot + (dst - src) * config.cache_config.unit_tokens for slot in slow.held[group]]
        else:
            slots = random_slots(rng, slow, num_units * per_unit)
            plan = state.plan(np.array(slots, dtype=np.int64))
            check_plan(plan, slow.write(slots), size)
            running.follow(plan, np.array(slots), slow.held)
        fill = [len(held) for held in slow.held]
        assert state.fill.tolist() == fill
        groups = np.arange(len(fill)).reshape(num_units, per_unit)
        assert state.valid(groups).reshape(-1).tolist() == [n == size for n in fill]


def test_large_prefill_is_full_groups_and_two_ends():
    state = GroupState(1024, config_of(8).cache_config, 4)
    state.plan(np.arange(3))
    plan = state.plan(np.arange(3, 8001))
    assert plan.full_groups.tolist() == list(range(1, 1000))
    assert (plan.full_tokens == np.arange(5, 7997).reshape(999, 8)).all()
    assert plan.part_groups.tolist() == [0, 1000] and plan.part_before.tolist() == [3, 0]
    assert plan.part_tokens.tolist() == [[0, 1, 2, 3, 4], [7997, -1, -1, -1, -1]]
    assert plan.finalized.tolist() == [True, False] and len(set(plan.part_open.tolist())) == 2


def test_copy():
    config = config_of(4)
    state = GroupState(4, config.cache_config, 2)
    state.plan(np.arange(10))  # groups 0 and 1 full, group 2 holds 2 of 4
    ((src_open, dst_open),) = state.copy(0, 3)
    assert src_open != dst_open
    assert state.fill.reshape(4, 4)[[0, 3]].tolist() == [[4, 4, 2, 0]] * 2
    assert state.plan(np.array([10])).part_open.tolist() == [src_open]
    assert state.plan(np.array([48 + 10])).part_open.tolist() == [dst_open]
    assert state.plan(np.array([48 + 11])).finalized.tolist() == [True]
    with pytest.raises(AssertionError):
        state.copy(1, 1)


@pytest.mark.parametrize(
    "slots",
    [[5], [0, 2], [0, 0], [1, 0], [0, 1, 2, 3, 5], [-1], [32], [0, 1, 17]],
    ids=["beyond-fill", "gap", "twice", "descending", "gap-after-full", "negative", "past-the-end", "second-group"],
)
def test_impossible_writes_change_nothing(slots):
    state = GroupState(2, config_of(4).cache_config, 2)
    with pytest.raises(AssertionError):
        state.plan(np.array(slots))
    assert not state.fill.any() and not state._open


def test_what_a_live_sequence_holds_is_found_after_its_first_copy_was_reused() -> None:
    """Two sequences computed the same unit; the one that was found first is freed, and its unit used for other text."""
    pool = PagePool(3, 2)
    first, _ = pool.open()
    pool.append(first, [0, 1])
    second, _ = pool.open()  # publishes the first one's unit
    pool.append(second, [0, 1, 5, 5])
    pool.publish(second)
    pool.free(first)
    third, _ = pool.open()
    pool.append(third, [7, 7])  # takes the freed unit
    pool.check()
    shared, num_shared = pool.open([0, 1, 0])
    assert num_shared == 2 and list(shared.table) == [second.table[0]]
