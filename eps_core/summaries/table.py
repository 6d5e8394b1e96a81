"""Every method by its name, in the order of `--method`: a new one is one line here and one file a library."""

import importlib
from collections.abc import Callable
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np

from eps_core.summaries.base import LARGEST_ESTIMATE, Constants, Field, MethodSpec, Score, Settings, Summary

FILES = {
    "jl": "jl",
    "1pc": "pc1",
    "fd": "fd",
    "norm": "norm",
    "box": "box",
    "meanstd": "meanstd",
    "ball": "ball",
    "moments": "moments",
    "rq": "rq",
    "random": "uniform",
    "oracle": "exact",
    "keys": "keys",
}
METHODS: dict[str, ModuleType] = {
    name: importlib.import_module(f"eps_core.summaries.{file}") for name, file in FILES.items()
}
OFF = "off"
KEY_CODES = "keys"  # which bound for the others
_NONE = MethodSpec(group_size=None, role=OFF, no_bounds="none")


def method_spec(name: str) -> MethodSpec:
    """Return the facts of a method; those of no method where there is none of that name."""
    found: MethodSpec = METHODS[name].SPEC if name in METHODS else _NONE
    return found


def names(which: Callable[[MethodSpec], object]) -> tuple[str, ...]:
    """The methods whose facts are so, in their order."""
    return tuple(name for name in METHODS if which(method_spec(name)))


def _given(settings: Settings, what: str, *args: int) -> dict[str, Any]:
    """Return what the function of that name in the method's file gives; {} where it has none."""
    make = getattr(METHODS.get(settings.method), what, None)
    found: dict[str, Any] = make(settings, *args) if make else {}
    return found


def fields(settings: Settings, head_dim: int) -> dict[str, Field]:
    """Return the arrays stored of one group of one layer and kv head, in its order."""
    return _given(settings, "fields", head_dim)


@lru_cache  # every step asks
def num_parts(settings: Settings, head_dim: int) -> int:
    """In how many parts the codes of a head dim are kept."""
    return 1 + max((one.part for one in fields(settings, head_dim).values()), default=0)


def running(settings: Settings, head_dim: int) -> dict[str, Field]:
    """The running statistics of one partial group, kept beside the pool."""
    return _given(settings, "running", head_dim)


def constants(settings: Settings, layer: int, num_kv_heads: int, head_dim: int) -> Constants:
    """Return the arrays that builders and scorers of a layer need besides keys, from the seed: values shared with the
    backends, no code. Arrays [Hkv, ..], of each kv head, but `signs` [2, D], which all of them share."""
    return _given(settings, "constants", layer, num_kv_heads, head_dim)


def build_summary(settings: Settings, constants: Constants, k: np.ndarray) -> Summary:
    """The oracle's summary of one full group of one kv head: k [S, D] exactly as attention reads it."""
    found: Summary = METHODS[settings.method].build(settings, constants, k.astype(np.float64))
    return found


def score_summary(settings: Settings, constants: Constants, summary: Summary, a: np.ndarray) -> Score:
    """The oracle's estimate and bounds [G] of full groups for one query head: summary [G, ...], a = scale * q [D]."""
    with np.errstate(invalid="ignore", over="ignore"):
        estimate, lower, upper = METHODS[settings.method].score(settings, constants, summary, a.astype(np.float64))
    # an infinite stored scalar (key norms past float16) must loosen a bound, never turn it into NaN
    return (
        np.where(np.isfinite(estimate), estimate, LARGEST_ESTIMATE),
        None if lower is None else np.where(np.isfinite(lower), lower, -np.inf),
        None if upper is None else np.where(np.isfinite(upper), upper, np.inf),
    )
