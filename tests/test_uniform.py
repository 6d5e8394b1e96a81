"""`random`, the floor of every plot: uniform, of its seed alone, equal everywhere, and as bad as chance."""

import numpy as np
import pytest

from eps_core import reference
from eps_core.config.bytes import scoring_bytes
from eps_core.config.cache import METHODS, CacheSpec
from eps_core.config.eps import EpsConfig
from eps_core.errors import ConfigError
from eps_core.kv_cache.step_plan import StepPlan
from eps_core.summaries import uniform

LENGTHS = (1003, 640)


def config_of(method: str = "random", seed: int = 0, **settings: object) -> EpsConfig:
    return EpsConfig.of(method=method, seed=seed, group_size=4, num_sink_tokens=0, num_recent_tokens=0, **settings)


def scored(backend, device: str, config: EpsConfig, layer: int = 0, lengths=LENGTHS, k=None, q=None, turned=False):
    """(scores, where) of two sequences whose pages lie in order, or `turned` in the other."""
    size = config.cache_config.unit_tokens
    pages = [-(-length // size) for length in lengths]
    spec = CacheSpec(2, 3, 8, sum(pages) + 1)
    cache = backend.new_cache(spec, config.cache_config, device)
    table = np.full((2, max(pages)), -1, np.int32)
    table[0, : pages[0]], table[1, : pages[1]] = np.arange(pages[0]), pages[0] + np.arange(pages[1])
    if turned:
        table = np.where(table < 0, -1, sum(pages) - table)
    rng = np.random.default_rng(0)
    k = rng.normal(size=(sum(lengths), 3, 8)) if k is None else k
    q = rng.normal(size=(2, 6, 8)) if q is None else q
    keys = backend.from_numpy(np.ascontiguousarray(k, np.float32), "float32", device)
    slots = [table[b, np.arange(n) // size] * size + np.arange(n) % size for b, n in enumerate(lengths)]
    cache = backend.write_kv(cache, layer, keys, keys, np.concatenate(slots).astype(np.int64))
    plan = StepPlan.of(config, table, np.array(lengths))
    queries = backend.from_numpy(np.ascontiguousarray(q, np.float32), "float32", device)
    return backend.score(cache, layer, queries, plan), plan


def drawn(backend, device: str, config: EpsConfig, **settings) -> np.ndarray:
    """Estimates [2, 3, 160] of the groups that both sequences have."""
    return backend.to_numpy(scored(backend, device, config, **settings)[0].estimate)[:, :, :160]


def test_it_is_the_oracles_to_the_last_bit_and_so_are_the_groups(target) -> None:
    backend, device = target
    config = config_of(seed=5)
    for layer in (0, 1):
        mine, plan = scored(backend, device, config, layer)
        theirs, _ = scored(reference, "cpu", config, layer)
        assert np.array_equal(backend.to_numpy(mine.estimate), theirs.estimate)
        assert mine.lower is None and mine.upper is None and mine.slack is None
        chosen, wanted = backend.select(mine, plan), reference.select(theirs, plan)
        assert np.array_equal(backend.to_numpy(chosen.groups), wanted.groups)


def test_only_seed_layer_head_length_and_place_count(target) -> None:
    backend, device = target
    base, rng = drawn(backend, device, config_of()), np.random.default_rng(3)
    same = {
        "again": drawn(backend, device, config_of()),
        "other keys": drawn(backend, device, config_of(), k=rng.normal(size=(sum(LENGTHS), 3, 8)) * 9),
        "other queries": drawn(backend, device, config_of(), q=rng.normal(size=(2, 6, 8)) * 9),
        "other pages": drawn(backend, device, config_of(), turned=True),
    }
    for what, found in same.items():
        assert np.array_equal(found, base), what
    other = {
        "seed": drawn(backend, device, config_of(seed=1)),
        "layer": drawn(backend, device, config_of(), layer=1),
        "kv head": np.roll(base, 1, axis=1),
        "length": drawn(backend, device, config_of(), lengths=(1007, 644)),
        "sequence": base[::-1],
    }
    for what, found in other.items():
        both = np.isfinite(base) & np.isfinite(found)
        assert both.mean() > 0.99
        assert (found == base)[both].mean() < 0.01, what
        assert abs(np.corrcoef(found[both], base[both])[0, 1]) < 0.15, what


def test_it_is_uniform_in_every_direction() -> None:
    cache_config = config_of().cache_config
    phi = uniform.constants(cache_config, 0, 4, 8)["stream"]
    draws = np.array(
        [
            [
                uniform.score(
                    cache_config, {"stream": one, "groups": np.arange(256), "length": length}, {}, np.zeros(8)
                )[0]
                for length in range(4096, 4160)
            ]
            for one in phi
        ]
    )  # [heads, lengths, groups]
    assert draws.min() >= 0 and draws.max() < 1 and len(np.unique(draws)) > 0.99 * draws.size
    counts = np.histogram(draws, 64, (0, 1))[0]
    expected = draws.size / 64
    assert ((counts - expected) ** 2 / expected).sum() < 110  # 63 degrees of freedom: p < 0.0003
    for axis in range(3):  # neighbours know nothing of each other
        rest = draws.shape[axis] - 1
        first, second = np.take(draws, range(rest), axis), np.take(draws, range(1, rest + 1), axis)
        assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 4 / np.sqrt(first.size), axis
    # the best 32 of 256, step by step: every group has its turn, as often as chance has it
    best = np.argsort(-draws, axis=2)[:, :, :32]
    turns = np.bincount(best.ravel(), minlength=256) / (4 * 64)
    assert abs(turns.mean() - 1 / 8) < 1e-9 and turns.min() > 0.04 and turns.max() < 0.24


def test_its_recall_is_the_floor(target) -> None:
    """Of the groups that hold most mass it finds the share that it visits; a method that looks at keys finds more."""
    backend, device = target
    recalls = {}
    for method in ("random", *METHODS[1:]):
        config = config_of(method, budget=0.25, **({"rescore": 0.0, "combine": "max"} if method == "rq" else {}))
        found = []
        for seed in range(6):
            rng = np.random.default_rng(seed)
            k, q = rng.normal(size=(sum(LENGTHS), 3, 8)) * 1.5, rng.normal(size=(2, 6, 8)) * 1.5
            config = config.replace(seed=seed)
            truth = drawn(reference, "cpu", config_of("oracle"), k=k, q=q)
            guess = drawn(backend, device, config, k=k, q=q)
            top, mine = (np.argsort(-one, axis=2)[:, :, :40] for one in (truth, guess))
            found.append([np.isin(mine[b, h], top[b, h]).mean() for b in range(2) for h in range(3)])
        recalls[method] = float(np.mean(found))
    assert abs(recalls.pop("random") - 0.25) < 4 * np.sqrt(0.25 * 0.75 / (40 * 36))
    assert min(recalls.values()) > 0.3, recalls


def test_it_stores_and_reads_nothing_and_certifies_nothing(target) -> None:
    backend, device = target
    config = config_of()
    cache = backend.new_cache(CacheSpec(2, 3, 8, 9), config.cache_config, device)
    assert cache.summaries == [{}, {}] and scoring_bytes(config, 8, LENGTHS) == 0
    assert "random" not in METHODS and not config.cache_config.has_bounds
    with pytest.raises(ConfigError, match="looks at no key"):
        config_of(strict=True)
