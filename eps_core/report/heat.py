"""Shares from 0 to 1 as levels of one scale, drawn as SVG paths that take the page's colours: a heat map needs no
script, no picture file and no network."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

# upper limits of the levels but the last, which ends at 1; level 0 is nothing at all
LIMITS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.7)
LEVEL_NAMES = ("never", *(f"up to {100 * limit:.0f} %" for limit in (*LIMITS[1:], 1.0)))
VALUE_STEPS = 200  # of a share from 0 to 1, in the values behind a map
_TICKS = 6  # about so many on an axis


@dataclass(frozen=True)
class Tick:
    at: int
    percent: float  # of the axis
    label: str


@dataclass(frozen=True)
class HeatMap:
    """A map of R rows and C columns. `paths` are (level, SVG path) in a view box of C by R; `profile` is the path of
    the columns' means in one of C by 1, filled from below."""

    key: str
    label: str
    rows: int
    columns: int
    paths: Sequence[tuple[int, str]]
    profile: str
    values: str
    y: str
    y_ticks: Sequence[Tick]
    x_ticks: Sequence[Tick]
    names: Sequence[str]  # of the rows


def levels_of(shares: np.ndarray) -> np.ndarray:
    """Levels of shares, from 0 (never) to `len(LIMITS)`."""
    return np.searchsorted(LIMITS, shares)


def paths_of(levels: np.ndarray) -> list[tuple[int, str]]:
    """(level, path) of levels [R, C]: cells side by side on one level are one rectangle. Level 0 is left blank."""
    found: dict[int, list[str]] = {}
    for row, line in enumerate(levels.tolist()):
        starts = [0, *(np.flatnonzero(np.diff(line)) + 1).tolist(), len(line)]
        for start, end in pairwise(starts):
            found.setdefault(line[start], []).append(f"M{start} {row}h{end - start}v1h{start - end}z")
    return [(level, "".join(parts)) for level, parts in sorted(found.items()) if level]


def profile_of(shares: np.ndarray) -> str:
    """The path of shares [C] as steps over their columns, filled from below."""
    steps = "".join(f"V{1 - share:.3f}h1" for share in shares.tolist())
    return f"M0 1{steps}V1z"


def values_of(shares: np.ndarray) -> str:
    """Shares of any shape as base64 of bytes, in steps of 1 / `VALUE_STEPS`."""
    return base64.b64encode(np.rint(VALUE_STEPS * np.minimum(shares, 1)).astype(np.uint8).tobytes()).decode()


def ticks(first: int, last: int, most: int = _TICKS) -> list[Tick]:
    """Ticks at round numbers from `first` to `last`, whose places are `first` + 0.5 to `last` + 0.5 of an axis that is
    as many long."""
    length = last - first + 1
    step = next(s for power in range(12) for s in (10**power, 2 * 10**power, 5 * 10**power) if length <= s * most)
    return [
        Tick(at, 100 * (at - first + 0.5) / length, f"{at:,}") for at in range(-(-first // step) * step, last + 1, step)
    ]
