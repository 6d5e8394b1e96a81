"""Edits of a prefilled text: spans are cut, moved and spliced in, without computing the rest again.

A key is cached rotated to its position, and the rotations of two positions add up. What moves by d tokens is rotated by
d more, which is exact up to rounding. V stays as it is. Below the first layer, K and V depend on all tokens before
them, and stay those of the text that was read. How far the next token's distribution is then from a recomputed text's
is measured, not bounded. Source of compose, edit and erratum: KV cache as an editable notebook (arXiv 2606.17107), as
its abstract describes them.

Edits are made on the host and written into a cache of their own, whose pages are shared with no other text.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from eps_core.decode.prefix import Prefix
from eps_core.decode.session import Session
from eps_core.errors import require
from eps_core.models.rope import inverse_frequencies
from eps_core.reference.model import rotate


@dataclass(frozen=True, eq=False)
class Span:
    """Consecutive tokens with the K and V that some text gave them."""

    tokens: list[int]
    keys_values: list[tuple[np.ndarray, np.ndarray]]  # of each layer [T, Hkv, D] float32
    frequencies: np.ndarray  # [D/2] radians a position
    start: int = 0  # position that the first key is rotated to

    def __len__(self) -> int:
        return len(self.tokens)

    def part(self, a: int, b: int) -> "Span":
        """Return the tokens [a, b)."""
        pairs = [(k[a:b], v[a:b]) for k, v in self.keys_values]
        return replace(self, tokens=self.tokens[a:b], keys_values=pairs, start=self.start + a)

    def at(self, start: int) -> "Span":
        """Return the same tokens with K rotated so that they begin at position `start`."""
        turn = (start - self.start) * self.frequencies
        pairs = [(rotate(k.astype(np.float64), turn[None]).astype(np.float32), v) for k, v in self.keys_values]
        return replace(self, keys_values=pairs, start=start) if start != self.start else self


def prefilled(session: Session, tokens: Sequence[int]) -> Span:
    """Return a text's tokens, one or more, after their dense prefill."""
    pairs = [tuple(session.backend.to_numpy(one) for one in pair) for pair in session.prefix(tokens).keys_values]
    host = [(k.astype(np.float32), v.astype(np.float32)) for k, v in pairs]
    return Span(list(tokens), host, inverse_frequencies(session.spec))


def joined(parts: Sequence[Span]) -> Span:
    """Return spans one after the other, with K rotated to the new positions from 0 on."""
    placed: list[Span] = []
    for part in parts:
        placed.append(part.at(sum(map(len, placed))))
    layers = [
        (np.concatenate([k for k, _ in pairs]), np.concatenate([v for _, v in pairs]))
        for pairs in zip(*(part.keys_values for part in placed), strict=True)
    ]
    return replace(placed[0], tokens=[token for part in placed for token in part.tokens], keys_values=layers, start=0)


def cut(text: Span, a: int, b: int) -> Span:
    """Return `text` without its tokens [a, b)."""
    _check(text, a, b)
    return joined([text.part(0, a), text.part(b, len(text))])


def splice(text: Span, new: Span, at: int, over: int = 0) -> Span:
    """Return `text` with `new` before its token `at`, in place of the `over` tokens from there on."""
    _check(text, at, at + over)
    return joined([text.part(0, at), new, text.part(at + over, len(text))])


def move(text: Span, a: int, b: int, to: int) -> Span:
    """Return `text` with its tokens [a, b) before the token that is at `to`, which lies outside of them."""
    _check(text, a, b)
    _check(text, to, to)
    require(not a < to < b, f"tokens {a} to {b} cannot move to {to}, which is among them: choose a place outside")
    first, last = (to, a) if to <= a else (b, to)
    between = text.part(first, last)
    moved = [text.part(a, b), between] if to <= a else [between, text.part(a, b)]
    return joined([text.part(0, min(a, to)), *moved, text.part(max(b, to), len(text))])


def written(session: Session, text: Span, cache: Any, pool: Any) -> tuple[Any, Any]:
    """Return (sequence, cache) with the text written. The pool serves this text alone."""
    arrays = [
        tuple(session.backend.from_numpy(np.ascontiguousarray(one), "float32", session.device) for one in pair)
        for pair in text.keys_values
    ]
    return Prefix(text.tokens, [(k, v) for k, v in arrays]).into(session.backend, cache, pool)


def _check(text: Span, a: int, b: int) -> None:
    require(0 <= a <= b <= len(text), f"tokens {a} to {b} are no span of a text of {len(text)} tokens")
