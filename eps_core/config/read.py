"""What a step reads of what is kept: how groups are chosen, and what is always visited."""

import math
from dataclasses import dataclass
from itertools import pairwise

from eps_core.errors import require
from eps_core.summaries.base import Facts

POLICIES = ("topk", "threshold")
SCOPES = ("kv-head", "union")
# how the estimates of the query heads of one kv head become one: the largest; or the largest of their masses over that
# of the first token, which stands for the whole softmax (a head whose attention is spread wide counts as one whose
# attention is not), and of what is read last of codes the sum of these
COMBINES = ("max", "sum")
# nats: how far the first token's logit may move a query head against the others. Farther, a head whose first token
# holds nothing takes the whole list: single steps went to a KL of 1.0, where 6 nats still gave 0.8, 5 as much as max
ANCHOR_SPREAD = 4.0
# what one kv head does: selects groups, reads them all, or reads the guards alone
HEAD_MODES = ("gate", "dense", "window")
MOST_STAGES = 2
# what most methods want; a method's own are in its facts
DEFAULT_BUDGET, DEFAULT_GUARDS = Facts.budget, Facts.guards


@dataclass(frozen=True)
class Read:
    """How one step reads a cache (design section 5): it may differ from step to step, over the same `Store`."""

    policy: str = "topk"
    budget: float = DEFAULT_BUDGET  # topk: <= 1 a share of the tokens, > 1 a number; with guards
    # topk: tokens that a share of a short sequence is raised to, so that sequences up to this length are dense
    budget_floor: int = 0
    epsilon: float = 0.01  # strict: most certified share left unread
    alpha: float = 1.1  # threshold: skip when B < T / alpha
    top_pages: int | None = None  # groups: topk's budget, threshold's M
    first_tokens: int = DEFAULT_GUARDS[0]  # always visited
    last_tokens: int = DEFAULT_GUARDS[1]
    scope: str = "kv-head"
    combine: str = "max"  # the query heads of a kv head: see `gate.protocol.Scores`
    strict: bool = False  # visit more until the certified share unread is at most epsilon
    head_modes: tuple[tuple[str, ...], ...] | None = None  # of each layer and kv head; None: all of them gate
    min_context: int = 0  # tokens; below it decode is dense
    # codes of 1 bit: share of the groups, the best by that bit, of which the second bit is read too
    refine: float = 0.0
    # codes about a unit's mean: of the groups the shares whose codes are read further than the part before; none: whole
    stages: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        require(self.policy in POLICIES, f"eps-policy {self.policy!r} is unknown: choose one of {', '.join(POLICIES)}")
        require(self.scope in SCOPES, f"eps-scope {self.scope!r} is unknown: choose one of {', '.join(SCOPES)}")
        require(
            self.combine in COMBINES, f"eps-combine {self.combine!r} is unknown: choose one of {', '.join(COMBINES)}"
        )
        require(
            self.combine == "max" or self.first_tokens >= 1,
            f"eps-combine {self.combine} speaks of the first token, and eps-first-tokens {self.first_tokens} does not "
            "read it: use 1 or more, or eps-combine max",
        )
        require(
            self.budget > 0 and math.isfinite(self.budget),
            f"eps-budget {self.budget} must be positive: a fraction up to 1, or a number of tokens above 1",
        )
        require(
            0 <= self.refine <= 1, f"eps-refine {self.refine} is outside [0, 1]: it is a share of the groups; use 0.125"
        )
        self._check_stages()
        require(0 <= self.epsilon <= 1, f"eps-epsilon {self.epsilon} is outside [0, 1]: it is a share of the softmax")
        require(self.alpha >= 1, f"eps-alpha {self.alpha} is below 1: raising it visits more; use 1.1")
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
            f"eps-strict reads until the certificate holds and eps-top-pages {self.top_pages} forbids it: drop one",
        )
        if self.head_modes is not None:
            self._check_head_modes()
        for name in ("budget_floor", "first_tokens", "last_tokens", "min_context"):
            value = getattr(self, name)
            require(value >= 0, f"eps-{name.replace('_', '-')} {value} is negative: use 0 or more tokens")

    def _check_stages(self) -> None:
        stages = tuple(self.stages)  # a list from JSON
        object.__setattr__(self, "stages", stages)
        words = ",".join(f"{share:g}" for share in stages)
        require(
            len(stages) <= MOST_STAGES and all(0 < share <= 1 for share in stages),
            f"eps-stages {words} is not up to {MOST_STAGES} shares of the groups within (0, 1]: use 0.25",
        )
        falling = (*stages, self.refine)
        require(
            not stages or all(a >= b for a, b in pairwise(falling)),
            f"eps-stages {words} and then eps-refine {self.refine:g} rise, and each reads on in groups of the one "
            "before: give falling shares",
        )

    def _check_head_modes(self) -> None:
        assert self.head_modes is not None
        # lists come from JSON: the frozen form is tuples
        modes = tuple(tuple(layer) for layer in self.head_modes)
        object.__setattr__(self, "head_modes", modes)
        unknown = sorted({mode for layer in modes for mode in layer} - set(HEAD_MODES))
        require(not unknown, f"head mode {', '.join(unknown)} is unknown: choose among {', '.join(HEAD_MODES)}")
        require(
            len(modes) > 0 and len({len(layer) for layer in modes}) == 1 and len(modes[0]) > 0,
            "head_modes needs the same number of kv heads, at least one, in each of its layers",
        )

    def dense_layer(self, layer: int) -> bool:
        """Whether every kv head of a layer reads everything: nothing there needs a score."""
        return self.head_modes is not None and set(self.head_modes[layer]) == {"dense"}
