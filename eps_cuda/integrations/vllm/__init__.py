"""EPS inside vLLM, unforked: `vllm serve DIR --additional-config '{"eps": {"method": "rq", "budget": 0.05}}'`, or the
same in the environment (`EPS_METHOD=rq`, `EPS_BUDGET=0.05`, ..), which wins.

vLLM calls `register` in each of its processes (entry point `vllm.general_plugins`). It puts thin subclasses in the
place of attention backends, which are the stock ones unless a server was asked for EPS: see `backends.hooked`.
"""

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from eps_core.errors import ConfigError, one_line
from eps_core.integrations.protocol import Engine
from eps_core.integrations.settings import Settings

logger = logging.getLogger("eps")
# sparse here; every other attention backend refuses to start where EPS was asked for, rather than to run without it
HOOKED = {"CPU_ATTN": "cpu", "TRITON_ATTN": "triton", "FLASH_ATTN": "flash"}


def register() -> None:
    """vLLM's entry point: cheap, may be called again, and changes nothing for a server that did not ask for EPS."""
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        for name, module in HOOKED.items():
            register_backend(AttentionBackendEnum[name], f"eps_cuda.integrations.vllm.{module}.Backend")
        for backend in AttentionBackendEnum:
            if backend.name not in (*HOOKED, "CUSTOM", "NO_ATTENTION") and backend.value:
                register_backend(backend, f"eps_cuda.integrations.vllm.refused.{backend.name}")
        if _named():
            from eps_cuda.integrations.vllm import metrics

            metrics.export()
    except Exception as error:
        message = f"EPS cannot be used with this vLLM ({one_line(error)}): install a version that it works with"
        # vLLM would go on without us, and nobody would notice
        if _named():
            raise ConfigError(message) from error
        logger.warning(message)


def _named() -> bool:
    """Return whether the environment or the command line of this process asks for EPS, as far as is known before vLLM
    reads its own configuration."""
    return os.environ.get("EPS_METHOD", "off") != "off" or any('"eps"' in argument for argument in sys.argv)


def open_engine(
    path: Path, settings: Settings, device: str = "auto", dtype: str = "auto", max_tokens: int = 0,
    num_sequences: int = 1,
) -> Engine:  # fmt: skip
    """See `eps_core.integrations.protocol.EngineModule`."""
    from eps_cuda.integrations.vllm.asked import refuse_verified

    refuse_verified(settings)
    from eps_cuda.integrations.vllm import adapter

    register()  # whether or not vLLM finds the entry point
    return adapter.open_engine(path, settings, device, dtype, max_tokens, num_sequences)


def serve(path: Path, settings: Settings, host: str, port: int, more: Sequence[str]) -> int:
    """See `eps_core.integrations.protocol.EngineModule`."""
    from eps_cuda.integrations.vllm import adapter

    return adapter.serve(path, settings, host, port, more)
