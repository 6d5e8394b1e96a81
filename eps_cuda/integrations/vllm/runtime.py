"""EPS in one vLLM worker: its settings, its sparse layers, the cache over the blocks that vLLM handed to them."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from eps_core.config.cache import CacheSpec
from eps_core.errors import require
from eps_core.integrations.kernels import checked_kernels
from eps_core.integrations.layers import SparseAttention
from eps_core.integrations.plan import Plan
from eps_core.integrations.settings import Settings
from eps_cuda.cache import new_cache
from eps_cuda.integrations.paged import PagedRuntime
from eps_cuda.integrations.vllm import metrics
from eps_cuda.integrations.vllm.asked import Asked, dense_reason, fitted, refusals, sliding_tokens, uncaptured
from eps_cuda.integrations.vllm.forward import Forward

logger = logging.getLogger("eps")


class Runtime(PagedRuntime):
    """Made by the first layer of a model, started by its attention metadata's builder, given a cache by the first
    write. `sparse` and `plan` are there once it is started."""

    def __init__(self, vllm_config: Any, want: Asked) -> None:
        refusals(vllm_config, want)
        super().__init__()
        self.vllm_config, self.want = vllm_config, want
        self.places: dict[str, int] = {}  # vLLM's layer name -> layer of the cache
        self.route: Any = None
        self.block_tokens = 0
        self.uncaptured: str | None = None  # why decode batches are not captured whole; known once the layers are
        self.graphs: Any = None  # `graphs.DecodeGraphs`, once there was such a batch
        self._pointers: list[int] = []
        self._shown = metrics.Shown(vllm_config)

    # ------------------------------------------------------------------------------------------------------- starting

    def start(self, names: list[str], block_tokens: int) -> None:
        """Settle once which layers are sparse, now that those of one KV cache group and its blocks are known. Raises
        ConfigError where none would be."""
        if self.sparse is not None:
            return
        layers = {
            name: layer
            for name, layer in self.vllm_config.compilation_config.static_forward_context.items()
            if hasattr(layer, "impl")
        }
        read = {getattr(layer, "kv_sharing_target_layer_name", None) for layer in layers.values()}

        def reason_of(name: str, layer: Any) -> str | None:
            if runtime_of(layer) is not self:
                return f"attends by {type(layer.impl).__name__}"
            hidden = name in read and layer.impl.routes[self.want.route].own_layout
            return dense_reason(layer.impl) or ("its K and V are read by another layer" if hidden else None)

        reasons = {name: reason_of(name, layer) for name, layer in layers.items()}
        able = [name for name, reason in reasons.items() if reason is None]
        shapes = {
            name: (impl.num_kv_heads, impl.num_heads, impl.head_size, layers[name].kv_cache_torch_dtype)
            for name in able
            if (impl := layers[name].impl)
        }
        ours = next((name for name in able if name in names), None)
        if able and ours is None:
            return  # a group of sliding windows, say: another one follows
        for name in able:
            if name not in names:
                reasons[name] = "another KV cache group"
            elif shapes[name] != shapes[ours]:
                reasons[name] = "heads of another shape"
        plan = Plan.of(list(reasons.values()), [sliding_tokens(layer.impl) for layer in layers.values()])
        settings = fitted(self.want, block_tokens)
        device = self.vllm_config.device_config.device_type
        settings = replace(settings, config=settings.config.for_device(device))
        heads = settings.config.selection_config.head_modes
        require(
            not heads or (len(heads) == len(plan.sparse) == len(reasons)),
            "a head policy needs every layer of the model sparse: leave it out",
        )
        self.places = {name: place for place, name in enumerate(n for n, reason in reasons.items() if reason is None)}
        self.settings, self.block_tokens = settings, block_tokens
        self.route = next(iter(layers[name].impl for name in self.places)).eps_route(self)
        self.sparse = SparseAttention(
            self.route.backend, settings.config, plan, metrics=_own_file(settings.metrics, self.vllm_config),
            audit_every=settings.audit_every, model=str(self.vllm_config.model_config.model),
        )  # fmt: skip
        self.sparse.fits(shapes[next(iter(self.places))][0])
        self.uncaptured = uncaptured(self.vllm_config, settings, self.want.route, block_tokens)
        self._say(f"{plan.line(settings.config)}; route {self.want.route}, vLLM blocks of {block_tokens} tokens")
        if device == "cuda":
            alone = "" if self.uncaptured is None else f" only without attention ({self.uncaptured})"
            self._say(f"CUDA graphs of decode batches{alone}, where vLLM's cudagraph_mode has such")

    def place(self, layer: Any) -> int | None:
        """Return the place of a layer in the cache; None: it is dense, or nothing is started (a profile run)."""
        return self.places.get(layer.layer_name)

    def serve(self, layer: Any, kv_cache: Tensor) -> bool:
        """Return whether a sparse layer has its cache, which is made with the first block tensors that vLLM gives, and
        made again where it gives others (after it slept)."""
        if kv_cache.numel() == 0:
            return False
        place = self.places[layer.layer_name]
        if not self._pointers or self._pointers[place] != kv_cache.data_ptr():
            context = self.vllm_config.compilation_config.static_forward_context
            tensors = [context[name].kv_cache for name in self.places]
            self._make(tensors, layer.impl)
        return True

    def release(self) -> None:
        """Hold no block tensors, until the next write brings some."""
        self.cache = self.graphs = None
        self._pointers = []

    def _make(self, tensors: list[Tensor], impl: Any) -> None:
        assert self.settings is not None
        settings, first = self.settings, tensors[0]
        blocks, kv_heads, block_tokens, _ = first.shape
        require(
            block_tokens == self.block_tokens,
            f"vLLM's kernels have blocks of {block_tokens} tokens and its block tables of {self.block_tokens}: start "
            f"it with --block-size {block_tokens}",
        )
        unit = settings.config.cache_config.unit_tokens
        spec = CacheSpec(
            len(tensors), kv_heads, impl.head_size, blocks * (block_tokens // unit), str(first.dtype).split(".")[1],
            max_open_groups=self.vllm_config.scheduler_config.max_num_seqs,
        )  # fmt: skip
        pools = [self.route.pools(tensor, impl.head_size, unit) for tensor in tensors]
        cache_config, device = settings.config.cache_config, first.device.type
        kernels = checked_kernels(self.backend, settings.kernels, device, spec, impl.num_heads, cache_config)
        self.cache = new_cache(spec, cache_config, device, kernels, pools)
        self._pointers = [tensor.data_ptr() for tensor in tensors]

    # ------------------------------------------------------------------------------------------------------ each step

    def decode_batch(self, common: Any) -> Any:
        """Return what layers read (`graphs.DecodeBatch`) of a batch whose forward may be a replayed CUDA graph, by
        vLLM's metadata; None: it cannot be one."""
        compilation = self.vllm_config.compilation_config
        if self.uncaptured is not None or not compilation.cudagraph_mode.has_full_cudagraphs():
            return None
        layer = compilation.static_forward_context[next(iter(self.places))]
        if not self.serve(layer, layer.kv_cache):
            return None
        from eps_cuda.integrations.vllm.graphs import DecodeGraphs  # kernels, which not every device has

        if self.graphs is None or self.graphs.cache is not self.cache:
            most_rows = self.vllm_config.scheduler_config.max_num_seqs
            self.graphs = DecodeGraphs(self, most_rows, self.vllm_config.model_config.max_model_len)
        return self.graphs.begin(common)

    def count_forward(self) -> None:
        self.counts["forwards"] += 1
        self._shown.update(self)

    def forward_of(self, metadata: Any) -> Forward:
        """Return the host's knowledge of a forward; kept with vLLM's metadata, which all layers share."""
        assert self.sparse is not None
        found: Forward | None = getattr(metadata, "eps_forward", None)
        if found is None:
            found = Forward.of(metadata, metadata.eps_host, self.sparse.config, self.block_tokens)
            metadata.eps_forward = found
            self.counts["verified_rows"] += len(found.verified)
            self.counts["prefill_rows"] += len(found.others) - len(found.verified)
            self.count_forward()
        return found

    @property
    def readable(self) -> bool:
        return bool(self.route.readable)

    def described(self) -> dict[str, Any]:
        return {"route": self.want.route}

    def forget(self) -> None:
        self.settle()
        if self.graphs is not None:
            self.graphs.unseen = True
        super().forget()
        if self.route is not None:
            self.route.forget()

    def settle(self) -> None:
        """Count the decode batches that are still on the device, and wait for it where there are any."""
        if self.graphs is not None:
            self.graphs.settle()

    def wanted(self, flat: dict[str, Any]) -> Settings:
        """See `PagedRuntime.wanted`. Captured CUDA graphs read the number of groups from the device, and hold all
        else."""
        settings = fitted(Asked(flat, self.want.route), self.block_tokens)
        wanted = settings.config.selection_config
        captured = None if self.graphs is None else self.graphs.config.selection_config
        require(
            captured is None or replace(wanted, budget=captured.budget, budget_floor=captured.budget_floor) == captured,
            "vLLM's CUDA graphs hold all settings but budget and budget_floor: start it with cudagraph_mode PIECEWISE "
            "to change others while it runs",
        )
        return settings

    def set(self, on: bool | None = None, **flat: Any) -> dict[str, Any]:
        """See `PagedRuntime.set`; `/metrics` shows it."""
        found = super().set(on, **flat)
        self._shown.update(self)
        return found

    def reset(self) -> None:
        super().reset()
        self._shown.update(self)

    def _say(self, line: str) -> None:
        from vllm.logger import init_logger

        init_logger("vllm.eps").info("%s", line)


def runtime_of(layer: Any) -> Runtime | None:
    """Return the runtime of an attention layer that EPS has hooked."""
    return getattr(getattr(layer, "impl", None), "eps_runtime", None)


def runtime_in(vllm_config: Any) -> Runtime | None:
    """Return the runtime of a model, by its layers that are made already."""
    layers = vllm_config.compilation_config.static_forward_context.values()
    return next((found for layer in layers if (found := runtime_of(layer)) is not None), None)


def _own_file(metrics_file: Path | None, vllm_config: Any) -> Path | None:
    """Each worker writes a file of its own: the first one that which was named, the others beside it."""
    number = metrics.worker_number(vllm_config)
    if metrics_file is None or number == 0:
        return metrics_file
    return metrics_file.with_name(f"{metrics_file.stem}.{number}{metrics_file.suffix}")
