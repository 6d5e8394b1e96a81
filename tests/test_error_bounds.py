"""What is claimed to hold for every query, in every backend: bounds, error bounds, strict mode.

The checker itself is tested too: a summary that is deliberately broken must be found out.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from conftest import TARGETS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_conformance import Case, FilledCase

from eps_core.backend.ops import Ops
from eps_core.config.cache import CacheConfig, CacheSpec
from eps_core.config.eps import EpsConfig
from eps_core.config.formats import fault
from eps_core.decode.session import Session
from eps_core.errors import ConfigError
from eps_core.evaluation.capture import record, text_tokens
from eps_core.kv_cache.step_plan import StepPlan
from eps_core.load import load_backend
from eps_core.summaries.table import names
from experiments.bounds.bounds import (
    BOUNDED_ARMS,
    CACHE_DTYPES,
    KEY_CODE_ARMS,
    Tally,
    Trial,
    check_bounds,
    check_sparse,
    fill,
    hard_queries,
    make_keys,
    run_bounds,
    run_capture,
    run_sparse,
    variant_name,
)
from experiments.bounds.truth import Filled

EPSILONS = (1.0, 0.5, 0.1, 1e-2, 1e-3, 0.0)  # falling
WITHOUT_BOUNDS = names(lambda one: one.no_bounds)


def is_oracle(backend) -> bool:
    return backend.__name__ == "eps_core.reference"


def trial(backend, variant: dict, dtype: str, size: int, head_dim: int, seed: int) -> Trial:
    """The numpy backend loops group by group: less of it."""
    units, repeat, sequences = (8, 4, 2) if is_oracle(backend) else (48, 32, 4)
    return Trial(variant, dtype, size, head_dim, units, repeat, sequences, seed)


# --------------------------------------------------------------------------------------------------------------- bounds


@pytest.mark.parametrize("variant", BOUNDED_ARMS, ids=variant_name)
def test_bounds_hold_for_hard_keys_and_queries(target, variant):
    """50,000 (query head, group) pairs a method, and up, in each array backend."""
    seed = BOUNDED_ARMS.index(variant)
    for i, (size, head_dim) in enumerate(((1, 16), (5, 20), (16, 64), (128, 64))):
        dtype = CACHE_DTYPES[(i + seed) % 3]
        tally = run_bounds(*target, trial(target[0], variant, dtype, size, head_dim, 10 * seed + i))["bounds"]
        assert tally.checks > 50 and tally.violations == 0, (size, head_dim, dtype, tally)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    variant=st.sampled_from((*BOUNDED_ARMS, *KEY_CODE_ARMS)),
    dtype=st.sampled_from(CACHE_DTYPES),
    bits=st.sampled_from([(16, 16), (8, 8), (4, 8), ("nvfp4", "fp8")]),
    size=st.sampled_from([1, 2, 3, 4, 8, 16, 32, 64, 128]),
    head_dim=st.sampled_from([1, 4, 16, 20, 33, 64, 80]),
    kv_heads=st.sampled_from([1, 2, 3]),
    seed=st.integers(0, 2**32 - 1),
)
def test_everything_claimed_holds(target, variant, dtype, bits, size, head_dim, kv_heads, seed):
    bits = bits if all(fault(name, head_dim) is None for name in bits) else (8, "fp8")
    drawn = Trial(variant, dtype, size, head_dim, 8, 4, 2, seed, kv_heads, bits)
    bounds = run_bounds(*target, drawn) if drawn.config().cache_config.own_bounds else {}
    for tally in (bounds | run_sparse(*target, drawn)).values():
        assert tally.checks > 0 and tally.violations == 0, tally


@pytest.mark.parametrize("variant", KEY_CODE_ARMS, ids=variant_name)
def test_codes_of_single_keys_certify_and_bind_strict_mode(target, variant):
    """Permuted pages, ragged batches, writes in pieces, head modes; and something is left unread."""
    total = Tally()
    for seed in range(6):
        size, dtype = (1, 2, 4, 16)[seed % 4], CACHE_DTYPES[seed % 3]
        repeat = 2 if target[0].__name__ == "eps_core.reference" else 8
        for kind, tally in run_sparse(*target, Trial(variant, dtype, size, 32, 8, repeat, 3, seed)).items():
            assert tally.checks > 0 and tally.violations == 0, (seed, kind, tally)
            if kind == "share":
                total.add(tally)
    assert np.isfinite(total.gap) and total.vacuous < total.checks


def test_summaries_in_other_units_are_refused(target, monkeypatch):
    """A nested summary of other pool units would read other keys' codes."""
    others = EpsConfig.of(method="rq", rq_bounds=True, block_size=128).cache_config
    monkeypatch.setattr(CacheConfig, "bound_store", property(lambda self: others))
    with pytest.raises(ValueError, match="in units of 128 tokens"):
        target[0].new_cache(CacheSpec(1, 1, 16, 4), EpsConfig.of(method="box", bound_bits=8).cache_config, target[1])


def test_keys_whose_float32_eigenvalues_do_not_converge(target):
    """LAPACK's float32 eigensolver gives up on one of these groups: four channels, the others exactly 0."""
    variant = {"method": "moments", "dim": 1}
    tally = run_bounds(*target, Trial(variant, "float16", 64, 64, 96, 4, 8, 72124473))["bounds"]
    assert tally.checks > 500 and tally.violations == 0


# ----------------------------------------------------------------------------------------------- error bound and strict


@dataclass
class Scene:
    """Three ragged sequences, their queries, and groups tight enough for error bounds to bite."""

    filled: Filled
    q: np.ndarray
    table: np.ndarray
    lengths: np.ndarray


def scene(target, repeat: int = 2, kv_heads: int = 2, spread: float = 0.1, **config: Any) -> Scene:
    rng = np.random.default_rng(repeat)
    eps = EpsConfig.of(**{"group_size": 4, "num_sink_tokens": 4, "num_recent_tokens": 8, **config})
    k = rng.normal(size=(80, 1, kv_heads, 16)) + spread * rng.normal(size=(80, 4, kv_heads, 16))
    k = k.reshape(-1, kv_heads, 16).astype(np.float32)
    v = rng.normal(size=k.shape).astype(np.float32)
    units = 320 // eps.cache_config.unit_tokens
    table = np.stack([rng.permutation(units) for _ in range(3)])
    q = rng.normal(size=(3, kv_heads * repeat, 16)) * rng.choice([0.5, 3, 8], (3, kv_heads * repeat, 1))
    return Scene(fill(*target, eps, "float32", k, v), q.astype(np.float32), table, np.array([320, 251, 37]))


def extended(one: Scene, config: EpsConfig) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(mass that is bounded before extension, groups that it adds, all groups after it), each [B, Hkv]."""
    backend, cache = one.filled.backend, one.filled.cache
    q = backend.from_numpy(one.q, "float32", one.filled.device)
    plan = StepPlan.of(config, one.table, one.lengths)
    scores = backend.score(cache, 0, q, plan)
    selected = backend.select(scores, plan)
    state = backend.attend(cache, 0, q, plan, selected)
    before = backend.bound_error(cache, 0, scores, selected, *state)
    extra, whole = backend.extend_selection(config.selection_config, scores, selected, state[1])
    return tuple(backend.to_numpy(x) for x in (before.mass, extra.counts, whole.counts))


def strict(one: Scene, epsilon: float, **settings: Any) -> EpsConfig:
    return one.filled.config.replace(strict=True, epsilon=epsilon, **settings)


def test_a_certified_share_near_one_is_not_rounded_down(target):
    """Between the largest float32 below 1 and 1 the nearest number may be below the true share."""
    variant = {"method": "rq", "rq_bounds": True, "mean_tokens": 64}
    repeat, sequences = (4, 2) if is_oracle(target[0]) else (64, 8)
    drawn = Trial(variant, "float16", 128, 80, 96, repeat, sequences, 835202398)
    assert run_sparse(*target, drawn)["share"].violations == 0


@pytest.mark.parametrize("scope", ["kv-head", "union"])
def test_smaller_epsilon_never_visits_fewer(target, scope):
    for variant in ({"method": "ball"}, {"method": "moments", "dim": 2}):
        one = scene(target, **variant)
        selected = [extended(one, strict(one, epsilon, scope=scope, budget=0.1))[2] for epsilon in EPSILONS]
        assert all((more >= fewer).all() for fewer, more in pairwise(selected))
        assert selected[-1].sum() > selected[2].sum() > selected[0].sum()


def test_escalation_adds_nothing_where_the_certificate_holds(target):
    one = scene(target, repeat=2, spread=0.02, method="ball")
    seen = set()
    for epsilon in (0.9, 0.5, 0.2, 0.05):
        mass, added, _ = extended(one, strict(one, epsilon, budget=0.3))
        holds = mass * 1.02 <= epsilon  # extension pays the float32 margin twice
        assert (added[holds] == 0).all() and (added[mass > epsilon] > 0).all()
        seen |= {bool(x) for x in holds.ravel()}
    assert seen == {True, False}
    # under union nothing is added where it holds for every kv head, everything wanted where it does not
    assert (extended(one, strict(one, 1.0, scope="union"))[1] == 0).all()


@pytest.mark.parametrize("method", WITHOUT_BOUNDS)
def test_a_method_without_bounds_is_not_strict(target, method):
    backend, device = target
    with pytest.raises(ConfigError, match="eps-strict needs bounds"):
        EpsConfig.of(method=method, strict=True)
    one = FilledCase(backend, device, Case((150,), EpsConfig.of(method=method, group_size=4)))
    scores = backend.score(one.cache, 0, one.native, one.plan)
    selected = backend.select(scores, one.plan)
    _, lse = backend.attend(one.cache, 0, one.native, one.plan, selected)
    with pytest.raises(ValueError, match="has no bounds"):
        backend.extend_selection(one.case.config.selection_config, scores, selected, lse)


@pytest.mark.parametrize("policy", ["topk", "threshold"])
def test_strict_refuses_a_cap(policy):
    """Threshold cannot do without top_pages, so it cannot be strict."""
    with pytest.raises(ConfigError, match="eps-strict"):
        EpsConfig.of(method="ball", policy=policy, top_pages=8, strict=True)


# ------------------------------------------------------------------------------------------------- captured q, k and v


@pytest.fixture(scope="module")
def captured() -> dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """layer -> q [8, Hq, D], k, v [2056, Hkv, D] of the demo model's decode of held-out text."""
    name, device, _ = max(TARGETS, key=lambda target: ("numpy", "mlx", "cuda").index(target[0]))
    session = Session.open(None, name, device, "float32", "float32")
    tokens = text_tokens(session, None, 2056).tokens
    recording = record(session, tokens, 2048, range(session.spec.num_layers), EpsConfig.of())
    assert load_backend(name) is recording.backend
    return {layer: (q, *recording.keys_values(layer)) for layer, q in recording.q.items()}


@pytest.mark.parametrize("variant", BOUNDED_ARMS, ids=variant_name)
def test_everything_claimed_holds_on_captured_data(target, captured, variant):
    seed = BOUNDED_ARMS.index(variant)
    for i, size in enumerate((16, 64) if is_oracle(target[0]) else (1, 8, 64)):
        layer = (seed + i) % len(captured)
        drawn = Trial(variant, CACHE_DTYPES[(seed + i) % 3], size, 0, 0, 0, 2, seed)
        for kind, tally in run_capture(*target, drawn, *captured[layer]).items():
            assert tally.violations == 0, (layer, size, kind, tally)


# ------------------------------------------------------------------------------------------------ tests of the checker

# (variant, stored field, what is done to it, kinds of keys): each makes some bound too tight or points it elsewhere
UNITS = {"method": "rq", "rq_bounds": True}
BROKEN = {
    "ball radius halved": ({"method": "ball"}, "radius", lambda x: x * 0.5, "gauss"),
    "ball scale doubled": ({"method": "ball"}, "mean_scale", lambda x: x * 2, "shifted"),
    "ball error zeroed": ({"method": "ball"}, "error", lambda x: x * 0, "equal"),
    "box hi one code less": ({"method": "box"}, "hi", lambda x: x - 1, "equal"),
    "box lo one code more": ({"method": "box"}, "lo", lambda x: x + 1, "equal"),
    "box scale doubled": ({"method": "box"}, "scale", lambda x: x * 2, "shifted"),
    "moments rho zeroed": ({"method": "moments", "dim": 1}, "rho", lambda x: x * 0, "gauss"),
    "moments gain zeroed": ({"method": "moments", "dim": 1}, "gain", lambda x: x * 0, "rank one"),
    "moments radius halved": ({"method": "moments", "dim": 4}, "radius", lambda x: x * 0.5, "outlier"),
    "norm largest halved": ({"method": "norm"}, "largest", lambda x: x * 0.5, "gauss"),
    "1pc rest zeroed": ({"method": "1pc"}, "rest", lambda x: x * 0, "gauss"),
    "1pc lam halved": ({"method": "1pc"}, "lam", lambda x: x * 0.5, "rank one"),
    "fd delta zeroed": ({"method": "fd"}, "delta", lambda x: x * 0, "gauss"),
    "fd row scale halved": ({"method": "fd"}, "row_scale", lambda x: x * 0.5, "rank one"),
    "keys radius halved": ({"method": "keys"}, "radius", lambda x: x * 0.5, "gauss"),
    "keys scale doubled": ({"method": "keys"}, "scale", lambda x: x * 2, "gauss"),
    "keys error zeroed": ({"method": "keys"}, "error", lambda x: x * 0, "equal"),
    "units error zeroed": ({**UNITS, "mean_tokens": 32}, "error", lambda x: x * 0, "gauss"),
    "units radius halved": ({**UNITS, "mean_tokens": 64}, "radius", lambda x: x * 0.5, "gauss"),
    "units mean scale doubled": ({**UNITS, "mean_tokens": 32}, "mean_scale", lambda x: x * 2, "shifted"),
    "units scale of the next byte": ({**UNITS, "mean_tokens": 64}, "scale", lambda x: x + 8, "gauss"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_checker_finds_broken_summaries(target, name):
    variant, field, damage, kind = BROKEN[name]
    rng = np.random.default_rng(len(name))
    config = EpsConfig.of(**variant, group_size=4)
    k = make_keys(kind, 2 * 64, 4, 32, rng).reshape(2, 256, 32).swapaxes(0, 1)
    filled = fill(*target, config, "float32", np.ascontiguousarray(k), np.ascontiguousarray(k))
    units = np.arange(256 // config.cache_config.unit_tokens).repeat(4)
    q, table = hard_queries(filled, units, 8, rng), units[:, None]
    assert check_bounds(filled, q, table).violations == 0
    stored = filled.cache.summaries[0]
    stored[field] = damage(stored[field])
    assert check_bounds(filled, q, table).violations > 0


def test_checker_finds_a_missing_float32_slack(target, monkeypatch):
    """Keys that are exactly the centroid of key codes: nothing is rounded but in the float32 of scoring, which only the
    slack covers. The oracle scores in float64 and needs none."""
    backend, _ = target
    rng = np.random.default_rng(0)
    key = rng.normal(size=(1, 1, 128)).astype(np.float16).astype(np.float32)
    k = np.repeat(key, 256, axis=0)
    config = EpsConfig.of(method="keys", group_size=4)
    filled = fill(*target, config, "float32", k, k)
    q = (rng.normal(size=(16, 8, 128)) * 1e5).astype(np.float32)
    table = np.arange(16)[:, None]
    assert check_bounds(filled, q, table).violations == 0
    if is_oracle(backend):
        return
    monkeypatch.setattr(Ops, "logit_slack", lambda ops, a, norm: norm * 0)
    stored = filled.cache.summaries[0]
    stored["radius"] = stored["radius"] * 0
    assert check_bounds(filled, q, table).violations > 0


def test_checker_finds_a_certificate_that_promises_too_much(target):
    one = scene(target, method="ball", spread=0.5)
    config = strict(one, 0.1, budget=0.2)
    right = check_sparse(one.filled, config, one.q, one.table, one.lengths)
    assert all(tally.violations == 0 for tally in right.values())
    stored = one.filled.cache.summaries[0]
    stored["radius"], stored["mean_scale"] = stored["radius"] * 0, stored["mean_scale"] * 0
    broken = check_sparse(one.filled, config, one.q, one.table, one.lengths)
    assert all(broken[kind].violations > 0 for kind in ("share", "error", "strict"))
