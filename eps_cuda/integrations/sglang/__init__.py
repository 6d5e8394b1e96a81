"""EPS inside SGLang, unforked: `EPS_METHOD=rq python -m sglang.launch_server --model-path DIR --page-size 64
--attention-backend triton --disable-cuda-graph`.

SGLang calls `register` in each of its processes (entry point `sglang.srt.plugins`). Where the environment asks for EPS,
it puts subclasses in the place of the attention backends of `HOOKED`, and lets every other one refuse to start.
"""

import os
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path

from eps_core.errors import one_line, require
from eps_core.integrations.settings import Settings, from_environment, to_environment
from eps_core.integrations.versions import check_version

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


def register() -> None:
    """SGLang's entry point: cheap, and changes nothing for a server that did not ask for EPS. SGLang logs an error of a
    plugin and goes on without it, which nobody would notice: here it ends the process."""
    try:
        if asked() is None:
            return
        check_version("sglang")
        from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
        from sglang.srt.plugins.hook_registry import HookRegistry

        from eps_cuda.integrations.sglang import backend

        for name, create in ATTENTION_BACKENDS.items():
            ATTENTION_BACKENDS[name] = backend.hooked(create) if name in HOOKED else backend.refused(name)
        HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.get_internal_state", backend.with_counters)
    except Exception as error:
        raise SystemExit(f"eps: SGLang does not start with EPS: {one_line(error)}") from error


def serve(path: Path, settings: Settings, host: str, port: int, more: Sequence[str]) -> int:
    """See `eps_core.integrations.protocol.EngineModule`. This process becomes SGLang's server."""
    check_version("sglang")
    require(
        any(point.name == "eps" for point in entry_points(group="sglang.srt.plugins")),
        "SGLang does not see EPS in this environment: install it there (pip install -e .)",
    )
    allowed = os.environ.get("SGLANG_PLUGINS")
    require(
        not allowed or "eps" in allowed.split(","),
        f"SGLANG_PLUGINS {allowed!r} leaves EPS out: add eps to it, or unset it",
    )
    os.environ.update(to_environment(settings))
    wanted = {"--host": host, "--port": str(port)}
    if settings.config.cache_config.enabled:
        import torch

        wanted |= {
            "--attention-backend": "triton" if torch.cuda.is_available() else "torch_native",
            "--page-size": str(settings.config.cache_config.unit_tokens), "--disable-cuda-graph": "",
        }  # fmt: skip
    given = {one.split("=")[0] for one in more}
    usual = [part for name, value in wanted.items() if name not in given for part in (name, value) if part]
    os.execv(sys.executable, [sys.executable, "-m", "sglang.launch_server", "--model-path", str(path), *usual, *more])
