"""Route rows: groups of any size, read by our own kernels from rows of K and V in vLLM's blocks."""

from copy import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.forward_context import get_forward_context

from eps_core.attention.layer import attend_prefill
from eps_core.backend.cache import write_rows
from eps_core.errors import require
from eps_core.kv_cache.rows import Rows
from eps_cuda.integrations.paged import scaled
from eps_cuda.integrations.vllm.forward import first_rows, on_host
from eps_cuda.ops import OPS

PREFILL_ROWS = 4096  # of a prefill that attend at once: the first of a prompt take a square mask
VERIFIED_ROWS = 32  # of a block that reads K and V together; drafts are fewer, recomputed tokens may be thousands


class Route:
    """A way to read what is selected: pools over vLLM's blocks, writes to them and the attention of a layer."""

    readable = True  # whether K can be read again, to summarise it
    own_layout = False  # whether K and V of sparse layers lie as vLLM's own attention cannot read them

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        # a forward's context, how many slots it has, those that are no padding and, where some are, the rows of these
        self._written: tuple[Any, int, np.ndarray, Tensor | None] | None = None

    def forget(self) -> None:
        """Drop what waits for its summary, nothing here, and what is kept of a forward."""
        self._written = None

    def real_rows(self, key: Tensor, value: Tensor, slot_mapping: Tensor) -> tuple[Tensor, Tensor, np.ndarray]:
        """Return those of key, value [N, ..] that are no padding, and their slots on the host. Keys may be padded
        beyond the slots [M], and slots by -1. A GPU is waited for once a forward, not once a layer."""
        context, num_slots = get_forward_context(), len(slot_mapping)
        if self._written is None or self._written[0] is not context or self._written[1] != num_slots:
            batches = (context.attn_metadata or {}).values()  # nothing in vLLM's dummy runs
            host = next((batch.eps_host for batch in batches if hasattr(batch, "eps_host")), None)
            slots = (on_host(slot_mapping) if host is None else host.read(slot_mapping)).astype(np.int64)
            real = slots >= 0
            rows = None if real.all() else torch.from_numpy(real.nonzero()[0]).to(key.device, non_blocking=True)
            self._written = context, num_slots, slots[real], rows
        _, _, slots, rows = self._written
        if rows is None:
            return first_rows(key, num_slots), first_rows(value, num_slots), slots
        return key[rows], value[rows], slots


class PlainRows(Route):
    """On a CPU. vLLM's own layout there is packed for the processor's matrix unit and cannot be gathered from: a sparse
    layer's blocks hold plain rows instead, and EPS attends for all of its requests, the prefilling ones too."""

    own_layout = True

    def pools(self, tensor: Tensor, head_dim: int, unit_tokens: int) -> tuple[Tensor, Tensor]:
        """K and V [P, Hkv, U, D] in a block tensor [blocks, Hkv, block tokens, 2 D]: a block is whole units, a unit all
        of its K and then all of its V."""
        blocks, kv_heads, block_tokens, _ = tensor.shape
        per_block, half = block_tokens // unit_tokens, kv_heads * unit_tokens * head_dim
        require(
            tensor[0].is_contiguous() and (per_block == 1 or tensor.stride(0) == 2 * half * per_block),
            f"vLLM's blocks lie apart (strides {tensor.stride()}): start it with --block-size {unit_tokens}",
        )
        shape, strides = (blocks * per_block, kv_heads, unit_tokens, head_dim), (unit_tokens * head_dim, head_dim, 1)
        k, v = (
            torch.as_strided(
                tensor, shape, (tensor.stride(0) // per_block, *strides), tensor.storage_offset() + part * half
            )
            for part in range(2)
        )
        return k, v

    def write(self, runtime: Any, place: int, key: Tensor, value: Tensor, slot_mapping: Tensor, stock: Any) -> None:
        key, value, slots = self.real_rows(key, value, slot_mapping)

        def plain() -> None:
            write_rows(OPS, runtime.cache, place, key, value, slots)

        runtime.write(place, key, value, slots, plain)

    def forward(
        self, runtime: Any, place: int, impl: Any, layer: Any, query: Tensor, metadata: Any, output: Tensor, stock: Any
    ) -> None:
        forward, cache = runtime.forward_of(metadata), runtime.cache
        query = scaled(query, impl.scale, impl.head_size)
        if forward.plan is not None:
            q = forward.rows_of(query)

            def dense() -> Tensor:
                out: Tensor = self.backend.attend(cache, place, q, forward.dense, None)[0]
                return out

            forward.put(output, runtime.attend(place, q, forward.plan, dense))
        for row in forward.others.tolist():
            tokens = slice(int(forward.starts[row]), int(forward.starts[row + 1]))
            q, table, length = query[tokens], forward.table[row], int(forward.lengths[row])
            if row in forward.verified:  # as exact as the steps that they are compared with
                rows = Rows.in_blocks(table, length, len(q), VERIFIED_ROWS)
                output[tokens] = self.backend.attend_rows(cache, place, q, rows).out.to(output.dtype)
                continue
            end = length - len(q)
            for part, out in zip(q.split(PREFILL_ROWS), output[tokens].split(PREFILL_ROWS), strict=True):
                end += len(part)
                out.copy_(attend_prefill(self.backend, cache, place, part, table, end))


class StridedRows(Route):
    """On a GPU, where vLLM's layout is rows already: its own kernel attends for the requests that do not decode, and
    wherever everything would be read."""

    def pools(self, tensor: Tensor, head_dim: int, unit_tokens: int) -> tuple[Tensor, Tensor]:
        """K and V [P, Hkv, U, D] in a block tensor [blocks, Hkv, block tokens, 2 D], whose memory may have tokens
        before heads."""
        blocks, kv_heads, block_tokens, _ = tensor.shape
        per_block = block_tokens // unit_tokens
        block, head, token, _ = tensor.stride()
        require(
            per_block == 1 or block == block_tokens * token,
            f"vLLM's blocks of {block_tokens} tokens cannot be cut into EPS's units of {unit_tokens} as they lie: "
            f"start it with --block-size {unit_tokens}",
        )
        shape, strides = (blocks * per_block, kv_heads, unit_tokens, head_dim), (block // per_block, head, token, 1)
        k, v = (
            torch.as_strided(tensor, shape, strides, tensor.storage_offset() + part * head_dim) for part in range(2)
        )
        return k, v

    def write(self, runtime: Any, place: int, key: Tensor, value: Tensor, slot_mapping: Tensor, stock: Any) -> None:
        runtime.write(place, *self.real_rows(key, value, slot_mapping), stock)

    def forward(
        self, runtime: Any, place: int, impl: Any, layer: Any, query: Tensor, metadata: Any, output: Tensor, stock: Any
    ) -> None:
        forward = runtime.forward_of(metadata)
        if forward.plan is None:
            stock(attn_metadata=metadata)
            return
        attended = False

        def dense() -> Tensor:
            nonlocal attended
            attended = True
            stock(attn_metadata=metadata)
            return forward.rows_of(output).clone()

        out = runtime.attend(place, forward.rows_of(scaled(query, impl.scale, impl.head_size)), forward.plan, dense)
        if not attended and len(forward.others):
            stock(attn_metadata=self._rest(forward, metadata))
        forward.put(output, out)

    def _rest(self, forward: Any, metadata: Any) -> Any:
        """The metadata with nothing but its new token left of each decode row, which the stock kernel then passes over
        at no cost."""
        if "rest" not in forward.kept:
            lengths = metadata.seq_lens.clone()
            lengths[torch.from_numpy(forward.decode).to(lengths.device, non_blocking=True)] = 1
            forward.kept["rest"] = changed(metadata, seq_lens=lengths)
        return forward.kept["rest"]


def changed(metadata: Any, **fields: Any) -> Any:
    """A copy of attention metadata with other fields; what was scheduled for the old ones is left out."""
    other = copy(metadata)
    for name, value in fields.items():
        setattr(other, name, value)
    if getattr(other, "scheduler_metadata", None) is not None and "scheduler_metadata" not in fields:
        other.scheduler_metadata = None
    return other
