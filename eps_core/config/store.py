"""What is kept: the shape of a cache and of its groups."""

from dataclasses import dataclass

from eps_core.errors import _require

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
COARSE_GROUP_BLOCKS = 8
MAX_GROUP_TOKENS = 256


@dataclass(frozen=True)
class CacheSpec:
    """Shape of a paged KV cache. `num_units` is P; one unit holds `EpsConfig.unit_tokens` tokens of every kv head."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_units: int
    dtype: str = "float32"
    max_open_groups: int = 8  # sequences whose open group box and meanstd can follow without re-reading K

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "num_units", "max_open_groups"):
            value = getattr(self, name)
            _require(value >= 1, f"{name} {value} must be at least 1")
        _require(self.dtype in DTYPE_BYTES, f"cache dtype {self.dtype!r} is unknown: choose one of {list(DTYPE_BYTES)}")

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of K and V of one token in one layer and kv head."""
        return 2 * self.head_dim * DTYPE_BYTES[self.dtype]
