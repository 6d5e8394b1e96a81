"""The parts that all rewrites share: the layer that they are given, what they give back, and codes of an interval.

A rewrite takes one layer's K and V of a whole prompt when its prefill ends and says what attention is to read instead,
with the bytes that this would take in its own format: codes, scales, centroids, projections, all counted. It is
measured by round trip: what a format can say lies in an ordinary cache and is decoded from; there is no pool of the
format and no kernel that reads it. So quality and bytes are the format's, times are not. Tokens that are decoded later
stay as they are.

A rewrite is a module with `SOURCE` and `rewrite(layer, ..)`, whose further arguments are its settings.
Letters: T tokens of the prompt, H kv heads, D head dim, N rows that a head holds afterwards.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

ELEMENT_BYTES = 2  # of what stays as it is, scales, norms, coordinates and centroids: 16 bits


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer of one prompt. Raises ValueError without a token, and where a number of K or V is beyond float16, which
    scales are in."""

    keys: np.ndarray  # [T, H, D] float32, after RoPE: token t has position t
    values: np.ndarray  # [T, H, D] float32
    frequencies: np.ndarray  # [D/2] float64: RoPE's, radians per position; dimension i turns with i + D/2
    query_squares: np.ndarray  # [H, D/2] float64: of each such pair, the mean square of the prompt's queries: over
    # tokens, and over the query heads that share the kv head

    def __post_init__(self) -> None:
        if not len(self.keys):
            raise ValueError("a prompt without tokens has nothing to rewrite")
        for name, array in (("K", self.keys), ("V", self.values)):
            largest = np.abs(array).max(initial=0)
            if not largest <= np.finfo(np.float16).max:  # NaN, too
                raise ValueError(f"{name} holds {largest}, and scales are float16: no format can say it")


@dataclass(frozen=True, eq=False)
class Rewritten:
    """The rows that attention reads of a layer instead, by kv head, and the bytes of its format. `positions` are those
    whose rotation a row's key holds."""

    keys: Sequence[np.ndarray]  # [H] of [N, D] float32, after RoPE
    values: Sequence[np.ndarray]  # [H] of [N, D] float32
    positions: Sequence[np.ndarray]  # [H] of [N] int64, ascending
    row_bytes: int  # of all rows: codes and what belongs to some tokens alone
    table_bytes: int  # of what belongs to a head, and is read with any of its rows

    @property
    def num_bytes(self) -> int:
        return self.row_bytes + self.table_bytes


def in_place(keys: np.ndarray, values: np.ndarray, row_bytes: int, table_bytes: int = 0) -> Rewritten:
    """Return the rewrite to rows [T, H, D] of the same tokens. Raises ValueError where they are not finite."""
    if not (np.isfinite(keys).all() and np.isfinite(values).all()):
        raise ValueError("scales are float16, and what they are of is beyond its range: no format can say it")
    positions = [np.arange(len(keys))] * keys.shape[1]
    k, v = ([array[:, head].astype(np.float32) for head in range(keys.shape[1])] for array in (keys, values))
    return Rewritten(k, v, positions, row_bytes, table_bytes)


def at_least(x: np.ndarray) -> np.ndarray:
    """The least float16 that is at least x [..]."""
    with np.errstate(over="ignore"):
        near = np.asarray(x, np.float64).astype(np.float16)
    return np.where(near < x, np.nextafter(near, np.float16(np.inf)), near)


def at_most(x: np.ndarray) -> np.ndarray:
    """The largest float16 that is at most x [..]."""
    return -at_least(-np.asarray(x, np.float64))


def between(x: np.ndarray, bits: int) -> np.ndarray:
    """x [.., G] as `bits` say it of G numbers between their least and largest (KIVI's quantiser): zero + code * scale,
    both float16. Zero is rounded down and scale up, so that nothing is clipped: within scale / 2."""
    x, most = x.astype(np.float64), 2**bits - 1
    zero = at_most(x.min(-1, keepdims=True)).astype(np.float64)
    scale = at_least((x.max(-1, keepdims=True) - zero) / most).astype(np.float64)
    codes = np.round((x - zero) / np.where(scale > 0, scale, 1.0))
    said: np.ndarray = zero + codes * scale
    return said


def about_zero(x: np.ndarray, bits: int) -> np.ndarray:
    """x [.., G] as `bits` say it of G numbers by one float16 scale: code * scale, codes of +-(2^(bits - 1) - 1). The
    scale is rounded up, so that nothing is clipped: within scale / 2."""
    x, most = x.astype(np.float64), 2 ** (bits - 1) - 1
    scale = at_least(np.abs(x).max(-1, keepdims=True) / most).astype(np.float64)
    said: np.ndarray = np.round(x / np.where(scale > 0, scale, 1.0)) * scale
    return said


def packed(bits: int) -> int:
    """Bytes of so many bits side by side."""
    return -(-bits // 8)


def turned(keys: np.ndarray, positions: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    """Keys [N, D] rotated on by RoPE to positions [N], or back by negative ones: float64."""
    half = keys.shape[1] // 2
    pairs = keys[:, :half].astype(np.float64) + 1j * keys[:, half:].astype(np.float64)
    pairs = pairs * np.exp(1j * positions[:, None] * frequencies)
    return np.concatenate([pairs.real, pairs.imag], axis=1)
