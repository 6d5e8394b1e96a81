"""The prompts of one `eps-proto run` in their caches, prefilled once for all its sides."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from eps_core.config.cache import CacheConfig, CacheSpec
from eps_core.config.formats import outcome_label
from eps_core.decode.cost import Cost
from eps_core.decode.forward import Decoder
from eps_core.decode.generate import prefill
from eps_core.decode.prefix import without_summaries
from eps_core.decode.session import Session
from eps_core.decode.stored import StoredPrompts
from eps_core.evaluation.codes_error import CodesError
from eps_core.evaluation.request import RunRequest
from eps_core.evaluation.runner import Document
from eps_core.metrics import terminal


@dataclass
class Job:
    """A request whose config is settled, with its session and prompts."""

    request: RunRequest
    session: Session
    dense: Session  # whose caches the dense side has: the same, but where others lie as codes
    documents: list[Document]
    answer: str | None  # of the built-in needle document
    caches: "Caches"
    cost: Cost | None = None  # behind an automatic min_context
    codes: CodesError | None = None  # of --kv-bits

    @property
    def prompt_lengths(self) -> list[int]:
        return [len(one.prompt) for one in self.documents]

    @property
    def num_new(self) -> int:
        """Most tokens that a prompt goes on for."""
        return max(one.num_steps for one in self.documents)

    @property
    def both(self) -> bool:
        """Return whether a dense run comes before another one."""
        return self.request.baseline and self.request.changes

    @property
    def labels(self) -> dict[str, str]:
        """Return the names of the two sides."""
        request, dtype = self.request, self.session.kv_dtype
        return {
            "dense": outcome_label("dense", dtype, request.own_dense),
            "eps": outcome_label(request.reads, dtype, request.kv_bits),
        }

    @property
    def dense_store(self) -> CacheConfig:
        return CacheConfig(block_size=self.request.config.cache_config.unit_tokens)

    def room(self, cache_config: CacheConfig) -> tuple[CacheConfig, list[int], int | None]:
        """Return the arguments that a cache of the prompts and their continuations is made from."""
        return cache_config, [len(one.prompt) + one.num_steps for one in self.documents], self.request.pool_tokens


@dataclass
class Held:
    """The prompts in a cache, all but the last token of each, from where a side decodes."""

    cache: Any
    pool: Any
    written: list[Any] = field(default_factory=list)  # a sequence of each prompt
    decoder: Decoder | None = None  # None: the session's
    ms: float = 0.0  # that the prefill took
    stored: StoredPrompts | None = None  # from where prompts were loaded, and where they go

    def rewind(self, documents: list[Document]) -> None:
        """Take what was decoded back, so that another side can decode from the same prompts."""
        for sequence, one in zip(self.written, documents, strict=True):
            self.pool.rewind(sequence, len(one.prompt) - 1)


# where each side (dense, eps, kl) decodes from: the same K and V, prefilled once, but where one side's lie as codes
Prefilled = dict[str, Held]
OnPrefill = Callable[[int, int, int], None]


class Caches:
    """How the caches of a run are made and filled: whole prompts in one cache for all sides, but where one side holds
    codes."""

    def spec(self, job: Job) -> CacheSpec:
        """Return the cache of the side that metrics speak of."""
        return job.session.cache_spec(*job.room(job.request.config.cache_config))

    def header(self, job: Job) -> str:
        """Return the lines of the run's header on what is kept."""
        return ""

    def fill(self, job: Job, on_prefill: OnPrefill) -> Prefilled:
        """Prefill the prompts, all but the last token of each. The dense side reads the K and V of the other one, but
        where that holds codes: then it has a prefill of its own."""
        request, session = job.request, job.session
        cache, pool = session.cache(*job.room(request.config.cache_config))
        held = Held(cache, pool, stored=session.stored(cache.cache_config))
        _fill(job, held, on_prefill)
        if not request.changes:
            return {"dense": held}
        if job.dense is session:
            dense = replace(held, cache=without_summaries(held.cache))
            return {"dense": dense, "eps": held, "kl": held}
        if not job.both:
            return {"eps": held}
        dense = Held(*job.dense.cache(*job.room(job.dense_store)))
        _fill(job, dense, on_prefill)
        return {"dense": dense, "eps": held, "kl": held}


def prefilled(job: Job) -> Prefilled:
    """Return the prompts in the caches of all sides, with a bar of progress meanwhile."""
    before = np.cumsum([0, *job.prompt_lengths]) - np.arange(len(job.documents) + 1)
    with terminal.Progress("prefill:", "tokens") as progress:
        return job.caches.fill(job, lambda prompt, done, total: progress(int(before[prompt]) + done, int(before[-1])))


def _fill(job: Job, held: Held, on_prefill: OnPrefill) -> None:
    """Prefills the prompts, all but the last token of each, into a cache; stored ones are loaded."""
    prompts, started = [one.prompt for one in job.documents], time.perf_counter()
    if held.stored is not None:
        held.cache = held.stored.load(held.cache, held.pool, prompts)
    for index, prompt in enumerate(prompts):
        sequence, held.cache = prefill(
            job.session.decoder, held.cache, held.pool, prompt[:-1], job.request.prefill_chunk,
            partial(on_prefill, index),
        )  # fmt: skip
        held.written.append(sequence)
    held.ms = 1000 * (time.perf_counter() - started)
