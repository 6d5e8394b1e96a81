"""What tests/metal/shim.py sees: each mistake a kernel can make, made once, and a kernel without any."""

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from metal.shim import Statistics, metal_shim  # noqa: F401

from eps_mlx.kernels.launch import Kernel, launch

# two threadgroups of two simdgroups
REVERSE = Kernel(
    "reverse",
    ("x", "y", "factor"),
    ("out",),
    """
    threadgroup float held[D];
    const int i = int(thread_position_in_grid.x);
    const int t = int(thread_index_in_threadgroup);
    const Piece<T, 2> pair = load_piece<2>(x + i / 2 * 2);
    held[t] = static_cast<float>(pair.v[i % 2]) * factor[0];
    const float total = simd_sum(static_cast<float>(y[i]));
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[i] = static_cast<T>(held[D - 1 - t] + total);
""",
)


def reverse(kernel: Kernel, dtype: mx.Dtype = mx.float16) -> np.ndarray:
    inputs = [mx.arange(128).astype(dtype), mx.ones(128).astype(dtype), mx.array([0.5])]
    (out,) = launch(kernel, inputs, {"T": dtype, "D": 64}, (128, 1, 1), (64, 1, 1), [(128,)], [dtype])
    return np.array(out.astype(mx.float32))


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_a_right_kernel(metal_shim: dict[str, Statistics], dtype: mx.Dtype) -> None:  # noqa: F811
    true = np.arange(128).reshape(2, 64)[:, ::-1].reshape(-1) * 0.5 + 32
    assert np.array_equal(reverse(REVERSE, dtype), np.array(mx.array(true).astype(dtype).astype(mx.float32)))
    seen = metal_shim["reverse"]
    assert seen.read == {"x": 128 * dtype.size, "y": 128 * dtype.size, "factor": 4, "out": 0}
    assert seen.loaded["x"] == 2 * seen.read["x"] and seen.stored["out"] == 128 * dtype.size
    assert seen.threadgroups == 2


BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
# name: (text, its replacement, what is said)
MISTAKES = {
    "input past its end": ("y[i]", "y[i + 1]", "out of bounds.* of y, which has 256"),
    "input before its start": ("y[i]", "y[i - 1]", "out of bounds.*-2 of y"),
    "output past its end": ("out[i]", "out[i + 64]", "out of bounds.* of out"),
    "threadgroup array past its end": ("held[D - 1 - t]", "held[D - t]", "out of bounds.* threadgroup array"),
    "misaligned": ("i / 2 * 2", "i / 2 * 2 % 100 + 1", "misaligned read of 4 bytes at byte 2 of x"),
    "two threads write one byte": ("out[i]", "out[i / 2]", "race.* of out"),
    "two threadgroups write one byte": ("out[i]", "out[t]", "race.* of out"),
    "output read before it is written": ("out[i] = ", "out[i] += ", "read before it is written"),
    "no barrier": (BARRIER, "", "race.* threadgroup array"),
    "a simdgroup's barrier is not enough": (BARRIER, BARRIER.replace("threadgroup_b", "simdgroup_b", 1), "race"),
    "barrier on some threads": (BARRIER, f"if (t < 32) {{ {BARRIER} }}", "divergent barrier|race"),
    "simd operation on some lanes": ("simd_sum(", "t % 2 ? 0.0f : simd_sum(", "divergent simd operation"),
    "two simd operations at once": (
        "const float total = simd_sum(static_cast<float>(y[i]));",
        "float total;\nif (t % 2) { total = simd_sum(1.0f); }\nelse { total = simd_sum(2.0f); }",
        "divergent simd operation.* at lines",
    ),
    "too much threadgroup memory": ("held[D]", "held[D * 129]", "33024 bytes of threadgroup memory"),
    "undeclared name": ("factor[0]", "undeclared[0]", "not declared"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_seen(metal_shim: Any, name: str) -> None:  # noqa: F811
    text, replacement, said = MISTAKES[name]
    assert text in REVERSE.source
    with pytest.raises(AssertionError, match=said):
        reverse(replace(REVERSE, source=REVERSE.source.replace(text, replacement)))


def test_memory_is_poisoned(metal_shim: Any) -> None:  # noqa: F811
    """Threadgroup memory and outputs that nobody wrote hold NaN; after a failed launch others run as before."""
    unwritten = replace(REVERSE, source=REVERSE.source.replace("held[t] =", "if (t >= 32) held[t] ="))
    with pytest.raises(AssertionError, match=r"depends on the order|NaN"):
        assert not np.isnan(reverse(unwritten)).any(), "NaN"
    half = replace(REVERSE, source=REVERSE.source.replace("out[i] =", "if (t < 32) out[i] ="))
    assert np.isnan(reverse(half).reshape(4, 32)).all(axis=1).tolist() == [False, True, False, True]
    assert not np.isnan(reverse(REVERSE)).any()
