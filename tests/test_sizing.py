"""Documents have the tokens that were asked for, by the model's own tokenizer: bytes, BPE, SentencePiece."""

import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers
from shared import answer_steps, answers, cut
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from eps_core.errors import ConfigError
from eps_core.evaluation.runner import Outcome
from eps_core.models.chat import in_chat
from eps_core.models.tokenizer import encode, load_tokenizer
from eps_core.tasks.corpus import corpus
from eps_core.tasks.needle import VALUE_DIGITS
from eps_core.tasks.questions import generated_questions, text_window
from eps_core.tasks.ruler import TASKS
from eps_core.tasks.sizing import bytes_per_token, fit
from experiments.grid.grid_cell import Bench, Plan
from experiments.methods.curves import Documents, needle, says, text_document
from experiments.methods.texts import (
    KINDS,
    conversation,
    exact,
    has_template,
    haystack,
    needle_tokens,
    num_topics,
    prose,
)
from tests.tiny_models import save_tokenizer

NAMES = ("bytes", "bpe", "sentencepiece")
CONTEXT = 1024
TEMPLATE = "{% for one in messages %}<{{ one.role }}>{{ one.content }}</>\n{% endfor %}<assistant>"


@cache
def tokenizer(name: str) -> tokenizers.Tokenizer:
    """A small tokenizer, trained here: BPE over bytes with words of several, or SentencePiece's with digits alone, a
    space before every text, spaces as letters and a token that begins every text."""
    text = [corpus()[:150_000].decode(), prose()[:150_000].decode()]
    if name == "bpe":
        made = tokenizers.Tokenizer(models.BPE())
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        made.train_from_iterator(
            text, trainers.BpeTrainer(vocab_size=2000, initial_alphabet=alphabet, show_progress=False)
        )
        return made
    made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.Split("\n", "isolated")]
    )
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    made.train_from_iterator(
        (line for one in text for line in one.splitlines(keepends=True)),
        trainers.BpeTrainer(vocab_size=2000, special_tokens=["<unk>", "<s>"], max_token_length=12, show_progress=False),
    )
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return made


@pytest.fixture(params=NAMES)
def session(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """What documents need of a `Session`, without a model."""
    if request.param == "bytes":
        save_tokenizer(tmp_path / "tokenizer.json")
    else:
        tokenizer(request.param).save(str(tmp_path / "tokenizer.json"))
    own = load_tokenizer(tmp_path)

    def tokens(text: str, special: bool = True, most_tokens: int | None = None) -> list[int]:
        return encode(own, tmp_path, text, special, most_tokens)

    return SimpleNamespace(path=tmp_path, encode=tokens, decode=own.decode, name=request.param)


def templated(session: Any) -> Any:
    (session.path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return session


def test_the_tokenizers_are_what_they_stand_for(session: Any) -> None:
    ratio = bytes_per_token(corpus(), session.encode)
    assert ratio == 1 if session.name == "bytes" else ratio > 2
    assert session.decode(session.encode("a needle: 12345\nx")).strip() == "a needle: 12345\nx"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chat", [False, True], ids=["plain", "templated"])
def test_needles_and_texts_have_the_tokens_of_their_context(session: Any, kind: str, chat: bool) -> None:
    if chat:
        templated(session)
    plan = Documents(CONTEXT, num_needles=3, text=kind, chat=chat)
    for index in range(3):
        document, answer = needle(session, plan, index)
        said = session.decode(document.prompt)
        assert len(document.prompt) == CONTEXT
        assert f" is {answer}." in said and said.rstrip(" ").endswith(" is") and len(answer) == 5
        assert ("<assistant>The code for" in said) == chat
        assert document.num_steps > answer_steps(session.encode, answer, VALUE_DIGITS) >= 5
    text = text_document(session, CONTEXT, 16, 0, 1, kind)
    assert text.forced is not None
    assert len(text.prompt) - 1 == CONTEXT and len(text.forced) == 15 and text.num_steps == 16
    said = session.decode([*text.prompt, *text.forced])
    if kind == "chat":
        assert said.lstrip().startswith("<user>Explain" if chat else "User: Explain")
    elif session.name == "bytes":
        assert said in haystack(kind).decode()
    assert text.prompt != text_document(session, CONTEXT, 16, 0, 2, kind).prompt


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("chat", [False, True], ids=["plain", "chat"])
def test_questions_fill_their_context_in_tokens(session: Any, task: str, chat: bool) -> None:
    ask = in_chat(templated(session).path, session.encode) if chat else None
    for one in generated_questions(task, 2048, 2, 0, corpus(), session.encode, ask):
        total = len(one.tokens) + one.max_new_tokens
        assert 0.9 * 2048 <= total <= 2048
        assert len(session.encode(one.sample.answers[0], special=False)) < one.max_new_tokens
        said = session.decode(one.tokens)
        assert one.sample.lead and said.rstrip(" ").endswith(one.sample.lead.rstrip(" "))
        assert said.count("<assistant>") == chat
        if chat:
            assert said.split("<assistant>")[1].strip() == one.sample.lead.strip()


def test_a_grid_measures_documents_of_its_context(session: Any) -> None:
    bench = Bench(session, Plan(needles=3, text_steps=8))
    for index in range(3):
        document, answer = bench._document("needle", CONTEXT, index)
        assert len(document.prompt) + document.num_steps == CONTEXT
        assert document.num_steps == answer_steps(session.encode, answer, VALUE_DIGITS)
    text, _ = bench._document("text", CONTEXT, 0)
    assert text.forced is not None and len(text.prompt) + len(text.forced) == CONTEXT


def test_answers_are_compared_as_text(session: Any) -> None:
    for said, right in (("12345", True), (" 12345.", True), ("123456", False), ("1234", False), ("is 12345", False)):
        outcome = Outcome(said=[session.encode(said, special=False)])
        assert says(session, outcome, "12345") == right == answers(said, "12345")


def test_the_longest_start_of_so_many_tokens(session: Any) -> None:
    text = corpus()[:5000].decode()
    for num_tokens in (1, 50, 400):
        part = cut(text, session.encode, num_tokens)
        assert text.startswith(part) and num_tokens - 1 <= len(session.encode(part, special=False)) <= num_tokens
    assert cut("x = 1", session.encode, 100) == "x = 1"


def test_windows_of_a_text_are_tokens_of_the_whole(session: Any) -> None:
    for num_bytes in (None, 5000):
        window = text_window(prose(), session.encode, 700, np.random.default_rng(3), num_bytes)
        assert len(window) == 700
        assert " ".join(session.decode(window).split()[:-1]) in " ".join(prose().decode().split())


def test_what_cannot_be_exact_is_refused_in_one_line() -> None:
    def pairs(text: str, special: bool = True) -> list[int]:
        return [0, 0] * (len(text) // 2)

    with pytest.raises(ConfigError, match="of exactly 901 tokens"):
        needle_tokens(corpus(), 901, pairs, 0, 0.5, 0)
    assert exact(lambda size: size, lambda made: (made, 5), 100) == 5
    assert fit(lambda size: size, lambda made: (2 * made, 5), 100, slack=2) == 2


def test_a_conversation_asks_for_every_topic_once() -> None:
    messages = conversation(range(num_topics()))
    assert [one["role"] for one in messages] == ["user", "assistant"] * (len(messages) // 2)
    assert sum(one["content"].startswith("Explain ") for one in messages[::2]) == num_topics() == 79
    said = "".join("".join(one["content"].split()) for one in messages[1::2])
    assert len(said) > 0.98 * sum(map(len, prose().decode().split()))


@pytest.mark.parametrize("files", [{}, {"tokenizer_config.json": "{}"}], ids=["nothing", "no template"])
def test_a_model_may_have_no_template(files: dict[str, str], tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    assert not has_template(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    assert has_template(tmp_path)
