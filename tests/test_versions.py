"""Weights that change while caches live: no page of old weights is found or read with new ones."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models

from eps_core import LLM
from eps_core.config.eps import EpsConfig
from eps_core.config.verify import Verify
from eps_core.decode.generate import generate, prefill, refill, tokens_of
from eps_core.decode.sampling import Sampling
from eps_core.decode.session import Session
from eps_core.decode.verified import verified
from eps_core.decode.versions import update_weights
from eps_core.errors import ConfigError
from eps_core.load import backend_name
from eps_core.paging.pool import PagePool

TEXT = "It was a dark and stormy night; the rain fell in torrents. "
BOX = EpsConfig.of(method="box", group_tokens=4, first_tokens=4, last_tokens=8, budget=0.3)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Two of one shape, and one of another."""
    names = ("llama2", "llama2", "mistral")
    made = [tiny_models.save_model(name, tmp_path_factory.mktemp("model"), seed) for seed, name in enumerate(names)]
    return made[0], made[1], made[2]


def opened(target: tuple, path: Path, **more: Any) -> Session:
    backend, device = target
    return Session.open(str(path), backend_name(backend), device, "float32", kernels="arrays", **more)


# ---- the pool


def test_pages_of_other_weights_are_never_found() -> None:
    pool, tokens = PagePool(12, 4), list(range(9))
    old, _ = pool.open()
    pool.append(old, tokens)
    assert pool.open(tokens)[1] == 8
    pool.version += 1
    new, number = pool.open(tokens)
    assert number == 0 and not set(new.table) & set(old.table)
    pool.append(new, tokens)
    same, number = pool.open(tokens)
    assert number == 8 and list(same.table) == list(new.table)[:2]
    pool.check()
    pool.free(old)  # what nobody holds is not found either
    assert list(pool.open(tokens)[0].table) == list(new.table)[:2]
    pool.check()


def test_every_version_finds_its_own() -> None:
    rng, pool = np.random.default_rng(0), PagePool(64, 4)
    written: dict[int, int] = {}  # unit -> the version that wrote it
    live: list[Any] = []
    for _ in range(300):
        what = int(rng.integers(5))
        if what == 0:
            pool.version = int(rng.integers(3))
        elif what == 1 and live:
            pool.free(live.pop(int(rng.integers(len(live)))))
        elif what == 2 and live:
            live.append(pool.fork(live[int(rng.integers(len(live)))]))
        elif pool.num_free > 8:
            tokens = rng.integers(0, 2, int(rng.integers(1, 20))).tolist()
            sequence, number = pool.open(tokens)
            assert all(written[unit] == pool.version == sequence.version for unit in sequence.table)
            pool.append(sequence, tokens[number:])
            written |= dict.fromkeys(sequence.table[number // 4 :], pool.version)
            live.append(sequence)
        pool.check()
        assert all(written[unit] == sequence.version for sequence in live for unit in sequence.table)


def test_a_stale_sequence_takes_no_token_and_gives_its_pages_back() -> None:
    pool = PagePool(8, 4)
    old, _ = pool.open()
    pool.append(old, range(6))
    fork = pool.fork(old)
    pool.version = 7
    for sequence in (old, fork):
        assert pool.is_stale(sequence)
        for call in (pool.append, pool.reserve):
            with pytest.raises(ConfigError, match="a sequence of weights 0 cannot go on with weights 7: prefill its 6"):
                call(sequence, [1] if call == pool.append else 1)
        with pytest.raises(ConfigError, match="cannot go on"):
            pool.replace(sequence, 3, [1])
        assert sequence.tokens == list(range(6))
    pool.free(old)
    assert pool.num_free == 6
    pool.free(fork)
    assert pool.num_free == 8
    pool.check()


# ---- a session


@pytest.mark.parametrize("config", [EpsConfig(), BOX], ids=["dense", "box"])
def test_a_running_decode_goes_on_with_new_weights_over_the_whole_text(
    target: tuple, models: tuple, config: EpsConfig
) -> None:
    """As if the new weights had been asked to continue prompt and what was said; no token is lost."""
    first, second, _ = models
    session, fresh = opened(target, first), opened(target, second)
    prompts = session.encode_prompts([TEXT, TEXT[3:40]], 12)
    cache, pool = session.cache(config.store, [len(prompt) + 12 for prompt in prompts])
    records = []
    for record in generate(session.decoder, cache, pool, prompts, 12, Sampling(), config.read, prefill_chunk=16):
        records.append(record)
        pool.check()
        if record.step == 4:
            update_weights(session, second, pool)
    assert pool.num_free == pool.num_units and len(records) == 12
    said = tokens_of(records, 2)
    old = tiny_models.open_llm(target, first, config=config)
    made = old.generate([TEXT, TEXT[3:40]], max_new_tokens=5, ignore_eos=True)
    assert [one.tokens for one in made] == [tokens[:5] for tokens in said]
    cache, pool = fresh.cache(config.store, [len(prompt) + 12 for prompt in prompts])
    longer = [[*prompt, *tokens[:5]] for prompt, tokens in zip(prompts, said, strict=True)]
    want = list(generate(fresh.decoder, cache, pool, longer, 7, Sampling(), config.read))
    assert tokens_of(want, 2) == [tokens[5:] for tokens in said]


def test_the_same_prompt_is_computed_again_by_new_weights_alone(models: tuple) -> None:
    session = Session.open(models[0], "numpy")
    tokens = session.encode(TEXT)
    cache, pool = session.cache(EpsConfig().store, [len(tokens)] * 2)
    done: list[int] = []

    def prefilled() -> Any:
        done.clear()
        return prefill(session.decoder, cache, pool, tokens, 8, lambda now, total: done.append(now))

    old, cache = prefilled()
    update_weights(session, models[1], pool)
    new, cache = prefilled()
    assert done[0] == 8  # from its first token
    pool.free(old)
    again, cache = prefilled()
    assert done[0] == len(tokens) // 16 * 16 + 8 and list(again.table)[:-1] == list(new.table)[:-1]
    pool.check()


def test_a_callers_sequence_is_refused_and_can_be_filled_again(models: tuple) -> None:
    session = Session.open(models[0], "numpy")
    tokens = session.encode(TEXT)
    cache, pool = session.cache(EpsConfig().store, len(tokens) + 4)
    sequence, cache = prefill(session.decoder, cache, pool, tokens[:-1], 512)
    update_weights(session, models[1], pool)
    same = session.decoder, cache, pool, [tokens], 4, Sampling()
    with pytest.raises(ConfigError, match="a sequence of weights 0 cannot go on with weights 1"):
        next(generate(*same, written=[sequence]))
    sequence, cache = refill(session.decoder, cache, pool, sequence)
    assert sequence.tokens == tokens[:-1]
    (said,) = tokens_of(list(generate(*same, written=[sequence])), 1)
    new = LLM(models[1], "off", backend="numpy")
    assert said == new.generate(TEXT, max_new_tokens=4, ignore_eos=True).tokens


def test_verified_decoding_ends_in_one_line(models: tuple) -> None:
    session = Session.open(models[0], "numpy")
    tokens = session.encode(TEXT)
    cache, pool = session.cache(BOX.store, len(tokens) + 30)
    verify = Verify("tokens", draft=2)
    rounds = verified(
        session.decoder, cache, pool, [tokens], 30, Sampling(), BOX.read, verify, drafter=session.drafter(verify)
    )
    next(rounds)
    update_weights(session, models[1], pool)
    with pytest.raises(ConfigError, match="cannot go on with weights 1"):
        list(rounds)
    assert pool.num_free == pool.num_units


def test_a_session_speaks_with_the_new_weights_and_drafts_with_them(target: tuple, models: tuple) -> None:
    asked: dict[str, Any] = {"max_new_tokens": 6, "ignore_eos": True}
    llm = tiny_models.open_llm(target, models[0], method="off")
    before, four = llm.generate(TEXT, **asked).tokens, Verify("tokens", weights="4bit")
    session = llm.session
    old = session.drafter(four)
    update_weights(session, models[1])
    now = llm.generate(TEXT, **asked).tokens
    assert now == tiny_models.open_llm(target, models[1], method="off").generate(TEXT, **asked).tokens and now != before
    assert session.drafter(four) is not old and session.path == models[1]


def test_weights_of_another_model_are_refused(models: tuple) -> None:
    session = Session.open(models[0], "numpy")
    pool, model = PagePool(4, 16), session.decoder.model
    with pytest.raises(ConfigError, match=r"is of another model than .*: its family, .*open a session of its own"):
        update_weights(session, models[2], pool)
    assert pool.version == 0 and session.decoder.model is model and session.path == models[0]
