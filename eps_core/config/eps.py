"""Frozen configuration, checked at birth, and the byte arithmetic that follows from it.

Everything that changes results lives here. `EpsConfig.from_dict(config.to_dict()) == config`, and unknown keys are
errors, so the first line of every JSONL says exactly what ran.
"""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Self

from eps_core.config.read import HEAD_MODES, POLICIES, SCOPES
from eps_core.config.store import COARSE_GROUP_BLOCKS, MAX_GROUP_TOKENS
from eps_core.errors import _require

METHODS = ("off", "jl", "1pc", "fd", "box", "meanstd", "ball", "moments", "rq")
# for evaluation alone: true masses as estimates, by reading all of K, which its byte counts leave out
EVALUATION_METHODS = ("oracle",)
MEAN = "mean"  # not a way to score: the mean values that stand for skipped groups

# Each method's measured best group size in tokens (README, "Results"); None: the product requirements' coarse group
# of `COARSE_GROUP_BLOCKS` pages.
DEFAULT_GROUP_TOKENS: dict[str, int | None] = {
    "oracle": 16, "jl": None, "1pc": None, "fd": None, "box": 16, "meanstd": 16, "ball": 8, "moments": 8, "rq": 2,
}  # fmt: skip
# m of jl, l of fd (8 rows would need 522 MiB at 32 x 32 x 64k, 2 need 132 MiB), k of moments
NO_BOUNDS = {
    "oracle": "none: it evaluates estimates",
    "jl": "none: a random projection can miss a key entirely; add --eps-bound-bits 8",
    "meanstd": "none: mean plus deviation is below the largest logit at times; add --eps-bound-bits 8",
    "rq": "none without what they need in store: add --eps-bound-bits 8",
}
DEFAULT_BUDGET, FINE_BUDGET, DEFAULT_TAU = 0.1, 0.05, 0.001
DEFAULT_REFINE, DEFAULT_TAIL_TOKENS = 0.125, 64
# always visited, in tokens. rq ranks single tokens well enough to find the recent ones that matter by itself; the
# others need the wide guard (README, "Decisions")
DEFAULT_GUARDS, FINE_GUARDS = (16, 128), (4, 32)
DEFAULT_DIM = {"jl": 8, "fd": 2, "moments": 1}


@dataclass(frozen=True)
class EpsConfig:
    """What is summarised, how groups are chosen and what is always visited (design sections 3, 5, 7).

    What is None by default depends on the method and is settled at birth; only `tau`, `top_pages`, `dim` and, with
    method off, `group_tokens` can be None in a config.
    """

    method: str = "off"
    dim: int | None = None  # m of jl, l of fd, k of moments; None: the method's default
    bits: int = 1  # of one rq code
    # rq of 1 bit: share of the groups, the best by that bit, of which a second bit is read too
    refine: float = None  # type: ignore[assignment]
    rq_bounds: bool = False  # rq also stores residual norm, radius and key norm (fp16), and so has bounds
    bound_bits: int = 0  # 4 or 8: certify from codes of single keys instead of the method's own bounds
    # tokens whose mean value stands for the skipped groups among them; 0: these contribute nothing
    tail_tokens: int = None  # type: ignore[assignment]
    group_tokens: int | None = None  # S; None: the method's default, or group_blocks pages
    group_blocks: int | None = None  # S in pages
    policy: str = "topk"
    budget: float = None  # type: ignore[assignment]  # topk: <= 1 a share of the tokens, > 1 a number; with guards
    tau: float | None = None  # share: least estimated share of the softmax
    epsilon: float = 0.01  # mass: most estimated share left unread
    alpha: float = 1.1  # threshold: skip when B < T / alpha
    top_pages: int | None = None  # groups: topk's budget, threshold's M, a cap on share and mass
    first_tokens: int = None  # type: ignore[assignment]  # always visited
    last_tokens: int = None  # type: ignore[assignment]
    scope: str = "kv-head"
    strict: bool = False  # visit more until the certified share unread is at most epsilon
    head_modes: tuple[tuple[str, ...], ...] | None = None  # of each layer and kv head; None: all of them gate
    seed: int = 0
    min_context: int = 0  # tokens; below it decode is dense
    block_size: int = 16  # tokens per page

    def __post_init__(self) -> None:
        _require(
            self.method in (*METHODS, *EVALUATION_METHODS, MEAN),
            f"eps-method {self.method!r} is unknown: choose one of {', '.join(METHODS)}",
        )
        _require(self.policy in POLICIES, f"eps-policy {self.policy!r} is unknown: choose one of {', '.join(POLICIES)}")
        _require(self.scope in SCOPES, f"eps-scope {self.scope!r} is unknown: choose one of {', '.join(SCOPES)}")
        block = self.block_size
        _require(
            1 <= block <= MAX_GROUP_TOKENS,
            f"block-size {block} is outside 1 to {MAX_GROUP_TOKENS} tokens: use 16",
        )
        _require(
            self.group_tokens is None or self.group_blocks is None,
            f"eps-group-tokens {self.group_tokens} and eps-group-blocks {self.group_blocks} say the same thing twice: "
            "give one of them",
        )
        self._resolve()
        if self.method == "off":
            object.__setattr__(self, "tail_tokens", 0)
            return
        tokens = self.group_tokens
        if tokens is None and self.group_blocks is None:
            tokens = DEFAULT_GROUP_TOKENS[self.method]
        if tokens is None:
            blocks = COARSE_GROUP_BLOCKS if self.group_blocks is None else self.group_blocks
            _require(blocks >= 1, f"eps-group-blocks {blocks} must be at least 1 page: use {COARSE_GROUP_BLOCKS}")
            tokens = blocks * block
        _require(
            1 <= tokens <= MAX_GROUP_TOKENS,
            f"a group of {tokens} tokens is outside 1 to {MAX_GROUP_TOKENS}: "
            "lower eps-group-tokens or eps-group-blocks",
        )
        _require(
            block % tokens == 0 or tokens % block == 0,
            f"a group of {tokens} tokens neither divides the page of {block} tokens nor is a multiple of it: "
            "use a power of two, or change block-size",
        )
        object.__setattr__(self, "group_tokens", tokens)
        object.__setattr__(self, "group_blocks", None)
        unit = max(block, tokens)
        if self.tail_tokens is None:
            object.__setattr__(self, "tail_tokens", self._usual_tail() if self.method == "rq" else 0)
        _require(
            not self.tail_tokens or not self.has_norm_estimate,
            f"eps-tail mean needs estimates of masses, and those of method {self.method} are norms: use "
            "--eps-tail drop, or another method",
        )
        _require(
            self.tail_tokens == 0 or (unit <= self.tail_tokens <= MAX_GROUP_TOKENS and self.tail_tokens % unit == 0),
            f"eps-tail-tokens {self.tail_tokens} is not a multiple, up to {MAX_GROUP_TOKENS}, of the {unit} tokens of "
            f"a page or group: use {self._usual_tail()}, or 0 to drop what is skipped",
        )
        if self.dim is not None:
            _require(
                self.method in DEFAULT_DIM,
                f"eps-dim {self.dim} has no meaning for method {self.method}: it is m of jl, l of fd, k of moments; "
                "leave it out",
            )
            _require(1 <= self.dim <= 64, f"eps-dim {self.dim} is outside 1 to 64: use {DEFAULT_DIM[self.method]}")
        else:
            object.__setattr__(self, "dim", DEFAULT_DIM.get(self.method))
        _require(self.bits in (1, 2, 4, 8), f"eps-bits {self.bits} is not 1, 2, 4 or 8: use 1")
        _require(
            not self.rq_bounds or self.method == "rq",
            f"eps-rq-bounds belongs to method rq, not {self.method}: leave it out",
        )
        _require(
            self.bound_bits in (0, 4, 8),
            f"eps-bound-bits {self.bound_bits} is not 4 or 8, nor 0 for the method's own bounds: use 8",
        )
        _require(
            self.budget > 0 and math.isfinite(self.budget),
            f"eps-budget {self.budget} must be positive: a fraction up to 1, or a number of tokens above 1",
        )
        _require(
            self.tau is None or 0 < self.tau <= 1, f"eps-tau {self.tau} is outside (0, 1]: it is a share of the softmax"
        )
        _require(
            0 <= self.refine <= 1, f"eps-refine {self.refine} is outside [0, 1]: it is a share of the groups; use 0.125"
        )
        _require(
            not self.refine or (self.method == "rq" and self.bits == 1),
            f"eps-refine {self.refine} reads a second bit of 1-bit rq codes, not of method {self.method} with "
            f"{self.bits} bits: leave it out",
        )
        _require(0 <= self.epsilon <= 1, f"eps-epsilon {self.epsilon} is outside [0, 1]: it is a share of the softmax")
        _require(self.alpha >= 1, f"eps-alpha {self.alpha} is below 1: raising it visits more; use 1.1")
        _require(
            self.top_pages is None or self.top_pages >= 1,
            f"eps-top-pages {self.top_pages} must be at least 1 group: leave it out for no cap",
        )
        _require(
            self.policy != "threshold" or self.top_pages is not None,
            "eps-policy threshold needs eps-top-pages: without it nothing would ever be skipped",
        )
        _require(
            not self.strict or self.has_bounds,
            f"eps-strict needs bounds, and method {self.method} has {NO_BOUNDS[self.method]}"
            if self.method in NO_BOUNDS
            else "",
        )
        _require(
            not self.strict or self.top_pages is None,
            f"eps-strict reads until the certificate holds and eps-top-pages {self.top_pages} forbids it: drop one",
        )
        if self.head_modes is not None:
            self._check_head_modes()
        _require(self.seed >= 0, f"eps-seed {self.seed} is negative: use 0 or more")
        for name in ("first_tokens", "last_tokens", "min_context"):
            value = getattr(self, name)
            _require(value >= 0, f"eps-{name.replace('_', '-')} {value} is negative: use 0 or more tokens")

    def _resolve(self) -> None:
        """Settles what depends on method and policy: budget, tau, refinement, guards."""
        fine = self.method == "rq"
        guards = FINE_GUARDS if fine else DEFAULT_GUARDS
        defaults = {
            "budget": FINE_BUDGET if fine else DEFAULT_BUDGET,
            "tau": DEFAULT_TAU if self.policy == "share" else None,
            "refine": DEFAULT_REFINE if fine and self.bits == 1 else 0.0,
            "first_tokens": guards[0],
            "last_tokens": guards[1],
        }
        for name, value in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)

    def _usual_tail(self) -> int:
        """About DEFAULT_TAIL_TOKENS, in whole pages and groups."""
        unit = max(self.block_size, self.group_tokens or 0)
        return unit * max(DEFAULT_TAIL_TOKENS // unit, 1)

    def with_tail(self) -> Self:
        """The same with a tail of the usual length."""
        return replace(self, tail_tokens=self._usual_tail())

    def _check_head_modes(self) -> None:
        assert self.head_modes is not None
        # lists come from JSON: the frozen form is tuples
        modes = tuple(tuple(layer) for layer in self.head_modes)
        object.__setattr__(self, "head_modes", modes)
        unknown = sorted({mode for layer in modes for mode in layer} - set(HEAD_MODES))
        _require(not unknown, f"head mode {', '.join(unknown)} is unknown: choose among {', '.join(HEAD_MODES)}")
        _require(
            len(modes) > 0 and len({len(layer) for layer in modes}) == 1 and len(modes[0]) > 0,
            "head_modes needs the same number of kv heads, at least one, in each of its layers",
        )

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
    def bound_config(self) -> "EpsConfig":
        """The summary that bounds, where it is another one: codes of single keys, in the same pool units."""
        return EpsConfig(
            method="rq", bits=self.bound_bits, rq_bounds=True, group_tokens=1, tail_tokens=0, seed=self.seed,
            block_size=self.unit_tokens,
        )  # fmt: skip

    @property
    def tail_config(self) -> "EpsConfig":
        """The summary of values that stands for what is skipped, in the same pool units."""
        return EpsConfig(method=MEAN, group_tokens=self.tail_tokens, block_size=self.tail_tokens)

    @property
    def has_norm_estimate(self) -> bool:
        """Whether estimates are norms |K a|, never negative, and not logarithms of masses."""
        return self.method in ("jl", "1pc", "fd")

    def dense_layer(self, layer: int) -> bool:
        """Whether every kv head of a layer reads everything: nothing there needs a score."""
        return self.head_modes is not None and set(self.head_modes[layer]) == {"dense"}

    def reads_all(self, layer: int, lengths: Iterable[int]) -> bool:
        """Whether a step needs no score in a layer: it is dense, or every sequence is shorter than `min_context` or
        within the budget of topk."""
        budgeted = self.policy == "topk" and not (self.head_modes and "window" in self.head_modes[layer])
        return self.dense_layer(layer) or all(
            length < self.min_context or (budgeted and self.budget_groups(length) >= -(-length // self.S))
            for length in lengths
        )

    def budget_groups(self, length: int) -> int:
        """Groups that `topk` visits of a sequence of `length` tokens, guards included; at least 1, and all of them
        (the open one too) where the budget covers every token."""
        if self.top_pages is not None:
            return self.top_pages
        tokens = self.budget * length if self.budget <= 1 else self.budget
        if tokens >= length:
            return -(-length // self.S)
        # the small term undoes binary fractions: 0.1 * 40960 must be 4096 tokens
        return max(1, int(tokens / self.S + 1e-9))

    def refined_groups(self, length: int) -> int:
        """Groups of a sequence of `length` tokens, per kv head, whose second bit scoring reads."""
        return math.ceil(self.refine * -(-length // self.S)) if self.enabled else 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(data) - known)
        _require(not unknown, f"unknown EPS setting {', '.join(unknown)}: known are {', '.join(sorted(known))}")
        return cls(**data)
