"""The flags of eviction, and how they become an EvictionConfig."""

from functools import partial
from typing import Any

import click

from eps_core.cli.help import KEEP, option, options
from eps_core.cli.numbers import Real, Whole
from eps_core.cli.options import flag
from eps_core.config.eps import EpsConfig
from eps_core.eviction.config import OFF, EvictionConfig
from eps_core.eviction.table import POLICIES
from eps_core.kv_cache.heads import COMPACTIONS

_DEFAULT = EvictionConfig()
_option = partial(option, heading=KEEP)
# what a text that is yet to come would have to tell
_USABLE = [name for name, module in POLICIES.items() if not module.SPEC.future]
# flag -> field of Keep
_FIELDS = {
    "kv_evict": "policy",
    "kv_keep": "share",
    "kv_every": "every",
    "kv_sink_tokens": "num_sink_tokens",
    "kv_recent_tokens": "num_recent_tokens",
    "kv_compact": "compact",
}

eviction_options = options(
    _option(
        "--kv-evict", type=click.Choice((OFF, *_USABLE)), default=_DEFAULT.policy,
        help="Policy that evicts tokens for good; EPS selects among what is left.",
    ),
    _option(
        "--kv-keep", type=Real(),
        help="Rows that a head keeps: a share of the prompt up to 1, or a number; for rswa, generated tokens.",
    ),
    _option(
        "--kv-every", type=Whole(), default=_DEFAULT.every,
        help="Generated tokens between evictions; 0: only at the end of prefill.",
    ),
    _option(
        "--kv-sink-tokens", also=["--kv-first-tokens"], type=Whole(), default=_DEFAULT.num_sink_tokens,
        help="Sink tokens that are always kept.",
    ),
    _option(
        "--kv-recent-tokens", also=["--kv-last-tokens"], type=Whole(),
        help="Recent tokens that are always kept.  [default: 32; 10 for scissorhands; 64 for pyramidkv; 128 for "
        "triattention; half of what is kept for h2o]",
    ),
    _option(
        "--kv-compact", type=click.Choice(COMPACTIONS), default=_DEFAULT.compact,
        help="Compaction after an eviction: repack rows in order, or fill holes, which moves the fewest rows.",
    ),
)  # fmt: skip


def eviction_of(flags: dict[str, Any], given: set[str], config: EpsConfig) -> EvictionConfig:
    """Return the flags as an EvictionConfig; flags that mean nothing, or contradict each other, are refused."""
    values = {field: flags[name] for name, field in _FIELDS.items() if flags[name] is not None}
    idle = sorted(given & (set(_FIELDS) - {"kv_evict"}))
    if idle and flags["kv_evict"] == OFF:
        raise click.UsageError(f"{flag(idle[0])} means nothing without eviction: add --kv-evict snapkv")
    if flags["kv_evict"] != OFF and flags["kv_keep"] is None:
        raise click.UsageError(f"--kv-evict {flags['kv_evict']} must know how much to keep: add --kv-keep 0.25")
    later = sorted(given & {"kv_every", "kv_compact"})
    if later and not POLICIES[flags["kv_evict"]].SPEC.while_decoding:
        raise click.UsageError(
            f"{flag(later[0])} means nothing to {flags['kv_evict']}, which evicts at the end of prefill alone: drop it"
        )
    if "kv_sink_tokens" in given and POLICIES[flags["kv_evict"]].SPEC.prompt:
        raise click.UsageError(
            f"--kv-sink-tokens means nothing to {flags['kv_evict']}, which keeps the prompt: drop it"
        )
    if "kv_compact" in given and not flags["kv_every"]:
        raise click.UsageError("--kv-compact means nothing with --kv-every 0: drop one")
    keep = EvictionConfig(**values, seed=flags["seed"] if flags["kv_evict"] != OFF else 0)
    keep.check(config)
    return keep
