"""Facts of the methods, which the program asks instead of their names, and arithmetic of their float64 oracles.

A summary of one group is a dict of numpy values in their *stored* dtypes (int8 codes, float16 scalars): rounding is
part of the method, and every stored bound is rounded to its safe side. One file is one method, a module with

- `SPEC`, and `fields(settings, head_dim)`: what is stored of a group, in its order, where anything is;
- `build(settings, constants, k [S, D])`: the summary of one full group of one kv head, k as attention reads it;
- `score(settings, constants, summary [G, ..], a [D])`: `(estimate, lower, upper)`, each [G], of the natural log of the
  groups' softmax mass for one query head, log A = log sum_i exp(a . k_i), a = scale * q: one estimate (ranks, may be
  wrong) and two bounds (hold for every a), or None where the method has no bound;
- where its facts say so `constants`, `running` with `extend` and `finalize`, `stage`, `rescore` (see `MethodSpec`).

`eps_core.backend.summaries` has a file of the same name with these functions over arrays of either library. It shares
no code with this one. This one follows the formulas without optimization, and tests compare the other with it.
"""

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

Constants = dict[str, np.ndarray]
Summary = dict[str, Any]
Score = tuple[np.ndarray, np.ndarray | None, np.ndarray | None]


class Settings(Protocol):
    """Settings of a `CacheConfig` that a method asks for."""

    @property
    def method(self) -> str: ...
    @property
    def S(self) -> int: ...
    @property
    def dim(self) -> int | None: ...
    @property
    def bits(self) -> int: ...
    @property
    def second_bit(self) -> bool: ...
    @property
    def span_tokens(self) -> int: ...
    @property
    def mean_tokens(self) -> int: ...
    @property
    def parts(self) -> int: ...
    @property
    def rq_bounds(self) -> bool: ...
    @property
    def seed(self) -> int: ...


@dataclass(frozen=True)
class Field:
    """One stored array: `shape` of what is summarised together (`CacheConfig.span_tokens`), a group by itself as a
    rule."""

    dtype: str
    shape: tuple[int, ...] = ()
    best_only: bool = False  # a scoring pass reads it of the best groups only
    part: int = 0  # from 1 on: it reads it of those groups only that were best by the parts before

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class MethodSpec:
    """Facts of a method that the program asks for. The defaults are what most methods have."""

    group_size: int | None  # measured best; None: a coarse group
    role: str = "public"  # "evaluation": for comparisons alone; "bounds": bounds for others
    colour: int | None = None  # its place in the palette of every plot; None: the ink
    dim: int | None = None  # default of --eps-dim; None: that flag has no meaning for it
    dim_means: str = ""
    norm_estimate: bool = False  # estimates are norms |K a|, never negative, and not logarithms of masses
    no_bounds: str = ""  # why it has none (by itself)
    bounds_setting: str = ""  # the setting that stores them nevertheless
    # codes of 1 bit about the mean of a unit (`unit`); they may have a rescoring bit, and `rescore` scores with it
    coded: bool = False
    # codes about the mean of the first keys a cache sees, "centre" in `constants`, which full groups wait for
    centroid_codes: bool = False
    follows: bool = False  # keeps running statistics of partial groups, so that nothing is read again: `running` says
    # which ({}: the summary itself), `extend` adds keys, `finalize` makes the summary of them
    reads_keys: bool = False  # stores nothing: is given the groups' keys [.., S, D] as a summary
    by_place: bool = False  # its `constants` also say which "groups" [G] of how long a sequence are scored: "length"
    budget: float = 0.1  # topk: share of the tokens
    budget_floor: int = 0  # topk: tokens that the default budget reads at least
    sink_recent: tuple[int, int] = (16, 128)  # first and last tokens that are always selected
    unit: "UnitFacts | None" = None  # where it is `coded`

    def has_bounds(self, settings: Settings) -> bool:
        return not self.no_bounds or bool(self.bounds_setting and getattr(settings, self.bounds_setting))


@dataclass(frozen=True)
class UnitFacts:
    """Defaults of codes about the mean of a unit of tokens."""

    mean_tokens: int
    cascade: tuple[float, ...]
    rescore: float  # share of the groups of which the rescoring bit is read


MEAN_MOST = 127  # codes of a mean are whole numbers, at most so far from 0
# Stands for an estimate past float32 (keys past float16's range): first in rank, yet no group without a summary (+inf)
LARGEST_ESTIMATE = 1e38


# ------------------------------------------------------------------------------------------------------------- rounding


def up16(x: float) -> np.float16:
    """A float16 that is at least x, for x >= 0. Rounding to nearest loses at most 2^-11; the rest absorbs float32."""
    with np.errstate(over="ignore"):
        return np.float16(x * (1 + 2.0**-10) + 2.0**-24)


def near16(x: float) -> np.float16:
    """The nearest finite float16: for estimates, never for bounds."""
    return np.float16(np.clip(x, -65504, 65504))


def mean_codes(mu: np.ndarray) -> tuple[np.ndarray, np.float16]:
    """int8 codes [D] and a float16 scale with mu ~ codes * scale, |codes| <= MEAN_MOST."""
    scale = up16(float(np.abs(mu).max()) / MEAN_MOST)
    if not np.abs(mu).any() or not np.isfinite(scale):
        return np.zeros(len(mu), np.int8), np.float16(0)
    return np.clip(np.round(mu / float(scale)), -MEAN_MOST, MEAN_MOST).astype(np.int8), scale


def to_byte(scale: np.ndarray | np.float16) -> np.ndarray:
    """float16 numbers >= 0 in one byte: five bits of exponent and three of mantissa, to the nearest."""
    bits = np.asarray(scale, np.float16).view(np.uint16).astype(np.int32)
    return np.minimum((bits + 64) >> 7, 0xF7).astype(np.uint8)


def from_byte(stored: np.ndarray) -> np.ndarray:
    """The numbers [..] float64 that `to_byte` stored."""
    return (np.asarray(stored).astype(np.uint16) << 7).view(np.float16).astype(np.float64)


def rounding_slack(a: np.ndarray, norm: np.ndarray) -> np.ndarray:
    """Return how much float32 arithmetic may add to log n plus a sum of D products of size |a| * norm (four times the
    worst case)."""
    return (len(a) + 32) * 2.0**-21 * (np.linalg.norm(a) * norm + 1)


def key_norm(k: np.ndarray) -> float:
    return float(np.linalg.norm(k, axis=1).max())


def near_codes(x: np.ndarray, most: int) -> tuple[np.ndarray, np.float16]:
    scale = near16(float(np.abs(x).max()) / most)
    if float(scale) == 0:
        return np.zeros(len(x)), np.float16(0)
    return np.clip(np.round(x / float(scale)), -most, most), scale


def schatten_bound(matrix: np.ndarray, doublings: int = 4) -> float:
    """(tr E^(2^j))^(1/2^j) >= the spectral norm of the symmetric E: valid without an eigensolver, where a power
    iteration would only estimate it from below. The 1e-4 covers rounding."""
    size = float(np.abs(matrix).max()) * len(matrix)
    if size == 0:
        return 0.0
    power = matrix / size
    for _ in range(doublings):
        power = power @ power
    return size * max(float(np.trace(power)), 0.0) ** (0.5**doublings) * (1 + 1e-4)


# -------------------------------------------------------------------------------------------------------------- scoring


def f64(summary: Summary, name: str) -> np.ndarray:
    return np.asarray(summary[name], np.float64)


def bennett(b: np.ndarray, v: np.ndarray) -> np.ndarray:
    """log( b^2/(b^2+v) exp(-v/b) + v/(b^2+v) exp(b) ): the largest log E exp(X) of a centred X <= b with variance <= v
    (Bennett 1962). Monotone in both, so upper bounds may be plugged in. 0 where b or v is 0."""
    b, v = np.broadcast_arrays(np.asarray(b, np.float64), np.asarray(v, np.float64))
    spread = (b > 0) & (v > 0)
    b, v = np.where(spread, b, 1.0), np.where(spread, v, 1.0)
    # log(b^2/(b^2+v)) and log(v/(b^2+v)) without overflow or cancellation
    ratio = np.log(v) - 2 * np.log(b)
    value = np.logaddexp(-np.logaddexp(0, ratio) - v / b, -np.logaddexp(0, -ratio) + b)
    return np.where(spread, value, 0.0)


def random_energy(v: np.ndarray, n: int) -> np.ndarray:
    """v/2 while sqrt(v) <= sqrt(2 ln n), else sqrt(2 ln n) sqrt(v) - ln n: log of the mean of n exponentials of
    Gaussians with variance v, which cannot grow as fast as their expectation (Derrida 1981)."""
    edge = np.sqrt(2 * np.log(n))
    return np.where(np.sqrt(v) <= edge, v / 2, edge * np.sqrt(v) - np.log(n))
