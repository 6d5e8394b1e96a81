"""Tiny random models of the families that the transformers hook makes sparse, and what its tests do with them."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import torch
import transformers
from tiny_models import COMMON, GEMMA3
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from eps_core.attention.layer import collect, sparse_attention
from eps_core.config.cache import CacheSpec
from eps_core.config.eps import EpsConfig
from eps_core.integrations.paged import Paged
from eps_core.load import load_backend
from eps_cuda.integrations.transformers import EpsCache

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "mistral": ("MistralConfig", {"sliding_window": None, "head_dim": 32}),
    # its scale is not that of its head dim, and every other layer has a window
    "gemma3": ("Gemma3TextConfig", GEMMA3 | {"head_dim": 32, "query_pre_attn_scalar": 11}),
    "phi3": ("Phi3Config", {"pad_token_id": 0, "sliding_window": None}),
}  # fmt: skip
SPARSE = {name: (1, 3) if name == "gemma3" else (0, 1) for name in FAMILIES}
SMALL = {"num_sink_tokens": 4, "num_recent_tokens": 8}
RQ = EpsConfig.of("rq", budget=0.2, **SMALL)
WHOLE = EpsConfig.of("rq", budget=1.0, **SMALL)


def tiny_config(name: str, **overrides: Any) -> Any:
    kind, own = FAMILIES[name]
    return getattr(transformers, kind)(**COMMON | {"max_position_embeddings": 1024} | own | overrides)


DEVICES = load_backend("cuda").devices()


@cache
def tiny(name: str, dtype: torch.dtype = torch.float32, seed: int = 0, device: str = "cpu") -> Any:
    """A model of that family. Tests leave it as it was."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(tiny_config(name), dtype=dtype, attn_implementation="sdpa")
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)
    return model.eval().to(device)


def prompts(lengths: list[int], seed: int = 0, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Random tokens [B, T] padded on the left, and their mask."""
    rng = np.random.default_rng(seed)
    rows = [rng.integers(1, 256, length) for length in lengths]
    most = max(lengths)
    ids = np.stack([np.pad(row, (most - len(row), 0)) for row in rows])
    mask = np.stack([np.arange(most) >= most - len(row) for row in rows]).astype(np.int64)
    return torch.from_numpy(ids).to(device), torch.from_numpy(mask).to(device)


class Attending:
    """A model under an attention implementation, and as it was afterwards."""

    def __init__(self, model: Any, name: str = "eps") -> None:
        self.model, self.name = model, name

    def __enter__(self) -> Any:
        self.before = self.model.config._attn_implementation
        self.model.set_attn_implementation(self.name)
        return self.model

    def __exit__(self, *exc: object) -> None:
        self.model.set_attn_implementation(self.before)


def both(model: Any, config: EpsConfig) -> Iterator[Any]:
    """A stock cache, and then ours, each while the model attends by its name."""
    for name, made in (("sdpa", stock(model)), ("eps", EpsCache(model, config))):
        with Attending(model, name), torch.no_grad():
            yield made


def feed(model: Any, cache: Any, ids: Tensor, mask: Tensor, start: int, end: int) -> Tensor:
    """Logits [B, end - start, V] of the tokens from start to end, as `generate` would ask for them."""
    positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, start:end]
    seen = None if bool(mask.all()) else mask[:, :end]
    return model(
        ids[:, start:end], attention_mask=seen, position_ids=positions, past_key_values=cache, use_cache=True
    ).logits  # fmt: skip


def live_sequences(cache: EpsCache) -> int:
    rows = eps_layers(cache)[0].rows
    return 0 if rows.paged is None else rows.paged.num_live


def eps_layers(cache: Any) -> list[Any]:
    return [layer for layer in cache.layers if type(layer).__name__ == "EpsLayer"]


def generate(model: Any, ids: Tensor, mask: Tensor, cache: Any, **how: Any) -> Any:
    how = {"do_sample": False, "max_new_tokens": 8, **how}
    return model.generate(ids, attention_mask=mask, past_key_values=cache, **how)


def gone(cache: EpsCache) -> None:
    """Asserts that nothing of a cache is left in its pool once it is reset, and nothing leaked before."""
    pool = eps_layers(cache)[0].rows.paged.pool
    pool.check()
    cache.reset()
    pool.check()
    assert not pool.num_live and pool.num_free == pool.num_units and cache.get_seq_length() == 0


# ---- a straightforward reference: stock caches, and the oracle over a new cache for every call ----


class Reference:
    """Attention "eps-reference": of decode rows, everything again from the raw K and V of a stock cache, in float64."""

    NAME = "eps-reference"

    def __init__(self, config: EpsConfig) -> None:
        self.config, self.backend = config, load_backend("numpy")
        self.lists: list[Any] = []
        AttentionInterface.register(self.NAME, self.attend)
        AttentionMaskInterface.register(self.NAME, sdpa_mask)

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **more: Any) -> Any:
        if query.shape[2] > 1 or getattr(module, "is_sliding", False):
            return sdpa_attention_forward(module, query, key, value, mask, **more)
        batch, kv_heads, total, width = key.shape
        spec = CacheSpec(1, kv_heads, width, batch * (total // self.config.cache_config.unit_tokens + 1))
        paged = Paged(self.backend, spec, self.config.cache_config, "cpu")
        sequences = [paged.open() for _ in range(batch)]
        counts = [total if mask is None else int(mask[row, 0, -1].sum()) for row in range(batch)]
        k, v = (
            np.concatenate([x[row, :, total - counts[row] :].transpose(0, 1).cpu().numpy() for row in range(batch)])
            for x in (key, value)
        )
        paged.write(0, k, v, paged.append(sequences, counts))
        q = query[:, :, 0].cpu().numpy() * (more["scaling"] * width**0.5)
        out, read = sparse_attention(self.backend, paged.cache, 0, q, paged.plan(self.config, sequences))
        collect(self.backend, paged.cache, [read])
        chosen = read.selection
        self.lists.append(
            None if chosen is None else [
                [head[:count] for head, count in zip(row, numbers, strict=True)]
                for row, numbers in zip(chosen.groups, chosen.counts, strict=True)
            ]
        )  # fmt: skip
        return torch.from_numpy(np.asarray(out, np.float32)).to(query)[:, None], None


def stock(model: Any) -> DynamicCache:
    return DynamicCache(config=model.config)
