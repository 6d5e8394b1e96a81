"""How kernels read K and V: as they are, or from codes of 8 and 4 bits, of which one text makes as many kernels.

A row past the end of a pool of values lies in an open unit (`OpenPool`).

Codes (`eps_core.reference.pages`) become values in registers, `code * scale` in float32 rounded to the cache's dtype as
everywhere, and are attended as such: only their bytes come from memory.
"""

from dataclasses import replace
from functools import cache
from typing import NamedTuple

import mlx.core as mx

from eps_core.backend import pages
from eps_core.backend.pages import CodePool, Pool
from eps_mlx.kernels.launch import Kernel

_FROM_CODES = """const auto {name}_held = load_piece<{count}>({name}_pool + {first});
                    const float {name}_step = static_cast<float>({name}_scale[place]);
                    #pragma unroll
                    for (int i = 0; i < VEC; i++) {{
                        const float value = static_cast<float>({code}) * {name}_step;
                        // a code can round past the largest float16; NaN stays
                        const float within = value > 65504.0f ? 65504.0f : value < -65504.0f ? -65504.0f : value;
                        {to}.v[i] = static_cast<T>(HALF ? within : value);
                    }}"""

# bits -> elements of the pool that hold VEC of a row, the first of them, element i
_CODES = {
    8: ("VEC", "from", "{name}_held.v[i]"),
    4: ("(VEC + 1) / 2", "from / 2", "({name}_held.v[i / 2] >> int((from + i) % 2) * 4 & 15) - 8"),
}


def read_values(name: str, bits: int, to: str) -> str:
    """Text that reads the VEC elements `from` on, a size_t, of row `place` of K or V (`name`) into the piece `to`."""
    if bits == 16:
        return (
            f"{to} = load_piece<VEC>(place < pool_rows ? {name}_pool + from "
            f": {name}_open + (from - size_t(pool_rows) * D));"
        )
    count, first, code = _CODES[bits]
    return _FROM_CODES.format(name=name, to=to, count=count, first=first, code=code.format(name=name))


@cache
def reading(kernel: Kernel, bits: tuple[int, int], to: tuple[str, str]) -> Kernel:
    """A kernel for K and V of `bits` each, read into the pieces `to` where its text has READ_K and READ_V. What lies
    beside the pools (`beside`) are inputs after the others."""
    name, inputs, source = kernel.name, kernel.inputs, kernel.source
    for which, held, piece in zip("kv", bits, to, strict=True):
        source = source.replace(f"READ_{which.upper()}", read_values(which, held, piece))
        name = name if held == 16 else f"{name}_{which}{held}"
        inputs = (*inputs, f"{which}_open" if held == 16 else f"{which}_scale")
    return replace(kernel, name=name, inputs=inputs, source=source)


class OpenPool(NamedTuple):
    """A pool [P, Hkv, U, D] with units that are open [N, Hkv, U, D], P + i of a table the i-th."""

    closed: mx.array
    open: mx.array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.closed.shape

    @property
    def dtype(self) -> mx.Dtype:
        return self.closed.dtype


def bits_of(k_pool: Pool, v_pool: Pool) -> tuple[int, int]:
    """Return the bits of an element: 16 of what holds K or V as they are, in whatever dtype."""
    k_bits, v_bits = (int(pool.bits) if isinstance(pool, CodePool) else 16 for pool in (k_pool, v_pool))
    return k_bits, v_bits


def elements_of(pool: Pool) -> mx.array:
    """A pool's values or codes, as a kernel takes them."""
    return pool.closed if isinstance(pool, OpenPool) else pages.arrays_of(pool)[0]


def beside(*pools: Pool) -> list[mx.array]:
    """Return what a kernel reads beside each pool: scales of codes, or open units, or the pool again for neither."""
    return [
        pool.scale if isinstance(pool, CodePool) else pool.open if isinstance(pool, OpenPool) else pool
        for pool in pools
    ]


def rows_of(pool: Pool) -> int:
    """Rows of a pool."""
    num_units, kv_heads, unit_tokens, _ = pool.shape
    assert num_units * kv_heads * unit_tokens < 2**31, "rows of a pool are counted in 32 bits"
    return num_units * kv_heads * unit_tokens


def template_of(k_pool: Pool, v_pool: Pool) -> dict[str, mx.Dtype | bool]:
    """Return what kernels are compiled for besides shapes: the dtype of what is read, and whether that is float16."""
    dtype = k_pool.dtype
    return {"T": dtype, **({"HALF": dtype == mx.float16} if bits_of(k_pool, v_pool) != (16, 16) else {})}
