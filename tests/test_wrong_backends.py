"""Tests of the tests: each deliberately wrong backend must fail the conformance suite."""

from copy import deepcopy
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from test_conformance import BASE, Case, check_fork, check_head_modes, check_largest, check_own_token, eps, run_case

from eps_core import oracle
from eps_core.gate.protocol import Certificate
from eps_core.oracle import cache as oracle_cache
from eps_core.oracle import scoring as oracle_scoring
from eps_core.oracle import selection as oracle_selection
from eps_core.paging.where import Where


def broken(**functions):
    """The numpy backend with some functions replaced."""
    return SimpleNamespace(**{**vars(oracle), **functions})


def drops_a_group(scores, where, layer=0):
    chosen = oracle.select(scores, where, layer)
    counts = chosen.counts - 1
    groups = chosen.groups.copy()
    for b, head in np.ndindex(*counts.shape):
        groups[b, head, counts[b, head]] = -1
    return replace(chosen, groups=groups, counts=counts, uniform=counts[:, 0].astype(np.int64))


def attends_without_the_last_group(cache, layer, q, where, selected):
    if selected is None:
        return oracle.attend(cache, layer, q, where, None)
    return oracle.attend(cache, layer, q, where, replace(selected, counts=selected.counts - 1))


def swaps_heads(cache, layer, q, where, selected):
    return oracle.attend(cache, layer, q[:, ::-1], where, selected)


def swaps_heads_in_score(cache, layer, q, where):
    return oracle.score(cache, layer, q[:, ::-1], where)


def adds_one(cache, layer, q, where, selected):
    out, lse = oracle.attend(cache, layer, q, where, selected)
    return out + 1e-3, lse


def forgets_the_scale(cache, layer, q, where, selected):
    return oracle.attend(cache, layer, q * np.sqrt(q.shape[-1]), where, selected)


def forgets_the_scale_in_score(cache, layer, q, where):
    return oracle.score(cache, layer, q * np.sqrt(q.shape[-1]), where)


def means_over_query_heads(cache, layer, q, where):
    kv_heads = cache.spec.num_kv_heads
    mean = q.reshape(len(q), kv_heads, -1, q.shape[-1]).mean(axis=2, keepdims=True)
    return oracle.score(
        cache,
        layer,
        np.broadcast_to(mean, q.reshape(len(q), kv_heads, -1, q.shape[-1]).shape).reshape(q.shape),
        where,
    )


def narrows_the_bound(cache, layer, q, where):
    scores = oracle.score(cache, layer, q, where)
    upper = scores.upper if scores.upper is None else scores.upper - 5.0
    return replace(scores, upper=upper)


def swaps_query_heads_of_the_bounds(cache, layer, q, where):
    scores = oracle.score(cache, layer, q, where)
    return replace(scores, lower=scores.lower[:, :, ::-1], upper=scores.upper[:, :, ::-1])


def forgets_the_slack(cache, layer, q, where):
    scores = oracle.score(cache, layer, q, where)
    return replace(scores, slack=np.zeros_like(scores.slack))


def swaps_kv(cache, layer, k, v, slots):
    return oracle.write_kv(cache, layer, v, k, slots)


def never_visits_the_open_group(scores, where, layer=0):
    scores = replace(scores, estimate=np.where(np.isposinf(scores.estimate), -1e9, scores.estimate))
    where = Where.of(where.config.replace(last_tokens=0), where.table, where.lengths)
    return oracle.select(scores, where, layer)


def reads_unselected_groups(cache, layer, q, where, selected):
    cache.kv_bytes_read += cache.spec.kv_token_bytes
    return oracle.attend(cache, layer, q, where, selected)


def certifies_estimates(cache, layer, scores, visited, out, lse):
    upper = np.broadcast_to(scores.estimate[:, :, None], scores.upper.shape)
    return oracle.certify(cache, layer, replace(scores, upper=upper), visited, out, lse)


def certifies_lower_bounds(cache, layer, scores, visited, out, lse):
    return oracle.certify(cache, layer, replace(scores, upper=scores.lower), visited, out, lse)


def certifies_what_was_read(cache, layer, scores, visited, out, lse):
    visit = oracle_scoring.visit_mask(visited, scores.upper.shape[3]) | np.isneginf(scores.estimate)
    unvisited = oracle_scoring._selection(~visit, visited.forced, None)
    return oracle.certify(cache, layer, scores, unvisited, out, lse)


def certifies_with_the_next_heads_sums(cache, layer, scores, visited, out, lse):
    return oracle.certify(cache, layer, scores, visited, np.roll(out, 1, axis=1), np.roll(lse, 1, axis=1))


def certifies_by(combine):
    """certify, but `combine` over the query heads instead of max."""

    def certify(cache, layer, scores, visited, out, lse):
        batch, kv_heads, repeat, _ = scores.upper.shape
        each = []
        for r in range(repeat):
            # every query head takes the place of all of its kv head
            part = replace(scores, upper=scores.upper[:, :, r : r + 1], slack=scores.slack[:, :, r : r + 1])
            mine = (x.reshape(batch, kv_heads, repeat, *x.shape[2:])[:, :, r] for x in (out, lse))
            each.append(oracle.certify(cache, layer, part, visited, *mine))
        return Certificate(combine([one.mass for one in each], axis=0), combine([one.error for one in each], axis=0))

    return certify


def certifies_without_the_values(cache, layer, scores, visited, out, lse):
    silent = replace(cache, largest_value=[np.zeros_like(x) for x in cache.largest_value])
    return oracle.certify(silent, layer, scores, visited, out, lse)


def escalates_one_group_less(read, scores, selected, lse):
    """Of those that escalation adds, the one that it would take last."""
    extra, whole = oracle.escalate(read, scores, selected, lse)
    num_groups = scores.estimate.shape[2]
    added, visit = (oracle_scoring.visit_mask(part, num_groups) for part in (extra, whole))
    for b, head in np.ndindex(*extra.counts.shape):
        listed = np.flatnonzero(added[b, head])
        if len(listed):
            need = (scores.upper[b, head] - lse.reshape(scores.slack.shape)[b, head][:, None]).max(axis=0)[listed]
            last = listed[oracle_selection.best_first(need)[-1]]
            added[b, head, last] = visit[b, head, last] = False
    return oracle_scoring._selection(added, extra.forced, None), oracle_scoring._selection(
        visit, whole.forced, whole.wanted
    )


def escalates_by_lower_bounds(read, scores, selected, lse):
    return oracle.escalate(read, replace(scores, upper=scores.lower), selected, lse)


def escalates_with_the_next_heads_sums(read, scores, selected, lse):
    return oracle.escalate(read, scores, selected, np.roll(lse, 1, axis=1))


def escalates_by_one_query_head(read, scores, selected, lse):
    one = replace(scores, lower=scores.lower[:, :, :1], upper=scores.upper[:, :, :1], slack=scores.slack[:, :, :1])
    return oracle.escalate(read, one, selected, lse.reshape(scores.slack.shape)[:, :, 0])


def escalates_everything(read, scores, selected, lse):
    return oracle.escalate(replace(read, epsilon=0.0), scores, selected, lse)


def escalates_by_upper_gains(read, scores, selected, lse):
    return oracle.escalate(read, replace(scores, lower=scores.upper), selected, lse)


def escalates_again_what_was_read(read, scores, selected, lse):
    _, whole = oracle.escalate(read, scores, selected, lse)
    return replace(whole, forced=np.zeros_like(whole.forced), wanted=None), whole


def ignores_the_layer(scores, where, layer=0):
    return oracle.select(scores, where, 0)


def shifts_the_head_modes(scores, where, layer=0):
    modes = where.config.read.head_modes
    modes = modes and tuple(one[1:] + one[:1] for one in modes)
    return oracle.select(scores, Where.of(where.config.replace(head_modes=modes), where.table, where.lengths), layer)


def calls_mixed_heads_uniform(scores, where, layer=0):
    chosen = oracle.select(scores, where, layer)
    return replace(chosen, uniform=chosen.counts[:, 0].astype(np.int64))


def forgets_larger_keys(cache, layer, k, v, slots):
    cache = oracle.write_kv(cache, layer, k, v, slots)
    if cache.largest_key:
        cache.largest_key[layer] = np.linalg.norm(k.astype(np.float64), axis=2).max(axis=0)
    return cache


def forgets_larger_values(cache, layer, k, v, slots):
    cache = oracle.write_kv(cache, layer, k, v, slots)
    if cache.largest_value:
        cache.largest_value[layer] = np.linalg.norm(v.astype(np.float64), axis=2).max(axis=0)
    return cache


def owns_unscaled_logits(cache, q, k, v):
    out, lse = oracle.attend_own(cache, q, k, v)
    return out, lse * np.sqrt(q.shape[2])


def owns_the_next_kv_head(cache, q, k, v):
    return oracle.attend_own(cache, q, np.roll(k, 1, axis=1), v)


def excess(scores, selected, lse):
    """[B, Hq]: how much too high the estimates of what was read are, in nats."""
    visit = oracle_scoring.visit_mask(selected, scores.estimate.shape[2]) & np.isfinite(scores.estimate)
    with np.errstate(divide="ignore"):
        read = np.logaddexp.reduce(np.where(visit, scores.estimate, -np.inf), axis=2)
    return np.repeat(read, lse.shape[1] // read.shape[1], axis=1) - lse


def tail_counts_visited_groups(cache, layer, where, scores, selected, lse):
    nothing = replace(selected, counts=np.zeros_like(selected.counts))
    out, tail = oracle.attend_tail(cache, layer, where, scores, nothing, lse)
    return out, tail - np.maximum(excess(scores, selected, lse), 0)


def tail_corrects_by(change):
    """attend_tail, but the estimates are lowered by `change` of their excess instead of its positive part."""

    def attend_tail(cache, layer, where, scores, selected, lse):
        out, tail = oracle.attend_tail(cache, layer, where, scores, selected, lse)
        over = excess(scores, selected, lse)
        return out, tail + np.maximum(over, 0) - change(over)

    return attend_tail


def tail_of_keys(cache, layer, k, v, slots):
    tail = cache.tail
    cache = oracle.write_kv(replace(cache, tail=None), layer, k, v, slots)
    if tail is not None:
        tail.k = cache.k
        oracle_cache._update_summaries(tail, layer, k.astype(np.float64), tail.state[layer].plan(slots))
        cache.bytes_k_reread, tail.bytes_k_reread = cache.bytes_k_reread + tail.bytes_k_reread, 0
    return replace(cache, tail=tail)


def tail_without_the_scale(cache, layer, where, scores, selected, lse):
    stored = cache.tail.summaries[layer]
    plain = stored | {"mean_scale": np.ones_like(stored["mean_scale"])} if stored else stored
    cache = replace(cache, tail=replace(cache.tail, summaries=[plain]))
    return oracle.attend_tail(cache, layer, where, scores, selected, lse)


def tail_counts_its_open_group(cache, layer, where, scores, selected, lse):
    full, size = deepcopy(cache.tail.state[layer]), cache.store.tail_tokens
    full.fill[:] = size
    cache = replace(cache, tail=replace(cache.tail, state=[full]))
    return oracle.attend_tail(
        cache, layer, Where.of(where.config, where.table, -(-where.lengths // size) * size), scores, selected, lse
    )


def tail_of_the_next_head(cache, layer, where, scores, selected, lse):
    stored = {name: np.roll(array, 1, axis=1) for name, array in cache.tail.summaries[layer].items()}
    cache = replace(cache, tail=replace(cache.tail, summaries=[stored]))
    return oracle.attend_tail(cache, layer, where, scores, selected, lse)


def tail_of_one_query_head(cache, layer, where, scores, selected, lse):
    mine = lse.reshape(len(lse), cache.spec.num_kv_heads, -1)
    first = np.broadcast_to(mine[:, :, :1], mine.shape).reshape(lse.shape)
    return oracle.attend_tail(cache, layer, where, scores, selected, first)


def copies_no_tail(cache, src, dst):
    tail, cache.tail = cache.tail, None
    cache = oracle.copy_units(cache, src, dst)
    cache.tail = tail
    return cache


WRONG = {
    "drops a group": {"select": drops_a_group},
    "attends without the last group": {"attend": attends_without_the_last_group},
    "swaps heads": {"attend": swaps_heads},
    "swaps heads in score": {"score": swaps_heads_in_score},
    "adds one thousandth": {"attend": adds_one},
    "forgets the scale": {"attend": forgets_the_scale},
    "forgets the scale in score": {"score": forgets_the_scale_in_score},
    "averages the query heads": {"score": means_over_query_heads},
    "narrows the bound": {"score": narrows_the_bound},
    "swaps K and V": {"write_kv": swaps_kv},
    "never visits the open group": {"select": never_visits_the_open_group},
    "reads more than it lists": {"attend": reads_unselected_groups},
    "swaps the query heads of the bounds": {"score": swaps_query_heads_of_the_bounds},
    "forgets the slack": {"score": forgets_the_slack},
    "certifies estimates": {"certify": certifies_estimates},
    "certifies lower bounds": {"certify": certifies_lower_bounds},
    "certifies what was read": {"certify": certifies_what_was_read},
    "certifies with the next head's sums": {"certify": certifies_with_the_next_heads_sums},
    "certifies the best query head": {"certify": certifies_by(np.min)},
    "certifies the mean query head": {"certify": certifies_by(np.mean)},
    "certifies without the values": {"certify": certifies_without_the_values},
    "escalates one group less": {"escalate": escalates_one_group_less},
    "escalates by lower bounds": {"escalate": escalates_by_lower_bounds},
    "escalates with the next head's sums": {"escalate": escalates_with_the_next_heads_sums},
    "escalates by one query head": {"escalate": escalates_by_one_query_head},
    "escalates everything": {"escalate": escalates_everything},
    "escalates by upper gains": {"escalate": escalates_by_upper_gains},
    "reads escalated groups twice": {"escalate": escalates_again_what_was_read},
    "ignores the layer of head modes": {"select": ignores_the_layer},
    "shifts the head modes": {"select": shifts_the_head_modes},
    "calls mixed heads uniform": {"select": calls_mixed_heads_uniform},
    "forgets larger keys": {"write_kv": forgets_larger_keys},
    "forgets larger values": {"write_kv": forgets_larger_values},
    "does not scale a token's own logit": {"attend_own": owns_unscaled_logits},
    "takes a token's own key of the next head": {"attend_own": owns_the_next_kv_head},
    "counts visited groups in the tail too": {"attend_tail": tail_counts_visited_groups},
    "never corrects the tail": {"attend_tail": tail_corrects_by(np.zeros_like)},
    "corrects the tail the wrong way": {"attend_tail": tail_corrects_by(lambda over: -np.maximum(over, 0))},
    "raises the tail of low estimates": {"attend_tail": tail_corrects_by(lambda over: over)},
    "averages keys for the tail": {"write_kv": tail_of_keys},
    "leaves the scale of mean values out": {"attend_tail": tail_without_the_scale},
    "counts the open tail group": {"attend_tail": tail_counts_its_open_group},
    "takes the mean values of the next head": {"attend_tail": tail_of_the_next_head},
    "corrects the tail by one query head": {"attend_tail": tail_of_one_query_head},
    "forks without the tail": {"copy_units": copies_no_tail},
}

TAILS = [
    Case((150, 100), eps("box", tail_tokens=32, budget=0.2)),  # estimates far too high
    Case((290, 50), eps("rq", tail_tokens=32, block_size=8, budget=0.2)),  # and too low
]
CHECKS = [
    *(partial(run_case, case=case) for case in BASE if case.config.store.method in ("box", "moments")),
    partial(run_case, case=Case((90, 37), eps("ball", group_tokens=2), num_heads=6)),
    check_head_modes,
    check_largest,
    check_own_token,
    *(partial(run_case, case=case) for case in TAILS),
    partial(check_fork, config=TAILS[0].config),
]


@pytest.mark.parametrize("name", WRONG)
def test_wrong_backend_fails_the_suite(name):
    backend = broken(**WRONG[name])
    for check in CHECKS:
        try:
            check(backend, "cpu")
        except AssertionError:
            return
    pytest.fail(f"a backend that {name} passes the conformance suite")


def test_the_right_backend_passes():
    for check in CHECKS:
        check(broken(), "cpu")
