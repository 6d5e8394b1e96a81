"""Decoding from caches that keep a part of their tokens: dense prefill, then what a policy keeps, in pages by head.

A prompt is prefilled in a plain cache, which holds all of it; what a policy keeps moves to the evicting one, of one kv
head, in which each kv head of a sequence is a sequence (`kv_cache.heads`). Steps attend there, densely or sparse: what
EPS summarises, scores and bounds is what is left. Keys keep the rotation of their own positions.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from eps_core.attention.layer import collect, dense_read, sparse_attention
from eps_core.attention.protocol import Array, Backend
from eps_core.attention.stats import Eviction, LayerStats, StepOutput
from eps_core.config.cache import CacheConfig, CacheSpec
from eps_core.config.eps import EpsConfig
from eps_core.config.selection import SelectionConfig
from eps_core.decode.forward import Arithmetic, Decoder
from eps_core.decode.layers import run_layers
from eps_core.decode.observe import Observed
from eps_core.decode.session import Session
from eps_core.eviction.base import Kept
from eps_core.eviction.config import EvictionConfig
from eps_core.eviction.table import policy
from eps_core.kv_cache.heads import HeadPools, HeadSequence, HeadTables
from eps_core.kv_cache.step_plan import StepPlan


class EvictingDecoder(Decoder):
    """A decoder whose steps read what each head kept, and evict as `keep` says. Has a `Decoder`'s place in the decode
    loop, with a `HeadPools` for its pool; it neither audits nor drafts."""

    def __init__(self, backend: Backend, model: Arithmetic, keep: EvictionConfig, pools: HeadPools) -> None:
        super().__init__(backend, model)
        self.spec.require_full_attention("eviction")
        self.keep, self.pools = keep, pools
        self._observed: dict[HeadSequence, Observed] = {}
        self._budgets: dict[HeadSequence, int] = {}

    def choose(self, cache: Any, keys_values: Sequence[tuple[Array, Array]], length: int, observed: Observed) -> Kept:
        """[L][Hkv]: what the policy keeps of a prompt's `length` tokens, all but the last: K and V [T, Hkv, D] of each
        layer, and what its attention was seen to do. The same for every cache that they go to."""
        observed.num_prompt = length + 1
        everything = [[np.arange(length)] * self.spec.num_kv_heads for _ in range(self.spec.num_layers)]
        if not (length and self.keep.enabled and self.keep.policy_spec.at_prefill):
            return everything
        heads = [
            [
                observed.head(cache, layer, head, self._rows(cache, k, np.arange(length), head), rows, length)
                for head, rows in enumerate(everything[layer])
            ]
            for layer, (k, _) in enumerate(keys_values)
        ]
        budget = self.keep.rows(length)
        kept: Kept = policy(self.keep.policy).keep(heads, budget, self.keep.rule(budget))
        return kept

    def adopt(
        self,
        cache: Any,
        keys_values: Sequence[tuple[Array, Array]],
        length: int,
        observed: Observed,
        kept: Kept | None = None,
    ) -> tuple[HeadSequence, Any]:
        """(sequence, cache) with what `choose` keeps of a prompt, or what it is known to have `kept`."""
        spec, budget = self.spec, self.keep.rows(length)
        if kept is None:
            kept = self.choose(cache, keys_values, length, observed)
        observed.num_prompt = length + 1  # where another's was chosen from
        sequence, cache = self.place(
            cache, length, kept,
            lambda layer, head: [self._rows(cache, a, kept[layer][head], head) for a in keys_values[layer]],
        )  # fmt: skip
        for layer, head in np.ndindex(spec.num_layers, spec.num_kv_heads):
            observed.evicted(layer, head, kept[layer][head])
        self._observed[sequence], self._budgets[sequence] = observed, budget
        return sequence, cache

    def place(
        self,
        cache: Any,
        length: int,
        positions: Sequence[Sequence[np.ndarray]],
        rows: Callable[[int, int], Sequence[Array]],
    ) -> tuple[HeadSequence, Any]:
        """(sequence, cache) of `length` tokens, of which head h of layer l holds `positions[l][h]` [n], ascending, with
        K and V `rows(l, h)` [n, 1, D], whatever made them. It can be decoded from; `adopt` makes one that a policy may
        evict from."""
        sequence = self.pools.open()
        try:
            slots = self.pools.fill(sequence, length, positions)
            for layer, head in np.ndindex(self.spec.num_layers, self.spec.num_kv_heads):
                if len(positions[layer][head]):
                    keys, values = rows(layer, head)
                    cache = self.backend.write_kv(cache, layer, keys, values, slots[layer][head])
            self.backend.check_finite(cache)
        except BaseException:
            self.release(sequence)
            raise
        return sequence, cache

    def spec_of(self, cache: Any) -> CacheSpec:
        """See `Decoder.spec_of`: a cache that evicts has its kv heads one by one."""
        return replace(cache.spec, num_kv_heads=self.spec.num_kv_heads)

    def release(self, sequence: HeadSequence) -> None:
        """Gives a sequence's pages back."""
        self.pools.free(sequence)
        self._observed.pop(sequence, None)
        self._budgets.pop(sequence, None)

    def step(
        self,
        cache: Any,
        tokens: np.ndarray,
        slots: np.ndarray,
        table: HeadTables,  # type: ignore[override]
        lengths: np.ndarray,
        selection_config: SelectionConfig | None = None,
        audit: bool = False,
        draft: bool = False,
    ) -> tuple[Any, StepOutput]:
        """`Decoder.step` over what is left of B sequences: slots [B, L, Hkv], lengths [B] of all tokens they have had.
        Afterwards, heads that grew by `EvictionConfig.every` rows are brought back to their budget."""
        assert not audit and not draft, "evicting decoders neither audit nor draft"
        backend, model, spec, batch = self.backend, self.model, self.spec, len(tokens)
        self._check_tokens(tokens)
        config = None
        if selection_config is not None and cache.cache_config.enabled:
            config = EpsConfig.over(cache.cache_config, selection_config)
        wheres = table.wheres(cache.cache_config, config)
        reads, clock, observed_bytes = [], self._clock if self.timing else None, []
        pending: list[list[list[Array]]] = []  # [L][B]

        def attention(layer: int, q: Array, k: Array, v: Array) -> Array:
            nonlocal cache
            one = (batch * spec.num_kv_heads, 1, spec.head_dim)
            cache = backend.write_kv(cache, layer, k.reshape(one), v.reshape(one), slots[:, layer].ravel())
            if self.tap is not None:
                self.tap(layer, q)
            plan = wheres[layer]
            by_head = q.reshape((batch * spec.num_kv_heads, -1, spec.head_dim))
            if config is not None:
                out, seen = sparse_attention(backend, cache, layer, by_head, plan, clock=clock)
            else:
                (out, _), seen = backend.attend(cache, layer, by_head, plan, None), dense_read(cache, plan)
                seen.stats.skipped_mass = None
            reads.append(seen)
            num_bytes, asked = self._observe(cache, layer, by_head, table)
            observed_bytes.append(num_bytes)
            pending.append(asked)
            return out.reshape(q.shape)

        with model.scope():
            model = model.for_rows(cache.kernels, batch)
            x = run_layers(model, model.embed(tokens), model.rotation(lengths - 1), attention)
            flat = [array for layer in pending for asked in layer for array in asked]
            layers, (logits, *values) = collect(backend, cache, reads, model.logits(x), *flat)
            backend.check_finite(cache)
            found = iter(values)
            for layer, of_layer in enumerate(pending):
                for sequence, asked, length in zip(table.sequences, of_layer, lengths, strict=False):
                    self._observed[sequence].add(layer, [next(found) for _ in asked], int(length))
            kept = sum(sequence.num_rows for sequence in table.sequences) * cache.spec.kv_token_bytes
            moved = freed = 0
            for sequence in table.sequences:
                cache, rows_moved, units_freed = self._evict(cache, sequence)
                moved, freed = moved + rows_moved, freed + units_freed
        fallbacks = {}
        if config is not None:
            fallbacks = _fallbacks(wheres, spec.num_kv_heads)
            for layer, num_bytes in enumerate(observed_bytes):
                if not wheres[layer].reads_all(layer):  # else statistics are of what was read anyway
                    layers[layer].kv_bytes_read += num_bytes
        layers = [_by_head(one, batch, spec.num_kv_heads) for one in layers]
        kv_bytes = sum(one.kv_bytes_read for one in layers)
        return cache, StepOutput(logits, kv_bytes, layers, fallbacks, eviction=Eviction(kept, moved, freed))

    def _observe(self, cache: Any, layer: int, q: Array, table: HeadTables) -> tuple[int, list[list[Array]]]:
        """(bytes of K read, of each sequence what `Observed.add` must have) of queries q [B * Hkv, R, D]; nothing of
        policies that do not ask for it."""
        if not self._watches:
            return 0, []
        heads, num_bytes, pending = self.spec.num_kv_heads, 0, []
        for index, sequence in enumerate(table.sequences):
            observed, rows, keys = self._observed[sequence], np.arange(index * heads, (index + 1) * heads), []
            ages = [sequence.length - 1 - positions for positions in sequence.positions[layer]]
            if observed.keeps_weights:
                for row in rows:
                    length = int(table.lengths[layer][row])
                    keys.append(self.backend.read_kv(cache, layer, table.tables[layer][row], length)[0])
                    num_bytes += length * cache.spec.k_token_bytes
            pending.append(observed.step(cache, self.backend.take(cache, q, rows), keys, ages))
        return num_bytes, pending

    @property
    def _watches(self) -> bool:
        """Return whether statistics of decode steps are gathered, for later evictions."""
        policy_spec = self.keep.policy_spec if self.keep.enabled and self.keep.every else None
        return (
            policy_spec is not None
            and policy_spec.while_decoding
            and (policy_spec.sums or policy_spec.squares or policy_spec.query_moments or policy_spec.window > 0)
        )

    def _evict(self, cache: Any, sequence: HeadSequence) -> tuple[Any, int, int]:
        """(cache, rows moved, units freed) of bringing a sequence's heads back to their budget, where it is time."""
        keep = self.keep
        if not (keep.enabled and keep.every and keep.policy_spec.while_decoding):
            return cache, 0, 0
        budget, heads = self._budgets[sequence], self.spec.num_layers * self.spec.num_kv_heads
        if sequence.num_rows < heads * (budget + keep.every):
            return cache, 0, 0
        observed, moved, freed = self._observed[sequence], 0, 0
        seen = []
        for layer, heads_of in enumerate(sequence.heads):
            keys: list[Array | None] = [None] * len(heads_of)
            if observed.policy_spec.keys or observed.policy_spec.window:
                keys = [
                    self.backend.read_kv(cache, layer, np.array(one.table, np.int32), one.length)[0] for one in heads_of
                ]
            rows = sequence.positions[layer]
            seen.append(
                [observed.head(cache, layer, head, k, rows[head], sequence.length) for head, k in enumerate(keys)]
            )
        kept = policy(keep.policy).keep(seen, budget, keep.rule(budget))
        for layer, head in np.ndindex(self.spec.num_layers, self.spec.num_kv_heads):
            done = self.pools.compact(sequence, layer, head, kept[layer][head], keep.compact)  # type: ignore[arg-type]
            if len(done.written):
                cache = self.backend.move_kv(cache, layer, done.sources, done.slots)
            observed.evicted(layer, head, done.order)
            moved, freed = moved + done.rows_moved, freed + done.units_freed
        return cache, moved, freed

    def _rows(self, cache: Any, array: Array, rows: np.ndarray, head: int) -> Array:
        """Rows [n] of one kv head of [T, Hkv, D]: [n, 1, D]."""
        length, heads, dim = array.shape
        return self.backend.take(cache, array.reshape((length * heads, 1, dim)), rows * heads + head)


def evicting(
    session: Session, keep: EvictionConfig, cache_config: CacheConfig, lengths: Sequence[int], num_new: int
) -> tuple[EvictingDecoder, Any, HeadPools]:
    """Return (decoder, cache, pools), empty, for prompts of `lengths` tokens that go on for `num_new`. Where a head may
    hold all of them, as under policies that divide unevenly, it finds room."""
    spec, shape = session.spec, evicting_spec(session, keep, cache_config, lengths, num_new)
    session.check_kernels(cache_config)
    pools = HeadPools(spec.num_layers, spec.num_kv_heads, shape.num_units, cache_config.unit_tokens)
    cache = session.backend.new_cache(shape, cache_config, session.device, session.kernels)
    return EvictingDecoder(session.backend, session.decoder.model, keep, pools), cache, pools


def evicting_spec(
    session: Session, keep: EvictionConfig, cache_config: CacheConfig, lengths: Sequence[int], num_new: int
) -> CacheSpec:
    """Return the shape of the cache that `evicting` makes."""
    kv_heads = session.spec.num_kv_heads
    units = sum(kv_heads * -(-keep.most_rows(length, num_new) // cache_config.unit_tokens) for length in lengths)
    most_open = len(lengths) * kv_heads
    return replace(session.one_unit(), num_kv_heads=1, num_units=units, max_open_groups=most_open)


def _fallbacks(wheres: Sequence[StepPlan], heads: int) -> dict[str, int]:
    """`StepPlan.fallbacks` of layers in which every kv head is a sequence: a layer's call counts by its heads."""
    calls = sum(plan.fallbacks([0]).get("min_context", 0) for plan in wheres)
    return {"min_context": -(-calls // heads)} if calls else {}


def _by_head(stats: LayerStats, batch: int, heads: int) -> LayerStats:
    """Statistics of B * Hkv sequences of one kv head as of B sequences: [B * Hkv, 1] and [B * Hkv] to [B, Hkv]."""
    arrays = {name: value for name, value in vars(stats).items() if isinstance(value, np.ndarray)}
    by_head: dict[str, Any] = {name: value.reshape(batch, heads) for name, value in arrays.items()}
    return replace(stats, **by_head)
