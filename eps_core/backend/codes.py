"""Rows as codes with one float16 scale, and back. What the numbers are: `eps_core.reference.codes`."""

from collections.abc import Callable
from typing import Any

from eps_core.attention.protocol import Array
from eps_core.backend.ops import Ops
from eps_core.config.formats import FORMATS, LEAST, FormatName

BLOCK = FORMATS["nvfp4"].block


def quantise(ops: Ops, rows: Array, bits: FormatName) -> tuple[Array, Array]:
    """(codes [.., `Format.code_bytes`] int8 or uint8, scale [..] float16) of rows [.., D]."""
    x = ops.float32(rows)
    largest = ops.max(ops.abs(x))
    # an array: GPUs multiply by the reciprocal of a number
    wanted = largest / ops.full(largest, largest.shape, float(FORMATS[bits].most))
    scale = ops.float16(wanted)
    scale = ops.where(ops.float32(scale) < wanted, ops.next16(scale), scale)
    scale = ops.where(largest < LEAST, ops.zeros_like(scale), scale)
    usable = (ops.isfinite(scale) & (scale > 0))[..., None]
    encode, _ = CODERS[bits]
    return encode(ops, ops.where(usable, x, 0.0), ops.where(usable, ops.float32(scale)[..., None], 1.0)), scale


def dequantise(ops: Ops, codes: Array, scale: Array, bits: FormatName, dtype: Any) -> Array:
    """Rows [.., D] of `dtype` from what `quantise` gave."""
    _, decode = CODERS[bits]
    values = decode(ops, codes) * ops.float32(scale)[..., None]
    if dtype == ops.dtypes["float16"]:  # whose largest number's code can round past it
        values = ops.clip(values, -65504.0, 65504.0)
    return ops.cast(values, dtype)


# Each format: codes of x [.., D] with scale [.., 1], both float32 and of rows that have codes; numbers [.., D] float32
# of which a value is scale times


def _to_int8(ops: Ops, x: Array, scale: Array) -> Array:
    return ops.int8(ops.round(x / scale))


def _to_fp8(ops: Ops, x: Array, scale: Array) -> Array:
    # the scale keeps this at most 448, but for a rounding, which is nothing beside a step
    return ops.to_fp8(x / scale)


def _to_nvfp4(ops: Ops, x: Array, scale: Array) -> Array:
    """Codes [.., D / 2], then the blocks' scales [.., D / 16]."""
    blocks = x.reshape(*x.shape[:-1], -1, BLOCK)
    shared = _to_fp8(ops, ops.max(ops.abs(blocks)), 6 * scale)
    step = (ops.from_fp8(shared) * scale)[..., None]
    codes = _to_e2m1(ops, ops.where(step > 0, blocks, 0.0) / ops.where(step > 0, step, 1.0))
    return ops.concatenate([_pairs(codes.flatten(-2)), shared], axis=-1)


def _from_nvfp4(ops: Ops, codes: Array) -> Array:
    wide = codes.shape[-1] * BLOCK // (BLOCK + 2)  # of D / 2 + D / 16
    numbers, shared = _from_e2m1(ops, _of_pairs(ops, codes[..., :wide])), ops.from_fp8(codes[..., wide:])
    return (numbers.reshape(*numbers.shape[:-1], -1, BLOCK) * shared[..., None]).flatten(-2)


def _to_e2m1(ops: Ops, y: Array) -> Array:
    """Codes below 16: the sign, then four sizes in steps of .5, two of 1, two of 2."""
    size = ops.clip(ops.abs(y), None, 6.0)
    two, four = ops.float32(size >= 2), ops.float32(size >= 4)
    codes = ops.round(size * (2 - two - four / 2)) + 2 * (two + four)
    return ops.uint8(codes + 8 * ops.float32(ops.signbit(y)))


def _from_e2m1(ops: Ops, codes: Array) -> Array:
    size = ops.float32(codes & 7)
    size = ops.maximum(ops.maximum(size / 2, size - 2), 2 * size - 8)
    return ops.where(codes > 7, -size, size)


def _pairs(codes: Array) -> Array:
    """Codes below 16 [.., D] as bytes [.., D / 2]: the even dimension in the low bits."""
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def _of_pairs(ops: Ops, packed: Array) -> Array:
    return ops.stack([packed & 15, packed >> 4], axis=-1).flatten(-2)


CODERS: dict[FormatName, tuple[Callable[[Ops, Array, Array], Array], Callable[[Ops, Array], Array]]] = {
    8: (_to_int8, lambda ops, codes: ops.float32(codes)),
    "fp8": (_to_fp8, lambda ops, codes: ops.from_fp8(codes)),
    4: (
        lambda ops, x, scale: _pairs(ops.uint8(_to_int8(ops, x, scale) + 8)),
        lambda ops, codes: ops.float32(_of_pairs(ops, codes)) - 8,
    ),
    "nvfp4": (_to_nvfp4, _from_nvfp4),
}
