"""The simulation of two loading paths, against every assignment of few requests, and its invariants."""

from fractions import Fraction

import pytest

from experiments.dual_path.run import simulate

REQUESTS = [(Fraction(at), size) for at, size in ((0, 60), (0, 24), (1, 90), (2, 12), (2, 36))]


def ends(paths: str, prefill: int, decode: int, network: int) -> list[Fraction]:
    """When each request ends on given paths: each link's queue replayed from its start."""
    found = []
    for i, (arrival, size) in enumerate(REQUESTS[: len(paths)]):
        links = [prefill] if paths[i] == "P" else [decode, network]
        mine = [one for one in range(i + 1) if paths[one] == paths[i]]
        at = {one: REQUESTS[one][0] for one in mine}
        for speed in links:
            free = Fraction(0)
            for one in mine:
                free = at[one] = max(free, at[one]) + Fraction(REQUESTS[one][1], speed)
        found.append(at[i])
        assert size > 0 and at[i] > arrival
    return found


@pytest.mark.parametrize("speeds", [(6, 6, 6), (6, 12, 3), (12, 2, 60), (3, 60, 60)], ids=str)
def test_each_request_takes_the_path_that_ends_first(speeds: tuple[int, int, int]) -> None:
    found, carried = simulate(REQUESTS, *speeds, True)
    paths = "".join(one.path for one in found)
    assert [one.done for one in found] == ends(paths, *speeds)
    for i in range(len(paths)):
        both = {path: ends(paths[:i] + path, *speeds)[-1] for path in "PD"}
        assert paths[i] == min("PD", key=both.__getitem__)  # P where both end together
    total = sum(size for _, size in REQUESTS)
    assert carried["prefill storage"] + carried["decode storage"] == total == sum(one.num_bytes for one in found)
    assert carried["network"] == carried["decode storage"] == sum(one.num_bytes for one in found if one.path == "D")


def test_without_the_second_path_it_is_the_baseline() -> None:
    found, carried = simulate(REQUESTS, 6, 6, 6, False)
    assert [one.done for one in found] == ends("PPPPP", 6, 6, 6)
    assert carried["decode storage"] == carried["network"] == 0


@pytest.mark.parametrize("count", [1, 2, 7, 64])
def test_equal_links_gain_at_most_two(count: int) -> None:
    same = [(Fraction(0), 30)] * count
    one, two = (max(done.done for done in simulate(same, 6, 6, 6, dual)[0]) for dual in (False, True))
    assert one == 5 * count and 1 <= one / two <= 2 and (count < 7 or one / two > Fraction(3, 2))
