"""Array operations by one name each, so that what Torch and MLX would compute alike is written once.

A backend has one `Ops` of its own, which its shared functions get as their first argument. What both libraries call
alike is used as it is: operators, `reshape`, `swapaxes`, `flatten`, and `sum`, `mean`, `any`, `all`, `cumsum` with
`axis` and `keepdims`. Axes not named are the last one.
"""

from abc import ABC, abstractmethod
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


class Ops(ABC):
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
    keeps_views: bool  # whether a view of a pool may be kept while the pool is written
    gpu_family: str  # the GPU kernels, which read a cache's `valid`

    @abstractmethod
    def place(self, cache: Any = None) -> AbstractContextManager[Any]:
        """Return the context in which the arrays of a cache are computed, or those at hand where there is none."""

    @abstractmethod
    def on(self, like: Any, array: np.ndarray) -> Array:
        """Return a host array where `like`, an array or a cache, is."""

    @abstractmethod
    def index(self, like: Any, array: np.ndarray) -> Array:
        """Return host integers where `like` is, in the dtype that indices have."""

    @abstractmethod
    def host(self, array: Array) -> np.ndarray:
        """Return an array on the host, in its own dtype: bfloat16 as ml_dtypes has it."""

    @abstractmethod
    def native(self, like: Any, array: np.ndarray) -> Array:
        """Return a host array where `like` is, in its own dtype: the inverse of `host`."""

    @abstractmethod
    def new(self, device: Any, shape: Sequence[int], dtype: str) -> Array:
        """Return zeros that a cache keeps."""

    @abstractmethod
    def full(self, like: Any, shape: Sequence[int], value: bool | int | float) -> Array:
        """Return bool, int32 or float32 numbers, as `value` is, where `like` is."""

    @abstractmethod
    def cast(self, x: Array, dtype: Any) -> Array:
        """Return x in a dtype of the library."""

    @abstractmethod
    def copy(self, x: Array) -> Array:
        """Return an array that no later write to x changes."""

    @abstractmethod
    def widest(self, x: Array) -> Array:
        """Return x in float64, where the library computes with it as fast as with float32."""

    @abstractmethod
    def is_whole(self, pool: Array) -> bool:
        """Return whether an array is contiguous."""

    @abstractmethod
    def by_token(self, units: Array, length: int) -> Array:
        """Return the first `length` rows [length, Hkv, D] of units [M, Hkv, U, D], a copy."""

    @abstractmethod
    def longer(self, array: Array, length: int) -> Array:
        """Return an array [P, ..] of a pool with more, empty rows."""

    @abstractmethod
    def gather_rows(self, array: Array, rows: Array) -> Array:
        """Return rows [..] of an array [N, ..]: [.., ..]."""

    @abstractmethod
    def take_along(self, x: Array, index: Array) -> Array:
        """Return x at indices of its last axis."""

    @abstractmethod
    def put_along(self, x: Array, index: Array, values: Array) -> Array:
        """Return x with values at indices of its last axis."""

    @abstractmethod
    def running_count(self, mask: Array) -> Array:
        """Return how many are True up to each entry."""

    @abstractmethod
    def log_running(self, x: Array) -> Array:
        """Return log sum exp up to each entry."""

    @abstractmethod
    def best_first(self, keys: Array) -> Array:
        """Return indices in falling order of keys, the lower first among equals."""

    @abstractmethod
    def kth_largest(self, keys: Array, count: Array, most: int) -> Array:
        """Return the `count`-th [.., 1] largest of keys, where 1 <= `count` <= `most`."""

    @abstractmethod
    def arange(self, like: Any, start: int, stop: int, step: int = 1) -> Array:
        """Return int32 numbers where `like` is."""

    @abstractmethod
    def variance(self, x: Array, axis: int) -> Array:
        """Return the population variance."""

    @abstractmethod
    def pad(self, x: Array, after: int, axis: int = -1, value: float = 0) -> Array:
        """Return x with `after` times `value` behind it."""

    @abstractmethod
    def flip(self, x: Array) -> Array:
        """Return x with its last axis reversed."""

    def repeat(self, x: Array, times: int) -> Array:
        """Return every element of the last axis `times` times in a row."""
        return self.broadcast_to(x[..., None], (*x.shape, times)).flatten(-2)

    @abstractmethod
    def eigh(self, matrix: Array) -> tuple[Array, Array]:
        """Return eigenvalues, rising, and eigenvectors as columns of symmetric matrices."""

    @abstractmethod
    def triangle(self, matrix: Array) -> Array:
        """Return the triangular factor of a QR decomposition."""

    @abstractmethod
    def next16(self, x: Array) -> Array:
        """Return the next larger float16 of each x >= 0."""

    @abstractmethod
    def signbit(self, x: Array) -> Array:
        """Return whether x is negative, zeros by their sign."""

    @abstractmethod
    def to_fp8(self, x: Array) -> Array:
        """Return float32 numbers of at most 448 as E4M3 in uint8, to the nearest."""

    @abstractmethod
    def from_fp8(self, codes: Array) -> Array:
        """Return the numbers [..] float32 of E4M3 in uint8."""

    @abstractmethod
    def to_byte(self, scale: Array) -> Array:
        """Return float16 numbers >= 0 in one byte: five bits of exponent, three of mantissa, to the nearest."""

    @abstractmethod
    def from_byte(self, stored: Array) -> Array:
        """Return the numbers [..] float32 that `to_byte` stored."""

    @abstractmethod
    def all_dots(self, codes: Array, a: Array) -> Array:
        """Return inner products [B, Hkv, R, G] of stored codes [B, Hkv, G, D] with a [B, Hkv, R, D]."""

    @abstractmethod
    def packed_dots(self, packed: Array, bits: int, a: Array, has_zero: bool = False) -> Array:
        """Return inner products [B, Hkv, R, G] of packed levels [B, Hkv, G, bytes] (`summaries.rq.levels_of`) with a
        [B, Hkv, R, D], their scale left out."""

    # ------------------------------------------------------------------------------------------------------- rounding

    def up16(self, x: Array) -> Array:
        """Return a float16 that is at least x, for x >= 0. Rounding to nearest loses at most 2^-11; the rest absorbs
        float32."""
        return self.float16(x * (1 + 2.0**-10) + 2.0**-24)

    def near16(self, x: Array) -> Array:
        """Return the nearest finite float16: for estimates, never for bounds."""
        return self.float16(self.clip(x, -65504.0, 65504.0))

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
