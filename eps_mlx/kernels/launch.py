"""How a kernel body reaches an Apple GPU: `mx.fast.metal_kernel`.

Rules for bodies, so that one text compiles for Metal and for the tests' emulator (letters as in `attention.protocol`):
- `threadgroup` is the only address-space word, `auto` the type of pointers: MLX passes inputs of fewer than 8 elements
  as `constant`, others as `device`.
- A scalar is an input [1], read as `x[0]`, or [], read as `x`; several integers are one input, made by `integers`.
- Template integers describe a model or a configuration (D, R): each new value compiles again. What grows with
  the context (units of a table, width of a list) is an input.
- `load_piece<N>(p)` reads N elements at once (N a power of two, p aligned to N elements); `.v[i]` are
  they.
- Offsets into pools are `size_t`. A simdgroup has 32 lanes; its operations stand where all of them come by.
- Of Metal's library only what the emulator (tests/metal) defines is used.
- Threadgroup memory (32 KiB at most) is read only after a barrier: simd operations order nothing.

A GPU takes fewer threads in a threadgroup of a kernel that needs many registers, and MLX says so only when it computes.
So `launch` computes what each kernel gives once, which fails inside `mx.compile`, `mx.vmap` and `mx.export_function`; a
function that is `fitted` is called again after a refusal, and asks for half as many (`threads_of`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, wraps
from typing import Any, ParamSpec, TypeVar

import mlx.core as mx

P = ParamSpec("P")
R = TypeVar("R")
Sizes = tuple[int, int, int]
# what `launch` calls, where set, in place of a GPU: (kernel, inputs, template, grid, threadgroup, shapes, dtypes)
Runner = Callable[
    ["Kernel", list[mx.array], dict[str, Any], Sizes, Sizes, Sequence[tuple[int, ...]], Sequence[mx.Dtype]],
    list[mx.array],
]
runner: Runner | None = None
_REFUSAL = "maximum allowed threads per threadgroup"  # as MLX says it
_computed: set[tuple[Any, ...]] = set()  # what is compiled by itself, with its threads, that a GPU has run
_refused: set[tuple[str, int | None, int]] = set()  # kernels' names, D and the threads that were too many

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
    # MLX passes an input of fewer than 8 elements as another type
    once = kernel.name, threadgroup, *template.values(), *[x.dtype for x in inputs], *[x.size < 8 for x in inputs]
    if once not in _computed:
        mx.eval(inputs)  # a refusal loses what else is computed with the kernel
    try:
        if runner is not None:
            outputs = runner(kernel, inputs, template, grid, threadgroup, output_shapes, output_dtypes)
        else:
            outputs = compiled(kernel)(
                inputs=inputs,
                template=list(template.items()),
                grid=grid,
                threadgroup=threadgroup,
                output_shapes=output_shapes,
                output_dtypes=output_dtypes,
            )
        if once not in _computed:
            mx.eval(outputs)
            _computed.add(once)
    except ValueError as error:
        place = kernel.name, template.get("D"), threadgroup[0]
        if _REFUSAL not in str(error) or place in _refused:
            raise
        _refused.add(place)
        raise TooManyThreads(str(error)) from error
    return outputs


class TooManyThreads(ValueError):
    """A GPU takes fewer threads in a threadgroup of a kernel."""


def fitted(call: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that launches a kernel of as many threads as `threads_of` says: it is called again where
    these were too many."""

    @wraps(call)
    def again(*args: P.args, **kwargs: P.kwargs) -> R:
        while True:
            try:
                return call(*args, **kwargs)
            except TooManyThreads:
                pass  # what is refused a second time, because no fewer serve, is another error

    return again


def threads_of(kernel: Kernel, threads: int, head_dim: int | None = None) -> int:
    """Return the threads, whole simdgroups, of a threadgroup: half as many as often as the GPU has refused them."""
    while threads > 32 and (kernel.name, head_dim, threads) in _refused:
        threads = threads // 64 * 32
    return threads


def available() -> bool:
    """Return whether `launch` has anything to run on: an Apple GPU, or a runner."""
    return runner is not None or mx.metal.is_available()


@cache
def compiled(kernel: Kernel) -> Any:
    """MLX's object of it; Metal's math mode "safe" (its default) keeps infinities and NaN as IEEE has them."""
    return mx.fast.metal_kernel(
        name=kernel.name,
        input_names=kernel.inputs,
        output_names=kernel.outputs,
        source=kernel.source,
        header=METAL_HEADER,
    )


@lru_cache(maxsize=1024)
def integers(*values: int) -> mx.array:
    """Sizes for a kernel, int32 [len(values)]; kept, so that a step makes none."""
    return mx.array(values, mx.int32)
