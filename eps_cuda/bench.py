"""The benchmarks' view of Torch: dense attention as good as it gets, a clock, copies, cold caches, CUDA graphs.

See eps_core.cpu.host for what each function promises. GPUs are timed by events on their own clock.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from eps_core.backend.gpu import covers_codes
from eps_core.backend.scoring import score
from eps_core.backend.selection import select
from eps_core.cpu import host
from eps_core.cpu.host import Variant
from eps_core.kv_cache.step_plan import StepPlan
from eps_cuda.cache import Cache
from eps_cuda.capture import captured
from eps_cuda.device import devices, empty_pool, gpu
from eps_cuda.kernels.choose import usable_kernels
from eps_cuda.ops import OPS

GPU_FLUSH_BYTES = 512 * 2**20


def prepare(device: str) -> None:
    """Nothing to do: every array names its device."""


@torch.inference_mode()
def dense_variants(k: Tensor, v: Tensor, q: Tensor) -> dict[str, Variant]:
    """Dense attention by name, each () -> out [B, Hq, D]: k, v [B, Hkv, T, D] contiguous, q [B, Hq, D] unscaled. On a
    GPU Torch's own choice of kernel and each of its kernels by itself, and FlexAttention compiled."""
    batch, kv_heads, _, head_dim = k.shape
    single = q.reshape(batch, -1, 1, head_dim)  # one row each of Hq heads
    rows = q.reshape(batch, kv_heads, -1, head_dim)  # the query heads of one kv head as its rows
    scale = 1 / math.sqrt(head_dim)
    shares = rows.shape[2] > 1

    def grouped_matmul() -> Tensor:
        weights = torch.softmax(((rows * scale) @ k.mT).float(), dim=-1)
        return (weights.to(v.dtype) @ v).reshape(q.shape)

    variants: dict[str, Variant] = {
        "sdpa gqa": lambda: scaled_dot_product_attention(single, k, v, enable_gqa=shares).reshape(q.shape),
        "sdpa rows": lambda: scaled_dot_product_attention(rows, k, v).reshape(q.shape),
        "grouped matmul": grouped_matmul,
    }
    if k.device.type == "cuda":
        for kernel in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
            name = kernel.name.removesuffix("_ATTENTION").lower()
            variants[f"sdpa rows {name}"] = _sdpa_by(kernel, rows, k, v, q.shape)
        variants["flex attention"] = _flex(single, k, v, q.shape, shares)
    return {name: torch.inference_mode()(variant) for name, variant in variants.items()}


def _sdpa_by(kernel: SDPBackend, rows: Tensor, k: Tensor, v: Tensor, shape: torch.Size) -> Variant:
    def attend() -> Tensor:
        with sdpa_kernel(kernel):
            return scaled_dot_product_attention(rows, k, v).reshape(shape)

    return attend


def _flex(single: Tensor, k: Tensor, v: Tensor, shape: torch.Size, shares: bool) -> Variant:
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.reset()  # every context is compiled again; past a few shapes the compiler would give up
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(single, k, v, enable_gqa=shares).reshape(shape)


def synchronize(*results: Any) -> None:
    """Waits until the device has nothing left to do."""
    for device in devices()[1:]:
        gpu(device).synchronize()


def stopwatch(device: str) -> Callable[[Variant], tuple[float, Any]]:
    if device == "cpu":
        return host.stopwatch(device)

    def timed(function: Variant) -> tuple[float, Any]:
        start, end = (gpu(device).Event(enable_timing=True) for _ in range(2))
        start.record()
        result = function()
        end.record()
        end.synchronize()
        return start.elapsed_time(end), result

    return timed


def flusher(num_bytes: int, device: str) -> Variant:
    """On the CPU by all of Torch's threads, as other layers would leave them. On a GPU the buffer is larger: its write
    also hides the host's part of the launches that follow."""
    if device == "cpu":
        buffer = torch.zeros(num_bytes // 4)
        return lambda: buffer.add_(1)
    return torch.zeros(max(num_bytes, GPU_FLUSH_BYTES), dtype=torch.uint8, device=device).zero_


def bandwidth_variants(num_bytes: int, device: str) -> dict[str, tuple[Variant, int]]:
    if device == "cpu":
        return host.bandwidth_variants(num_bytes, device)
    source, target = (torch.ones(num_bytes // 4, device=device) for _ in range(2))
    return {"copy": (lambda: target.copy_(source), 2 * num_bytes), "read": (source.max, num_bytes)}


def stack_heads(parts: Sequence[Tensor]) -> Tensor:
    """B arrays [T, Hkv, D] as one contiguous [B, Hkv, T, D], in huge pages as the cache's own pools are."""
    tokens, kv_heads, head_dim = parts[0].shape
    shape = (len(parts), kv_heads, tokens, head_dim)
    return torch.stack([part.transpose(0, 1) for part in parts], out=empty_pool(shape, parts[0].dtype, parts[0].device))


def free_bytes(device: str) -> int | None:
    return host.free_bytes(device) if device == "cpu" else gpu(device).mem_get_info()[0]


def last_cache_bytes(device: str) -> int | None:
    """None where the device does not say."""
    if device == "cpu":
        return host.last_cache_bytes(device)
    return getattr(gpu(device).get_device_properties(0), "L2_cache_size", None)


def device_facts(device: str) -> dict[str, Any]:
    if device == "cpu":
        threads = None
        if "numba" in usable_kernels("cpu"):
            from eps_cuda.kernels.cpu import kernel_threads  # imports numba

            threads = kernel_threads()
        return {"device_name": host.host_name(), "threads": torch.get_num_threads(), "kernel_threads": threads}
    facts = gpu(device).get_device_properties(0)
    return {
        "device_name": facts.name,
        "multiprocessors": getattr(facts, "multi_processor_count", None),
        "memory_bytes": facts.total_memory,
        "cuda": torch.version.cuda or torch.version.hip,
    }


def capture(function: Variant) -> Variant | None:
    """The function as a CUDA graph that gives the same output arrays at each replay; None without CUDA. Raises
    RuntimeError where it cannot be captured."""
    if not torch.cuda.is_available():
        return None
    graph, result = captured(function)

    def replay() -> Any:
        graph.replay()
        return result

    return replay


@torch.inference_mode()
def device_parts(cache: Cache, q: Tensor, plan: StepPlan) -> dict[str, Variant]:
    """The parts of a step that Triton kernels cover, from arrays on the device alone as a captured decode step calls
    them: score, select, attend and step, each () -> what it gives; a part's input is what the part before it gave when
    this was called."""
    if cache.kernels != "triton":
        return {}
    from eps_cuda.kernels import dispatch
    from eps_cuda.kernels.attend import attend_groups

    config = plan.config
    first = score(OPS, cache, 0, q, plan)
    chosen = select(OPS, first, plan)
    if chosen.common_counts is None:
        return {}
    table, lengths = dispatch.kernels.on_device(cache, plan)
    depth = dispatch.depth_of(cache, plan)
    wanted, width = OPS.on(cache, chosen.common_counts.astype(np.int32)), max(int(chosen.common_counts.max()), 1)

    def estimates() -> Tensor:
        return dispatch.kernels.estimates(cache, 0, q, plan, table, lengths)

    def choose(estimate: Tensor = first.estimate) -> tuple[Tensor, Tensor, Tensor]:
        return dispatch.kernels.choose(config, estimate, wanted, lengths, width)

    listed = choose()

    def attend(groups: Tensor = listed[0], counts: Tensor = listed[1]) -> tuple[Tensor, Tensor]:
        return attend_groups(
            q, cache.k[0], cache.v[0], table, lengths, groups, counts, group_size=config.cache_config.S
        )

    def step() -> tuple[Tensor, Tensor | None]:
        best = dispatch.attend_layer(config, cache, 0, q, table, lengths, wanted, depth, width)
        return best.out, best.lse

    parts: dict[str, Variant] = {"select": choose, "attend": attend}
    if covers_codes(cache):
        parts = {"score": estimates, **parts, "step": step}
    return {name: torch.inference_mode()(part) for name, part in parts.items()}
