"""The numbers that codes stand for: rows (the D elements of a token and kv head) as codes with one float16 scale, and
back, in the formats of `config.formats`.

All are symmetric and in float32 with one division, so that codes are the same in every library:

    scale        = the least float16 that is at least max|x| / most, the format's; 0 where max|x| < `LEAST`
    int8, int4     code = round half to even (x / scale), which cannot leave +-most = 127, 7
    fp8            code = E4M3 (4 bits of exponent, 3 of mantissa, no infinity) nearest to x / scale, ties to the even
                   code; most = 448 is its largest number
    nvfp4          each 16 elements share s = E4M3 nearest to max|x| / (6 scale) of these, and code = E2M1 (0, .5, 1,
                   1.5, 2, 3, 4, 6 and a sign) nearest to x / (s scale), 6 at most; most = 6 * 448
    value        = code (* s) * scale, exact in float32, then rounded to the cache's dtype and kept within its range

Where a scale or s is 0, so are codes. Elsewhere E4M3 and E2M1 keep a zero's sign; E4M3's two NaN are never written.
A finite x is within half a scale of its value in int8 and int4; within half the distance of the two numbers about it,
times scale (and s), in fp8 and nvfp4, or there within 6 * 2^-10 scale, where that is more, as an s that is rounded down
clips; within 2^-126 where the scale is 0. A row with NaN or Inf, or whose scale is beyond float16, is NaN throughout:
what refuses these refuses it.

NVFP4 is NVIDIA's format, as vLLM keeps it (dtype "nvfp4"), but for its second scale: there one float32 for a tensor,
max|x| / (6 * 448), here a float16 for a row, because a page is written before its tensor's largest number is known.
"""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from eps_core.config.formats import FORMATS, LEAST, FormatName

BLOCK = FORMATS["nvfp4"].block


def quantise(rows: np.ndarray, bits: FormatName) -> tuple[np.ndarray, np.ndarray]:
    """(codes [.., `Format.code_bytes`] int8 or uint8, scale [..] float16) of rows [.., D]."""
    x, most = rows.astype(np.float32), np.float32(FORMATS[bits].most)
    largest = np.abs(x).max(axis=-1)
    with np.errstate(over="ignore"):
        wanted = largest / most
        scale = wanted.astype(np.float16)
        scale = np.where(scale.astype(np.float32) < wanted, np.nextafter(scale, np.float16(np.inf)), scale)
    scale = np.where(largest < LEAST, np.float16(0), scale)
    usable = (np.isfinite(scale) & (scale > 0))[..., None]
    encode, _ = CODERS[bits]
    return encode(np.where(usable, x, 0), np.where(usable, scale[..., None], 1).astype(np.float32)), scale


def dequantise(codes: np.ndarray, scale: np.ndarray, bits: FormatName, dtype: Any) -> np.ndarray:
    """Rows [.., D] of `dtype` from what `quantise` gave."""
    _, decode = CODERS[bits]
    with np.errstate(invalid="ignore"):
        values = decode(codes) * scale.astype(np.float32)[..., None]
    if dtype == np.float16:  # whose largest number's code can round past it
        values = np.clip(values, -65504, 65504)
    return values.astype(dtype)


# Each format: codes of x [.., D] with scale [.., 1], both float32 and of rows that have codes; numbers [.., D] float32,
# of which a value is scale times


def _to_int8(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return np.round(x / scale).astype(np.int8)


def _to_fp8(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    # the scale keeps this at most 448, but for a rounding, which is nothing beside a step
    return (x / scale).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def _from_fp8(codes: np.ndarray) -> np.ndarray:
    return codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def _to_nvfp4(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Codes [.., D / 2], then the blocks' scales [.., D / 16]."""
    blocks = x.reshape(*x.shape[:-1], -1, BLOCK)
    shared = _to_fp8(np.abs(blocks).max(axis=-1), 6 * scale)
    step = (_from_fp8(shared) * scale)[..., None]
    codes = _to_e2m1(np.where(step > 0, blocks, 0) / np.where(step > 0, step, 1))
    return np.concatenate([_pairs(codes.reshape(x.shape)), shared], axis=-1)


def _from_nvfp4(codes: np.ndarray) -> np.ndarray:
    wide = codes.shape[-1] * BLOCK // (BLOCK + 2)  # of D / 2 + D / 16
    numbers, shared = _from_e2m1(_of_pairs(codes[..., :wide])), _from_fp8(codes[..., wide:])
    return (numbers.reshape(*shared.shape, BLOCK) * shared[..., None]).reshape(numbers.shape)


def _to_e2m1(y: np.ndarray) -> np.ndarray:
    """Codes below 16: the sign, then four sizes in steps of .5, two of 1, two of 2."""
    size = np.minimum(np.abs(y), np.float32(6))
    step = np.where(size < 2, np.float32(0.5), np.where(size < 4, np.float32(1), np.float32(2)))
    before = np.where(size < 2, 0, np.where(size < 4, 2, 4))
    return (np.round(size / step) + before + 8 * np.signbit(y)).astype(np.uint8)


def _from_e2m1(codes: np.ndarray) -> np.ndarray:
    size = (codes & 7).astype(np.float32)
    size = np.maximum(np.maximum(size / 2, size - 2), 2 * size - 8)
    return np.where(codes & 8, -size, size)


def _pairs(codes: np.ndarray) -> np.ndarray:
    """Codes below 16 [.., D] as bytes [.., D / 2]: the even dimension in the low bits."""
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def _of_pairs(packed: np.ndarray) -> np.ndarray:
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], 2 * packed.shape[-1])


CODERS: dict[FormatName, tuple[Callable[[np.ndarray, np.ndarray], np.ndarray], Callable[[np.ndarray], np.ndarray]]] = {
    8: (_to_int8, lambda codes: codes.astype(np.float32)),
    "fp8": (_to_fp8, _from_fp8),
    4: (
        lambda x, scale: _pairs((_to_int8(x, scale) + 8).astype(np.uint8)),
        lambda codes: _of_pairs(codes).astype(np.float32) - 8,
    ),
    "nvfp4": (_to_nvfp4, _from_nvfp4),
}
