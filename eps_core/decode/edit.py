"""Editing a cached sequence: spans are cut, moved, spliced in and set right, without recomputing what stays.

A key is cached turned to its position, and the rotations of two positions add up: what moves by d tokens is turned by d
more (`Arithmetic.reposition`), which is exact up to rounding. V is as it was. But below the first layer K and V speak
of all that stood before a token, and stay those of the text that was read: how far the next token's distribution is
then from a recomputed text's is measured (`scripts/edit_error.py`), not bounded. Source of compose, edit and erratum:
KV cache as an editable notebook (arXiv 2606.17107), as its abstract tells them; the arrangement in pages is ours.

What is edited is never shared with other sequences by its tokens (`PagePool.replace`), and its groups are summarised
anew. Every call changes the sequence, returns the cache to go on with, and is refused in one line, without any change,
where the pool has no room. In caches of 16 bits or of codes what is turned is rounded once more.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eps_core.decode.forward import Decoder
from eps_core.errors import require
from eps_core.gate.protocol import Array
from eps_core.paging.pool import PagePool
from eps_core.paging.pool import Sequence as PagedSequence


@dataclass(frozen=True, eq=False)
class Segment:
    """Tokens with the K and V that some text gave them, to be spliced into another."""

    tokens: list[int]
    keys_values: list[tuple[Array, Array]]  # of each layer [T, Hkv, D] in the cache's dtype
    start: int = 0  # the position that the first key is turned to


def segment(decoder: Decoder, cache: Any, pool: PagePool, sequence: PagedSequence, a: int, b: int) -> Segment:
    """The tokens [a, b) of a sequence, copied."""
    _check(sequence, a, b)
    (table,), rows = pool.table([sequence]), np.arange(a, b)
    pairs = []
    for layer in range(decoder.spec.num_layers):
        k, v = decoder.eps.read_kv(cache, layer, table, sequence.length)
        pairs.append((decoder.eps.take(cache, k, rows), decoder.eps.take(cache, v, rows)))
    return Segment(sequence.tokens[a:b], pairs, a)


def cut(decoder: Decoder, cache: Any, pool: PagePool, sequence: PagedSequence, a: int, b: int) -> Any:
    """Takes the tokens [a, b) out; those behind move up."""
    _check(sequence, a, b)
    return _arrange(decoder, cache, pool, sequence, a, [(b, sequence.length)]) if b > a else cache


def splice(
    decoder: Decoder, cache: Any, pool: PagePool, sequence: PagedSequence, new: Segment, at: int, over: int = 0
) -> Any:
    """Sets a segment before the token `at`, or in place of the `over` tokens from there on; those behind make room."""
    _check(sequence, at, at + over)
    if not new.tokens and not over:
        return cache
    return _arrange(decoder, cache, pool, sequence, at, [new, (at + over, sequence.length)])


def move(decoder: Decoder, cache: Any, pool: PagePool, sequence: PagedSequence, a: int, b: int, to: int) -> Any:
    """Sets the tokens [a, b) before the token that is now at `to`, outside of them, or at the end; what lies between
    moves the other way."""
    _check(sequence, a, b)
    _check(sequence, to, to)
    require(not a < to < b, f"tokens {a} to {b} cannot move to {to}, which is among them: choose a place outside")
    if a == b or a <= to <= b:
        return cache
    pieces = [(a, b), (to, a), (b, sequence.length)] if to < a else [(b, to), (a, b), (to, sequence.length)]
    return _arrange(decoder, cache, pool, sequence, min(a, to), pieces)


def _arrange(
    decoder: Decoder, cache: Any, pool: PagePool, sequence: PagedSequence, first: int,
    pieces: Sequence[Segment | tuple[int, int]],
) -> Any:  # fmt: skip
    """What stands from the token `first` on becomes these segments and spans [a, b) of the sequence."""
    eps, spec, model = decoder.eps, decoder.spec, decoder.model
    parts = [
        one if isinstance(one, Segment) else segment(decoder, cache, pool, sequence, *one) for one in pieces
    ]  # all of them are read before the first is written
    tokens = [token for part in parts for token in part.tokens]
    length = first + len(tokens)
    require(
        length <= spec.max_context,
        f"an edited sequence of {length} tokens exceeds the model's context of {spec.max_context}: splice in less",
    )
    slots, copies = pool.replace(sequence, first, tokens)
    if copies:
        cache = eps.copy_units(cache, *zip(*copies, strict=True))
    with model.scope():
        for layer in range(spec.num_layers):
            done = 0
            for part in parts:
                count = len(part.tokens)
                if not count:
                    continue
                k, v = part.keys_values[layer]
                shift = first + done - part.start
                turned = model.reposition(k, np.full(count, shift)) if shift else k
                cache = eps.write_kv(cache, layer, turned, v, slots[done : done + count])
                done += count
        eps.check_finite(cache)
    return cache


def _check(sequence: PagedSequence, a: int, b: int) -> None:
    require(0 <= a <= b <= sequence.length, f"tokens {a} to {b} are no span of a sequence of {sequence.length} tokens")
