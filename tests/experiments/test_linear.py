"""The state of linear attention equals the sum over all tokens, and random features approach softmax."""

from pathlib import Path

import numpy as np
import pytest

from eps_core.decode.session import Session
from experiments.linear.states import Recurrent, State
from experiments.memory.run import Plan, Variant, markdown, table_cells, tally_document

STATES = (State(), State(gamma=0.9), State("favor", 48), State("favor", 16, 0.95, seed=3))


def phi(state: State, x: np.ndarray) -> np.ndarray:
    """Features [m] of one key or query [D]."""
    x = np.asarray(x, np.float64) * len(x) ** -0.25
    if state.features == "elu":
        return np.array([one + 1 if one > 0 else np.exp(one) for one in x])
    w = np.random.default_rng([state.seed, len(x)]).standard_normal((len(x), state.num_features))
    return np.exp(-(x @ x) / 2) * np.array([np.exp(x @ w[:, i]) for i in range(state.num_features)])


def expected(state: State, q: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """[Hq, D] of q [Hq, D] over all k and v [T, Hkv, D], token by token."""
    repeat, found = len(q) // keys.shape[1], np.zeros(q.shape)
    for head, one in enumerate(q):
        own = head // repeat
        weights = [
            state.gamma ** (len(keys) - 1 - t) * (phi(state, one) @ phi(state, k[own])) for t, k in enumerate(keys)
        ]
        found[head] = sum(w * v[own] for w, v in zip(weights, values, strict=True)) / sum(weights)
    return found


@pytest.mark.parametrize("state", STATES, ids=str)
@pytest.mark.parametrize("prompt", [0, 1, 13])
def test_a_state_is_the_sum_over_all_tokens(state: State, prompt: int) -> None:
    rng = np.random.default_rng(prompt)
    keys, values, queries = (rng.normal(size=(20, heads, 8)) for heads in (2, 2, 6))
    recurrent = Recurrent(state, keys[:prompt], values[:prompt])
    for t in range(prompt, 20):
        recurrent.add(keys[t], values[t])
        want = expected(state, queries[t], keys[: t + 1], values[: t + 1])
        np.testing.assert_allclose(recurrent.read(queries[t]), want, rtol=1e-9)


def test_many_random_features_are_softmax() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=shape) / 1.5 for shape in ((4, 16), (30, 1, 16), (30, 1, 16)))
    weights = np.exp(q @ k[:, 0].T / 4)
    exact = weights @ v[:, 0] / weights.sum(axis=1, keepdims=True)
    errors = [
        np.abs(Recurrent(State("favor", features, seed=1), k, v).read(q) - exact).max() for features in (100, 200_000)
    ]
    assert errors[1] < 0.02 < errors[0]


def test_a_table_of_states_reads_the_same_bytes_at_every_step(model: Path) -> None:
    session = Session.open(model, "numpy")
    plan = Plan(
        60, num_needles=0, num_texts=1, text_steps=4, variants=(Variant(state=State("favor", 24, 0.9)), Variant())
    )
    results = [(kind, *tally_document(session, plan, kind, index)) for kind, index in plan.documents()]
    cells = table_cells(plan, session.spec.head_dim, results)
    spec = session.spec
    kept = spec.num_layers * spec.num_kv_heads * 24 * (spec.head_dim + 1) * 4
    lengths = range(61, 65)
    whole = [one * spec.num_layers * spec.num_kv_heads * session.one_unit().kv_token_bytes for one in lengths]
    assert cells[0].bytes_ratio == pytest.approx(4 * kept / sum(whole))
    assert cells[0].bytes_kept_ratio == pytest.approx(kept / whole[-1])
    assert cells[1].kl_mean == 0 and cells[0].kl_mean is not None and cells[0].kl_mean > 0
    assert cells[0].state == State("favor", 24, 0.9)
    assert "| a state, `favor` 24, gamma 0.9 | 1 | 16 | all | - |" in markdown(cells)
