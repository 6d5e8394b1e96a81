"""Quantised weights through Torch's own kernels for the CPU, on which torchao's weight-only quantisation rests, too."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

LARGEST_CODE = 127  # of 8 bits
LEVELS = 15  # steps between the 16 codes of 4 bits
LEAST_STEP = 1e-7
MIDDLE_CODE = 8  # the kernel's zeros belong to it
ROWS_MULTIPLE = 16  # of outputs: what the kernel takes
CHUNK_ROWS = 1024  # quantised at a time, in memory that is used again; a multiple of 64, the kernel's widest tile


@dataclass(frozen=True)
class Groups:
    """A linear layer's 4-bit weight [N, K] in groups of g. Rows are filled up to a multiple of 16.

    Activations, steps and zeros are bfloat16 on their way through whatever the model's dtype; the kernel sums in
    float32. It is made for bfloat16 and few rows: on two cores with AVX-512 and AMX it was 2.5 to 3 times as fast as
    the full bfloat16 product at one row, 1.7 times at four and slower at nine, where with float32 activations it took
    five times as long as the full float32 product. Rounding to bfloat16 is small beside that to 4 bits.
    """

    codes: Tensor  # [rows, K/2] uint8, in the kernel's order
    steps_zeros: Tensor  # [K/g, rows, 2] bfloat16: step, and the weight of code 8
    group_size: int
    outputs: int  # N

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """[T, N] of x [T, K], in the dtype of x."""
        rounded = x.to(self.steps_zeros.dtype).contiguous()
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(rounded, self.codes, self.group_size, self.steps_zeros)
        y = y[:, : self.outputs].to(x.dtype)
        return y if bias is None else y + bias

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.steps_zeros.nbytes


@dataclass(frozen=True)
class Rows:
    """A linear layer's 8-bit weight [N, K], K a multiple of 16: where it is not, the kernel reads past a row."""

    codes: Tensor  # [N, K] int8
    steps: Tensor  # [N], in the model's dtype

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """[T, N] of x [T, K], in the dtype of x."""
        y = torch._weight_int8pack_mm(x.contiguous(), self.codes, self.steps)
        return y if bias is None else y + bias

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.steps.nbytes


def affine(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """(codes [N, K] int32, steps [N, K/g], offsets [N, K/g] float32): see `reference.quantised_weights.affine`."""
    groups = weight.float().unflatten(1, (-1, group_size))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    below = low.abs() > high.abs()
    edges = torch.where(below, low, high)
    steps = ((high - low) / LEVELS).clamp(min=LEAST_STEP)
    steps = torch.where(below, steps, -steps)
    to_zero = torch.round(edges / steps)
    steps = torch.where(to_zero == 0, steps, edges / to_zero)
    offsets = torch.where(to_zero == 0, 0.0, edges)
    codes = ((groups - offsets) / steps).round_().clamp_(0, LEVELS)
    return codes.flatten(1).int(), steps[..., 0], offsets[..., 0]


def pack_groups(weight: Tensor, group_size: int) -> Groups:
    """Return weight [N, K] in 4 bits, on the CPU."""
    codes, steps_zeros = [], []
    for rows in weight.split(CHUNK_ROWS):
        part, steps, offsets = affine(functional.pad(rows, (0, 0, 0, -len(rows) % ROWS_MULTIPLE)), group_size)
        codes.append(torch.ops.aten._convert_weight_to_int4pack_for_cpu(part, 1))
        steps_zeros.append(torch.stack([steps, offsets + MIDDLE_CODE * steps], -1).transpose(0, 1).to(torch.bfloat16))
    return Groups(torch.cat(codes), torch.cat(steps_zeros, 1).contiguous(), group_size, len(weight))


def pack_rows(weight: Tensor) -> Rows:
    """Return weight [N, K] in 8 bits: see `reference.quantised_weights.symmetric`."""
    codes, steps = [], []
    for rows in weight.split(CHUNK_ROWS):
        largest = rows.abs().amax(1, keepdim=True)
        # codes are about the step as it is stored, so that its rounding is no error
        step = torch.where(largest > 0, largest.float() / LARGEST_CODE, 1.0).to(weight.dtype)
        codes.append((rows.float() / step.float()).round_().clamp_(-LARGEST_CODE, LARGEST_CODE).to(torch.int8))
        steps.append(step[:, 0])
    return Rows(torch.cat(codes), torch.cat(steps))
