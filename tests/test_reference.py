"""The oracle's own truths: bounds hold, estimators have the stated expectation, theorems of the sources."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eps_core.config.cache import CacheConfig
from eps_core.config.eps import EpsConfig
from eps_core.reference import formulas, selection
from eps_core.summaries import base, fd, rq
from eps_core.summaries import keys as key_codes
from eps_core.summaries.base import bennett
from eps_core.summaries.jl import jl_projection
from eps_core.summaries.rq import rotate
from eps_core.summaries.table import build_summary, score_summary


def test_jl_expectation():
    """For Rademacher Phi, y = PhiT k and z = PhiT q:
    E[(y.z)^2] = (k.q)^2 + (|k|^2 |q|^2 + (k.q)^2 - 2 sum k_i^2 q_i^2) / m, summed over the keys."""
    rng = np.random.default_rng(0)
    head_dim, m, trials = 12, 4, 40000
    k, q = rng.normal(size=(3, head_dim)), rng.normal(size=head_dim)
    phi = np.stack([jl_projection(seed, 0, 200, head_dim, m) for seed in range(trials // 200)]).reshape(-1, head_dim, m)
    y, z = np.einsum("nd,tdm->tnm", k, phi), np.einsum("d,tdm->tm", q, phi)
    sampled = (np.einsum("tnm,tm->tn", y, z) ** 2).sum(axis=1)
    dot = k @ q
    exact = (dot**2 + ((k**2).sum(1) * (q @ q) + dot**2 - 2 * (k**2) @ (q**2)) / m).sum()
    assert abs(sampled.mean() - exact) < 5 * sampled.std() / np.sqrt(len(sampled))
    # the unscaled Phi of the product requirements is off by m^2 in energy: the mean would not be near
    assert abs(m**2 * sampled.mean() - exact) > 50 * sampled.std() / np.sqrt(len(sampled))


def test_jl_ranks_no_better_than_chance_at_m_8():
    """The published flaw: at D = 128, m = 8 the groups with the largest true mass are hardly found."""
    rng = np.random.default_rng(1)
    config, found = EpsConfig.of(method="jl", group_size=128), 0
    phi = jl_projection(0, 0, 1, 128, 8)[0]
    mean = rng.normal(size=128) * 2
    groups = [(rng.normal(size=(128, 128)) + mean).astype(np.float32) for _ in range(20)]
    built = [build_summary(config.cache_config, {"phi": phi}, k) for k in groups]
    stacked = {"gram": np.stack([s["gram"] for s in built])}
    for _ in range(60):
        a = rng.normal(size=128) / np.sqrt(128)
        best = np.argmax([formulas.group_masses(a, k, 128)[0] for k in groups])
        found += best in np.argsort(-score_summary(config.cache_config, {"phi": phi}, stacked, a)[0])[:2]
    assert found / 60 < 0.35  # chance: 0.10


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 40), rows=st.integers(1, 6), head_dim=st.sampled_from([3, 16]), seed=st.integers(0, 10**6))
def test_frequent_directions_theorem(n, rows, head_dim, seed):
    """0 <= |K a|^2 - |F a|^2 <= Delta |a|^2 and Delta <= |K|_F^2 / (l + 1), up to the stated int8 rounding."""
    rng = np.random.default_rng(seed)
    k, a = rng.normal(size=(n, head_dim)) * rng.exponential(size=head_dim), rng.normal(size=head_dim)
    summary = fd.build(EpsConfig.of(method="fd", group_size=1, dim=rows).cache_config, {}, k)
    size = np.linalg.norm(a)
    kept = np.linalg.norm(summary["rows"] @ a * summary["row_scale"].astype(float))
    error, delta = float(summary["error"]), float(summary["delta"])
    true = np.linalg.norm(k @ a)
    assert kept - error * size <= true * (1 + 1e-9)
    assert true**2 <= (kept + error * size) ** 2 + delta**2 * size**2
    assert delta**2 <= (k**2).sum() * (1 / (rows + 1) + 1e-2) + 1e-9


@given(b=st.floats(1e-6, 1e4), v=st.floats(1e-9, 1e6), more_b=st.floats(1, 10), more_v=st.floats(1, 10))
def test_bennett_is_monotone(b, v, more_b, more_v):
    value = float(bennett(b, v))
    assert -1e-12 <= value <= b * (1 + 1e-12) + 1e-12
    assert float(bennett(b * more_b, v)) >= value - 1e-9 * abs(value)
    assert float(bennett(b, v * more_v)) >= value - 1e-9 * abs(value)
    assert float(bennett(0, v)) == float(bennett(b, 0)) == 0


def test_bennett_holds_for_two_point_extremal():
    """Tight at the extremal distribution: X = b with p = v/(b^2+v), else -v/b."""
    for b, v in ((1.0, 0.5), (3.0, 9.0), (20.0, 1.0)):
        p = v / (b * b + v)
        exact = np.log(p * np.exp(b) + (1 - p) * np.exp(-v / b))
        assert float(bennett(b, v)) == pytest.approx(exact, rel=1e-12)


def test_rq_one_bit_is_unbiased_over_rotations():
    """<x_hat, y> averages to <x, y> over random rotations (RaBitQ): signs here, with a fixed Hadamard matrix."""
    rng = np.random.default_rng(3)
    head_dim = 64
    k, a = rng.normal(size=(32, head_dim)), rng.normal(size=head_dim)
    values = []
    for seed in range(1000):
        cache_config = CacheConfig("rq", group_size=16, mean_tokens=32, seed=seed)
        decoded = rq.decode_units(cache_config, rq.build(cache_config, {}, k), head_dim)[0]
        values.append(decoded @ rotate(a, seed))
    spread = np.std(values) / np.sqrt(len(values))
    assert abs(np.mean(values) - k[:16].mean(axis=0) @ a) < 4 * spread + 2e-2
    assert spread < 0.1


@pytest.mark.parametrize("bits", [4, 8])
def test_the_error_of_key_codes_shrinks_with_bits(bits):
    rng = np.random.default_rng(bits)
    x = rng.normal(size=(200, 1, 64))
    error, cache_config = [], EpsConfig.of(method="box", bound_bits=bits).cache_config.bound_store
    for k in x:
        summary = key_codes.build(cache_config, {"centre": np.zeros(64, np.float16)}, k)
        decoded = key_codes.decode(summary["codes"], summary["scale"], bits, 64)
        error.append(np.linalg.norm(decoded - rotate(k[0], 0)) / np.linalg.norm(k))
    assert np.mean(error) < {4: 0.13, 8: 0.02}[bits]


@given(codes=st.lists(st.integers(0, 255), min_size=1, max_size=40), bits=st.sampled_from([1, 2, 4, 8]))
def test_pack_roundtrip(codes, bits):
    codes = np.array(codes) % 2**bits
    packed = rq.pack_codes(codes, bits)
    assert packed.nbytes == -(-len(codes) * bits // 8)
    assert (rq.unpack_codes(packed, bits, len(codes)) == codes).all()


@pytest.mark.parametrize("head_dim", [1, 8, 20, 64, 80, 96])
def test_rotation_is_orthogonal(head_dim):
    matrix = rotate(np.eye(head_dim), 5)
    assert np.allclose(matrix @ matrix.T, np.eye(head_dim))


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 30), cut=st.integers(0, 30), seed=st.integers(0, 10**6), scale=st.sampled_from([0.1, 1, 60]))
def test_merge_is_exact(n, cut, seed, scale):
    rng = np.random.default_rng(seed)
    k, v, a = rng.normal(size=(n, 8)) * scale, rng.normal(size=(n, 5)), rng.normal(size=8)
    cut = min(cut, n)
    whole = formulas.attend_keys(a, k, v)
    first, second = (formulas.attend_keys(a, k[s], v[s]) for s in (slice(cut), slice(cut, None)))
    out, lse = formulas.merge(first, second)
    assert np.allclose(out, whole[0], atol=1e-12) and np.isclose(lse, whole[1], atol=1e-12)


def test_threshold_visits_superset_of_top_pages_for_nonnegative_scores():
    rng = np.random.default_rng(0)
    for top_pages in (1, 3, 10):
        config = EpsConfig.of(
            method="jl", group_size=1, policy="threshold", top_pages=top_pages, num_sink_tokens=0, num_recent_tokens=0
        )
        estimate = rng.exponential(size=60)
        selected_mask, _ = selection.selected(config, estimate, 60)
        assert selected_mask[selection.best_first(estimate)[:top_pages]].all()
        # raising alpha visits more
        more, _ = selection.selected(EpsConfig.of(**{**config.to_dict(), "alpha": 1.5}), estimate, 60)
        assert (more | ~selected_mask).all() and more.sum() >= selected_mask.sum()


def test_ties_go_to_the_lower_index():
    config = EpsConfig.of(method="box", group_size=1, budget=4.0, num_sink_tokens=0, num_recent_tokens=1)
    selected_mask, _ = selection.selected(config, np.array([1.0, 2, 2, 2, 2, 0]), 6)
    assert selected_mask.tolist() == [False, True, True, True, False, True]


def test_jl_cannot_tell_a_key_from_its_opposite():
    """The published flaw: a group that points away from the query scores like one that points at it."""
    rng = np.random.default_rng(0)
    config, phi = EpsConfig.of(method="jl", group_size=4), jl_projection(0, 0, 1, 32, 8)[0]
    k, a = rng.normal(size=(4, 32)), rng.normal(size=32)
    gram = np.stack([build_summary(config.cache_config, {"phi": phi}, sign * k)["gram"] for sign in (1, -1)])
    estimate = score_summary(config.cache_config, {"phi": phi}, {"gram": gram}, a)[0]
    assert estimate[0] == estimate[1]


def test_meanstd_is_no_bound_of_the_largest_logit():
    k = np.zeros((16, 8), np.float32)
    k[3, 0] = 100.0
    config = EpsConfig.of(method="meanstd", group_size=16)
    summary = {n: np.asarray(v)[None] for n, v in build_summary(config.cache_config, {}, k).items()}
    assert score_summary(config.cache_config, {}, summary, np.eye(8)[0])[0][0] < 50


def test_schatten_bounds_from_above_and_power_iteration_from_below():
    rng = np.random.default_rng(1)
    for _ in range(50):
        matrix = rng.normal(size=(12, 12))
        matrix = matrix @ matrix.T
        top = np.linalg.eigvalsh(matrix)[-1]
        vector = rng.normal(size=12)
        for _ in range(4):
            vector = matrix @ vector
            vector /= np.linalg.norm(vector)
        assert vector @ matrix @ vector <= top * (1 + 1e-12) <= base.schatten_bound(matrix) <= 1.35 * top
