"""A document's start, prefilled once for several caches."""

from dataclasses import dataclass, fields
from typing import Any

from eps_core.attention.protocol import Array, Backend
from eps_core.config.cache import CacheConfig
from eps_core.kv_cache.pool import PagePool
from eps_core.kv_cache.pool import Sequence as PagedSequence


@dataclass(frozen=True, eq=False)
class Prefix:
    """A document's start after its dense prefill, to be written into any cache of its model, whatever that keeps."""

    tokens: list[int]
    keys_values: list[tuple[Array, Array]]  # of each layer [T, Hkv, D]

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for pair in self.keys_values for array in pair)

    def into(self, backend: Backend, cache: Any, pool: PagePool, room: int = 0) -> tuple[PagedSequence, Any]:
        """(sequence, cache) with these tokens written, and units for `room` more side by side with theirs."""
        length = len(self.tokens)
        sequence, _ = pool.open()
        slots, _ = pool.append(sequence, [*self.tokens, *[0] * room])
        pool.rewind(sequence, length)
        for layer, (k, v) in enumerate(self.keys_values):
            cache = backend.write_kv(cache, layer, k, v, slots[:length])
        return sequence, cache


def without_summaries(cache: Any) -> Any:
    """A cache over the same K and V that keeps nothing else: what is written to it, no summary of `cache` follows.
    Tokens written after a prompt are to be written again before `cache` reads them."""
    names = {"spec", "device", "k", "v", "finite", "kernels"} & {one.name for one in fields(cache)}
    cache_config = CacheConfig(block_size=cache.cache_config.unit_tokens)
    return type(cache)(cache_config=cache_config, **{name: getattr(cache, name) for name in names})
