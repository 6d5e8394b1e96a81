"""The oracle's scores, lists and certificates over a paged cache, in float64."""

from dataclasses import replace

import numpy as np

from eps_core.config.bytes import sealed_bytes
from eps_core.config.read import ANCHOR_SPREAD, Read
from eps_core.gate.protocol import Certificate, Scores, Selection
from eps_core.oracle import pages, selection
from eps_core.oracle.cache import Cache
from eps_core.oracle.selection import missing_groups
from eps_core.paging.where import Where
from eps_core.summaries.base import LARGEST_ESTIMATE
from eps_core.summaries.table import METHODS, score_summary


def score(cache: Cache, layer: int, q: np.ndarray, where: Where) -> Scores:
    """Estimates of every group, of the query heads of each kv head as `Read.combine` says, and bounds query head by
    query head: q [B, Hq, D]."""
    store, size, table, lengths = cache.store, cache.store.S, where.table, where.lengths
    batch, num_heads, head_dim = q.shape
    kv_heads, per_unit = cache.spec.num_kv_heads, store.seals_per_unit
    missing = missing_groups(cache.state[layer], table, lengths)
    repeat = num_heads // kv_heads
    estimate = np.full((batch, kv_heads, missing.shape[1]), -np.inf)
    lower = np.full((batch, kv_heads, repeat, missing.shape[1]), -np.inf)
    upper = lower.copy()
    num_missing = np.zeros(batch, np.int64)

    def combine(passes: int) -> np.ufunc:
        return np.logaddexp if where.sums_after(passes, head_dim) else np.maximum

    for b in range(batch):
        n = selection.num_groups(int(lengths[b]), size)
        known = np.flatnonzero(~missing[b, :n])
        num_missing[b] = (missing[b, :n] & ~selection.guards(where.config, int(lengths[b]))).sum()
        # what is summarised together is known together
        seals = known[:: store.groups_per_seal] // store.groups_per_seal
        units = table[b, seals // per_unit]
        for head in range(kv_heads):
            estimate[b, head, :n], upper[b, head, :, :n] = np.inf, np.inf
            if not len(known):
                continue
            stacked = {name: pool[units, head, seals % per_unit] for name, pool in cache.summaries[layer].items()}
            if store.facts.reads_keys:
                stacked = {"keys": _keys_of(cache, layer, units, known, head)}
            constants = cache.constants(layer, head)
            if store.facts.by_place:
                constants |= {"groups": known, "length": lengths[b]}
            heads = q[b, head * repeat : (head + 1) * repeat].astype(np.float64) / np.sqrt(head_dim)
            anchors = _anchors(cache, layer, heads, int(table[b, 0]), head, where.config.read)
            for r, a in enumerate(heads):
                guess, least, most = score_summary(store, constants, stacked, a)
                guess = _shifted(guess, None if anchors is None else anchors[r])
                estimate[b, head, known] = guess if r == 0 else combine(0)(estimate[b, head, known], guess)
                if least is not None:
                    lower[b, head, r, known], upper[b, head, r, known] = least, most
            left = np.arange(len(known))  # of them, those whose codes were read further and further
            for part, count in enumerate(where.config.staged_groups(int(lengths[b]), head_dim), start=2):
                each = [METHODS[store.method].stage(store, stacked, a, part) for a in heads]
                finer = combine(part - 1).reduce(_shifted(np.array(each), anchors), axis=0)
                left = np.sort(left[selection.best_first(estimate[b, head, known[left]])[:count]])
                estimate[b, head, known[left]] = finer[left]
            if where.config.read.refine:
                count = where.config.refined_groups(int(lengths[b]))
                left = left[selection.best_first(estimate[b, head, known[left]])[:count]]
                each = [METHODS[store.method].refine(store, constants, stacked, a) for a in heads]
                finer = combine(len(where.staged(head_dim)) + 1).reduce(_shifted(np.array(each), anchors), axis=0)
                estimate[b, head, known[left]] = finer[left]
    if not store.own_bounds:
        return Scores(estimate, None, None, num_missing)
    return Scores(estimate, lower, upper, num_missing, _logit_slack(cache, layer, q))


def _anchors(
    cache: Cache, layer: int, heads: np.ndarray, unit: int, head: int, read: Read
) -> np.ndarray | None:  # fmt: skip
    """The anchors [R] of query heads `heads` [R, D], where `read` sums them: the logits of a sequence's first token,
    which lies at the start of `unit`, each at most `ANCHOR_SPREAD` from their mean."""
    if read.combine == "max":
        return None
    logits = heads @ pages.rows_of(cache.k[layer], unit, head, 0).astype(np.float64)
    return logits.mean() + np.clip(logits - logits.mean(), -ANCHOR_SPREAD, ANCHOR_SPREAD)


def _shifted(estimates: np.ndarray, anchors: np.ndarray | None) -> np.ndarray:
    """Estimates [.., G] less the anchors [..], where what is not finite stays the largest."""
    if anchors is None:
        return estimates
    shifted = estimates - np.expand_dims(anchors, -1)
    return np.where(np.isfinite(shifted) & (estimates < LARGEST_ESTIMATE), shifted, LARGEST_ESTIMATE)


def bounds(cache: Cache, layer: int, q: np.ndarray, where: Where, scores: Scores, selected: Selection) -> Scores:
    """`scores` with bounds from the codes of single keys, of the groups that `selected` left out; only their codes are
    read, and counted in `bound_bytes_read`. The bounds of the visited ones are left empty: nothing asks for them.
    Returns `scores` as they are where the method's own bounds serve."""
    if cache.bound is None:
        return scores
    batch, kv_heads, groups = scores.estimate.shape
    inner, size, repeat = cache.bound, cache.store.S, q.shape[1] // kv_heads
    lower = np.full((batch, kv_heads, repeat, groups), -np.inf)
    upper = lower.copy()
    visit = visit_mask(selected, groups)
    for b, head in np.ndindex(batch, kv_heads):
        left = np.flatnonzero(~visit[b, head] & ~np.isneginf(scores.estimate[b, head]))
        tokens = (left[:, None] * size + np.arange(size)).reshape(-1)
        if not inner.can_encode(layer):
            upper[b, head][:, left] = np.inf
            continue
        cache.bound_bytes_read += len(tokens) * sealed_bytes(inner.store, q.shape[2])
        units, subs = where.table[b, tokens // inner.store.unit_tokens], tokens % inner.store.unit_tokens
        stacked = {name: pool[units, head, subs] for name, pool in inner.summaries[layer].items()}
        for r in range(repeat):
            a = q[b, head * repeat + r].astype(np.float64) / np.sqrt(q.shape[2])
            _, least, most = score_summary(inner.store, inner.constants(layer, head), stacked, a)
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


def _keys_of(cache: Cache, layer: int, units: np.ndarray, known: np.ndarray, head: int) -> np.ndarray:
    """The keys [G, S, D] of groups `known` of a sequence, which lie in units [G]."""
    size = cache.store.S
    slots = (known % cache.store.groups_per_unit)[:, None] * size + np.arange(size)
    return pages.rows_of(cache.k[layer], units[:, None], head, slots).astype(np.float64)


def select(scores: Scores, where: Where, layer: int = 0) -> Selection:
    """The configured policy over every (sequence, kv head); scope union gives all heads the union of their groups.
    `layer` says which head modes apply, where the config has any."""
    batch, kv_heads, width = scores.estimate.shape
    config, lengths = where.config, where.lengths
    modes = config.read.head_modes[layer] if config.read.head_modes else ("gate",) * kv_heads
    visit = np.zeros((batch, kv_heads, width), bool)
    forced = np.zeros(batch, np.int64)
    for b in range(batch):
        n = selection.num_groups(int(lengths[b]), config.store.S)
        for head in range(kv_heads):
            mask, is_forced = selection.visited(config, scores.estimate[b, head, :n], int(lengths[b]), modes[head])
            visit[b, head, :n] = mask
            forced[b] = is_forced.sum()
    wanted = visit.sum(axis=2).astype(np.int32) if config.read.scope == "union" else None
    if config.read.scope == "union":
        visit[:] = visit.any(axis=1, keepdims=True)
    selected = _selection(visit, forced, wanted)
    if config.read.policy == "topk" and config.read.scope == "kv-head" and set(modes) == {"gate"}:
        return replace(selected, uniform=selected.counts[:, 0].astype(np.int64))
    return selected


def _selection(visit: np.ndarray, forced: np.ndarray, wanted: np.ndarray | None) -> Selection:
    """The True entries of visit [B, Hkv, G] as ascending lists."""
    counts = visit.sum(axis=2).astype(np.int32)
    groups = np.full((*counts.shape, max(int(counts.max()), 1)), -1, np.int32)
    for b, head in np.ndindex(*counts.shape):
        groups[b, head, : counts[b, head]] = np.flatnonzero(visit[b, head])
    return Selection(groups, counts, None, forced, wanted)


def visit_mask(selected: Selection, num_groups: int) -> np.ndarray:
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
        raise ValueError(f"method {cache.store.method} has no bounds: nothing can be certified")
    batch, kv_heads, repeat, width = scores.upper.shape
    visit = visit_mask(visited, width)
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


def escalate(read: Read, scores: Scores, selected: Selection, lse: np.ndarray) -> tuple[Selection, Selection]:
    """(groups to visit besides, all visited groups) so that the certificate of the whole falls to its epsilon, where
    `selected` was attended with lse [B, Hq]. Heads whose certificate holds already get none."""
    if scores.upper is None or scores.lower is None or scores.slack is None:
        raise ValueError("the method has no bounds: nothing can be certified")
    batch, kv_heads, repeat, width = scores.upper.shape
    visit = visit_mask(selected, width)
    extra = np.zeros_like(visit)
    lse = lse.reshape(batch, kv_heads, repeat)
    for b, head in np.ndindex(batch, kv_heads):
        inside = ~np.isneginf(scores.estimate[b, head])
        extra[b, head, inside] = selection.escalation(
            read.epsilon,
            scores.lower[b, head][:, inside],
            scores.upper[b, head][:, inside],
            visit[b, head, inside],
            lse[b, head],
            scores.slack[b, head],
        )
    if read.scope == "union":
        extra = extra.any(axis=1, keepdims=True) & ~visit
    return _selection(extra, np.zeros(batch, np.int64), None), _selection(
        visit | extra, selected.forced, selected.wanted
    )


def skipped_mass(scores: Scores, selected: Selection) -> np.ndarray:
    """Estimated share of the softmax left unread [B, Hkv]: an estimate, no bound."""
    share = np.zeros(selected.counts.shape)
    visit = visit_mask(selected, scores.estimate.shape[2])
    for b, head in np.ndindex(*share.shape):
        within = ~np.isneginf(scores.estimate[b, head])
        share[b, head] = selection.skipped_share(scores.estimate[b, head, within], visit[b, head, within])
    return share
