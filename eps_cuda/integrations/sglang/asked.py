"""Settings that a user asks of EPS in SGLang, and the attention backends that it works in."""

from eps_core.integrations.settings import Settings, from_environment
from eps_core.integrations.verified import check_engine

HOOKED = ("torch_native", "triton")


def asked() -> Settings | None:
    """Return the settings that the environment asks for; None: it asks for nothing. Raises ConfigError for settings
    that are none."""
    flat = from_environment()
    if flat.get("method", "off") == "off":
        return None
    settings = Settings.of(flat)
    check_engine(settings.verify, "SGLang")
    return settings
