"""vLLM's attention backends by name, as `register` names them: with EPS where it is supported. Each other one is the
stock class, but that a server which was asked for EPS does not start with it, rather than to run without.

A class is made when it is first looked up: the module of its stock class may be importable on other devices alone.
"""

import importlib
from typing import Any

from eps_core.errors import ConfigError

STRIDED = "StridedRows", "StridedBlocks"
HOOKED = {"CPU_ATTN": ("PlainRows", "PackedBlocks"), "TRITON_ATTN": STRIDED, "FLASH_ATTN": STRIDED}


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if name not in AttentionBackendEnum.__members__:
        raise AttributeError(name)
    module, _, stock_name = AttentionBackendEnum[name].value.rpartition(".")
    stock = getattr(importlib.import_module(module), stock_name)
    if name in HOOKED:
        from eps_cuda.integrations.vllm import blocks, rows
        from eps_cuda.integrations.vllm.backends import hooked

        of_rows, of_blocks = HOOKED[name]
        found = hooked(stock, getattr(rows, of_rows), getattr(blocks, of_blocks), __name__, name)
    else:
        members = {
            "__module__": __name__,
            "__qualname__": name,
            "get_impl_cls": staticmethod(lambda: _impl_of(stock, name)),
        }
        found = type(stock_name, (stock,), members)
    globals()[name] = found
    return found


def _impl_of(stock: Any, name: str) -> Any:
    from eps_cuda.integrations.vllm.backends import asked_now

    if asked_now() is not None:
        raise ConfigError(
            f"EPS was asked for and does not support vLLM's attention backend {name}: start it with "
            "--attention-backend TRITON_ATTN, or with method off"
        )
    return stock.get_impl_cls()
