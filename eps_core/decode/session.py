"""A model, a backend, a device and kernels, opened once."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eps_core.config.eps import EpsConfig
from eps_core.config.store import CacheSpec
from eps_core.decode.cost import Cost
from eps_core.decode.forward import Decoder
from eps_core.decode.generate import Sampling
from eps_core.decode.kernel_check import disagreement
from eps_core.decode.model import ModelSpec
from eps_core.errors import ConfigError
from eps_core.gate.protocol import Backend
from eps_core.load import backend_name, resolve_kernels
from eps_core.paging.pool import PagePool
from eps_core.telemetry.steps import AUDIT_FACTOR


@dataclass(frozen=True)
class RunRequest:
    """What the command line asked for. `model` None is the demo model; `prompt` None is its needle document."""

    config: EpsConfig
    sampling: Sampling
    backend: str = "auto"
    device: str = "auto"
    model: Path | None = None
    prompt: str | None = None
    max_new_tokens: int = 32
    dtype: str = "auto"
    kv_dtype: str = "auto"
    prefill_chunk: int = 512
    pool_tokens: int | None = None
    baseline: bool = True
    kl: bool = False
    stop: bool = True
    method_is_default: bool = False  # for the header
    metrics: Path | None = None
    csv: Path | None = None
    audit_every: int = 0
    audit_factor: float = AUDIT_FACTOR
    audit_off: bool = False
    kernels: str = "auto"
    auto_min_context: bool = False  # measured by `prepare`, which settles the config


@dataclass
class Session:
    """A loaded model and a prompt, ready to decode."""

    request: RunRequest
    backend: Backend
    decoder: Decoder
    spec: ModelSpec
    tokenizer: Any
    device: str
    dtype: str
    kv_dtype: str
    prompt_tokens: list[int]
    answer: str | None  # of the built-in needle document
    kernels: str
    fault: str | None  # why auto took array operations instead of kernels
    cost: Cost | None  # behind an automatic min_context

    def cache_spec(self, config: EpsConfig) -> CacheSpec:
        return cache_spec(self.request, self.spec, len(self.prompt_tokens), self.kv_dtype, config)


def cache_spec(request: RunRequest, spec: ModelSpec, prompt_tokens: int, kv_dtype: str, config: EpsConfig) -> CacheSpec:
    """A pool that holds the prompt and its continuation, or `pool_tokens`."""
    needed_units = -(-(prompt_tokens + request.max_new_tokens) // config.store.unit_tokens)
    asked = request.pool_tokens
    num_units = needed_units if asked is None else asked // config.store.unit_tokens
    if num_units < needed_units:
        raise ConfigError(
            f"a prompt of {prompt_tokens} tokens and {request.max_new_tokens} new ones need {needed_units} pool groups "
            f"of {config.store.unit_tokens} tokens, and pool-tokens {asked} holds {num_units}: raise it to "
            f"{needed_units * config.store.unit_tokens} or shorten the prompt"
        )
    return CacheSpec(spec.num_layers, spec.num_kv_heads, spec.head_dim, num_units, kv_dtype, max_open_groups=1)


def _cache_bytes(spec: CacheSpec, config: EpsConfig) -> int:
    return spec.num_layers * spec.num_kv_heads * spec.num_units * config.store.unit_tokens * spec.kv_token_bytes


def _refuse_larger_than_memory(spec: CacheSpec, config: EpsConfig, device: str) -> None:
    """A cache larger than the machine fails before anything is printed; on a GPU its allocator is asked instead."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if device == "cpu" and _cache_bytes(spec, config) > memory:
        raise ConfigError(
            f"a cache of {_cache_bytes(spec, config) / 2**20:,.0f} MiB does not fit this machine's "
            f"{memory / 2**20:,.0f} MiB: lower pool-tokens or shorten the prompt"
        )


def choose_device(backend: Backend, asked: str) -> str:
    """The asked device, or the backend's GPU where it has one; an absent device is an error, never a fallback."""
    present = backend.devices()
    if asked == "auto":
        return next((device for device in present if device != "cpu"), "cpu")
    if asked not in present:
        raise ConfigError(
            f"device {asked} is not there for backend {backend_name(backend)}, which has {', '.join(present)}: "
            "choose one of them or --device auto"
        )
    return asked


def choose_kernels(
    backend: Backend, device: str, asked: str, spec: CacheSpec, num_heads: int, config: EpsConfig
) -> tuple[str, str | None]:
    """(kernels, why array operations were taken instead or None). A GPU's kernels that nobody asked for by name must
    agree with array operations first; a CPU's are tested on CPUs."""
    kernels = resolve_kernels(asked, backend.usable_kernels(device), device)
    if asked != "auto" or kernels == "arrays" or device == "cpu":
        return kernels, None
    fault = disagreement(backend, device, kernels, spec, num_heads, config)
    if fault is None:
        return kernels, None
    return "arrays", f"kernels {kernels} failed their check on this device ({fault})"


def new_cache(session: Session, config: EpsConfig) -> tuple[Any, PagePool]:
    spec = session.cache_spec(config)
    try:
        cache = session.backend.new_cache(spec, config.store, session.device, session.kernels)
    except (MemoryError, RuntimeError) as error:
        mib = _cache_bytes(spec, config) / 2**20
        raise ConfigError(
            f"a cache of {mib:,.0f} MiB does not fit {session.device}: lower pool-tokens or shorten the prompt"
        ) from error
    return cache, PagePool(spec.num_units, config.store.unit_tokens)
