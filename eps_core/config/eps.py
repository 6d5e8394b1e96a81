"""EpsConfig: what is kept and what a step reads, checked together, with one flat form for Python, flags and JSONL.

Everything that changes results lives here. `EpsConfig.from_dict(config.to_dict()) == config`, and unknown keys are
errors, so the first line of every JSONL says exactly what ran.
"""

import math
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from typing import Any, Self, get_type_hints

from eps_core.config.read import Read
from eps_core.config.store import Store, coded_methods
from eps_core.errors import ConfigError, require
from eps_core.files import records
from eps_core.summaries import table

# values of settings that older files leave out
EARLIER: dict[str, Any] = {"mean_tokens": 0, "mean_bits": 4, "stages": [], "budget_floor": 0, "combine": "max"}
_STORED = {field.name for field in fields(Store)} - {"bits", "second_bit", "parts"}
_GROUP = {"group_tokens", "group_blocks"}  # two ways to say one thing


@dataclass(frozen=True, eq=False, repr=False)
class EpsConfig:
    """Settings of sparse attention, named as the flags and in JSONL (`--eps-budget` is `budget`).

    A setting of None takes the default of the method, or what follows from other settings; `to_dict` has the values in
    effect. `store` (what a cache keeps) and `read` (what a step reads) are made of the settings, and two configs are
    equal where these are. Raises ConfigError for a value out of range, and for settings that exclude each other.

    >>> config = EpsConfig("rq", budget=0.05, last_tokens=256)
    >>> config.read.policy, config.read.last_tokens, config.replace(last_tokens=64).read.last_tokens
    ('topk', 256, 64)
    """

    method: str = table.OFF  # the summary of a group; off: dense attention
    _: KW_ONLY
    # summaries: fixed when a cache is made
    dim: int | None = None  # numbers of a summary, for the methods that have it
    mean_tokens: int | None = None  # rq: tokens of the block whose mean codes refer to: 32 or 64
    mean_bits: int | None = None  # rq: bits of one dimension of that mean: 4 or 8
    stages: tuple[float, ...] | None = None  # rq: shares of the groups whose codes are read further; (): all of them
    refine: float | None = None  # rq: share of the groups of which a second bit is read
    rq_bounds: bool | None = None  # rq: store what error bounds need, 6 bytes a group
    bound_bits: int | None = None  # 4 or 8: error bounds from codes of single keys; 0: the method's own
    tail_tokens: int | None = None  # tokens whose mean value stands for the skipped ones among them; 0: none
    group_tokens: int | None = None  # tokens of a group, up to 256
    group_blocks: int | None = None  # the same in pages
    # selection: may differ from step to step
    policy: str | None = None  # topk or threshold
    budget: float | None = None  # topk: share of the tokens (up to 1) or number of tokens that is read
    budget_floor: int | None = None  # topk: fewest tokens of a budget that is a share
    epsilon: float | None = None  # strict: largest bound of the softmax's share left unread
    alpha: float | None = None  # threshold: groups below T / alpha are skipped
    top_pages: int | None = None  # groups: topk's budget; a cap under other policies
    first_tokens: int | None = None  # sink tokens, always read
    last_tokens: int | None = None  # recent tokens, always read
    scope: str | None = None  # kv-head: a list of groups for each KV head; union: one for all
    combine: str | None = None  # scores of the query heads of a KV head: max or sum
    strict: bool | None = None  # read more until the bound of the unread share is at most epsilon
    head_modes: tuple[tuple[str, ...], ...] | None = None  # of each layer and KV head: gate, dense or window
    seed: int | None = None  # of random projections and signs
    min_context: int | None = None  # tokens; attention over fewer is dense
    block_size: int | None = None  # tokens of a page
    store: Store = field(init=False)
    read: Read = field(init=False)

    def __post_init__(self) -> None:
        given = self.given
        for name, value in given.items():
            records.check(name, value, _KINDS[name])
            object.__setattr__(self, name, deepcopy(value))  # a list is the caller's
        store = Store(**{name: value for name, value in given.items() if name in _STORED})
        read = self._read(store, given)
        if store.enabled:
            store = replace(store, second_bit=store.facts.coded and read.refine > 0, parts=1 + len(read.stages))
        object.__setattr__(self, "store", store)
        object.__setattr__(self, "read", read)
        self._check()

    @classmethod
    def over(cls, store: Store, read: Read | None = None) -> Self:
        """Return the config of a store and a read (None: the usual one) as they are: all settings count as given.
        Raises ConfigError where the store cannot be read so."""
        config = object.__new__(cls)
        config.__dict__.update(store=store, read=Read() if read is None else read)
        config.__dict__.update(config.to_dict())
        config._check()
        return config

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EpsConfig) and (self.store, self.read) == (other.store, other.read)

    def __hash__(self) -> int:
        return hash((self.store, self.read))

    def __repr__(self) -> str:
        return f"EpsConfig({', '.join(f'{name}={value!r}' for name, value in self.to_dict().items())})"

    @property
    def given(self) -> dict[str, Any]:
        """The settings that are not None, which `replace` keeps."""
        return {name: value for name in FLAT if (value := getattr(self, name)) is not None}

    def _check(self) -> None:
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
            f"for what method {store.method} keeps here: use max",
        )
        require(
            store.second_bit or not read.refine,
            f"eps-refine {read.refine} reads a second bit and the cache keeps none: make it with eps-refine",
        )

    @classmethod
    def of(cls, method: str = table.OFF, **flat: Any) -> Self:
        """Return the config of settings by name. Raises ConfigError for unknown names, too."""
        unknown = sorted(set(flat) - set(FLAT))
        require(not unknown, f"unknown EPS setting {', '.join(unknown)}: known are {', '.join(sorted(FLAT))}")
        return cls(method, **flat)

    @staticmethod
    def _read(store: Store, flat: dict[str, Any]) -> Read:
        """What is given of a read, and what follows for the rest of it."""
        facts = store.facts
        usual = facts.unit
        refine = min([0.0 if usual is None else usual.refine, *flat.get("stages", ())])
        least = flat.get("refine", refine)  # what is read on was read whole
        anchored = flat.get("first_tokens", facts.guards[0]) >= 1
        defaults = {
            "budget": facts.budget,
            # a budget that is given is read as it is
            "budget_floor": 0 if flat.keys() & {"budget", "top_pages"} else facts.budget_floor,
            "stages": () if usual is None or store.rq_bounds else tuple(max(part, least) for part in usual.stages),
            "refine": refine,
            "first_tokens": facts.guards[0],
            "last_tokens": facts.guards[1],
            "combine": "sum" if store.sums_heads and flat.get("policy", "topk") == "topk" and anchored else "max",
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
        refine, combine = 0.25 if store.second_bit else 0.0, "sum" if store.sums_heads else "max"
        return cls.over(store, Read(stages=(0.5,) * (store.parts - 1), refine=refine, combine=combine))

    def replace(self, **flat: Any) -> Self:
        """As if these flat settings had been given, too, or instead: what merely followed follows again. None: it is
        given no longer."""
        kept = self.given
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


# names of the settings in the order of the flat form: flags, JSONL, keyword arguments. `refine` and `stages` say both
# what is kept and what is read
FLAT = tuple(field.name for field in fields(EpsConfig) if field.init)
_KINDS = get_type_hints(EpsConfig)


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
