"""What a user can mend: one line that names the value, the limit and the mend."""

import sys
from numbers import Integral, Real
from typing import Any

# what a value of each type may be, numpy's numbers included, and how that is called
_KINDS: dict[type, tuple[Any, str]] = {
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    bool: (bool, "True or False"),
    str: (str, "text"),
    tuple: ((list, tuple), "a list"),
}


class ConfigError(ValueError):
    """A value that the user gave and can mend; the message is one line with the value, the limit and the mend."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def require_kind(name: str, value: Any, kind: type) -> None:
    """Raises ConfigError unless a value given from Python or JSON is of its type; its range is another question."""
    allowed, called = _KINDS[kind]
    fits = kind is not float or not isinstance(value, int) or abs(value) <= sys.float_info.max
    require(isinstance(value, allowed) and fits, f"{name} {value!r} is not {called}: give one")


DISTRIBUTION = "eigenpage"  # the name to install by: `eps` on the package index is somebody else's


def install(extra: str = "") -> str:
    """The command that installs EPS with one of its extras."""
    return f"pip install '{DISTRIBUTION}[{extra}]'" if extra else f"pip install {DISTRIBUTION}"
