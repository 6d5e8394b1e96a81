"""Prompts of an asked number of tokens of a model's own tokenizer, from builders that take a number of bytes."""

from collections.abc import Callable
from math import floor
from typing import TypeVar

Encode = Callable[..., list[int]]  # text -> tokens; special=False: without those around every text
T = TypeVar("T")
_RATIO_BYTES = 20_000  # of text, to guess how many bytes a token has
_SCANNED = 16  # sizes on either side of the nearest one, in bytes


def bytes_per_token(text: bytes, encode: Encode) -> float:
    """Bytes of a token, by the start of `text`: a first guess of `fit`'s."""
    window = text[:_RATIO_BYTES].decode("utf-8", errors="ignore")
    return len(window.encode()) / max(1, len(encode(window, special=False)))


def fit(
    make: Callable[[int], T], count: Callable[[T], tuple[int, int]], size: int, slack: int | None = None
) -> T | None:
    """Return the result of `make(size in bytes)` whose prompt has as many tokens as asked, or at most `slack` fewer.

    `count`: (tokens of the prompt, tokens asked for). The size is corrected by the tokens that are missing; after some
    steps it aims at the middle of the slack. None where no prompt stays within what was asked; with a slack a shorter
    one will do. Without one the sizes around the nearest are tried, for tokens differ from letter to letter."""
    nearest: tuple[int, int] | None = None  # tokens away, size
    best: tuple[int, T] | None = None  # tokens to spare, made
    for step in range(12):
        made = make(size)
        tokens, asked = count(made)
        spare = asked - tokens
        if 0 <= spare <= (slack or 0):
            return made
        if spare >= 0 and (best is None or spare < best[0]):
            best = spare, made
        if nearest is None or abs(spare) < nearest[0]:
            nearest = abs(spare), size
        size += floor((spare - (slack or 0) // 2 * (step > 3)) * size / max(1, tokens))
    if slack is not None or nearest is None:
        return None if best is None else best[1]
    for away in range(1, _SCANNED + 1):
        for near in (nearest[1] + away, nearest[1] - away):
            tokens, asked = count(made := make(near))
            if tokens == asked:
                return made
    return None
