"""The decode loop that every backend shares: prefill in chunks, then steps over a batch of ragged prompts.

Holds integers and host logits only; arrays stay in the backend. One `StepRecord` a decode step.
"""

import time
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eps_core.attention.protocol import Backend
from eps_core.attention.stats import StepOutput
from eps_core.config.eps import EpsConfig
from eps_core.config.selection import SelectionConfig
from eps_core.decode.forward import Decoder
from eps_core.decode.prompts import PREFILL_CHUNK
from eps_core.decode.sampling import Sampling, check_logits, draw
from eps_core.errors import ConfigError
from eps_core.kv_cache.pool import PagePool
from eps_core.kv_cache.pool import Sequence as PagedSequence
from eps_core.metrics.rounds import RoundRecord
from eps_core.metrics.steps import AUDIT_FACTOR, StepRecord, audit_step, step_record


def generate(
    decoder: Decoder,
    cache: Any,
    pool: Any,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling,
    selection_config: SelectionConfig | None = None,
    stop_tokens: Collection[int] = (),
    prefill_chunk: int = PREFILL_CHUNK,
    forced_tokens: Sequence[Sequence[int]] | None = None,
    keep_logits: bool = False,
    time_every: int = 0,
    audit_every: int = 0,
    audit_factor: float = AUDIT_FACTOR,
    audit_off: bool = False,
    written: Sequence[Any] | None = None,
    ends: Callable[[int, int], bool] = lambda prompt, token: False,
) -> Generator[StepRecord, None, Any]:
    """Decodes every prompt for at most `max_new_tokens` tokens, all in one batch; a sequence leaves it at a stop token,
    or where `ends(prompt's number, token)`, which is called once with each new token, returns True.

    All but the last token of each prompt are prefilled densely, `prefill_chunk` at a time, sharing full pages with what
    the pool already holds; the last one starts the decode, so every new token comes from one sparse step, as
    `selection_config` says (None: dense). `forced_tokens` (one list a prompt) are fed instead of what the model says,
    and end their sequence with them. Every `time_every`-th step is timed layer by layer (0: none). Every
    `audit_every`-th sparse step from the first on also attends densely (0: none) and raises an alarm where an error
    bound was wrong, or an estimate by more than `audit_factor`; with `audit_off` the steps after an alarm are dense,
    which `fallbacks` counts.

    Sequences are freed when the generator ends, and its value is the cache to go on with: a prompt that is decoded
    again in it, with the same pool, finds its full pages. With `written`, sequences of the pool that hold all but the
    last token of each prompt, nothing is prefilled; they grow, and stay the caller's. `pool` is a `PagePool`, or the
    `HeadPools` of a decoder that evicts.
    """
    check_prompts(prompts)
    sequences = dict(enumerate(written or ()))
    own = written is None
    try:
        for index, prompt in enumerate(prompts if own else ()):
            sequences[index], cache = prefill(decoder, cache, pool, prompt[:-1], prefill_chunk)
        fed = {index: int(prompt[-1]) for index, prompt in enumerate(prompts)}
        sparse = selection_config is not None and cache.cache_config.enabled
        alarmed = False
        for step in range(max_new_tokens):
            alive = sorted(sequences)
            if forced_tokens is not None:
                alive = [index for index in alive if step < len(forced_tokens[index])]
            if not alive:
                break
            running = [sequences[index] for index in alive]
            timed = bool(time_every) and step % time_every == 0
            audited = sparse and not alarmed and audit_every > 0 and step % audit_every == 0
            audited = audited and pool.lengths(running).min() > 0
            read = None if alarmed else selection_config
            cache, output, spent = take_step(
                decoder, cache, pool, running, [fed[i] for i in alive], read, timed, audited
            )
            margins = []
            for row, index in enumerate(alive):
                position = int(spent.lengths[row])
                if forced_tokens is not None:
                    check_logits(output.logits[row], position)
                    fed[index] = int(forced_tokens[index][step])
                else:
                    drawn = draw(output.logits[row], sampling, index, position)
                    fed[index] = drawn.token
                    margins.append(drawn.margin)
            if sparse and alarmed:
                output.fallbacks["audit_alarm"] = cache.spec.num_layers * len(alive)
            audit = audit_step(output, audit_factor) if audited else None
            if audit is not None and audit.alarms and audit_off:
                alarmed = True
            record = step_record(
                step, alive, [fed[index] for index in alive], spent.lengths.tolist(), output, decoder.spec_of(cache),
                EpsConfig.over(cache.cache_config, selection_config), spent.decode_ms, spent.bytes_k_reread, timed,
                audit,
            )  # fmt: skip
            record.margins = margins
            if keep_logits:
                record.logits = output.logits
            ended = [
                index
                for index in alive
                if ends(index, fed[index]) or (fed[index] in stop_tokens and forced_tokens is None)
            ]
            yield record
            for index in ended:
                left = sequences.pop(index)
                if own:
                    pool.free(left)
        return cache
    finally:
        for sequence in sequences.values() if own else ():
            pool.free(sequence)


@dataclass(frozen=True)
class Spent:
    """The time that a decode step took, and the tokens before it."""

    lengths: np.ndarray  # [B] int64, the step's tokens counted
    decode_ms: float
    bytes_k_reread: int


def take_step(
    decoder: Decoder,
    cache: Any,
    pool: Any,
    sequences: Sequence[Any],
    tokens: Sequence[int],
    selection_config: SelectionConfig | None = None,
    timed: bool = False,
    audited: bool = False,
) -> tuple[Any, StepOutput, Spent]:
    """(cache, output, what it took) of one decode step that appends a token to each sequence; see `Decoder.step`."""
    slots = []
    for sequence, token in zip(sequences, tokens, strict=True):
        own, cache = append(decoder.backend, cache, pool, sequence, [token])
        slots.append(own)
    lengths, decoder.timing = pool.lengths(sequences), timed
    reread_bytes = cache.bytes_k_reread
    started = time.perf_counter()
    cache, output = decoder.step(
        cache, np.array(tokens), np.concatenate(slots), pool.table(sequences), lengths, selection_config, audited
    )
    decode_ms = 1000 * (time.perf_counter() - started)
    return cache, output, Spent(lengths, decode_ms, cache.bytes_k_reread - reread_bytes)


def check_prompts(prompts: Sequence[Sequence[int]]) -> None:
    """Raises ConfigError for a prompt without a token."""
    if any(not len(prompt) for prompt in prompts):
        raise ConfigError("an empty prompt has nothing to continue: give at least one token")


def tokens_of(records: Sequence[StepRecord] | Sequence[RoundRecord], num_prompts: int) -> list[list[int]]:
    """Return the tokens that continue each prompt, the stop token that ended it included."""
    said: list[list[int]] = [[] for _ in range(num_prompts)]
    for record in records:
        for index, token in zip(record.sequences, record.tokens, strict=True):
            said[index].append(token)
    return said


def prefill(
    decoder: Decoder,
    cache: Any,
    pool: PagePool,
    tokens: Sequence[int],
    chunk_tokens: int = PREFILL_CHUNK,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[PagedSequence, Any]:
    """(sequence, cache) with K and V of `tokens` in the cache, by dense attention; pages that the pool holds are not
    computed again. `report(tokens done, tokens in all)` is called after each chunk."""
    sequence, num_shared = pool.open(tokens)
    try:
        cache = extend(
            decoder, cache, pool, sequence, tokens[num_shared:], chunk_tokens,
            lambda done, _: report(num_shared + done, len(tokens)),
        )  # fmt: skip
    except BaseException:
        pool.free(sequence)
        raise
    return sequence, cache


def extend(
    decoder: Decoder,
    cache: Any,
    pool: PagePool,
    sequence: PagedSequence,
    tokens: Sequence[int],
    chunk_tokens: int = PREFILL_CHUNK,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> Any:
    """The cache after `tokens` at the end of a sequence, each of which attends to all that is there. `report` as
    `prefill` has it."""
    for start in range(0, len(tokens), chunk_tokens):
        chunk = tokens[start : start + chunk_tokens]
        slots, cache = append(decoder.backend, cache, pool, sequence, chunk)
        cache, _ = decoder.prefill(cache, np.array(chunk), slots, pool.table([sequence])[0], sequence.length)
        report(start + len(chunk), len(tokens))
    return cache


def append(backend: Backend, cache: Any, pool: Any, sequence: Any, tokens: Sequence[int]) -> tuple[np.ndarray, Any]:
    """Slots [N] for `tokens` at the end of a sequence; a page shared with a fork is copied before it is written."""
    slots, copies = pool.append(sequence, tokens)
    return slots, backend.copy_units(cache, *zip(*copies, strict=True)) if copies else cache
