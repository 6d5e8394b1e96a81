"""Torch's array operations, by the names of `eps_core.backend.ops`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from eps_core.backend.ops import Ops
from eps_core.backend.summaries.rq import levels_of, unpack_codes
from eps_core.cpu import host
from eps_cuda.device import DTYPES, empty_pool, to_numpy
from eps_cuda.kernels.choose import kernels_of

FULL = {bool: torch.bool, int: torch.int32, float: torch.float32}  # dtypes of `full`
PIECE_GROUPS = 256  # groups that a CPU decodes at once, to stay in its cache; changes speed only


def multiplies(x: Tensor) -> bool:
    """Return whether the device of x multiplies numbers of its dtype itself, without widening them."""
    return x.dtype != torch.bfloat16 or x.device.type != "cpu" or not host.widens_bfloat16()


def _reduced(reduce: Callable[..., Tensor]) -> Any:
    return staticmethod(lambda x, axis=-1, keepdims=False: reduce(x, dim=axis, keepdim=keepdims))


def _cast(dtype: torch.dtype) -> Any:
    return staticmethod(lambda x: x.to(dtype))


class TorchOps(Ops, library=torch):
    softplus = staticmethod(torch.nn.functional.softplus)
    norms = staticmethod(lambda x: torch.linalg.vector_norm(x, dim=-1))
    softmax = staticmethod(lambda x: torch.softmax(x, dim=-1))
    running_count = staticmethod(lambda mask: mask.cumsum(dim=-1))
    log_running = staticmethod(lambda x: torch.logcumsumexp(x, dim=-1))
    flip = staticmethod(lambda x: x.flip(-1))
    triangle = staticmethod(lambda matrix: torch.linalg.qr(matrix, mode="r").R)
    to_fp8 = staticmethod(lambda x: x.to(torch.float8_e4m3fn).view(torch.uint8))
    from_fp8 = staticmethod(lambda codes: codes.view(torch.float8_e4m3fn).float())
    host, copy, signbit = staticmethod(to_numpy), staticmethod(torch.clone), staticmethod(torch.signbit)
    cast, widest = staticmethod(Tensor.to), staticmethod(Tensor.double)
    is_whole = staticmethod(Tensor.is_contiguous)
    kernels_of = staticmethod(kernels_of)
    dtypes, short, gpu_family, keeps_views = DTYPES, torch.int16, "triton", True
    max, min = _reduced(torch.amax), _reduced(torch.amin)
    float32, float16, int8 = _cast(torch.float32), _cast(torch.float16), _cast(torch.int8)
    boolean, uint8, int32, int64 = _cast(torch.bool), _cast(torch.uint8), _cast(torch.int32), _cast(torch.int64)

    def place(self, cache: Any = None) -> AbstractContextManager[Any]:
        # entering it costs as much as a small operation
        return nullcontext() if torch.is_inference_mode_enabled() else torch.inference_mode()

    def on(self, like: Any, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(like.device, non_blocking=True)

    def index(self, like: Any, array: np.ndarray) -> Tensor:
        return self.on(like, array.astype(np.int64, copy=False))

    def native(self, like: Any, array: np.ndarray) -> Tensor:
        if array.dtype == ml_dtypes.bfloat16:
            return self.on(like, array.view(np.int16)).view(torch.bfloat16)
        return self.on(like, array)

    def new(self, device: Any, shape: Sequence[int], dtype: str) -> Tensor:
        return empty_pool(shape, getattr(torch, dtype), torch.device(device)).zero_()

    def full(self, like: Any, shape: Sequence[int], value: bool | int | float) -> Tensor:
        dtype = FULL[type(value)]
        return torch.full(tuple(shape), value, dtype=dtype, device=like.device)

    def by_token(self, units: Tensor, length: int) -> Tensor:
        """Each head is contiguous in memory."""
        by_head = units.transpose(0, 1).clone(memory_format=torch.contiguous_format)
        return by_head.flatten(1, 2)[:, :length].transpose(0, 1)

    def longer(self, array: Tensor, length: int) -> Tensor:
        more = empty_pool((length, *array.shape[1:]), array.dtype, array.device)
        more[: len(array)] = array
        more[len(array) :] = 0
        return more

    def gather_rows(self, array: Tensor, rows: Tensor) -> Tensor:
        return array.index_select(0, rows.reshape(-1)).reshape(*rows.shape, *array.shape[1:])

    def take_along(self, x: Tensor, index: Tensor) -> Tensor:
        return x.gather(-1, index.long())

    def put_along(self, x: Tensor, index: Tensor, values: Tensor | bool) -> Tensor:
        return x.scatter(-1, index.long(), values)

    def best_first(self, keys: Tensor) -> Tensor:
        return keys.sort(dim=-1, descending=True, stable=True).indices

    def kth_largest(self, keys: Tensor, count: Tensor, most: int) -> Tensor:
        falling = keys.topk(most, dim=-1).values
        return falling.gather(-1, (count - 1).clamp(0, most - 1).long().expand(*keys.shape[:-1], 1))

    def arange(self, like: Any, start: int, stop: int, step: int = 1) -> Tensor:
        return torch.arange(start, stop, step, dtype=torch.int32, device=like.device)

    def variance(self, x: Tensor, axis: int) -> Tensor:
        return x.var(dim=axis, correction=0)

    def pad(self, x: Tensor, after: int, axis: int = -1, value: float = 0) -> Tensor:
        return torch.nn.functional.pad(x, (0, 0) * (-1 - axis) + (0, after), value=value) if after else x

    def eigh(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        try:
            values, vectors = torch.linalg.eigh(matrix)
        except torch.linalg.LinAlgError:  # float32 does not converge on some finite matrices
            values, vectors = (part.float() for part in torch.linalg.eigh(matrix.double()))
        return values, vectors

    def all_dots(self, codes: Tensor, a: Tensor) -> Tensor:
        columns = a.mT
        return torch.cat([piece.float() @ columns for piece in _pieces(codes)], dim=2).mT

    def packed_dots(self, packed: Tensor, bits: int, a: Tensor, has_zero: bool = False) -> Tensor:
        """By a table of what each of the 256 values of each byte adds: one look-up instead of 8 / bits multiplications,
        and nothing is unpacked."""
        batch, kv_heads, repeat, _ = a.shape
        num_bytes, per_byte = packed.shape[-1], 8 // bits
        values = torch.arange(256, dtype=torch.uint8, device=a.device)[:, None]
        levels = levels_of(self, unpack_codes(self, values, bits, per_byte), bits, has_zero)  # [256, 8 / bits]
        parts = self.pad(a, num_bytes * per_byte - a.shape[-1]).unflatten(-1, (num_bytes, per_byte))
        # [B, Hkv, bytes, 256, R], flat: row ((b * Hkv + h) * bytes + j) * 256 + value
        table = (levels @ parts.permute(0, 1, 3, 4, 2)).reshape(-1, repeat)
        starts = torch.arange(0, len(table), 256, dtype=torch.int32, device=a.device)
        starts = starts.reshape(batch, kv_heads, 1, num_bytes)
        sums = [
            torch.nn.functional.embedding_bag((piece + starts).reshape(-1, num_bytes), table, mode="sum").reshape(
                batch, kv_heads, -1, repeat
            )
            for piece in _pieces(packed)
        ]
        return torch.cat(sums, dim=2).mT


def _pieces(codes: Tensor) -> Iterator[Tensor]:
    """Codes [B, Hkv, G, ..] in runs of groups: on a CPU decoded codes must not leave its cache (20 times faster than
    whole at 8,192 groups); a GPU takes all at once."""
    return iter(codes.split(PIECE_GROUPS if codes.device.type == "cpu" else max(codes.shape[2], 1), dim=2))


OPS = TorchOps()
