"""SGLang's attention backends with EPS: summaries of what is written, and sparse attention of decode batches."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eps_core.backend.cache import invalidate
from eps_core.config.cache import CacheSpec
from eps_core.errors import ConfigError, fault_line, require
from eps_core.integrations.kernels import checked_kernels
from eps_core.integrations.layers import SparseAttention
from eps_core.integrations.plan import Plan
from eps_core.integrations.settings import Settings
from eps_core.kv_cache.step_plan import StepPlan
from eps_cuda.cache import new_cache, wait
from eps_cuda.integrations.paged import PagedRuntime, logger, scaled
from eps_cuda.integrations.sglang.asked import HOOKED, asked
from eps_cuda.ops import OPS

_runtimes: list["Runtime"] = []  # of this process: one a pool


def hooked(create: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a maker of attention backends as SGLang registers it: what `create` makes, of a class with EPS ahead."""

    def made(runner: Any) -> Any:
        backend, settings = create(runner), asked()
        assert settings is not None
        stock: Any = type(backend)
        backend.__class__ = with_eps(stock)
        backend.eps_runtime = Runtime(runner, settings)
        return backend

    return made


def refused(name: str) -> Callable[[Any], Any]:
    """Return a maker that ends a server which was asked for EPS with an attention backend that EPS does not hook."""

    def made(runner: Any) -> Any:
        raise ConfigError(
            f"EPS does not work in SGLang's attention backend {name}: start it with --attention-backend "
            f"{' or '.join(HOOKED)}, or without EPS_METHOD"
        )

    return made


def with_counters(result: Any, *args: Any, **kwargs: Any) -> Any:
    """SGLang's internal state (`/server_info`) with EPS's counters of this process, under `eps`."""
    if _runtimes:
        try:
            wait(_runtimes[0].cache)  # forwards have a stream of their own
            result.internal_state["eps"] = _runtimes[0].stats()
        except Exception as error:
            result.internal_state["eps"] = {"error": fault_line(error)}
    return result


class Runtime(PagedRuntime):
    """EPS over the token pool of one of SGLang's model runners, whose pages are whole units."""

    def __init__(self, runner: Any, settings: Settings) -> None:
        super().__init__()
        pool, device, page = runner.token_to_kv_pool, runner.device, runner.page_size
        refusals(runner, settings)
        require(
            not any(one.pool is pool for one in _runtimes),
            "SGLang makes several attention backends over one pool (other ones for prefill and decode, two-batch "
            "overlap, pdmux): start it without, or without EPS",
        )
        self.settings = settings = replace(settings, config=settings.config.for_device(device))
        cache_config = settings.config.cache_config
        unit = self.unit = cache_config.unit_tokens
        require(
            page % unit == 0,
            f"SGLang's pages of {page} tokens are no multiple of EPS's units of {unit}: start it with --page-size "
            f"{unit}",
        )
        layers = attention_layers(runner.model)
        require(bool(layers), "SGLang's model has no attention layers: EPS has nothing to do, start it without")
        require(
            len({layer.layer_id for layer in layers}) == len(layers),
            "EPS cannot work in an SGLang server with layers that share K and V: start it without EPS",
        )
        reasons = [dense_reason(layer) for layer in layers]
        sparse = [layer for layer, reason in zip(layers, reasons, strict=True) if reason is None]
        shapes = {(layer.tp_q_head_num, layer.tp_k_head_num, layer.head_dim) for layer in sparse}
        require(len(shapes) < 2, f"layers have heads of several shapes {sorted(shapes)}: start SGLang without EPS")
        windows = [layer.sliding_window_size + 1 if layer.sliding_window_size > 0 else None for layer in layers]
        plan = Plan.of(reasons, windows)
        self.places = {layer.layer_id: place for place, layer in enumerate(sparse)}
        self.pool: Any = pool
        self.page, self.req_to_token = page, runner.req_to_token_pool.req_to_token
        buffers = [pool.get_kv_buffer(layer.layer_id) for layer in sparse]
        pools = [(self._units(k), self._units(v)) for k, v in buffers]
        first = pools[0][0]
        spec = CacheSpec(
            len(sparse), first.shape[1], first.shape[3], first.shape[0], str(first.dtype).split(".")[1],
            max_open_groups=runner.req_to_token_pool.size,
        )  # fmt: skip
        kernels = checked_kernels(self.backend, settings.kernels, device, spec, sparse[0].tp_q_head_num, cache_config)
        self.cache = new_cache(spec, cache_config, device, kernels, pools)
        self.sparse = SparseAttention(
            self.backend, settings.config, plan, metrics=settings.metrics, audit_every=settings.audit_every,
            model=str(runner.model_config.model_path),
        )  # fmt: skip
        self.sparse.fits(spec.num_kv_heads)
        self.slots: np.ndarray | None = None  # [N] of a forward's tokens, padding left out
        self.rows: Any = slice(None)  # theirs among all tokens of the forward
        self.plan: StepPlan | None = None  # of a forward whose requests all decode
        _runtimes.append(self)
        logger.warning("%s; SGLang pages of %d tokens", plan.line(settings.config), page)

    def _units(self, buffer: Tensor) -> Tensor:
        """A pool [P, Hkv, U, D] over SGLang's rows [tokens, Hkv, D]."""
        tokens, heads, dim = buffer.shape
        row, head, _ = buffer.stride()
        shape, strides = (tokens // self.unit, heads, self.unit, dim), (self.unit * row, head, row, 1)
        return torch.as_strided(buffer, shape, strides, buffer.storage_offset())

    def begin(self, batch: Any) -> None:
        """Learn where the tokens of a forward lie, once for all layers: a wait for the device, and another for a
        decode's tables. Where that fails the forward is SGLang's own."""
        self.slots = self.plan = None
        try:
            self._begin(batch)
        except Exception as error:
            self.fail(error, "failed_writes")

    def _begin(self, batch: Any) -> None:
        self.counts["forwards"] += 1
        places = batch.out_cache_loc
        slots, lengths = np.split(torch.cat([places, batch.seq_lens.to(places)]).cpu().numpy(), [len(places)])
        real = slots >= self.page  # the first page takes what pads a batch
        self.rows = slice(None) if real.all() else torch.from_numpy(np.flatnonzero(real)).to(places.device)
        self.slots = slots[real].astype(np.int64)
        if not batch.forward_mode.is_decode():
            self.counts["prefill_rows"] += len(batch.req_pool_indices)
            return
        assert self.sparse is not None
        width = -(-int(lengths.max(initial=0)) // self.unit)
        first = self.req_to_token[batch.req_pool_indices, : width * self.unit : self.unit].cpu().numpy()
        table = np.where(np.arange(width) * self.unit < lengths[:, None], first // self.unit, -1).astype(np.int32)
        self.plan = StepPlan.of(self.sparse.config, table, lengths)

    def left_to_write(self, layer: Any, batch: Any, k: Tensor | None, v: Tensor | None, save: bool) -> bool:
        """Write K and V of a sparse layer with their summaries; return whether it is left to SGLang to write them."""
        place = self.places.get(layer.layer_id)
        if place is None or self.slots is None:
            return save
        if not save or k is None or v is None:  # written past EPS, by a kernel that also rotates, say
            self.lazy = True
            invalidate(OPS, self.cache, place, self.slots)
            return save
        shape = -1, layer.tp_k_head_num, layer.head_dim
        self.write(
            place,
            k.view(shape)[self.rows],
            v.view(shape)[self.rows],
            self.slots,
            lambda: self.pool.set_kv_buffer(layer, batch.out_cache_loc, k, v),
        )
        return False

    def decode(self, place: int, q: Tensor, layer: Any, further: bool, dense: Callable[[], Tensor]) -> Tensor:
        """out [B, Hq D] of one token of each of B requests, q of that shape; `dense` is SGLang's own attention, of
        layers that are given more than q, k and v, too: sinks, say."""
        plan = self.plan
        if plan is None or further:
            if plan is not None and self.sparse is not None:
                self.sparse.fall_back(self.cache, place, plan, "further arguments")
            return dense()
        heads, dim = layer.tp_q_head_num, layer.head_dim
        query = scaled(q.reshape(-1, heads, dim), layer.scaling, dim)
        out = self.attend(place, query, plan, lambda: dense().view(-1, heads, dim))
        return out.to(q.dtype).reshape(-1, heads * dim)


@cache
def with_eps(stock: Any) -> Any:
    """Return a subclass of a stock attention backend. A batch is sparse where each of its requests decodes one token;
    others, chunks of prompts among them, are written with summaries and attended by the stock kernel."""

    class Eps(stock):
        eps_runtime: Runtime

        def init_forward_metadata(self, forward_batch: Any) -> None:
            super().init_forward_metadata(forward_batch)
            self.eps_runtime.begin(forward_batch)

        def forward_extend(
            self,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            layer: Any,
            forward_batch: Any,
            save_kv_cache: bool = True,
            **more: Any,
        ) -> Any:
            save_kv_cache = self.eps_runtime.left_to_write(layer, forward_batch, k, v, save_kv_cache)
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **more)

        def forward_decode(
            self,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            layer: Any,
            forward_batch: Any,
            save_kv_cache: bool = True,
            **more: Any,
        ) -> Any:
            save_kv_cache = self.eps_runtime.left_to_write(layer, forward_batch, k, v, save_kv_cache)
            dense = partial(super().forward_decode, q, k, v, layer, forward_batch, save_kv_cache, **more)
            place = self.eps_runtime.places.get(layer.layer_id)
            if place is None:
                return dense()
            further = any(one is not None for one in more.values())
            return self.eps_runtime.decode(place, q, layer, further, dense)

    Eps.__name__ = Eps.__qualname__ = f"Eps{stock.__name__}"
    return Eps


def attention_layers(model: Any) -> list[Any]:
    """Return the attention layers of a model, by their number."""
    from sglang.srt.layers.radix_attention import RadixAttention

    found = [module for module in model.modules() if isinstance(module, RadixAttention)]
    return sorted(found, key=lambda layer: layer.layer_id)


def dense_reason(layer: Any) -> str | None:
    """Return why an attention layer stays dense; None: it may be sparse."""
    wrong = {
        f"{getattr(layer.attn_type, 'value', layer.attn_type)} attention":
            getattr(layer.attn_type, "value", layer.attn_type) != "decoder" or layer.is_cross_attention,
        "sliding window": layer.sliding_window_size > 0,
        "logits soft-capping": bool(layer.logit_cap),
        "values of another size": layer.v_head_dim != layer.head_dim,
        "a temperature by position": layer.xai_temperature_len > 0,
    }  # fmt: skip
    return next((reason for reason, there in wrong.items() if there), None)


def refusals(runner: Any, settings: Settings) -> None:
    """Raises ConfigError for a server whose K and V EPS cannot follow."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.model_executor.cuda_graph_config import cuda_graph_fully_disabled

    pool, args = runner.token_to_kv_pool, runner.server_args
    dtype = str(getattr(pool, "dtype", None)).split(".")[-1]
    loaders = ("enable_hierarchical_cache", "enable_lmcache", "enable_flexkv", "enable_unified_cache_external_linker")
    several = args.tp_size * args.pp_size * args.dp_size > 1
    wrong = {
        f"K and V in a {type(pool).__name__}": type(pool) is not MHATokenToKVPool,
        f"K and V of {dtype}": dtype not in ("float16", "bfloat16", "float32"),
        f"K and V as {getattr(pool, 'kv_cache_layout', '')}": getattr(pool, "kv_cache_layout", "nhd") != "nhd",
        f"speculative decoding ({args.speculative_algorithm})": args.speculative_algorithm is not None,
        "a cache that loads K and V from elsewhere": any(getattr(args, name, False) for name in loaders),
        f"radix cache {args.radix_cache_backend}": args.radix_cache_backend is not None,
        f"disaggregation ({args.disaggregation_mode})": args.disaggregation_mode not in (None, "null"),
        "context parallelism": args.dcp_size > 1 or args.attn_cp_size > 1,
        "an encoder": bool(runner.model_config.is_encoder_decoder),
        "several processes and a metrics file": several and settings.metrics is not None,
        "several processes and a head policy": several and settings.config.selection_config.head_modes is not None,
    }
    found = [what for what, there in wrong.items() if there]
    require(not found, f"EPS cannot work in an SGLang server with {', '.join(found)}: start it without, or without EPS")
    require(
        cuda_graph_fully_disabled(),
        "EPS chooses what is read on the host, which no CUDA graph does: start SGLang with --disable-cuda-graph",
    )
