"""The Python API: `LLM(..).generate(text)` gives what `eps-proto run` gives, alone, in a batch and streamed."""

import doctest
import inspect
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import tiny_models
import torch
from command import last, outcome
from hypothesis import given
from hypothesis import strategies as st

import eps_core
from eps_core import LLM, EpsConfig
from eps_core.config import eps as eps_module
from eps_core.config.speculative import SpeculativeConfig
from eps_core.decode import llm as llm_module
from eps_core.decode import session as session_module
from eps_core.decode.llm import Generation, Piece
from eps_core.decode.session import Session
from eps_core.decode.stop_strings import StoppedText
from eps_core.errors import ConfigError

TEXT = "It was a dark and stormy night; the rain fell in torrents. " * 5
RAGGED = [TEXT, "x", TEXT[7:160]]
BOX: dict[str, Any] = {"method": "box", "group_size": 8, "num_sink_tokens": 4, "num_recent_tokens": 16, "budget": 0.3}
OFF = {"method": "off"}
SETTINGS = {"off": OFF, "box": BOX, "rq": {"method": "rq", "budget": 0.3}}
NEEDLE = "# The code for otter is 31415.\n" + "x = 1\n" * 150 + "\n# What is the code for otter? The code for otter is "


@pytest.fixture(scope="module")
def plain(model: Path) -> LLM:
    return LLM(model, "off", backend="numpy")


# ---- what is promised


def test_the_public_names_and_signatures_are_stable() -> None:
    """A change here is a change for every user."""
    assert eps_core.__all__ == ["LLM", "EpsConfig"] and {"LLM", "EpsConfig"} <= set(dir(eps_core))
    names = {name: [*inspect.signature(call).parameters] for name, call in (("LLM", LLM), ("generate", LLM.generate))}
    assert names["LLM"] == [
        "model", "method", "config", "speculative", "backend", "device", "dtype", "kv_dtype", "kv_bits", "kernels",
        "cache_dir", "weights", "selection",
    ]  # fmt: skip
    assert names["generate"] == [
        "self", "prompts", "max_new_tokens", "temperature", "top_p", "stop", "seed", "chat", "ignore_eos"
    ]  # fmt: skip
    generate, stream = (inspect.signature(call).parameters for call in (LLM.generate, LLM.stream))
    assert [*stream] == ["self", "prompt", *names["generate"][2:]]
    defaults = {
        "max_new_tokens": 32, "temperature": 0.0, "top_p": 1.0, "stop": (), "seed": 0, "chat": False,
        "ignore_eos": False,
    }  # fmt: skip
    for call in (generate, stream):
        assert {name: one.default for name, one in call.items() if one.kind is one.KEYWORD_ONLY} == defaults
    assert [field.name for field in fields(Generation)] == [
        "text", "tokens", "num_prompt_tokens", "finish_reason", "kv_bytes_read", "kv_bytes_dense", "tokens_per_second",
        "groups_read", "groups_total", "acceptance",
    ]  # fmt: skip
    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        eps_core.LMM  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize(
    ("line", "unloaded"),
    [
        ("import eps_core", {"numpy", "eps_core.decode"}),
        ("from eps_core import EpsConfig", {"tokenizers", "eps_core.decode"}),
        ("from eps_core import LLM", {"jinja2", "huggingface_hub", "rich"}),
    ],
)
def test_the_import_loads_no_array_library(line: str, unloaded: set[str]) -> None:
    code = f"import sys; {line}; print(*sys.modules)"
    root = Path(eps_core.__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    loaded = set(done.stdout.split())
    assert "eps_core" in loaded
    assert not loaded & {"mlx", "mlx.core", "torch", "numba", "llvmlite", "eps_mlx", "eps_cuda", "eps_core.reference"}
    assert not loaded & unloaded


@pytest.mark.parametrize("module", [llm_module, eps_module])
def test_the_docstrings_examples_run(module: ModuleType) -> None:
    found = doctest.testmod(module)
    assert found.attempted > 1 and not found.failed


# ---- one prompt


# flags of `run`, settings of LLM, arguments of `generate`
WAYS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "greedy": ("--method rq --eps-budget 0.1", {"method": "rq", "budget": 0.1}, {}),
    "sampled": (
        "--method rq --eps-budget 0.1 --temperature 0.9 --top-p 0.8 --seed 3",
        {"budget": 0.1},
        {"temperature": 0.9, "top_p": 0.8, "seed": 3},
    ),
    "speculative": (
        "--method rq --eps-budget 0.1 --eps-verify tokens",
        {"method": "rq", "budget": 0.1, "speculative": True},
        {},
    ),
    "dense": ("--method off", {"method": "dense"}, {}),
}  # fmt: skip


@pytest.mark.parametrize(("backend", "way"), [("numpy", "greedy"), ("mlx", "greedy"), *(("cuda", way) for way in WAYS)])
def test_the_demo_model_says_what_the_command_says(backend: str, way: str, tmp_path: Path) -> None:
    flags, settings, asked = WAYS[way]
    here = ("--backend", backend, "--device", "cpu", "--kernels", "arrays")
    said = last(outcome(["run", *here, *flags.split(), "--prompt", NEEDLE, "--max-new-tokens", "8"], tmp_path))
    llm = LLM(backend=backend, device="cpu", kernels="arrays", **settings)
    made = llm.generate(NEEDLE, max_new_tokens=8, **asked)
    assert (made.text, made.tokens, made.num_prompt_tokens) == (said["text"], said["tokens"], said["prompt_tokens"])
    assert asked or made.text.startswith("31415.")
    assert made.finish_reason == "length" and ((made.tokens_per_second or 0) > 0 or "speculative" in settings)
    if "speculative" not in settings:
        side = said["eps"] or said["dense"]
        assert made.kv_bytes_read == side["bytes_kv_read"] + side.get("bytes_summary_read", 0)
        assert made.groups_read is not None and made.groups_total is not None
        if said["eps"]:
            assert (made.groups_read, made.groups_total) == (side["pages_visited"], side["pages_total"])
            assert made.groups_read < made.groups_total and made.kv_bytes_read < made.kv_bytes_dense
        else:
            assert made.kv_bytes_read == made.kv_bytes_dense and made.groups_read == made.groups_total
    pieces = list(llm.stream(NEEDLE, max_new_tokens=8, **asked))
    assert "".join(pieces) == made.text and pieces[-1].result is not None
    assert replace(pieces[-1].result, tokens_per_second=None) == replace(made, tokens_per_second=None)
    assert (made.acceptance is not None) == ("speculative" in settings)


def test_tokens_are_a_prompt_as_their_text_is(plain: LLM) -> None:
    tokens = plain.tokenizer.encode(TEXT).ids
    want = plain.generate(TEXT, max_new_tokens=4)
    assert replace(plain.generate(tokens, max_new_tokens=4), tokens_per_second=want.tokens_per_second) == want
    both = plain.generate([tokens, "x"], max_new_tokens=4)
    assert [one.num_prompt_tokens for one in both] == [len(tokens), 1] and both[0].tokens == want.tokens
    assert "".join(plain.stream(tokens, max_new_tokens=4)) == want.text
    array = np.array(tokens)
    for prompt in (array, [*array]):
        assert plain.generate(prompt, max_new_tokens=4).tokens == want.tokens  # type: ignore[call-overload]
        assert "".join(plain.stream(prompt, max_new_tokens=4)) == want.text  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="the prompt 5 is not a text"):
        plain.generate(np.array(5))  # type: ignore[call-overload]
    for several in ([array] * 2, np.stack([array] * 2)):
        assert [one.tokens for one in plain.generate(several, max_new_tokens=4)] == [want.tokens] * 2  # type: ignore[call-overload]


def test_no_speed_is_told_of_the_first_two_steps(plain: LLM) -> None:
    speeds = [plain.generate(TEXT, max_new_tokens=count, ignore_eos=True).tokens_per_second for count in (1, 2, 3)]
    assert speeds[:2] == [None] * 2 and speeds[2] is not None and speeds[2] > 0


def test_a_stop_token_ends_it_unless_it_is_ignored(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    free = plain.generate(TEXT, max_new_tokens=6, ignore_eos=True)
    end = next(i for i in range(1, 6) if free.tokens[i] not in free.tokens[:i])
    monkeypatch.setattr(plain.session, "spec", replace(plain.session.spec, eos_token_ids=(free.tokens[end],)))
    ended = plain.generate(TEXT, max_new_tokens=6)
    assert ended.tokens == free.tokens[: end + 1] and ended.finish_reason == "stop"
    ignored = plain.generate(TEXT, max_new_tokens=6, ignore_eos=True)
    assert ignored.tokens == free.tokens and ignored.finish_reason == "length"


def test_a_seed_decides_what_is_drawn(plain: LLM) -> None:
    draws = [tuple(plain.generate(TEXT, max_new_tokens=6, temperature=1.0, seed=seed).tokens) for seed in (0, 0, 1, 2)]
    assert draws[0] == draws[1] and len(set(draws)) == 3


def test_a_chat_is_the_prompt_in_the_models_template(model: Path, tmp_path: Path) -> None:
    copy = tiny_models.save_model("mistral", tmp_path / "model")
    template = "{% for message in messages %}<{{ message.role }}>{{ message.content }}</>{% endfor %}<answer>"
    (copy / "chat_template.jinja").write_text(template)
    llm = LLM(copy, "off", backend="numpy")
    made = llm.generate("Who fell?", max_new_tokens=3, chat=True)
    assert made.tokens == llm.generate("<user>Who fell?</><answer>", max_new_tokens=3).tokens
    assert made.num_prompt_tokens == len("<user>Who fell?</><answer>")
    with pytest.raises(ConfigError, match="a chat template takes text, and this prompt is of tokens"):
        llm.generate([1, 2], chat=True)


def test_a_config_stands_for_method_and_selection(model: Path) -> None:
    config = EpsConfig(**BOX)
    assert LLM(model, backend="numpy").config == EpsConfig("rq")
    assert LLM(model, backend="numpy", config=config).config == LLM(model, backend="numpy", **BOX).config == config
    for name in ("dense", "off"):
        assert LLM(model, name, backend="numpy", budget=0.1).config.cache_config.enabled is False
    verify = SpeculativeConfig("tokens", 3)
    assert LLM(model, backend="numpy", speculative=verify).session.verify is verify


KV_BITS: list[tuple[Any, Any]] = [
    (8, (8, 8)), ("8", (8, 8)), ([16, 16], (16, 16)), (["8", "fp8"], (8, "fp8")), ("8,4", (8, 4)),
    (np.int64(4), (4, 4)),
]  # fmt: skip


@pytest.mark.parametrize(("kv_bits", "pair"), KV_BITS)
def test_formats_of_k_and_v_are_one_name_or_two(model: Path, kv_bits: Any, pair: Any) -> None:
    for session in (
        LLM(model, backend="numpy", kv_bits=kv_bits).session,
        Session.open(model, "numpy", kv_bits=kv_bits, method="rq"),
    ):
        assert session.kv_bits == pair and session.balanced == (pair == (16, 16))


# ---- stop strings


@pytest.mark.parametrize("settings", [OFF, {**BOX, "budget": 1.0, "speculative": True}], ids=["dense", "speculative"])
def test_a_stop_string_ends_a_text_before_it(model: Path, plain: LLM, settings: dict[str, Any]) -> None:
    llm = LLM(model, backend="numpy", **settings)
    free = llm.generate(TEXT, max_new_tokens=12, ignore_eos=True)
    word = free.text[4:7]
    at = free.text.index(word)
    made = llm.generate(TEXT, max_new_tokens=12, ignore_eos=True, stop=word)
    assert made.text == free.text[:at] and made.finish_reason == "stop"
    assert made.tokens == free.tokens[: len(made.tokens)]
    assert llm.session.decode(made.tokens).startswith(made.text + word[:1])
    want = plain.generate(TEXT, max_new_tokens=12, ignore_eos=True, stop=word)
    assert (made.tokens, made.kv_bytes_dense) == (want.tokens, want.kv_bytes_dense)
    never = llm.generate(TEXT, max_new_tokens=12, ignore_eos=True, stop=["never said", word * 9])
    assert (never.text, never.tokens, never.finish_reason) == (free.text, free.tokens, "length")
    pieces = list(llm.stream(TEXT, max_new_tokens=12, ignore_eos=True, stop=[word, "never said"]))
    assert "".join(pieces) == made.text and [token for piece in pieces for token in piece.tokens] == made.tokens
    assert pieces[-1].result == replace(made, tokens_per_second=pieces[-1].result.tokens_per_second)  # type: ignore[union-attr]


def test_a_prompt_that_met_its_stop_string_leaves_the_batch(plain: LLM) -> None:
    asked: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True}
    free = plain.generate(RAGGED, **asked)
    word = next(text for text in free[0].text[2:] if text not in free[1].text)
    asked["stop"] = word
    together, alone = plain.generate(RAGGED, **asked), [plain.generate(text, **asked) for text in RAGGED]
    assert [(one.text, one.tokens, one.finish_reason) for one in together] == [
        (one.text, one.tokens, one.finish_reason) for one in alone
    ]
    assert together[0].finish_reason == "stop" and together[1].finish_reason == "length"
    assert together[0].kv_bytes_dense == sum(one.kv_bytes_dense for one in alone) < free[0].kv_bytes_dense


def test_a_prompt_is_stored_where_a_stop_string_ends_its_text(model: Path, tmp_path: Path) -> None:
    llm = LLM(model, "off", backend="numpy", cache_dir=tmp_path / "kept")
    first = llm.generate(TEXT, max_new_tokens=8, ignore_eos=True).text[0]
    stored = {file.name for file in (tmp_path / "kept").iterdir()}
    again = LLM(model, "off", backend="numpy", cache_dir=tmp_path / "other")
    assert again.generate(TEXT, max_new_tokens=8, stop=first).text == ""
    assert {file.name for file in (tmp_path / "other").iterdir()} == stored


class Characters:
    """A tokenizer whose tokens are the places of texts in a list."""

    def __init__(self, words: list[str]) -> None:
        self.words = words

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return "".join(self.words[token] for token in tokens)


def the_text_before(text: str, stop: list[str]) -> str:
    """By trying every end of the text."""
    for end in range(1, len(text) + 1):
        starts = [end - len(word) for word in stop if text[:end].endswith(word)]
        if starts:
            return text[: min(starts)]
    return text


@given(
    words=st.lists(st.text("ab\ufffd", max_size=4), max_size=8),  # a token may end inside a character
    stop=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_text_ends_before_the_first_stop_string_whatever_its_tokens_are(words: list[str], stop: list[str]) -> None:
    text, seen = StoppedText(Characters(words), stop), ""
    for token in range(len(words)):
        ended = text.add(token)
        assert text.text.startswith(seen)  # what was streamed stays
        seen = text.text
        if ended:
            break
    else:
        ended = text.flush()
    want = the_text_before("".join(words), stop)
    assert text.text == want and ended == (want != "".join(words))


# ---- several


def test_equal_prompts_draw_their_own_tokens_and_the_first_draws_as_alone(plain: LLM) -> None:
    drawn = [one.tokens for one in plain.generate([TEXT, TEXT, TEXT], max_new_tokens=6, temperature=1.0, seed=3)]
    assert drawn[0] == plain.generate(TEXT, max_new_tokens=6, temperature=1.0, seed=3).tokens
    assert len(set(map(tuple, drawn))) == 3


def test_a_pool_holds_each_prompt_and_no_more(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    pools = []
    cache = Session.cache
    monkeypatch.setattr(Session, "cache", lambda *args: pools.append(cache(*args)) or pools[-1])
    plain.generate(RAGGED, max_new_tokens=6)
    ((made, pool),) = pools
    lengths = [len(plain.session.encode(text)) + 6 for text in RAGGED]
    assert pool.num_units == made.spec.num_units == sum(-(-length // 16) for length in lengths)
    assert made.spec.max_open_groups == 3 and pool.num_free == pool.num_units


# ---- streamed


def test_pieces_come_as_they_are_made_and_are_the_text(target: tuple, model: Path) -> None:
    llm = tiny_models.open_llm(target, model, **BOX)
    pieces = list(llm.stream(TEXT, max_new_tokens=6))
    made = llm.generate(TEXT, max_new_tokens=6)
    assert "".join(pieces) == made.text and all(isinstance(piece, Piece) for piece in pieces)
    assert [token for piece in pieces for token in piece.tokens] == made.tokens
    assert all(piece and piece.result is None for piece in pieces[:-1])
    assert pieces[-1].result == replace(made, tokens_per_second=pieces[-1].result.tokens_per_second)  # type: ignore[union-attr]
    with patch.object(llm.session.decoder, "step", wraps=llm.session.decoder.step) as step:
        next(some := llm.stream(TEXT, max_new_tokens=6))
        assert 0 < step.call_count < 6
        some.close()


def test_a_piece_is_whole_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(backend="numpy")
    tokens = llm.session.encode("aé€😀b", special=False)
    assert len(tokens) == 1 + 2 + 3 + 4 + 1  # a byte each

    def said(*args: Any, ends: Any) -> Any:
        for token in [*tokens, tokens[1]]:
            ends(0, token)
            yield

    monkeypatch.setattr(session_module, "generate", said)
    monkeypatch.setattr(llm_module, "summarise", lambda records: dict.fromkeys(COUNTS, 0))
    # what is cut off comes last
    *pieces, last = llm.stream("x", max_new_tokens=12)
    assert [*pieces, last] == ["a", "é", "€", "😀", "b", "\ufffd"] and last.result.finish_reason == "length"
    *pieces, last = llm.stream("x", max_new_tokens=12, stop="\ufffd")
    assert [*pieces, last] == ["a", "é", "€", "😀", "b", ""] and last.result.finish_reason == "stop"


COUNTS = (
    "bytes_kv_read_est", "bytes_summary_read", "bytes_kv_dense", "tokens_per_s", "warm_up_steps", "pages_visited",
    "pages_total",
)  # fmt: skip


# ---- what is refused


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"prompts": ""}, "the prompt is empty: give at least one character"),
        ({"prompts": ["x", ""]}, "prompt 2 is empty"),
        ({"prompts": [[]]}, "the prompt is empty: give at least one character or token"),
        ({"prompts": []}, "there is no prompt to continue"),
        ({"prompts": 5}, "the prompt 5 is not a text"),
        ({"prompts": ["x", b"y"]}, "prompt 2 b'y' is not a text"),
        ({"prompts": [1, 10**6]}, "token 1000000 is not of the model, which has 0 to 299: use its own tokenizer"),
        ({"prompts": [1, "x"]}, r"the prompt \[1, 'x'\] is not a text"),
        ({"prompts": "a\udcff"}, "not valid Unicode"),
        (
            {"prompts": TEXT * 2},
            r"the prompt of more than 512 tokens and 32 new ones exceed the model's context of 512 tokens",
        ),
        ({"prompts": [1] * 500}, "the prompt of 500 tokens and 32 new ones exceed the model's context of 512 tokens"),
        ({"prompts": ["x", TEXT * 2]}, r"prompt 2 of more than 512 tokens and 32 new ones exceed the model's context"),
        ({"prompts": "x", "max_new_tokens": 0}, "max-new-tokens 0 is below 1"),
        ({"prompts": "x", "max_new_tokens": "8"}, "max-new-tokens '8' is not a whole number"),
        ({"prompts": "x", "max_new_tokens": 10**6}, "exceed the model's context"),
        ({"prompts": "x", "temperature": -1}, "temperature -1 is negative"),
        ({"prompts": "x", "temperature": "hot"}, "temperature 'hot' is not a number"),
        ({"prompts": "x", "temperature": 10**400}, "is not a number"),
        ({"prompts": "x", "top_p": 0}, r"top-p 0 is outside \(0, 1\]: use 1"),
        ({"prompts": "x", "top_p": 1.5}, r"top-p 1.5 is outside \(0, 1\]: use 1"),
        ({"prompts": "x", "temperature": 1.0, "top_p": float("nan")}, "top-p nan is not a number"),
        ({"prompts": "x", "seed": 0.5}, "seed 0.5 is not a whole number"),
        ({"prompts": "x", "seed": -1}, "seed -1 is negative: use 0 or more"),
        ({"prompts": "x", "stop": ""}, "stop '' has no characters: give at least one, or leave stop out"),
        ({"prompts": "x", "stop": ["a", 5]}, "stop 5 is not a text"),
        ({"prompts": "x", "stop": True}, "stop True is not a list"),
        ({"prompts": "x", "chat": True}, "has no chat template"),
    ],
    ids=str,
)
@pytest.mark.parametrize("call", ["generate", "stream"])
def test_what_cannot_be_continued_is_refused_in_one_line(plain: LLM, call: str, args: dict, words: str) -> None:
    (first, *others) = args.values()
    if call == "stream" and isinstance(first, list) and not isinstance((first or [0])[0], int):
        words = "is not a text"  # a stream has one prompt
    if call == "stream" and first == []:
        words = "the prompt is empty"
    with pytest.raises(ConfigError, match=words) as refused:
        getattr(plain, call)(first, **dict(zip([*args][1:], others, strict=True)))  # at the call, not the first piece
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"method": "rq", "config": EpsConfig()}, "config and method say two things"),
        ({"budget": 0.1, "config": EpsConfig()}, "config and budget say two things"),
        ({"modle": "x"}, "unknown EPS setting modle"),
        ({"verify": "tokens"}, "speculative=True"),
        ({"method": "svd"}, "^method 'svd' is unknown"),
        ({"method": 5}, "method 5 is not a text"),
        ({"method": "keys"}, "^method 'keys' only bounds .*: choose one of off, jl, .*, rq$"),
        ({"config": EpsConfig("keys")}, "^method 'keys' only bounds .*: choose one of off, jl, .*, rq$"),
        ({"budget": "much"}, "budget 'much' is not a number"),
        ({"budget": 0}, "eps-budget 0 is no share above 0"),
        ({"method": "rq", "rescore": float("nan")}, "rescore nan is not a number"),
        ({"min_context": "auto"}, "min_context 'auto' is not a whole number"),
        ({"strict": "yes"}, "strict 'yes' is not true or false"),
        ({"head_modes": [5]}, "head_modes 5 is not a list"),
        ({"head_modes": [["sparse", 5]]}, "head_modes 5 is not a text"),
        ({"head_modes": [["sparse"] * 2]}, "of 1 layers x 2 kv heads, the model has 2 x 2: calibrate this model"),
        ({"head_modes": [["sparse"] * 2] * 3}, "of 3 layers x 2 kv heads, the model has 2 x 2"),
        ({"head_modes": [["sparse"] * 4] * 2}, "of 2 layers x 4 kv heads, the model has 2 x 2"),
        ({"budget": 10**400}, "is not a number"),
        ({"cache_dir": ""}, "--cache-dir '' has no characters: give a folder, or leave it out"),
        ({"cache_dir": 4}, "cache_dir 4 is not a path: give a text or a Path"),
        ({"model": 4.5}, "model 4.5 is not a path"),
        (
            {"config": {"method": "rq"}},
            r"config {'method': 'rq'} is not an EpsConfig: give one, or its settings by name",
        ),
        ({"device": torch.device("cpu")}, r"device device\(type='cpu'\) is not a text"),
        ({"dtype": torch.float32}, "dtype torch.float32 is not a text"),
        ({"kv_dtype": np.float32}, "kv_dtype <class 'numpy.float32'> is not a text"),
        ({"weights": ["8bit"]}, r"weights \['8bit'\] is not a text"),
        ({"model": "no/such/folder"}, "no/such/folder"),
        ({"device": "tpu"}, "device tpu is not there"),
        ({"backend": "jax"}, "backend 'jax' is unknown"),
        ({"speculative": "yes"}, "speculative 'yes' is not true or false"),
        (
            {"speculative": SpeculativeConfig(draft=4)},
            r"speculative SpeculativeConfig\(mode='off'.* give mode=\"tokens\"",
        ),
        ({"speculative": True, "method": "dense"}, "eps-verify tokens drafts with sparse steps, and method off"),
        ({"kv_bits": 3}, "kv-bits 3 is not one of 16, 8"),
        ({"kv_bits": "3"}, "kv-bits '3' is not one of 16, 8"),
        ({"kv_bits": True}, "kv-bits True is not one of 16, 8"),
        ({"kv_bits": (8, 4, 4)}, r"kv-bits \(8, 4, 4\) is not one of 16, .* nor two of them"),
    ],
    ids=str,
)
def test_wrong_settings_are_refused_in_one_line(model: Path, settings: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        LLM(**{"model": model, "backend": "numpy", **settings})
    assert "\n" not in str(refused.value)


def test_a_session_takes_settings_or_a_config_and_is_off_without_either(model: Path) -> None:
    config = EpsConfig.of(**BOX)
    assert Session.open(str(model), "numpy").config == EpsConfig()
    assert Session.open(model, "numpy", block_size=32).config == EpsConfig.of(block_size=32)
    assert Session.open(model, "numpy", **BOX).config == Session.open(model, "numpy", config=config).config == config
    assert Session.open(model, "numpy", method="rq", budget=np.float32(0.5)).config.selection_config.budget == 0.5
    with pytest.raises(ConfigError, match='budget means nothing while EPS is off: add method="rq"'):
        Session.open(model, "numpy", budget=0.1)


def test_a_gpu_scores_codes_at_once_unless_told_otherwise() -> None:
    config = EpsConfig("rq", budget=0.05)
    assert config.for_device("cpu") is config and config.for_device("mps") is config
    at_once = config.for_device("cuda")
    assert at_once == config.replace(cascade=(), rescore=1.0) and at_once.selection_config.reads_at_once
    for chosen in (config.replace(cascade=(0.5,)), config.replace(rescore=0.1), EpsConfig("box"), EpsConfig()):
        assert chosen.for_device("cuda") is chosen
