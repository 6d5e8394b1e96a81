"""How a kernel body reaches a GPU: `mx.fast.metal_kernel` on Apple's, `mx.fast.cuda_kernel` behind macros on NVIDIA's.

Rules for bodies, so that one text compiles as both (letters as in `attention.protocol`):
- `threadgroup` is the only address-space word, `auto` the type of pointers: MLX passes inputs of fewer than 8 elements
  as `constant`, others as `device`.
- A scalar is an input of one element, read as `x[0]`; several integers are one input, made by `integers`.
- Template integers describe a model or a configuration (D, R): each new value compiles again. What grows with
  the context (units of a table, width of a list) is an input.
- `load_piece<N>(p)` reads N elements at once (N a power of two, p aligned to N elements); `.v[i]` are
  they.
- Offsets into pools are `size_t`. A simdgroup has 32 lanes; its operations stand where all of them come by.
- Of Metal's library only what `CUDA_HEADER` defines is used, and mathematics that both name alike.
- Threadgroup memory (32 KiB at most) is read only after a barrier: simd operations order nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import mlx.core as mx

Sizes = tuple[int, int, int]
# what `launch` calls, where set, in place of a GPU: (kernel, inputs, template, grid, threadgroup, shapes, dtypes)
Runner = Callable[
    ["Kernel", list[mx.array], dict[str, Any], Sizes, Sizes, Sequence[tuple[int, ...]], Sequence[mx.Dtype]],
    list[mx.array],
]
runner: Runner | None = None

METAL_HEADER = """
template <typename T, int N>
struct alignas(N * sizeof(T)) Piece {
  T v[N];
};
template <int N, typename T>
inline Piece<T, N> load_piece(const device T* p) {
  return *reinterpret_cast<const device Piece<T, N>*>(p);
}
template <int N, typename T>
inline Piece<T, N> load_piece(const constant T* p) {
  return *reinterpret_cast<const constant Piece<T, N>*>(p);
}
"""

CUDA_HEADER = """
typedef unsigned int uint;
typedef unsigned short ushort;
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
#define threadgroup __shared__
#define thread_index_in_threadgroup (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z))
#define thread_index_in_simdgroup (thread_index_in_threadgroup & 31u)
#define simdgroup_index_in_threadgroup (thread_index_in_threadgroup >> 5)
#define threadgroup_position_in_grid blockIdx
enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
__device__ __forceinline__ mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }
__device__ __forceinline__ void threadgroup_barrier(mem_flags) { __syncthreads(); }
#define EPS_ALL_LANES 0xffffffffu
#define EPS_REDUCE(name, step)                                              \\
  template <typename T>                                                     \\
  __device__ __forceinline__ T name(T a) {                                  \\
    for (int lanes = 16; lanes; lanes >>= 1) {                              \\
      const T b = __shfl_xor_sync(EPS_ALL_LANES, a, lanes);                 \\
      a = step;                                                             \\
    }                                                                       \\
    return a;                                                               \\
  }
EPS_REDUCE(simd_sum, a + b)
EPS_REDUCE(simd_max, a < b ? b : a)
template <typename T>
__device__ __forceinline__ T simd_shuffle(T a, uint lane) { return __shfl_sync(EPS_ALL_LANES, a, lane); }
template <typename T>
__device__ __forceinline__ T simd_shuffle_xor(T a, uint mask) { return __shfl_xor_sync(EPS_ALL_LANES, a, mask); }
template <typename T>
__device__ __forceinline__ T simd_prefix_exclusive_sum(T own) {
  T a = own;
  for (int lanes = 1; lanes < 32; lanes <<= 1) {
    const T b = __shfl_up_sync(EPS_ALL_LANES, a, lanes);
    a = int(thread_index_in_simdgroup) >= lanes ? a + b : a;
  }
  return a - own;
}
template <typename To, typename From>
__device__ __forceinline__ To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From));
  union { From from; To to; } bits;
  bits.from = from;
  return bits.to;
}
struct atomic_uint { uint value; };
constexpr int memory_order_relaxed = 0;
template <typename A, typename V>
__device__ __forceinline__ void atomic_store_explicit(A* a, V value, int) { atomicExch(&a->value, value); }
template <typename A>
__device__ __forceinline__ auto atomic_load_explicit(A* a, int) { return atomicAdd(&a->value, 0); }
template <typename A, typename V>
__device__ __forceinline__ auto atomic_fetch_add_explicit(A* a, V value, int) { return atomicAdd(&a->value, value); }
template <typename T, int N>
struct alignas(N * sizeof(T)) Piece {
  T v[N];
};
template <int N, typename T>
__device__ __forceinline__ Piece<T, N> load_piece(const T* p) { return *reinterpret_cast<const Piece<T, N>*>(p); }
"""


@dataclass(frozen=True)
class Kernel:
    """A kernel's body and the names that it uses for its arrays."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    source: str


def launch(
    kernel: Kernel,
    inputs: list[mx.array],
    template: dict[str, Any],
    grid: Sizes,
    threadgroup: Sizes,
    output_shapes: Sequence[tuple[int, ...]],
    output_dtypes: Sequence[mx.Dtype],
) -> list[mx.array]:
    """The kernel's outputs. `grid` counts threads, not threadgroups; `template` holds dtypes, integers and bools."""
    assert len(inputs) == len(kernel.inputs) and len(output_shapes) == len(output_dtypes) == len(kernel.outputs)
    if runner is not None:
        return runner(kernel, inputs, template, grid, threadgroup, output_shapes, output_dtypes)
    return compiled(kernel, on_metal=mx.metal.is_available())(
        inputs=inputs,
        template=list(template.items()),
        grid=grid,
        threadgroup=threadgroup,
        output_shapes=output_shapes,
        output_dtypes=output_dtypes,
    )


def available() -> bool:
    """Return whether `launch` has anything to run on: an Apple or NVIDIA GPU of this MLX, or a runner."""
    return runner is not None or mx.metal.is_available() or (hasattr(mx, "cuda") and mx.cuda.is_available())


@cache
def compiled(kernel: Kernel, on_metal: bool) -> Any:
    """MLX's object of it; Metal's math mode "safe" (its default) keeps infinities and NaN as IEEE has them."""
    make, header = (mx.fast.metal_kernel, METAL_HEADER) if on_metal else (mx.fast.cuda_kernel, CUDA_HEADER)
    return make(
        name=kernel.name,
        input_names=kernel.inputs,
        output_names=kernel.outputs,
        source=kernel.source,
        header=header,
    )


@lru_cache(maxsize=1024)
def integers(*values: int) -> mx.array:
    """Sizes for a kernel, int32 [len(values)]; kept, so that a step makes none."""
    return mx.array(values, mx.int32)
