"""What a user can mend: one line that names the value, the limit and the mend."""


class ConfigError(ValueError):
    """A value that the user gave and can mend; the message is one line with the value, the limit and the mend."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def overflow(where: str, kept_in: str = "float32") -> ConfigError:
    """The error for NaN or Inf in what a model computed, and the mend that is left."""
    cause = "the weights are damaged, or overflow --dtype where that is not float32"
    if kept_in != "float32":
        cause = f"the model or its {kept_in} cache overflows; try --dtype float32"
    return ConfigError(f"NaN or Inf in {where}: {cause}")


DISTRIBUTION = "eigenpage"  # the name to install by: `eps` on the package index is somebody else's


def install(extra: str = "") -> str:
    """The command that installs EPS with one of its extras."""
    return f"pip install '{DISTRIBUTION}[{extra}]'" if extra else f"pip install {DISTRIBUTION}"
