"""The flags of eviction, and how they become a Keep."""

from functools import partial
from typing import Any

import click

from eps_core.cli.help import KEEP, option, options
from eps_core.cli.numbers import Real, Whole
from eps_core.cli.options import flag
from eps_core.config.eps import EpsConfig
from eps_core.evict.keep import OFF, Keep
from eps_core.evict.table import POLICIES
from eps_core.paging.heads import COMPACTIONS

_DEFAULT = Keep()
_option = partial(option, heading=KEEP)
# what a text that is yet to come would have to tell
_USABLE = [name for name, module in POLICIES.items() if not module.FACTS.future]
# flag -> field of Keep
_FIELDS = {
    "kv_evict": "policy",
    "kv_keep": "share",
    "kv_every": "every",
    "kv_first_tokens": "first_tokens",
    "kv_last_tokens": "last_tokens",
    "kv_compact": "compact",
}

keep_options = options(
    _option(
        "--kv-evict", type=click.Choice((OFF, *_USABLE)), default=_DEFAULT.policy, show_default=True,
        help="Let go of tokens for good, by this policy; EPS gates what is left.",
    ),
    _option(
        "--kv-keep", type=Real(),
        help="Of the prompt's tokens, rows that a head keeps: a share up to 1, or a number. Of rswa: new ones.",
    ),
    _option(
        "--kv-every", type=Whole(), default=_DEFAULT.every, show_default=True,
        help="While decoding, back to that whenever heads grew by so many rows; 0: at the end of prefill alone.",
    ),
    _option(
        "--kv-first-tokens", type=Whole(), default=_DEFAULT.first_tokens, show_default=True, help="Never let go.",
    ),
    _option(
        "--kv-last-tokens", type=Whole(),
        help="Newest tokens that are never evicted. Default: 32; 64 for pyramidkv; half of what is kept for h2o.",
    ),
    _option(
        "--kv-compact", type=click.Choice(COMPACTIONS), default=_DEFAULT.compact, show_default=True,
        help="What is left after an eviction: repack in order, or fill holes, which moves the fewest rows.",
    ),
)  # fmt: skip


def keep_of(flags: dict[str, Any], given: set[str], config: EpsConfig) -> Keep:
    """The flags as a Keep; flags that mean nothing, or contradict each other, are refused."""
    values = {field: flags[name] for name, field in _FIELDS.items() if flags[name] is not None}
    idle = sorted(given & (set(_FIELDS) - {"kv_evict"}))
    if idle and flags["kv_evict"] == OFF:
        raise click.UsageError(f"{flag(idle[0])} means nothing without eviction: add --kv-evict snapkv")
    if flags["kv_evict"] != OFF and flags["kv_keep"] is None:
        raise click.UsageError(f"--kv-evict {flags['kv_evict']} must know how much to keep: add --kv-keep 0.25")
    later = sorted(given & {"kv_every", "kv_compact"})
    if later and not POLICIES[flags["kv_evict"]].FACTS.while_decoding:
        raise click.UsageError(
            f"{flag(later[0])} means nothing to {flags['kv_evict']}, which evicts at the end of prefill alone: drop it"
        )
    if "kv_first_tokens" in given and POLICIES[flags["kv_evict"]].FACTS.prompt:
        raise click.UsageError(
            f"--kv-first-tokens means nothing to {flags['kv_evict']}, which keeps the prompt: drop it"
        )
    if "kv_compact" in given and not flags["kv_every"]:
        raise click.UsageError("--kv-compact means nothing with --kv-every 0: drop one")
    keep = Keep(**values, seed=flags["seed"] if flags["kv_evict"] != OFF else 0)
    keep.check(config)
    return keep
