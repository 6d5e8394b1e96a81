"""Prompts of an asked number of tokens of a model's own tokenizer, from builders that take a number of bytes."""

from collections.abc import Callable
from math import floor
from typing import TypeVar

Encode = Callable[..., list[int]]  # text -> tokens; special=False: without those around every text
T = TypeVar("T")
_RATIO_BYTES = 20_000  # of text, to guess how many bytes a token has


def bytes_per_token(text: bytes, encode: Encode) -> float:
    """Bytes of a token, by the start of `text`: a first guess of `fit`'s."""
    window = text[:_RATIO_BYTES].decode("utf-8", errors="ignore")
    return len(window.encode()) / max(1, len(encode(window, special=False)))


def fit(make: Callable[[int], T], count: Callable[[T], tuple[int, int]], size: int, slack: int) -> T | None:
    """Return the result of `make(size in bytes)` whose prompt has as many tokens as asked, or at most `slack` fewer;
    where there is none the one that comes nearest from below, None where every prompt is longer than asked.

    `count`: (tokens of the prompt, tokens asked for). The size is corrected by the tokens that are missing; after some
    steps it aims at the middle of the slack."""
    best: tuple[int, T] | None = None  # tokens to spare, made
    for step in range(12):
        tokens, asked = count(made := make(size))
        spare = asked - tokens
        if 0 <= spare <= slack:
            return made
        if spare >= 0 and (best is None or spare < best[0]):
            best = spare, made
        size += floor((spare - slack // 2 * (step > 3)) * size / max(1, tokens))
    return None if best is None else best[1]
