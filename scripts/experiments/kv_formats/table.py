"""Every rewrite by its name: a new one is one line here and one file."""

from types import ModuleType

from eps_core.errors import require, shown
from experiments.kv_formats import block_gtq, dar, dmc, per_channel, prq

REWRITES: dict[str, ModuleType] = {
    "per-channel": per_channel,
    "block-gtq": block_gtq,
    "prq": prq,
    "dar": dar,
    "dmc": dmc,
}


def rewrite(name: str) -> ModuleType:
    """The module of a rewrite. Raises ConfigError where there is none of that name."""
    require(name in REWRITES, f"rewrite {shown(name)} is unknown: choose one of {', '.join(REWRITES)}")
    return REWRITES[name]
