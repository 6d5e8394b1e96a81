"""Summaries of keys that somebody else wrote into the pools: an engine, before EPS was switched on or past it."""

import numpy as np
import torch
from torch import Tensor

from eps_core.backend.cache import finalize, mark_valid, read_kv, write_kv
from eps_cuda.cache import Cache
from eps_cuda.ops import OPS

ADOPTED_TOKENS = 8192  # at a time, whose K and V are copied


@torch.inference_mode()
def forget(cache: Cache) -> None:
    """Forget all summaries of the cache: its pools are written by others from here on. The centroid of codes, once
    found, stays."""
    for one in cache.parts():
        for layer, state in enumerate(one.state):
            state.forget()
            if one.valid:
                one.valid[layer].zero_()


def mark_written(cache: Cache, layer: int, slots: np.ndarray) -> None:
    """Before a write to slots [N]: what lies below each in its group is the same sequence's, whoever wrote it."""
    for one in cache.parts():
        groups, offsets = np.divmod(np.asarray(slots, np.int64), one.cache_config.span_tokens)
        found, first = np.unique(groups, return_index=True)
        one.state[layer].mark_written(found, offsets[first])


@torch.inference_mode()
def adopt(cache: Cache, layer: int, table: np.ndarray, lengths: np.ndarray) -> int:
    """Summarises the tokens of sequences, table [B, M] units and lengths [B], that lie in pool units of which a full
    group has no valid summary, and says how many tokens these are. K and V are read (K is counted in `bytes_k_reread`)
    and written again where they lie, ADOPTED_TOKENS at a time: whatever follows from a write, follows here."""
    size = cache.cache_config.unit_tokens
    done: set[int] = set()
    num_tokens = 0
    for row, length in zip(table, lengths.tolist(), strict=True):
        units = row[: -(-length // size)]
        held = np.minimum(length - np.arange(len(units)) * size, size)
        lacking = np.any([_lacks(one, layer, units, held) for one in cache.parts()], axis=0)
        missing = [index for index in np.flatnonzero(lacking).tolist() if int(units[index]) not in done]
        done |= set(units[missing].tolist())
        for start in range(0, len(missing), ADOPTED_TOKENS // size):
            part = missing[start : start + ADOPTED_TOKENS // size]
            starts = zip(units[part].tolist(), held[part].tolist(), strict=True)
            slots = np.concatenate([unit * size + np.arange(count) for unit, count in starts])
            # the last unit of a sequence alone may not be full
            k, v = read_kv(OPS, cache, layer, units[part], len(slots))
            cache.tokens_reread += len(slots)
            write_kv(OPS, cache, layer, k, v, slots)
            num_tokens += len(slots)
    return num_tokens


def _lacks(one: Cache, layer: int, units: np.ndarray, held: np.ndarray) -> np.ndarray:
    """Return which units [N] have a full group without a valid summary among their first held [N] tokens: bool [N]."""
    per_unit, span_tokens = one.cache_config.spans_per_unit, one.cache_config.span_tokens
    index = np.arange(per_unit)
    full = (index + 1) * span_tokens <= held[:, None]
    lacking: np.ndarray = (full & ~one.state[layer].valid(units[:, None] * per_unit + index)).any(axis=1)
    return lacking


@torch.inference_mode()
def summarise_rows(cache: Cache, layer: int, groups: np.ndarray, keys: Tensor) -> None:
    """Summaries of full groups [F] whose keys [F, Hkv, S, D] are in hand, of a cache whose pools nobody can read, and
    of a method that needs no more than the keys."""
    cache.state[layer].mark_written(groups, np.full(len(groups), cache.cache_config.span_tokens))
    finalize(OPS, cache, layer, groups, keys)
    mark_valid(OPS, cache, layer, groups)
