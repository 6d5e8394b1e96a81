"""Which groups a write fills, finalizes or leaves open: integers only."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eps_core.config.cache import CacheConfig


@dataclass(frozen=True)
class WritePlan:
    """Effect of one write of N tokens on the groups, each ascending and in one list only; int64 unless said otherwise.

    Offsets of a part group: [0, before) there already, [before, before + n) its n tokens of this call, then unwritten.
    A `part_open` slot is the group's own within this call, finalized groups' too; no two groups of a plan share one.
    Summaries of part groups that are not finalized are no longer valid.
    """

    full_groups: np.ndarray  # [F] group rows of which all S tokens are in hand
    full_tokens: np.ndarray  # [F, S] their indices into N
    part_groups: np.ndarray  # [R] group rows of which some tokens are in hand
    part_tokens: np.ndarray  # [R, L] their indices into N, ascending, then -1
    part_before: np.ndarray  # [R] tokens in the group before this call; 0: the group starts here
    part_open: np.ndarray  # [R] open slot whose accumulators hold exactly those tokens, or -1
    finalized: np.ndarray  # [R] bool: the group is full with this call


_NONE = np.zeros(0, np.int64)
_ZERO = np.zeros((1, 1), np.int64)
_NO_TOKENS = np.zeros((0, 0), np.int64)


class GroupState:
    """How far each group of a pool is written, and which partial groups have accumulators; one per layer.

    A group is here what is summarised together: all groups of one mean, where codes speak of such
    (`CacheConfig.span_tokens`); `groups_per_span` says how many that a step may visit lie in it.

    An open slot belongs to a group from the write of its first token until it is finalized, copied over, written again
    below its fill (the accumulators cannot go back), or evicted, oldest claim first, by a group that starts when all
    slots are taken.
    """

    def __init__(self, num_units: int, cache_config: CacheConfig, max_open_groups: int) -> None:
        self.group_size = cache_config.span_tokens
        self.groups_per_unit = cache_config.spans_per_unit
        self.groups_per_span = cache_config.groups_per_span
        self.fill = np.zeros(num_units * cache_config.spans_per_unit, dtype=np.int16)  # tokens written, [P * U / S]
        self.history = 0  # a hash of all that was done to `fill`: states of equal history are equal
        self._open: dict[int, int] = {}  # group row -> open slot, oldest claim first
        self._free_open = list(range(max_open_groups))[::-1]

    def plan(self, slots: np.ndarray) -> WritePlan:
        """Records a write of tokens at slots [N] and says what it means for each group.

        Tokens of several sequences may be interleaved; those of one group ascend without a gap and continue what the
        group holds, or start it again at offset 0, or overwrite from an offset below its fill, which drops what lay
        above. Anything else is an AssertionError and changes nothing.
        """
        slots = np.asarray(slots, dtype=np.int64)
        size, num_tokens = self.group_size, len(slots)
        if num_tokens == 1:
            return self._plan_one(slots)
        rows = slots // size
        assert ((rows >= 0) & (rows < len(self.fill))).all(), "a slot is outside the pool"
        order = np.argsort(rows, kind="stable")
        rows, offsets = rows[order], (slots - rows * size)[order]
        starts = np.flatnonzero(np.diff(rows, prepend=-1))
        groups, before = rows[starts], offsets[starts]
        counts = np.diff(starts, append=num_tokens)
        expected = np.arange(num_tokens) + np.repeat(before - starts, counts)
        assert np.array_equal(offsets, expected), "tokens of a group do not ascend without a gap"
        old_fill = self.fill[groups]
        assert (before <= old_fill).all(), "a write begins beyond what its group holds"
        after = before + counts
        self.fill[groups] = after
        self._remember(slots)

        is_full = counts == size
        full = starts[is_full]
        part = ~is_full
        part_groups, part_counts = groups[part], counts[part]
        columns = np.arange(part_counts.max(initial=0))
        at = np.minimum(starts[part][:, None] + columns, num_tokens - 1)
        finalized = after[part] == size
        self._release_open(*groups[before < old_fill].tolist())
        for group in groups[part & (before == 0)].tolist():
            self._claim_open(group)
        part_open = np.array([self._open.get(group, -1) for group in part_groups.tolist()], dtype=np.int64)
        # Finalized groups give their slots back last: a group that starts in this call must not get one of them
        self._release_open(*part_groups[finalized].tolist())
        return WritePlan(
            full_groups=groups[is_full],
            full_tokens=order[full[:, None] + np.arange(size)],
            part_groups=part_groups,
            part_tokens=np.where(columns < part_counts[:, None], order[at], -1),
            part_before=before[part],
            part_open=part_open,
            finalized=finalized,
        )

    def _plan_one(self, slots: np.ndarray) -> WritePlan:
        """`plan` of one token, a tenth of the time: every layer of every decode step asks."""
        slot = int(slots[0])
        row, offset = divmod(slot, self.group_size)
        assert 0 <= row < len(self.fill), "a slot is outside the pool"
        fill = int(self.fill[row])
        assert offset <= fill, "a write begins beyond what its group holds"
        self.fill[row] = offset + 1
        self._remember(slots)
        if offset < fill:
            self._release_open(row)
        group = np.array([row])
        if self.group_size == 1:
            return WritePlan(group, _ZERO, _NONE, _NO_TOKENS, _NONE, _NONE, _NONE.astype(bool))
        if offset == 0:
            self._claim_open(row)
        is_finalized = offset + 1 == self.group_size
        part_open = np.array([self._open.get(row, -1)])
        if is_finalized:
            self._release_open(row)
        no_tokens = np.zeros((0, self.group_size), np.int64)
        return WritePlan(_NONE, no_tokens, group, _ZERO, np.array([offset]), part_open, np.array([is_finalized]))

    def follow(self, other: "GroupState", slots: np.ndarray) -> None:
        """Becomes as full as another layer's state after a write that both take, for methods without accumulators: a
        hundredth of the time of `plan`."""
        self._remember(np.asarray(slots, np.int64))
        groups = slots // self.group_size
        self.fill[groups] = other.fill[groups]

    def valid(self, groups: np.ndarray) -> np.ndarray:
        """Return whether each group row is full, bool of the same shape: only then may its summary be read. Rows past
        the end of a sequence may hold the last owner's fill; callers mask them by length."""
        return self.fill[groups] == self.group_size

    def copy(self, src_unit: int, dst_unit: int) -> list[tuple[int, int]]:
        """Makes the groups of one unit as full as another's; the caller copies the accumulators of the returned open
        slots [(src, dst)], in order. The two are equal where src lost its slot to dst because no other was left."""
        assert src_unit != dst_unit, "a unit is copied onto itself"
        self.history = hash((self.history, "copy", src_unit, dst_unit))
        src, dst = src_unit * self.groups_per_unit, dst_unit * self.groups_per_unit
        self._release_open(*range(dst, dst + self.groups_per_unit))
        self.fill[dst : dst + self.groups_per_unit] = self.fill[src : src + self.groups_per_unit]
        pairs = []
        for sub in range(self.groups_per_unit):
            src_open = self._open.get(src + sub)
            if src_open is not None:
                pairs.append((src_open, self._claim_open(dst + sub)))
        return pairs

    def grow(self, num_units: int) -> None:
        """Room for `num_units` in all, the new ones empty."""
        more = num_units * self.groups_per_unit - len(self.fill)
        self.fill = np.concatenate([self.fill, np.zeros(more, self.fill.dtype)])

    def mark_written(self, groups: np.ndarray, fill: np.ndarray) -> None:
        """Says that each of groups [N] holds at least its first `fill` [N] tokens, whoever wrote them: those that this
        state knew less of have no accumulators."""
        less = np.flatnonzero(self.fill[groups] < fill)
        if not len(less):
            return
        groups, fill = np.asarray(groups)[less], np.asarray(fill)[less]
        self.history = hash((self.history, "trust", groups.tobytes(), fill.tobytes()))
        self.fill[groups] = fill
        self._release_open(*groups.tolist())

    def reopen(self, groups: np.ndarray) -> None:
        """Full groups [N] whose keys were not known count as one token short: they get no summary."""
        if len(groups):
            self.history = hash((self.history, "reopen", groups.tobytes()))
            self.fill[groups] = self.group_size - 1

    def invalidate(self, slots: np.ndarray) -> np.ndarray:
        """Slots [N] now hold what no summary may speak of: their groups count as written up to the first of them. Those
        that this changes, rows [F]: the groups that a unit's last owner had filled, not those a sequence goes on in."""
        groups, offsets = np.divmod(np.asarray(slots, np.int64), self.group_size)
        found, first = np.unique(groups, return_index=True)  # slots of a group ascend
        beyond = self.fill[found] > offsets[first]
        changed, kept = found[beyond], offsets[first][beyond]
        if len(changed):
            self.history = hash((self.history, "void", changed.tobytes(), kept.tobytes()))
            self.fill[changed] = kept
            self._release_open(*changed.tolist())
        return changed

    def forget(self) -> None:
        """Nothing is known of any group: the pool was, or may have been, written by others."""
        self.history = 0  # as before the first write
        self._release_open(*self._open)
        self.fill[:] = 0

    def _remember(self, slots: np.ndarray) -> None:
        self.history = hash((self.history, slots.tobytes()))

    def _claim_open(self, group: int) -> int:
        self._release_open(group)
        if not self._free_open:
            self._release_open(next(iter(self._open)))
        slot = self._open[group] = self._free_open.pop()
        return slot

    def _release_open(self, *groups: int) -> None:
        for group in groups:
            slot = self._open.pop(group, None)
            if slot is not None:
                self._free_open.append(slot)


def plan_alike(states: Sequence[GroupState], slots: np.ndarray) -> WritePlan:
    """`GroupState.plan` of layers that were written alike, for methods without accumulators: the first one's result."""
    first, *others = states
    plan = first.plan(slots)
    for state in others:
        state.follow(first, slots)
    return plan
