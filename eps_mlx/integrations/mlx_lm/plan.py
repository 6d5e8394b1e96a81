"""Which layers of an mlx-lm model can be sparse: asked of the model itself, by two forward passes that are never
computed (MLX is lazy), over caches that note how they are used."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as caches

from eps_core.config.cache import CacheSpec
from eps_core.errors import ConfigError, one_line
from eps_core.integrations.plan import Plan
from eps_mlx.device import DTYPES
from eps_mlx.integrations.mlx_lm.names import Attends, attention, stock_attention, swap

PROBE_TOKENS = (3, 1)  # of a prompt, of a step
# what the cache of a layer that is not a plain KVCache says of it
_KINDS = {
    "RotatingKVCache": "sliding window",
    "ChunkedKVCache": "chunked attention",
    "QuantizedKVCache": "quantised cache",
    "ConcatenateKVCache": "unusual cache",
    "ArraysCache": "no attention",
    "MambaCache": "no attention",
    "CacheList": "several caches",
}


class _Probe(caches.KVCache, Attends):
    """A plain cache that notes what its layer does with it."""

    def __init__(self) -> None:
        super().__init__()
        self.updates = self.calls = 0
        self.shape: tuple[int, int] | None = None  # kv heads, head dim
        self.num_heads = 0  # of queries
        self.dtype: mx.Dtype | None = None
        self.fault: str | None = None
        self.lends = False
        self._handed: tuple[Any, Any] = (None, None)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.updates += 1
        self.shape, self.dtype = (keys.shape[1], keys.shape[3]), keys.dtype
        if keys.shape != values.shape or keys.dtype != values.dtype:
            self.fault = "keys and values of different sizes or dtypes"
        self._handed = super().update_and_fetch(keys, values)
        return self._handed

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any, sinks: mx.array | None
    ) -> mx.array:
        self.calls += 1
        self.num_heads = queries.shape[1]
        if keys is not self._handed[0] or values is not self._handed[1]:
            self.fault = "keys changed after the cache"
        elif sinks is not None:
            self.fault = "attention sinks"
        elif queries.shape[2] == 1 and mask is not None:
            self.fault = "a mask of its own"
        return stock_attention(queries, keys, values, self, scale=scale, mask=mask, sinks=sinks)

    def note(self, keys: Any, values: Any, cache: Any) -> None:
        """Note, at every attention of the model, whether it is another layer's, of this one's K or V."""
        self.lends |= cache is not self and (keys is self._handed[0] or values is self._handed[1])

    def why_not(self) -> str | None:
        """Return why the layer cannot be sparse."""
        if self.lends:
            return "keys for other layers"  # ours hands out no K and V that somebody else could attend
        if self.updates and not self.calls:
            return "attention of its own"  # soft-capping, or a kernel
        if not self.updates == self.calls == len(PROBE_TOKENS):
            return "keys of another layer"
        if self.dtype not in DTYPES.values():
            return f"keys of {self.dtype}"
        return self.fault


def look_at(model: Any, stock: Sequence[Any]) -> tuple[Plan, CacheSpec, int]:
    """Return the plan of a model whose own empty caches are `stock`, the shape of its sparse layers, and their query
    heads. Its attention must be rebound already (`names.rebind`). Raises ConfigError for MLA, and where no layer can be
    sparse."""
    refuse_latent(model)
    probes = [_Probe() if type(one) is caches.KVCache else one for one in stock]

    def noting(queries: Any, keys: Any, values: Any, cache: Any, *args: Any, **kwargs: Any) -> mx.array:
        for one in probes:
            if isinstance(one, _Probe):
                one.note(keys, values, cache)
        return attention(queries, keys, values, cache, *args, **kwargs)

    swap(attention, noting)
    try:
        for tokens in PROBE_TOKENS:
            model(mx.zeros((1, tokens), mx.int32), cache=probes)
    except Exception as error:
        raise ConfigError(
            f"EPS cannot follow this model, which fails on a prompt of its own: {one_line(error)}"
        ) from error
    finally:
        swap(noting, attention)
    reasons: list[str | None] = []
    shape: tuple[Any, Any, int] | None = None
    for one in probes:
        if not isinstance(one, _Probe):
            reasons.append(_KINDS.get(type(one).__name__, type(one).__name__))
            continue
        reason = one.why_not()
        if reason is None:
            found = one.shape, one.dtype, one.num_heads
            shape = shape or found
            if shape != found:
                reason = "heads of another shape"
        reasons.append(reason)
    plan = Plan.of(reasons, [_most_tokens(one) for one in stock])
    assert shape is not None
    (kv_heads, head_dim), dtype, num_heads = shape
    name = next(name for name, one in DTYPES.items() if one == dtype)
    return plan, CacheSpec(len(plan.sparse), kv_heads, head_dim, num_units=1, dtype=name), num_heads


def _most_tokens(cache: Any) -> int | None:
    """Tokens of which a stock cache holds K and V at most; None: of all."""
    if _KINDS.get(type(cache).__name__) == "no attention":
        return 0
    return getattr(cache, "max_size", None) or getattr(cache, "chunk_size", None)


def refuse_latent(model: Any) -> None:
    """Raises ConfigError for multi-head latent attention."""
    for name, module in model.named_modules():
        rank = getattr(module, "kv_lora_rank", None)
        if rank:
            raise ConfigError(
                f"EPS does not support {name or 'this model'}: its cache holds latents of rank {rank} (MLA) and no "
                "keys; run it with --method off"
            )
