"""Settings of what a step reads of what is kept: how groups are chosen, and what is always selected."""

import math
from dataclasses import dataclass
from itertools import pairwise

from eps_core.errors import require
from eps_core.io.schema import current_modes
from eps_core.summaries.base import MethodSpec

POLICIES = ("topk", "threshold")
SCOPES = ("kv-head", "union")
# how the estimates of the query heads of one kv head become one: the largest; or the largest of their masses over that
# of the first token, which stands for the whole softmax (a head whose attention is spread wide counts as one whose
# attention is not), and of what is read last of codes the sum of these
COMBINES = ("max", "sum")
# nats: how far the first token's logit may move a query head against the others. Farther, a head whose first token
# holds nothing takes the whole list: single steps went to a KL of 1.0, where 6 nats still gave 0.8, 5 as much as max
ANCHOR_SPREAD = 4.0
# what one kv head does: selects groups, reads them all, or reads the sink and recent tokens alone
HEAD_MODES = ("sparse", "dense", "window")
MAX_CASCADE = 2
# what most methods want; a method's own are in its facts
DEFAULT_BUDGET, DEFAULT_SINK_RECENT = MethodSpec.budget, MethodSpec.sink_recent


@dataclass(frozen=True)
class SelectionConfig:
    """Settings of how one step reads a cache. They may differ from step to step, over the same `CacheConfig`."""

    policy: str = "topk"
    budget: float = DEFAULT_BUDGET  # topk: <= 1 a share of the tokens, > 1 a number; with sink and recent tokens
    # topk: tokens that a share of a short sequence is raised to, so that sequences up to this length are dense
    budget_floor: int = 0
    epsilon: float = 0.01  # strict: most bounded share left unread
    alpha: float = 1.1  # threshold: skip when B < T / alpha
    top_pages: int | None = None  # groups: topk's budget, threshold's M
    num_sink_tokens: int = DEFAULT_SINK_RECENT[0]  # always selected
    num_recent_tokens: int = DEFAULT_SINK_RECENT[1]
    scope: str = "kv-head"
    combine: str = "max"  # the query heads of a kv head: see `attention.protocol.Scores`
    strict: bool = False  # visit more until the bounded share unread is at most epsilon
    head_modes: tuple[tuple[str, ...], ...] | None = None  # of each layer and kv head; None: all are sparse
    min_context: int = 0  # tokens; below it decode is dense
    # codes of 1 bit: share of the groups, the best by that bit, of which the rescoring bit is read too
    rescore: float = 0.0
    # codes about a unit's mean: of the groups the shares whose codes are read further than the part before; none: whole
    cascade: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        require(self.policy in POLICIES, f"eps-policy {self.policy!r} is unknown: choose one of {', '.join(POLICIES)}")
        require(self.scope in SCOPES, f"eps-scope {self.scope!r} is unknown: choose one of {', '.join(SCOPES)}")
        require(
            self.combine in COMBINES, f"eps-combine {self.combine!r} is unknown: choose one of {', '.join(COMBINES)}"
        )
        require(
            self.combine == "max" or self.num_sink_tokens >= 1,
            f"eps-combine {self.combine} speaks of the first token, and eps-sink-tokens {self.num_sink_tokens} does "
            "not read it: use 1 or more, or eps-combine max",
        )
        require(
            self.budget > 0 and math.isfinite(self.budget) and (self.budget <= 1 or self.budget == int(self.budget)),
            f"eps-budget {self.budget} is no share above 0 and up to 1, and no whole number of tokens: use 0.1",
        )
        require(
            0 <= self.rescore <= 1,
            f"eps-rescore {self.rescore} is outside [0, 1]: it is a share of the groups; use 0.125",
        )
        self._check_cascade()
        require(0 <= self.epsilon <= 1, f"eps-epsilon {self.epsilon} is outside [0, 1]: it is a share of the softmax")
        require(self.alpha >= 1, f"eps-alpha {self.alpha} is below 1: raising it selects more; use 1.1")
        require(
            self.top_pages is None or self.top_pages >= 1,
            f"eps-top-pages {self.top_pages} must be at least 1 group: leave it out for no cap",
        )
        require(
            self.policy != "threshold" or self.top_pages is not None,
            "eps-policy threshold needs eps-top-pages: without it nothing would ever be skipped",
        )
        require(
            not self.strict or self.top_pages is None,
            f"eps-strict reads until the error bound holds and eps-top-pages {self.top_pages} forbids it: drop one",
        )
        if self.head_modes is not None:
            self._check_head_modes()
        for name in ("budget_floor", "num_sink_tokens", "num_recent_tokens", "min_context"):
            value = getattr(self, name)
            require(
                value >= 0,
                f"eps-{name.removeprefix('num_').replace('_', '-')} {value} is negative: use 0 or more tokens",
            )

    def _check_cascade(self) -> None:
        cascade = tuple(self.cascade)  # a list from JSON
        object.__setattr__(self, "cascade", cascade)
        words = ",".join(f"{share:g}" for share in cascade)
        require(
            len(cascade) <= MAX_CASCADE and all(0 < share <= 1 for share in cascade),
            f"eps-cascade {words} is not up to {MAX_CASCADE} shares of the groups within (0, 1]: use 0.25",
        )
        falling = (*cascade, self.rescore)
        require(
            not cascade or all(a >= b for a, b in pairwise(falling)),
            f"eps-cascade {words} and then eps-rescore {self.rescore:g} rise, and each reads on in groups of the one "
            "before: give falling shares",
        )

    def _check_head_modes(self) -> None:
        modes = current_modes(self.head_modes)  # lists come from JSON
        object.__setattr__(self, "head_modes", modes)
        unknown = sorted({mode for layer in modes for mode in layer} - set(HEAD_MODES))
        require(not unknown, f"head mode {', '.join(unknown)} is unknown: choose among {', '.join(HEAD_MODES)}")
        require(
            len(modes) > 0 and len({len(layer) for layer in modes}) == 1 and len(modes[0]) > 0,
            "head_modes needs the same number of kv heads, at least one, in each of its layers",
        )

    @property
    def reads_at_once(self) -> bool:
        """Return whether whole codes and the rescoring bits of all groups are read, whatever any of them says."""
        return not self.cascade and self.rescore == 1

    def dense_layer(self, layer: int) -> bool:
        """Return whether every kv head of a layer reads everything: nothing there needs a score."""
        return self.head_modes is not None and set(self.head_modes[layer]) == {"dense"}
