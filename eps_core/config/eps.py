"""EpsConfig: what is kept and what a step reads, checked together, with one flat form for Python, flags and JSONL.

Everything that changes results lives here. `EpsConfig.of(**config.to_dict()) == config`, and unknown keys are errors,
so the first line of every JSONL says exactly what ran.
"""

import math
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from functools import lru_cache
from typing import Any, Self, get_type_hints

from eps_core.config.cache import METHODS, CacheConfig, coded_methods
from eps_core.config.selection import SelectionConfig
from eps_core.errors import ConfigError, require, shown
from eps_core.io import records
from eps_core.io.schema import current_settings
from eps_core.summaries import table

_STORED = {field.name for field in fields(CacheConfig)} - {"bits", "second_bit", "parts"}
_GROUP = {"group_size", "group_blocks"}  # two ways to say one thing


@dataclass(frozen=True, eq=False, repr=False)
class EpsConfig:
    """Settings of sparse attention, named as the flags and in JSONL (`--eps-budget` is `budget`).

    A setting of None takes the default of the method, or what follows from other settings; `to_dict` has the values in
    effect. `cache_config` (what a cache keeps) and `selection_config` (what a step reads) are made of the settings, and
    two configs are equal where these are. Raises ConfigError for a value out of range, and for settings that exclude
    each other.

    >>> config = EpsConfig("rq", budget=0.05, num_recent_tokens=256)
    >>> config.selection_config.policy, config.selection_config.num_recent_tokens
    ('topk', 256)
    >>> config.replace(num_recent_tokens=64).selection_config.num_recent_tokens
    64
    """

    method: str = table.OFF  # the summary of a group; off: dense attention
    _: KW_ONLY
    # summaries: fixed when a cache is made
    dim: int | None = None  # numbers of a summary, for the methods that have it
    mean_tokens: int | None = None  # rq: tokens of the block whose mean codes refer to: 32 or 64
    cascade: tuple[float, ...] | None = None  # rq: shares of the groups whose codes are read further; (): all of them
    rescore: float | None = None  # rq: share of the groups of which a rescoring bit is read
    rq_bounds: bool | None = None  # rq: store what error bounds need, 6 bytes a group
    bound_bits: int | None = None  # 4 or 8: error bounds from codes of single keys; 0: the method's own
    group_size: int | None = None  # tokens of a group, up to 256
    group_blocks: int | None = None  # the same in pages
    # selection: may differ from step to step
    policy: str | None = None  # topk or threshold
    budget: float | None = None  # topk: share of the tokens (up to 1) or number of tokens that is read
    budget_floor: int | None = None  # topk: fewest tokens of a budget that is a share
    epsilon: float | None = None  # strict: largest bound of the softmax's share left unread
    alpha: float | None = None  # threshold: groups below T / alpha are skipped
    top_pages: int | None = None  # groups: topk's budget; a cap under other policies
    num_sink_tokens: int | None = None  # sink tokens, always read
    num_recent_tokens: int | None = None  # recent tokens, always read
    scope: str | None = None  # kv-head: a list of groups for each KV head; union: one for all
    combine: str | None = None  # scores of the query heads of a KV head: max or sum
    strict: bool | None = None  # read more until the bound of the unread share is at most epsilon
    head_modes: tuple[tuple[str, ...], ...] | None = None  # of each layer and KV head: sparse, dense or window
    seed: int | None = None  # of random projections and signs
    min_context: int | None = None  # tokens; attention over fewer is dense
    block_size: int | None = None  # tokens of a page
    cache_config: CacheConfig = field(init=False)
    selection_config: SelectionConfig = field(init=False)

    def __post_init__(self) -> None:
        given = self.given
        for name, value in given.items():
            records.check(name, value, _KINDS[name])
            object.__setattr__(self, name, deepcopy(value))  # a list is the caller's
        cache_config = CacheConfig(**{name: value for name, value in given.items() if name in _STORED})
        selection_config = self._read(cache_config, given)
        if cache_config.enabled:
            cache_config = replace(
                cache_config,
                second_bit=cache_config.method_spec.coded and selection_config.rescore > 0,
                parts=1 + len(selection_config.cascade),
            )
        object.__setattr__(self, "cache_config", cache_config)
        object.__setattr__(self, "selection_config", selection_config)
        self._check()

    @classmethod
    def over(cls, cache_config: CacheConfig, selection_config: SelectionConfig | None = None) -> Self:
        """Return the config of a store and a read (None: the usual one) as they are: all settings count as given.
        Raises ConfigError where the store cannot be read so."""
        return cls._over(cache_config, SelectionConfig() if selection_config is None else selection_config)

    @classmethod
    @lru_cache  # every step asks
    def _over(cls, cache_config: CacheConfig, selection_config: SelectionConfig) -> Self:
        config = object.__new__(cls)
        config.__dict__.update(cache_config=cache_config, selection_config=selection_config)
        config.__dict__.update(config.to_dict())
        config._check()
        return config

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EpsConfig) and (
            self.cache_config == other.cache_config and self.selection_config == other.selection_config
        )

    def __hash__(self) -> int:
        return hash((self.cache_config, self.selection_config))

    def __repr__(self) -> str:
        return f"EpsConfig({', '.join(f'{name}={value!r}' for name, value in self.to_dict().items())})"

    @property
    def given(self) -> dict[str, Any]:
        """The settings that are not None, which `replace` keeps."""
        return {name: value for name in FLAT if (value := getattr(self, name)) is not None}

    def _check(self) -> None:
        cache_config, selection_config = self.cache_config, self.selection_config
        if not cache_config.enabled:  # the rollback: there is nothing to validate
            return
        require(
            not selection_config.strict or cache_config.has_bounds,
            f"eps-strict needs bounds, and method {cache_config.method} has {cache_config.method_spec.no_bounds}",
        )
        require(
            not selection_config.rescore or cache_config.method_spec.coded,
            f"eps-rescore {selection_config.rescore} reads a rescoring bit of {coded_methods()} codes, not of "
            f"method {cache_config.method}: leave it out",
        )
        require(
            len(selection_config.cascade) < cache_config.parts,
            f"eps-cascade {','.join(map(str, selection_config.cascade))} reads codes in more parts than the "
            f"{cache_config.parts} that the cache keeps: make it with these eps-cascade",
        )
        require(
            selection_config.combine == "max" or cache_config.sums_heads,
            f"eps-combine {selection_config.combine} is for {coded_methods()} codes without bounds of their own, not "
            f"for what method {cache_config.method} keeps here: use max",
        )
        require(
            cache_config.second_bit or not selection_config.rescore,
            f"eps-rescore {selection_config.rescore} reads a rescoring bit and the cache keeps none: make it with "
            "eps-rescore",
        )

    @classmethod
    def of(cls, method: str = table.OFF, **flat: Any) -> Self:
        """Return the config of settings by name. Raises ConfigError for unknown names, too."""
        flat = current_settings({"method": method, **flat})
        unknown = sorted(set(flat) - set(FLAT))
        require(not unknown, f"unknown EPS setting {', '.join(unknown)}: known are {', '.join(sorted(FLAT))}")
        return cls(**flat)

    @staticmethod
    def _read(cache_config: CacheConfig, flat: dict[str, Any]) -> SelectionConfig:
        """Return the settings of a read: those that are given, and what follows for the rest."""
        method_spec = cache_config.method_spec
        usual = method_spec.unit
        rescore = min([0.0 if usual is None else usual.rescore, *flat.get("cascade", ())])
        least = flat.get("rescore", rescore)  # what is read on was read whole
        stages = () if usual is None or cache_config.rq_bounds else usual.cascade
        anchored = flat.get("num_sink_tokens", method_spec.sink_recent[0]) >= 1
        sums = cache_config.sums_heads and flat.get("policy", "topk") == "topk" and anchored
        defaults = {
            "budget": method_spec.budget,
            # a budget that is given is read as it is
            "budget_floor": 0 if flat.keys() & {"budget", "top_pages"} else method_spec.budget_floor,
            "cascade": tuple(max(part, least) for part in stages),
            "rescore": rescore,
            "num_sink_tokens": method_spec.sink_recent[0],
            "num_recent_tokens": method_spec.sink_recent[1],
            "combine": "sum" if sums else "max",
        }
        try:
            return SelectionConfig(**defaults | {name: value for name, value in flat.items() if name not in _STORED})
        except ConfigError:
            if cache_config.enabled:
                raise
            # off must always be there to fall back to; only what is misspelt is refused
            return SelectionConfig(policy=flat.get("policy", "topk"), scope=flat.get("scope", "kv-head"))

    @classmethod
    def reading(cls, cache_config: CacheConfig, device: str) -> Self:
        """A read of all that a store keeps, as a device does it, whatever its method's usual one is: for checks."""
        some = 1.0 if device == "cuda" and cache_config.parts == 1 else 0.25  # `for_device`
        rescore, combine = some if cache_config.second_bit else 0.0, "sum" if cache_config.sums_heads else "max"
        return cls.over(
            cache_config, SelectionConfig(cascade=(0.5,) * (cache_config.parts - 1), rescore=rescore, combine=combine)
        )

    def replace(self, **flat: Any) -> Self:
        """As if these flat settings had been given, too, or instead: what merely followed follows again. None: it is
        given no longer."""
        flat, kept = current_settings({"method": self.method, **flat}), self.given
        if flat.keys() & _GROUP:
            kept = {name: value for name, value in kept.items() if name not in _GROUP}
        return type(self).of(**{**kept, **flat})

    def for_device(self, device: str) -> Self:
        """The same for a cache on a device. A GPU of CUDA scores codes at once: reading them in stages saves bytes and
        takes longer there (results/gpu.md). What was given stays."""
        if device != "cuda" or self.cache_config.parts == 1 or {"cascade", "rescore"} & self.given.keys():
            return self
        return self.replace(cascade=(), rescore=1.0)

    def reads_all(self, layer: int, lengths: Iterable[int]) -> bool:
        """Return whether a step needs no score in a layer: it is dense, or every sequence is shorter than `min_context`
        or within the budget of topk."""
        selection_config, size = self.selection_config, self.cache_config.S
        budgeted = selection_config.policy == "topk" and not (
            selection_config.head_modes and "window" in selection_config.head_modes[layer]
        )
        return selection_config.dense_layer(layer) or all(
            length < selection_config.min_context or (budgeted and self.budget_groups(length) >= -(-length // size))
            for length in lengths
        )

    @property
    def sparse_from(self) -> int | None:
        """Fewest tokens of a sequence of which a step leaves any unread; None: none are."""
        selection_config = self.selection_config
        least = selection_config.num_sink_tokens + selection_config.num_recent_tokens
        if selection_config.policy == "topk":
            if selection_config.top_pages is not None:
                least = max(least, selection_config.top_pages * self.cache_config.S)
            elif selection_config.budget == 1:
                return None
            else:
                least = max(least, selection_config.budget_floor, int(selection_config.budget))
        return max(least + 1, selection_config.min_context)

    def budget_groups(self, length: int) -> int:
        """Groups that `topk` selects of a sequence of `length` tokens, sink and recent tokens included; at least 1, and
        all of them (the open one too) where the budget covers every token."""
        selection_config = self.selection_config
        if selection_config.top_pages is not None:
            return selection_config.top_pages
        tokens = selection_config.budget
        if tokens <= 1:
            tokens = max(tokens * length, selection_config.budget_floor)
        if tokens >= length:
            return -(-length // self.cache_config.S)
        # the small term undoes binary fractions: 0.1 * 40960 must be 4096 tokens
        return max(1, int(tokens / self.cache_config.S + 1e-9))

    def rescored_groups(self, length: int) -> int:
        """Groups of a sequence of `length` tokens, per kv head, whose rescoring bit scoring reads."""
        share = self.selection_config.rescore
        return self._scored(share, length) if self.cache_config.enabled and share else 0

    def _scored(self, share: float, length: int) -> int:
        """Groups that scoring reads on in: a share of all, and under topk at least twice those that are selected, which
        a coarser score would otherwise choose. It costs little beside reading these."""
        groups = -(-length // self.cache_config.S)
        selected = self.budget_groups(length) if self.selection_config.policy == "topk" else 0
        return max(math.ceil(share * groups), min(2 * selected, groups))

    def cascade_groups(self, length: int, head_dim: int) -> tuple[int, ...]:
        """Groups of a sequence of `length` tokens, per kv head, of whose codes scoring reads each part after the first.
        Parts that no stage speaks of are read of all; a head dim of fewer parts than stages has the last of them."""
        later = table.num_parts(self.cache_config, head_dim) - 1
        cascade = ((1.0,) * later + self.selection_config.cascade)[len(self.selection_config.cascade) :]
        return tuple(self._scored(share, length) for share in cascade)

    def to_dict(self) -> dict[str, Any]:
        """The flat form, in the order of FLAT."""
        flat = {name: getattr(self.cache_config if name in _STORED else self.selection_config, name) for name in FLAT}
        return flat | {"cascade": list(self.selection_config.cascade)}  # as JSON gives it back


# names of the settings in the order of the flat form: flags, JSONL, keyword arguments. `rescore` and `cascade` say both
# what is kept and what is read
FLAT = tuple(field.name for field in fields(EpsConfig) if field.init)
_KINDS = get_type_hints(EpsConfig)


def config_of(config: EpsConfig | None, settings: dict[str, Any]) -> EpsConfig:
    """A config or flat settings; off where there is neither."""
    right = config is None or isinstance(config, EpsConfig)
    require(right, f"config {shown(config)} is not an EpsConfig: give one, or its settings by name")
    if not settings:
        return check_offered(config or EpsConfig())
    require(config is None, f"config and {next(iter(settings))} say two things: give one of them")
    made = EpsConfig.of(**settings)
    idle = sorted(set(settings) - {"method", "block_size"})
    if idle and "method" not in settings:
        raise ConfigError(f'{idle[0]} means nothing while EPS is off: add method="rq"')
    return check_offered(made)


def check_offered(config: EpsConfig) -> EpsConfig:
    """Return the config that a user gave. Raises ConfigError where its method is no estimate: it only bounds the groups
    of others."""
    method = config.cache_config.method
    require(
        config.cache_config.method_spec.role != "bounds",
        f"method {method!r} only bounds the groups of other methods (bound_bits): choose one of {', '.join(METHODS)}",
    )
    return config
