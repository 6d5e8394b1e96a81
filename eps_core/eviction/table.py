"""Every eviction policy by its name: a new one is a name here and one file."""

import importlib
from types import ModuleType

from eps_core.errors import require, shown

NAMES = (
    "streaming", "h2o", "scissorhands", "tova", "snapkv", "pyramidkv", "adakv", "keydiff", "nacl", "rkv", "logdet",
    "triattention", "epikv", "nexus", "infinigen", "kv-compress", "kv-compress-full", "rswa", "random", "oracle",
)  # fmt: skip
POLICIES: dict[str, ModuleType] = {
    name: importlib.import_module(f"eps_core.eviction.{name.replace('-', '_')}") for name in NAMES
}


def policy(name: str) -> ModuleType:
    """The module of a policy. Raises ConfigError where there is none of that name."""
    require(name in POLICIES, f"eviction policy {shown(name)} is unknown: choose one of {', '.join(POLICIES)}")
    return POLICIES[name]
