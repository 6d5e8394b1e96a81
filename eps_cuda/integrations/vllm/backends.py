"""Thin subclasses of vLLM's attention backends: the stock classes themselves unless the server was asked for EPS."""

from functools import partial
from typing import Any, ClassVar

from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config, get_current_vllm_config_or_none
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.kv_cache_layout import KVCacheLayout

from eps_core.errors import ConfigError
from eps_core.integrations.settings import Settings
from eps_cuda.integrations.vllm.asked import Asked, asked, fitted, uncaptured
from eps_cuda.integrations.vllm.forward import HostArrays
from eps_cuda.integrations.vllm.runtime import Runtime, runtime_in, runtime_of


def asked_now() -> Asked | None:
    """Return what the server whose layers are being made was asked for; None: nothing."""
    vllm_config = get_current_vllm_config_or_none()
    return None if vllm_config is None else asked(vllm_config)


class EpsImpl:
    """The class ahead of a stock implementation in a class of both: K writes and decode rows of sparse layers go to the
    runtime's route, everything else to the stock one."""

    routes: ClassVar[dict[str, Any]]  # name -> class, made with the backend module

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        vllm_config = get_current_vllm_config()
        want = asked(vllm_config)
        assert want is not None
        self.eps_runtime = runtime_in(vllm_config) or Runtime(vllm_config, want)

    def eps_route(self, runtime: Runtime) -> Any:
        return self.routes[runtime.want.route](runtime.backend)

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        stock = partial(super().do_kv_cache_update, layer, key, value, kv_cache, slot_mapping)  # type: ignore[misc]
        runtime, place = self.eps_runtime, self.eps_runtime.place(layer)
        if place is None or not runtime.serve(layer, kv_cache):
            stock()
            return
        if runtime.graphs is not None and runtime.graphs.batch_of(layer) is not None:
            return  # `forward` writes and attends at once
        runtime.route.write(runtime, place, key, value, slot_mapping, stock)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        stock = partial(
            super().forward, layer, query, key, value, kv_cache, output=output, output_scale=output_scale,  # type: ignore[misc]
            output_block_scale=output_block_scale,
        )  # fmt: skip
        runtime, place = self.eps_runtime, self.eps_runtime.place(layer)
        skips = attn_metadata is None or place is None or not runtime.serve(layer, kv_cache)
        if not skips and key is None:
            skips = True  # no summary follows what the model writes, and a block's last owner may have left others
            runtime.sparse.tell(ConfigError("this model writes K and V itself: EPS does not see them, use method off"))
        if skips:
            result: Tensor = stock(attn_metadata=attn_metadata)
            return result
        if attn_metadata.eps_decode is not None:
            attn_metadata.eps_decode.attend(place, self, query, key, value, output)
        else:
            runtime.route.forward(runtime, place, self, layer, query, attn_metadata, output, stock)
        return output

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        return False  # EPS writes numbers as they are

    def fused_rope_kvcache_supported(self) -> bool:
        return False  # it would write K past `do_kv_cache_update`

    fused_qk_norm_rope_kvcache_supported = fused_qk_norm_mrope_kvcache_supported = fused_rope_kvcache_supported


class EpsBuilder:
    """The class ahead of a stock metadata builder in a class of both: starts the runtime before the first request, and
    the copy of what layers need of a batch on the host."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: Any, **more: Any):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, **more)  # type: ignore[call-arg]
        self.eps_runtime = None
        context = vllm_config.compilation_config.static_forward_context
        for name in layer_names:
            self.eps_runtime = self.eps_runtime or runtime_of(context.get(name))
        if self.eps_runtime is not None:
            self.eps_runtime.start(layer_names, kv_cache_spec.block_size)
            self.eps_runtime.release()  # blocks that vLLM made to measure its memory, and has given back
            if not any(name in self.eps_runtime.places for name in layer_names):
                self.eps_runtime = None  # all layers are dense: nothing reads the batch on the host

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)  # type: ignore[misc]
        runtime = self.eps_runtime
        if runtime is not None:
            metadata.eps_decode = runtime.decode_batch(common_attn_metadata)
            if metadata.eps_decode is None:
                exact = runtime.vllm_config.speculative_config is None  # vLLM's lengths on the host
                metadata.eps_host = HostArrays(common_attn_metadata, runtime.block_tokens, exact)
        return metadata

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        metadata = super().build_for_cudagraph_capture(common_attn_metadata)  # type: ignore[misc]
        if self.eps_runtime is not None and self.eps_runtime.graphs is not None:
            self.eps_runtime.graphs.drop()
        return metadata

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: Any) -> AttentionCGSupport:
        stock: AttentionCGSupport = super().get_cudagraph_support(vllm_config, kv_cache_spec)  # type: ignore[misc]
        want = asked(vllm_config)
        if want is None:
            return stock
        block_tokens = kv_cache_spec.block_size
        if uncaptured(vllm_config, fitted(want, block_tokens), want.route, block_tokens) is not None:
            return AttentionCGSupport.NEVER  # the host chooses: graphs around attention are left
        single = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return min(stock, single, key=lambda support: support.value)


class Bypass:
    """A backend's attribute since vLLM 0.33: whether a model may write K past `do_kv_cache_update`. As the stock class
    says, unless the server was asked for EPS, as is known where layers are made, which alone ask."""

    def __init__(self, stock: type) -> None:
        self.stock = stock

    def __get__(self, instance: Any, owner: type) -> bool:
        return getattr(self.stock, "supports_kv_cache_update_bypass", False) and asked_now() is None


def hooked(stock: type, rows: type, by_blocks: type, module: str, name: str) -> type:
    """Return the backend that takes the place of a stock one, with the routes that it has, as `name` of a module."""
    stock_impl, stock_builder = stock.get_impl_cls(), stock.get_builder_cls()  # type: ignore[attr-defined]
    here = {"__module__": module}
    routes = {"routes": {"rows": rows, "stock": by_blocks}}
    impl = type(f"Eps{stock_impl.__name__}", (EpsImpl, stock_impl), here | routes)
    builder = type(f"Eps{stock_builder.__name__}", (EpsBuilder, stock_builder), here)

    def preferred(default_block_size: int) -> int:
        """Return the tokens of a block where the user gave none: of route rows a unit, which vLLM's usual 16 are not,
        and which CUDA graphs want."""
        usual: int = stock.get_preferred_block_size(default_block_size)  # type: ignore[attr-defined]
        want = asked_now()
        if want is None or want.route != "rows":
            return usual
        return max(usual, Settings.of(want.flat).config.cache_config.unit_tokens)

    rows_made = False  # of the layers that were made last; who asks for layouts does not say for which server

    def chosen() -> type:
        nonlocal rows_made
        want = asked_now()
        rows_made = want is not None and want.route == "rows"
        return stock_impl if want is None else impl

    def layouts() -> Any:
        """Return the layouts of K and V in blocks, the preferred first: of rows each head's tokens side by side."""
        own = stock.supported_kv_cache_layouts()  # type: ignore[attr-defined]
        if not rows_made:
            return own
        usual = KVCacheLayout.LBHNC, KVCacheLayout.LBNHC
        return tuple(sorted(own or usual, key=lambda layout: layout != KVCacheLayout.LBHNC))

    members = here | {
        "get_impl_cls": staticmethod(chosen),
        "supported_kv_cache_layouts": staticmethod(layouts),
        # asked of each server when it is built, as it is not always known here which one that is
        "get_builder_cls": staticmethod(lambda: builder),
        "get_preferred_block_size": staticmethod(preferred),
        "supports_kv_cache_update_bypass": Bypass(stock),
    }
    # vLLM groups layers by the full name of their backend, and imports it by that name
    return type(f"Eps{stock.__name__}", (stock,), {**members, "__qualname__": name})
