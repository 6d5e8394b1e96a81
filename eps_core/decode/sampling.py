"""How the next token is drawn from logits: on the host, in float64, by random numbers that (seed, sequence, position)
name. The same logits therefore give the same token on every backend, in any batch, dense, sparse or verified."""

import math
from dataclasses import dataclass

import numpy as np

from eps_core.errors import ConfigError, overflow
from eps_core.io import records

RULES = ("gumbel", "cdf")
_STREAM = 0  # part of what a seed means: another number gives other texts


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. Temperature 0 is greedy. `by` gumbel: the largest of log probability plus Gumbel
    noise, a number for each token; cdf: one uniform number through the cumulated probabilities, likeliest first."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    by: str = "gumbel"

    def __post_init__(self) -> None:
        records.check("temperature", self.temperature, float)
        records.check("top-p", self.top_p, float)
        records.check("seed", self.seed, int)
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ConfigError(f"temperature {self.temperature} is negative or not a number: use 0 for greedy decoding")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top-p {self.top_p} is outside (0, 1]: use 1 to draw from every token")
        if self.seed < 0:
            raise ConfigError(f"seed {self.seed} is negative: use 0 or more")
        if self.by not in RULES:
            raise ConfigError(f"sample-by {self.by!r} is unknown: choose one of {', '.join(RULES)}")


@dataclass(frozen=True)
class Drawn:
    """A token, and by how much the runner-up would have had to be better: nats of logit over temperature (of logit at
    temperature 0), noise included; inf where there was no other, or the draw is by cdf."""

    token: int
    margin: float


def uniforms(sampling: Sampling, sequence: int, position: int, count: int) -> np.ndarray:
    """[count] float64 inside (0, 1), from a counter: Philox (Salmon et al. 2011) keyed by (seed, sequence) and counted
    from (position, 0) on, so that number i of a position is the same whoever asks, and for nobody else's."""
    key = np.random.SeedSequence([sampling.seed, sequence, _STREAM]).generate_state(2, np.uint64)
    raw = np.random.Philox(key=key, counter=[0, position, 0, 0]).random_raw(count)
    return _inside(raw)


def _inside(raw: np.ndarray) -> np.ndarray:
    """uint64 to (0, 1): the middles of 2^53 equal parts, the last of which would round to 1."""
    numbers: np.ndarray = np.minimum(((raw >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53, 1 - 2.0**-53)
    return numbers


def gumbel(sampling: Sampling, sequence: int, position: int, count: int) -> np.ndarray:
    """Standard Gumbel noise [count] float64 of each token: the largest of log p + noise is a draw from p."""
    noise: np.ndarray = -np.log(-np.log(uniforms(sampling, sequence, position, count)))
    return noise


def probabilities(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """[V] float64 that tokens are drawn with, of logits [V]: after temperature, which is above 0, and of the fewest
    tokens, likeliest first, that hold top_p; 0 for the others."""
    with np.errstate(over="ignore"):  # at a tiny temperature the others have no mass at all
        mass = np.exp((logits.astype(np.float64) - logits.max()) / sampling.temperature)
    if sampling.top_p < 1:
        kept = np.zeros_like(mass)
        nucleus = _nucleus(mass, sampling.top_p)
        kept[nucleus] = mass[nucleus]
        mass = kept
    p: np.ndarray = mass / mass.sum()
    return p


def _order(mass: np.ndarray) -> np.ndarray:
    return np.argsort(-mass, kind="stable")


def _nucleus(mass: np.ndarray, top_p: float) -> np.ndarray:
    """The fewest tokens, likeliest first, that hold top_p of the mass [V]."""
    total = mass.sum()
    # all tokens below this share hold less than what the nucleus leaves: only the others need a sort
    likely = np.flatnonzero(mass >= (1 - top_p) * total / len(mass))
    order = likely[_order(mass[likely])]
    return order[: int(np.searchsorted(np.cumsum(mass[order]), top_p * total)) + 1]


def drawable(logits: np.ndarray) -> bool:
    """Return whether no logit is NaN or +Inf."""
    return not (np.isnan(logits).any() or np.isposinf(logits).any())


def check_logits(logits: np.ndarray, position: int) -> None:
    """Raises ConfigError where logits are NaN or +Inf."""
    if not drawable(logits):
        raise overflow(f"the logits at position {position}")


def draw(logits: np.ndarray, sampling: Sampling, sequence: int, position: int) -> Drawn:
    """Token drawn from logits [V] for `position` of prompt number `sequence`; the lowest token wins a tie."""
    check_logits(logits, position)
    if sampling.temperature == 0:
        return _best(logits)
    p = probabilities(logits, sampling)
    if sampling.by == "cdf":
        order = _order(p)
        cumulative = np.cumsum(p[order])
        # the generator of earlier versions, so that their texts can be had again
        number = np.random.default_rng([sampling.seed, sequence, position]).random() * cumulative[-1]
        return Drawn(int(order[np.searchsorted(cumulative, number, side="right")]), math.inf)
    with np.errstate(divide="ignore"):
        return _best(np.log(p) + gumbel(sampling, sequence, position, len(p)))


def _best(scores: np.ndarray) -> Drawn:
    token = int(np.argmax(scores))
    # slices, no copy: a vocabulary is large
    runner_up = max(scores[:token].max(initial=-math.inf), scores[token + 1 :].max(initial=-math.inf))
    return Drawn(token, float(scores[token]) - float(runner_up))
