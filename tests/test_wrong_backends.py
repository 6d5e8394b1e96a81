"""Tests of the tests: each deliberately wrong backend must fail the conformance suite."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from test_conformance import BASE, run_case

from eps_core import backend as oracle
from eps_core.config import EpsConfig


def broken(**functions):
    """The numpy backend with some functions replaced."""
    return SimpleNamespace(**{**vars(oracle), **functions})


def drops_a_group(config, scores, lengths):
    chosen = oracle.select(config, scores, lengths)
    counts = chosen.counts - 1
    groups = chosen.groups.copy()
    for b, head in np.ndindex(*counts.shape):
        groups[b, head, counts[b, head]] = -1
    return replace(chosen, groups=groups, counts=counts, uniform=counts[:, 0].astype(np.int64))


def attends_without_the_last_group(cache, layer, q, table, lengths, selected):
    if selected is None:
        return oracle.attend(cache, layer, q, table, lengths, None)
    return oracle.attend(cache, layer, q, table, lengths, replace(selected, counts=selected.counts - 1))


def swaps_heads(cache, layer, q, table, lengths, selected):
    return oracle.attend(cache, layer, q[:, ::-1], table, lengths, selected)


def swaps_heads_in_score(cache, layer, q, table, lengths):
    return oracle.score(cache, layer, q[:, ::-1], table, lengths)


def adds_one(cache, layer, q, table, lengths, selected):
    out, lse = oracle.attend(cache, layer, q, table, lengths, selected)
    return out + 1e-3, lse


def forgets_the_scale(cache, layer, q, table, lengths, selected):
    return oracle.attend(cache, layer, q * np.sqrt(q.shape[-1]), table, lengths, selected)


def forgets_the_scale_in_score(cache, layer, q, table, lengths):
    return oracle.score(cache, layer, q * np.sqrt(q.shape[-1]), table, lengths)


def means_over_query_heads(cache, layer, q, table, lengths):
    kv_heads = cache.spec.num_kv_heads
    mean = q.reshape(len(q), kv_heads, -1, q.shape[-1]).mean(axis=2, keepdims=True)
    return oracle.score(
        cache,
        layer,
        np.broadcast_to(mean, q.reshape(len(q), kv_heads, -1, q.shape[-1]).shape).reshape(q.shape),
        table,
        lengths,
    )


def narrows_the_bound(cache, layer, q, table, lengths):
    scores = oracle.score(cache, layer, q, table, lengths)
    upper = scores.upper if scores.upper is None else scores.upper - 5.0
    return replace(scores, upper=upper)


def swaps_kv(cache, layer, k, v, slots):
    return oracle.write_kv(cache, layer, v, k, slots)


def never_visits_the_open_group(config, scores, lengths):
    estimate = np.where(np.isposinf(scores.estimate), -1e9, scores.estimate)
    return oracle.select(replace(config, last_tokens=0), replace(scores, estimate=estimate), lengths)


def reads_unselected_groups(cache, layer, q, table, lengths, selected):
    cache.kv_bytes_read += cache.spec.kv_token_bytes
    return oracle.attend(cache, layer, q, table, lengths, selected)


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
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_backend_fails_the_suite(name):
    backend = broken(**WRONG[name])
    failures = 0
    for case in [c for c in BASE if c.config.method in ("box", "moments")]:
        try:
            run_case(backend, "cpu", case)
        except AssertionError:
            failures += 1
    assert failures, f"a backend that {name} passes the conformance suite"


def test_the_right_backend_passes():
    for case in [c for c in BASE if c.config.method in ("box", "moments")]:
        run_case(broken(), "cpu", case)
    assert EpsConfig().method == "off"
