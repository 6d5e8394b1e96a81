"""Draws and acceptance: distributions, independent streams, and random numbers that a counter names."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eps_core.decode import sampling as sampling_
from eps_core.decode.accept import accept
from eps_core.decode.sampling import (
    Sampling,
    draw,
    gumbel,
    probabilities,
    uniforms,
)

VOCAB, DRAWS = 50, 100_000
RNG = np.random.default_rng(7)
TARGET, NEXT = RNG.normal(size=(2, VOCAB)).astype(np.float32)
DRAFT = (TARGET + RNG.normal(size=VOCAB) * 0.7).astype(np.float32)  # of other support, once top-p has cut
TARGET[0], DRAFT[0] = 2.5, 2.0
CASES = [Sampling(1.0, 1.0, 11), Sampling(0.8, 0.9, 12)]


def chi_square(tokens: np.ndarray, p: np.ndarray) -> float:
    """How many standard deviations the statistic of drawn tokens lies above its mean, against p [V]; inf where a token
    was drawn that has no probability."""
    counts = np.bincount(tokens, minlength=len(p))
    if counts[p == 0].any():
        return float("inf")
    # tokens that are drawn too seldom for the statistic count as one
    expected, rare = p * len(tokens), p * len(tokens) < 8
    pairs = [(counts[i], expected[i]) for i in np.flatnonzero(~rare)] + [(counts[rare].sum(), expected[rare].sum())]
    pairs = [pair for pair in pairs if pair[1] > 0]
    statistic = sum((count - mean) ** 2 / mean for count, mean in pairs)
    freedom = len(pairs) - 1
    return float((statistic - freedom) / np.sqrt(2 * freedom))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers from one counter a stream instead of one a position, and each p once: thirty times as fast."""
    right, numbers, known = sampling_.probabilities, {}, {}

    def uniforms_(sampling: Sampling, sequence: int, position: int, count: int) -> np.ndarray:
        if sampling not in numbers:
            numbers[sampling] = uniforms(sampling, sequence, 0, 2 * DRAWS * VOCAB).reshape(-1, VOCAB)
        return numbers[sampling][position, :count]

    def probabilities_(row: np.ndarray, sampling: Sampling) -> np.ndarray:
        key = row.tobytes(), sampling
        if key not in known:
            known[key] = right(row, sampling)
        return known[key]

    monkeypatch.setattr(sampling_, "uniforms", uniforms_)
    monkeypatch.setattr(sampling_, "probabilities", probabilities_)


def said(sampling: Sampling, draws: int = DRAWS) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(first tokens, tokens after those whose draft was accepted, whether it was) of rounds of one draft each."""
    first, after, kept = [], [], []
    for position in range(0, 2 * draws, 2):
        token = draw(DRAFT, sampling, 3, position).token
        one = accept(np.stack([TARGET, NEXT]), [token], sampling, 3, position, lambda *given: False)
        first.append(one.tokens[0])
        kept.append(one.accepted == 1)
        assert len(one.tokens) == 1 + one.accepted and (not one.accepted or one.tokens[0] == token)
        after += one.tokens[1:]
    return np.array(first), np.array(after), np.array(kept)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("sampling", CASES, ids=["T 1", "T .8, top-p .9"])
def test_what_is_said_is_drawn_from_the_target(sampling: Sampling) -> None:
    p, q = probabilities(TARGET, sampling), probabilities(DRAFT, sampling)
    if sampling.top_p < 1:
        assert ((p > 0) & (q == 0)).any() and ((q > 0) & (p == 0)).any()  # supports differ
    first, after, kept = said(sampling)
    assert chi_square(first, p) < 4 and chi_square(after, probabilities(NEXT, sampling)) < 4
    assert chi_square(first, q) > 40  # and the test would see it
    variation = 0.5 * np.abs(p - q).sum()
    deviation = 4 * np.sqrt(0.25 / len(kept))
    # Daliri, Musco, Suresh 2024
    assert (1 - variation) / (1 + variation) - deviation < kept.mean() < 1 - variation + deviation


def test_streams_are_independent() -> None:
    sampling, count = Sampling(1.0, seed=5), 400
    streams = [
        np.concatenate([uniforms(sampling, 2, position, VOCAB) for position in range(count)]),
        np.concatenate([uniforms(Sampling(1.0, seed=6), 2, position, VOCAB) for position in range(count)]),
        np.concatenate([uniforms(sampling, 3, position, VOCAB) for position in range(count)]),
        np.concatenate([uniforms(sampling, 2, position + 1, VOCAB) for position in range(count)]),
        np.concatenate([uniforms(sampling, 2, position, VOCAB + 1)[1:] for position in range(count)]),
    ]
    correlation = np.corrcoef(streams)
    assert np.abs(correlation - np.eye(len(correlation))).max() < 4 / np.sqrt(VOCAB * count)
    for one in streams:
        assert abs(one.mean() - 0.5) < 4 / np.sqrt(12 * len(one)) and (one > 0).all() and (one < 1).all()


# ---- counters ----


def test_a_number_is_the_same_whoever_asks() -> None:
    sampling = Sampling(1.0, 0.9, 123)
    whole = uniforms(sampling, 4, 77, 1000)
    for count in (1, 2, 3, 5, 8, 999):
        np.testing.assert_array_equal(uniforms(sampling, 4, 77, count), whole[:count])
    # in any order, whatever was drawn before
    places = [(sequence, position) for sequence in range(3) for position in (0, 5, 2**40)]
    forwards = {place: draw(TARGET, sampling, *place).token for place in places}
    np.random.default_rng(0).random(10)
    backwards = {place: draw(TARGET, sampling, *place).token for place in reversed(places)}
    assert forwards == backwards and len(set(forwards.values())) > 1


def test_draws_are_the_same_in_another_process_and_version() -> None:
    """The constants are part of what a seed means: change them and texts of earlier runs cannot be had again."""
    code = (
        "import numpy as np; from eps_core.decode.sampling import *; s = Sampling(0.9, 0.95, 42); "
        "l = np.sin(np.arange(50) * 1.7).astype(np.float32); "
        "print([draw(l, s, i, p).token for i in range(3) for p in (0, 1, 1000)], uniforms(s, 1, 2, 3).tolist())"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.strip() == GOLDEN


GOLDEN = "[38, 20, 1, 41, 8, 8, 26, 8, 8] [0.9721147565260861, 0.5744585232814383, 0.15010039901470035]"


# ---- one draw ----


FORMER = {
    (0.3, 1.0): [2514, 2562, 803, 2200, 1849],
    (1.0, 0.9): [1941, 2621, 463, 1069, 1834],
    (2.5, 0.99): [1650, 2467, 2555, 740, 337],
    (1.0, 0.5): [618, 1753, 814, 2821, 1154],
    (1.0, 0.01): [389, 304, 1313, 1313, 2237],
}


@pytest.mark.parametrize("temperature, top_p", FORMER)
def test_cdf_draws_are_those_of_former_versions(temperature: float, top_p: float) -> None:
    logits, sampling = (np.sin(np.arange(3000) * 1.7) * 4).astype(np.float32), Sampling(temperature, top_p, 42, "cdf")
    places = [(0, 0), (0, 1), (3, 77), (100, 5), (1, 2**40)]
    assert [draw(logits, sampling, *place).token for place in places] == FORMER[temperature, top_p]


@settings(max_examples=60, deadline=None)
@given(temperature=st.sampled_from([0.0, 0.5, 1.0]), seed=st.integers(0, 2**40), sequence=st.integers(0, 9))
def test_the_margin_is_what_the_runner_up_lacks(temperature: float, seed: int, sequence: int) -> None:
    logits = np.random.default_rng(seed).normal(size=20)
    sampling = Sampling(temperature, seed=seed)
    drawn = draw(logits, sampling, sequence, 5)
    scores = logits if not temperature else logits / temperature + gumbel(sampling, sequence, 5, 20)
    second = int(np.argsort(-scores)[1])
    for factor, token in ((0.999, drawn.token), (1.001, second)):
        raised = logits.copy()
        raised[second] += factor * drawn.margin * (temperature or 1.0)
        assert draw(raised, sampling, sequence, 5).token == token


def test_a_draw_without_a_runner_up_has_no_margin() -> None:
    assert draw(np.array([3.0]), Sampling(), 0, 0).margin == np.inf
    assert draw(TARGET, Sampling(1.0, 1e-6), 0, 0).margin == np.inf
    assert draw(TARGET, Sampling(1.0, 0.9, by="cdf"), 0, 0).margin == np.inf


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("by", ["gumbel", "cdf"])
def test_the_smallest_temperature_draws_the_best_token(by: str) -> None:
    assert draw(np.array([-9.0, 90.0, 3.0]), Sampling(1e-307, by=by), 0, 0).token == 1


# ---- one round ----


def rows(*tokens: int) -> np.ndarray:
    """Logits whose best tokens these are."""
    found = np.zeros((len(tokens), VOCAB), np.float32)
    found[np.arange(len(tokens)), list(tokens)] = 5.0
    return found


@pytest.mark.parametrize(
    ("drafts", "stop", "want", "accepted"),
    [
        ([], (), [1], 0),
        ([1, 2, 3], (), [1, 2, 3, 4], 3),
        ([1, 2, 9], (), [1, 2, 3], 2),
        ([9, 2, 3], (), [1], 0),
        ([9, 1, 2], (), [1], 0),  # one off
        ([1, 2, 3], (2,), [1, 2], 2),  # a stop token ends it, accepted or not
        ([1, 9, 3], (2,), [1, 2], 1),
        ([1, 2, 3], (4,), [1, 2, 3, 4], 3),
        ([1, 2, 3], (9,), [1, 2, 3, 4], 3),
        ([1], (1,), [1], 1),
    ],
)
def test_the_longest_prefix_and_one_more(
    drafts: list[int], stop: tuple[int, ...], want: list[int], accepted: int
) -> None:
    logits = rows(1, 2, 3, 4)[: len(drafts) + 1]
    one = accept(logits, drafts, Sampling(), 0, 0, lambda _, token: token in stop)
    assert (one.tokens, one.accepted) == (want, accepted)
    assert one.margins == [5.0] * len(want)


def test_gumbel_noise_has_its_mean_and_variance() -> None:
    noise = np.concatenate([gumbel(Sampling(1.0, seed=1), 0, position, 500) for position in range(200)])
    assert abs(noise.mean() - np.euler_gamma) < 4 * np.pi / np.sqrt(6 * len(noise))
    assert abs(noise.var() - np.pi**2 / 6) < 0.05


def test_no_number_is_0_or_1() -> None:
    found = sampling_._inside(np.array([0, 2**11 - 1, 2**63, 2**64 - 1], np.uint64))
    assert (found > 0).all() and (found < 1).all() and (np.diff(found)[1:] > 0).all()
    assert np.isfinite(-np.log(-np.log(found))).all()
