"""The numpy backend: the float64 oracle under the Backend Protocol's names. Slow on purpose, never optimised.

K and V lie in the cache's dtype (bfloat16 through ml_dtypes); every statistic and every attention is computed in
float64 from what lies there.
"""

import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from eps_core import attention, selection, summaries
from eps_core.blocks import GroupState, WritePlan
from eps_core.config import CacheSpec, ConfigError, EpsConfig
from eps_core.guards import missing_groups
from eps_core.interface import Scores, Selection

_DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float64": np.float64}


@dataclass
class Cache:
    """Paged K and V [P, Hkv, U, D] per layer and, under the same index, the summaries [P, Hkv, U/S, ...]."""

    spec: CacheSpec
    config: EpsConfig
    device: str
    k: list[np.ndarray]
    v: list[np.ndarray]
    summaries: list[dict[str, np.ndarray]] = field(default_factory=list)
    state: list[GroupState] = field(default_factory=list)
    open: list[dict[str, np.ndarray]] = field(
        default_factory=list
    )  # running statistics of open groups [slots, Hkv, ..]
    centre: list[np.ndarray | None] = field(default_factory=list)  # rq: [Hkv, D] float16 once 256 keys were seen
    early: list[np.ndarray] = field(default_factory=list)  # rq: the keys until then [<256, Hkv, D]
    phi: list[np.ndarray] = field(default_factory=list)  # jl: [Hkv, D, m]
    bytes_k_reread: int = 0
    kv_bytes_read: int = 0


def new_cache(spec: CacheSpec, config: EpsConfig, device: str = "cpu") -> Cache:
    """An empty cache. With method off no summary, state or projection is allocated."""
    if device != "cpu":
        raise ConfigError(f"device {device!r} is not one of the numpy backend's: use --device cpu")
    shape = (spec.num_units, spec.num_kv_heads, config.unit_tokens, spec.head_dim)
    dtype = _DTYPES[spec.dtype]
    layers = range(spec.num_layers)
    cache = Cache(
        spec, config, device, [np.zeros(shape, dtype) for _ in layers], [np.zeros(shape, dtype) for _ in layers]
    )
    if config.enabled:
        cache.summaries = [{} for _ in layers]
        cache.state = [GroupState(spec.num_units, config, spec.max_open_groups) for _ in layers]
        cache.open = [{} for _ in layers]
        cache.centre = [None for _ in layers]
        cache.early = [np.zeros((0, spec.num_kv_heads, spec.head_dim)) for _ in layers]
        if config.method == "jl":
            assert config.dim is not None
            cache.phi = [
                summaries.jl_projection(config.seed, layer, spec.num_kv_heads, spec.head_dim, config.dim)
                for layer in layers
            ]
    return cache


def write_kv(cache: Cache, layer: int, k: np.ndarray, v: np.ndarray, slots: np.ndarray) -> Cache:
    """Writes k, v [N, Hkv, D] to pool slots [N] and brings the summaries of the touched groups up to date: a group is
    valid again when its last slot is written. Raises ConfigError on NaN or Inf in K, before anything is written."""
    units, offsets = np.divmod(slots, cache.config.unit_tokens)
    with np.errstate(over="ignore"):  # an overflow to Inf is what the next lines refuse
        stored, values = k.astype(_DTYPES[cache.spec.dtype]), v.astype(_DTYPES[cache.spec.dtype])
    keys = stored.astype(np.float64)
    if not np.isfinite(keys).all():
        raise ConfigError(
            f"NaN or Inf in K of layer {layer}: the model or its {cache.spec.dtype} cache overflows; "
            "try --dtype float32"
        )
    cache.k[layer][units, :, offsets] = stored
    cache.v[layer][units, :, offsets] = values
    if cache.config.enabled and cache.config.method != "oracle":
        _update_summaries(cache, layer, keys, cache.state[layer].plan(slots))
    elif cache.config.enabled:
        cache.state[layer].plan(slots)
    return cache


def _update_summaries(cache: Cache, layer: int, keys: np.ndarray, plan: WritePlan) -> None:
    if cache.config.method == "rq" and cache.centre[layer] is None:
        early = np.concatenate([cache.early[layer], keys])[: summaries.CENTRE_TOKENS]
        cache.early[layer] = early
        if len(early) < summaries.CENTRE_TOKENS:
            return
        cache.centre[layer] = early.mean(axis=0).astype(np.float16)
        cache.early[layer] = early[:0]
        full = np.flatnonzero(cache.state[layer].valid(np.arange(cache.spec.num_units * cache.config.groups_per_unit)))
        for group in full:
            _seal(cache, layer, int(group), _stored_group(cache, layer, int(group), group not in plan.full_groups))
        return
    for group, tokens in zip(plan.full_groups, plan.full_tokens, strict=True):
        _seal(cache, layer, int(group), keys[tokens])
    for i, group in enumerate(plan.part_groups):
        _extend(cache, layer, int(group), keys[plan.part_tokens[i][plan.part_tokens[i] >= 0]], plan, i)


def _extend(cache: Cache, layer: int, group: int, keys: np.ndarray, plan: WritePlan, i: int) -> None:
    """Some keys [n, Hkv, D] of a group that this call does not write whole. jl adds in place, box and meanstd run
    their statistics beside the pool, the others read the group back once it is full."""
    method, before, slot = cache.config.method, int(plan.part_before[i]), int(plan.part_open[i])
    if method == "jl" and slot >= 0:
        for head in range(cache.spec.num_kv_heads):
            added = summaries.build_jl(keys[:, head], cache.phi[layer][head])
            if before:
                unit, sub = divmod(group, cache.config.groups_per_unit)
                added["gram"] = added["gram"] + cache.summaries[layer]["gram"][unit, head, sub]
            _store(cache, layer, group, head, added)
        return
    running = cache.open[layer]
    if method in ("box", "meanstd") and slot >= 0:
        if not running:
            shape = (cache.spec.max_open_groups, cache.spec.num_kv_heads, cache.spec.head_dim)
            for name in ("min", "max") if method == "box" else ("mean", "m2"):
                running[name] = np.zeros(shape)
            running["norm"] = np.zeros(shape[:2])
        norm = np.linalg.norm(keys, axis=2).max(axis=0)
        if method == "box":
            low, high = keys.min(axis=0), keys.max(axis=0)
            if before:
                low, high = np.minimum(low, running["min"][slot]), np.maximum(high, running["max"][slot])
                norm = np.maximum(norm, running["norm"][slot])
            running["min"][slot], running["max"][slot], running["norm"][slot] = low, high, norm
        else:
            mean, m2, n = keys.mean(axis=0), ((keys - keys.mean(axis=0)) ** 2).sum(axis=0), len(keys)
            if before:  # Chan et al. 1979
                gap = mean - running["mean"][slot]
                m2 = m2 + running["m2"][slot] + gap**2 * before * n / (before + n)
                mean = running["mean"][slot] + gap * n / (before + n)
            running["mean"][slot], running["m2"][slot] = mean, m2
        if plan.sealed[i]:
            for head in range(cache.spec.num_kv_heads):
                if method == "box":
                    values = (running["min"][slot, head], running["max"][slot, head], running["norm"][slot, head])
                    _store(cache, layer, group, head, summaries.build_box(*values))
                else:
                    std = np.sqrt(running["m2"][slot, head] / cache.config.S)
                    _store(cache, layer, group, head, summaries.build_meanstd(running["mean"][slot, head], std))
    elif plan.sealed[i]:
        _seal(cache, layer, group, _stored_group(cache, layer, group, reread=True))


def _stored_group(cache: Cache, layer: int, group: int, reread: bool) -> np.ndarray:
    """K of one full group [S, Hkv, D] float64, read from the cache; `reread` counts its bytes."""
    unit, sub = divmod(group, cache.config.groups_per_unit)
    size = cache.config.S
    stored = cache.k[layer][unit, :, sub * size : (sub + 1) * size]
    if reread:
        cache.bytes_k_reread += stored.nbytes
    return stored.astype(np.float64).swapaxes(0, 1)


def _seal(cache: Cache, layer: int, group: int, keys: np.ndarray) -> None:
    centre = cache.centre[layer]
    for head in range(cache.spec.num_kv_heads):
        phi = cache.phi[layer][head] if cache.phi else None
        head_centre = None if centre is None else centre[head]
        _store(cache, layer, group, head, summaries.build_summary(cache.config, keys[:, head], phi, head_centre))


def _store(cache: Cache, layer: int, group: int, head: int, summary: summaries.Summary) -> None:
    unit, sub = divmod(group, cache.config.groups_per_unit)
    for name, value in summary.items():
        value = np.asarray(value)
        if name not in cache.summaries[layer]:
            shape = (cache.spec.num_units, cache.spec.num_kv_heads, cache.config.groups_per_unit, *value.shape)
            cache.summaries[layer][name] = np.zeros(shape, value.dtype)
        cache.summaries[layer][name][unit, head, sub] = value


def copy_units(cache: Cache, src: Sequence[int], dst: Sequence[int]) -> Cache:
    """Copies whole units with their summaries and open groups: copy-on-write of a forked sequence's open unit."""
    for layer in range(cache.spec.num_layers):
        for pool in (cache.k[layer], cache.v[layer], *(cache.summaries[layer].values() if cache.summaries else ())):
            pool[list(dst)] = pool[list(src)]
        if cache.config.enabled:
            for source, target in zip(src, dst, strict=True):
                for src_open, dst_open in cache.state[layer].copy(source, target):
                    for running in cache.open[layer].values():
                        running[dst_open] = running[src_open]
    return cache


def read_kv(cache: Cache, layer: int, table: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """K, V [length, Hkv, D] of one sequence, copied out of the pool in token order: table [M]."""
    units, offsets = np.divmod(np.arange(length), cache.config.unit_tokens)
    return cache.k[layer][table[units], :, offsets], cache.v[layer][table[units], :, offsets]


def score(cache: Cache, layer: int, q: np.ndarray, table: np.ndarray, lengths: np.ndarray) -> Scores:
    """Estimates and bounds of every group, max over the query heads of each kv head: q [B, Hq, D], table [B, M]."""
    config, size = cache.config, cache.config.S
    batch, num_heads, head_dim = q.shape
    kv_heads, per_unit = cache.spec.num_kv_heads, config.groups_per_unit
    if config.method == "oracle":
        return _true_scores(cache, layer, q, table, lengths)
    can_encode = config.method != "rq" or cache.centre[layer] is not None
    missing = missing_groups(config, cache.state[layer], table, lengths, can_encode)
    shape = (batch, kv_heads, missing.shape[1])
    # rows: estimate, lower, upper
    values = np.full((3, *shape), -np.inf, np.float64)
    num_missing = np.zeros(batch, np.int64)
    for b in range(batch):
        n = selection.num_groups(int(lengths[b]), size)
        known = np.flatnonzero(~missing[b, :n])
        num_missing[b] = (missing[b, :n] & ~selection.guards(config, int(lengths[b]))).sum()
        units = table[b, known // per_unit]
        for head in range(kv_heads):
            values[0, b, head, :n], values[2, b, head, :n] = np.inf, np.inf
            if not len(known):
                continue
            stacked = {name: pool[units, head, known % per_unit] for name, pool in cache.summaries[layer].items()}
            centre = cache.centre[layer]
            for r in range(num_heads // kv_heads):
                a = q[b, head * (num_heads // kv_heads) + r].astype(np.float64) / np.sqrt(head_dim)
                parts = summaries.score_summary(
                    config,
                    stacked,
                    a,
                    size,
                    cache.phi[layer][head] if cache.phi else None,
                    None if centre is None else centre[head],
                )
                for row, part in enumerate(parts):
                    if part is not None:
                        best = part if r == 0 else np.maximum(values[row, b, head, known], part)
                        values[row, b, head, known] = best
    estimate, lower, upper = values
    if not config.has_bounds:
        return Scores(estimate, None, None, num_missing)
    return Scores(estimate, lower, upper, num_missing)


def _true_scores(cache: Cache, layer: int, q: np.ndarray, table: np.ndarray, lengths: np.ndarray) -> Scores:
    """True log masses, for evaluation: what a perfect summary would say. The open group stays without one."""
    missing = missing_groups(cache.config, cache.state[layer], table, lengths, can_encode=True)
    batch, num_heads, head_dim = q.shape
    repeat = num_heads // cache.spec.num_kv_heads
    estimate = np.full((batch, cache.spec.num_kv_heads, missing.shape[1]), -np.inf)
    for b in range(batch):
        keys = read_kv(cache, layer, table[b], int(lengths[b]))[0]
        for r in range(num_heads):
            masses = attention.group_masses(
                q[b, r].astype(np.float64) / np.sqrt(head_dim), keys[:, r // repeat], cache.config.S
            )
            row = estimate[b, r // repeat, : len(masses)]
            np.maximum(row, masses, out=row)
        estimate[b][:, missing[b]] = np.inf
    return Scores(estimate, None, None, np.zeros(batch, np.int64))


def select(config: EpsConfig, scores: Scores, lengths: np.ndarray) -> Selection:
    """The configured policy over every (sequence, kv head); scope union gives all heads the union of their groups."""
    batch, kv_heads, width = scores.estimate.shape
    visit = np.zeros((batch, kv_heads, width), bool)
    forced = np.zeros(batch, np.int64)
    for b in range(batch):
        n = selection.num_groups(int(lengths[b]), config.S)
        for head in range(kv_heads):
            mask, is_forced = selection.visited(config, scores.estimate[b, head, :n], int(lengths[b]))
            visit[b, head, :n] = mask
            forced[b] = is_forced.sum()
    wanted = visit.sum(axis=2).astype(np.int32) if config.scope == "union" else None
    if config.scope == "union":
        visit[:] = visit.any(axis=1, keepdims=True)
    counts = visit.sum(axis=2).astype(np.int32)
    groups = np.full((batch, kv_heads, max(int(counts.max()), 1)), -1, np.int32)
    for b, head in np.ndindex(batch, kv_heads):
        groups[b, head, : counts[b, head]] = np.flatnonzero(visit[b, head])
    uniform = counts[:, 0].astype(np.int64) if config.policy == "topk" and config.scope == "kv-head" else None
    return Selection(groups, counts, uniform, forced, wanted)


def skipped_mass(scores: Scores, selected: Selection) -> np.ndarray:
    """Estimated share of the softmax left unread [B, Hkv]: an estimate, no bound."""
    share = np.zeros(selected.counts.shape)
    for b, head in np.ndindex(*share.shape):
        visit = np.zeros(scores.estimate.shape[2], bool)
        visit[selected.groups[b, head, : selected.counts[b, head]]] = True
        within = ~np.isneginf(scores.estimate[b, head])
        share[b, head] = selection.skipped_share(scores.estimate[b, head, within], visit[within])
    return share


def attend(
    cache: Cache, layer: int, q: np.ndarray, table: np.ndarray, lengths: np.ndarray, selected: Selection | None
) -> tuple[np.ndarray, np.ndarray]:
    """(out [B, Hq, D], lse [B, Hq]) over the visited groups, or over all tokens where `selected` is None."""
    config, size = cache.config, cache.config.S
    batch, num_heads, head_dim = q.shape
    repeat = num_heads // cache.spec.num_kv_heads
    out, lse = np.zeros(q.shape), np.zeros((batch, num_heads))
    for b, head in np.ndindex(batch, cache.spec.num_kv_heads):
        length = int(lengths[b])
        if selected is None:
            tokens = np.arange(length)
            cache.kv_bytes_read += length * cache.spec.kv_token_bytes
        else:
            groups = selected.groups[b, head, : selected.counts[b, head]]
            tokens = (groups[:, None] * size + np.arange(size)).reshape(-1)
            cache.kv_bytes_read += len(tokens) * cache.spec.kv_token_bytes
            tokens = tokens[tokens < length]
        units, offsets = table[b, tokens // config.unit_tokens], tokens % config.unit_tokens
        k, v = cache.k[layer][units, head, offsets], cache.v[layer][units, head, offsets]
        for r in range(head * repeat, (head + 1) * repeat):
            out[b, r], lse[b, r] = attention.attend_keys(q[b, r].astype(np.float64) / np.sqrt(head_dim), k, v)
    return out, lse


def merge(first: tuple[np.ndarray, np.ndarray], second: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Exact merge of two attentions over disjoint keys: out [.., D], lse [..]."""
    return attention.merge(first, second)


def check_finite(cache: Cache) -> None:
    """Nothing to do: this backend refuses NaN and Inf in K at the write."""


def load_model(path: Path, spec: Any, dtype: str = "float32", device: str = "cpu") -> Any:
    """The numpy decoder of a Hugging Face directory."""
    # late, because the decoder is built on this module
    from eps_core.decoder import NumpyDecoder
    from eps_core.model import load_weights

    return NumpyDecoder(spec, load_weights(path, spec), dtype)


def to_numpy(array: np.ndarray) -> np.ndarray:
    return np.asarray(array)


def from_numpy(array: np.ndarray, dtype: str, device: str = "cpu") -> np.ndarray:
    return array.astype(_DTYPES[dtype])


def devices() -> list[str]:
    return ["cpu"]


def versions() -> dict[str, str]:
    return {"numpy": np.__version__, "python": platform.python_version()}
