"""The numpy backend: the float64 oracle under the Backend Protocol's names. Slow on purpose, never optimised.

K and V lie in the cache's dtype (bfloat16 through ml_dtypes); every statistic and every attention is computed in
float64 from what lies there.
"""

import platform
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from eps_core import attention, selection, summaries
from eps_core.blocks import GroupState, WritePlan
from eps_core.config.bytes import summary_group_bytes
from eps_core.config.eps import EpsConfig
from eps_core.config.store import CacheSpec
from eps_core.cpu.host import cpu_name
from eps_core.errors import ConfigError
from eps_core.gate.protocol import Certificate, Scores, Selection
from eps_core.guards import check_units, missing_groups
from eps_core.load import resolve_kernels

_DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float64": np.float64}


State = tuple[np.ndarray, np.ndarray]  # out and lse of attention


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
    # with bounds: the largest |k| and |v| that each kv head ever held, [Hkv]
    largest_key: list[np.ndarray] = field(default_factory=list)
    largest_value: list[np.ndarray] = field(default_factory=list)
    bound: "Cache | None" = None  # the summaries that bound, over the same K and V, where they are other ones
    tail: "Cache | None" = None  # mean values: its K is this cache's V
    bytes_k_reread: int = 0
    kv_bytes_read: int = 0
    bound_bytes_read: int = 0
    kernels: str = "arrays"


def device_name(device: str = "cpu") -> str:
    return cpu_name()


def usable_kernels(device: str = "cpu") -> list[str]:
    """The oracle has numpy alone."""
    return ["arrays"]


def new_cache(spec: CacheSpec, config: EpsConfig, device: str = "cpu", kernels: str = "auto") -> Cache:
    """An empty cache. With method off no summary, state or projection is allocated."""
    if device != "cpu":
        raise ConfigError(f"device {device!r} is not one of the numpy backend's: use --device cpu")
    resolve_kernels(kernels, usable_kernels(device), device)
    shape = (spec.num_units, spec.num_kv_heads, config.unit_tokens, spec.head_dim)
    dtype = _DTYPES[spec.dtype]
    layers = range(spec.num_layers)
    cache = Cache(
        spec, config, device, [np.zeros(shape, dtype) for _ in layers], [np.zeros(shape, dtype) for _ in layers]
    )
    if config.bound_bits:
        cache.bound = Cache(spec, config.bound_config, device, cache.k, cache.v)
    if config.tail_tokens:
        cache.tail = Cache(spec, config.tail_config, device, cache.v, cache.v)
    for one in (cache, cache.bound, cache.tail):
        if one is not None and one.config.enabled:
            check_units(config, one.config)
            _add_summaries(one)
    return cache


def _add_summaries(cache: Cache) -> None:
    """Everything that a method keeps besides K and V, still empty."""
    spec, config, layers = cache.spec, cache.config, range(cache.spec.num_layers)
    cache.summaries = [{} for _ in layers]
    cache.state = [GroupState(spec.num_units, config, spec.max_open_groups) for _ in layers]
    cache.open = [{} for _ in layers]
    cache.centre = [None for _ in layers]
    cache.early = [np.zeros((0, spec.num_kv_heads, spec.head_dim)) for _ in layers]
    if config.has_bounds:
        cache.largest_key = [np.zeros(spec.num_kv_heads) for _ in layers]
        cache.largest_value = [np.zeros(spec.num_kv_heads) for _ in layers]
    if config.method == "jl":
        assert config.dim is not None
        cache.phi = [
            summaries.jl_projection(config.seed, layer, spec.num_kv_heads, spec.head_dim, config.dim)
            for layer in layers
        ]


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
    if cache.config.has_bounds and len(slots):
        for largest, array in ((cache.largest_key, stored), (cache.largest_value, values)):
            norm = np.nan_to_num(np.linalg.norm(array.astype(np.float64), axis=2), nan=np.inf, posinf=np.inf).max(
                axis=0
            )
            largest[layer] = np.maximum(largest[layer], norm)
    for one, rows in ((cache, keys), (cache.bound, keys), (cache.tail, values.astype(np.float64))):
        if one is None or not one.config.enabled:
            continue
        plan = one.state[layer].plan(slots)
        if one.config.method != "oracle":
            _update_summaries(one, layer, rows, plan)
        if one is not cache:
            cache.bytes_k_reread += one.bytes_k_reread
            one.bytes_k_reread = 0
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
        for pool in (cache.k[layer], cache.v[layer]):
            pool[list(dst)] = pool[list(src)]
        for one in (cache, cache.bound, cache.tail):
            if one is None or not one.config.enabled:
                continue
            for pool in one.summaries[layer].values():
                pool[list(dst)] = pool[list(src)]
            for source, target in zip(src, dst, strict=True):
                for src_open, dst_open in one.state[layer].copy(source, target):
                    for running in one.open[layer].values():
                        running[dst_open] = running[src_open]
    return cache


def read_kv(cache: Cache, layer: int, table: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """K, V [length, Hkv, D] of one sequence, copied out of the pool in token order: table [M]."""
    units, offsets = np.divmod(np.arange(length), cache.config.unit_tokens)
    return cache.k[layer][table[units], :, offsets], cache.v[layer][table[units], :, offsets]


def score(cache: Cache, layer: int, q: np.ndarray, table: np.ndarray, lengths: np.ndarray) -> Scores:
    """Estimates of every group, max over the query heads of each kv head, and bounds query head by query head:
    q [B, Hq, D], table [B, M]."""
    config, size = cache.config, cache.config.S
    batch, num_heads, head_dim = q.shape
    kv_heads, per_unit = cache.spec.num_kv_heads, config.groups_per_unit
    if config.method == "oracle":
        return _true_scores(cache, layer, q, table, lengths)
    can_encode = config.method != "rq" or cache.centre[layer] is not None
    missing = missing_groups(config, cache.state[layer], table, lengths, can_encode)
    repeat = num_heads // kv_heads
    estimate = np.full((batch, kv_heads, missing.shape[1]), -np.inf)
    lower = np.full((batch, kv_heads, repeat, missing.shape[1]), -np.inf)
    upper = lower.copy()
    num_missing = np.zeros(batch, np.int64)
    for b in range(batch):
        n = selection.num_groups(int(lengths[b]), size)
        known = np.flatnonzero(~missing[b, :n])
        num_missing[b] = (missing[b, :n] & ~selection.guards(config, int(lengths[b]))).sum()
        units = table[b, known // per_unit]
        for head in range(kv_heads):
            estimate[b, head, :n], upper[b, head, :, :n] = np.inf, np.inf
            if not len(known):
                continue
            stacked = {name: pool[units, head, known % per_unit] for name, pool in cache.summaries[layer].items()}
            centre = cache.centre[layer]
            for r in range(repeat):
                a = q[b, head * repeat + r].astype(np.float64) / np.sqrt(head_dim)
                guess, least, most = summaries.score_summary(
                    config,
                    stacked,
                    a,
                    size,
                    cache.phi[layer][head] if cache.phi else None,
                    None if centre is None else centre[head],
                )
                estimate[b, head, known] = guess if r == 0 else np.maximum(estimate[b, head, known], guess)
                if least is not None:
                    lower[b, head, r, known], upper[b, head, r, known] = least, most
            if config.refine:
                assert centre is not None
                best = selection.best_first(estimate[b, head, known])[: config.refined_groups(int(lengths[b]))]
                kept = {name: array[best] for name, array in stacked.items()}
                heads = q[b, head * repeat : (head + 1) * repeat].astype(np.float64) / np.sqrt(head_dim)
                finer = [summaries.refine_rq(kept, a, size, centre[head], config.seed) for a in heads]
                estimate[b, head, known[best]] = np.max(finer, axis=0)
    if not config.own_bounds:
        return Scores(estimate, None, None, num_missing)
    return Scores(estimate, lower, upper, num_missing, _logit_slack(cache, layer, q))


def bounds(
    cache: Cache, layer: int, q: np.ndarray, table: np.ndarray, lengths: np.ndarray, scores: Scores, selected: Selection
) -> Scores:
    """`scores` with bounds from the codes of single keys, of the groups that `selected` left out; only their codes are
    read, and counted in `bound_bytes_read`. The bounds of the visited ones are left empty: nothing asks for them.
    Returns `scores` as they are where the method's own bounds serve."""
    if cache.bound is None:
        return scores
    batch, kv_heads, groups = scores.estimate.shape
    inner, size, repeat = cache.bound, cache.config.S, q.shape[1] // kv_heads
    lower = np.full((batch, kv_heads, repeat, groups), -np.inf)
    upper = lower.copy()
    visit = _visit_mask(selected, groups)
    centre = inner.centre[layer]
    for b, head in np.ndindex(batch, kv_heads):
        left = np.flatnonzero(~visit[b, head] & ~np.isneginf(scores.estimate[b, head]))
        tokens = (left[:, None] * size + np.arange(size)).reshape(-1)
        if centre is None:
            upper[b, head][:, left] = np.inf
            continue
        cache.bound_bytes_read += len(tokens) * summary_group_bytes(inner.config, q.shape[2])
        units, subs = table[b, tokens // inner.config.unit_tokens], tokens % inner.config.unit_tokens
        stacked = {name: pool[units, head, subs] for name, pool in inner.summaries[layer].items()}
        for r in range(repeat):
            a = q[b, head * repeat + r].astype(np.float64) / np.sqrt(q.shape[2])
            _, least, most = summaries.score_summary(inner.config, stacked, a, 1, None, centre[head])
            for target, part in ((lower, least), (upper, most)):
                assert part is not None
                target[b, head, r, left] = np.logaddexp.reduce(part.reshape(-1, size), axis=1)
    return replace(scores, lower=lower, upper=upper, slack=_logit_slack(cache, layer, q))


def _logit_slack(cache: Cache, layer: int, q: np.ndarray) -> np.ndarray:
    """[B, Hkv, R]: what float32 may add to or take from any logit of this cache."""
    batch, _, head_dim = q.shape
    size = np.linalg.norm(q.reshape(batch, cache.spec.num_kv_heads, -1, head_dim).astype(np.float64), axis=3)
    largest = cache.largest_key[layer][None, :, None]
    return (head_dim + 32) * 2.0**-21 * (size / np.sqrt(head_dim) * largest + 1)


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


def select(config: EpsConfig, scores: Scores, lengths: np.ndarray, layer: int = 0) -> Selection:
    """The configured policy over every (sequence, kv head); scope union gives all heads the union of their groups.
    `layer` says which head modes apply, where the config has any."""
    batch, kv_heads, width = scores.estimate.shape
    modes = config.head_modes[layer] if config.head_modes else ("gate",) * kv_heads
    visit = np.zeros((batch, kv_heads, width), bool)
    forced = np.zeros(batch, np.int64)
    for b in range(batch):
        n = selection.num_groups(int(lengths[b]), config.S)
        for head in range(kv_heads):
            mask, is_forced = selection.visited(config, scores.estimate[b, head, :n], int(lengths[b]), modes[head])
            visit[b, head, :n] = mask
            forced[b] = is_forced.sum()
    wanted = visit.sum(axis=2).astype(np.int32) if config.scope == "union" else None
    if config.scope == "union":
        visit[:] = visit.any(axis=1, keepdims=True)
    selected = _selection(visit, forced, wanted)
    if config.policy == "topk" and config.scope == "kv-head" and set(modes) == {"gate"}:
        return replace(selected, uniform=selected.counts[:, 0].astype(np.int64))
    return selected


def _selection(visit: np.ndarray, forced: np.ndarray, wanted: np.ndarray | None) -> Selection:
    """The True entries of visit [B, Hkv, G] as ascending lists."""
    counts = visit.sum(axis=2).astype(np.int32)
    groups = np.full((*counts.shape, max(int(counts.max()), 1)), -1, np.int32)
    for b, head in np.ndindex(*counts.shape):
        groups[b, head, : counts[b, head]] = np.flatnonzero(visit[b, head])
    return Selection(groups, counts, None, forced, wanted)


def _visit_mask(selected: Selection, num_groups: int) -> np.ndarray:
    """[B, Hkv, G]: True where a group is listed."""
    visit = np.zeros((*selected.counts.shape, num_groups), bool)
    for b, head in np.ndindex(*selected.counts.shape):
        visit[b, head, selected.groups[b, head, : selected.counts[b, head]]] = True
    return visit


def certify(
    cache: Cache, layer: int, scores: Scores, visited: Selection, out: np.ndarray, lse: np.ndarray
) -> Certificate:
    """Bounds of what `visited` left out, from valid bounds alone: out [B, Hq, D] and lse [B, Hq] are what `attend` gave
    for exactly these groups. Raises ValueError for a method without bounds."""
    if scores.upper is None or scores.slack is None:
        raise ValueError(f"method {cache.config.method} has no bounds: nothing can be certified")
    batch, kv_heads, repeat, width = scores.upper.shape
    visit = _visit_mask(visited, width)
    mass, error = np.zeros((batch, kv_heads)), np.zeros((batch, kv_heads))
    lse, size = lse.reshape(batch, kv_heads, repeat), np.linalg.norm(out, axis=2).reshape(batch, kv_heads, repeat)
    for b, head in np.ndindex(batch, kv_heads):
        inside = ~np.isneginf(scores.estimate[b, head])
        share = selection.certified_share(
            scores.upper[b, head][:, inside], visit[b, head, inside], lse[b, head], scores.slack[b, head]
        )
        mass[b, head] = share.max()
        error[b, head] = (share * (cache.largest_value[layer][head] + size[b, head])).max()
    return Certificate(mass, error)


def escalate(config: EpsConfig, scores: Scores, selected: Selection, lse: np.ndarray) -> tuple[Selection, Selection]:
    """(groups to visit besides, all visited groups) so that the certificate of the whole falls to config.epsilon, where
    `selected` was attended with lse [B, Hq]. Heads whose certificate holds already get none."""
    if scores.upper is None or scores.lower is None or scores.slack is None:
        raise ValueError(f"method {config.method} has no bounds: nothing can be certified")
    batch, kv_heads, repeat, width = scores.upper.shape
    visit = _visit_mask(selected, width)
    extra = np.zeros_like(visit)
    lse = lse.reshape(batch, kv_heads, repeat)
    for b, head in np.ndindex(batch, kv_heads):
        inside = ~np.isneginf(scores.estimate[b, head])
        extra[b, head, inside] = selection.escalation(
            config.epsilon,
            scores.lower[b, head][:, inside],
            scores.upper[b, head][:, inside],
            visit[b, head, inside],
            lse[b, head],
            scores.slack[b, head],
        )
    if config.scope == "union":
        extra = extra.any(axis=1, keepdims=True) & ~visit
    return _selection(extra, np.zeros(batch, np.int64), None), _selection(
        visit | extra, selected.forced, selected.wanted
    )


def skipped_mass(scores: Scores, selected: Selection) -> np.ndarray:
    """Estimated share of the softmax left unread [B, Hkv]: an estimate, no bound."""
    share = np.zeros(selected.counts.shape)
    visit = _visit_mask(selected, scores.estimate.shape[2])
    for b, head in np.ndindex(*share.shape):
        within = ~np.isneginf(scores.estimate[b, head])
        share[b, head] = selection.skipped_share(scores.estimate[b, head, within], visit[b, head, within])
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


def add_tail(
    cache: Cache, layer: int, table: np.ndarray, lengths: np.ndarray, scores: Scores, selection: Selection, state: State
) -> State:
    """What was read, `state`, merged with `attend_tail`."""
    return merge(state, attend_tail(cache, layer, table, lengths, scores, selection, state[1]))


def merge(first: tuple[np.ndarray, np.ndarray], second: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Exact merge of two attentions over disjoint keys: out [.., D], lse [..]."""
    return attention.merge(first, second)


def attend_own(cache: Cache, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(out [B, Hq, D], lse [B, Hq]) of each token over itself alone: q [B, Hq, D], k, v [B, Hkv, D] as the cache would
    hold them."""
    dtype, repeat = _DTYPES[cache.spec.dtype], q.shape[1] // k.shape[1]
    key, value = (np.repeat(x.astype(dtype).astype(np.float64), repeat, axis=1) for x in (k, v))
    return value, (q.astype(np.float64) * key).sum(axis=2) / np.sqrt(q.shape[2])


def attend_tail(
    cache: Cache,
    layer: int,
    table: np.ndarray,
    lengths: np.ndarray,
    scores: Scores,
    selected: Selection,
    lse: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """(out [B, Hq, D], lse [B, Hq]): an estimate of attention over the groups that `selected` left out, to be merged
    with what was read, whose log mass is lse [B, Hq]. Each skipped group counts with its estimated mass and the mean
    value of the tail group around it. Estimates that were too high for what was read are lowered as much for what was
    not; where the tail group is not full, or has no estimate, nothing is added. An estimate, no bound."""
    assert cache.tail is not None
    inner, size, per_unit = cache.tail, cache.config.S, cache.tail.config.groups_per_unit
    batch, kv_heads, groups = scores.estimate.shape
    repeat, head_dim, ratio = lse.shape[1] // kv_heads, cache.spec.head_dim, inner.config.S // size
    missing = missing_groups(inner.config, inner.state[layer], table, lengths, can_encode=True)
    visit = _visit_mask(selected, groups)
    out, tail = np.zeros((batch, kv_heads, repeat, head_dim)), np.full((batch, kv_heads, repeat), -np.inf)
    for b, head in np.ndindex(batch, kv_heads):
        estimate = scores.estimate[b, head]
        known = np.isfinite(estimate)
        usable = np.repeat(~missing[b], ratio)[:groups]
        skipped = np.flatnonzero(known & usable & ~visit[b, head])
        if not len(skipped):
            continue
        units, subs = table[b, skipped // ratio // per_unit], skipped // ratio % per_unit
        scale = inner.summaries[layer]["mean_scale"][units, head, subs].astype(np.float64)
        means = inner.summaries[layer]["mean"][units, head, subs] * scale[:, None]
        mean_out, mass = attention.average(estimate[skipped], means)
        read = visit[b, head] & known
        for r in range(repeat):
            seen = lse[b, head * repeat + r]
            excess = np.logaddexp.reduce(estimate[read]) - seen if read.any() else 0.0
            out[b, head, r], tail[b, head, r] = mean_out, mass - max(excess, 0.0)
    return out.reshape(batch, -1, head_dim), tail.reshape(batch, -1)


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
