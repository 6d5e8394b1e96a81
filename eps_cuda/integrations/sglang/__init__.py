"""EPS inside SGLang, unforked: `EPS_METHOD=rq python -m sglang.launch_server --model-path DIR --page-size 64
--attention-backend triton --disable-cuda-graph`.

SGLang calls `register` in each of its processes (entry point `sglang.srt.plugins`). Where the environment asks for EPS,
it puts subclasses in the place of the attention backends of `asked.HOOKED`, and lets every other one refuse to start.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from eps_core.errors import one_line
from eps_core.integrations.settings import PREFIX, Settings, from_environment, to_environment
from eps_core.integrations.versions import check_version
from eps_core.io.schema import REMOVED, SETTINGS
from eps_cuda.device import devices
from eps_cuda.integrations.sglang.asked import HOOKED, asked


def register() -> None:
    """SGLang's entry point: cheap, and changes nothing for a server that did not ask for EPS. SGLang logs an error of a
    plugin and continues without it; here an error ends the process."""
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
    from eps_cuda.integrations.paged import check_plugin

    check_version("sglang")
    # where the variable is empty, SGLang loads all plugins and vLLM none; SGLang strips spaces
    check_plugin("SGLang", "sglang.srt.plugins", os.environ.get("SGLANG_PLUGINS", "").replace(" ", "") or None)
    for name in (*from_environment(), *SETTINGS, *REMOVED):
        os.environ.pop(PREFIX + name.upper(), None)
    os.environ.update(to_environment(settings))
    has_gpu = bool(devices()[1:])
    wanted = {"--host": host, "--port": str(port)} | ({} if has_gpu else {"--device": "cpu"})
    if settings.config.cache_config.enabled:
        wanted |= {
            "--attention-backend": "triton" if has_gpu else "torch_native",
            "--page-size": str(settings.config.cache_config.unit_tokens), "--disable-cuda-graph": "",
        }  # fmt: skip
    given = {one.split("=")[0] for one in more}
    usual = [part for name, value in wanted.items() if name not in given for part in (name, value) if part]
    os.execv(sys.executable, [sys.executable, "-m", "sglang.launch_server", "--model-path", str(path), *usual, *more])
