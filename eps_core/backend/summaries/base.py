"""Mathematics that several methods share."""

import math
from typing import NamedTuple

from eps_core.attention.protocol import Array
from eps_core.backend.ops import Ops


class Part(NamedTuple):
    """Keys of R groups that one write does not make whole, for the methods that follow partial groups."""

    keys: Array  # [R, Hkv, L, D] float32
    present: Array  # [R, 1, L, 1] bool: which of them are keys
    number: Array  # [R, 1, 1] float32: how many
    before: Array  # [R, 1, 1] float32: keys of the group that came earlier; 0: it starts here


SCHATTEN_DOUBLINGS = 4


def right_singular(ops: Ops, k: Array, count: int) -> tuple[Array, Array]:
    """(squared singular values [.., count], right singular vectors as rows [.., count, D]) of k [.., S, D], largest
    first, zeros where there are none; through the smaller Gram matrix."""
    n, head_dim = k.shape[-2:]
    tall = n >= head_dim
    transposed = k.swapaxes(-1, -2)
    # eigh raises on NaN and Inf, which `check_finite` must be left to report
    gram = ops.nan_to_num(transposed @ k if tall else k @ transposed, nan=0.0, posinf=0.0, neginf=0.0)
    values, vectors = ops.eigh(gram)
    kept = min(count, n, head_dim)
    values = ops.clip(ops.flip(values)[..., :kept], 0, None)
    rows = ops.flip(vectors)[..., :kept].swapaxes(-1, -2)
    if not tall:
        rows = rows @ k
        size = ops.norms(rows)[..., None]
        rows = ops.where(size > 0, rows / ops.where(size > 0, size, 1), 0)
    return ops.pad(values, count - kept), ops.pad(rows, count - kept, axis=-2)


def direction_codes(ops: Ops, direction: Array) -> tuple[Array, Array]:
    """int8 codes as float32 [.., D] of a direction, and 1 / |codes| [..] (0 where the direction is 0)."""
    largest = ops.max(ops.abs(direction), keepdims=True)
    codes = ops.round(direction / ops.where(largest > 0, largest, 1) * 127)
    length = ops.norms(codes)
    return codes, ops.where(length > 0, 1 / ops.where(length > 0, length, 1), 0)


def frobenius(ops: Ops, matrix: Array) -> Array:
    """The Frobenius norm [..] of matrices [.., n, m]."""
    return ops.norms(matrix.flatten(-2, -1))


def schatten_bound(ops: Ops, matrix: Array) -> Array:
    """(tr E^16)^(1/16) >= the spectral norm of the symmetric E [.., n, n]: valid without an eigensolver. Scaled by the
    Frobenius norm so that the sixteenth power stays within float32; the 1e-4 covers rounding."""
    size = frobenius(ops, matrix)
    power = matrix / ops.where(size > 0, size, 1)[..., None, None]
    for _ in range(SCHATTEN_DOUBLINGS - 1):
        power = power @ power
    # tr (P P) of a symmetric P is its squared Frobenius norm: the last product is not needed
    trace = (power * power).sum(axis=(-1, -2))
    return size * trace ** (0.5**SCHATTEN_DOUBLINGS) * (1 + 1e-4)


def bennett(ops: Ops, b: Array, v: Array) -> Array:
    """log( b^2/(b^2+v) exp(-v/b) + v/(b^2+v) exp(b) ): the largest log E exp(X) of a centred X <= b with variance <= v
    (Bennett 1962). Monotone in both, so upper bounds may be plugged in. 0 where b or v is 0."""
    spread = (b > 0) & (v > 0)
    b, v = ops.where(spread, b, 1.0), ops.where(spread, v, 1.0)
    # log(b^2/(b^2+v)) and log(v/(b^2+v)) without overflow or cancellation
    ratio = ops.log(v) - 2 * ops.log(b)
    value = ops.logaddexp(-ops.softplus(ratio) - v / b, -ops.softplus(-ratio) + b)
    return ops.where(spread, value, 0.0)


def random_energy(ops: Ops, v: Array, n: int) -> Array:
    """v/2 while sqrt(v) <= sqrt(2 ln n), else sqrt(2 ln n) sqrt(v) - ln n (Derrida 1981)."""
    edge = math.sqrt(2 * math.log(n))
    return ops.where(ops.sqrt(v) <= edge, v / 2, edge * ops.sqrt(v) - math.log(n))
