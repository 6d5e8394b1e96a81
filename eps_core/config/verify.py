"""Verified decoding: sparse steps draft, one dense pass verifies."""

from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Self, get_type_hints

from eps_core.config.eps import EpsConfig
from eps_core.config.read import Read
from eps_core.errors import require
from eps_core.files import records

MODES = ("off", "tokens")
DRAFT_WEIGHTS = ("full", "4bit")
MOST_DRAFTS = 64
DRAFT_FLOOR = 128  # tokens: a wrong draft costs time and never the text, so a draft needs no safe budget
DEFAULT_DRAFTS = 12  # about the fewest bytes a token on both of our models; time asks for fewer, or none


@dataclass(frozen=True)
class Verify:
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
            ("weights", "eps-draft-weights", DRAFT_WEIGHTS),
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
        """Of the fields that a user names: where `draft` is not among them, no more drafts than a smaller `most`."""
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
        store = config.store
        require(store.enabled, f"eps-verify {self.mode} drafts with gated steps and method off gates nothing: use rq")
        require(
            not temperature or sample_by == "gumbel",
            f"eps-verify {self.mode} at temperature {temperature} couples drafts by Gumbel noise, and sample-by "
            f"{sample_by} draws otherwise: use sample-by gumbel",
        )
        require(not audit_every, f"eps-verify {self.mode} audits every draft as it is: drop audit-every")

    def draft_read(self, read: Read) -> Read:
        """Return how a draft step selects: at least `DRAFT_FLOOR` tokens in place of a larger floor, and recent tokens
        that cover all drafts, which have no summaries."""
        last_tokens = max(read.last_tokens, self.most + 1)
        return replace(read, last_tokens=last_tokens, budget_floor=min(read.budget_floor, DRAFT_FLOOR))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
