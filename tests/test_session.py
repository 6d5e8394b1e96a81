"""The Python call: `Session.open(..).generate(text)` says what `eps-proto run` says, alone, in a batch and streamed."""

import io
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny_models

from eps_core.config.eps import EpsConfig
from eps_core.decode import session as session_module
from eps_core.decode.sampling import Sampling
from eps_core.decode.session import Session
from eps_core.errors import ConfigError
from eps_core.evaluation import compare
from eps_core.evaluation.request import RunRequest
from eps_core.load import backend_name

TEXT = "It was a dark and stormy night; the rain fell in torrents. " * 5
RAGGED = [TEXT, "x", TEXT[7:160]]
BOX: dict[str, Any] = {"method": "box", "group_tokens": 8, "first_tokens": 4, "last_tokens": 16, "budget": 0.3}
SETTINGS = {"off": {}, "box": BOX, "rq": {"method": "rq", "budget": 0.3}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save_model("mistral", tmp_path_factory.mktemp("model"))


def opened(target: tuple, model: Path, **settings: Any) -> Session:
    backend, device = target
    return Session.open(str(model), backend_name(backend), device, "float32", kernels="arrays", **settings)


@pytest.fixture(scope="module")
def plain(model: Path) -> Session:
    return Session.open(model, "numpy")


# ---- one prompt


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.9, 0.8, 5)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", SETTINGS)
def test_it_says_and_reads_what_a_run_does(target: tuple, model: Path, name: str, sampling: Sampling) -> None:
    session = opened(target, model, **SETTINGS[name])
    made = session.generate(TEXT, 8, sampling.temperature, sampling.top_p, sampling.seed)
    request = RunRequest(
        session.config, sampling, session.backend_name, session.device, model, (TEXT,), 8, "float32",
        baseline=name == "off", kernels="arrays",
    )  # fmt: skip
    result = compare.run(request, io.StringIO())
    side = result["eps"] or result["dense"]
    assert (made.text, made.tokens, made.prompt_tokens) == (result["text"], result["tokens"], result["prompt_tokens"])
    assert made.bytes_read == side["bytes_kv_read"] + side.get("bytes_summary_read", 0)
    if name == "off":
        assert made.bytes_read == made.bytes_dense and made.groups_read == made.groups_total
    else:
        assert (made.groups_read, made.groups_total) == (side["pages_visited"], side["pages_total"])
        assert made.groups_read < made.groups_total and made.bytes_read < made.bytes_dense
    assert made.tokens_per_s is not None and made.tokens_per_s > 0


def test_a_stop_token_ends_it_unless_told_otherwise(plain: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    free = plain.generate(TEXT, 6, stop=False)
    end = next(i for i in range(1, 6) if free.tokens[i] not in free.tokens[:i])
    monkeypatch.setattr(plain, "spec", replace(plain.spec, eos_token_ids=(free.tokens[end],)))
    assert plain.generate(TEXT, 6).tokens == free.tokens[: end + 1]
    assert plain.generate(TEXT, 6, stop=False).tokens == free.tokens


def test_a_seed_decides_what_is_drawn(plain: Session) -> None:
    draws = [tuple(plain.generate(TEXT, 6, temperature=1.0, seed=seed).tokens) for seed in (0, 0, 1, 2)]
    assert draws[0] == draws[1] and len(set(draws)) == 3


def test_the_demo_answers_its_needle() -> None:
    session = Session.open(backend="cuda", device="cpu", kernels="arrays", method="rq", budget=0.05)
    text = (
        "# The code for otter is 31415.\n" + "x = 1\n" * 600 + "\n# What is the code for otter? The code for otter is "
    )
    made = session.generate(text, max_new_tokens=6)
    assert made.text == "31415." and made.groups_read < 0.1 * made.groups_total
    assert "".join(session.stream(text, max_new_tokens=6)) == made.text


# ---- several


@pytest.mark.parametrize("name", ["off", "box"])
def test_a_batch_says_what_its_prompts_say_alone(target: tuple, model: Path, name: str) -> None:
    session = opened(target, model, **SETTINGS[name])
    together = session.generate(RAGGED, 6)
    alone = [session.generate(text, 6) for text in RAGGED]
    assert [one.tokens for one in together] == [one.tokens for one in alone]
    assert [one.text for one in together] == [one.text for one in alone]
    assert [one.prompt_tokens for one in together] == [one.prompt_tokens for one in alone]
    # what was read is the batch's
    assert {one.bytes_dense for one in together} == {sum(one.bytes_dense for one in alone)}
    assert len({(one.bytes_read, one.groups_read, one.groups_total) for one in together}) == 1
    if name == "off":  # alone, a prompt within its budget is not even scored
        assert together[0].bytes_read == sum(one.bytes_read for one in alone)


def test_equal_prompts_draw_their_own_tokens_and_the_first_draws_as_alone(plain: Session) -> None:
    drawn = [one.tokens for one in plain.generate((TEXT, TEXT, TEXT), 6, temperature=1.0, seed=3)]
    assert drawn[0] == plain.generate(TEXT, 6, temperature=1.0, seed=3).tokens
    assert len(set(map(tuple, drawn))) == 3


def test_a_pool_holds_each_prompt_and_no_more(plain: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    pools = []
    cache = Session.cache
    monkeypatch.setattr(Session, "cache", lambda *args: pools.append(cache(*args)) or pools[-1])
    plain.generate(RAGGED, 6)
    ((made, pool),) = pools
    lengths = [len(plain.encode(text)) + 6 for text in RAGGED]
    assert pool.num_units == made.spec.num_units == sum(-(-length // 16) for length in lengths)
    assert made.spec.max_open_groups == 3 and pool.num_free == pool.num_units


# ---- streamed


def test_pieces_come_as_they_are_made_and_are_the_text(target: tuple, model: Path) -> None:
    session = opened(target, model, **BOX)
    steps: list[int] = []
    step = session.decoder.step
    session.decoder.step = lambda *args: steps.append(0) or step(*args)  # type: ignore[method-assign,func-returns-value,assignment,misc]
    text = "".join(session.stream(TEXT, 6))
    assert text == session.generate(TEXT, 6).text
    steps.clear()
    next(pieces := session.stream(TEXT, 6))
    assert 0 < len(steps) < 6
    pieces.close()  # type: ignore[attr-defined]


def test_a_piece_is_whole_characters(plain: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    said = Session.open(backend="numpy")
    tokens = said.encode("aé€😀b", special=False)
    assert len(tokens) == 1 + 2 + 3 + 4 + 1  # a byte each
    monkeypatch.setattr(said, "load", lambda verify: None)
    monkeypatch.setattr(Session, "decoder", None)
    records = [SimpleNamespace(tokens=[token]) for token in [*tokens, tokens[1]]]
    monkeypatch.setattr(session_module, "generate", lambda *args: iter(records))
    assert list(said.stream("x", 12)) == ["a", "é", "€", "😀", "b", "\ufffd"]  # what is cut off comes last


# ---- what is refused


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"prompt": ""}, "the prompt is empty: give at least one character"),
        ({"prompt": ["x", ""]}, "prompt 2 is empty"),
        ({"prompt": []}, "there is no prompt to continue"),
        ({"prompt": 5}, "the prompt 5 is not a text"),
        ({"prompt": ["x", b"y"]}, "prompt 2 b'y' is not a text"),
        ({"prompt": "a\udcff"}, "not valid Unicode"),
        (
            {"prompt": TEXT * 2},
            r"the prompt of more than 512 tokens and 32 new ones exceed the model's context of 512 tokens",
        ),
        ({"prompt": ["x", TEXT * 2]}, r"prompt 2 of more than 512 tokens and 32 new ones exceed the model's context"),
        ({"prompt": "x", "max_new_tokens": 0}, "max-new-tokens 0 is below 1"),
        ({"prompt": "x", "max_new_tokens": "8"}, "max-new-tokens '8' is not a whole number"),
        ({"prompt": "x", "max_new_tokens": 10**6}, "exceed the model's context"),
        ({"prompt": "x", "temperature": -1}, "temperature -1 is negative"),
        ({"prompt": "x", "temperature": "hot"}, "temperature 'hot' is not a number"),
        ({"prompt": "x", "temperature": 10**400}, "is not a number"),
        ({"prompt": "x", "temperature": 1.0, "top_p": float("nan")}, "top-p nan is not a number"),
        ({"prompt": "x", "seed": 0.5}, "seed 0.5 is not a whole number"),
    ],
    ids=str,
)
@pytest.mark.parametrize("call", ["generate", "stream"])
def test_what_cannot_be_continued_is_refused_in_one_line(plain: Session, call: str, args: dict, words: str) -> None:
    if call == "stream" and isinstance(args["prompt"], list):
        words = "is not a text"  # a stream has one prompt
    with pytest.raises(ConfigError, match=words) as refused:
        getattr(plain, call)(**args)  # at the call, not at the first piece
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"budget": 0.1}, 'budget means nothing while EPS is off: add method="rq"'),
        ({"method": "rq", "config": EpsConfig()}, "config and method say two things"),
        ({"modle": "x"}, "unknown EPS setting modle"),
        ({"method": "svd"}, "^method 'svd' is unknown"),
        ({"method": 5}, "method 5 is not a text"),
        ({"method": "rq", "budget": "much"}, "budget 'much' is not a number"),
        ({"method": "rq", "min_context": "auto"}, "min_context 'auto' is not a whole number"),
        ({"method": "rq", "strict": "yes"}, "strict 'yes' is not true or false"),
        ({"method": "rq", "head_modes": [5]}, "head_modes 5 is not a list"),
        ({"method": "rq", "head_modes": [["gate", 5]]}, "head_modes 5 is not a text"),
        ({"method": "rq", "budget": 10**400}, "is not a number"),
        ({"model": "no/such/folder"}, "no/such/folder"),
        ({"device": "tpu"}, "device tpu is not there"),
    ],
    ids=str,
)
def test_wrong_settings_are_refused_in_one_line(plain: Session, settings: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        Session.open(**{"model": plain.path, "backend": "numpy", **settings})
    assert "\n" not in str(refused.value)


def test_settings_are_flat_or_a_config_and_off_without_either(model: Path) -> None:
    config = EpsConfig.of(**BOX)
    assert Session.open(str(model), "numpy").config == EpsConfig()
    assert Session.open(model, "numpy", block_size=32).config == EpsConfig.of(block_size=32)
    assert Session.open(model, "numpy", **BOX).config == Session.open(model, "numpy", config=config).config == config
    assert Session.open(model, "numpy", method="rq", budget=np.float32(0.5)).config.read.budget == 0.5
    assert Session.open(model, "numpy", method="off", budget=0.1).config.store.enabled is False
