"""EPS inside vLLM, unforked: `vllm serve DIR --additional-config '{"eps": {"method": "rq", "budget": 0.05}}'`, or the
same in the environment (`EPS_METHOD=rq`, `EPS_BUDGET=0.05`, ..), which wins.

vLLM calls `register` in each of its processes (entry point `vllm.general_plugins`). It puts thin subclasses in the
place of attention backends, which are the stock ones unless a server was asked for EPS: see `classes`.
"""

import logging
import os
import re
import sys
from contextlib import suppress
from pathlib import Path

from eps_core.errors import ConfigError, one_line

logger = logging.getLogger("eps")


def register() -> None:
    """vLLM's entry point: cheap, may be called again, and changes nothing for a server that did not ask for EPS."""
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        for backend in AttentionBackendEnum:
            if backend.name not in ("CUSTOM", "NO_ATTENTION") and backend.value:
                register_backend(backend, f"eps_cuda.integrations.vllm.classes.{backend.name}")
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
    texts = list(sys.argv)
    for place, argument in enumerate(sys.argv):
        if argument.partition("=")[0] == "--config":  # a file of arguments
            with suppress(OSError, ValueError, IndexError):
                texts.append(Path(argument.partition("=")[2] or sys.argv[place + 1]).read_text())
    asks = re.compile(r"""\beps['"]?\s*:|^(--)?additional[-_]config\.eps\b""", re.MULTILINE)
    return os.environ.get("EPS_METHOD", "off") != "off" or any(map(asks.search, texts))
