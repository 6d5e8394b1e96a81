"""The flags of verified decoding, and how they become a Verify."""

from functools import partial
from typing import Any

import click

from eps_core.cli.help import VERIFY, option, options
from eps_core.cli.numbers import OrWord, Whole
from eps_core.cli.options import AUTO, flag
from eps_core.config.eps import EpsConfig
from eps_core.config.verify import DRAFT_WEIGHTS, MODES, Verify

_DEFAULT = Verify()
_option = partial(option, heading=VERIFY)
# flag -> field of Verify
_FIELDS = {
    "eps_verify": "mode",
    "eps_draft": "draft",
    "eps_draft_most": "most",
    "eps_draft_weights": "weights",
}

verify_options = options(
    _option(
        "--eps-verify", type=click.Choice(MODES), default=_DEFAULT.mode, show_default=True,
        help="Gated steps draft, a dense pass verifies: the dense text for a fraction of the reads, but for "
        "ties of rounding.",
    ),
    _option(
        "--eps-draft", type=OrWord(Whole(), AUTO), default=_DEFAULT.draft, show_default=True, metavar="N|auto",
        help="Drafts a round; auto: as many as measured acceptance and costs make worth it, 0 among them.",
    ),
    _option(
        "--eps-draft-most", type=Whole(), default=_DEFAULT.most, show_default=True, help="Drafts of a round at most."
    ),
    _option(
        "--eps-draft-weights", type=click.Choice(DRAFT_WEIGHTS), default=_DEFAULT.weights, show_default=True,
        help="Of the drafting model; the text comes from the full weights all the same.",
    ),
)  # fmt: skip


def verify_of(flags: dict[str, Any], given: set[str], config: EpsConfig) -> Verify:
    """The flags as a Verify; flags that mean nothing, or contradict each other, are refused."""
    values = {field: flags[name] for name, field in _FIELDS.items()}
    if "eps_draft" not in given:
        del values["draft"]
    elif values["draft"] == AUTO:
        values["draft"] = None
    verify = Verify.of(**values)
    idle = sorted(given & (set(_FIELDS) - {"eps_verify"}))
    if idle and not verify.enabled:
        raise click.UsageError(f"{flag(idle[0])} means nothing without verified decoding: add --eps-verify tokens")
    verify.check(
        config, flags.get("temperature", 0.0), flags.get("sample_by", "gumbel"), flags.get("eps_audit_every", 0)
    )
    return verify
