"""Settings that a user asks of EPS in SGLang, and the attention backends that it works in."""

from eps_core.errors import require
from eps_core.integrations.settings import Settings, from_environment

HOOKED = ("torch_native", "triton")


def asked() -> Settings | None:
    """Return the settings that the environment asks for; None: it asks for nothing. Raises ConfigError for settings
    that are none."""
    flat = from_environment()
    if flat.get("method", "off") == "off":
        return None
    settings = Settings.of(flat)
    require(
        not settings.verify.enabled,
        "eps-verify: SGLang has no place for drafts over its own model's cache: leave it out, or take --engine own, "
        "mlx-lm or transformers",
    )
    return settings
