"""What a user can mend: one line that names the value, the limit and the mend."""

import sys
from collections.abc import Callable


class ConfigError(ValueError):
    """A value that the user gave and can mend; the message is one line with the value, the limit and the mend."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def exit_code(main: Callable[[], int | None]) -> int:
    """Of a script: 2, and one line on stderr, where it meets what the user can mend."""
    try:
        return main() or 0
    except ConfigError as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        return 2


DISTRIBUTION = "eigenpage"  # the name to install by: `eps` on the package index is somebody else's


def install(extra: str = "") -> str:
    """The command that installs EPS with one of its extras."""
    return f"pip install '{DISTRIBUTION}[{extra}]'" if extra else f"pip install {DISTRIBUTION}"
