"""Quantised weights through MLX's own quantisation."""

from dataclasses import dataclass

import mlx.core as mx

from eps_core.decode.quantised_weights import group_size

LARGEST_CODE = 127  # of 8 bits
MIDDLE_CODE = 128  # MLX's codes have no sign


@dataclass(frozen=True)
class Packed:
    """A linear layer's weight [N, K] in groups of g.

    Steps and offsets have the model's dtype on a GPU. On a CPU they are float32, and so are the activations on their
    way through: there MLX's product sums in the dtype of its input, which in bfloat16 cost a tenth of the output over
    8,192 inputs, and eight times the time.
    """

    codes: mx.array  # [N, K * bits / 32] uint32
    steps: mx.array  # [N, K/g]
    offsets: mx.array  # [N, K/g]
    group_size: int
    bits: int

    def __call__(self, x: mx.array, bias: mx.array | None) -> mx.array:
        """[T, N] of x [T, K]."""
        y = mx.quantized_matmul(
            x.astype(self.steps.dtype), self.codes, self.steps, self.offsets, group_size=self.group_size, bits=self.bits
        ).astype(x.dtype)
        return y if bias is None else y + bias

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.steps.nbytes + self.offsets.nbytes


def pack_groups(weight: mx.array, group_size: int, device: str) -> Packed:
    """Return weight [N, K] in 4 bits. Quantised from float32: on a CPU MLX rounds to the dtype of its input on the
    way."""
    return _packed(
        *mx.quantize(weight.astype(mx.float32), group_size=group_size, bits=4), weight, group_size, 4, device
    )


def pack_rows(weight: mx.array, device: str) -> Packed:
    """Return weight [N, K] in 8 bits: see `reference.quantised_weights.symmetric`. Groups of a row share its step."""
    wide, size = weight.astype(mx.float32), group_size(weight.shape[1])
    assert size is not None
    largest = mx.abs(wide).max(axis=1, keepdims=True)
    steps = mx.where(largest > 0, largest / LARGEST_CODE, 1.0)
    if device != "cpu":
        steps = steps.astype(weight.dtype).astype(mx.float32)  # codes are about the step as it is stored
    codes = mx.clip(mx.round(wide / steps), -LARGEST_CODE, LARGEST_CODE) + MIDDLE_CODE
    steps = mx.repeat(steps, weight.shape[1] // size, axis=1)
    return _packed(codes.astype(mx.uint8).view(mx.uint32), steps, -MIDDLE_CODE * steps, weight, size, 8, device)


def _packed(
    codes: mx.array, steps: mx.array, offsets: mx.array, weight: mx.array, group_size: int, bits: int, device: str
) -> Packed:
    dtype = mx.float32 if device == "cpu" else weight.dtype
    packed = Packed(codes, steps.astype(dtype), offsets.astype(dtype), group_size, bits)
    mx.eval(packed.codes, packed.steps, packed.offsets)
    return packed
