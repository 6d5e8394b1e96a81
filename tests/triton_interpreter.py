"""Triton kernels on a machine without a GPU. Import this before any module that holds kernels: it asks for Triton's
interpreter, fixes what that gets wrong about bfloat16, and has it do once what it does at every call. Where there is a
GPU it does nothing."""

import math
import os
from functools import cache

import numpy as np
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _mend() -> None:
    """The interpreter (3.7) keeps bfloat16 as the bits of a uint16. It multiplies these bits in `tl.dot`, and cuts
    float32 off where GPUs round it to the nearest. And it leaves products to a BLAS, whose sums take an order that
    depends on the CPU and on how many rows there are: summed in float64 and rounded once, a row's bits are its own.
    Masks of a block and a number it leaves as int32, which 3.9 refuses."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    dot, cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def dot_of_values(self, a, b, total, *rest):
        if a.dtype.scalar == tl.bfloat16:
            a, b = (self.cast_impl(x, tl.float32) for x in (a, b))
        if total.data.dtype == np.float32 and a.dtype.scalar in (tl.float16, tl.float32):
            product = np.matmul(a.data, b.data, dtype=np.float64).astype(np.float32)
            return TensorHandle(product + total.data, total.dtype.scalar)
        return dot(self, a, b, total, *rest)

    def cast_to_nearest(self, src, dst_type):
        if src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
            values = torch.from_numpy(np.array(src.data, np.float32)).to(torch.bfloat16)
            return TensorHandle(values.view(torch.int16).numpy().view(np.uint16), tl.bfloat16)
        return cast(self, src, dst_type)

    def of_masks(name, place):
        access = getattr(InterpreterBuilder, name)

        def run(self, *arguments):
            arguments[place].data = arguments[place].data.astype(bool)
            return access(self, *arguments)

        setattr(InterpreterBuilder, name, run)

    InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl = dot_of_values, cast_to_nearest
    of_masks("create_masked_load", 1)
    of_masks("create_masked_store", 2)


def _hasten() -> None:
    """The interpreter (3.7) puts its own operations into `triton.language` for a kernel, and looks through that module
    again whenever the kernel calls a function, a third of all its time; and to look a dtype up it makes a table. It
    reduces by a function of the kernel number by number, computes overflow checks without reporting them, and
    builds the shape of every tensor again. These take two thirds of the remaining time."""
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    patch, look_up = interpreter._patch_lang, interpreter._get_np_dtype
    patched: set[int] = set()
    known: dict[str, np.dtype] = {}

    def patch_once(fn):
        languages = {id(lang) for lang in fn.__globals__.values() if lang is tl or lang is tl.core}
        if languages <= patched:
            return interpreter._LangPatchScope()
        scope = patch(fn)
        restore, before = scope.restore, set(patched)
        patched.update(languages)

        def restored():
            restore()
            patched.intersection_update(before)

        scope.restore = restored
        return scope

    def look_up_once(dtype):
        if type(dtype) is not tl.dtype:  # pointers and blocks: the table is not what takes their time
            return look_up(dtype)
        if dtype.name not in known:
            known[dtype.name] = look_up(dtype)
        return known[dtype.name]

    def reduce_pairs(self, values):
        whole, shape = self.axis is None, values[0].handle.data.shape
        values, axis = self.unravel(values, self.axis)
        while (size := values[0].handle.data.shape[axis]) > 1:
            pairs = [
                self.to_tensor(np.take(value.handle.data, range(first, size, 2), axis), value.dtype)
                for first in (0, 1)
                for value in values
            ]  # neighbours, so that their order stays
            joined = self.combine_fn.fn(*pairs)
            joined = joined if isinstance(joined, tuple) else (joined,)
            assert [one.dtype for one in joined] == [one.dtype for one in values], "a reduction changes the dtype"
            values = joined
        left = () if whole else shape[:axis] + shape[axis + 1 :]
        if self.keep_dims:
            left = (1,) * len(shape) if whole else (*shape[:axis], 1, *shape[axis + 1 :])
        return [self.to_tensor(value.handle.data.reshape(left), value.dtype) for value in values]

    @cache
    def shape_of(shape):
        return tl.core.constexpr(math.prod(shape)), tl.core.tuple([tl.core.constexpr(size) for size in shape])

    def new_tensor(self, handle, kind):
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.numel, self.shape = shape_of(tuple(kind.shape) if kind.is_block() else ())

    interpreter._patch_lang, interpreter._get_np_dtype = patch_once, look_up_once
    interpreter.ReduceOps.generic_reduce = reduce_pairs
    TritonSemantic.binary_op_sanitize_overflow_impl = lambda *_: None
    tl.tensor.__init__ = new_tensor


if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
    _mend()
    _hasten()
