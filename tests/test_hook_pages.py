"""A long random life of the pages behind an engine's cache, against the raw keys that it was given."""

from typing import Any

import numpy as np
import pytest
import torch

from eps_core.config.cache import CacheSpec
from eps_core.config.eps import EpsConfig
from eps_core.integrations.paged import Paged
from eps_core.load import load_backend

STEPS, CHECK_EVERY = 10_000, 500
LAYERS, HEADS, DIM = 2, 2, 8
STORES = {
    "rq": EpsConfig.of("rq", mean_tokens=32, block_size=16).cache_config,
    "box": EpsConfig.of("box", group_size=4).cache_config,
    "jl": EpsConfig.of("jl", group_size=32, dim=4).cache_config,  # follows its partial groups
}


class Shadow:
    """Sequences in pages beside their own keys and values, kept whole."""

    def __init__(self, cache_config: Any, kernels: str, seed: int) -> None:
        self.backend = load_backend("cuda")
        # fewer partial groups than sequences, and a first pool that is soon too small
        self.paged = Paged(self.backend, CacheSpec(LAYERS, HEADS, DIM, 4, "float32", 3), cache_config, "cpu", kernels)
        self.kernels, self.rng = kernels, np.random.default_rng(seed)
        self.live: list[tuple[Any, np.ndarray]] = []  # sequence, K and V [2, L, T, H, D]
        self.most_units = self.acts = 0

    def append(self, places: list[int], counts: list[int]) -> None:
        slots = self.paged.append([self.live[place][0] for place in places], counts)
        new = self.rng.normal(size=(2, LAYERS, sum(counts), HEADS, DIM)).astype(np.float32)
        for layer in range(LAYERS):
            self.paged.write(layer, *(torch.from_numpy(x[layer]) for x in new), slots)
        ends = np.cumsum([0, *counts])
        for place, start, end in zip(places, ends, ends[1:], strict=False):
            sequence, held = self.live[place]
            self.live[place] = sequence, np.concatenate([held, new[:, :, start:end]], axis=2)

    def step(self) -> None:
        self.acts += 1
        act = self.rng.choice(["token", "token", "token", "some", "fork", "reorder", "crop", "free", "open"])
        if not self.live or (act == "open" and len(self.live) < 5):
            self.live.append((self.paged.open(), np.zeros((2, LAYERS, 0, HEADS, DIM), np.float32)))
        place = int(self.rng.integers(len(self.live)))
        sequence, held = self.live[place]
        if act == "token":  # a decode step of some rows
            rows = [i for i in range(len(self.live)) if self.rng.random() < 0.8]
            self.append(rows, [1] * len(rows))
        elif act == "some" and held.shape[2] < 400:
            self.append([place], [int(self.rng.integers(2, 60))])
        elif act == "fork" and len(self.live) < 6:
            self.live.append((self.paged.pool.fork(sequence), held))
        elif act == "reorder":  # beams
            chosen = self.rng.integers(len(self.live), size=len(self.live)).tolist()
            before = self.live
            self.live = [(self.paged.pool.fork(before[i][0]), before[i][1]) for i in chosen]
            for old, _ in before:
                self.paged.pool.free(old)
        elif act == "crop":
            length = max(held.shape[2] - int(self.rng.integers(12)), 0)
            self.paged.pool.truncate(sequence, length)
            self.live[place] = sequence, held[:, :, :length]
        elif (act == "free" and len(self.live) > 2) or held.shape[2] > 600:
            self.paged.pool.free(sequence)
            del self.live[place]
        self.most_units = max(self.most_units, self.paged.pool.num_units)

    def check(self) -> None:
        """Pages are the raw keys and values; every valid summary is the one that they would be given alone."""
        self.paged.pool.check()
        cache = self.paged.cache
        cache_config, per_unit, size = (
            cache.cache_config,
            cache.cache_config.spans_per_unit,
            cache.cache_config.span_tokens,
        )
        for sequence, held in self.live:
            length = held.shape[2]
            assert sequence.length == length
            if not length:
                continue
            fresh = Paged(
                self.backend, CacheSpec(LAYERS, HEADS, DIM, 1, "float32", 3), cache_config, "cpu", self.kernels
            )
            alone = fresh.open()
            slots = fresh.append([alone], [length])
            for layer in range(LAYERS):
                fresh.write(layer, *(torch.from_numpy(np.ascontiguousarray(x[layer])) for x in held), slots)
                for read, raw in zip(self.paged.read(layer, sequence, length), held, strict=True):
                    np.testing.assert_array_equal(read.numpy(), raw[layer])
                for name in cache.summaries[layer]:
                    ours, theirs = (
                        one.cache.summaries[layer][name][list(table)].transpose(1, 2).flatten(0, 1)[: length // size]
                        for one, table in ((self.paged, sequence.table), (fresh, alone.table))
                    )
                    assert ours.shape[0] == length // size
                    if cache_config.method_spec.follows:  # sums in another order
                        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
                    else:
                        assert torch.equal(ours, theirs), (name, layer)
            plan = self.paged.plan(EpsConfig.over(cache_config), [sequence])
            groups = np.array(sequence.table)[:, None] * per_unit + np.arange(per_unit)
            full = groups.reshape(-1)[: length // size]
            for state in cache.state:
                assert state.valid(full).all()
            assert plan.lengths.tolist() == [length]


@pytest.mark.parametrize("kernels", ["arrays", "numba"])
@pytest.mark.parametrize("name", STORES)
def test_pages_are_the_raw_keys_through_a_long_life(name: str, kernels: str) -> None:
    steps = STEPS if (name, kernels) == ("rq", "arrays") else 1000
    one = Shadow(STORES[name], kernels, seed=len(name))
    for step in range(steps):
        one.step()
        if step % CHECK_EVERY == 0:
            one.check()
    one.check()
    assert one.acts == steps and one.most_units > 4
    for sequence, _ in one.live:
        one.paged.pool.free(sequence)
    pool = one.paged.pool
    pool.check()
    assert not pool.num_live and pool.num_free == pool.num_units
