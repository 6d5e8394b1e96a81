"""vLLM's selectors return the name of a backend's class and import it by that: each of ours is found so."""

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_layout import KVCacheLayout

from eps_cuda.integrations.vllm import backends, register
from eps_cuda.integrations.vllm.asked import Asked
from eps_cuda.integrations.vllm.classes import HOOKED

ROWS = Asked({"method": "rq"}, "rows")
UNUSED = ("CUSTOM", "NO_ATTENTION")


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # modules for other devices import vLLM's operators by the name of one build: beside another (of CPUs without
    # AVX-512), which registers the same ones, that ends the process
    if "vllm._C" not in sys.modules:
        monkeypatch.setitem(sys.modules, "vllm._C", None)
    register()
    yield


def class_of(name: str) -> Any:
    """The class that vLLM takes for a backend; a test is skipped where this build of vLLM has no stock one."""
    stock = AttentionBackendEnum[name].value
    if not stock:
        pytest.skip("the registry has no class for it")
    try:
        importlib.import_module(stock.rpartition(".")[0])
    except Exception as error:  # whatever a module for another device says
        pytest.skip(f"this build of vLLM cannot import {name}: {error}")
    module, _, attribute = AttentionBackendEnum[name].get_path().rpartition(".")
    return getattr(importlib.import_module(module), attribute)


@pytest.mark.parametrize("name", [name for name in AttentionBackendEnum.__members__ if name not in UNUSED])
def test_a_backend_is_found_by_its_own_name(name: str) -> None:
    found = class_of(name)
    assert found.__module__.startswith("eps_cuda.integrations.vllm.")
    assert resolve_obj_by_qualname(".".join(found.full_cls_name())) is found


@pytest.mark.parametrize("name", HOOKED)
def test_each_hooked_backend_has_its_routes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = class_of(name)
    monkeypatch.setattr(backends, "asked_now", lambda: ROWS)
    rows, blocks = found.get_impl_cls().routes.values()
    assert (rows.__name__, blocks.__name__) == HOOKED[name]


def test_no_fused_operation_writes_keys_past_eps(monkeypatch: pytest.MonkeyPatch) -> None:
    found = class_of("TRITON_ATTN")
    monkeypatch.setattr(found.__base__, "supports_kv_cache_update_bypass", True, raising=False)
    assert found.supports_kv_cache_update_bypass, "a server without EPS is stock"
    monkeypatch.setattr(backends, "asked_now", lambda: ROWS)
    assert not found.supports_kv_cache_update_bypass
    for name in ("rope", "qk_norm_rope", "qk_norm_mrope"):
        name = f"fused_{name}_kvcache_supported"
        monkeypatch.setattr(found.__base__.get_impl_cls(), name, lambda own: True)
        assert not getattr(found.get_impl_cls(), name)(None)
    monkeypatch.setattr(found.__base__, "supports_kv_cache_update_bypass", False)
    monkeypatch.setattr(backends, "asked_now", lambda: None)
    assert not found.supports_kv_cache_update_bypass


def test_blocks_are_whole_units_where_rows_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    found = class_of("TRITON_ATTN")
    wide = Asked({"method": "meanstd", "group_size": 256}, "rows")
    stock = Asked({"method": "meanstd"}, "stock")
    for want, blocks in ((None, {16: 16}), (stock, {16: 16}), (ROWS, {16: 64, 256: 256}), (wide, {16: 256})):
        monkeypatch.setattr(backends, "asked_now", lambda want=want: want)
        assert {default: found.get_preferred_block_size(default) for default in blocks} == blocks


def test_rows_prefer_each_heads_tokens_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, stock in (("TRITON_ATTN", None), ("CPU_ATTN", (KVCacheLayout.LBHNC,))):
        found = class_of(name)
        for want, expected in ((None, stock), (Asked({"method": "meanstd"}, "stock"), stock), (ROWS, True)):
            monkeypatch.setattr(backends, "asked_now", lambda want=want: want)
            found.get_impl_cls()
            layouts = found.supported_kv_cache_layouts()
            if expected is True:
                assert layouts[0] == KVCacheLayout.LBHNC and (stock is None) == (len(layouts) > 1)
            else:
                assert layouts == expected
