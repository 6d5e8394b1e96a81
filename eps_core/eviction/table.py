"""Every eviction policy by its name: a new one is one line here and one file."""

from types import ModuleType

from eps_core.errors import require, shown
from eps_core.eviction import (
    adakv,
    epikv,
    h2o,
    infinigen,
    keydiff,
    kv_compress,
    kv_compress_full,
    logdet,
    nacl,
    nexus,
    oracle,
    pyramidkv,
    random,
    rkv,
    rswa,
    scissorhands,
    snapkv,
    streaming,
    tova,
    triattention,
)

POLICIES: dict[str, ModuleType] = {
    "streaming": streaming,
    "h2o": h2o,
    "scissorhands": scissorhands,
    "tova": tova,
    "snapkv": snapkv,
    "pyramidkv": pyramidkv,
    "adakv": adakv,
    "keydiff": keydiff,
    "nacl": nacl,
    "rkv": rkv,
    "logdet": logdet,
    "triattention": triattention,
    "epikv": epikv,
    "nexus": nexus,
    "infinigen": infinigen,
    "kv-compress": kv_compress,
    "kv-compress-full": kv_compress_full,
    "rswa": rswa,
    "random": random,
    "oracle": oracle,
}


def policy(name: str) -> ModuleType:
    """The module of a policy. Raises ConfigError where there is none of that name."""
    require(name in POLICIES, f"eviction policy {shown(name)} is unknown: choose one of {', '.join(POLICIES)}")
    return POLICIES[name]
