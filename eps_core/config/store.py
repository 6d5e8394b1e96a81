"""What is kept: the shape of a cache and of its groups, and the summaries of these."""

from dataclasses import dataclass, replace
from typing import Self

from eps_core.errors import require

METHODS = ("off", "jl", "1pc", "fd", "box", "meanstd", "ball", "moments", "rq")
# for evaluation alone: true masses as estimates, by reading all of K, which its byte counts leave out
EVALUATION_METHODS = ("oracle",)
MEAN = "mean"  # not a way to score: the mean values that stand for skipped groups
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}

# Each method's measured best group size in tokens (results/README.md); None: the product requirements' coarse group
# of `COARSE_GROUP_BLOCKS` pages.
DEFAULT_GROUP_TOKENS: dict[str, int | None] = {
    "oracle": 16, "jl": None, "1pc": None, "fd": None, "box": 16, "meanstd": 16, "ball": 8, "moments": 8, "rq": 2,
}  # fmt: skip
COARSE_GROUP_BLOCKS = 8
MAX_GROUP_TOKENS = 256
DEFAULT_TAIL_TOKENS = 64
# m of jl, l of fd (8 rows would need 522 MiB at 32 x 32 x 64k, 2 need 132 MiB), k of moments
DEFAULT_DIM = {"jl": 8, "fd": 2, "moments": 1}


@dataclass(frozen=True)
class CacheSpec:
    """Shape of a paged KV cache. `num_units` is P; one unit holds `Store.unit_tokens` tokens of every kv head."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_units: int
    dtype: str = "float32"
    max_open_groups: int = 8  # sequences whose open group box and meanstd can follow without re-reading K

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "num_units", "max_open_groups"):
            value = getattr(self, name)
            require(value >= 1, f"{name} {value} must be at least 1")
        require(self.dtype in DTYPE_BYTES, f"cache dtype {self.dtype!r} is unknown: choose one of {list(DTYPE_BYTES)}")

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of K and V of one token in one layer and kv head."""
        return 2 * self.head_dim * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Store:
    """What a cache keeps besides K and V: fixed when it is made, and the same for every read of it.

    What is None by default depends on the method and is settled at birth; only `dim` and, with method off,
    `group_tokens` can be None in a store.
    """

    method: str = "off"
    dim: int | None = None  # m of jl, l of fd, k of moments; None: the method's default
    bits: int = 1  # of one rq code
    second_bit: bool = False  # rq of 1 bit: a second bit of every code is kept, to be read of the best
    rq_bounds: bool = False  # rq also stores residual norm, radius and key norm (fp16), and so has bounds
    bound_bits: int = 0  # 4 or 8: certify from codes of single keys instead of the method's own bounds
    # tokens whose mean value stands for the skipped groups among them; 0: these contribute nothing
    tail_tokens: int = None  # type: ignore[assignment]
    group_tokens: int | None = None  # S; None: the method's default, or group_blocks pages
    group_blocks: int | None = None  # S in pages
    seed: int = 0
    block_size: int = 16  # tokens per page

    def __post_init__(self) -> None:
        require(
            self.method in (*METHODS, *EVALUATION_METHODS, MEAN),
            f"eps-method {self.method!r} is unknown: choose one of {', '.join(METHODS)}",
        )
        block = self.block_size
        require(
            1 <= block <= MAX_GROUP_TOKENS,
            f"block-size {block} is outside 1 to {MAX_GROUP_TOKENS} tokens: use 16",
        )
        require(
            self.group_tokens is None or self.group_blocks is None,
            f"eps-group-tokens {self.group_tokens} and eps-group-blocks {self.group_blocks} say the same thing twice: "
            "give one of them",
        )
        if self.method == "off":
            object.__setattr__(self, "tail_tokens", 0)
            return
        self._settle_group()
        self._settle_tail()
        if self.dim is not None:
            require(
                self.method in DEFAULT_DIM,
                f"eps-dim {self.dim} has no meaning for method {self.method}: it is m of jl, l of fd, k of moments; "
                "leave it out",
            )
            require(1 <= self.dim <= 64, f"eps-dim {self.dim} is outside 1 to 64: use {DEFAULT_DIM[self.method]}")
        else:
            object.__setattr__(self, "dim", DEFAULT_DIM.get(self.method))
        require(self.bits in (1, 2, 4, 8), f"eps-bits {self.bits} is not 1, 2, 4 or 8: use 1")
        require(
            not self.rq_bounds or self.method == "rq",
            f"eps-rq-bounds belongs to method rq, not {self.method}: leave it out",
        )
        require(
            self.bound_bits in (0, 4, 8),
            f"eps-bound-bits {self.bound_bits} is not 4 or 8, nor 0 for the method's own bounds: use 8",
        )
        require(self.seed >= 0, f"eps-seed {self.seed} is negative: use 0 or more")

    def _settle_group(self) -> None:
        block, tokens = self.block_size, self.group_tokens
        if tokens is None and self.group_blocks is None:
            tokens = DEFAULT_GROUP_TOKENS[self.method]
        if tokens is None:
            blocks = COARSE_GROUP_BLOCKS if self.group_blocks is None else self.group_blocks
            require(blocks >= 1, f"eps-group-blocks {blocks} must be at least 1 page: use {COARSE_GROUP_BLOCKS}")
            tokens = blocks * block
        require(
            1 <= tokens <= MAX_GROUP_TOKENS,
            f"a group of {tokens} tokens is outside 1 to {MAX_GROUP_TOKENS}: "
            "lower eps-group-tokens or eps-group-blocks",
        )
        require(
            block % tokens == 0 or tokens % block == 0,
            f"a group of {tokens} tokens neither divides the page of {block} tokens nor is a multiple of it: "
            "use a power of two, or change block-size",
        )
        object.__setattr__(self, "group_tokens", tokens)
        object.__setattr__(self, "group_blocks", None)

    def _settle_tail(self) -> None:
        if self.tail_tokens is None:
            object.__setattr__(self, "tail_tokens", self._usual_tail() if self.method == "rq" else 0)
        unit = max(self.block_size, self.S)
        require(
            not self.tail_tokens or not self.has_norm_estimate,
            f"eps-tail mean needs estimates of masses, and those of method {self.method} are norms: use "
            "--eps-tail drop, or another method",
        )
        require(
            self.tail_tokens == 0 or (unit <= self.tail_tokens <= MAX_GROUP_TOKENS and self.tail_tokens % unit == 0),
            f"eps-tail-tokens {self.tail_tokens} is not a multiple, up to {MAX_GROUP_TOKENS}, of the {unit} tokens of "
            f"a page or group: use {self._usual_tail()}, or 0 to drop what is skipped",
        )

    def _usual_tail(self) -> int:
        """About DEFAULT_TAIL_TOKENS, in whole pages and groups."""
        unit = max(self.block_size, self.group_tokens or 0)
        return unit * max(DEFAULT_TAIL_TOKENS // unit, 1)

    def with_tail(self) -> Self:
        """The same with a tail of the usual length."""
        return replace(self, tail_tokens=self._usual_tail())

    @property
    def enabled(self) -> bool:
        return self.method != "off"

    @property
    def S(self) -> int:
        """Tokens per group. With method off, the page."""
        return self.group_tokens if self.enabled and self.group_tokens else self.block_size

    @property
    def unit_tokens(self) -> int:
        """Tokens per pool unit: the page, or the whole group or tail where these span pages."""
        return max(self.block_size, self.S, self.tail_tokens)

    @property
    def groups_per_unit(self) -> int:
        return self.unit_tokens // self.S

    @property
    def has_bounds(self) -> bool:
        """Whether a certificate can be taken."""
        return self.own_bounds or self.bound_bits > 0

    @property
    def own_bounds(self) -> bool:
        """Whether the summary that estimates also bounds."""
        return self.method in ("1pc", "fd", "box", "ball", "moments") or (self.method == "rq" and self.rq_bounds)

    @property
    def has_norm_estimate(self) -> bool:
        """Whether estimates are norms |K a|, never negative, and not logarithms of masses."""
        return self.method in ("jl", "1pc", "fd")

    @property
    def bound_store(self) -> "Store":
        """The summary that bounds, where it is another one: codes of single keys, in the same pool units."""
        return Store(
            method="rq", bits=self.bound_bits, rq_bounds=True, group_tokens=1, tail_tokens=0, seed=self.seed,
            block_size=self.unit_tokens,
        )  # fmt: skip

    @property
    def tail_store(self) -> "Store":
        """The summary of values that stands for what is skipped, in the same pool units."""
        return Store(method=MEAN, group_tokens=self.tail_tokens, tail_tokens=0, block_size=self.tail_tokens)
