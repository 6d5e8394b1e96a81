"""The oracle's scores, lists and error bounds over a paged cache, in float64."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from eps_core.attention.protocol import ErrorBound, Scores, Selection
from eps_core.config.selection import ANCHOR_SPREAD, SelectionConfig
from eps_core.kv_cache.step_plan import StepPlan
from eps_core.reference import pages, selection
from eps_core.reference.cache import Cache
from eps_core.reference.selection import missing_groups
from eps_core.summaries.base import LARGEST_ESTIMATE
from eps_core.summaries.table import METHODS, score_summary


def score(cache: Cache, layer: int, q: np.ndarray, plan: StepPlan) -> Scores:
    """Estimates of every group, of the query heads of each kv head as `SelectionConfig.combine` says, and bounds query
    head by query head: q [B, Hq, D]."""
    cache_config, size, table, lengths = cache.cache_config, cache.cache_config.S, plan.table, plan.lengths
    batch, num_heads, head_dim = q.shape
    kv_heads, per_unit = cache.spec.num_kv_heads, cache_config.spans_per_unit
    missing = missing_groups(cache.state[layer], table, lengths)
    repeat = num_heads // kv_heads
    estimate = np.full((batch, kv_heads, missing.shape[1]), -np.inf)
    lower = np.full((batch, kv_heads, repeat, missing.shape[1]), -np.inf)
    upper = lower.copy()
    num_missing = np.zeros(batch, np.int64)

    def combine(passes: int) -> np.ufunc:
        return np.logaddexp if plan.sums_after(passes, head_dim) else np.maximum

    for b in range(batch):
        n = selection.num_groups(int(lengths[b]), size)
        known = np.flatnonzero(~missing[b, :n])
        num_missing[b] = (missing[b, :n] & ~selection.sink_and_recent(plan.config, int(lengths[b]))).sum()
        # what is summarised together is known together
        spans = known[:: cache_config.groups_per_span] // cache_config.groups_per_span
        units = table[b, spans // per_unit]
        for head in range(kv_heads):
            estimate[b, head, :n], upper[b, head, :, :n] = np.inf, np.inf
            if not len(known):
                continue
            stacked = {name: pool[units, head, spans % per_unit] for name, pool in cache.summaries[layer].items()}
            if cache_config.method_spec.reads_keys:
                stacked = {"keys": _keys_of(cache, layer, units, known, head)}
            constants = cache.constants(layer, head)
            if cache_config.method_spec.by_place:
                constants |= {"groups": known, "length": lengths[b]}
            heads = q[b, head * repeat : (head + 1) * repeat].astype(np.float64) / np.sqrt(head_dim)
            anchors = _anchors(cache, layer, heads, int(table[b, 0]), head, plan.config.selection_config)
            for r, a in enumerate(heads):
                guess, least, most = score_summary(cache_config, constants, stacked, a)
                guess = _shifted(guess, None if anchors is None else anchors[r])
                estimate[b, head, known] = guess if r == 0 else combine(0)(estimate[b, head, known], guess)
                if least is not None:
                    lower[b, head, r, known], upper[b, head, r, known] = least, most
            left = np.arange(len(known))  # of them, those whose codes were read further and further
            for part, count in enumerate(plan.config.cascade_groups(int(lengths[b]), head_dim), start=2):
                each = [METHODS[cache_config.method].stage(cache_config, stacked, a, part) for a in heads]
                finer = combine(part - 1).reduce(_shifted(np.array(each), anchors), axis=0)
                left = np.sort(left[selection.best_first(estimate[b, head, known[left]])[:count]])
                estimate[b, head, known[left]] = finer[left]
            if plan.config.selection_config.rescore:
                count = plan.config.rescored_groups(int(lengths[b]))
                left = left[selection.best_first(estimate[b, head, known[left]])[:count]]
                each = [METHODS[cache_config.method].rescore(cache_config, constants, stacked, a) for a in heads]
                finer = combine(len(plan.cascaded(head_dim)) + 1).reduce(_shifted(np.array(each), anchors), axis=0)
                estimate[b, head, known[left]] = finer[left]
    if not cache_config.own_bounds:
        return Scores(estimate, None, None, num_missing)
    return Scores(estimate, lower, upper, num_missing, _logit_slack(cache, layer, q))


def _anchors(
    cache: Cache, layer: int, heads: np.ndarray, unit: int, head: int, selection_config: SelectionConfig
) -> np.ndarray | None:  # fmt: skip
    """The anchors [R] of query heads `heads` [R, D], where `selection_config` sums them: the logits of a sequence's
    first token, which lies at the start of `unit`, each at most `ANCHOR_SPREAD` from their mean."""
    if selection_config.combine == "max":
        return None
    logits = heads @ pages.rows_of(cache.k[layer], unit, head, 0).astype(np.float64)
    return logits.mean() + np.clip(logits - logits.mean(), -ANCHOR_SPREAD, ANCHOR_SPREAD)


def _shifted(estimates: np.ndarray, anchors: np.ndarray | None) -> np.ndarray:
    """Estimates [.., G] less the anchors [..], where what is not finite stays the largest."""
    if anchors is None:
        return estimates
    shifted = estimates - np.expand_dims(anchors, -1)
    return np.where(np.isfinite(shifted) & (estimates < LARGEST_ESTIMATE), shifted, LARGEST_ESTIMATE)


def bounds(cache: Cache, layer: int, q: np.ndarray, plan: StepPlan, scores: Scores, selected: Selection) -> Scores:
    """`scores` with bounds from the codes of single keys, of the groups that `selected` left out; only their codes are
    read. The bounds of the selected ones are left empty: nothing asks for them. Returns `scores` as they are where the
    method's own bounds serve."""
    if cache.bound is None:
        return scores
    batch, kv_heads, groups = scores.estimate.shape
    inner, size, repeat = cache.bound, cache.cache_config.S, q.shape[1] // kv_heads
    lower = np.full((batch, kv_heads, repeat, groups), -np.inf)
    upper = lower.copy()
    selected_mask = selection_mask(selected, groups)
    for b, head in np.ndindex(batch, kv_heads):
        left = np.flatnonzero(~selected_mask[b, head] & ~np.isneginf(scores.estimate[b, head]))
        tokens = (left[:, None] * size + np.arange(size)).reshape(-1)
        if not inner.can_encode(layer):
            upper[b, head][:, left] = np.inf
            continue
        units, subs = plan.table[b, tokens // inner.cache_config.unit_tokens], tokens % inner.cache_config.unit_tokens
        stacked = {name: pool[units, head, subs] for name, pool in inner.summaries[layer].items()}
        for r in range(repeat):
            a = q[b, head * repeat + r].astype(np.float64) / np.sqrt(q.shape[2])
            _, least, most = score_summary(inner.cache_config, inner.constants(layer, head), stacked, a)
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
    size = cache.cache_config.S
    slots = (known % cache.cache_config.groups_per_unit)[:, None] * size + np.arange(size)
    return pages.rows_of(cache.k[layer], units[:, None], head, slots).astype(np.float64)


def select(scores: Scores, plan: StepPlan, layer: int = 0) -> Selection:
    """The configured policy over every (sequence, kv head); scope union gives all heads the union of their groups.
    `layer` says which head modes apply, where the config has any."""
    batch, kv_heads, width = scores.estimate.shape
    config, lengths = plan.config, plan.lengths
    modes = config.selection_config.head_modes[layer] if config.selection_config.head_modes else ("sparse",) * kv_heads
    selected_mask = np.zeros((batch, kv_heads, width), bool)
    always_selected = np.zeros(batch, np.int64)
    for b in range(batch):
        n = selection.num_groups(int(lengths[b]), config.cache_config.S)
        for head in range(kv_heads):
            own = scores.estimate[b, head, :n]
            selected_mask[b, head, :n], forced = selection.selected(config, own, int(lengths[b]), modes[head])
            always_selected[b] = forced.sum()
    counts_before_union = None
    if config.selection_config.scope == "union":
        counts_before_union = selected_mask.sum(axis=2).astype(np.int32)
        selected_mask[:] = selected_mask.any(axis=1, keepdims=True)
    selected = _selection(selected_mask, always_selected, counts_before_union)
    if config.selection_config.policy == "topk" and counts_before_union is None and set(modes) == {"sparse"}:
        return replace(selected, common_counts=selected.counts[:, 0].astype(np.int64))
    return selected


def _selection(selected_mask: np.ndarray, always_selected: np.ndarray, before_union: np.ndarray | None) -> Selection:
    """The True entries of visit [B, Hkv, G] as ascending lists."""
    counts = selected_mask.sum(axis=2).astype(np.int32)
    groups = np.full((*counts.shape, max(int(counts.max()), 1)), -1, np.int32)
    for b, head in np.ndindex(*counts.shape):
        groups[b, head, : counts[b, head]] = np.flatnonzero(selected_mask[b, head])
    return Selection(groups, counts, None, always_selected, before_union)


def selection_mask(selected: Selection, num_groups: int) -> np.ndarray:
    """[B, Hkv, G]: True where a group is listed."""
    selected_mask = np.zeros((*selected.counts.shape, num_groups), bool)
    for b, head in np.ndindex(*selected.counts.shape):
        selected_mask[b, head, selected.groups[b, head, : selected.counts[b, head]]] = True
    return selected_mask


def visits(cache: Cache, drafts: Sequence[tuple[Selection, int] | None], num_groups: int) -> np.ndarray:
    """[T, Hkv, G] bool of what T steps selected: of each a selection and which of its sequences, None for all."""
    every = np.ones((cache.spec.num_kv_heads, num_groups), bool)
    return np.stack([every if one is None else selection_mask(one[0], num_groups)[one[1]] for one in drafts])


def bound_error(
    cache: Cache, layer: int, scores: Scores, selected: Selection, out: np.ndarray, lse: np.ndarray
) -> ErrorBound:
    """Bounds of what `selected` left out, from valid bounds alone: out [B, Hq, D] and lse [B, Hq] are what `attend`
    gave for exactly these groups. Raises ValueError for a method without bounds."""
    if scores.upper is None or scores.slack is None:
        raise ValueError(f"method {cache.cache_config.method} has no bounds: nothing can be bounded")
    batch, kv_heads, repeat, width = scores.upper.shape
    selected_mask = selection_mask(selected, width)
    mass, error = np.zeros((batch, kv_heads)), np.zeros((batch, kv_heads))
    lse, size = lse.reshape(batch, kv_heads, repeat), np.linalg.norm(out, axis=2).reshape(batch, kv_heads, repeat)
    for b, head in np.ndindex(batch, kv_heads):
        inside = ~np.isneginf(scores.estimate[b, head])
        share = selection.bounded_share(
            scores.upper[b, head][:, inside], selected_mask[b, head, inside], lse[b, head], scores.slack[b, head]
        )
        mass[b, head] = share.max()
        error[b, head] = (share * (cache.largest_value[layer][head] + size[b, head])).max()
    return ErrorBound(mass, error)


def extend_selection(
    selection_config: SelectionConfig, scores: Scores, selected: Selection, lse: np.ndarray
) -> tuple[Selection, Selection]:
    """(groups to add, all selected groups) so that the error bound of the whole falls to its epsilon,
    where `selected` was attended with lse [B, Hq]. Heads whose error bound holds already get none."""
    if scores.upper is None or scores.lower is None or scores.slack is None:
        raise ValueError("the method has no bounds: nothing can be bounded")
    batch, kv_heads, repeat, width = scores.upper.shape
    selected_mask = selection_mask(selected, width)
    extra = np.zeros_like(selected_mask)
    lse = lse.reshape(batch, kv_heads, repeat)
    for b, head in np.ndindex(batch, kv_heads):
        inside = ~np.isneginf(scores.estimate[b, head])
        extra[b, head, inside] = selection.escalation(
            selection_config.epsilon,
            scores.lower[b, head][:, inside],
            scores.upper[b, head][:, inside],
            selected_mask[b, head, inside],
            lse[b, head],
            scores.slack[b, head],
        )
    if selection_config.scope == "union":
        extra = extra.any(axis=1, keepdims=True) & ~selected_mask
    return _selection(extra, np.zeros(batch, np.int64), None), _selection(
        selected_mask | extra, selected.always_selected, selected.counts_before_union
    )


def skipped_mass(scores: Scores, selected: Selection) -> np.ndarray:
    """Estimated share of the softmax left unread [B, Hkv]: an estimate, no bound."""
    share = np.zeros(selected.counts.shape)
    selected_mask = selection_mask(selected, scores.estimate.shape[2])
    for b, head in np.ndindex(*share.shape):
        within = ~np.isneginf(scores.estimate[b, head])
        share[b, head] = selection.skipped_share(scores.estimate[b, head, within], selected_mask[b, head, within])
    return share
