"""A transformers cache whose full-attention layers keep K and V in pages and attend them as EPS says."""

import copy
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from eps_core.config.eps import EpsConfig
from eps_core.errors import ConfigError, require
from eps_core.integrations.layers import SparseAttention
from eps_core.integrations.plan import Plan
from eps_core.integrations.settings import EXTRAS, Settings
from eps_core.integrations.verified import check_engine
from eps_core.integrations.versions import check_complete, check_version
from eps_core.load import load_backend
from eps_cuda.integrations.paged import scaled
from eps_cuda.integrations.transformers.attention import NAME, hand_over
from eps_cuda.integrations.transformers.rows import Rows

logger = logging.getLogger("eps")


class EpsLayer(CacheLayerMixin):
    """One sparse layer. Its K and V wait from `update` until attention brings the mask, which alone tells padding."""

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, rows: Rows, index: int, config: Any) -> None:
        """`index` among the sparse layers; `config` the text model's, which says by what name it attends."""
        self.rows, self.index, self.config = rows, index, config
        self.length = 0  # tokens of each row, padding and those that wait included
        self.is_initialized = True
        self._waiting: tuple[Tensor, Tensor] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "EpsLayer":
        """The layer of a copied cache: its rows are forks over the same pages."""
        other = EpsLayer(copy.deepcopy(self.rows, memo), self.index, self.config)
        other.length = self.length
        return other

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """K [B, Hkv, T, D], a copy; zeros for padding."""
        return self.rows.read(self.index)[0] if self.rows.length else None

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        return self.rows.read(self.index)[1] if self.rows.length else None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None: ...

    @torch.compiler.disable
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The new K and V [B, Hkv, N, D] alone: attention "eps" finds this layer by them."""
        name = self.config._attn_implementation
        require(
            name == NAME,
            f'the model attends by "{name}" and its cache is an EpsCache: call '
            f'model.set_attn_implementation("{NAME}") first',
        )
        require(
            not self.rows.sparse.ended,
            "this cache was made in a `with eps(model)` that is over: begin a conversation with a new one",
        )
        if self._waiting is not None:
            raise RuntimeError(f"the attention of sparse layer {self.index} never ran: reset the cache")
        self.length += key_states.shape[-2]
        self._waiting = key_states, value_states
        return hand_over(key_states, self), value_states

    @torch.compiler.disable
    def attend(
        self, module: torch.nn.Module, query: Tensor, mask: Tensor | None, scaling: float | None = None, **more: Any
    ) -> Tensor:
        """Return out [B, N, Hq, D] of query [B, Hq, N, D] over all that the layer holds. One new token a row is sparse;
        several are transformers' sdpa, over the new K and V themselves where nothing was there before."""
        assert self._waiting is not None, "a key was attended twice: layers that share K and V cannot be sparse"
        (key, value), self._waiting = self._waiting, None
        rows, num_new, width = self.rows, query.shape[2], query.shape[3]
        rows.begin(key, mask, self.length)
        rows.write(self.index, key, value)

        def whole() -> Tensor:
            alone = self.length == num_new
            k, v = (key.contiguous(), value.contiguous()) if alone else rows.read(self.index)
            out, _ = sdpa_attention_forward(module, query, k, v, mask, scaling=scaling, **more)
            return out

        if num_new > 1 or not rows.sparse.on or not rows.decodes_sparsely:
            return whole()
        assert rows.paged is not None and rows.plan is not None
        cache, plan = rows.paged.cache, rows.plan
        reason = "error" if rows.broken else rows.odd
        if reason is None and more.get("dropout"):
            reason = "dropout"
        if reason is None and more.get("position_bias") is not None:
            reason = "position bias"
        if reason is not None:
            rows.sparse.fall_back(cache, self.index, plan, reason)
            return whole()
        q = query[:, :, 0] if scaling is None else scaled(query[:, :, 0], scaling, width)
        out = rows.sparse.attend(cache, self.index, q, plan, lambda: whole()[:, 0])
        if torch.is_grad_enabled() and out.is_inference():
            out = out.clone()  # which autograd may keep
        return out.to(query.dtype)[:, None]

    def fill(self, key: Tensor, value: Tensor) -> None:
        """K and V [B, Hkv, N, D] of tokens that no forward brings, none of them padding: kept, or made."""
        self.length += key.shape[-2]
        self.rows.begin(key, None, self.length)
        self.rows.write(self.index, key, value)

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    # a Cache tells every layer of it: the first sparse one acts for the rows that all share

    def crop(self, tokens_to_remove: int) -> None:
        """Takes the last tokens back: -n of them, as transformers calls it, or down to n as it once did."""
        asked = int(tokens_to_remove)  # a tensor in some versions
        removed = min(max(self.length - asked if asked > 0 else -asked, 0), self.length)
        self.length -= removed
        if self.index == 0:
            self.rows.crop(removed)

    def reset(self) -> None:
        self.length, self._waiting = 0, None
        if self.index == 0:
            self.rows.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._select([row for row in range(len(self.rows.sequences)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        chosen = indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices
        self._select(chosen.tolist())

    def _select(self, indices: list[int]) -> None:
        if self.index == 0:
            self.rows.select(indices)

    def offload(self) -> None:
        raise ConfigError("an EpsCache stays where it is: leave offloading out")

    def prefetch(self) -> None: ...


class EpsCache(Cache):
    """A cache for a model that attends by "eps", given as `past_key_values` (or `cache`, from transformers 5.24 on);
    layers not sparse keep their stock class.

    Rows are forked in the pool where beams part, and freed when the cache dies or is `reset`. Prompts, chunks and the
    verification of drafts are attended densely; every single token of a row as EPS says."""

    def __init__(
        self, model: Any, config: EpsConfig | None = None, *, sparse: SparseAttention | None = None, **settings: Any
    ) -> None:
        """`model` or its config; EPS as `config` says, or flat `settings` (method="rq", budget=0.05, ..; also metrics,
        audit_every, kernels). `sparse`: counters and config of another cache of the same model, shared with it.
        Raises ConfigError for a model none of whose layers can be sparse, naming why."""
        text = text_config(model)
        asked = asked_for(config, settings)
        require(
            not asked.verify.enabled,
            "verified decoding is a loop, which a cache alone cannot be: use `with eps(model, verify=..)`",
        )
        if sparse is None:
            sparse = make_fused(model, asked)
        self._rows = Rows(sparse, asked.kernels, text.num_attention_heads)
        super().__init__(layers=put_into(DynamicCache(config=text).layers, text, self._rows))

    @property
    def sparse(self) -> SparseAttention:
        """The counters, and the live switch."""
        return self._rows.sparse


def asked_for(config: EpsConfig | Settings | None, settings: dict[str, Any]) -> Settings:
    """Return the settings that a caller asks for, by a config or by flat settings beside it."""
    if config is None:
        return Settings.of(settings)
    taken = EXTRAS if isinstance(config, EpsConfig) else ()
    extras: dict[str, Any] = {name: settings.pop(name) for name in taken if name in settings}
    require(not settings, f"give EPS settings by config or by name, not both: {', '.join(settings)}")
    if isinstance(config, Settings):
        return config
    return replace(Settings.of({"method": config.cache_config.method, **extras}), config=config)


def make_fused(model: Any, asked: Settings, **more: Any) -> SparseAttention:
    """Counters of one model. Tells the layers that stay dense, and why."""
    check_version("transformers")
    check_complete("transformers", EpsLayer)
    require(asked.config.cache_config.enabled, 'EPS is off and would keep nothing: name a method, such as method="rq"')
    check_engine(asked.verify, "transformers")
    plan = plan_of(model)
    name = str(getattr(getattr(model, "config", model), "_name_or_path", ""))
    place = getattr(model, "device", None)  # which a configuration has none of
    config = asked.config if place is None else asked.config.for_device(place.type)
    sparse = SparseAttention(
        load_backend("cuda"), config, plan, asked.metrics, asked.audit_every, model=Path(name).name,
        verify=asked.verify, weight_bytes=_weight_bytes(model) if asked.verify.enabled else 0, **more,
    )  # fmt: skip
    logger.log(plan.level, plan.line(sparse.config))
    return sparse


def _weight_bytes(model: Any) -> int:
    """Return the bytes of all weights, the input embedding left out unless it is the output head, too."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = embedding is None or head is None or head.weight is embedding.weight
    return sum(one.nbytes for one in model.parameters()) - (0 if tied else embedding.weight.nbytes)


def is_fresh(cache: Any) -> bool:
    """Return whether `generate` has just made this cache. Raises ConfigError for a kind that cannot hold pages."""
    if not isinstance(cache, Cache) or any(isinstance(layer, EpsLayer) for layer in cache.layers):
        return False
    if getattr(cache, "_is_user_defined", False) or cache.get_seq_length():
        return False
    if type(cache) is not DynamicCache or cache.offloading:
        kind = "an offloaded cache" if cache.offloading else type(cache).__name__
        raise ConfigError(f"EPS keeps K and V in its own pages and cannot use {kind}: leave cache_implementation out")
    return True


def put_into(layers: list[Any], text: Any, rows: Rows) -> list[Any]:
    """The layers of a stock cache, in place; those that are sparse replaced by ours over the same `rows`."""
    for place, layer in enumerate(rows.sparse.plan.sparse):
        layers[layer] = EpsLayer(rows, place, text)
    return layers


def text_config(model: Any) -> Any:
    """The config of the decoder that a cache is for."""
    return getattr(model, "config", model).get_text_config(decoder=True)


def plan_of(model: Any) -> Plan:
    """Which layers of a model, or of its config, can be sparse. Raises ConfigError where none can, naming why."""
    whole, text = getattr(model, "config", model), text_config(model)
    reason = _why_not(whole, text)
    if reason is None and hasattr(model, "named_parameters"):
        sinks = (name.rpartition(".")[2] == "sinks" for name, _ in model.named_parameters())
        reason = "learned sinks" if any(sinks) else None
    if reason is not None:
        return Plan.of([reason] * text.num_hidden_layers)
    crossed = set(getattr(text, "cross_attention_layers", None) or ())
    layers = DynamicCache(config=text).layers
    reasons = ["cross attention" if place in crossed else _layer_reason(one) for place, one in enumerate(layers)]
    return Plan.of(reasons, [_most_tokens(one) for one in layers])


def _why_not(whole: Any, text: Any) -> str | None:
    """Return why no layer of a model can be sparse."""
    found = {
        "of an encoder-decoder": whole.is_encoder_decoder,
        "latent attention (MLA)": getattr(text, "kv_lora_rank", None),
        "soft-capped": getattr(text, "attn_logit_softcapping", None),
        "ALiBi": getattr(text, "alibi", None),
        "learned sinks": text.model_type == "gpt_oss",
        "sharing K and V": getattr(text, "num_kv_shared_layers", None) or getattr(text, "kv_sharing_modes", None),
    }
    return next((reason for reason, is_so in found.items() if is_so), None)


def _most_tokens(layer: Any) -> int | None:
    """Tokens of which a stock cache's layer holds K and V at most; None: of all."""
    if isinstance(layer, DynamicSlidingWindowLayer):
        return int(layer.sliding_window)
    return None if isinstance(layer, CacheLayerMixin) else 0


def _layer_reason(layer: Any) -> str | None:
    """Return why a layer with this stock cache is not sparse."""
    if type(layer) is DynamicLayer:
        return None
    if isinstance(layer, DynamicSlidingWindowLayer):
        return f"sliding window of {layer.sliding_window}"
    return type(layer).__name__
