"""Texts of three kinds that documents are made of, and needle documents of exactly so many tokens.

Code is the shipped corpus, prose Python's language reference (`eps_core/tasks/text/LICENSE` has its licence). Chat is
made of the prose: a user asks for topic after topic, and the assistant answers with the topic's text.
"""

import functools
import os
import re
from collections.abc import Callable, Sequence
from math import floor
from pathlib import Path
from typing import TypeVar

from eps_core.errors import ConfigError
from eps_core.models.fields import read_if_there
from eps_core.tasks.corpus import SHA256, corpus, shipped
from eps_core.tasks.needle import needle_document
from eps_core.tasks.questions import Ask
from eps_core.tasks.sizing import Encode, bytes_per_token

PROSE_FILE = Path(__file__).parent / "prose.txt.gz"
PROSE_SHA256 = "d31df63f4602c1c0b8b17e50647a96833cdfde5c7f5ae7eca748b83870a16b64"
KINDS = {"code": SHA256, "prose": PROSE_SHA256, "chat": PROSE_SHA256}
ANSWER_CHARACTERS = 1500  # of an assistant's turn, to the next paragraph
_WINDOWS = 12  # of text, tried for a needle document of exactly so many tokens: few letters add two at once
_SCANNED = 16  # sizes on either side of the nearest one, in bytes
T = TypeVar("T")


@functools.cache
def prose() -> bytes:
    """79 topics of Python's language reference, 0.5 MB of ASCII."""
    return shipped(PROSE_FILE, PROSE_SHA256)


def haystack(kind: str) -> bytes:
    """The text of a kind that needles are hidden in, ASCII; a conversation without a template's marks."""
    if kind != "chat":
        return corpus() if kind == "code" else prose()
    return plain_chat(conversation(range(num_topics()))).encode()


def num_topics() -> int:
    return len(_topics())


def conversation(topics: Sequence[int]) -> list[dict[str, str]]:
    """The messages, by turns of user and assistant, that go through some of the prose's topics."""
    messages = []
    for topic in topics:
        name, said = _topics()[topic]
        for place, part in enumerate(said):
            asked = "Go on." if place else f"Explain {name} in Python."
            messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": part}]
    return messages


def plain_chat(messages: list[dict[str, str]]) -> str:
    """A conversation as text for a model without a chat template."""
    return "".join(f"{one['role'].capitalize()}: {one['content']}\n\n" for one in messages)


def has_template(path: Path) -> bool:
    """Return whether the model in `path` brings a chat template."""
    return any(os.path.lexists(path / name) for name in ("chat_template.jinja", "chat_template.json")) or (
        read_if_there(path / "tokenizer_config.json").get("chat_template") is not None
    )


@functools.cache
def _topics() -> list[tuple[str, list[str]]]:
    """(name, its text in parts of about ANSWER_CHARACTERS) of every topic."""
    found = []
    for topic in re.split(r"\n\n\n(?=[^\n]+\n\n)", prose().decode("ascii").rstrip("\n")):
        name, said = topic.split("\n\n", 1)
        parts = [""]
        for paragraph in said.split("\n\n"):
            if len(parts[-1]) > ANSWER_CHARACTERS:
                parts.append("")
            parts[-1] += ("\n\n" if parts[-1] else "") + paragraph
        found.append((name, parts))
    return found


def needle_tokens(
    text: bytes, num_tokens: int, encode: Encode, seed: int, depth: float, num_distractors: int, ask: Ask | None = None
) -> tuple[list[int], str]:
    """(tokens of a needle document, exactly `num_tokens` of them; its answer). `ask`: as in
    `tasks.questions.fit_question`."""
    size = int((num_tokens - len(encode(""))) * bytes_per_token(text, encode))
    reach = 0  # then, where a first guess is not what was asked, so that all sizes are of one window

    def made(num_bytes: int) -> tuple[list[int], str]:
        one = needle_document(text, num_bytes, seed, depth, num_distractors, reach)
        return encode(one.prompt) if ask is None else ask(one.prompt, one.lead), one.answer

    found: tuple[list[int], str] | None = made(size)
    if found is not None and len(found[0]) != num_tokens:
        for window in range(_WINDOWS):
            reach = min(size + size // 2 + window * 997, len(text) - 400 - window)
            found = exact(made, lambda one: (len(one[0]), num_tokens), size)
            if found is not None:
                break
    if found is None:
        raise ConfigError(f"no needle document of exactly {num_tokens} tokens was found: ask for another context")
    return found


def exact(make: Callable[[int], T], count: Callable[[T], tuple[int, int]], size: int) -> T | None:
    """Return the result of `make(size in bytes)` whose prompt has as many tokens as asked, None where none was found.

    `count`: as of `tasks.sizing.fit`. The size is corrected by the tokens that are missing; then those around the
    nearest are tried, for tokens differ from letter to letter."""
    nearest: tuple[int, int] | None = None  # tokens away, size
    for _ in range(12):
        tokens, asked = count(made := make(size))
        if tokens == asked:
            return made
        if nearest is None or abs(asked - tokens) < nearest[0]:
            nearest = abs(asked - tokens), size
        size += floor((asked - tokens) * size / max(1, tokens))
    assert nearest is not None
    for away in range(1, _SCANNED + 1):
        for near in (nearest[1] + away, nearest[1] - away):
            tokens, asked = count(made := make(near))
            if tokens == asked:
                return made
    return None
