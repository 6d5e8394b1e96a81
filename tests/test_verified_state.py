"""Verified decoding says what dense decoding says on every backend, and after every round a cache is what it is where
nothing was ever drafted, whatever lies in the slots that hold no token."""

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from verified_runs import (
    DRAWN,
    GREEDY,
    Drafter,
    Model,
    assert_same_state,
    check_rounds,
    eps,
    judge,
    placed,
    prompt,
    saved,
)

from eps_core.config.speculative import SpeculativeConfig
from eps_core.decode.verified import Verifier

CONFIGS = {
    "meanstd": eps("meanstd", budget=0.3),
    "box": eps("box", budget=0.1),
    "rq": eps("rq", budget=0.1),
}

READS = {
    "rq": eps("rq"),
    "meanstd": eps("meanstd"),
    "box": eps("box"),
    "strict": eps("box", strict=True, epsilon=0.3),
}


@pytest.mark.kernels("numba", "metal")
@pytest.mark.parametrize("name", READS)
def test_every_backend_says_the_dense_text(target: Any, name: str) -> None:
    backend, device = target
    model, config = Model(backend, device, saved("llama2")), READS[name]
    prompts = [prompt(290), prompt(41, 1)]
    for sampling in (GREEDY, DRAWN):
        want = model.dense(prompts, config, 11, sampling)
        got = model.verified(prompts, config, 11, sampling, SpeculativeConfig("tokens", 5))
        assert got.said == want.said, sampling
        assert_same_state(model, got, want, 1e-4)


def lengths_of(name: str) -> tuple[int, int]:
    return (262, 21) if name == "rq" else (45, 22)


@pytest.mark.parametrize("poison", [np.nan, 1e30], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_what_lies_in_free_slots_is_never_read(target: Any, name: str, poison: float) -> None:
    """By no draft, verify pass or summary: the drafts' own rejected slots are among them."""
    backend, device = target
    model = Model(backend, device, saved("llama2"), units=24)
    prompts = [prompt(length, i) for i, length in enumerate(lengths_of(name))]
    verify = SpeculativeConfig("tokens", 3)
    drafter = Drafter(model, None if name == "meanstd" else np.negative)
    records = check_rounds(model, prompts, CONFIGS[name], 6, DRAWN, verify, drafter, poison, 1e-4)
    assert sum(r.rolled_back for r in records) > 4 and not any(r.fallbacks for r in records)


@pytest.mark.parametrize("name", ["meanstd", "rq"])
@pytest.mark.kernels("numba", "metal")
def test_what_lies_in_free_slots_is_never_read_by_kernels(target: Any, name: str) -> None:
    test_what_lies_in_free_slots_is_never_read(target, name, np.nan)


@pytest.mark.kernels("triton")
def test_what_lies_in_free_slots_is_never_read_by_triton(target: Any) -> None:
    """A short one: its interpreter takes long."""
    backend, device = target
    model = Model(backend, device, saved("llama2"), units=6)
    drafter = Drafter(model, np.negative)
    check_rounds(
        model, [prompt(20)], CONFIGS["meanstd"], 3, DRAWN, SpeculativeConfig("tokens", 2), drafter, np.nan, 1e-4
    )


def changed(value: float, plan: str) -> Any:
    """What `assert_same_state` must refuse: one number of one sequence's K, V, fills, summaries or tokens."""
    model, config = judge(), eps("meanstd")
    runs = [model.dense([prompt(45)], config, 3, DRAWN) for _ in range(2)]
    cache, (sequence,) = runs[0].cache, runs[0].sequences
    last = sequence.length - 1
    slot = sequence.table[last // 16] * 16 + last % 16
    if plan == "tokens":
        sequence.tokens[-1] += 1
    elif plan == "fill":
        cache.state[1].fill[slot // 4] -= 1
    elif plan == "summary":
        stored = next(iter(cache.summaries[1].values()))
        stored[sequence.table[0], 3, 2] = stored[sequence.table[0], 3, 2] + 1
    else:
        getattr(cache, plan)[1][slot // 16, 3, slot % 16, 5] += value
    return model, *runs


@pytest.mark.parametrize("plan", ["k", "v", "fill", "summary", "tokens"])
def test_a_state_that_differs_is_seen(plan: str) -> None:
    model, *runs = changed(0.0, "k")
    assert_same_state(model, *runs)
    model, *runs = changed(1e-3, plan)
    with pytest.raises(AssertionError):
        assert_same_state(model, *runs)


def start(
    model: Model, prompts: Sequence[Sequence[int]], verify: SpeculativeConfig, **more: Any
) -> tuple[Verifier, dict, dict]:
    config = eps("meanstd", budget=0.3)
    cache, pool, sequences = model.start(prompts, config)
    run = Verifier(model.decoder, cache, pool, DRAWN, config.selection_config, verify, **more)
    return run, dict(enumerate(sequences)), {index: int(one[-1]) for index, one in enumerate(prompts)}


def decode(run: Verifier, alive: dict, fed: dict, tokens: int) -> dict[int, list[int]]:
    """What the sequences say until each has said `tokens` more."""
    said: dict[int, list[int]] = {index: [] for index in alive}
    alive, fed, room = dict(alive), dict(fed), dict.fromkeys(alive, tokens)
    while alive:
        record = run.round(alive, fed, room)
        run.pool.check()
        for index, token in zip(record.sequences, record.tokens, strict=True):
            said[index].append(token)
            fed[index], room[index] = token, room[index] - 1
        alive = {index: one for index, one in alive.items() if room[index]}
    return said


@pytest.mark.parametrize("gamma", [0, 2, 6])
def test_forks_between_rounds_go_their_own_ways(gamma: int) -> None:
    """A fork and its parent share units, the open one too; drafts of neither reach the other."""
    model, verify = judge(), SpeculativeConfig("tokens", gamma)
    run, alive, fed = start(model, [prompt(45)], verify)
    first = decode(run, alive, fed, 5)[0]
    child = run.pool.fork(alive[0])
    said = decode(run, {0: alive[0], 1: child}, {0: first[-1], 1: first[-1]}, 9)
    # prompt number 0 in both: of 1 the noise is another
    want = model.dense([prompt(45)], eps("meanstd"), 14, DRAWN).said[0]
    assert first + said[0] == want
    run, alive, fed = start(model, [[1], [*prompt(45), *first]], verify)
    assert said[1] == decode(run, {1: alive[1]}, {1: fed[1]}, 9)[1]
    assert said[0] != said[1]


def test_a_fork_in_the_middle_of_a_round_has_what_was_committed() -> None:
    model = judge()
    run, alive, fed = start(model, [prompt(45)], SpeculativeConfig("tokens", 4))
    children = []
    original = model.decoder.verify

    def forking(*given: Any) -> Any:
        """A verify pass that begins with a fork of the sequence."""
        children.append(run.pool.fork(alive[0]))
        run.pool.check()
        return original(*given)

    length = alive[0].length
    with patch.object(model.decoder, "verify", forking):
        said = decode(run, alive, fed, 10)[0]
    assert said == model.dense([prompt(45)], eps("meanstd"), 10, DRAWN).said[0]
    assert children[0].tokens == alive[0].tokens[:length]
    alone, others, others_fed = start(model, [[1], prompt(45)], SpeculativeConfig("tokens", 4))
    want = decode(alone, {1: others[1]}, {1: others_fed[1]}, 8)[1]
    assert decode(run, {1: children[0]}, {1: fed[0]}, 8)[1] == want


@pytest.mark.parametrize("method", ["step", "verify", "commit"])
def test_a_round_that_fails_gives_back_what_it_held(method: str) -> None:
    """In a draft step, in the verify pass, and where it writes what stays."""
    model = judge()
    run, alive, fed = start(model, [prompt(45), prompt(31, 1)], SpeculativeConfig("tokens", 20, most=20))
    free, tables = run.pool.num_free, [list(one.table) for one in alive.values()]
    tokens = [one.tokens[:] for one in alive.values()]

    broken = patch.object(model.decoder, method, side_effect=KeyboardInterrupt)
    with broken as call, pytest.raises(KeyboardInterrupt):
        run.round(alive, fed, dict.fromkeys(alive, 30))
    call.assert_called_once()
    run.pool.check()
    assert run.pool.num_free == free and [list(one.table) for one in alive.values()] == tables
    assert [one.tokens for one in alive.values()] == tokens
    # and the next round is as if nothing had been
    prompts = [prompt(45), prompt(31, 1)]
    want = model.dense(prompts, eps("meanstd"), 6, DRAWN).said
    assert list(decode(run, alive, fed, 6).values()) == want


def test_placed_is_poison() -> None:
    """What the tests poison with would be read by a verifier that sees past the end."""
    model = judge()
    run, alive, fed = start(model, [prompt(45)], SpeculativeConfig("tokens", 3))
    last = alive[0].length - 1
    run.cache = placed(model, run.cache, np.array([alive[0].table[last // 16] * 16 + last % 16]), np.nan)
    with pytest.raises(Exception, match="NaN"), np.errstate(invalid="ignore"):
        run.round(alive, fed, {0: 5})
