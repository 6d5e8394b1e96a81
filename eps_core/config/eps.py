"""What is kept and what a step reads, together and checked at birth, with one flat form for flags and JSONL.

Everything that changes results lives here. `EpsConfig.from_dict(config.to_dict()) == config`, and unknown keys are
errors, so the first line of every JSONL says exactly what ran.
"""

import math
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self, get_type_hints

from eps_core.config.read import Read
from eps_core.config.store import Store, coded_methods
from eps_core.errors import ConfigError, require
from eps_core.files import records
from eps_core.summaries import table

# names and order of the flat form: flags, JSONL, keyword arguments. `refine` and `stages` say both what is kept and
# what is read
FLAT = (
    "method", "dim", "mean_tokens", "mean_bits", "stages", "refine", "rq_bounds", "bound_bits", "tail_tokens",
    "group_tokens", "group_blocks",
    "policy", "budget", "budget_floor", "epsilon", "alpha", "top_pages",
    "first_tokens", "last_tokens", "scope", "combine", "strict",
    "head_modes", "seed", "min_context", "block_size",
)  # fmt: skip
_STORED = {field.name for field in fields(Store)} - {"bits", "second_bit", "parts"}
_GROUP = {"group_tokens", "group_blocks"}  # two ways to say one thing
_KINDS = {**get_type_hints(Store), **get_type_hints(Read)}


@dataclass(frozen=True)
class EpsConfig:
    """What is summarised, how groups are chosen and what is always visited (design sections 3, 5, 7)."""

    store: Store = Store()  # noqa: RUF009  frozen
    read: Read = Read()  # noqa: RUF009
    # the flat settings that `of` was given, which `replace` keeps: all others follow from these, and make no config
    # another one. None: made of a store and a read, and so given all that these say in the flat form
    given: dict[str, Any] | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        store, read = self.store, self.read
        if not store.enabled:  # the rollback: what it would have read is nobody's concern
            return
        require(
            not read.strict or store.has_bounds,
            f"eps-strict needs bounds, and method {store.method} has {store.facts.no_bounds}",
        )
        require(
            not read.refine or store.facts.coded,
            f"eps-refine {read.refine} reads a second bit of {coded_methods()} codes, not of method {store.method}: "
            "leave it out",
        )
        require(
            len(read.stages) < store.parts,
            f"eps-stages {','.join(map(str, read.stages))} reads codes in more parts than the {store.parts} that the "
            "cache keeps: make it with these eps-stages",
        )
        require(
            read.combine == "max" or store.sums_heads,
            f"eps-combine {read.combine} is for {coded_methods()} codes without bounds of their own, not "
            f" for what method {store.method} keeps here: use max",
        )
        require(
            store.second_bit or not read.refine,
            f"eps-refine {read.refine} reads a second bit and the cache keeps none: make it with eps-refine",
        )

    @classmethod
    def of(cls, method: str = "off", **flat: Any) -> Self:
        """From flat settings; what is left out, or None, is the method's own. Raises ConfigError for unknown names and
        for values out of range."""
        flat["method"] = method
        unknown = sorted(set(flat) - set(FLAT))
        require(not unknown, f"unknown EPS setting {', '.join(unknown)}: known are {', '.join(sorted(FLAT))}")
        flat = {name: value for name, value in flat.items() if value is not None}
        for name, value in flat.items():
            records.check(name, value, _KINDS[name])
        store = Store(**{name: value for name, value in flat.items() if name in _STORED})
        read = cls._read(store, flat)
        if store.enabled:
            store = replace(store, second_bit=store.facts.coded and read.refine > 0, parts=1 + len(read.stages))
        config = cls(store, read)
        object.__setattr__(config, "given", deepcopy(flat))
        return config

    @staticmethod
    def _read(store: Store, flat: dict[str, Any]) -> Read:
        """What is given of a read, and what follows for the rest of it."""
        facts = store.facts
        usual = facts.unit
        refine = min([0.0 if usual is None else usual.refine, *flat.get("stages", ())])
        least = flat.get("refine", refine)  # what is read on was read whole
        defaults = {
            "budget": facts.budget,
            # a budget that is given is read as it is
            "budget_floor": 0 if flat.keys() & {"budget", "top_pages"} else facts.budget_floor,
            "stages": () if usual is None or store.rq_bounds else tuple(max(part, least) for part in usual.stages),
            "refine": refine,
            "first_tokens": facts.guards[0],
            "last_tokens": facts.guards[1],
        }
        try:
            return Read(**{**defaults, **{name: value for name, value in flat.items() if name not in _STORED}})
        except ConfigError:
            if store.enabled:
                raise
            # off must always be there to fall back to; only what is misspelt is refused
            return Read(policy=flat.get("policy", "topk"), scope=flat.get("scope", "kv-head"))

    @classmethod
    def reading(cls, store: Store) -> Self:
        """A read of everything that a store keeps, whatever its method's usual one is: for checks."""
        return cls(store, Read(stages=(0.5,) * (store.parts - 1), refine=0.25 if store.second_bit else 0.0))

    def replace(self, **flat: Any) -> Self:
        """As if these flat settings had been given, too, or instead: what merely followed follows again. None: it is
        given no longer."""
        kept = self.to_dict() if self.given is None else self.given
        if flat.keys() & _GROUP:
            kept = {name: value for name, value in kept.items() if name not in _GROUP}
        return type(self).of(**{**kept, **flat})

    def with_tail(self) -> Self:
        """The same with a tail of the usual length."""
        return self.replace(tail_tokens=self.store.with_tail().tail_tokens) if self.store.enabled else self

    def reads_all(self, layer: int, lengths: Iterable[int]) -> bool:
        """Whether a step needs no score in a layer: it is dense, or every sequence is shorter than `min_context` or
        within the budget of topk."""
        read, size = self.read, self.store.S
        budgeted = read.policy == "topk" and not (read.head_modes and "window" in read.head_modes[layer])
        return read.dense_layer(layer) or all(
            length < read.min_context or (budgeted and self.budget_groups(length) >= -(-length // size))
            for length in lengths
        )

    @property
    def sparse_from(self) -> int | None:
        """Fewest tokens of a sequence of which a step leaves any unread; None: none are."""
        read = self.read
        least = read.first_tokens + read.last_tokens
        if read.policy == "topk":
            if read.top_pages is not None:
                least = max(least, read.top_pages * self.store.S)
            elif read.budget == 1:
                return None
            else:
                least = max(least, read.budget_floor, int(read.budget))
        return max(least + 1, read.min_context)

    def budget_groups(self, length: int) -> int:
        """Groups that `topk` visits of a sequence of `length` tokens, guards included; at least 1, and all of them
        (the open one too) where the budget covers every token."""
        if self.read.top_pages is not None:
            return self.read.top_pages
        read = self.read
        tokens = max(read.budget * length, read.budget_floor) if read.budget <= 1 else read.budget
        if tokens >= length:
            return -(-length // self.store.S)
        # the small term undoes binary fractions: 0.1 * 40960 must be 4096 tokens
        return max(1, int(tokens / self.store.S + 1e-9))

    def refined_groups(self, length: int) -> int:
        """Groups of a sequence of `length` tokens, per kv head, whose second bit scoring reads."""
        return self._scored(self.read.refine, length) if self.store.enabled and self.read.refine else 0

    def _scored(self, share: float, length: int) -> int:
        """Groups that scoring reads on in: a share of all, and under topk at least twice those that are selected, which
        a coarser score would otherwise choose. It costs little beside reading these."""
        groups = -(-length // self.store.S)
        selected = self.budget_groups(length) if self.read.policy == "topk" else 0
        return max(math.ceil(share * groups), min(2 * selected, groups))

    def staged_groups(self, length: int, head_dim: int) -> tuple[int, ...]:
        """Groups of a sequence of `length` tokens, per kv head, of whose codes scoring reads each part after the first.
        Parts that no stage speaks of are read of all; a head dim of fewer parts than stages has the last of them."""
        later = table.num_parts(self.store, head_dim) - 1
        stages = ((1.0,) * later + self.read.stages)[len(self.read.stages) :]
        return tuple(self._scored(share, length) for share in stages)

    def to_dict(self) -> dict[str, Any]:
        """The flat form, in the order of FLAT."""
        flat = {name: getattr(self.store if name in _STORED else self.read, name) for name in FLAT}
        return flat | {"stages": list(self.read.stages)}  # as JSON gives it back

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """The flat form back, exactly as it was written, and all of it given."""
        return cls.of(**data)


def config_of(config: EpsConfig | None, settings: dict[str, Any]) -> EpsConfig:
    """A config or flat settings; off where there is neither."""
    if not settings:
        return config or EpsConfig()
    require(config is None, f"config and {next(iter(settings))} say two things: give one of them")
    made = EpsConfig.of(**settings)
    idle = sorted(set(settings) - {"method", "block_size"})
    if idle and "method" not in settings:
        raise ConfigError(f'{idle[0]} means nothing while EPS is off: add method="rq"')
    return made
