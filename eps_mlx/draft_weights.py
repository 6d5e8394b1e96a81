"""4-bit weights through MLX's own quantisation."""

from dataclasses import dataclass

import mlx.core as mx

from eps_core.decode.draft_weights import BITS


@dataclass(frozen=True)
class Packed:
    """A linear layer's weight [N, K] in groups of g.

    Steps and offsets have the model's dtype on a GPU. On a CPU they are float32, and so are the activations on their
    way through: there MLX's product sums in the dtype of its input, which in bfloat16 cost a tenth of the output over
    8,192 inputs, and eight times the time.
    """

    codes: mx.array  # [N, K/8] uint32
    steps: mx.array  # [N, K/g]
    offsets: mx.array  # [N, K/g]
    group_size: int

    def __call__(self, x: mx.array, bias: mx.array | None) -> mx.array:
        """[T, N] of x [T, K]."""
        y = mx.quantized_matmul(
            x.astype(self.steps.dtype), self.codes, self.steps, self.offsets, group_size=self.group_size, bits=BITS
        ).astype(x.dtype)
        return y if bias is None else y + bias

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.steps.nbytes + self.offsets.nbytes


def pack(weight: mx.array, group_size: int, device: str) -> Packed:
    """Return weight [N, K] packed. Quantised from float32: on a CPU MLX rounds to the dtype of its input on the way."""
    codes, steps, offsets = mx.quantize(weight.astype(mx.float32), group_size=group_size, bits=BITS)
    dtype = mx.float32 if device == "cpu" else weight.dtype
    packed = Packed(codes, steps.astype(dtype), offsets.astype(dtype), group_size)
    mx.eval(packed.codes, packed.steps, packed.offsets)
    return packed
