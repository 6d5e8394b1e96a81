"""Summaries of keys that somebody else wrote into the pools: an engine, before EPS was switched on or past it."""

import numpy as np
import torch
from torch import Tensor

from eps_core.backend.cache import finalize, mark_valid, read_kv, write_kv
from eps_cuda.cache import Cache
from eps_cuda.ops import OPS


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
    and written again where they lie: whatever follows from a write, follows here."""
    size = cache.cache_config.unit_tokens
    done: set[int] = set()
    num_tokens = 0
    for units, length in zip(table, lengths.tolist(), strict=True):
        for index in range(-(-length // size)):
            unit, held = int(units[index]), min(length - index * size, size)
            if unit in done or not any(_lacks(one, layer, unit, held) for one in cache.parts()):
                continue
            done.add(unit)
            k, v = read_kv(OPS, cache, layer, np.array([unit]), held)
            cache.tokens_reread += held
            write_kv(OPS, cache, layer, k, v, unit * size + np.arange(held))
            num_tokens += held
    return num_tokens


def _lacks(one: Cache, layer: int, unit: int, held: int) -> bool:
    """Return whether a group among the first `held` tokens of a unit is full and has no valid summary."""
    first = unit * one.cache_config.spans_per_unit
    full = np.arange(first, first + held // one.cache_config.span_tokens)
    return not one.state[layer].valid(full).all()


@torch.inference_mode()
def summarise_rows(cache: Cache, layer: int, groups: np.ndarray, keys: Tensor) -> None:
    """Summaries of full groups [F] whose keys [F, Hkv, S, D] are in hand, of a cache whose pools nobody can read, and
    of a method that needs no more than the keys."""
    cache.state[layer].mark_written(groups, np.full(len(groups), cache.cache_config.span_tokens))
    finalize(OPS, cache, layer, groups, keys)
    mark_valid(OPS, cache, layer, groups)
