"""The number of drafts that pays: by the costs of a pretended device and the acceptances of a pretended drafter."""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

from eps_core.config.speculative import SpeculativeConfig
from eps_core.decode.pace import (
    DENSE_PROBES,
    FIRST_REST,
    GAIN,
    LONGEST_REST,
    PRIOR,
    RECENT,
    Pace,
)


class Device:
    """Rounds of one sequence on a device whose costs are known, in ms."""

    def __init__(self, draft: float, verify: Callable[[int], float], acceptance: float, dense: float = 1.0) -> None:
        self.draft, self.verify, self.acceptance, self.dense = draft, verify, acceptance, dense
        self.rng = np.random.default_rng(0)

    def run(self, pace: Pace, tokens: int) -> tuple[float, list[int], int]:
        """(ms, drafts of each round, tokens said)."""
        ms, gammas, said = 0.0, [], 0
        while said < tokens:
            gamma = pace.next()
            gammas.append(gamma)
            if not gamma:
                pace.saw_cost("dense", self.dense)
                ms, said = ms + self.dense, said + 1
                continue
            misses = np.flatnonzero(self.rng.random(gamma) >= self.acceptance)
            accepted = int(misses[0]) if len(misses) else gamma
            pace.saw_cost("draft", self.draft)
            pace.saw_cost(gamma + 1, self.verify(gamma + 1))
            pace.saw_round([gamma], [accepted])
            ms, said = ms + gamma * self.draft + self.verify(gamma + 1), said + accepted + 1
        return ms, gammas, said

    def rate(self, gamma: int) -> float:
        """Tokens a ms that g drafts give in the long run: (1 - a^(g + 1)) / (1 - a) over their time."""
        expected = sum(self.acceptance**depth for depth in range(gamma + 1))
        return expected / (gamma * self.draft + self.verify(gamma + 1)) if gamma else 1 / self.dense


AUTO = SpeculativeConfig("tokens", None)


@pytest.mark.parametrize(
    "device",
    [
        Device(1.0, lambda rows: 1.0 + rows, 0.95),  # a draft costs as much as a dense step
        Device(0.1, lambda rows: 2.0 * rows, 0.9),  # a pass that reads K and V once a row
        Device(0.1, lambda rows: 1.0, 0.0),  # nothing is ever accepted
        Device(0.5, lambda rows: 1.2, 0.4),
    ],
    ids=["dear drafts", "dear passes", "wrong drafts", "both"],
)
def test_where_drafts_do_not_pay_a_run_is_dense_but_for_its_probes(device: Device) -> None:
    ms, gammas, said = device.run(Pace(AUTO), 4000)
    probes = [i for i, gamma in enumerate(gammas) if gamma]
    # rests double, up to the longest
    assert 1 <= len(probes) <= 8 + np.log2(LONGEST_REST / FIRST_REST) + said / LONGEST_REST
    late = [i for i in probes if i > 1000]
    assert all(b - a > LONGEST_REST for a, b in pairwise(late))
    cost = sum(gammas[i] * device.draft + device.verify(gammas[i] + 1) for i in probes)
    assert ms <= said * device.dense + cost  # never slower than dense, beyond the probes
    assert cost < 0.05 * said


@pytest.mark.parametrize("acceptance", [0.8, 0.95, 0.99])
@pytest.mark.parametrize("slope", [0.0, 0.05])
def test_the_best_number_of_drafts_is_found(acceptance: float, slope: float) -> None:
    device = Device(0.1, lambda rows: 1.0 + slope * rows, acceptance)
    pace = Pace(AUTO)
    device.run(pace, 1500)
    _, gammas, _ = device.run(pace, 500)
    best = max(device.rate(gamma) for gamma in range(AUTO.most + 1))
    assert np.median([device.rate(gamma) for gamma in gammas]) > 0.95 * best
    assert best > 1.5  # it pays


def test_drafting_begins_after_the_probes_of_dense_steps() -> None:
    pace = Pace(AUTO)
    for _ in range(DENSE_PROBES):
        assert pace.next() == 0
        pace.saw_cost("dense", 1.0)
    assert pace.next() > 0


def test_a_device_that_changes_is_followed() -> None:
    """Drafts that stop being accepted, and costs that rise with the context."""
    device = Device(0.1, lambda rows: 1.0, 0.98)
    pace = Pace(AUTO)
    _, gammas, _ = device.run(pace, 1000)
    assert gammas[-1] > 8
    device.acceptance = 0.02
    _, gammas, _ = device.run(pace, 1500)
    assert np.mean(gammas[-200:]) < 0.5
    device.acceptance = 0.98
    _, gammas, _ = device.run(pace, 8000)
    assert gammas[-1] > 8
    device.draft = 3.0
    _, gammas, _ = device.run(pace, 1500)
    assert gammas[-1] == 0


def test_a_fixed_number_is_never_changed() -> None:
    for draft in (0, 3, 16):
        pace = Pace(SpeculativeConfig("tokens", draft))
        _, gammas, _ = Device(9.0, lambda rows: 99.0, 0.0).run(pace, 20)
        assert set(gammas) == {draft}


@pytest.mark.parametrize("most", [1, 2, 16, 64])
def test_never_more_drafts_than_the_most(most: int) -> None:
    _, gammas, _ = Device(0.001, lambda rows: 1.0, 1.0).run(Pace(SpeculativeConfig("tokens", None, most=most)), 600)
    assert max(gammas) == most


def test_what_follows_a_miss_says_nothing_of_acceptance() -> None:
    pace = Pace(SpeculativeConfig("tokens", None, most=4))
    assert [pace.acceptance(depth) for depth in range(4)] == [PRIOR] * 4
    for _ in range(400):
        pace.saw_round([4, 2, 0], [1, 2, 0])
    # at depth 0 all, at depth 1 one of two, at 2 and 3 none was ever offered
    assert pace.acceptance(0) > 0.95 and 0.45 < pace.acceptance(1) < 0.6
    assert pace.offered[2] == pace.offered[3] == 0
    overall = sum(pace.accepted) / sum(pace.offered)
    assert abs(pace.acceptance(2) - overall) < 0.05


def test_costs_are_medians_of_the_last_and_lie_on_a_line_between() -> None:
    pace = Pace(AUTO)
    assert pace.cost("draft") is None and pace.cost(5) is None and pace.rate(3) is None and pace.rate(0) is None
    for _ in range(RECENT):
        pace.saw_cost("dense", 100.0)
    for ms in [*[1.0] * RECENT, 2.0, 50.0]:
        pace.saw_cost("dense", ms)
    assert pace.cost("dense") == 1.0 and pace.cost(7) == 1.0
    pace.saw_cost(5, 3.0)
    assert [pace.cost(rows) for rows in (1, 3, 5, 9)] == [1.0, 2.0, 3.0, 5.0]
    pace.saw_cost(9, 2.5)
    assert [pace.cost(rows) for rows in (3, 7, 9, 13)] == [2.0, 2.75, 2.5, 2.0]
    assert pace.cost(100) == 1.0  # no pass is cheaper than a dense step


def test_the_rate_is_expected_tokens_a_ms() -> None:
    pace = Pace(SpeculativeConfig("tokens", None, most=4))
    for kind, ms in (("dense", 1.0), ("draft", 0.25), (4, 2.0)):
        pace.saw_cost(kind, ms)
    a = PRIOR
    assert pace.rate(3) == pytest.approx((1 + a + a**2 + a**3) / (3 * 0.25 + 2.0))
    assert pace.rate(0) == 1.0 and GAIN > 1


@pytest.mark.parametrize(("load", "less"), [((8, 4000), (1, 4000)), ((1, 32_000), (1, 200))])
def test_costs_of_a_larger_load_do_not_count(load: tuple[int, int], less: tuple[int, int]) -> None:
    """Where drafting pays nobody sees what a dense step costs once others have ended, or another prompt has begun: it
    must be run again."""
    pace = Pace(AUTO)
    for (num_sequences, num_tokens), dense in ((load, 4.0), (less, 1.0)):  # the smaller load's drafts do not pay
        pace.saw_load(num_sequences, num_tokens)
        assert pace.cost("dense") is None
        for _ in range(DENSE_PROBES):
            assert pace.next() == 0
            pace.saw_cost("dense", dense)
        for kind in ("draft", 5):
            pace.saw_cost(kind, 1.0)
        pace.saw_round([4], [4])
        pace.saw_load(num_sequences, num_tokens + 5)  # as it grows: nothing is forgotten
        assert pace.cost("dense") == dense and (pace.next() > 0) is (dense > 1)
