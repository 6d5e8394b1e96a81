"""The mean values that stand for skipped groups: no way to score keys."""

from torch import Tensor

from eps_core.config.store import Store
from eps_cuda.summaries.base import Summary, mean_codes


def build(store: Store, constants: Summary, k: Tensor) -> Summary:
    codes, scale = mean_codes(k.mean(dim=-2))
    return {"mean": codes, "mean_scale": scale}
