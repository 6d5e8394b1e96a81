"""Tests of the tests: each deliberately wrong backend must fail the conformance suite."""

import inspect
from copy import deepcopy
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from test_conformance import BASE, Case, check_fork, eps
from test_conformance import test_backend_follows_the_oracle as run_case
from test_conformance import test_head_modes_follow_the_oracle as check_head_modes
from test_conformance import test_largest_key_and_value_outlive_reuse as check_largest
from test_conformance import test_own_token_merged_equals_dense as check_own_token

from eps_core import reference
from eps_core.attention.protocol import ErrorBound
from eps_core.kv_cache.step_plan import StepPlan
from eps_core.reference import scoring as oracle_scoring
from eps_core.reference import selection as oracle_selection


def broken(**functions):
    """The numpy backend with some functions replaced."""
    return SimpleNamespace(**{**vars(reference), **functions})


def given(function: str, result=lambda right, a: right, **changes):
    """A backend whose `function` is given other arguments: each is what its change makes of all of them. `result` is
    what it then returns of what is right and its arguments."""
    right = getattr(reference, function)
    signature = inspect.signature(right)

    def wrong(*args, **named):
        bound = signature.bind(*args, **named)
        bound.apply_defaults()
        whole = SimpleNamespace(**bound.arguments)
        other = {name: change(whole) for name, change in changes.items()}
        return result(right(**{**bound.arguments, **other}), whole)

    return {function: wrong}


def gives(function: str, change):
    """A backend whose `function` returns what `change` makes of its result and its arguments."""
    return given(function, result=change)


def without_one(chosen, a):
    counts = chosen.counts - 1
    groups = chosen.groups.copy()
    for b, head in np.ndindex(*counts.shape):
        groups[b, head, counts[b, head]] = -1
    return replace(chosen, groups=groups, counts=counts, common_counts=counts[:, 0].astype(np.int64))


def one_group_fewer(a):
    return a.selected and replace(a.selected, counts=a.selected.counts - 1)


def mean_query(a):
    grouped = a.q.reshape(len(a.q), a.cache.spec.num_kv_heads, -1, a.q.shape[-1])
    return np.broadcast_to(grouped.mean(axis=2, keepdims=True), grouped.shape).reshape(a.q.shape)


def lower_bound(scores, a):
    return replace(scores, upper=None if scores.upper is None else scores.upper - 5.0)


def next_query_heads_bounds(scores, a):
    return replace(scores, lower=scores.lower[:, :, ::-1], upper=scores.upper[:, :, ::-1])


def estimates_as_bounds(a):
    return replace(a.scores, upper=np.broadcast_to(a.scores.estimate[:, :, None], a.scores.upper.shape))


def lower_as_upper(a):
    return replace(a.scores, upper=a.scores.lower)


def upper_as_lower(a):
    return replace(a.scores, lower=a.scores.upper)


def what_was_left_out(a):
    selected_mask = oracle_scoring.selection_mask(a.selected, a.scores.upper.shape[3]) | np.isneginf(a.scores.estimate)
    return oracle_scoring._selection(~selected_mask, a.selected.always_selected, None)


def certifies_by(combine):
    """bound, but `combine` over the query heads instead of max."""

    def bound_error(cache, layer, scores, selected, out, lse):
        batch, kv_heads, repeat, _ = scores.upper.shape
        each = []
        for r in range(repeat):
            # every query head takes the place of all of its kv head
            part = replace(scores, upper=scores.upper[:, :, r : r + 1], slack=scores.slack[:, :, r : r + 1])
            mine = (x.reshape(batch, kv_heads, repeat, *x.shape[2:])[:, :, r] for x in (out, lse))
            each.append(reference.bound_error(cache, layer, part, selected, *mine))
        return ErrorBound(combine([one.mass for one in each], axis=0), combine([one.error for one in each], axis=0))

    return {"bound_error": bound_error}


def without_the_last_of_the_added(result, a):
    """Return the groups that extension adds, without the one that it would take last."""
    extra, whole = result
    num_groups = a.scores.estimate.shape[2]
    added, selected_mask = (oracle_scoring.selection_mask(part, num_groups) for part in (extra, whole))
    for b, head in np.ndindex(*extra.counts.shape):
        listed = np.flatnonzero(added[b, head])
        if len(listed):
            lse = a.lse.reshape(a.scores.slack.shape)[b, head][:, None]
            need = (a.scores.upper[b, head] - lse).max(axis=0)[listed]
            last = listed[oracle_selection.best_first(need)[-1]]
            added[b, head, last] = selected_mask[b, head, last] = False
    parts = ((added, extra.always_selected, None), (selected_mask, whole.always_selected, whole.counts_before_union))
    return tuple(oracle_scoring._selection(*part) for part in parts)


def of_one_query_head(a):
    parts = {name: getattr(a.scores, name)[:, :, :1] for name in ("lower", "upper", "slack")}
    return replace(a.scores, **parts)


def what_was_read_too(result, a):
    _, whole = result
    return replace(whole, always_selected=np.zeros_like(whole.always_selected), counts_before_union=None), whole


def other_config(**changes):
    """`where` of another config; changes are made of the head modes."""

    def change(a):
        settings = {name: value(a.plan.config.selection_config.head_modes) for name, value in changes.items()}
        return StepPlan.of(a.plan.config.replace(**settings), a.plan.table, a.plan.lengths)

    return change


def without_the_open_group(a):
    return replace(a.scores, estimate=np.where(np.isposinf(a.scores.estimate), -1e9, a.scores.estimate))


def largest_of_the_last(name, part):
    """write_kv, but the largest norm is that of the tokens that were written last."""

    def change(cache, a):
        if getattr(cache, name):
            rows = getattr(a, part).astype(np.float64)
            getattr(cache, name)[a.layer] = np.linalg.norm(rows, axis=2).max(axis=0)
        return cache

    return change


def copies_no_summaries(cache, src, dst):
    before = deepcopy(cache.summaries)
    cache = reference.copy_units(cache, src, dst)
    cache.summaries = before
    return cache


def reversed_heads(a):
    return a.q[:, ::-1]


def unscaled(a):
    return a.q * np.sqrt(a.q.shape[-1])


def next_sums(*names):
    """Sums of the next query head."""
    return {name: lambda a, name=name: np.roll(getattr(a, name), 1, axis=1) for name in names}


WRONG = {
    "drops a group": gives("select", without_one),
    "attends without the last group": given("attend", selected=one_group_fewer),
    "swaps heads": given("attend", q=reversed_heads),
    "swaps heads in score": given("score", q=reversed_heads),
    "adds one thousandth": gives("attend", lambda result, a: (result[0] + 1e-3, result[1])),
    "forgets the scale": given("attend", q=unscaled),
    "forgets the scale in score": given("score", q=unscaled),
    "averages the query heads": given("score", q=mean_query),
    "narrows the bound": gives("score", lower_bound),
    "swaps K and V": given("write_kv", k=lambda a: a.v, v=lambda a: a.k),
    "never visits the partial group": given(
        "select", scores=without_the_open_group, plan=other_config(num_recent_tokens=lambda modes: 0)
    ),
    "swaps the query heads of the bounds": gives("score", next_query_heads_bounds),
    "forgets the slack": gives("score", lambda scores, a: replace(scores, slack=np.zeros_like(scores.slack))),
    "bounds estimates": given("bound_error", scores=estimates_as_bounds),
    "bounds lower bounds": given("bound_error", scores=lower_as_upper),
    "bounds what was read": given("bound_error", selected=what_was_left_out),
    "bounds with the next head's sums": given("bound_error", **next_sums("out", "lse")),
    "bounds the best query head": certifies_by(np.min),
    "bounds the mean query head": certifies_by(np.mean),
    "bounds without the values": given(
        "bound_error", cache=lambda a: replace(a.cache, largest_value=[np.zeros_like(x) for x in a.cache.largest_value])
    ),
    "extends one group less": gives("extend_selection", without_the_last_of_the_added),
    "extends by lower bounds": given("extend_selection", scores=lower_as_upper),
    "extends with the next head's sums": given("extend_selection", **next_sums("lse")),
    "extends by one query head": given(
        "extend_selection", scores=of_one_query_head, lse=lambda a: a.lse.reshape(a.scores.slack.shape)[:, :, 0]
    ),
    "extends everything": given(
        "extend_selection", selection_config=lambda a: replace(a.selection_config, epsilon=0.0)
    ),
    "extends by upper gains": given("extend_selection", scores=upper_as_lower),
    "reads extended groups twice": gives("extend_selection", what_was_read_too),
    "ignores the layer of head modes": given("select", layer=lambda a: 0),
    "shifts the head modes": given(
        "select", plan=other_config(head_modes=lambda modes: modes and tuple(one[1:] + one[:1] for one in modes))
    ),
    "calls mixed heads uniform": gives(
        "select", lambda chosen, a: replace(chosen, common_counts=chosen.counts[:, 0].astype(np.int64))
    ),
    "forgets larger keys": gives("write_kv", largest_of_the_last("largest_key", "k")),
    "forgets larger values": gives("write_kv", largest_of_the_last("largest_value", "v")),
    "does not scale a token's own logit": gives(
        "attend_own", lambda result, a: (result[0], result[1] * np.sqrt(a.q.shape[2]))
    ),
    "takes a token's own key of the next head": given("attend_own", k=lambda a: np.roll(a.k, 1, axis=1)),
    "forks without the summaries": {"copy_units": copies_no_summaries},
}

CHECKS = [
    *(partial(run_case, case=case) for case in BASE if case.config.cache_config.method in ("box", "moments")),
    partial(run_case, case=Case((90, 37), eps("ball", group_size=2), num_heads=6)),
    check_head_modes,
    check_largest,
    check_own_token,
    partial(check_fork, config=eps("box", group_size=8)),
]


@pytest.mark.parametrize("name", WRONG)
def test_wrong_backend_fails_the_suite(name):
    backend = broken(**WRONG[name])
    for check in CHECKS:
        try:
            check((backend, "cpu"))
        except AssertionError:
            return
    pytest.fail(f"a backend that {name} passes the conformance suite")


def test_the_right_backend_passes():
    for check in CHECKS:
        check((broken(), "cpu"))
