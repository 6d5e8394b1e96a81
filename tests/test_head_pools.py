"""Pools in which every kv head holds its own tokens, held against plain lists of rows through random programs."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from eps_core.errors import ConfigError
from eps_core.kv_cache.heads import HeadPools, HeadSequence, new_order


class Shadow:
    """The rows of every head as plain lists."""

    def __init__(self, pools: HeadPools, units: int) -> None:
        self.pools, self.memory = pools, [np.full(units * pools.unit_tokens, -1) for _ in pools.pools]
        self.rows: dict[HeadSequence, list[list[list[int]]]] = {}

    def check(self) -> None:
        for pool in self.pools.pools:
            pool.check()
        for sequence, layers in self.rows.items():
            for layer, heads in enumerate(layers):
                for head, rows in enumerate(heads):
                    one = sequence.heads[layer][head]
                    size = self.pools.unit_tokens
                    at = np.arange(one.length)
                    slots = np.array(one.table, np.int64)[at // size] * size + at % size
                    assert self.memory[layer][slots].tolist() == rows
                    assert len(one.table) == -(-one.length // size)


def program(seed: int, compact: Any = HeadPools.compact) -> None:
    """A random program of appends, compactions, preemptions and frees on small pools."""
    rng, layers, heads, units, size = np.random.default_rng(seed), 2, 2, 40, 4
    pools = HeadPools(layers, heads, units, size)
    shadow, written = Shadow(pools, units), 0
    live: list[HeadSequence] = []
    for _ in range(60):
        act = rng.choice(["open", "append", "append", "compact", "compact", "preempt", "free"])
        if act == "open" or not live:
            one = pools.open()
            live.append(one)
            shadow.rows[one] = [[[] for _ in range(heads)] for _ in range(layers)]
            continue
        one = live[int(rng.integers(len(live)))]
        try:
            if act == "append":
                slots, _ = pools.append(one, [0] * int(rng.integers(1, 9)))
                for layer, head in np.ndindex(layers, heads):
                    fresh = list(range(written, written + len(slots)))
                    written += len(slots)
                    shadow.memory[layer][slots[:, layer, head]] = fresh
                    shadow.rows[one][layer][head] += fresh
            elif act == "compact" and one.length:
                layer, head = int(rng.integers(layers)), int(rng.integers(heads))
                rows = np.array(shadow.rows[one][layer][head])
                keep = np.flatnonzero(rng.random(len(rows)) < rng.random())
                if rng.random() < 0.3:  # nothing moves
                    keep = np.arange(rng.integers(len(rows) + 1))
                if not len(keep):
                    continue
                how = rng.choice(["repack", "fill"])
                before = len(one.heads[layer][head].table)
                done = compact(pools, one, layer, head, keep, how)
                assert sorted(rows[done.order].tolist()) == sorted(rows[keep].tolist())
                moved = (keep != np.arange(len(keep))).sum() if how == "repack" else (keep >= len(keep)).sum()
                assert done.rows_moved == moved and done.units_freed == before - -(-len(keep) // size)
                shadow.memory[layer][done.slots] = shadow.memory[layer][done.sources]
                shadow.rows[one][layer][head] = rows[done.order].tolist()
            elif act == "preempt" and one.length:  # its pages go to others; then what it kept comes back, in order
                rows = [[sorted(held) for held in layer] for layer in shadow.rows.pop(one)]
                positions = [[np.sort(held) for held in layer] for layer in one.positions]
                pools.free(one)
                live.remove(one)
                again = pools.open()
                slots_of = pools.fill(again, one.length, positions)
                live.append(again)
                shadow.rows[again] = rows
                for layer, head in np.ndindex(layers, heads):
                    shadow.memory[layer][slots_of[layer][head]] = rows[layer][head]
            elif act == "free":
                pools.free(one)
                live.remove(one)
                del shadow.rows[one]
        except ConfigError:  # the pool is full, and nothing has changed
            pass
        shadow.check()
    for one in live:
        pools.free(one)
    assert all(pool.num_free == units for pool in pools.pools)


@pytest.mark.parametrize("seed", range(30))
def test_random_programs_leave_every_row_where_it_belongs(seed: int) -> None:
    program(seed)


def test_a_compaction_that_moves_nothing_is_caught() -> None:
    def broken(*given: Any) -> Any:
        done = HeadPools.compact(*given)
        return replace(done, sources=done.slots)

    with pytest.raises(AssertionError):
        for seed in range(30):
            program(seed, broken)


def test_filling_holes_moves_three_rows_where_repacking_moves_eighteen() -> None:
    keep = np.setdiff1d(np.arange(24), [3, 8, 15])
    moved = {how: int((new_order(keep, how) != np.arange(21)).sum()) for how in ("repack", "fill")}
    assert moved == {"repack": 18, "fill": 3}
    np.testing.assert_array_equal(np.sort(new_order(keep, "fill")), keep)


def test_a_full_pool_says_so_and_changes_nothing() -> None:
    pools = HeadPools(2, 2, 3, 4)
    one = pools.open()
    pools.append(one, [0] * 4)
    before = [pool.num_free for pool in pools.pools]
    with pytest.raises(ConfigError, match="layer 0 of a sequence of 4 tokens needs 2 more units of 4 tokens, 1 of"):
        pools.append(one, [0])
    assert [pool.num_free for pool in pools.pools] == before and one.length == 4
    for pool in pools.pools:
        pool.check()
