"""The cells of a grid as asked for: axes and their values, and the config that each combination names."""

import itertools
import re
from dataclasses import dataclass, fields
from math import prod
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from eps_core.config.cache import EVALUATION_METHODS, METHODS
from eps_core.config.eps import EpsConfig
from eps_core.config.formats import WEIGHT_BITS
from eps_core.config.selection import POLICIES, SCOPES
from eps_core.config.speculative import MODES, SpeculativeConfig
from eps_core.errors import ConfigError, brief, shown
from eps_core.io import inputs
from eps_core.io.records import Between, read_record

HeadModes = tuple[tuple[str, ...], ...]
AtLeastOne = Annotated[int, Between(1, 2**40)]


@dataclass(frozen=True)
class Setting:
    """One cell as asked for. None leaves a value to its default; `first_n` and `last_n` are in groups,
    `group_blocks` in pages.

    Under policy threshold the heap (`top_pages`, in groups) is as large as `budget` buys unless it is given.
    """

    context: AtLeastOne = 4096  # tokens that the last decode step attends
    batch: AtLeastOne = 1  # documents decoded together
    method: str = "rq"
    policy: str = "topk"
    dim: int | None = None  # m of jl, l of fd, k of moments
    alpha: float | None = None
    last_n: int | None = None
    group_blocks: int | None = None
    group_size: int | None = None
    budget: float | None = None
    top_pages: int | None = None
    epsilon: float | None = None
    heads: str = "all"
    strict: bool = False
    bound_bits: int | None = None
    mean_tokens: int | None = None  # rq: see `CacheConfig`
    cascade: str | None = None  # as --eps-cascade takes them
    rescore: float | None = None
    scope: str = "kv-head"
    first_n: int | None = None
    # verified decoding: documents then go on by themselves, drawn with `temperature`
    verify: str = "off"
    draft: int | None = None
    draft_auto: bool = False
    draft_weights: str = "full"
    temperature: float = 0.0


_KINDS = get_type_hints(Setting, include_extras=True)
MOST_CELLS = 100_000  # years of measuring
_CHOICES = {
    "method": (*METHODS, *EVALUATION_METHODS),
    "policy": POLICIES,
    "heads": ("all", "retrieval"),
    "scope": SCOPES,
    "verify": MODES,
    "draft_weights": tuple(WEIGHT_BITS),
}
STRICT_BITS = 8  # of the codes that bound a strict cell of a method without bounds
# the axes that mean something under one policy, or some, only
_POLICIES_OF = {"alpha": ("threshold",), "budget": ("topk", "threshold")}

_EXACT = {"context": [4096, 8192], "verify": "tokens", "temperature": [0.0, 0.8]}

# the full grid, 1,296 cells; one that the demo model finishes in minutes, and one in half a minute;
# the others for models that hold their contexts
PRESETS: dict[str, list[dict[str, Any]]] = {
    "prd": [
        {
            "context": [8192, 32768, 65536, 131072],
            "batch": [1, 4, 8],
            "method": "jl",
            "policy": "threshold",
            "dim": [4, 8, 16],
            "alpha": [1.0, 1.05, 1.1],
            "last_n": [4, 8],
            "heads": ["retrieval", "all"],
            "group_blocks": [4, 8, 16],
        }
    ],
    "quick": [{"context": 2048, "method": ["rq", "box"], "budget": [0.1, 0.2]}],
    "small": [
        {
            "context": [2048, 4096],
            "method": ["rq", "box", "meanstd", "ball", "moments", "oracle"],
            "budget": [0.1, 0.15, 0.25],
        },
        {"context": [2048, 4096], "method": ["jl", "1pc", "fd"], "budget": 0.25},
        {"context": 4096, "method": "ball", "strict": True, "epsilon": 0.1},
        {"context": 4096, "method": "rq", "strict": True, "epsilon": [0.01, 0.1]},
        {"context": 2048, "batch": 4, "method": "rq", "budget": 0.1},
        # one axis at a time around m 8, alpha 1.1, the last 4 groups of 8 pages
        *(
            {
                "method": "jl",
                "policy": "threshold",
                **{"dim": 8, "alpha": 1.1, "last_n": 4, "group_blocks": 8},
                **{axis: values},
            }
            for axis, values in {
                "dim": [4, 8, 16],
                "alpha": [1.0, 1.05, 1.1],
                "last_n": [4, 8],
                "group_blocks": [4, 8, 16],
            }.items()
        ),
    ],
    # exact text: drafts and budgets, and other drafters at about the same bytes
    "verified": [
        {**_EXACT, "method": "rq", "budget": 0.05, "draft": [4, 8, 12, 16]},
        {**_EXACT, "method": "rq", "budget": [0.02, 0.1], "draft": [8, 16]},
        # a budget that small would go to their usual sink and recent tokens, 144 tokens, alone
        {
            **_EXACT,
            "method": ["box", "meanstd"],
            "group_size": 16,
            "budget": 0.03,
            "first_n": 1,
            "last_n": 2,
            "draft": 12,
        },
        {**_EXACT, "method": "rq", "budget": 0.05, "draft": 12, "draft_weights": "4bit"},
    ],
    # the verdict is of 32k tokens on
    "long": [
        {"context": [8192, 16384, 32768], "method": "rq", "budget": [0.01, 0.02, 0.05]},
        {"context": 32768, "method": ["box", "meanstd"], "group_size": 16, "budget": [0.1, 0.2]},
        {"context": 32768, "method": "rq", "strict": True, "epsilon": [0.01, 0.1]},
        {**_EXACT, "context": [8192, 32768], "method": "rq", "budget": 0.02, "draft": [8, 16]},
    ],
}


def load_grid(path: Path) -> tuple[Setting, ...]:
    """The cells of a JSON file: an object of axes, each a value or a list of them, or a list of such objects."""
    return expand(inputs.read_json(path, "grid", "give a JSON file of axes"), f"grid {path}")


def expand(data: Any, source: str) -> tuple[Setting, ...]:
    """Every combination of the axes, each once, in order; `source` names them in errors."""
    cells: list[Setting] = []
    known = [field.name for field in fields(Setting)]
    blocks = data if isinstance(data, list) else [data]
    if not blocks:
        raise ConfigError(f"{source} holds no cells: give at least one object of axes")
    for block in blocks:
        if not isinstance(block, dict):
            kind = type(block).__name__
            raise ConfigError(f"{source} must be an object of axes, or a list of them, and holds a JSON {kind}")
        unknown = sorted(set(block) - set(known))
        if unknown:
            raise ConfigError(f"{source}: unknown axis {brief(', '.join(unknown))}: known are {', '.join(known)}")
        axes = {name: _axis(name, value, source) for name, value in block.items()}
        if len(cells) + prod(map(len, axes.values())) > MOST_CELLS:
            raise ConfigError(f"{source} holds more than {MOST_CELLS:,} cells: give fewer values")
        cells += [Setting(**dict(zip(axes, values, strict=True))) for values in itertools.product(*axes.values())]
    return tuple(dict.fromkeys(cells))


def _axis(name: str, value: Any, source: str) -> list[Any]:
    values = value if isinstance(value, list) else [value]
    if not values:
        raise ConfigError(f"{source}: axis {name} is an empty list: give it a value or leave it out")
    for item in values:
        read_record(_KINDS[name], item, f"{source}: axis {name}", "fix it")
        if name in _CHOICES and item not in _CHOICES[name]:
            raise ConfigError(f"{source}: {name} {shown(item)} is unknown: choose among {', '.join(_CHOICES[name])}")
    return values


def config_of(setting: Setting, head_modes: HeadModes | None) -> EpsConfig:
    """The cell's EpsConfig; ConfigError says why a combination is impossible."""
    if setting.method == "off":
        raise ConfigError("method off is the dense side of every cell")
    for name, policies in _POLICIES_OF.items():
        if getattr(setting, name) is not None and setting.policy not in policies:
            raise ConfigError(f"{name} {getattr(setting, name)} belongs to policy {' or '.join(policies)}")
    if setting.epsilon is not None and not setting.strict:
        raise ConfigError(f"epsilon {setting.epsilon} belongs to strict")
    if setting.heads == "retrieval" and head_modes is None:
        raise ConfigError("heads retrieval needs --eps-head-policy FILE")
    default = EpsConfig.of()
    # what an axis leaves out is the method's own default
    given = {name: getattr(setting, name) for name in ("dim", "mean_tokens", "budget", "bound_bits", "rescore")} | {
        "cascade": _stages_of(setting)
    }
    common: dict[str, Any] = {
        "method": setting.method,
        "policy": setting.policy,
        "scope": setting.scope,
        "group_size": setting.group_size,
        "group_blocks": setting.group_blocks,
        "head_modes": head_modes if setting.heads == "retrieval" else None,
        **{name: value for name, value in given.items() if value is not None},
    }
    sized = EpsConfig.of(**(common | {"policy": "topk"}))
    if setting.strict and setting.bound_bits is None and not sized.cache_config.has_bounds:
        common["bound_bits"] = STRICT_BITS
    top_pages = setting.top_pages
    if setting.policy == "threshold" and top_pages is None:
        top_pages = sized.budget_groups(setting.context)
    for name, tokens in (("first_n", "num_sink_tokens"), ("last_n", "num_recent_tokens")):
        groups = getattr(setting, name)
        if groups is not None and groups < 0:
            raise ConfigError(f"{name} {groups} is negative")
        if groups is not None:
            common[tokens] = groups * sized.cache_config.S
    return EpsConfig.of(
        **common,
        alpha=default.selection_config.alpha if setting.alpha is None else float(setting.alpha),
        top_pages=top_pages,
        epsilon=default.selection_config.epsilon if setting.epsilon is None else float(setting.epsilon),
        strict=setting.strict,
    )


_SHARES = re.compile(r"[0-9.]+(,[0-9.]+)*", re.ASCII)


def _stages_of(setting: Setting) -> tuple[float, ...] | None:
    if setting.cascade is None:
        return None
    try:
        shares = tuple(map(float, setting.cascade.split(","))) if _SHARES.fullmatch(setting.cascade) else None
    except ValueError:
        shares = None
    if shares is None:
        raise ConfigError(
            f"stages {shown(setting.cascade)} is no list of shares: write 0.25, or 0.5,0.2, or 0 for none"
        )
    return () if shares == (0,) else shares


def speculative_of(setting: Setting, config: EpsConfig) -> SpeculativeConfig:
    """The cell's Verify; ConfigError says why a combination is impossible."""
    default = SpeculativeConfig()
    draft = None if setting.draft_auto else default.draft if setting.draft is None else setting.draft
    most = max(default.most, draft or 0)
    verify = SpeculativeConfig(setting.verify, draft, most, setting.draft_weights)
    idle = [name for name in _VERIFY_AXES if getattr(setting, name) != getattr(Setting(), name)]
    if idle and not verify.enabled:
        raise ConfigError(f"{idle[0]} {getattr(setting, idle[0])} belongs to verified decoding: add verify tokens")
    if setting.draft_auto and setting.draft is not None:
        raise ConfigError(f"draft {setting.draft} and draft_auto say two things")
    verify.check(config, setting.temperature)
    return verify


_VERIFY_AXES = ("draft", "draft_auto", "draft_weights", "temperature")
