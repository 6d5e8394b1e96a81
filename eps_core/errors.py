"""What a user can mend: one line that names the value, the limit and the mend."""


class ConfigError(ValueError):
    """A value that the user gave and can mend; the message is one line with the value, the limit and the mend."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def fault_line(error: BaseException) -> str:
    """What the machine did, in one line."""
    name = "out of memory" if isinstance(error, MemoryError) else type(error).__name__
    return " ".join(f"{name}: {error}".split()).removesuffix(":")


DISTRIBUTION = "eigenpage"  # the name to install by: `eps` on the package index is somebody else's


def install(extra: str = "") -> str:
    """The command that installs EPS with one of its extras."""
    return f"pip install '{DISTRIBUTION}[{extra}]'" if extra else f"pip install {DISTRIBUTION}"
