"""The `--eps-*` flags that several commands share, and how they become an EpsConfig."""

from collections.abc import Callable
from functools import partial
from typing import Any

import click

from eps_core.cli.help import FILE, METHOD, MODEL, SELECTION, option, options
from eps_core.cli.numbers import MOST_SEED, ListOf, OrWord, Real, Whole
from eps_core.config.eps import EpsConfig
from eps_core.config.read import COMBINES, DEFAULT_BUDGET, DEFAULT_GUARDS, POLICIES, SCOPES
from eps_core.config.store import DEFAULT_TAIL_TOKENS, METHODS, coded_methods, dim_meanings
from eps_core.config.verify import DRAFT_FLOOR
from eps_core.load import KERNELS
from eps_core.models.config import DEMO_MODEL
from eps_core.summaries.table import facts, names

DEMO_METHOD = "rq"
_CODED = coded_methods()
_OWN = ", ".join(names(lambda one: one.role == "public" and one.guards != DEFAULT_GUARDS))  # with defaults of their own
_FACTS = facts(DEMO_METHOD)
assert _FACTS.unit is not None
_UNIT = _FACTS.unit
AUTO = "auto"  # of --eps-min-context
# flags that mean something under one policy only
_POLICY_FLAGS = {"eps_budget": "topk", "eps_budget_floor": "topk", "eps_alpha": "threshold"}
_DEFAULT = EpsConfig.of()
_kept, _read = partial(option, heading=METHOD), partial(option, heading=SELECTION)


def _guard_help(end: int) -> str:
    return f"Always visited.  [default: {_FACTS.guards[end]} for {_OWN}, {DEFAULT_GUARDS[end]} for the others]"


def method_option(default: str) -> Callable:
    """`--method`, whose default is a matter of the command."""
    return _kept(
        "--method", "eps_method", also=["--eps-method"], type=click.Choice(METHODS),
        help=f"Summary of a group of keys.  [default: {default}]",
    )  # fmt: skip


summary_options = options(
    _kept(
        "--eps-dim", type=Whole(), help=f"{dim_meanings('{what} of {name} (default {default})')}."
    ),
    _kept(
        "--eps-unit-tokens", type=Whole(),
        help=f"{_CODED}: code groups about the mean of 32 or 64 tokens.  [default: {_UNIT.mean_tokens}]",
    ),
    _kept(
        "--eps-mean-bits", type=Whole(), help=f"Of a dimension of that mean, 4 or 8.  [default: {_UNIT.mean_bits}]",
    ),
    _kept(
        "--eps-stages", type=ListOf(Real()),
        help=f"{_CODED}: read half of each code, the rest of this share of the groups; 0.5,0.2: a "
        f"quarter, a quarter of .5, half of .2; 0: whole.  [default: {','.join(map(str, _UNIT.stages))}]",
    ),
    _kept(
        "--eps-refine", type=Real(),
        help=f"{_CODED}: share of the groups of which a second bit is read; 0: none.  [default: {_UNIT.refine}]",
    ),
    _kept(
        "--eps-group-tokens", type=Whole(),
        help="Tokens of a group, up to 256; divides the page or is a multiple of it.  [default: each method's best]",
    ),
    _kept("--eps-group-blocks", type=Whole(), metavar="G", help="The same in pages."),
    _kept(
        "--block-size", type=Whole(), default=_DEFAULT.store.block_size, show_default=True,
        help="Tokens of a page.",
    ),
)  # fmt: skip

selection_options = options(
    _kept(
        "--eps-rq-bounds", is_flag=True,
        help=f"{_CODED} also stores what its bounds need (6 bytes a group).",
    ),
    _kept(
        "--eps-bound-bits", type=Whole(), default=0, show_default=True,
        help="4 or 8: certify from codes of single keys, read of unvisited groups only; 0: the method's own bounds.",
    ),
    _kept(
        "--eps-tail", type=click.Choice(("drop", "mean")),
        help="What is not read counts nothing, or with its estimated mass and mean value, which harms real models.  "
        "[default: drop]",
    ),
    _kept(
        "--eps-tail-tokens", type=Whole(),
        help=f"Tokens of one mean value: a multiple of page and group.  [default: {DEFAULT_TAIL_TOKENS}]",
    ),
    _kept(
        "--eps-seed", type=Whole(most=MOST_SEED), default=_DEFAULT.store.seed, show_default=True,
        help="Of projections and signs.",
    ),
    _read(
        "--eps-policy", type=click.Choice(POLICIES), default=_DEFAULT.read.policy, show_default=True,
        help="Rule that chooses groups.",
    ),
    _read(
        "--eps-budget", type=Real(),
        help="topk: share of the context that is read (up to 1), or a number of tokens.  "
        f"[default: {_FACTS.budget} for {_OWN}, {DEFAULT_BUDGET} for the others]",
    ),
    _read(
        "--eps-budget-floor", type=Whole(),
        help="topk: tokens that a share is raised to, so that shorter contexts are dense.  "
        f"[default: {_FACTS.budget_floor} for {_OWN}; 0 for the others, and where --eps-budget is given; at most "
        f"{DRAFT_FLOOR} for drafts of --eps-verify]",
    ),
    _read(
        "--eps-epsilon", type=Real(), default=_DEFAULT.read.epsilon, show_default=True,
        help="--eps-strict: most certified share of the softmax left unread.",
    ),
    _read(
        "--eps-alpha", type=Real(), default=_DEFAULT.read.alpha, show_default=True,
        help="threshold: a group is skipped below T / alpha; higher visits more.",
    ),
    _read(
        "--eps-top-pages", type=Whole(),
        help="In groups: topk budget, threshold heap.",
    ),
    _read("--eps-first-tokens", type=Whole(), help=_guard_help(0)),
    _read("--eps-last-tokens", type=Whole(), help=_guard_help(1)),
    _read("--eps-first-n", type=Whole(), help="--eps-first-tokens in groups."),
    _read("--eps-last-n", type=Whole(), help="--eps-last-tokens in groups."),
    _read(
        "--eps-scope", type=click.Choice(SCOPES), default=_DEFAULT.read.scope, show_default=True,
        help="A list of groups for each kv head, or the union of them for all heads.",
    ),
    _read(
        "--eps-combine", type=click.Choice(COMBINES),
        help="Scores of the query heads of a kv head: the largest, or the sum of masses, each over about that of the "
        f"first token [default: sum for {_OWN} without bounds under topk; max for the others]",
    ),
    _read(
        "--eps-heads", type=click.Choice(("all", "retrieval")), default="all", show_default=True,
        help="retrieval: gate only the heads that --eps-head-policy marks so; the others stay dense.",
    ),
    _read(
        "--eps-head-policy", type=FILE, metavar="FILE", help="What `eps-proto calibrate` wrote."
    ),
    _read(
        "--eps-strict", is_flag=True,
        help="Read more until the certified unread share of every head is at most --eps-epsilon.",
    ),
    _read(
        "--eps-min-context", type=OrWord(Whole(), AUTO), default=_DEFAULT.read.min_context,
        show_default=True, metavar="N|auto",
        help="Dense below N tokens; auto (run only): below where gating pays, measured once on this device.",
    ),
)  # fmt: skip

kernels_option = option(
    "--kernels", heading=MODEL, type=click.Choice(("auto", *KERNELS)), default="auto", show_default=True,
    help="What computes attention; changes speed only. auto: the fastest that this device has.",
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
    policy = flags["eps_policy"]
    for name, owner in _POLICY_FLAGS.items():
        if name in given and policy != owner:
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
        dim=flags["eps_dim"],
        **code_settings(flags),
        rq_bounds=flags["eps_rq_bounds"],
        bound_bits=flags["eps_bound_bits"],
        tail_tokens=_tail_tokens(flags),
        group_tokens=flags["eps_group_tokens"],
        group_blocks=flags["eps_group_blocks"],
        policy=policy,
        budget=flags["eps_budget"],
        budget_floor=flags["eps_budget_floor"],
        epsilon=flags["eps_epsilon"],
        alpha=flags["eps_alpha"],
        top_pages=flags["eps_top_pages"],
        first_tokens=flags["eps_first_tokens"],
        last_tokens=flags["eps_last_tokens"],
        scope=flags["eps_scope"],
        combine=flags["eps_combine"],
        strict=flags["eps_strict"],
        head_modes=_head_modes(flags),
        seed=flags["eps_seed"],
        min_context=min_context,
        block_size=flags["block_size"],
    )
    if flags["eps_tail"] == "mean" and flags["eps_tail_tokens"] is None:
        config = config.with_tail()
    for end in ("first", "last"):
        groups = flags[f"eps_{end}_n"]
        if groups is None:
            continue
        if f"eps_{end}_tokens" in given:
            raise click.UsageError(f"--eps-{end}-n and --eps-{end}-tokens say the same thing twice: give one of them")
        if groups < 0:
            raise click.UsageError(f"--eps-{end}-n {groups} is negative: use 0 or more groups")
        config = config.replace(**{f"{end}_tokens": groups * config.store.S})
    return config


def code_settings(flags: dict[str, Any]) -> dict[str, Any]:
    """What the flags say of codes, as flat settings."""
    stages = flags["eps_stages"]
    return {
        "mean_tokens": flags["eps_unit_tokens"],
        "mean_bits": flags["eps_mean_bits"],
        "stages": () if stages == (0,) else stages,
        "refine": flags["eps_refine"],
    }


def _tail_tokens(flags: dict[str, Any]) -> int | None:
    """Return the tokens of one mean value of the tail; None where what is skipped is dropped."""
    if flags["eps_tail"] == "drop" and flags["eps_tail_tokens"] is not None:
        raise click.UsageError("--eps-tail-tokens belongs to --eps-tail mean: drop it or choose that")
    return flags["eps_tail_tokens"]


def _head_modes(flags: dict[str, Any]) -> tuple[tuple[str, ...], ...] | None:
    """The modes that `--eps-heads retrieval` asks for, of a policy that was made for this very model."""
    if flags["eps_head_policy"] is None:
        return None
    # late: `--help` must work where a model cannot be read
    from eps_core.decode.heads import check_policy, head_modes, load_policy
    from eps_core.models.config import read_spec
    from eps_core.models.hub import resolve_model

    model = DEMO_MODEL if flags["model"] is None else resolve_model(flags["model"])
    policy = load_policy(flags["eps_head_policy"])
    check_policy(policy, model, read_spec(model))
    return head_modes(policy)


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")
