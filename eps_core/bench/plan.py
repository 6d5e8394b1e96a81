"""The plan of a benchmark: the calls to time, how many groups they select, and how many bytes each part must move."""

from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from eps_core.bench.data import Layer, Shape
from eps_core.bench.proof import CheckError
from eps_core.config.bytes import scoring_bytes
from eps_core.config.cache import DTYPE_BYTES, METHODS, sized_method
from eps_core.config.eps import EpsConfig
from eps_core.errors import ConfigError
from eps_core.kv_cache.step_plan import StepPlan

SCALING_CONTEXTS = (4096, 8192, 16384, 32768, 65536, 131072)
DEFAULT_REPEATS, DEFAULT_FRACTIONS = 20, (0.1, 1.0)


@dataclass(frozen=True)
class BenchRequest:
    """Settings of a benchmark: every combination of contexts, batches, dtypes, methods and shares. A method may name
    its group size, rq@4; every other is taken with each of `group_size`."""

    contexts: tuple[int, ...] = (4096, 32768)
    batches: tuple[int, ...] = (1,)
    fractions: tuple[float, ...] = DEFAULT_FRACTIONS  # of the groups
    byte_shares: tuple[float, ...] = ()  # of the dense bytes, summaries included; replaces `fractions`
    dtypes: tuple[str, ...] = ("auto",)
    methods: tuple[str, ...] = ("rq", "box")
    group_size: tuple[int | None, ...] = (None,)
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    kernels: str = "auto"
    backend: str = "auto"
    device: str = "auto"
    repeats: int = DEFAULT_REPEATS
    seconds: float | None = None  # of each cell; replaces `repeats`
    warm_seconds: float = 1.0
    seed: int = 0
    output: Path | None = None

    def shares(self) -> list[tuple[str, float]]:
        """(fraction or bytes, its value) of every cell of one cache."""
        return [("bytes", share) for share in self.byte_shares] or [("fraction", share) for share in self.fractions]

    def configs(self) -> list[EpsConfig]:
        configs = []
        for name in self.methods:
            method, size = sized_method(name, METHODS)
            if method == "off":
                raise CheckError("method off is dense, so there is nothing to time: choose rq, box or another one")
            configs += [
                EpsConfig.of(method=method, group_size=tokens, block_size=self.block_size)
                for tokens in (self.group_size if size is None else (size,))
            ]
        return list(dict.fromkeys(configs))


def budgeted(config: EpsConfig, shape: Shape, kind: str, share: float) -> EpsConfig:
    """The config whose topk selects that share of the groups, or as many as fit that share of the dense bytes beside
    the summaries. Raises ConfigError where none fits, or where the sink and recent tokens alone take more."""
    if not 0 < share <= 1:
        raise ConfigError(f"{kind} {share:g} is outside (0, 1]: use 0.1")
    groups = -(-shape.context // config.cache_config.S)
    if kind == "fraction":
        return config.replace(top_pages=max(1, round(share * groups)))
    token = 2 * shape.head_dim * DTYPE_BYTES[shape.dtype]

    def num_bytes(selected: int) -> int:
        """Scoring reads the more the more it selects."""
        beside = scoring_bytes(config.replace(top_pages=selected), shape.head_dim, [shape.context])
        return beside + selected * config.cache_config.S * token

    wanted = bisect_right(range(1, groups + 1), share * shape.context * token, key=num_bytes)
    units = np.arange(-(-shape.context // config.cache_config.unit_tokens))
    always_selected = int(StepPlan.of(config, units[None], np.array([shape.context])).num_always_selected[0])
    if wanted < max(always_selected, 1):
        least = num_bytes(max(always_selected, 1)) / (shape.context * token)
        raise ConfigError(
            f"bytes {share:g} cannot hold the summaries of {config.cache_config.method}@{config.cache_config.S} and "
            f"its sink and recent tokens, which are {least:.3f} of the dense bytes of context {shape.context}: "
            "raise --bytes above that"
        )
    return config.replace(top_pages=wanted)


def moved_bytes(layer: Layer, config: EpsConfig, kv_read: int) -> dict[str, int]:
    """Bytes that each part must move: stored summaries, K and V as the plan counts them; the float32 estimates that
    selection reads; the K and V that a write stores."""
    shape, heads = layer.shape, layer.shape.kv_heads
    lengths, plan = layer.lengths.tolist(), layer.plan(config)
    scoring = heads * scoring_bytes(config, shape.head_dim, lengths)
    return {
        "score": scoring,
        "select": 4 * heads * int(plan.ends.sum()),
        "attend": kv_read,
        "write": heads * shape.batch * layer.cache.spec.kv_token_bytes,
        "step": heads * sum(lengths) * layer.cache.spec.kv_token_bytes if plan.reads_all(0) else scoring + kv_read,
    }
