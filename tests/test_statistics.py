"""Intervals cover what they claim to cover, and exact tests give the figures that one can count by hand."""

import math

import numpy as np
import pytest

from eps_core.evaluation import statistics
from eps_core.evaluation.statistics import bootstrap_interval, paired_difference, sign_test, wilson_interval


def test_bootstrap_covers_the_true_mean_as_often_as_it_says(monkeypatch):
    monkeypatch.setattr(statistics, "RESAMPLES", 400)
    rng, hits = np.random.default_rng(0), 0
    for trial in range(1000):
        low, high = bootstrap_interval(rng.normal(3.0, 2.0, 40), trial)
        hits += low <= 3.0 <= high
    # at 40 values the percentile interval covers 0.936 (no t quantile); four standard errors of 1,000 trials
    assert 0.905 <= hits / 1000 <= 0.967


def test_bootstrap_of_few_values_is_what_one_can_count():
    """Resamples of (0, 1) have means 0, 0.5, 1 with probability 1/4, 1/2, 1/4."""
    assert bootstrap_interval([0, 1], 0) == (0.0, 1.0)
    assert bootstrap_interval([0.3], 0) is None
    assert bootstrap_interval([0.25] * 9, 0) == (0.25, 0.25)


def test_bootstrap_is_decided_by_its_seed_and_by_nothing_else():
    values = np.random.default_rng(1).random(15)
    assert bootstrap_interval(values, 7) == bootstrap_interval(values, 7) != bootstrap_interval(values, 8)
    np.random.seed(0)
    before = bootstrap_interval(values, 7)
    np.random.seed(1)
    assert bootstrap_interval(values, 7) == before


@pytest.mark.parametrize("values", [[], [1.0, math.nan], [1.0, math.inf], [[1.0, 2.0]]], ids=str)
def test_values_that_have_no_mean_are_refused(values):
    with pytest.raises(ValueError):
        bootstrap_interval(values, 0)


def test_pairing_takes_out_what_the_documents_share():
    rng = np.random.default_rng(2)
    difficulty = rng.normal(0, 10, 60)
    first, second = difficulty + 0.5 + rng.normal(0, 0.3, 60), difficulty
    mean, (low, high) = paired_difference(first, second, 0)
    assert mean == pytest.approx((first - second).mean())
    assert 0 < low < mean < high < 1  # unpaired, the spread of 10 would drown it
    flipped, (flipped_low, flipped_high) = paired_difference(second, first, 0)
    assert (flipped, flipped_low, flipped_high) == pytest.approx((-mean, -high, -low), abs=0.02)
    assert paired_difference([1.0], [0.0], 0) == (1.0, None)
    with pytest.raises(ValueError, match="3 scores against 2"):
        paired_difference([1, 2, 3], [1, 2], 0)


@pytest.mark.parametrize(
    "counts, p",
    [
        ((0, 0), 1.0),
        ((1, 0), 1.0),  # 2 * 1/2
        ((0, 5), 2 / 32),
        ((1, 5), 2 * (1 + 6) / 64),
        ((10, 0), 2 / 1024),
        ((3, 3), 1.0),
        ((2, 8), 2 * (1 + 10 + 45) / 1024),
        ((0, 2000), 0.0),
    ],
)
def test_mcnemar_is_a_binomial_tail(counts, p):
    first = np.repeat([1, 0], counts)
    assert sign_test(first, 1 - first) == pytest.approx(p, abs=1e-300)
    assert sign_test(1 - first, first) == sign_test(first, 1 - first)


def test_sign_test_leaves_ties_out():
    assert sign_test([1, 1, 0, 1, 1, 1], [0, 0, 0, 0, 0, 0]) == 2 / 32
    assert sign_test([0.2, 0.5, 0.9], [0.1, 0.7, 0.9]) == 1.0


def test_sign_test_rejects_a_true_null_no_oftener_than_it_says():
    rng = np.random.default_rng(3)
    rejected = sum(sign_test(*rng.integers(0, 2, (2, 30))) <= 0.05 for _ in range(1000))
    assert 0 < rejected <= 65  # exact tests are conservative; 50 and two standard errors


def test_wilson_is_the_textbook_s():
    """Newcombe 1998, table I (method 3): 81 of 263 and 15 of 148; at no success z^2 / (n + z^2)."""
    assert wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson_interval(15, 148) == pytest.approx((0.0624, 0.1605), abs=5e-5)
    z2 = 1.959963984540054**2
    assert wilson_interval(0, 10) == (0.0, pytest.approx(z2 / (10 + z2)))
    assert wilson_interval(10, 10) == (pytest.approx(10 / (10 + z2)), 1.0)
    assert wilson_interval(0, 0) is None
    with pytest.raises(ValueError, match="3 successes of 2"):
        wilson_interval(3, 2)


@pytest.mark.parametrize("share", [0.05, 0.3, 0.5, 0.9])
def test_wilson_covers_a_share_as_often_as_it_says_on_average(share):
    total = 40
    covered = 0.0
    for k in range(total + 1):
        low, high = wilson_interval(k, total)
        covered += (low <= share <= high) * math.comb(total, k) * share**k * (1 - share) ** (total - k)
    assert 0.92 <= covered <= 0.99
