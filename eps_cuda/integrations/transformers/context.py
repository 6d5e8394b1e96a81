"""EPS for whatever calls a model's `generate` without a cache of its own: pipelines, servers, evaluation."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from transformers import DynamicCache, PreTrainedModel

from eps_core.config.eps import EpsConfig
from eps_core.errors import ConfigError, require
from eps_core.integrations.layers import SparseAttention
from eps_core.integrations.plan import Plan
from eps_core.integrations.settings import Settings
from eps_core.load import load_backend
from eps_cuda.integrations.transformers.attention import NAME
from eps_cuda.integrations.transformers.cache import asked_for, is_fresh, make_fused, put_into, text_config
from eps_cuda.integrations.transformers.names import cache_in
from eps_cuda.integrations.transformers.rows import Rows
from eps_cuda.integrations.transformers.verified import verifying


@contextmanager
def eps(model: Any, config: EpsConfig | Settings | None = None, **settings: Any) -> Iterator[SparseAttention]:
    """Inside, `model` attends by "eps" and every `generate` that makes its own cache has EPS in it; the yielded
    counters speak of all of them. Settings as of `EpsCache`, or `Settings` instead of a config; with method off nothing
    is touched.

    How: transformers offers no name for a cache of one's own, so a forward pre-hook (torch's own, on this model
    object alone) looks for the empty `DynamicCache` that `generate` has just made and puts our layers where its
    full-attention ones are. A cache that holds tokens already, or that transformers marks as passed in by name (newer
    versions do), is left as it is, and attended by sdpa; static, quantised and offloaded ones are refused. On exit,
    also by an exception, the hook and the attention implementation are what they were; caches made inside are then of
    no use."""
    asked = asked_for(config, settings)
    if not asked.config.cache_config.enabled:  # the rollback
        require("method" in settings or config is not None, 'EPS is off by default: name a method, such as method="rq"')
        sparse = SparseAttention(load_backend("cuda"), asked.config, Plan((), {}))
        sparse.on = False
        yield sparse
        return
    model = _unwrapped(model)
    if any(isinstance(hook, _PutIn) for hook in model._forward_pre_hooks.values()):
        raise ConfigError("this model has EPS on already: leave the other `with eps(model)` first")
    sparse = make_fused(model, asked)
    text, before = text_config(model), _implementations(model.config)
    handle = model.register_forward_pre_hook(_PutIn(text, sparse, asked.kernels), with_kwargs=True)
    try:
        with sparse:
            model.set_attn_implementation(NAME)
            if text._attn_implementation != NAME:
                raise ConfigError(f"{type(model).__name__} has an attention of its own, which EPS cannot replace")
            with verifying(model, sparse) if sparse.rounds is not None else nullcontext():
                yield sparse
    finally:
        sparse.ended = True
        handle.remove()
        model.set_attn_implementation(before)


@dataclass(frozen=True)
class _PutIn:
    """The pre-hook of a model that has EPS on."""

    text: Any  # config
    sparse: SparseAttention
    kernels: str

    def __call__(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        cache: Any = cache_in(kwargs)
        if is_fresh(cache):
            rows = Rows(self.sparse, self.kernels, self.text.num_attention_heads)
            layers = cache.layers or DynamicCache(config=self.text).layers
            if len(layers) > max(self.sparse.plan.sparse):  # fewer: of an early exit that drafts
                cache.layers = put_into(layers, self.text, rows)


def _unwrapped(model: Any) -> Any:
    """The model that torch.compile's or PEFT's wrapper calls, whose own forward `generate` passes by."""
    while not isinstance(model, PreTrainedModel):
        inner = getattr(model, "_orig_mod", None) or getattr(model, "get_base_model", lambda: None)()
        require(inner is not None, f"{type(model).__name__} is no model of transformers: give eps() the one inside")
        model = inner
    return model


def _implementations(config: Any) -> dict[str, Any]:
    """Return the argument of `set_attn_implementation` to make all of a model's configs as they are."""
    found: dict[str, Any] = {"": config._attn_implementation}
    for name in config.sub_configs:
        sub = getattr(config, name, None)
        if sub is not None and sub._attn_implementation is not None:  # of parts that attend
            found[name] = sub._attn_implementation
    return found
