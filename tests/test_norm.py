"""`norm`, the required scalar fallback: what it says, that its bounds hold and are no looser than they must be."""

import numpy as np

from eps_core.config.bytes import summary_bytes, summary_group_bytes
from eps_core.config.cache import CacheSpec
from eps_core.config.eps import EpsConfig
from eps_core.kv_cache.step_plan import StepPlan


def test_four_bytes_of_coarse_groups() -> None:
    config = EpsConfig.of(method="norm")
    assert config.cache_config.S == 128 and config.cache_config.has_bounds
    assert [summary_group_bytes(config.cache_config, head_dim) for head_dim in (1, 33, 128)] == [4, 4, 4]
    assert summary_bytes(config.cache_config, 32, 32, 128, 65536) == 2 << 20  # 2 MiB of the allowed 150


def filled(target, k: np.ndarray, q: np.ndarray):
    """Scores of one sequence of keys k [T, D] in groups of 16, for one query q [D] whose scaled form is `q`."""
    backend, device = target
    config = EpsConfig.of(method="norm", group_size=16, num_sink_tokens=0, num_recent_tokens=0)
    cache = backend.new_cache(CacheSpec(1, 1, k.shape[1], len(k) // 16), config.cache_config, device)
    keys = backend.from_numpy(np.ascontiguousarray(k[:, None], np.float32), "float32", device)
    cache = backend.write_kv(cache, 0, keys, keys, np.arange(len(k)))
    table = np.arange(len(k) // 16, dtype=np.int32)[None]
    query = backend.from_numpy((q * np.sqrt(len(q)))[None, None].astype(np.float32), "float32", device)
    scores = backend.score(cache, 0, query, StepPlan.of(config, table, np.array([len(k)])))
    return [backend.to_numpy(x).astype(np.float64).reshape(-1) for x in (scores.estimate, scores.lower, scores.upper)]


def test_the_estimate_is_a_norm_that_no_direction_changes(target) -> None:
    rng = np.random.default_rng(0)
    k = rng.normal(size=(20 * 16, 24)) * rng.exponential(size=(20, 1)).repeat(16, axis=0)
    groups, a = k.reshape(20, 16, 24), rng.normal(size=24)
    estimate = filled(target, k, a)[0]
    wanted = np.linalg.norm(a) * np.linalg.norm(groups, axis=(1, 2))
    assert (estimate >= wanted * (1 - 1e-6)).all() and np.allclose(estimate, wanted, rtol=3e-3)
    assert (estimate >= np.linalg.norm(groups @ a, axis=1) * (1 - 1e-6)).all()  # |K a|, of which it is one
    turned = np.linalg.norm(a) * np.eye(24)[3]
    assert np.allclose(filled(target, k, turned)[0], estimate, rtol=1e-5)


def test_the_bounds_are_attained(target) -> None:
    """By equal keys along the query, and against it: nothing tighter follows from the two numbers."""
    a = np.random.default_rng(0).normal(size=24)
    k = np.concatenate([np.tile(sign * a * size, (16, 1)) for size in (0.5, 1, 2) for sign in (1, -1)])
    masses = np.log(16) + np.array([sign * size * (a @ a) for size in (0.5, 1, 2) for sign in (1, -1)])
    _, lower, upper = filled(target, k, a)
    assert (lower <= masses).all() and (masses <= upper).all()
    assert (upper[::2] - masses[::2] < 2e-3 * (a @ a) * 2 + 1e-3).all()
    assert (masses[1::2] - lower[1::2] < 2e-3 * (a @ a) * 2 + 1e-3).all()
