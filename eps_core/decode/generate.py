"""The decode loop that every backend shares: prefill in chunks, then steps over a batch of ragged prompts.

Holds integers and host logits only; arrays stay in the backend. One `StepRecord` a decode step.
"""

import time
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from eps_core.config.eps import EpsConfig
from eps_core.config.read import Read
from eps_core.decode.forward import Decoder
from eps_core.decode.sampling import Sampling, draw
from eps_core.errors import ConfigError
from eps_core.gate.protocol import Backend
from eps_core.gate.stats import StepOutput
from eps_core.paging.pool import PagePool
from eps_core.paging.pool import Sequence as PagedSequence
from eps_core.telemetry.rounds import RoundRecord
from eps_core.telemetry.steps import AUDIT_FACTOR, StepRecord, audit_step, step_record


def generate(
    decoder: Decoder,
    cache: Any,
    pool: Any,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling,
    read: Read | None = None,
    stop_tokens: Collection[int] = (),
    prefill_chunk: int = 512,
    on_prefill: Callable[[int, int, int], None] | None = None,
    forced_tokens: Sequence[Sequence[int]] | None = None,
    keep_logits: bool = False,
    time_every: int = 0,
    audit_every: int = 0,
    audit_factor: float = AUDIT_FACTOR,
    audit_off: bool = False,
    audit_first: int = 0,
    written: Sequence[Any] | None = None,
    on_output: Callable[[StepOutput], None] | None = None,
) -> Generator[StepRecord, None, Any]:
    """Decodes every prompt for at most `max_new_tokens` tokens, all in one batch; a sequence leaves it at a stop token.

    All but the last token of each prompt are prefilled densely, `prefill_chunk` at a time, sharing full pages with what
    the pool already holds; the last one starts the decode, so every new token comes from one gated step, as `read` says
    (None: dense).
    `forced_tokens` (one list a prompt) are fed instead of what the model says, and end their sequence with them.
    `on_prefill(prompt, tokens done, tokens in all)` is called after each chunk. Every `time_every`-th step is timed
    layer by layer (0: none). Every `audit_every`-th gated step from `audit_first` on attends densely besides (0: none)
    and raises an alarm where a certificate was wrong, or an estimate by more than `audit_factor`; with `audit_off` the
    steps after an alarm are dense, which `fallbacks` counts. `on_output` is called with what each step gave.

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
            sequences[index], cache = prefill(
                decoder, cache, pool, prompt[:-1], prefill_chunk, report_of(on_prefill, index)
            )
        fed = {index: int(prompt[-1]) for index, prompt in enumerate(prompts)}
        gated = read is not None and cache.store.enabled
        alarmed = False
        for step in range(max_new_tokens):
            alive = sorted(sequences)
            if forced_tokens is not None:
                alive = [index for index in alive if step < len(forced_tokens[index])]
            if not alive:
                break
            slots = []
            for index in alive:
                new_slots, cache = append(decoder.eps, cache, pool, sequences[index], [fed[index]])
                slots.append(new_slots)
            running = [sequences[index] for index in alive]
            lengths = pool.lengths(running)
            timed = bool(time_every) and step % time_every == 0
            decoder.timing = timed
            kv_bytes, reread_bytes = cache.kv_bytes_read, cache.bytes_k_reread
            audited = gated and not alarmed and is_audit(step, audit_every, audit_first) and lengths.min() > 1
            started = time.perf_counter()
            cache, output = decoder.step(
                cache, np.array([fed[i] for i in alive]), np.concatenate(slots), pool.table(running), lengths,
                None if alarmed else read, audited,
            )  # fmt: skip
            decode_ms = 1000 * (time.perf_counter() - started)
            if on_output is not None:
                on_output(output)
            margins = []
            for row, index in enumerate(alive):
                if forced_tokens is not None:
                    fed[index] = int(forced_tokens[index][step])
                else:
                    drawn = draw(output.logits[row], sampling, index, int(lengths[row]))
                    fed[index] = drawn.token
                    margins.append(drawn.margin)
            if gated and alarmed:
                output.fallbacks["audit_alarm"] = cache.spec.num_layers * len(alive)
            audit = audit_step(output, audit_factor) if audited else None
            if audit is not None and audit.alarms and audit_off:
                alarmed = True
            record = step_record(
                step,
                alive,
                [fed[index] for index in alive],
                [int(length) for length in lengths],
                output,
                # an evicting cache has its kv heads one by one
                cache.spec if output.eviction is None else replace(cache.spec, num_kv_heads=decoder.spec.num_kv_heads),
                EpsConfig(cache.store, read or Read()),
                decode_ms,
                cache.kv_bytes_read - kv_bytes,
                cache.bytes_k_reread - reread_bytes,
                timed,
                audit,
            )
            record.margins = margins
            if keep_logits:
                record.logits = output.logits
            yield record
            for index in alive:
                if fed[index] in stop_tokens and forced_tokens is None:
                    left = sequences.pop(index)
                    if own:
                        pool.free(left)
        return cache
    finally:
        for sequence in sequences.values() if own else ():
            pool.free(sequence)


def check_prompts(prompts: Sequence[Sequence[int]]) -> None:
    """Raises ConfigError for a prompt without a token."""
    if any(not len(prompt) for prompt in prompts):
        raise ConfigError("an empty prompt has nothing to continue: give at least one token")


def tokens_of(records: Sequence[StepRecord] | Sequence[RoundRecord], num_prompts: int) -> list[list[int]]:
    """What each prompt was continued with, the stop token that ended it included."""
    said: list[list[int]] = [[] for _ in range(num_prompts)]
    for record in records:
        for index, token in zip(record.sequences, record.tokens, strict=True):
            said[index].append(token)
    return said


def is_audit(step: int, every: int, first: int = 0) -> bool:
    return every > 0 and step % every == first


def report_of(on_prefill: Callable[[int, int, int], None] | None, index: int) -> Callable[[int, int], None]:
    """`on_prefill` of one prompt."""
    return (lambda done, total: None) if on_prefill is None else lambda done, total: on_prefill(index, done, total)


def prefill(
    decoder: Decoder,
    cache: Any,
    pool: PagePool,
    tokens: Sequence[int],
    chunk_tokens: int,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[PagedSequence, Any]:
    """(sequence, cache) with K and V of `tokens` in the cache, by dense attention; pages that the pool holds are not
    computed again. `report(tokens done, tokens in all)` is called after each chunk."""
    sequence, num_shared = pool.open(tokens)
    try:
        for start in range(num_shared, len(tokens), chunk_tokens):
            chunk = tokens[start : start + chunk_tokens]
            slots, cache = append(decoder.eps, cache, pool, sequence, chunk)
            table = pool.table([sequence])[0]
            cache, _ = decoder.prefill(cache, np.array(chunk), slots, table, start + len(chunk))
            report(start + len(chunk), len(tokens))
    except BaseException:
        pool.free(sequence)
        raise
    return sequence, cache


def append(
    eps: Backend, cache: Any, pool: PagePool, sequence: PagedSequence, tokens: Sequence[int]
) -> tuple[np.ndarray, Any]:
    """Slots [N] for `tokens` at the end of a sequence; a page shared with a fork is copied before it is written."""
    slots, copies = pool.append(sequence, tokens)
    if copies:
        cache = eps.copy_units(cache, *zip(*copies, strict=True))
    return slots, cache
