"""The byte arithmetic that follows from a configuration."""

from collections.abc import Iterable

from eps_core.config.eps import EVALUATION_METHODS, MEAN, EpsConfig
from eps_core.config.store import DTYPE_BYTES


def refine_group_bytes(config: EpsConfig, head_dim: int) -> int:
    """Bytes of rq's second bit and its scale per (layer, kv head, group): stored of all, read of the best."""
    return -(-head_dim // 8) + 2 if config.refine else 0


def scoring_bytes(config: EpsConfig, head_dim: int, num_groups: int, lengths: Iterable[int]) -> int:
    """Bytes read besides K and V per (layer, kv head): the summaries of `num_groups` groups in all, padding included,
    the second bits of the best of each sequence, padded to the longest, and the mean values of the tail."""
    scanned = summary_group_bytes(config, head_dim) - refine_group_bytes(config, head_dim)
    refined = [config.refined_groups(int(length)) for length in lengths]
    tail = -(-num_groups * config.S // config.tail_tokens) * (head_dim + 2) if config.tail_tokens else 0
    return num_groups * scanned + tail + len(refined) * max(refined, default=0) * refine_group_bytes(config, head_dim)


def summary_group_bytes(config: EpsConfig, head_dim: int) -> int:
    """Bytes stored per (layer, kv head, group); a scoring pass reads `scoring_bytes`. Open-group accumulators are
    apart."""
    dim = config.dim or 0
    if config.method in ("off", *EVALUATION_METHODS):
        return 0
    if config.method == MEAN:
        return head_dim + 2  # int8 mean, its fp16 scale
    if config.method == "jl":
        return 4 * dim * (dim + 1) // 2  # packed symmetric Gram matrix, fp32
    if config.method == "1pc":
        return head_dim + 4 + 2 * 2  # int8 direction, its fp32 scale, |K u| and residual norm in fp16
    if config.method == "fd":
        return dim * head_dim + 2 * (dim + 2)  # int8 rows, row scales, rounding error, sqrt(Delta) in fp16
    if config.method == "box":
        return 2 * head_dim + 2 * 2  # int8 min and max; scale and key norm in fp16
    if config.method == "meanstd":
        return 2 * head_dim + 2 * 2  # int8 mean and uint8 std; two fp16 scales
    if config.method == "ball":
        return head_dim + 2 * 4  # int8 mean; scale, rounding error, radius, key norm in fp16
    if config.method == "moments":
        return head_dim * (1 + dim) + 2 * (6 + 2 * dim)
    packed = -(-head_dim * config.bits // 8)
    return packed + 2 + (2 * 3 if config.rq_bounds else 0) + refine_group_bytes(config, head_dim)


def open_group_bytes(num_layers: int, num_kv_heads: int, head_dim: int) -> int:
    """Bytes of the running statistics that box and meanstd keep for one open group, per slot of `max_open_groups`:
    two float32 vectors and one norm."""
    return num_layers * num_kv_heads * 4 * (2 * head_dim + 1)


def summary_bytes(config: EpsConfig, num_layers: int, num_kv_heads: int, head_dim: int, num_tokens: int) -> int:
    """Bytes of all summaries of one sequence of `num_tokens` tokens, those of bounds and tails included."""
    groups = -(-num_tokens // config.S)
    tails = -(-num_tokens // config.tail_tokens) * (head_dim + 2) if config.tail_tokens else 0
    keys = num_tokens * summary_group_bytes(config.bound_config, head_dim) if config.bound_bits else 0
    return num_layers * num_kv_heads * (groups * summary_group_bytes(config, head_dim) + tails + keys)


def kv_bytes(num_layers: int, num_kv_heads: int, head_dim: int, num_tokens: int, dtype: str) -> int:
    """Bytes of K and V of one sequence."""
    return num_layers * num_kv_heads * num_tokens * 2 * head_dim * DTYPE_BYTES[dtype]
