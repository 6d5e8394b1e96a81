"""Attention backends that EPS does not support, by name: each is the stock class, but that a server which was asked for
EPS does not start with it, rather than to run without."""

import importlib
from typing import Any

from eps_core.errors import ConfigError


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if name not in AttentionBackendEnum.__members__:
        raise AttributeError(name)
    module, _, stock_name = AttentionBackendEnum[name].value.rpartition(".")
    stock = getattr(importlib.import_module(module), stock_name)
    members = {
        "__module__": __name__,
        "__qualname__": name,
        "get_impl_cls": staticmethod(lambda: _impl_of(stock, name)),
    }
    found = type(stock_name, (stock,), members)
    globals()[name] = found
    return found


def _impl_of(stock: Any, name: str) -> Any:
    from eps_cuda.integrations.vllm.backends import current_route

    if current_route() is not None:
        raise ConfigError(
            f"EPS was asked for and does not support vLLM's attention backend {name}: start it with "
            "--attention-backend TRITON_ATTN, or with method off"
        )
    return stock.get_impl_cls()
