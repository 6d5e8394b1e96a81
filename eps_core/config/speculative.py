"""Verified decoding: sparse steps draft, one dense pass verifies."""

from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Self, get_type_hints

from eps_core.config.eps import EpsConfig
from eps_core.config.formats import WEIGHT_BITS
from eps_core.config.selection import SelectionConfig
from eps_core.errors import require
from eps_core.io import records

MODES = ("off", "tokens")
MOST_DRAFTS = 64
# share and tokens: a wrong draft costs time and never the text, so drafts need no safe budget
DRAFT_BUDGET, DRAFT_BUDGET_FLOOR = 0.05, 128
DEFAULT_DRAFTS = 12  # about the fewest bytes a token on both of our models; time asks for fewer, or none


@dataclass(frozen=True)
class SpeculativeConfig:
    """How a run drafts and verifies. It changes what a text costs and, but for ties of rounding, not the text.

    `mode`: off; tokens, the dense text but where two logits are closer than rounding.
    `draft`: drafts a round, None for as many as measured acceptance and costs make worth it, 0 to `most`.
    A draft is accepted where it is the token that dense decoding draws with the same noise.
    `weights`: of the drafting model.
    """

    mode: str = "off"
    draft: int | None = DEFAULT_DRAFTS
    most: int = 16
    weights: str = "full"

    def __post_init__(self) -> None:
        kinds = get_type_hints(type(self))
        for field in fields(self):
            records.check(field.name, getattr(self, field.name), kinds[field.name])
        for name, flag, known in (
            ("mode", "eps-verify", MODES),
            ("weights", "eps-draft-weights", tuple(WEIGHT_BITS)),
        ):
            value = getattr(self, name)
            require(value in known, f"{flag} {value!r} is unknown: choose one of {', '.join(known)}")
        require(1 <= self.most <= MOST_DRAFTS, f"eps-draft-most {self.most} is outside 1 to {MOST_DRAFTS} tokens")
        require(
            self.draft is None or 0 <= self.draft <= self.most,
            f"eps-draft {self.draft} is outside 0 to {self.most} (eps-draft-most) tokens: or use auto",
        )

    @classmethod
    def of(cls, **named: Any) -> Self:
        """Return the config of the fields named: without `draft` among them, no more drafts than a smaller `most`."""
        most = named.get("most")
        if "draft" not in named and isinstance(most, int):
            named["draft"] = min(DEFAULT_DRAFTS, max(most, 0))  # a number that is out of range is told by its own name
        return cls(**named)

    @property
    def enabled(self) -> bool:
        return self.mode != "off"

    def check(
        self, config: EpsConfig, temperature: float = 0.0, sample_by: str = "gumbel", audit_every: int = 0
    ) -> None:
        """Raises ConfigError where a run with `config`, drawing and audited so, cannot be verified so."""
        if not self.enabled:
            return
        enabled = config.cache_config.enabled
        require(enabled, f"eps-verify {self.mode} drafts with sparse steps, and method off is dense: use rq")
        require(
            not temperature or sample_by == "gumbel",
            f"eps-verify {self.mode} at temperature {temperature} couples drafts by Gumbel noise, and sample-by "
            f"{sample_by} draws otherwise: use sample-by gumbel",
        )
        require(not audit_every, f"eps-verify {self.mode} audits every draft as it is: drop audit-every")

    def draft_selection(self, config: SelectionConfig) -> SelectionConfig:
        """Return how a draft step selects: where a floor above `DRAFT_BUDGET_FLOOR` makes a budget safe, that floor and
        at most `DRAFT_BUDGET`; and recent tokens that cover all drafts, which have no summaries."""
        if config.budget_floor > DRAFT_BUDGET_FLOOR and config.budget <= 1:
            config = replace(config, budget=min(config.budget, DRAFT_BUDGET), budget_floor=DRAFT_BUDGET_FLOOR)
        return replace(config, num_recent_tokens=max(config.num_recent_tokens, self.most + 1))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
