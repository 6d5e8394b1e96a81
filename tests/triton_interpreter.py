"""Triton kernels on a machine without a GPU. Import this before any module that holds kernels: it asks for Triton's
interpreter, and mends what that gets wrong about bfloat16. Where there is a GPU it does nothing."""

import os

import numpy as np
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _mend() -> None:
    """The interpreter (3.9) keeps bfloat16 as the bits of a uint16. It multiplies these bits in `tl.dot`, and cuts
    float32 off where GPUs round it to the nearest."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    dot, cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def dot_of_values(self, a, b, *rest):
        if a.dtype.scalar == tl.bfloat16:
            a, b = (self.cast_impl(x, tl.float32) for x in (a, b))
        return dot(self, a, b, *rest)

    def cast_to_nearest(self, src, dst_type):
        if src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
            values = torch.from_numpy(np.array(src.data, np.float32)).to(torch.bfloat16)
            return TensorHandle(values.view(torch.int16).numpy().view(np.uint16), tl.bfloat16)
        return cast(self, src, dst_type)

    InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl = dot_of_values, cast_to_nearest


if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
    _mend()
