"""One forward of vLLM as the host sees it: which rows of the batch decode, where their tokens lie. Made once and shared
by all layers, as vLLM's own metadata is.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.utils.platform_utils import is_pin_memory_available

from eps_core.config.eps import EpsConfig
from eps_core.kv_cache.step_plan import StepPlan


class HostArrays:
    """The integer arrays of one batch as numpy. A builder makes it, so that layers do not wait for a GPU one by one.

    vLLM 0.32 hands builders the query starts and, unless it verifies drafts, the exact lengths on the host. Block
    tables and slots it hands over on the device alone: model runner V2 has no host copy of them. What is missing comes
    in one copy, which starts here behind the work that is queued already and is waited for once, at the first read.
    """

    def __init__(self, common: Any, block_tokens: int, exact: bool) -> None:
        self.prefilling: Tensor | None = common.is_prefilling  # on the host in both model runners
        starts, lengths = common.query_start_loc, common.seq_lens
        there = [(starts, common.query_start_loc_cpu), (lengths, common.seq_lens_cpu_upper_bound)] if exact else []
        # by address: a tensor of another KV cache group, say, is not found, whoever copied this batch's metadata
        self._found = {array.data_ptr(): on_host(host) for array, host in there if host is not None}
        table = common.block_table_tensor[:, : -(-common.max_seq_len // block_tokens)]
        self._held = starts, lengths, table, common.slot_mapping  # an address may not be given away
        self._copied = [one for one in self._held if not one.is_cpu and one.data_ptr() not in self._found]
        if self._copied:
            packed = torch.cat([array.flatten() for array in self._copied])
            self._packed = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=is_pin_memory_available())
            self._packed.copy_(packed, non_blocking=True)
            self._event = torch.Event()
            self._event.record()

    def read(self, array: Tensor) -> np.ndarray:
        """Return an array of the batch; of a table, the blocks that are in use. A GPU is waited for at the first call,
        and for a tensor that the batch's metadata did not have."""
        if self._copied:
            self._event.synchronize()
            ends = np.cumsum([part.numel() for part in self._copied])[:-1]
            for part, values in zip(self._copied, np.split(self._packed.numpy(), ends), strict=True):
                self._found[part.data_ptr()] = values.reshape(part.shape)
            self._copied = []
        found = self._found.get(array.data_ptr())
        return on_host(array) if found is None or len(found) != len(array) else found


@dataclass
class Forward:
    """R requests of a batch, of which B decode one token each and are sparse; the others prefill, or verify drafts."""

    starts: np.ndarray  # [R + 1] int64, of each request's query tokens
    lengths: np.ndarray  # [R] int64 tokens, the new ones counted
    decode: np.ndarray  # [B] their places among the requests
    others: np.ndarray  # of requests with query tokens that do not decode
    verified: np.ndarray  # of these, past their prompt: drafts of speculative decoding, or recomputed after preemption
    tokens: Tensor | None  # [B] int64 on the device: the query tokens of `decode`; None: there are no others
    plan: StepPlan | None  # of `decode`; None where there are none
    dense: StepPlan | None  # the same, for reading everything
    table: np.ndarray  # [R, M] int32 EPS units of each request, padding -1
    kept: dict[str, Any] = field(default_factory=dict)  # what a route makes of the metadata, once for all layers

    @classmethod
    def of(cls, metadata: Any, host: HostArrays, config: EpsConfig, block_tokens: int) -> "Forward":
        starts = host.read(metadata.query_start_loc).astype(np.int64)
        lengths = host.read(metadata.seq_lens)[: len(starts) - 1].astype(np.int64)
        counts = np.diff(starts)
        past_prompt = np.ones(len(counts), bool)
        if host.prefilling is not None:
            past_prompt = ~on_host(host.prefilling)[: len(counts)].astype(bool)
        # a tensor, or False, asks for something else than causal attention
        decodes = past_prompt & (counts == 1) & (lengths > 0) & (metadata.causal is True)
        decode = np.flatnonzero(decodes)
        others = np.flatnonzero(~decodes & (counts > 0))
        table = units_of(
            host.read(metadata.block_table)[: len(lengths)], lengths, block_tokens, config.cache_config.unit_tokens
        )
        plan = dense = tokens = None
        if len(decode):
            width = -(-int(lengths[decode].max()) // config.cache_config.unit_tokens)
            plan = StepPlan.of(config, table[decode, :width], lengths[decode])
            dense = StepPlan.dense(config.cache_config, plan.table, plan.lengths)
            if len(others) or len(decode) != metadata.num_actual_tokens:
                tokens = torch.from_numpy(starts[decode]).to(metadata.seq_lens.device, non_blocking=True)
        return cls(starts, lengths, decode, others, others[past_prompt[others]], tokens, plan, dense, table)

    def rows_of(self, array: Tensor) -> Tensor:
        """Those of `decode` in an array [tokens, ..] of the batch: a view where all rows decode."""
        return first_rows(array, len(self.decode)) if self.tokens is None else array[self.tokens]

    def put(self, array: Tensor, rows: Tensor) -> None:
        """Writes rows [B, ..] to their places in an array [tokens, ..] of the batch."""
        if self.tokens is None:
            first_rows(array, len(self.decode)).copy_(rows)
        else:
            array[self.tokens] = rows.to(array.dtype)


def first_rows(array: Tensor, count: int) -> Tensor:
    """The first rows of an array: itself where it has no others, as even a view takes microseconds."""
    return array if len(array) == count else array[:count]


def units_of(blocks: np.ndarray, lengths: np.ndarray, block_tokens: int, unit_tokens: int) -> np.ndarray:
    """[R, M] int32 pool units of requests of `lengths` [R] in vLLM's blocks [R, ..], of which each is a whole number of
    units; padding -1."""
    per_block = block_tokens // unit_tokens
    blocks = blocks[:, : -(-int(lengths.max(initial=0)) // block_tokens)].astype(np.int32)
    units = (blocks[:, :, None] * per_block + np.arange(per_block, dtype=np.int32)).reshape(len(blocks), -1)
    return np.where(np.arange(units.shape[1]) * unit_tokens < lengths[:, None], units, -1).astype(np.int32)


def on_host(array: Tensor) -> np.ndarray:
    """A tensor as numpy: no copy on a CPU, a wait on a GPU."""
    found: np.ndarray = array.detach().cpu().numpy()
    return found
