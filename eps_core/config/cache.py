"""Settings of what is kept: the shape of a cache and of its groups, and the summaries of these."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from eps_core.config import formats
from eps_core.config.formats import AS_THEY_ARE, EXACT, FORMATS, FormatName
from eps_core.errors import require
from eps_core.summaries import table
from eps_core.summaries.base import MethodSpec

METHODS = (table.OFF, *table.names(lambda one: one.role == "public"))
EVALUATION_METHODS = table.names(lambda one: one.role == "evaluation")
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}

COARSE_GROUP_BLOCKS = 8  # a coarse group in pages
MAX_GROUP_TOKENS = 256
UNIT_TOKENS = (32, 64)  # of `mean_tokens`


@dataclass(frozen=True)
class CacheSpec:
    """Shape of a paged KV cache. `num_units` is P; one unit holds `CacheConfig.unit_tokens` tokens of every kv head. Of
    fewer than 16 bits, K or V lie as codes (`formats`); `dtype` is what they are attended in."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_units: int
    dtype: str = "float32"
    max_open_groups: int = 8  # sequences whose partial group a method can follow without re-reading K
    k_bits: FormatName = AS_THEY_ARE
    v_bits: FormatName = AS_THEY_ARE
    # of each layer the last tokens that a step attends to, None: all; (): all in every layer. All are kept in any case
    windows: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "windows", tuple(self.windows))  # a list from JSON
        for name in ("num_layers", "num_kv_heads", "head_dim", "num_units", "max_open_groups"):
            value = getattr(self, name)
            require(value >= 1, f"{name} {value} must be at least 1")
        require(self.dtype in DTYPE_BYTES, f"cache dtype {self.dtype!r} is unknown: choose one of {list(DTYPE_BYTES)}")
        for held in (self.k_bits, self.v_bits):
            fault = formats.fault(held, self.head_dim)
            require(fault is None, fault or "")

    @property
    def quantised(self) -> bool:
        """Return whether K or V lie as codes."""
        return (self.k_bits, self.v_bits) != EXACT

    @property
    def k_token_bytes(self) -> int:
        """Bytes of K of one token in one layer and kv head, its scale included."""
        return self._row_bytes(self.k_bits)

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of K and V of one token in one layer and kv head, scales included."""
        return self._row_bytes(self.k_bits) + self._row_bytes(self.v_bits)

    @property
    def exact_token_bytes(self) -> int:
        """Bytes of K and V of one token in one layer and kv head that is not quantised."""
        return 2 * self._row_bytes(AS_THEY_ARE)

    def attended(self, lengths: Sequence[int]) -> list[list[int]]:
        """[L][B]: the tokens that dense attention reads in each layer, of sequences of `lengths` tokens."""
        windows = self.windows or (None,) * self.num_layers
        return [[length if window is None else min(length, window) for length in lengths] for window in windows]

    def exact_kv_bytes(self, lengths: Sequence[int]) -> int:
        """Bytes of K and V, not quantised, that dense attention over sequences of `lengths` tokens reads in all
        layers."""
        return sum(map(sum, self.attended(lengths))) * self.num_kv_heads * self.exact_token_bytes

    def _row_bytes(self, name: FormatName) -> int:
        if name == AS_THEY_ARE:
            return self.head_dim * DTYPE_BYTES[self.dtype]
        return FORMATS[name].row_bytes(self.head_dim)


@dataclass(frozen=True)
class CacheConfig:
    """Settings of what a cache keeps in addition to K and V. They are fixed when it is made, for every read of it.

    What is None by default depends on the method and is settled at birth; only `dim` and, with method off, `group_size`
    can be None in a config.
    """

    method: str = table.OFF
    dim: int | None = None  # the method says of what; None: its default
    bits: int = 8  # of one dimension of a key's code, of `bound_store`
    second_bit: bool = False  # a rescoring bit of every code of 1 bit is kept, to be read of the best
    # rq: tokens of the unit about whose mean its groups are coded; 0: the method has no codes
    mean_tokens: int = None  # type: ignore[assignment]
    parts: int = 1  # in how many parts such codes are kept, to be read in stages
    rq_bounds: bool = False  # codes also store residual norm, radius and key norm (fp16), and so have bounds
    bound_bits: int = 0  # 4 or 8: bound from codes of single keys instead of the method's own bounds
    group_size: int | None = None  # S; None: the method's default, or group_blocks pages
    group_blocks: int | None = None  # S in pages
    seed: int = 0
    block_size: int = 16  # tokens per page

    def __post_init__(self) -> None:
        require(
            self.method in (table.OFF, *table.METHODS),
            f"method {self.method!r} is unknown: choose one of {', '.join(METHODS)}",
        )
        block = self.block_size
        require(
            1 <= block <= MAX_GROUP_TOKENS,
            f"block-size {block} is outside 1 to {MAX_GROUP_TOKENS} tokens: use 16",
        )
        require(
            self.group_size is None or self.group_blocks is None,
            f"eps-group-size {self.group_size} and eps-group-blocks {self.group_blocks} say the same thing twice: "
            "give one of them",
        )
        if self.method == table.OFF:
            object.__setattr__(self, "mean_tokens", 0)
            return
        self._settle_group()
        self._settle_mean()
        if self.dim is not None:
            require(
                self.method_spec.dim is not None,
                f"eps-dim {self.dim} has no meaning for method {self.method}: it is {dim_meanings()}; leave it out",
            )
            require(1 <= self.dim <= 64, f"eps-dim {self.dim} is outside 1 to 64: use {self.method_spec.dim}")
        else:
            object.__setattr__(self, "dim", self.method_spec.dim)
        require(
            not self.rq_bounds or self.method_spec.bounds_setting == "rq_bounds",
            f"eps-rq-bounds belongs to method {coded_methods()}, not {self.method}: leave it out",
        )
        require(
            self.bound_bits in (0, 4, 8),
            f"eps-bound-bits {self.bound_bits} is not 4 or 8, nor 0 for the method's own bounds: use 8",
        )
        require(self.seed >= 0, f"eps-seed {self.seed} is negative: use 0 or more")

    def _settle_group(self) -> None:
        block, tokens = self.block_size, self.group_size
        if tokens is None and self.group_blocks is None:
            tokens = self.method_spec.group_size
        if tokens is None:
            blocks = COARSE_GROUP_BLOCKS if self.group_blocks is None else self.group_blocks
            require(blocks >= 1, f"eps-group-blocks {blocks} must be at least 1 page: use {COARSE_GROUP_BLOCKS}")
            tokens = blocks * block
        require(
            1 <= tokens <= MAX_GROUP_TOKENS,
            f"a group of {tokens} tokens is outside 1 to {MAX_GROUP_TOKENS}: lower eps-group-size or eps-group-blocks",
        )
        require(
            block % tokens == 0 or tokens % block == 0,
            f"a group of {tokens} tokens neither divides the page of {block} tokens nor is a multiple of it: "
            "use a power of two, or change block-size",
        )
        object.__setattr__(self, "group_size", tokens)
        object.__setattr__(self, "group_blocks", None)

    def _settle_mean(self) -> None:
        method_spec, tokens = self.method_spec.unit, self.mean_tokens
        if tokens is None:
            usual = 0 if method_spec is None else method_spec.mean_tokens
            fitting = [size for size in UNIT_TOKENS if size <= usual and self.mean_fault(size) is None]
            tokens = max(fitting, default=usual)
            object.__setattr__(self, "mean_tokens", tokens)
        require(
            tokens in UNIT_TOKENS or (method_spec is None and not tokens),
            f"eps-mean-tokens {tokens} is not 32 or 64: use 64",
        )
        if not tokens:
            require(
                self.parts == 1,
                f"eps-cascade reads {coded_methods()} codes in parts, and method {self.method} has none: leave it out",
            )
            return
        require(
            method_spec is not None,
            f"eps-mean-tokens {tokens} is for {coded_methods()} codes, not for method {self.method}: leave it out",
        )
        fault = self.mean_fault(tokens)
        require(fault is None, f"eps-mean-tokens {tokens} {fault}, or use another of 32 and 64")
        require(1 <= self.parts <= 3, f"{self.parts} parts of a code are not 1 to 3: give at most two eps-cascade")
        require(
            self.parts == 1 or not self.rq_bounds,
            "eps-rq-bounds reads the whole code of every group: leave eps-cascade out, or use eps-bound-bits 8",
        )

    def mean_fault(self, tokens: int) -> str | None:
        """Return why units of that many tokens cannot have a mean here, and the fix; None: they can."""
        if tokens <= self.S or tokens % self.S:
            return f"is no multiple of the group of {self.S} tokens beyond itself: use smaller groups"
        if self.block_size % tokens == 0 or tokens % self.block_size == 0:
            return None
        return f"does not fit whole into the {self.block_size} tokens of a page: use pages of 64 tokens"

    # Derived once: every layer of every step asks. `__post_init__` asks of each only when its settings are settled

    @cached_property
    def enabled(self) -> bool:
        return self.method != table.OFF

    @cached_property
    def method_spec(self) -> MethodSpec:
        return table.method_spec(self.method)

    @cached_property
    def code_bits(self) -> int | None:
        """Bits of one dimension that a first pass reads; None where the method has no codes."""
        return self.bits if self.method_spec.centroid_codes else 1 if self.method_spec.coded else None

    @cached_property
    def S(self) -> int:
        """Tokens per group. With method off, the page."""
        return self.group_size if self.enabled and self.group_size else self.block_size

    @cached_property
    def unit_tokens(self) -> int:
        """Tokens per pool unit: the page, or the whole group or all groups of one mean where these span pages."""
        return max(self.block_size, self.S, self.mean_tokens)

    @cached_property
    def groups_per_unit(self) -> int:
        return self.unit_tokens // self.S

    @cached_property
    def span_tokens(self) -> int:
        """Tokens that are summarised together, once the last of them is written: a group, or all groups of one mean."""
        return self.mean_tokens or self.S

    @cached_property
    def spans_per_unit(self) -> int:
        return self.unit_tokens // self.span_tokens

    @cached_property
    def groups_per_span(self) -> int:
        return self.span_tokens // self.S

    @cached_property
    def has_bounds(self) -> bool:
        """Return whether an error bound can be taken."""
        return self.own_bounds or self.bound_bits > 0

    @cached_property
    def own_bounds(self) -> bool:
        """Return whether the summary that estimates also bounds."""
        return self.method_spec.has_bounds(self)

    @cached_property
    def sums_heads(self) -> bool:
        """Return whether estimates of the query heads of a kv head can be summed (`SelectionConfig.combine`)."""
        return self.mean_tokens > 0 and not self.rq_bounds

    @cached_property
    def bound_store(self) -> "CacheConfig":
        """The summary that bounds, where it is another one: codes of single keys, in the same pool units."""
        return CacheConfig(
            method=table.KEY_CODES, bits=self.bound_bits, group_size=1, seed=self.seed, block_size=self.unit_tokens
        )


def dim_meanings(form: str = "{what} of {name}") -> str:
    """Return the meaning of `dim`, method by method."""
    having = table.names(lambda one: one.dim is not None)
    return ", ".join(
        form.format(what=table.method_spec(name).dim_means, name=name, default=table.method_spec(name).dim)
        for name in having
    )


def sized_method(text: str, choices: Sequence[str]) -> tuple[str, int | None]:
    """(method, tokens of a group or None) of a name such as rq or rq@2."""
    method, at, size = text.partition("@")
    require(
        method in choices, f"method {method[:40]!r} is unknown: choose among {', '.join(choices)}; rq@2: groups of 2"
    )
    # isdigit alone takes digits of other scripts and superscripts, which int does not
    sized = not at or (size.isascii() and size.isdigit() and len(size) <= 9)
    require(sized, f"{text[:40]!r} has no group size in tokens after the @: write {method}@16")
    return method, int(size) if at else None


def coded_methods() -> str:
    """The methods whose codes have bits."""
    return " or ".join(table.names(lambda one: one.coded))
