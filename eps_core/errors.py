"""Errors that a user can fix: one line that names the value, the limit and the fix."""

import os
import reprlib
import sys
from collections.abc import Callable
from typing import Any


class ConfigError(ValueError):
    """A value that the user gave and can fix; the message is one line with the value, the limit and the fix."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def exit_code(main: Callable[[], int | None]) -> int:
    """Return a script's exit code: 2, with one line on stderr, for what the user can fix; 2 if its reader is gone."""
    try:
        return main() or 0
    except ConfigError as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
    except BrokenPipeError:  # whoever read us has gone; Python's own flush at exit must not complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 2


def overflow(place: str, kept_in: str = "float32") -> ConfigError:
    """The error for NaN or Inf in what a model computed, and the fix that is left."""
    cause = "the weights are damaged, or overflow in their dtype where it is not float32"
    if kept_in != "float32":
        cause = f"the model or its {kept_in} cache overflows; try float32 (--dtype, where there is one)"
    return ConfigError(f"NaN or Inf in {place}: {cause}")


class _Short(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if x.bit_length() <= 128 else f"a number of {x.bit_length():,} bits"


_SHORT = _Short()
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxdict, _SHORT.maxstring, _SHORT.maxother = 3, 4, 4, 80, 80


def brief(text: str, most: int = 60) -> str:
    """A text as it stands, cut to `most` characters."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def shown(value: Any) -> str:
    """`value` as a message shows it: whatever a flag or JSON held, in less than a line."""
    return brief(_SHORT.repr(value), 120)


def one_line(error: BaseException) -> str:
    """Return the message of an error of a library, else its name."""
    return brief(" ".join(str(error).split()), 300) or type(error).__name__


def fault_line(error: BaseException) -> str:
    """Return one line on a fault of the machine: the error's name and what it says."""
    name = "out of memory" if isinstance(error, MemoryError) else type(error).__name__
    return brief(" ".join(f"{name}: {error}".split()).removesuffix(":"), 300)


DISTRIBUTION = "eigenpage"  # the name to install by: `eps` on the package index is somebody else's


def install(extra: str = "") -> str:
    """The command that installs EPS with one of its extras."""
    return f"pip install '{DISTRIBUTION}[{extra}]'" if extra else f"pip install {DISTRIBUTION}"
