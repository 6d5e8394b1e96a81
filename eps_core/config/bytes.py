"""The byte arithmetic that follows from a configuration: the one definition of every counted byte."""

from collections.abc import Iterable
from functools import cache
from operator import mul

from eps_core.config.cache import CacheConfig, CacheSpec
from eps_core.config.eps import EpsConfig
from eps_core.config.formats import EXACT, KvFormats
from eps_core.summaries import table


@cache  # every step asks
def further_bytes(cache_config: CacheConfig, head_dim: int) -> tuple[tuple[int, ...], int]:
    """Bytes per (layer, kv head, group) that are stored of all groups and read of the best: (of each part of a code
    after the first, of the rescoring bit and its scale)."""
    fields, groups = table.fields(cache_config, head_dim).values(), cache_config.groups_per_span
    later = range(1, table.num_parts(cache_config, head_dim))
    parts = tuple(sum(field.num_bytes for field in fields if field.part == part) // groups for part in later)
    return parts, sum(field.num_bytes for field in fields if field.best_only) // groups


def scoring_bytes(config: EpsConfig, head_dim: int, lengths: Iterable[int]) -> int:
    """Bytes read besides K and V per (layer, kv head) to score sequences of `lengths` tokens: the summaries of their
    groups, of codes in stages the first part of all and each further part of the best, and the rescoring bits of the
    best. Padding of tables is not counted: what a table's width adds is the backend's affair, and a kernel does not
    read it."""
    cache_config, total = config.cache_config, 0
    parts, second = further_bytes(cache_config, head_dim)
    of_all = span_bytes(cache_config, head_dim) - cache_config.groups_per_span * (second + sum(parts))
    for length in lengths:
        total += -(-length // cache_config.span_tokens) * of_all
        total += sum(map(mul, config.cascade_groups(length, head_dim), parts))
        total += config.rescored_groups(length) * second
    return total


@cache  # every step asks
def span_bytes(cache_config: CacheConfig, head_dim: int) -> int:
    """Bytes stored per (layer, kv head) of what is summarised together, `CacheConfig.groups_per_span` groups."""
    return sum(field.num_bytes for field in table.fields(cache_config, head_dim).values())


def summary_group_bytes(cache_config: CacheConfig, head_dim: int) -> int | float:
    """Bytes stored per (layer, kv head, group), those of bounds included, no whole number where groups share a mean; a
    scoring pass reads `scoring_bytes`. Open-group accumulators are apart."""
    shared, groups = summary_bytes(cache_config, 1, 1, head_dim, cache_config.span_tokens), cache_config.groups_per_span
    return shared / groups if shared % groups else shared // groups


def open_group_bytes(num_layers: int, num_kv_heads: int, head_dim: int) -> tuple[int, list[str]]:
    """Bytes of the running statistics of one partial group, per slot of `max_open_groups`: the most that a method
    keeps, and the methods that keep any."""
    kept = {
        name: sum(field.num_bytes for field in table.running(CacheConfig(name), head_dim).values())
        for name in table.names(lambda one: one.follows)
    }
    return num_layers * num_kv_heads * max(kept.values()), [name for name, num_bytes in kept.items() if num_bytes]


def summary_bytes(cache_config: CacheConfig, num_layers: int, num_kv_heads: int, head_dim: int, num_tokens: int) -> int:
    """Bytes of all summaries of one sequence of `num_tokens` tokens, those of bounds included."""
    kept = -(-num_tokens // cache_config.span_tokens) * span_bytes(cache_config, head_dim)
    if cache_config.bound_bits:
        kept += num_tokens * span_bytes(cache_config.bound_store, head_dim)
    return num_layers * num_kv_heads * kept


def kv_bytes(
    num_layers: int, num_kv_heads: int, head_dim: int, num_tokens: int, dtype: str, kv_bits: KvFormats = EXACT
) -> int:
    """Bytes of K and V of one sequence; `kv_bits` of K and of V."""
    spec = CacheSpec(num_layers, num_kv_heads, head_dim, 1, dtype, k_bits=kv_bits[0], v_bits=kv_bits[1])
    return num_layers * num_kv_heads * num_tokens * spec.kv_token_bytes
