"""Rows as codes with one float16 scale, and back. What the numbers are: `eps_core.reference.codes`."""

from collections.abc import Callable

import mlx.core as mx

from eps_core.config.formats import FORMATS, FormatName

LEAST = 2.0**-126
BLOCK = FORMATS["nvfp4"].block


def quantise(rows: mx.array, bits: FormatName) -> tuple[mx.array, mx.array]:
    """(codes [.., `Format.code_bytes`] int8 or uint8, scale [..] float16) of rows [.., D]."""
    x = rows.astype(mx.float32)
    largest = mx.abs(x).max(axis=-1)
    wanted = largest / FORMATS[bits].most
    scale = wanted.astype(mx.float16)
    scale = mx.where(scale.astype(mx.float32) < wanted, (scale.view(mx.int16) + 1).view(mx.float16), scale)
    scale = mx.where(largest < LEAST, mx.zeros_like(scale), scale)
    usable = (mx.isfinite(scale) & (scale > 0))[..., None]
    encode, _ = CODERS[bits]
    return encode(mx.where(usable, x, 0), mx.where(usable, scale[..., None], 1).astype(mx.float32)), scale


def dequantise(codes: mx.array, scale: mx.array, bits: FormatName, dtype: mx.Dtype) -> mx.array:
    """Rows [.., D] of `dtype` from what `quantise` gave."""
    _, decode = CODERS[bits]
    values = decode(codes) * scale.astype(mx.float32)[..., None]
    if dtype == mx.float16:  # whose largest number's code can round past it
        values = mx.clip(values, -65504.0, 65504.0)
    return values.astype(dtype)


# Each format: codes of x [.., D] with scale [.., 1], both float32 and of rows that have codes; numbers [.., D] float32,
# of which a value is scale times


def _to_int8(x: mx.array, scale: mx.array) -> mx.array:
    return mx.round(x / scale).astype(mx.int8)


def _from_int8(codes: mx.array) -> mx.array:
    return codes.astype(mx.float32)


def _to_int4(x: mx.array, scale: mx.array) -> mx.array:
    return _pairs((_to_int8(x, scale) + 8).astype(mx.uint8))


def _from_int4(codes: mx.array) -> mx.array:
    return _of_pairs(codes).astype(mx.float32) - 8


def _to_fp8(x: mx.array, scale: mx.array) -> mx.array:
    """By integers: MLX has `to_fp8` from 0.30 on only. From an exponent of -6 on, eight codes have one step."""
    y = x / scale
    size = mx.abs(y)
    exponent = mx.maximum((size.view(mx.int32) >> 23) - 127, -6)
    steps = mx.round(size * ((130 - exponent) << 23).view(mx.float32)).astype(mx.int32)
    return (8 * (exponent + 6) + steps + 128 * _negative(y)).astype(mx.uint8)


def _from_fp8(codes: mx.array) -> mx.array:
    size = codes.astype(mx.int32) & 127
    exponent, steps = mx.maximum(size >> 3, 1), mx.where(size < 8, size, 8 + (size & 7))
    numbers = steps.astype(mx.float32) * ((exponent + 117) << 23).view(mx.float32)
    return mx.where(codes > 127, -numbers, numbers)


def _to_nvfp4(x: mx.array, scale: mx.array) -> mx.array:
    """Codes [.., D / 2], then the blocks' scales [.., D / 16]."""
    blocks = mx.unflatten(x, -1, (-1, BLOCK))
    shared = _to_fp8(mx.abs(blocks).max(axis=-1), 6 * scale)
    step = (_from_fp8(shared) * scale)[..., None]
    codes = _to_e2m1(mx.where(step > 0, blocks, 0) / mx.where(step > 0, step, 1))
    return mx.concatenate([_pairs(codes.flatten(-2)), shared], axis=-1)


def _from_nvfp4(codes: mx.array) -> mx.array:
    wide = codes.shape[-1] * BLOCK // (BLOCK + 2)  # of D / 2 + D / 16
    numbers, shared = _from_e2m1(_of_pairs(codes[..., :wide])), _from_fp8(codes[..., wide:])
    return (mx.unflatten(numbers, -1, (-1, BLOCK)) * shared[..., None]).flatten(-2)


def _to_e2m1(y: mx.array) -> mx.array:
    """Codes below 16: the sign, then four sizes in steps of .5, two of 1, two of 2."""
    size = mx.minimum(mx.abs(y), 6.0)
    step = mx.where(size < 2, 0.5, mx.where(size < 4, 1.0, 2.0))
    before = mx.where(size < 2, 0, mx.where(size < 4, 2, 4))
    return (mx.round(size / step).astype(mx.int32) + before + 8 * _negative(y)).astype(mx.uint8)


def _from_e2m1(codes: mx.array) -> mx.array:
    size = (codes & 7).astype(mx.float32)
    size = mx.maximum(mx.maximum(size / 2, size - 2), 2 * size - 8)
    return mx.where(codes > 7, -size, size)


def _pairs(codes: mx.array) -> mx.array:
    """Codes below 16 [.., D] as bytes [.., D / 2]: the even dimension in the low bits."""
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def _of_pairs(packed: mx.array) -> mx.array:
    return mx.stack([packed & 15, packed >> 4], axis=-1).flatten(-2)


def _negative(y: mx.array) -> mx.array:
    """The sign bit, of zeros, too."""
    return (y.view(mx.uint32) >> 31).astype(mx.int32)


CODERS: dict[FormatName, tuple[Callable[[mx.array, mx.array], mx.array], Callable[[mx.array], mx.array]]] = {
    8: (_to_int8, _from_int8),
    "fp8": (_to_fp8, _from_fp8),
    4: (_to_int4, _from_int4),
    "nvfp4": (_to_nvfp4, _from_nvfp4),
}
