"""The caches of an `eps-proto run --kv-evict`: whole prompts for its dense side, what a policy keeps for the others."""

import time
from functools import partial

from eps_core.config.cache import CacheConfig, CacheSpec
from eps_core.decode.evicting import evicting, evicting_spec
from eps_core.decode.observe import Observed
from eps_core.evaluation.prefilled import Caches, Held, Job, OnPrefill, Prefilled
from eps_core.evaluation.runner import Document
from eps_core.eviction.config import EvictionConfig
from eps_core.metrics import terminal


class _Held(Held):
    def rewind(self, documents: list[Document]) -> None:
        """Rows that were evicted do not come back: each side has prompts of its own."""


class EvictedCaches(Caches):
    """See `Caches`."""

    def spec(self, job: Job) -> CacheSpec:
        return evicting_spec(job.session, *self._made_of(job))

    def header(self, job: Job) -> str:
        return f"keep    {terminal.describe_keep(job.request.keep, max(job.prompt_lengths))}\n"

    def fill(self, job: Job, on_prefill: OnPrefill) -> Prefilled:
        request, session, started = job.request, job.session, time.perf_counter()
        decoder, cache, pools = evicting(session, *self._made_of(job))
        held: Prefilled = {name: _Held(cache, pools, decoder=decoder) for name in ("eps", "kl")}
        for index, one in enumerate(job.documents):
            observed = Observed(session.backend, session.spec, request.keep.policy_spec)
            prefix = session.prefix(one.prompt[:-1], request.prefill_chunk, observed, partial(on_prefill, index))
            if job.both:
                if not index:  # late: the prefill has released its own cache
                    held["dense"] = Held(*job.dense.cache(*job.room(job.dense_store)))
                dense = held["dense"]
                sequence, dense.cache = prefix.into(session.backend, dense.cache, dense.pool, one.num_steps)
                dense.written.append(sequence)
            for name in ("eps", "kl")[: 1 + request.kl]:
                own = observed.of(observed.policy_spec)
                kept, cache = decoder.adopt(cache, prefix.keys_values, len(prefix.tokens), own)
                held[name].written.append(kept)
        held["eps"].cache = held["kl"].cache = cache
        ms = 1000 * (time.perf_counter() - started)
        for side in held.values():
            side.ms = ms
        return held

    def _made_of(self, job: Job) -> tuple[EvictionConfig, CacheConfig, list[int], int]:
        """Return the arguments that the cache is made from: with `--kl` the prompts are kept for a second decode."""
        request = job.request
        return request.keep, request.config.cache_config, job.prompt_lengths * (1 + request.kl), job.num_new
