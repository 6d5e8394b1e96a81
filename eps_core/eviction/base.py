"""Definitions that all eviction policies share: what they may ask of a head, which rows are kept whatever their score,
and how scores become kept rows.

A policy is a module with `SPEC` and `keep(layers, budget, rule)`: of the heads `layers[l][h]` the rows that each
keeps, ascending. A `budget` is the rows that a head keeps: exactly min(budget, T) of T, or, where heads may differ
(`PolicySpec.uneven`), that many a head on average (`rows_in_all`). What a paper keeps besides its scores, sinks and the
latest tokens, is here the rule's pinned rows, the same for every policy.

Statistics are rounded to float32, scores are computed of them in float64 and rounded to float32 before they are
compared, and ties go to the row with the lower index. So backends whose statistics agree to the last bits of float32
usually keep the same rows, and the order of a sum in float64 does not decide.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eps_core.errors import require

Kept = list[list[np.ndarray]]
# scores that differ by less than this share of their size differ by rounding: they have no spread to be divided by
FLAT = 1e-6


@dataclass(frozen=True)
class Head:
    """Statistics that a policy may ask of one kv head of one layer of one sequence, at one moment: T rows in the order
    of their slots, R query heads that share them, the last W queries (the newest last), head dim D."""

    positions: np.ndarray  # [T] int64: absolute; distinct, ascending unless holes were filled
    length: int  # tokens that the sequence has had in all: positions are below it, and eviction does not lower it
    window: np.ndarray | None = None  # [R, W, T] float32: softmax weights of the last W queries (W <= SPEC.window,
    # fewer where the sequence has had fewer), 0 where a row is after the query
    sums: np.ndarray | None = None  # [R, T] float64: over all queries so far, the weight of each row
    squares: np.ndarray | None = None  # [R, T] float64: the same of weights squared, of the queries that are at least
    # SPEC.buffer tokens after the row
    keys: np.ndarray | None = None  # [T, D] float32, as attention reads them: after RoPE
    queries: np.ndarray | None = None  # [R, W, D] float32, after RoPE, unscaled: of the last W queries
    query_mean: np.ndarray | None = None  # [R, D/2] complex128: mean over all queries so far, before RoPE, as complex
    # pairs (front half + i back half)
    query_abs: np.ndarray | None = None  # [R, D/2] float64: mean modulus of the same
    frequencies: np.ndarray | None = None  # [D/2] float64: RoPE's, radians per position; comes with keys
    future: np.ndarray | None = None  # [R, T] float64: the weight that queries still to come give (evaluation only)
    prompt: int = 0  # tokens of the prompt, which come first: the last one, that the first step reads, among them

    @property
    def rows(self) -> int:
        return len(self.positions)


@dataclass(frozen=True)
class PolicySpec:
    """Facts of a policy: what must be gathered for it, and when it evicts."""

    source: str  # paper and code; a reconstruction where it says so
    deviations: str = "none"  # where defaults and formula differ from that source
    num_recent_tokens: float = 32  # how many of the newest rows are pinned by default; below 1, a share of the budget
    window: int = 0  # W of `Head.window` and `Head.queries`, tokens; 0: neither is gathered
    sums: bool = False
    squares: bool = False
    buffer: int = 0  # tokens by which a query must be after a row to count in its `squares`
    keys: bool = False  # with `frequencies`
    queries: bool = False
    query_moments: bool = False  # `query_mean` and `query_abs`
    future: bool = False
    at_prefill: bool = True  # evicts at the end of prefill
    while_decoding: bool = True  # and every so many tokens afterwards
    uneven: bool = False  # heads may keep different numbers of rows
    prompt: bool = False  # keeps all of the prompt: a budget counts it and so many generated tokens


@dataclass(frozen=True)
class Rule:
    """Rows that every policy keeps whatever its scores say, and the seed of policies that draw."""

    num_sink_tokens: int = 4  # positions below are pinned: attention sinks
    num_recent_tokens: int = 32  # as many of the newest rows are pinned
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_sink_tokens", "num_recent_tokens", "seed"):
            value = getattr(self, name)
            require(
                value >= 0, f"{name.removeprefix('num_').replace('_', '-')} {value} of an eviction must be 0 or more"
            )


# ----------------------------------------------------------------------------------------------------------- statistics


def given(statistic: np.ndarray | None) -> np.ndarray:
    """A statistic that a policy's facts ask for. Raises ValueError where it was not gathered."""
    if statistic is None:
        raise ValueError("a statistic that the policy's facts ask for was not gathered")
    return statistic


def rounded(statistic: np.ndarray | None) -> np.ndarray:
    """float64 (complex128) of a statistic rounded to float32. Raises ValueError where it was not gathered."""
    statistic = given(statistic)
    if np.iscomplexobj(statistic):
        return statistic.astype(np.complex64).astype(np.complex128)
    return statistic.astype(np.float32).astype(np.float64)


def by_position(head: Head) -> np.ndarray:
    """Row indices [T] in the order of their positions, where neighbours are neighbours in the text."""
    return np.argsort(head.positions)


def older(head: Head, rule: Rule) -> np.ndarray:
    """Row indices in the order of their positions, without the newest that are pinned: those that the queries of a
    window judge. The newest were seen by some of these only."""
    return by_position(head)[: max(head.rows - rule.num_recent_tokens, 0)]


def require_same_positions(heads: Sequence[Head], policy: str) -> None:
    """Raises ValueError unless all of these heads hold the same positions, in one order."""
    if not all(np.array_equal(heads[0].positions, head.positions) for head in heads):
        raise ValueError(f"{policy} keeps the same rows of several heads, which hold different ones")


def seen(head: Head, num_queries: int) -> np.ndarray:
    """[W, T] bool: whether the last W queries see a row; they stand at the last W positions of the sequence."""
    found: np.ndarray = head.positions <= head.length - num_queries + np.arange(num_queries)[:, None]
    return found


def pairs(head: Head) -> np.ndarray:
    """Keys [T, D/2] complex128 as cached, as the pairs that RoPE rotates: front half + i back half."""
    keys = rounded(head.keys)
    half = keys.shape[1] // 2
    found: np.ndarray = keys[:, :half] + 1j * keys[:, half:]
    return found


def neighbours(values: np.ndarray, kernel: int) -> np.ndarray:
    """Return [kernel, .., T]: of each of values [.., T] itself and those around it, 0 beyond either end."""
    padded = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(kernel // 2, kernel // 2)])
    return np.stack([padded[..., shift : shift + values.shape[-1]] for shift in range(kernel)])


def standard(values: np.ndarray, mean: np.ndarray, deviation: np.ndarray, size: np.ndarray) -> np.ndarray:
    """z-scores of `values`; 0 where the deviation is of the order of float32's rounding of numbers of this size."""
    spread = deviation > FLAT * size
    z: np.ndarray = np.where(spread, (values - mean) / np.where(spread, deviation, 1.0), 0.0)
    return z


def draws(seed: int, layer: int, head: int, positions: np.ndarray) -> np.ndarray:
    """A uniform number inside (0, 1) of each row, [T] float64: number `position` of the stream of Philox (Salmon et
    al. 2011) that (seed, layer, head) key, so that a row keeps its number through evictions."""
    key = np.random.SeedSequence([seed, layer, head]).generate_state(2, np.uint64)
    raw = np.random.Philox(key=key).random_raw(int(positions.max(initial=-1)) + 1)[positions]
    # the middles of 2^53 equal parts, the last of which would round to 1
    uniform: np.ndarray = np.minimum(((raw >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53, 1 - 2.0**-53)
    return uniform


# -------------------------------------------------------------------------------------------------- from scores to rows


def pinned(head: Head, rule: Rule) -> np.ndarray:
    """Row indices that are kept whatever their score, in the order in which a budget that is too small for all takes
    them: the newest from the last on, then the sinks from the first on."""
    order = by_position(head)
    newest = order[max(head.rows - rule.num_recent_tokens, 0) :][::-1]
    sinks = order[: head.rows - len(newest)]
    return np.concatenate([newest, sinks[head.positions[sinks] < rule.num_sink_tokens]])


def descending(scores: np.ndarray) -> np.ndarray:
    """Indices of scores [n], the largest first: compared in float32, ties in the order of indices, NaN last."""
    with np.errstate(over="ignore"):
        return np.argsort(-np.asarray(scores, np.float64).astype(np.float32), kind="stable")


def ranked(head: Head, scores: np.ndarray, rule: Rule) -> np.ndarray:
    """Return all row indices [T] in the order in which they are kept: the pinned, then by score [T], the largest
    first."""
    first = pinned(head, rule)
    order = descending(scores)
    return np.concatenate([first, order[~np.isin(order, first)]])


def rows_in_all(heads: Sequence[Head], budget: int) -> int:
    """Rows that an uneven policy keeps of these heads together: `budget` a head, or all there are. A head that holds
    less leaves its places to others; otherwise every eviction would shrink a cache that the last one left uneven."""
    return min(budget * len(heads), sum(head.rows for head in heads))


def made_exact(wanted: np.ndarray, least: np.ndarray, most: np.ndarray, total: int) -> np.ndarray:
    """Return `wanted` rows of each head within `least` and `most`, brought to this sum one row a head at a time: rows
    are added from the first head on and taken from the last, so that what fell from layer to layer still does."""
    given = np.minimum(wanted, most).ravel()
    while missing := total - int(given.sum()):
        open_to = np.flatnonzero(given < most.ravel()) if missing > 0 else np.flatnonzero(given > least.ravel())[::-1]
        given[open_to[: abs(missing)]] += np.sign(missing)
    return given.reshape(wanted.shape)


def best(head: Head, scores: np.ndarray, budget: int, rule: Rule) -> np.ndarray:
    """The rows that a head keeps by its scores [T]: min(budget, T) indices, ascending."""
    return np.sort(ranked(head, scores, rule)[:budget])


def best_of_each(layers: list[list[Head]], scores: list[list[np.ndarray]], budget: int, rule: Rule) -> Kept:
    """`best` of every head, by scores[l][h] [T]."""
    return [
        [best(head, score, budget, rule) for head, score in zip(heads, of_layer, strict=True)]
        for heads, of_layer in zip(layers, scores, strict=True)
    ]
