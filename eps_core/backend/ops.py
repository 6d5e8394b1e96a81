"""Array operations by one name each, so that what Torch and MLX would compute alike is written once.

A backend has one `Ops` of its own, which its shared functions get as their first argument. What both libraries call
alike is used as it is: operators, `reshape`, `swapaxes`, `flatten`, and `sum`, `mean`, `any`, `all`, `cumsum` with
`axis` and `keepdims`. Axes not named are the last one.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from eps_core.attention.kernels import KernelTable
from eps_core.attention.protocol import Array
from eps_core.summaries.base import MEAN_MOST

Summary = dict[str, Array]
Score = tuple[Array, Array | None, Array | None]


# operations that both libraries have under these names
ALIKE = (
    "abs", "broadcast_to", "ceil", "clip", "concatenate", "exp", "expm1", "finfo", "floor", "isfinite", "isnan", "log",
    "logaddexp", "logsumexp", "maximum", "minimum", "nan_to_num", "round", "sigmoid", "sqrt", "stack", "tanh", "where",
    "zeros_like",
)  # fmt: skip


class Ops:
    """The operations of one array library, which a backend fills in, and numbers that all methods make of them."""

    def __init_subclass__(cls, library: Any) -> None:
        """Takes the operations of `ALIKE` from a library."""
        for name in ALIKE:
            setattr(cls, name, staticmethod(getattr(library, name)))

    abs: Callable[..., Array]
    broadcast_to: Callable[..., Array]
    ceil: Callable[..., Array]
    clip: Callable[..., Array]
    concatenate: Callable[..., Array]
    exp: Callable[..., Array]
    expm1: Callable[..., Array]
    floor: Callable[..., Array]
    isfinite: Callable[..., Array]
    isnan: Callable[..., Array]
    log: Callable[..., Array]
    logaddexp: Callable[..., Array]
    logsumexp: Callable[..., Array]
    maximum: Callable[..., Array]
    minimum: Callable[..., Array]
    nan_to_num: Callable[..., Array]
    round: Callable[..., Array]
    softplus: Callable[[Array], Array]
    sqrt: Callable[..., Array]
    stack: Callable[..., Array]
    tanh: Callable[..., Array]
    where: Callable[..., Array]
    zeros_like: Callable[..., Array]
    norms: Callable[[Array], Array]  # [.., D] -> [..], L2
    max: Callable[..., Array]  # (x, axis=-1, keepdims=False)
    min: Callable[..., Array]
    boolean: Callable[[Array], Array]
    float32: Callable[[Array], Array]
    float16: Callable[[Array], Array]
    int8: Callable[[Array], Array]
    uint8: Callable[[Array], Array]
    int32: Callable[[Array], Array]
    int64: Callable[[Array], Array]
    sigmoid: Callable[[Array], Array]
    softmax: Callable[[Array], Array]
    finfo: Callable[..., Any]
    kernels_of: Callable[[str], KernelTable]
    dtypes: dict[str, Any]  # by the names of `CacheSpec.dtype`
    short: Any  # whole numbers of 16 bits: those that `view` shows of a float16
    keeps_views: bool  # whether a view of a pool may be kept while the pool is written
    gpu_family: str  # the GPU kernels, which read a cache's `valid`

    # `like`: an array or a cache, which says where something is made
    place: Callable[..., AbstractContextManager[Any]]  # (cache=None): where its arrays, or those at hand, are computed
    on: Callable[[Any, np.ndarray], Array]  # (like, array): a host array there
    index: Callable[[Any, np.ndarray], Array]  # (like, array): host integers there, in the dtype that indices have
    host: Callable[[Array], np.ndarray]  # an array on the host, in its own dtype: bfloat16 as ml_dtypes has it
    native: Callable[[Any, np.ndarray], Array]  # (like, array): a host array there in its dtype: `host` undone
    new: Callable[[Any, Sequence[int], str], Array]  # (device, shape, dtype): zeros that a cache keeps
    full: Callable[[Any, Sequence[int], bool | int | float], Array]  # (like, shape, value): bool, int32 or float32
    arange: Callable[..., Array]  # (like, start, stop, step=1): int32 numbers there
    cast: Callable[[Array, Any], Array]  # (x, dtype): x in a dtype of the library
    copy: Callable[[Array], Array]  # an array that no later write to x changes
    widest: Callable[[Array], Array]  # x in float64, where the library computes with it as fast as with float32
    is_whole: Callable[[Array], bool]  # whether an array is contiguous
    by_token: Callable[[Array, int], Array]  # (units [M, Hkv, U, D], length): their first rows [length, Hkv, D], a copy
    longer: Callable[[Array, int], Array]  # (array [P, ..] of a pool, length): the same with more, empty rows
    gather_rows: Callable[[Array, Array], Array]  # (array [N, ..], rows [..]): [.., ..]
    take_along: Callable[[Array, Array], Array]  # (x, index): x at indices of its last axis
    put_along: Callable[[Array, Array, Any], Array]  # (x, index, values): x with values at indices of its last axis
    running_count: Callable[[Array], Array]  # how many of a mask are True up to each entry
    log_running: Callable[[Array], Array]  # log sum exp up to each entry
    best_first: Callable[[Array], Array]  # indices in falling order of keys, the lower first among equals
    # (keys, count [.., 1], most): the `count`-th largest of keys [.., 1], where 1 <= `count` <= `most`
    kth_largest: Callable[[Array, Array, int], Array]
    variance: Callable[..., Array]  # (x, axis): of the population
    pad: Callable[..., Array]  # (x, after, axis=-1, value=0): x with `after` times `value` behind it
    flip: Callable[[Array], Array]  # x with its last axis reversed
    # of symmetric matrices: eigenvalues, rising, and eigenvectors as columns
    eigh: Callable[[Array], tuple[Array, Array]]
    triangle: Callable[[Array], Array]  # the triangular factor of a QR decomposition
    signbit: Callable[[Array], Array]  # whether x is negative, zeros by their sign
    to_fp8: Callable[[Array], Array]  # float32 numbers of at most 448 as E4M3 in uint8, to the nearest
    from_fp8: Callable[[Array], Array]  # the numbers [..] float32 of E4M3 in uint8
    # (codes [B, Hkv, G, D], a [B, Hkv, R, D]): inner products [B, Hkv, R, G] of stored codes with a
    all_dots: Callable[[Array, Array], Array]
    # (packed [B, Hkv, G, bytes], bits, a [B, Hkv, R, D], has_zero=False): inner products [B, Hkv, R, G] of packed
    # levels (`summaries.rq.levels_of`) with a, their scale left out
    packed_dots: Callable[..., Array]

    def settle(self, cache: Any, layer: int) -> None:
        """Waits until no kernel reads a layer's pools, which are about to be written."""
        wait = self.kernels_of(cache.kernels).settle
        if wait is not None:
            wait()

    def repeat(self, x: Array, times: int) -> Array:
        """Return every element of the last axis `times` times in a row."""
        return self.broadcast_to(x[..., None], (*x.shape, times)).flatten(-2)

    # ------------------------------------------------------------------------------------------------------- rounding

    def up16(self, x: Array) -> Array:
        """Return a float16 that is at least x, for x >= 0. Rounding to nearest loses at most 2^-11; the rest absorbs
        float32."""
        return self.float16(x * (1 + 2.0**-10) + 2.0**-24)

    def next16(self, x: Array) -> Array:
        """Return the next larger float16 of each x >= 0."""
        return (x.view(self.short) + 1).view(self.dtypes["float16"])

    def near16(self, x: Array) -> Array:
        """Return the nearest finite float16: for estimates, never for bounds."""
        return self.float16(self.clip(x, -65504.0, 65504.0))

    def to_byte(self, scale: Array) -> Array:
        """Return float16 numbers >= 0 in one byte: five bits of exponent, three of mantissa, to the nearest."""
        return self.uint8(self.clip((self.int32(scale.view(self.short)) + 64) >> 7, None, 0xF7))

    def from_byte(self, stored: Array) -> Array:
        """Return the numbers [..] float32 that `to_byte` stored."""
        return self.float32((self.cast(stored, self.short) << 7).view(self.dtypes["float16"]))

    def mean_codes(self, mu: Array) -> tuple[Array, Array]:
        """Return int8 codes [.., D] and a float16 scale [..] with mu ~ codes * scale, |codes| <= MEAN_MOST."""
        largest = self.max(self.abs(mu))
        scale = self.up16(largest / MEAN_MOST)
        scale = self.float16(self.where((largest > 0) & self.isfinite(scale), scale, 0))
        return self.int8(self.rounded_codes(mu, scale, MEAN_MOST)), scale

    def rounded_codes(self, x: Array, scale: Array, most: int) -> Array:
        """Return round(x / scale) within +-most, 0 where the scale [..] is 0; float32 [.., D]."""
        step = self.float32(scale)[..., None]
        codes = self.clip(self.round(x / self.where(step > 0, step, 1)), -most, most)
        return self.where(step > 0, codes, 0)

    def key_norm(self, k: Array) -> Array:
        """Return the largest norm [..] of keys k [.., S, D]."""
        return self.max(self.norms(k))

    # -------------------------------------------------------------------------------------------------------- scoring

    def per_group(self, summary: Summary, name: str) -> Array:
        """Return a stored scalar [B, Hkv, G] as float32 [B, Hkv, 1, G]."""
        return self.float32(summary[name])[..., None, :]

    def logit_slack(self, a: Array, norm: Array) -> Array:
        """Return the error that float32 arithmetic may add to a sum of D products of size |a| * norm (four times the
        worst case); the 1 covers log n."""
        return (a.shape[-1] + 32) * 2.0**-21 * (self.norms(a)[..., None] * norm + 1)
