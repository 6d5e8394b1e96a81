"""Where a verified run ends, and what stops it from drafting: as dense decoding, with nothing left behind."""

from typing import Any

import numpy as np
import pytest
from verified_runs import DRAWN, GREEDY, Drafter, Model, check_rounds, eps, judge, prompt

from eps_core.config.speculative import SpeculativeConfig
from eps_core.decode import verified as verified_module
from eps_core.decode.accept import draft_audit
from eps_core.decode.generate import generate, tokens_of
from eps_core.decode.verified import Verifier, verified
from eps_core.errors import ConfigError
from eps_core.kv_cache.pool import PagePool

CONFIG = eps("meanstd", budget=0.3)
PROMPTS = [prompt(45), prompt(22, 1), prompt(9, 2)]
FOUR = SpeculativeConfig("tokens", 4)


def right(model: Model) -> Drafter:
    """Accepted wholly: then what ends a sequence lies inside what was accepted."""
    return Drafter(model, dense=True)


@pytest.mark.parametrize("place", range(9))
def test_a_stop_token_inside_what_was_accepted(place: int) -> None:
    model = judge()
    said = model.dense(PROMPTS, CONFIG, 9, DRAWN).said
    stop = [said[0][place]]
    want = model.dense(PROMPTS, CONFIG, 9, DRAWN, stop_tokens=stop)
    got = model.verified(PROMPTS, CONFIG, 9, DRAWN, FOUR, drafter=right(model), stop_tokens=stop)
    assert got.said == want.said and got.said[0] == said[0][: said[0].index(stop[0]) + 1]
    assert [one.tokens for one in got.sequences] == [one.tokens for one in want.sequences]
    assert got.pool.num_free == want.pool.num_free and not got.pool._reserved
    check_rounds(model, PROMPTS, CONFIG, 9, DRAWN, FOUR, right(model), stop=stop)
    # and a token at which the caller ends a sequence, which drafts do not know
    given: list[list[int]] = [[], [], []]

    def ends(index: int, token: int) -> bool:
        given[index].append(token)
        return token in stop

    got = model.verified(PROMPTS, CONFIG, 9, DRAWN, FOUR, drafter=right(model), ends=ends)
    assert got.said == given == want.said and not got.pool._reserved
    assert [one.tokens for one in got.sequences] == [one.tokens for one in want.sequences]
    assert sum(r.bytes_kv_dense for r in got.records) == sum(r.bytes_kv_dense for r in want.records)


def test_sequences_that_end_at_different_times() -> None:
    model = judge()
    said = model.dense(PROMPTS, CONFIG, 14, DRAWN).said
    stop = [said[0][2], said[1][7]]
    for drafter in (right(model), Drafter(model), Drafter(model, np.negative)):
        verify = SpeculativeConfig("tokens", 5)
        got = model.verified(PROMPTS, CONFIG, 14, DRAWN, verify, drafter=drafter, stop_tokens=stop)
        assert got.said == model.dense(PROMPTS, CONFIG, 14, DRAWN, stop_tokens=stop).said
        assert len({len(one) for one in got.said}) > 1


@pytest.mark.parametrize("tokens", [0, 1, 2, 4, 5, 6])
def test_the_last_token_is_never_passed(tokens: int) -> None:
    model = judge()
    drafter = right(model)
    got = model.verified(PROMPTS, CONFIG, tokens, GREEDY, FOUR, drafter=drafter)
    assert got.said == model.dense(PROMPTS, CONFIG, tokens, GREEDY).said
    assert [len(one) for one in got.said] == [tokens] * 3
    assert [one.length for one in got.sequences] == [len(one) - 1 + tokens for one in PROMPTS]
    assert drafter.steps == sum(max(r.drafted) for r in got.records) and len(got.records) == -(-tokens // 5)


def test_min_context_is_dense() -> None:
    """No draft for a sequence below it, while others draft."""
    model, config = judge(), eps("meanstd", budget=0.3, min_context=40)
    records = model.verified(PROMPTS, config, 9, GREEDY, FOUR).records
    for record in records:
        alive = sorted(set(record.sequences))
        assert record.fallbacks == ({"min_context": sum(i > 0 for i in alive)} if 1 in alive or 2 in alive else {})
        assert all(not made for i, made in zip(alive, record.drafted, strict=True) if i)
    assert sum(r.drafted[0] for r in records if 0 in r.sequences) > 4
    check_rounds(model, PROMPTS, config, 9, DRAWN, FOUR)


def test_the_first_token_of_all_is_drafted_by_nobody() -> None:
    model = judge()
    got = model.verified([[5], [7, 8]], CONFIG, 6, DRAWN, FOUR)
    assert got.said == model.dense([[5], [7, 8]], CONFIG, 6, DRAWN).said
    assert got.records[0].fallbacks == {"empty": 1} and got.records[0].drafted == [0, 4]


def test_a_pool_too_small_for_drafts_is_dense() -> None:
    """Both prompts and the text fit 6 units of 16 tokens, as the second one ends early; its drafts need a seventh."""
    model = Model(judge().backend, "cpu", judge().path, units=6)
    prompts = PROMPTS[:2]
    said = judge().dense(prompts, CONFIG, 20, DRAWN).said
    stop = [next(token for token in said[1][4:] if token not in said[0])]
    want = model.dense(prompts, CONFIG, 20, DRAWN, stop_tokens=stop)
    assert len(want.said[0]) == 20 and 4 < len(want.said[1]) < 12
    wrong = Drafter(model, np.negative)
    got = model.verified(
        prompts, CONFIG, 20, DRAWN, SpeculativeConfig("tokens", 19, 20), drafter=wrong, stop_tokens=stop
    )
    assert got.said == want.said and not got.pool._reserved
    refused = [r for r in got.records if r.fallbacks.get("pool")]
    assert refused and not any(sum(r.drafted) for r in refused)
    assert any(sum(r.drafted) for r in got.records)  # once there is room
    assert [one.tokens for one in got.sequences] == [one.tokens for one in want.sequences]


def test_a_pool_too_small_for_the_text_is_the_same_error() -> None:
    model = Model(judge().backend, "cpu", judge().path, units=5)
    prompts = [prompt(45), prompt(22, 1)]
    with pytest.raises(ConfigError, match="raise --pool-tokens") as error:
        model.verified(prompts, CONFIG, 30, DRAWN, FOUR)
    with pytest.raises(ConfigError) as other:
        model.dense(prompts, CONFIG, 30, DRAWN)
    assert str(error.value) == str(other.value)


# ---- the generator ----


def begin(model: Model) -> tuple[Any, PagePool]:
    cache, pool = model.cache(CONFIG)
    return verified(model.decoder, cache, pool, PROMPTS, 12, DRAWN, CONFIG.selection_config, FOUR), pool


def test_all_is_freed_at_the_end_or_when_it_is_closed_early() -> None:
    model = judge()
    rounds, pool = begin(model)
    records = list(rounds)
    assert tokens_of(records, 3) == model.dense(PROMPTS, CONFIG, 12, DRAWN).said
    assert pool.num_live == 0 and pool.num_free == pool.num_units
    pool.check()
    for after in (0, 1, 2):
        rounds, pool = begin(model)
        for _ in range(after):
            next(rounds)
        rounds.close()
        assert pool.num_live == 0 and pool.num_free == pool.num_units and not pool._reserved
        pool.check()


def test_a_prompt_that_was_decoded_is_found_again() -> None:
    """Full units of the text itself too; none that a draft lay in is anything but the text."""
    model = judge()
    cache, pool = model.cache(CONFIG)
    one = verified(model.decoder, cache, pool, PROMPTS[:1], 40, GREEDY, CONFIG.selection_config, FOUR)
    said: list[int] = []
    try:
        while True:
            said += next(one).tokens
    except StopIteration as end:
        cache = end.value
    whole = [*PROMPTS[0], *said]
    _, shared = (probe := pool.open(whole))
    assert shared == (len(whole) - 1) // 16 * 16
    pool.free(probe[0])
    steps = generate(model.decoder, cache, pool, [whole], 5, GREEDY)
    assert tokens_of(list(steps), 1)[0] == model.dense([whole], CONFIG, 5, GREEDY).said[0]


def test_a_prompt_without_tokens_is_refused() -> None:
    model = judge()
    cache, pool = model.cache(CONFIG)
    with pytest.raises(ConfigError, match="empty prompt"):
        next(verified(model.decoder, cache, pool, [[]], 3, GREEDY, CONFIG.selection_config, FOUR))


def test_an_auto_run_by_a_clock_that_says_drafts_are_dear_is_dense() -> None:
    """The clock is the only measure: a draft that takes as long as a dense step is drafted as a probe only."""
    model, now = judge(), [0.0]

    class Timed(Drafter):
        def step(self, *given: Any, **named: Any) -> Any:
            now[0] += 5.0
            return super().step(*given, **named)

    config, prompts = CONFIG, PROMPTS[:1]
    cache, pool, (sequence,) = model.start(prompts, config)
    drafter = Timed(model, dense=True)
    run = Verifier(
        model.decoder, cache, pool, GREEDY, config.selection_config, SpeculativeConfig("tokens", None), drafter=drafter,
        clock=lambda: now.__setitem__(0, now[0] + 1.0) or now[0],
    )  # fmt: skip
    fed, said = prompts[0][-1], []
    while len(said) < 40:
        record = run.round({0: sequence}, {0: fed}, {0: 40 - len(said)})
        said += record.tokens
        fed = said[-1]
    assert said == model.dense(prompts, config, 40, GREEDY).said[0]
    assert 0 < drafter.steps <= 4 * 3


def test_what_the_audit_takes_is_part_of_what_a_pass_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else auto would call drafts cheap on a model whose vocabulary takes longer to compare than to decode."""
    model, now = judge(), [0.0]

    def slow(*given: Any) -> dict[str, Any]:
        now[0] += 7.0
        return draft_audit(*given)

    monkeypatch.setattr(verified_module, "draft_audit", slow)
    cache, pool, (sequence,) = model.start(PROMPTS[:1], CONFIG)
    run = Verifier(model.decoder, cache, pool, GREEDY, CONFIG.selection_config, FOUR, clock=lambda: now[0])
    record = run.round({0: sequence}, {0: PROMPTS[0][-1]}, {0: 9})
    assert run.pace.cost(5) == record.round_ms == 7000.0
