"""Settings as engines pass them on: flat names in a mapping or in the environment."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Self

from eps_core.config.eps import FLAT, EpsConfig, check_offered
from eps_core.config.speculative import SpeculativeConfig
from eps_core.errors import require
from eps_core.io import records
from eps_core.io.schema import REMOVED, SETTINGS, current_settings
from eps_core.load import KERNELS

PREFIX = "EPS_"
NEARLY = 0.85  # of difflib: a letter or two wrong
# flat name -> field of SpeculativeConfig
VERIFY = {"verify": "mode", "draft": "draft", "draft_most": "most", "draft_weights": "weights"}
EXTRAS = ("metrics", "audit_every", "kernels", *VERIFY)


@dataclass(frozen=True)
class Settings:
    """A user's settings of EPS in an engine."""

    config: EpsConfig = EpsConfig()  # noqa: RUF009  frozen
    metrics: Path | None = None  # a JSONL file of steps
    audit_every: int = 0
    kernels: str = "auto"
    verify: SpeculativeConfig = SpeculativeConfig()  # noqa: RUF009  frozen

    @classmethod
    def of(cls, flat: Mapping[str, Any]) -> Self:
        """Make settings from `EpsConfig.of`'s names and `metrics`, `audit_every`, `kernels`, `verify` (a mode), `draft`
        (a number or "auto"), `draft_most`, .. (`VERIFY`). Raises ConfigError for what is misspelt or out of range."""
        given = current_settings(flat)
        extras = {name: given.pop(name) for name in EXTRAS if given.get(name) is not None}
        given = {name: value for name, value in given.items() if name not in EXTRAS}
        unknown = sorted(set(given) - set(FLAT))
        known = ", ".join((*FLAT, *EXTRAS))
        require(not unknown, f"unknown EPS setting {', '.join(map(str, unknown))}: known are {known}")
        if "audit_every" in extras:
            records.check("audit_every", extras["audit_every"], records.Count)
        if "kernels" in extras:
            require(extras["kernels"] in ("auto", *KERNELS), f"kernels {extras['kernels']!r} are unknown: use auto")
        if "metrics" in extras:
            metrics = extras["metrics"]
            records.check("metrics", str(metrics) if isinstance(metrics, Path) else metrics, str)
            extras["metrics"] = Path(metrics)
        named = {field: extras.pop(name) for name, field in VERIFY.items() if name in extras}
        if "draft" in named:
            named["draft"] = None if named["draft"] == "auto" else named["draft"]
        verify = SpeculativeConfig.of(**named)
        idle = sorted(name for name, field in VERIFY.items() if field in named and field != "mode")
        require(
            verify.enabled or not idle,
            f'{", ".join(idle)} means nothing without verified decoding: add verify="tokens"',
        )
        config = check_offered(EpsConfig.of(**given))
        verify.check(config, audit_every=extras.get("audit_every", 0))
        return cls(config, verify=verify, **extras)

    def flat(self, asked: bool = False) -> dict[str, Any]:
        """Return the arguments of `of`: everything that says something, plain values of JSON; with `asked`, of the
        config what was given alone, so that a server may fit what merely followed to its blocks."""
        flat = self.config.to_dict()
        given = self.config.given if asked else flat
        named = {name: flat[name] for name in given if flat[name] is not None}
        metrics = None if self.metrics is None else str(self.metrics)
        extras = {"metrics": metrics, "audit_every": self.audit_every or None, "kernels": self.kernels}
        if self.verify.enabled:
            extras |= {name: getattr(self.verify, field) for name, field in VERIFY.items()}
            extras["draft"] = "auto" if self.verify.draft is None else self.verify.draft
        return {**named, **{name: value for name, value in extras.items() if value is not None}}


def from_environment(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The flat settings that EPS_METHOD, EPS_BUDGET, .. name; numbers, true and false as JSON writes them, EPS_METRICS
    as it is. Raises ConfigError for a variable that is nearly one of them: others that begin alike are not ours."""
    environ = os.environ if environ is None else environ
    names = (*FLAT, *EXTRAS, *SETTINGS, *REMOVED)
    known = [PREFIX + name.upper() for name in names]
    for name in sorted(environ):
        near = get_close_matches(name, known, 1, NEARLY) if name.startswith(PREFIX) and name not in known else []
        require(
            not near, f"environment variable {name} is no setting of EPS: did you mean {near and near[0]}? Unset it"
        )
    found = {}
    for name in names:
        text = environ.get(PREFIX + name.upper())
        if text is None:
            continue
        try:
            found[name] = text if name == "metrics" else json.loads(text)
        except ValueError:  # a word
            found[name] = text
    return current_settings(found)


def to_environment(settings: Settings) -> dict[str, str]:
    """Return the variables by which `from_environment` reads what was asked for, for a child process."""
    flat = {"method": settings.config.cache_config.method} | settings.flat(asked=True)
    return {
        PREFIX + name.upper(): value if isinstance(value, str) else json.dumps(value) for name, value in flat.items()
    }


def has_flag(arguments: Sequence[str], *flags: str) -> bool:
    """Return whether any argument is one of these flags to an engine's parser. It may take `_` for `-`, a value after
    `=`, a key of its JSON after a dot, and the beginning of a flag for the flag."""
    names = [re.split("[=.]", one)[0].replace("_", "-") for one in arguments if one.startswith("-")]
    return any(flag.startswith(name) for flag in flags for name in names if len(name) > 2)
