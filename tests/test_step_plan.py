"""What the host knows of one step before any score, computed once for all layers: against masks, and shared by no more
than is alike."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eps_core.config.eps import EpsConfig
from eps_core.kv_cache.groups import GroupState
from eps_core.kv_cache.step_plan import StepPlan

PAIRS = EpsConfig.of(method="rq", group_size=2, mean_tokens=32, block_size=128)
CONFIGS = {
    "the default": EpsConfig.of(method="rq"),
    "sixteen groups a span": PAIRS,
    "the same, wide sink and recent tokens": PAIRS.replace(num_sink_tokens=70, num_recent_tokens=200),
    "no sink and recent tokens": PAIRS.replace(num_sink_tokens=0, num_recent_tokens=0),
    "each for itself": EpsConfig.of(method="meanstd"),
    "some sequences dense": EpsConfig.of(method="rq", min_context=300),
}


def written(config: EpsConfig, units: int, tokens: list[int]) -> GroupState:
    """A pool's state in which unit i holds tokens[i] tokens."""
    cache_config = config.cache_config
    state = GroupState(units, cache_config, 8)
    for unit, many in enumerate(tokens):
        state.plan(unit * cache_config.unit_tokens + np.arange(min(many, cache_config.unit_tokens)))
    return state


@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_missing_groups_are_counted_as_they_are_marked(name, data) -> None:
    config = CONFIGS[name]
    unit, units = config.cache_config.unit_tokens, 6
    state = written(config, units, data.draw(st.lists(st.integers(0, unit), min_size=units, max_size=units)))
    lengths = np.array(data.draw(st.lists(st.integers(1, 3 * unit), min_size=2, max_size=2)))
    table = np.array([[3, 1, 5], [0, 2, 4]])
    plan = StepPlan.of(config, table, lengths)
    marked, size = plan.missing(state), config.cache_config.S
    for b, g in np.ndindex(marked.shape):
        together = config.cache_config.span_tokens
        span = g * size // together
        begin, end = span * together, (span + 1) * together
        place = table[b, begin // unit] * unit + begin % unit
        full = state.fill[place // together] == together and end <= lengths[b]
        assert marked[b, g] == (g * size < lengths[b] and not full), (b, g)
    assert (plan.num_missing(state) == (marked & ~plan.always_selected).sum(axis=1)).all()


def test_states_that_differ_share_no_answer() -> None:
    config = CONFIGS["no sink and recent tokens"]
    plan = StepPlan.of(config, np.array([[0, 1]]), np.array([2 * config.cache_config.unit_tokens]))
    full, half = (written(config, 2, tokens) for tokens in ([128, 128], [128, 64]))
    assert plan.num_missing(full)[0] == 0 and plan.num_missing(half)[0] == 32
    assert not plan.missing(full).any() and plan.missing(half).sum() == 32


def test_layers_of_other_head_modes_share_no_answer() -> None:
    modes = (("sparse", "sparse"), ("dense", "dense"), ("sparse", "dense"))
    plan = StepPlan.of(EpsConfig.of(method="rq", head_modes=modes), np.arange(47)[None], np.array([3000]))
    for _ in range(2):
        assert [plan.reads_all(layer) for layer in range(3)] == [False, True, False]
