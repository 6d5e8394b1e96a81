"""Functions that all methods share, float32 in MLX operations.

One file is one method, a module with the functions of its namesake in `eps_core.summaries`, which has the sources and
formulas, and whose facts and fields it shares:

- `build(store, constants, k [.., Hkv, S, D])`: stored arrays [.., Hkv, fields] of keys, float32, exactly as attention
  will read them;
- `score(store, constants, summary [B, Hkv, G, ..], a [B, Hkv, R, D])`, a = scale * q: `(estimate, lower, upper)`, each
  [B, Hkv, R, G] or None, of log A_p, the natural log of the group's softmax mass (scaled logits): `estimate` ranks and
  is no bound, `lower <= log A_p <= upper` for every q. Stored scalars are rounded to their safe side, and `slack` pays
  for float32 arithmetic;
- where its spec says so: `extend` and `finalize`, which follow partial groups, and `rescore`.

`constants`: what a layer keeps apart from its groups, see `eps_core.summaries.table.constants`, and of key codes
`centre`; of methods that score by place, `groups` [G] and `length` [B, 1, 1, 1] of the sequences.
"""

import math
from typing import NamedTuple

import mlx.core as mx

Summary = dict[str, mx.array]
Score = tuple[mx.array, mx.array | None, mx.array | None]


class Part(NamedTuple):
    """Keys of R groups that one write does not make whole, for the methods that follow partial groups."""

    keys: mx.array  # [R, Hkv, L, D] float32
    present: mx.array  # [R, 1, L, 1] bool: which of them are keys
    number: mx.array  # [R, 1, 1] float32: how many
    before: mx.array  # [R, 1, 1] float32: keys of the group that came earlier; 0: it starts here


SCHATTEN_DOUBLINGS = 4


# ------------------------------------------------------------------------------------------------------------- rounding


def up16(x: mx.array) -> mx.array:
    """A float16 that is at least x, for x >= 0. Rounding to nearest loses at most 2^-11; the rest absorbs float32."""
    return (x * (1 + 2.0**-10) + 2.0**-24).astype(mx.float16)


def near16(x: mx.array) -> mx.array:
    """The nearest finite float16: for estimates, never for bounds."""
    return mx.clip(x, -65504.0, 65504.0).astype(mx.float16)


def mean_codes(mu: mx.array, most: int = 127) -> tuple[mx.array, mx.array]:
    """int8 codes [.., D] and a float16 scale [..] with mu ~ codes * scale, |codes| <= most."""
    largest = mx.abs(mu).max(axis=-1)
    scale = up16(largest / most)
    usable = (largest > 0) & mx.isfinite(scale)
    codes = rounded_codes(mu, mx.where(usable, scale, 0), most)
    return codes.astype(mx.int8), mx.where(usable, scale, 0).astype(mx.float16)


def to_byte(scale: mx.array) -> mx.array:
    """float16 numbers >= 0 in one byte: five bits of exponent and three of mantissa, to the nearest."""
    return mx.minimum((scale.view(mx.uint16).astype(mx.int32) + 64) >> 7, 0xF7).astype(mx.uint8)


def from_byte(stored: mx.array) -> mx.array:
    """The numbers [..] float32 that `to_byte` stored."""
    return widened((stored.astype(mx.uint16) << 7).view(mx.float16))


def rounded_codes(x: mx.array, scale: mx.array, most: int) -> mx.array:
    """round(x / scale) within +-most, 0 where the scale [..] is 0; float32 [.., D]."""
    step = scale.astype(mx.float32)[..., None]
    codes = mx.clip(mx.round(x / mx.where(step > 0, step, 1)), -most, most)
    return mx.where(step > 0, codes, 0)


def widened(x: mx.array) -> mx.array:
    return x.astype(mx.float32)


def norms(x: mx.array) -> mx.array:
    return mx.sqrt((x * x).sum(axis=-1))


def key_norm(k: mx.array) -> mx.array:
    return norms(k).max(axis=-1)


def right_singular(k: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """(squared singular values [.., count], right singular vectors as rows [.., count, D]) of k [.., S, D], largest
    first, zeros where there are none; through the smaller Gram matrix. eigh exists on the CPU only."""
    n, head_dim = k.shape[-2:]
    tall = n >= head_dim
    transposed = k.swapaxes(-1, -2)
    # eigh raises on NaN and Inf, which `check_finite` must be left to report
    gram = mx.nan_to_num(transposed @ k if tall else k @ transposed, nan=0.0, posinf=0.0, neginf=0.0)
    values, vectors = mx.linalg.eigh(gram, stream=mx.cpu)
    kept = min(count, n, head_dim)
    values = mx.maximum(values[..., ::-1][..., :kept], 0)
    rows = vectors[..., ::-1][..., :kept].swapaxes(-1, -2)
    if not tall:
        rows = rows @ k
        size = norms(rows)[..., None]
        rows = mx.where(size > 0, rows / mx.where(size > 0, size, 1), 0)
    if kept < count:
        lead = [(0, 0)] * (k.ndim - 2)
        values = mx.pad(values, [*lead, (0, count - kept)])
        rows = mx.pad(rows, [*lead, (0, count - kept), (0, 0)])
    return values, rows


def direction_codes(direction: mx.array) -> tuple[mx.array, mx.array]:
    """int8 codes as float32 [.., D] of a direction, and 1 / |codes| [..] (0 where the direction is 0)."""
    largest = mx.abs(direction).max(axis=-1, keepdims=True)
    codes = mx.round(direction / mx.where(largest > 0, largest, 1) * 127)
    length = norms(codes)
    return codes, mx.where(length > 0, 1 / mx.where(length > 0, length, 1), 0)


def schatten_bound(matrix: mx.array) -> mx.array:
    """(tr E^16)^(1/16) >= the spectral norm of the symmetric E [.., n, n]: valid without an eigensolver. Scaled by the
    Frobenius norm so that the sixteenth power stays within float32; the 1e-4 covers rounding."""
    size = mx.sqrt((matrix * matrix).sum(axis=(-1, -2)))
    power = matrix / mx.where(size > 0, size, 1)[..., None, None]
    for _ in range(SCHATTEN_DOUBLINGS - 1):
        power = power @ power
    # tr (P P) of a symmetric P is its squared Frobenius norm: the last product is not needed
    trace = (power * power).sum(axis=(-1, -2))
    return size * trace ** (0.5**SCHATTEN_DOUBLINGS) * (1 + 1e-4)


# -------------------------------------------------------------------------------------------------------------- scoring


def all_dots(codes: mx.array, a: mx.array) -> mx.array:
    """Inner products [B, Hkv, R, G] of stored codes [B, Hkv, G, D] with a [B, Hkv, R, D]."""
    return a @ widened(codes).swapaxes(-1, -2)


def per_group(summary: Summary, name: str) -> mx.array:
    """A stored scalar [B, Hkv, G] as float32 [B, Hkv, 1, G]."""
    return widened(summary[name])[..., None, :]


def logit_slack(a: mx.array, norm: mx.array) -> mx.array:
    """Return the error that float32 arithmetic may add to a sum of D products of size |a| * norm (four times the worst
    case); the 1 covers log n."""
    return (a.shape[-1] + 32) * 2.0**-21 * (norms(a)[..., None] * norm + 1)


def bennett(b: mx.array, v: mx.array) -> mx.array:
    """log( b^2/(b^2+v) exp(-v/b) + v/(b^2+v) exp(b) ): the largest log E exp(X) of a centred X <= b with variance <= v
    (Bennett 1962). Monotone in both, so upper bounds may be plugged in. 0 where b or v is 0."""
    spread = (b > 0) & (v > 0)
    b, v = mx.where(spread, b, 1.0), mx.where(spread, v, 1.0)
    # log(b^2/(b^2+v)) and log(v/(b^2+v)) without overflow or cancellation
    ratio = mx.log(v) - 2 * mx.log(b)
    value = mx.logaddexp(-mx.logaddexp(0.0, ratio) - v / b, -mx.logaddexp(0.0, -ratio) + b)
    return mx.where(spread, value, 0.0)


def random_energy(v: mx.array, n: int) -> mx.array:
    """v/2 while sqrt(v) <= sqrt(2 ln n), else sqrt(2 ln n) sqrt(v) - ln n (Derrida 1981)."""
    edge = math.sqrt(2 * math.log(n))
    return mx.where(mx.sqrt(v) <= edge, v / 2, edge * mx.sqrt(v) - math.log(n))
