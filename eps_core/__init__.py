"""EPS core: configuration, page pool, the float64 oracle, the decode loop, the metrics and the command line.

The Python API has two names, which are imported when they are first used:

    from eps_core import LLM, EpsConfig

Imports neither mlx nor torch; `eps_core.load.load_backend` loads a backend by name.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__all__ = ["LLM", "EpsConfig"]

if TYPE_CHECKING:
    from eps_core.config.eps import EpsConfig
    from eps_core.decode.llm import LLM
else:
    _MODULES = {"LLM": "eps_core.decode.llm", "EpsConfig": "eps_core.config.eps"}

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_MODULES[name]), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
