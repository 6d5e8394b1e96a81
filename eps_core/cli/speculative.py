"""The flags of verified decoding, and how they become a SpeculativeConfig."""

from functools import partial
from typing import Any

import click

from eps_core.cli.help import VERIFY as HEADING
from eps_core.cli.help import option, options
from eps_core.cli.numbers import OrWord, Whole
from eps_core.cli.options import AUTO, flag
from eps_core.config.eps import EpsConfig
from eps_core.config.formats import WEIGHT_BITS
from eps_core.config.speculative import MODES, SpeculativeConfig
from eps_core.integrations.settings import VERIFY

_DEFAULT = SpeculativeConfig()
_option = partial(option, heading=HEADING)
_FIELDS = {f"eps_{name}": field for name, field in VERIFY.items()}  # flag -> field of SpeculativeConfig

speculative_options = options(
    _option(
        "--eps-verify", type=click.Choice(MODES), default=_DEFAULT.mode,
        help="Self-speculative decoding: sparse steps draft, one dense pass verifies. The text is the dense one but "
        "for ties of rounding.",
    ),
    _option(
        "--eps-draft", type=OrWord(Whole(), AUTO), default=_DEFAULT.draft, metavar="N|auto",
        help="Drafted tokens a round; auto: chosen from measured acceptance and costs, possibly 0.",
    ),
    _option("--eps-draft-most", type=Whole(), default=_DEFAULT.most, help="Maximum number of drafts a round."),
    _option(
        "--eps-draft-weights", type=click.Choice(tuple(WEIGHT_BITS)), default=_DEFAULT.weights,
        help="Weights of the drafting model; verification uses those of --weights.",
    ),
)  # fmt: skip


def speculative_of(flags: dict[str, Any], given: set[str], config: EpsConfig) -> SpeculativeConfig:
    """Return the flags as a SpeculativeConfig; flags that mean nothing, or contradict each other, are refused."""
    values = {field: flags[name] for name, field in _FIELDS.items()}
    if "eps_draft" not in given:
        del values["draft"]
    elif values["draft"] == AUTO:
        values["draft"] = None
    verify = SpeculativeConfig.of(**values)
    idle = sorted(given & (set(_FIELDS) - {"eps_verify"}))
    if idle and not verify.enabled:
        raise click.UsageError(f"{flag(idle[0])} means nothing without verified decoding: add --eps-verify tokens")
    verify.check(
        config, flags.get("temperature", 0.0), flags.get("sample_by", "gumbel"), flags.get("eps_audit_every", 0)
    )
    return verify
