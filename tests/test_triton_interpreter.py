"""The tests' interpreter of Triton reduces as Triton does: every number, in order."""

import numpy as np
import torch
import triton
import triton.language as tl
import triton_interpreter


@triton.jit
def _join(first, total, other_first, other_total):
    return first, total + other_total


@triton.jit
def _reduce(x, out, N: tl.constexpr):
    value = tl.load(x + tl.arange(0, N))
    first, total = tl.reduce((value, value), 0, _join)
    tl.store(out, first)
    tl.store(out + 1, total)


def test_a_reduction_takes_every_number_in_order() -> None:
    values = torch.arange(3, 11, dtype=torch.float32, device=triton_interpreter.DEVICE)
    out = torch.empty(2, device=values.device)
    _reduce[(1,)](values, out, 8)
    np.testing.assert_array_equal(out.cpu().numpy(), [3, 52])
