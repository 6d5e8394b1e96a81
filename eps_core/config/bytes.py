"""The byte arithmetic that follows from a configuration: the one definition of every counted byte."""

from collections.abc import Iterable

from eps_core.config.eps import EpsConfig
from eps_core.config.store import DTYPE_BYTES, EVALUATION_METHODS, MEAN, Store


def second_bit_bytes(store: Store, head_dim: int) -> int:
    """Bytes of rq's second bit and its scale per (layer, kv head, group): stored of all, read of the best."""
    return -(-head_dim // 8) + 2 if store.second_bit else 0


def scoring_bytes(config: EpsConfig, head_dim: int, lengths: Iterable[int]) -> int:
    """Bytes read besides K and V per (layer, kv head) to score sequences of `lengths` tokens: the summaries of their
    groups, the second bits of the best, and the mean values of the tail. Padding of tables is not counted: what a
    table's width adds is the backend's affair, and a kernel does not read it."""
    store, total = config.store, 0
    second = second_bit_bytes(store, head_dim)
    for length in lengths:
        total += -(-length // store.S) * (summary_group_bytes(store, head_dim) - second)
        total += config.refined_groups(length) * second
        if store.tail_tokens:
            total += -(-length // store.tail_tokens) * summary_group_bytes(store.tail_store, head_dim)
    return total


def summary_group_bytes(store: Store, head_dim: int) -> int:
    """Bytes stored per (layer, kv head, group); a scoring pass reads `scoring_bytes`. Open-group accumulators are
    apart."""
    dim = store.dim or 0
    if store.method in ("off", *EVALUATION_METHODS):
        return 0
    if store.method == MEAN:
        return head_dim + 2  # int8 mean, its fp16 scale
    if store.method == "jl":
        return 4 * dim * (dim + 1) // 2  # packed symmetric Gram matrix, fp32
    if store.method == "1pc":
        return head_dim + 4 + 2 * 2  # int8 direction, its fp32 scale, |K u| and residual norm in fp16
    if store.method == "fd":
        return dim * head_dim + 2 * (dim + 2)  # int8 rows, row scales, rounding error, sqrt(Delta) in fp16
    if store.method == "box":
        return 2 * head_dim + 2 * 2  # int8 min and max; scale and key norm in fp16
    if store.method == "meanstd":
        return 2 * head_dim + 2 * 2  # int8 mean and uint8 std; two fp16 scales
    if store.method == "ball":
        return head_dim + 2 * 4  # int8 mean; scale, rounding error, radius, key norm in fp16
    if store.method == "moments":
        return head_dim * (1 + dim) + 2 * (6 + 2 * dim)
    packed = -(-head_dim * store.bits // 8)
    return packed + 2 + (2 * 3 if store.rq_bounds else 0) + second_bit_bytes(store, head_dim)


def open_group_bytes(num_layers: int, num_kv_heads: int, head_dim: int) -> int:
    """Bytes of the running statistics that box and meanstd keep for one open group, per slot of `max_open_groups`:
    two float32 vectors and one norm."""
    return num_layers * num_kv_heads * 4 * (2 * head_dim + 1)


def summary_bytes(store: Store, num_layers: int, num_kv_heads: int, head_dim: int, num_tokens: int) -> int:
    """Bytes of all summaries of one sequence of `num_tokens` tokens, those of bounds and tails included."""
    kept = -(-num_tokens // store.S) * summary_group_bytes(store, head_dim)
    if store.tail_tokens:
        kept += -(-num_tokens // store.tail_tokens) * summary_group_bytes(store.tail_store, head_dim)
    if store.bound_bits:
        kept += num_tokens * summary_group_bytes(store.bound_store, head_dim)
    return num_layers * num_kv_heads * kept


def kv_bytes(num_layers: int, num_kv_heads: int, head_dim: int, num_tokens: int, dtype: str) -> int:
    """Bytes of K and V of one sequence."""
    return num_layers * num_kv_heads * num_tokens * 2 * head_dim * DTYPE_BYTES[dtype]
