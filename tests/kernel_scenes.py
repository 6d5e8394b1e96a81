"""Scenes for kernels: ragged sequences in scattered units of a pool, the same in a backend's cache and in the
reference's; and what a scene may hide from a kernel, because nothing lists it.

Whoever reads what is hidden (NaN and 3e4 by turns) shows it in the output.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from eps_core import reference
from eps_core.attention.protocol import Selection
from eps_core.config.cache import CacheSpec
from eps_core.config.eps import EpsConfig
from eps_core.kv_cache.pool import PagePool
from eps_core.kv_cache.rows import Rows
from eps_core.kv_cache.step_plan import StepPlan

EPS = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


@dataclass(frozen=True)
class Case:
    lengths: tuple[int, ...]
    num_rows: tuple[int, ...] = ()  # of each sequence, in a pass over several rows
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    dtype: str = "float32"
    group_size: int = 2
    block_size: int = 16
    scale_q: float = 2.0
    bits: tuple[int, int] = (16, 16)  # of K and of V
    share: float | None = 0.4  # of the groups that a list names; None: attention is dense

    def __str__(self) -> str:
        rows = f"-N{'+'.join(map(str, self.num_rows))}" if self.num_rows else ""
        return (
            f"T{'+'.join(map(str, self.lengths))}{rows}-{self.num_heads}q{self.num_kv_heads}kv-D{self.head_dim}"
            f"-S{self.group_size}-{self.dtype}{'' if self.share is not None else '-dense'}"
            + (f"-K{self.bits[0]}V{self.bits[1]}" if self.bits != (16, 16) else "")
        )


class Filled:
    """The same keys in a backend's cache and in the reference's, in units that lie scattered."""

    def __init__(self, backend: Any, device: str, case: Case, rng: np.random.Generator) -> None:
        self.case, self.backend, self.device, self.rng = case, backend, device, rng
        self.config = EpsConfig.of(method="box", block_size=case.block_size, group_size=case.group_size)
        size = self.config.cache_config.unit_tokens
        units, (k_bits, v_bits) = sum(-(-t // size) for t in case.lengths) + 2, case.bits
        spec = CacheSpec(1, case.num_kv_heads, case.head_dim, units, case.dtype, k_bits=k_bits, v_bits=v_bits)
        pool = PagePool(spec.num_units, size)
        sequences = [pool.open([])[0] for _ in case.lengths]
        parts: list[list[np.ndarray]] = [[np.zeros(0, np.int64)] for _ in case.lengths]
        for start in range(0, max(case.lengths), 50):  # in turns, so that no sequence's units follow each other
            for b, length in enumerate(case.lengths):
                if start < length:
                    parts[b].append(pool.append(sequences[b], range(min(50, length - start)))[0])
        self.slots = [np.concatenate(part) for part in parts]
        self.table, self.lengths = pool.table(sequences), pool.lengths(sequences)
        self.plan = StepPlan.of(self.config, self.table, self.lengths)
        self.keys = [rng.normal(size=(t, case.num_kv_heads, case.head_dim)).astype(np.float32) for t in case.lengths]
        self.values = [rng.normal(size=k.shape).astype(np.float32) for k in self.keys]
        for k in self.keys:  # some far above the others make the running maximum move
            k *= 1 + 2 * (rng.random((*k.shape[:2], 1)) < 0.1)
        self.cache = backend.new_cache(spec, self.config.cache_config, device)
        self.judge = reference.new_cache(spec, self.config.cache_config)
        for b in range(len(case.lengths)):
            self.write(b, self.keys[b], self.values[b])

    def write(self, b: int, k: np.ndarray, v: np.ndarray) -> None:
        if not len(k):
            return
        given = (self.backend.from_numpy(x, self.case.dtype, self.device) for x in (k, v))
        self.cache = self.backend.write_kv_tentative(self.cache, 0, *given, self.slots[b])
        rounded = (reference.from_numpy(x, self.case.dtype) for x in (k, v))
        self.judge = reference.write_kv_tentative(self.judge, 0, *rounded, self.slots[b])

    def rows(self) -> Rows:
        return Rows.of(self.table, self.lengths, np.array(self.case.num_rows))

    def listed(self) -> np.ndarray:
        """[B, Hkv, G] bool: random groups, the partial one always, of the last head of the last sequence none."""
        if self.case.share is None:
            return np.repeat(self.plan.inside[:, None], self.case.num_kv_heads, axis=1)
        shape = len(self.lengths), self.case.num_kv_heads, self.plan.num_groups
        listed = self.rng.random(shape) < self.case.share
        listed[np.arange(shape[0]), :, np.maximum(self.plan.ends - 1, 0)] = True
        listed[-1, -1] = False
        return listed & self.plan.inside[:, None]

    def hide(self, read: np.ndarray) -> None:
        """Everything in the backend's K and V but the tokens of the groups `read` [B, Hkv, G] bool."""
        size, unit = self.case.group_size, self.config.cache_config.unit_tokens
        hidden = np.ones((self.cache.spec.num_units, self.case.num_kv_heads, unit), bool)
        for b, h in np.ndindex(read.shape[:2]):
            tokens = np.flatnonzero(np.repeat(read[b, h], size)[: self.lengths[b]])
            hidden[self.table[b, tokens // unit], h, tokens % unit] = False
        for pools in (self.cache.k, self.cache.v):
            bad = np.where(self.rng.random(hidden.shape) < 0.5, np.nan, 3e4)
            pool = pools[0]
            if hasattr(pool, "codes"):
                scale = changed(pool.scale, hidden, bad)
                pools[0] = replace(pool, codes=changed(pool.codes, hidden[..., None], np.full((), 77)), scale=scale)
            else:
                pools[0] = changed(pool, hidden[..., None], bad[..., None])

    def row_bytes(self, number: int) -> dict[str, int]:
        """Bytes of so many rows of K and of V, by the names of a kernel's inputs."""
        found, element = {}, {"float32": 4}.get(self.case.dtype, 2)
        for name, bits in zip(("k", "v"), self.case.bits, strict=True):
            if bits == 16:
                found[f"{name}_pool"] = number * self.case.head_dim * element
            else:
                found |= {f"{name}_pool": number * self.case.head_dim * bits // 8, f"{name}_scale": 2 * number}
        return found


def changed(array: Any, where: np.ndarray, values: np.ndarray) -> Any:
    """A copy of a backend's array with `values` where the mask is true."""
    with torch.inference_mode():
        mask, given = like(array, where), like(array, values.astype(np.float32))
        if isinstance(array, torch.Tensor):
            return torch.where(mask, given.to(array.dtype), array)
        import mlx.core as mx

        return mx.where(mask, given.astype(array.dtype), array)


def like(array: Any, host: np.ndarray) -> Any:
    """A host array as one of the kind and on the device of another."""
    if isinstance(array, torch.Tensor):
        return torch.from_numpy(np.array(host)).to(array.device)
    if isinstance(array, np.ndarray):
        return host
    import mlx.core as mx

    return mx.array(host)


def selection_of(array: Any, listed: np.ndarray) -> Selection:
    """A selection of the groups `listed` [B, Hkv, G] bool in arrays like `array`, with room for one more."""
    counts = listed.sum(axis=-1).astype(np.int32)
    groups = np.full((*counts.shape, int(counts.max()) + 1), -1, np.int32)
    for b, h in np.ndindex(counts.shape):
        groups[b, h, : counts[b, h]] = np.flatnonzero(listed[b, h])
    return Selection(like(array, groups), like(array, counts), None, np.zeros(len(listed), np.int64))


def query(case: Case, rng: np.random.Generator, number: int | None = None, dtype: str | None = None) -> np.ndarray:
    """[N, Hq, D] float32 of the case's rows, or of so many, with values of a dtype, of the case's if it says none."""
    number = sum(case.num_rows) if number is None else number
    q = rng.normal(size=(number, case.num_heads, case.head_dim)) * case.scale_q
    return np.asarray(reference.from_numpy(q.astype(np.float32), dtype or case.dtype), np.float32)


def slack(case: Case, q: np.ndarray) -> float:
    """Return the largest error of a float32 logit."""
    return 64 * 2.0**-23 * (np.abs(q).sum(axis=2).max() * 5 / math.sqrt(case.head_dim) + 1)


def check_state(case: Case, q: np.ndarray, dtype: str, got: Any, want: Any) -> None:
    """(out, lse) of queries q of `dtype`, within float32's rounding, out's and, where q is as short as the cache's
    dtype, that of softmax weights."""
    (out, lse), (want_out, want_lse) = got, want
    off = slack(case, q)
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(want_lse))
    there = ~np.isneginf(want_lse)
    assert not np.isnan(lse).any() and np.abs(lse[there] - want_lse[there]).max(initial=0) < off, "log mass differs"
    weights = EPS[case.dtype] if case.dtype == dtype != "float32" else 0.0
    assert np.abs(out - want_out).max() < 5 * (off + EPS[dtype] + weights), "attention differs"
