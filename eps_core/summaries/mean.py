"""The mean values that stand for skipped groups: no way to score keys."""

import numpy as np

from eps_core.summaries.base import Constants, Field, MethodSpec, Settings, Summary, mean_codes

SPEC = MethodSpec(group_size=128, role="correction", no_bounds="none")


def fields(settings: Settings, head_dim: int) -> dict[str, Field]:
    return {"mean": Field("int8", (head_dim,)), "mean_scale": Field("float16")}


def build(settings: Settings, constants: Constants, k: np.ndarray) -> Summary:
    codes, scale = mean_codes(k.mean(axis=0))
    return {"mean": codes, "mean_scale": scale}
