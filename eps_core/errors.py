"""What a user can mend: one line that names the value, the limit and the mend."""


class ConfigError(ValueError):
    """A value that the user gave and can mend; the message is one line with the value, the limit and the mend."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)
