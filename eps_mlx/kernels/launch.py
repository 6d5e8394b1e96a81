"""How a kernel body reaches a GPU: `mx.fast.metal_kernel` on Apple's, `mx.fast.cuda_kernel` behind macros on NVIDIA's.

Rules for bodies, so that one text compiles as both:
- `threadgroup` is the only address-space word, `auto` the type of pointers: MLX passes inputs of fewer than 8 elements
  as `constant`, others as `device`.
- A scalar is an input of one element, read as `x[0]`; several integers are one input, made by `integers`.
- Template integers describe a model or a configuration (D, R): each new value compiles again. What grows with
  the context (units of a table, width of a list) is an input.
- `load_piece<N>(p)` reads N elements at once (N a power of two, p aligned to N elements); `.v[i]` are
  they. `load4(p)` is `load_piece<4>(p)`.
- Offsets into pools are `size_t`. A simdgroup has 32 lanes; its operations stand where all of them come by.
- Of Metal's library only what `CUDA_HEADER` defines is used, and mathematics that both name alike.
- Threadgroup memory (32 KiB at most) is read only after a barrier: simd operations order nothing.
"""

from collections.abc import Callable, Mapping, Sequence
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
template <typename T>
inline Piece<T, 4> load4(const device T* p) {
  return load_piece<4>(p);
}
template <typename T>
inline Piece<T, 4> load4(const constant T* p) {
  return load_piece<4>(p);
}
"""

CUDA_HEADER = """
typedef unsigned int uint;
typedef unsigned short ushort;
typedef unsigned char uchar;
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
#define threadgroup __shared__
#define thread_index_in_threadgroup (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z))
#define thread_index_in_simdgroup (thread_index_in_threadgroup & 31u)
#define simdgroup_index_in_threadgroup (thread_index_in_threadgroup >> 5)
#define thread_position_in_threadgroup threadIdx
#define threadgroup_position_in_grid blockIdx
#define threads_per_threadgroup blockDim
#define threadgroups_per_grid gridDim
#define thread_position_in_grid                                                              \\
  (uint3{blockIdx.x * blockDim.x + threadIdx.x, blockIdx.y * blockDim.y + threadIdx.y,        \\
         blockIdx.z * blockDim.z + threadIdx.z})
enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
__device__ __forceinline__ mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }
__device__ __forceinline__ void threadgroup_barrier(mem_flags) { __syncthreads(); }
__device__ __forceinline__ void simdgroup_barrier(mem_flags) { __syncwarp(); }
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
EPS_REDUCE(simd_min, b < a ? b : a)
EPS_REDUCE(simd_or, a | b)
EPS_REDUCE(simd_and, a& b)
template <typename T>
__device__ __forceinline__ T simd_shuffle(T a, uint lane) { return __shfl_sync(EPS_ALL_LANES, a, lane); }
template <typename T>
__device__ __forceinline__ T simd_broadcast(T a, uint lane) { return __shfl_sync(EPS_ALL_LANES, a, lane); }
template <typename T>
__device__ __forceinline__ T simd_shuffle_xor(T a, uint mask) { return __shfl_xor_sync(EPS_ALL_LANES, a, mask); }
template <typename T>
__device__ __forceinline__ T simd_prefix_inclusive_sum(T a) {
  for (int lanes = 1; lanes < 32; lanes <<= 1) {
    const T b = __shfl_up_sync(EPS_ALL_LANES, a, lanes);
    a = int(thread_index_in_simdgroup) >= lanes ? a + b : a;
  }
  return a;
}
template <typename T>
__device__ __forceinline__ T simd_prefix_exclusive_sum(T a) { return simd_prefix_inclusive_sum(a) - a; }
__device__ __forceinline__ bool simd_any(bool a) { return __any_sync(EPS_ALL_LANES, a); }
__device__ __forceinline__ bool simd_all(bool a) { return __all_sync(EPS_ALL_LANES, a); }
__device__ __forceinline__ uint popcount(uint a) { return __popc(a); }
template <typename To, typename From>
__device__ __forceinline__ To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From));
  union { From from; To to; } bits;
  bits.from = from;
  return bits.to;
}
struct atomic_uint { uint value; };
struct atomic_int { int value; };
constexpr int memory_order_relaxed = 0;
template <typename A, typename V>
__device__ __forceinline__ void atomic_store_explicit(A* a, V value, int) { atomicExch(&a->value, value); }
template <typename A>
__device__ __forceinline__ auto atomic_load_explicit(A* a, int) { return atomicAdd(&a->value, 0); }
template <typename A, typename V>
__device__ __forceinline__ auto atomic_fetch_add_explicit(A* a, V value, int) { return atomicAdd(&a->value, value); }
template <typename A, typename V>
__device__ __forceinline__ auto atomic_fetch_max_explicit(A* a, V value, int) { return atomicMax(&a->value, value); }
template <typename A, typename V>
__device__ __forceinline__ auto atomic_fetch_or_explicit(A* a, V value, int) { return atomicOr(&a->value, value); }
template <typename T, int N>
struct alignas(N * sizeof(T)) Piece {
  T v[N];
};
template <int N, typename T>
__device__ __forceinline__ Piece<T, N> load_piece(const T* p) { return *reinterpret_cast<const Piece<T, N>*>(p); }
template <typename T>
__device__ __forceinline__ Piece<T, 4> load4(const T* p) { return load_piece<4>(p); }
"""


@dataclass(frozen=True)
class Kernel:
    """A kernel's body and the names that it uses for its arrays. `header` holds what stands before it, as Metal."""

    name: str
    inputs: Sequence[str]
    outputs: Sequence[str]
    source: str
    header: str = ""

    def __post_init__(self) -> None:
        for names in ("inputs", "outputs"):
            object.__setattr__(self, names, tuple(getattr(self, names)))


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
    compiled = metal_kernel(kernel) if mx.metal.is_available() else _cuda_kernel(kernel)
    return compiled(
        inputs=inputs,
        template=template_list(template),
        grid=grid,
        threadgroup=threadgroup,
        output_shapes=output_shapes,
        output_dtypes=output_dtypes,
    )


def available() -> bool:
    """Return whether `launch` has anything to run on: an Apple or NVIDIA GPU of this MLX, or a runner."""
    return runner is not None or mx.metal.is_available() or _has_cuda()


def template_list(template: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The template as MLX takes it."""
    return list(template.items())


@cache
def metal_kernel(kernel: Kernel) -> Any:
    """MLX's object of it; math mode "safe" (its default) keeps infinities and NaN as IEEE has them."""
    return mx.fast.metal_kernel(
        name=kernel.name,
        input_names=list(kernel.inputs),
        output_names=list(kernel.outputs),
        source=kernel.source,
        header=METAL_HEADER + kernel.header,
    )


@cache
def _cuda_kernel(kernel: Kernel) -> Any:
    return mx.fast.cuda_kernel(
        name=kernel.name,
        input_names=list(kernel.inputs),
        output_names=list(kernel.outputs),
        source=kernel.source,
        header=CUDA_HEADER + kernel.header,
    )


def _has_cuda() -> bool:
    return hasattr(mx, "cuda") and mx.cuda.is_available()


@lru_cache(maxsize=1024)
def integers(*values: int) -> mx.array:
    """Sizes for a kernel, int32 [len(values)]; kept, so that a step makes none."""
    return mx.array(values, mx.int32)
