"""The `--eps-*` flags that several commands share, and how they become an EpsConfig."""

from collections.abc import Callable
from functools import partial
from typing import Any

import click

from eps_core.cli.help import FILE, METHOD, MODEL, SELECTION, option, options
from eps_core.cli.numbers import MOST_SEED, ListOf, OrWord, Real, Whole
from eps_core.config.cache import METHODS, coded_methods, dim_meanings
from eps_core.config.eps import EpsConfig
from eps_core.config.selection import COMBINES, DEFAULT_BUDGET, DEFAULT_SINK_RECENT, POLICIES, SCOPES
from eps_core.config.speculative import DRAFT_BUDGET, DRAFT_BUDGET_FLOOR
from eps_core.load import KERNELS
from eps_core.models.config import DEMO_MODEL
from eps_core.summaries.table import method_spec, names

DEMO_METHOD = "rq"
_CODED = coded_methods()
_OWN = ", ".join(
    names(lambda one: one.role == "public" and one.sink_recent != DEFAULT_SINK_RECENT)
)  # with defaults of their own
_FACTS = method_spec(DEMO_METHOD)
assert _FACTS.unit is not None
_UNIT = _FACTS.unit
AUTO = "auto"  # of --eps-min-context
# flags that mean something under one policy only
_POLICY_FLAGS = {"eps_budget": "topk", "eps_budget_floor": "topk", "eps_alpha": "threshold"}
# flags of `selection_options` that a setting is called the same as
_SAME = (
    "rq_bounds", "bound_bits", "policy", "budget", "budget_floor", "epsilon", "alpha", "top_pages", "scope", "combine",
    "strict", "seed",
)  # fmt: skip
_DEFAULT = EpsConfig.of()
_kept, _read = partial(option, heading=METHOD), partial(option, heading=SELECTION)


def _default_help(end: int) -> str:
    return (
        f"{('Sink', 'Recent')[end]} tokens that are always selected.  [default: {_FACTS.sink_recent[end]} for {_OWN}, "
        f"{DEFAULT_SINK_RECENT[end]} for the others]"
    )


def method_option(default: str) -> Callable:
    """`--method`, whose default is a matter of the command."""
    return _kept(
        "--method", "eps_method", also=["--eps-method"], type=click.Choice(METHODS),
        help=f"Summary of a group of keys.  [default: {default}]",
    )  # fmt: skip


summary_options = options(
    _kept("--eps-dim", type=Whole(), help=f"{dim_meanings('{what} of {name} (default {default})')}."),
    _kept(
        "--eps-mean-tokens", also=["--eps-unit-tokens"], type=Whole(),
        help=f"{_CODED}: tokens of the mean key that codes refer to, 32 or 64.  [default: {_UNIT.mean_tokens}]",
    ),
    _kept(
        "--eps-cascade", also=["--eps-stages"], type=ListOf(Real()),
        help=f"{_CODED}: read half of each code, the rest of this share of the groups; 0.5,0.2: a "
        f"quarter, a quarter of .5, half of .2; 0: whole.  [default: {','.join(map(str, _UNIT.cascade))}; "
        "CUDA: 0]",
    ),
    _kept(
        "--eps-rescore", also=["--eps-refine"], type=Real(),
        help=f"{_CODED}: share of the groups that are rescored by one more bit; 0: none.  [default: {_UNIT.rescore}; "
        "CUDA: 1]",
    ),
    _kept(
        "--eps-group-size", also=["--eps-group-tokens"], type=Whole(),
        help="Tokens of a group, up to 256; divides the block or is a multiple of it.  [default: each method's best]",
    ),
    _kept("--eps-group-blocks", type=Whole(), metavar="G", help="Group size in blocks."),
    _kept("--block-size", type=Whole(), default=_DEFAULT.cache_config.block_size, help="Tokens of a block."),
)  # fmt: skip

selection_options = options(
    _kept("--eps-rq-bounds", is_flag=True, help=f"{_CODED}: also store what error bounds need (6 bytes a group)."),
    _kept(
        "--eps-bound-bits", type=Whole(), default=0,
        help="Bits (4 or 8) of the key codes that error bounds are computed from; 0: the method's own bounds.",
    ),
    _kept(
        "--eps-seed", type=Whole(most=MOST_SEED), default=_DEFAULT.cache_config.seed,
        help="Random seed of projections and sign flips.",
    ),
    _read(
        "--eps-policy", type=click.Choice(POLICIES), default=_DEFAULT.selection_config.policy, help="Selection policy."
    ),
    _read(
        "--eps-budget", type=Real(),
        help="topk: share of the context that is read (up to 1), or a number of tokens.  "
        f"[default: {DEFAULT_BUDGET}; at most {DRAFT_BUDGET} for drafts of --eps-verify under a floor]",
    ),
    _read(
        "--eps-budget-floor", type=Whole(),
        help="topk: smallest budget in tokens; shorter contexts are dense.  "
        f"[default: {_FACTS.budget_floor} for {_OWN}; 0 for the others, and where --eps-budget is given; at most "
        f"{DRAFT_BUDGET_FLOOR} for drafts of --eps-verify]",
    ),
    _read(
        "--eps-epsilon", type=Real(), default=_DEFAULT.selection_config.epsilon,
        help="--eps-strict: largest bound of the unread share of the softmax.",
    ),
    _read(
        "--eps-alpha", type=Real(), default=_DEFAULT.selection_config.alpha,
        help="threshold: groups below T / alpha are skipped; a higher alpha selects more.",
    ),
    _read("--eps-top-pages", type=Whole(), help="Maximum number of selected groups; topk: the budget."),
    _read("--eps-sink-tokens", also=["--eps-first-tokens"], type=Whole(), help=_default_help(0)),
    _read("--eps-recent-tokens", also=["--eps-last-tokens"], type=Whole(), help=_default_help(1)),
    _read("--eps-first-n", type=Whole(), help="--eps-sink-tokens in groups."),
    _read("--eps-last-n", type=Whole(), help="--eps-recent-tokens in groups."),
    _read(
        "--eps-scope", type=click.Choice(SCOPES), default=_DEFAULT.selection_config.scope,
        help="One selection for each KV head, or their union for all.",
    ),
    _read(
        "--eps-combine", type=click.Choice(COMBINES),
        help="Scores of the query heads of a kv head: the largest, or the sum of masses, each over about that of the "
        f"first token [default: sum for {_OWN} without bounds under topk; max for the others]",
    ),
    _read(
        "--eps-heads", type=click.Choice(("all", "retrieval")), default="all",
        help="Sparse heads: all, or those that --eps-head-policy marks as retrieval; the others stay dense.",
    ),
    _read("--eps-head-policy", type=FILE, metavar="FILE", help="What `eps-proto calibrate` wrote."),
    _read(
        "--eps-strict", is_flag=True,
        help="Select more until the bound of every head's unread share is at most --eps-epsilon.",
    ),
    _read(
        "--eps-min-context", type=OrWord(Whole(), AUTO), default=_DEFAULT.selection_config.min_context,
        metavar="N|auto",
        help="Context below which decoding is dense; auto (run only): where sparse attention pays, "
        "measured once on this device.",
    ),
)  # fmt: skip

kernels_option = option(
    "--kernels", heading=MODEL, type=click.Choice(("auto", *KERNELS)), default="auto",
    help="Attention kernels; they change speed only. auto: the fastest on this device.",
)  # fmt: skip


def given_flags(ctx: click.Context, flags: dict[str, Any]) -> set[str]:
    """Names of the flags that stood on the command line."""
    return {name for name in flags if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE}


def config_of(
    flags: dict[str, Any], given: set[str], auto_min_context: bool = False, default: str = "off"
) -> EpsConfig:
    """The flags as an EpsConfig; flags that contradict each other are refused, unless EPS is turned off outright. With
    `auto_min_context`, `auto` is let through as 0: the caller measures. `default` is the method of a --model for which
    none is named; the demo model's is its own."""
    method = flags["eps_method"]
    eps_given = sorted(name for name in given if name.startswith("eps_") and name != "eps_method")
    if method is None:
        method = DEMO_METHOD if flags["model"] is None else default
        if method == "off" and eps_given:
            raise click.UsageError(f"{flag(eps_given[0])} means nothing while EPS is off: add --method")
    if method == "off":
        return EpsConfig.of(block_size=flags["block_size"])
    for name, owner in _POLICY_FLAGS.items():
        if name in given and flags["eps_policy"] != owner:
            raise click.UsageError(f"{flag(name)} belongs to --eps-policy {owner}: drop it or choose that policy")
    if "eps_epsilon" in given and not flags["eps_strict"]:
        raise click.UsageError("--eps-epsilon belongs to --eps-strict: drop it or add that")
    if (flags["eps_heads"] == "retrieval") != (flags["eps_head_policy"] is not None):
        raise click.UsageError("--eps-heads retrieval and --eps-head-policy FILE need each other: give both or none")
    if "eps_budget" in given and "eps_top_pages" in given:
        raise click.UsageError("--eps-budget and --eps-top-pages both set the budget of topk: give one of them")
    min_context = flags["eps_min_context"]
    if min_context == AUTO:
        if not auto_min_context:
            raise click.UsageError("--eps-min-context auto belongs to `eps-proto run`: give a number of tokens")
        min_context = 0
    config = EpsConfig.of(
        method=method,
        **summary_settings(flags),
        **{name: flags[f"eps_{name}"] for name in _SAME},
        num_sink_tokens=flags["eps_sink_tokens"],
        num_recent_tokens=flags["eps_recent_tokens"],
        head_modes=_head_modes(flags),
        min_context=min_context,
    )
    for end, role in (("first", "sink"), ("last", "recent")):
        groups = flags[f"eps_{end}_n"]
        if groups is None:
            continue
        if f"eps_{role}_tokens" in given:
            raise click.UsageError(f"--eps-{end}-n and --eps-{role}-tokens say the same thing twice: give one of them")
        if groups < 0:
            raise click.UsageError(f"--eps-{end}-n {groups} is negative: use 0 or more groups")
        config = config.replace(**{f"num_{role}_tokens": groups * config.cache_config.S})
    return config


def summary_settings(flags: dict[str, Any]) -> dict[str, Any]:
    """Return the flags of `summary_options` as settings, flat."""
    same = ("dim", "mean_tokens", "rescore", "group_size", "group_blocks")
    cascade = () if flags["eps_cascade"] == (0,) else flags["eps_cascade"]
    return {**{name: flags[f"eps_{name}"] for name in same}, "cascade": cascade, "block_size": flags["block_size"]}


def _head_modes(flags: dict[str, Any]) -> tuple[tuple[str, ...], ...] | None:
    """The modes that `--eps-heads retrieval` asks for, of a policy that was made for this very model."""
    if flags["eps_head_policy"] is None:
        return None
    # late: `--help` must work where a model cannot be read
    from eps_core.decode.heads import check_policy, load_policy
    from eps_core.models.config import read_spec
    from eps_core.models.hub import resolve_model

    model = DEMO_MODEL if flags["model"] is None else resolve_model(flags["model"])
    policy = load_policy(flags["eps_head_policy"])
    check_policy(policy, model, read_spec(model))
    return policy.head_modes


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")
