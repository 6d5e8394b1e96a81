"""Eviction: what part of a prompt's tokens a cache keeps, by which policy, and when it evicts more."""

import math
from dataclasses import asdict, dataclass, fields
from typing import Any, get_type_hints

from eps_core.config.eps import EpsConfig
from eps_core.errors import require
from eps_core.eviction.base import PolicySpec, Rule
from eps_core.eviction.table import policy
from eps_core.io import records
from eps_core.kv_cache.heads import COMPACTIONS

OFF = "off"


@dataclass(frozen=True)
class EvictionConfig:
    """How a run evicts.

    `policy`: off, or the rule that says which rows a head keeps. `share`: of a prompt's tokens, rows a head keeps at
    the end of its prefill (up to 1), or a number of rows; of a policy that keeps the prompt, a number of generated
    tokens. `every`: while decoding, heads that grew by so many rows over that are brought back to it, where the policy
    goes on; 0: never. `num_sink_tokens`, `num_recent_tokens`: never evicted; None: as many as the policy's `PolicySpec`
    say. `compact`: how the rows that stay are brought together while decoding: `repack` in the order of the tokens,
    `fill` by moving the fewest.
    """

    policy: str = OFF
    share: float = 1.0
    every: int = 128
    num_sink_tokens: int = 4
    num_recent_tokens: int | None = None
    compact: str = "repack"
    seed: int = 0

    def __post_init__(self) -> None:
        kinds = get_type_hints(type(self))
        for field in fields(self):
            records.check(field.name, getattr(self, field.name), kinds[field.name])
        if self.enabled:
            policy(self.policy)
        require(
            0 < self.share < math.inf, f"kv-keep {self.share} keeps nothing: give a share up to 1, or a number of rows"
        )
        require(
            self.share <= 1 or self.share == int(self.share),
            f"kv-keep {self.share} is neither a share up to 1 nor a whole number of rows",
        )
        require(self.every >= 0, f"kv-every {self.every} is negative: use 0 or more")
        require(
            self.num_recent_tokens is None or self.num_recent_tokens >= 1,
            f"kv-recent-tokens {self.num_recent_tokens} would let a head go empty: use 1 or more",
        )
        require(
            not self.enabled or not self.policy_spec.prompt or self.share > 1,
            f"kv-keep {self.share} is a share of the prompt, of which {self.policy} keeps all: give a number of "
            "generated tokens, 2 or more",
        )
        require(
            not self.enabled or self.every > 0 or self.policy_spec.at_prefill,
            f"kv-every 0 never evicts, and {self.policy} does so while decoding alone: give a number of rows",
        )
        Rule(self.num_sink_tokens, seed=self.seed)  # refuses what else is wrong with it
        require(
            self.compact in COMPACTIONS,
            f"kv-compact {self.compact!r} is unknown: choose one of {', '.join(COMPACTIONS)}",
        )

    @property
    def enabled(self) -> bool:
        return self.policy != OFF

    @property
    def policy_spec(self) -> PolicySpec:
        policy_spec: PolicySpec = policy(self.policy).SPEC
        return policy_spec

    def rule(self, budget: int) -> Rule:
        """Return the rule of the rows that are pinned where a head keeps `budget` rows."""
        last = self.policy_spec.num_recent_tokens if self.num_recent_tokens is None else self.num_recent_tokens
        return Rule(self.num_sink_tokens, int(last * budget) if last < 1 else int(last), self.seed)

    @property
    def _pinned(self) -> int:
        """The fewest rows among which all that is pinned fits."""
        last = (
            self.policy_spec.num_recent_tokens
            if self.enabled and self.num_recent_tokens is None
            else self.num_recent_tokens or 0
        )
        return math.ceil(self.num_sink_tokens / (1 - last)) if last < 1 else self.num_sink_tokens + int(last)

    def rows(self, num_tokens: int) -> int:
        """Rows that a head keeps of a prompt of `num_tokens` tokens, and is brought back to while it goes on: at least
        those that are never evicted, of which a short prompt has fewer. Policies that divide rows unevenly keep so many
        on average. Where a policy keeps the prompt, `num_tokens` are all of it but the last, which the first step
        reads."""
        if self.enabled and self.policy_spec.prompt:
            return num_tokens + 1 + max(int(self.share), self.rule(0).num_recent_tokens)
        wanted = math.ceil(self.share * num_tokens) if self.share <= 1 else int(self.share)
        return max(1, wanted, self._pinned)

    def most_rows(self, num_tokens: int, num_new: int) -> int:
        """Rows that a head may ever hold of a prompt of `num_tokens` tokens that goes on for `num_new`. Where policies
        divide rows unevenly, one head may hold all of them."""
        if not self.enabled or self.policy_spec.uneven:
            return num_tokens + num_new
        start = min(self.rows(num_tokens), num_tokens) if self.policy_spec.at_prefill else num_tokens
        if not (self.every and self.policy_spec.while_decoding):
            return start + num_new
        return min(start + num_new, max(start, self.rows(num_tokens) + self.every))

    def check(self, config: EpsConfig) -> None:
        """Raises ConfigError where EPS cannot read what is left as `config` says."""
        if not self.enabled or not config.cache_config.enabled:
            return
        require(
            config.selection_config.scope == "kv-head",
            f"kv-evict {self.policy} keeps other tokens in each head, and eps-scope {config.selection_config.scope} "
            "reads the same in all: use kv-head",
        )
        require(
            config.selection_config.head_modes is None,
            f"kv-evict {self.policy} gives every head pages of its own, which eps-heads retrieval does not know: leave "
            "it out",
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
