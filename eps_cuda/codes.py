"""Rows as codes with one float16 scale, and back. What the numbers are: `eps_core.reference.codes`."""

from collections.abc import Callable

import torch
from torch import Tensor

from eps_core.config.formats import FORMATS, FormatName

LEAST = 2.0**-126
BLOCK = FORMATS["nvfp4"].block


def quantise(rows: Tensor, bits: FormatName) -> tuple[Tensor, Tensor]:
    """(codes [.., `Format.code_bytes`] int8 or uint8, scale [..] float16) of rows [.., D]."""
    x = rows.float()
    largest = x.abs().amax(dim=-1)
    # a tensor: GPUs multiply by the reciprocal of a number
    wanted = largest / torch.full_like(largest, FORMATS[bits].most)
    scale = wanted.to(torch.float16)
    scale = torch.where(scale.float() < wanted, (scale.view(torch.int16) + 1).view(torch.float16), scale)
    scale = torch.where(largest < LEAST, 0.0, scale)
    usable = (torch.isfinite(scale) & (scale > 0))[..., None]
    encode, _ = CODERS[bits]
    return encode(torch.where(usable, x, 0.0), torch.where(usable, scale[..., None].float(), 1.0)), scale


def dequantise(codes: Tensor, scale: Tensor, bits: FormatName, dtype: torch.dtype) -> Tensor:
    """Rows [.., D] of `dtype` from what `quantise` gave."""
    _, decode = CODERS[bits]
    values = decode(codes) * scale.float()[..., None]
    if dtype == torch.float16:  # whose largest number's code can round past it
        values = values.clamp(-65504.0, 65504.0)
    return values.to(dtype)


# Each format: codes of x [.., D] with scale [.., 1], both float32 and of rows that have codes; numbers [.., D] float32,
# of which a value is scale times


def _to_int8(x: Tensor, scale: Tensor) -> Tensor:
    return (x / scale).round().to(torch.int8)


def _from_int8(codes: Tensor) -> Tensor:
    return codes.float()


def _to_int4(x: Tensor, scale: Tensor) -> Tensor:
    return _pairs((_to_int8(x, scale) + 8).to(torch.uint8))


def _from_int4(codes: Tensor) -> Tensor:
    return _of_pairs(codes).float() - 8


def _to_fp8(x: Tensor, scale: Tensor) -> Tensor:
    # the scale keeps this at most 448, but for a rounding, which is nothing beside a step
    return (x / scale).to(torch.float8_e4m3fn).view(torch.uint8)


def _from_fp8(codes: Tensor) -> Tensor:
    return codes.view(torch.float8_e4m3fn).float()


def _to_nvfp4(x: Tensor, scale: Tensor) -> Tensor:
    """Codes [.., D / 2], then the blocks' scales [.., D / 16]."""
    blocks = x.unflatten(-1, (-1, BLOCK))
    shared = _to_fp8(blocks.abs().amax(dim=-1), 6 * scale)
    step = (_from_fp8(shared) * scale)[..., None]
    codes = _to_e2m1(torch.where(step > 0, blocks, 0.0) / torch.where(step > 0, step, 1.0))
    return torch.cat([_pairs(codes.flatten(-2)), shared], dim=-1)


def _from_nvfp4(codes: Tensor) -> Tensor:
    wide = codes.shape[-1] * BLOCK // (BLOCK + 2)  # of D / 2 + D / 16
    numbers, shared = _from_e2m1(_of_pairs(codes[..., :wide])), _from_fp8(codes[..., wide:])
    return (numbers.unflatten(-1, (-1, BLOCK)) * shared[..., None]).flatten(-2)


def _to_e2m1(y: Tensor) -> Tensor:
    """Codes below 16: the sign, then four sizes in steps of .5, two of 1, two of 2."""
    size = y.abs().clamp(max=6.0)
    two, four = (size >= 2).float(), (size >= 4).float()
    codes = (size * (2 - two - four / 2)).round() + 2 * (two + four)
    return (codes + 8 * torch.signbit(y).float()).to(torch.uint8)


def _from_e2m1(codes: Tensor) -> Tensor:
    size = (codes & 7).float()
    size = torch.maximum(torch.maximum(size / 2, size - 2), 2 * size - 8)
    return torch.where(codes > 7, -size, size)


def _pairs(codes: Tensor) -> Tensor:
    """Codes below 16 [.., D] as bytes [.., D / 2]: the even dimension in the low bits."""
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def _of_pairs(packed: Tensor) -> Tensor:
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)


CODERS: dict[FormatName, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    8: (_to_int8, _from_int8),
    "fp8": (_to_fp8, _from_fp8),
    4: (_to_int4, _from_int4),
    "nvfp4": (_to_nvfp4, _from_nvfp4),
}
