"""The texts that tasks and measurements draw from: shipped, so that figures from two machines speak of the same text.

Code is a tenth of the standard library of CPython 3.11.7, which no model of ours was trained on, and prose its language
reference; `text/LICENSE` says which files. The running Python's own will not do: they differ between builds of one
version. Chat is made of the prose: a user asks for topic after topic, and the assistant answers with the topic's text.
"""

import functools
import gzip
import hashlib
import re
import zlib
from collections.abc import Sequence
from pathlib import Path

from eps_core.errors import ConfigError
from eps_core.io import inputs

FILE = Path(__file__).parent / "text" / "held_out.txt.gz"
# part of what identifies a measurement: cells of two texts are not one grid
SHA256 = "9e00b47f5fe934fe257063b235ce83b74b14e86d769d9c0524e673d32a1af758"
PROSE_FILE = FILE.with_name("prose.txt.gz")
PROSE_SHA256 = "d31df63f4602c1c0b8b17e50647a96833cdfde5c7f5ae7eca748b83870a16b64"
KINDS = {"code": SHA256, "prose": PROSE_SHA256, "chat": PROSE_SHA256}
NOT_HELD_OUT = 10  # a file is held out where the CRC32 of its name is divisible by this
ANSWER_CHARACTERS = 1500  # of an assistant's turn, to the next paragraph


@functools.cache
def corpus() -> bytes:
    """The held-out code, 1.1 MB of ASCII. Raises ConfigError where the file is not the one that was shipped."""
    return _shipped(FILE, SHA256)


@functools.cache
def prose() -> bytes:
    """79 topics of Python's language reference, 0.5 MB of ASCII."""
    return _shipped(PROSE_FILE, PROSE_SHA256)


def _shipped(file: Path, sha256: str) -> bytes:
    try:
        text = gzip.decompress(file.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{file} cannot be read ({error}): install EPS again") from error
    if hashlib.sha256(text).hexdigest() != sha256:
        raise ConfigError(f"{file} is not the text that this version measures on: install EPS again")
    return text


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


def corpus_or_text(path: Path | None) -> str:
    """The text of a file that the user names, None: the corpus."""
    return corpus().decode("ascii") if path is None else inputs.read_text(path, "text file", "give a text file")


def held_out(name: str) -> bool:
    """Return whether a file of the standard library, by its path there, is text that no model may be trained on."""
    return zlib.crc32(name.encode()) % NOT_HELD_OUT == 0
