"""Checks of a benchmark on the arrays that it times: without proof that attention was sparse and right, no timing."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from eps_core.attention.layer import sparse_attention
from eps_core.attention.protocol import Array, Scores, Selection, State
from eps_core.bench.data import Layer
from eps_core.config.eps import EpsConfig
from eps_core.errors import ConfigError
from eps_core.reference.formulas import attend_keys

# relative L2 error of a head's output: what a few roundings to the dtype make of sums of independent terms
OUT_TOLERANCE = {"float32": 5e-4, "float16": 5e-3, "bfloat16": 3e-2}
DENSE_TOLERANCE = {"float32": 5e-3, "float16": 3e-2, "bfloat16": 0.15}  # libraries may round logits to the dtype
LSE_TOLERANCE = 5e-3  # nats; logits are float32 in every dtype
ESTIMATE_TOLERANCE = 5e-3  # nats, and of itself; estimates are float32
# estimates near the edge of the refined eighth may be refined by one path alone
ODD_ESTIMATES = 0.01
SAMPLED_PAIRS = 4  # (sequence, kv head)s that are compared with float64
PARTS = ("score", "select", "attend")


class CheckError(ConfigError):
    """A cell failed a check and must not be timed."""


@dataclass(frozen=True)
class Step:
    """The results of one step, part by part."""

    scores: Scores
    selection: Selection
    read: State  # over the selected groups


def run_step(layer: Layer, config: EpsConfig, wait: Callable[..., None]) -> Step:
    """One step through the backend's own functions, on the layer's cache."""
    backend, cache, plan = layer.backend, layer.cache, layer.plan(config)
    scores = backend.score(cache, 0, layer.q, plan)
    selection = backend.select(scores, plan)
    wait(scores, selection)
    read = backend.attend(cache, 0, layer.q, plan, selection)
    wait(read)
    return Step(scores, selection, read)


def check_sparse(layer: Layer, step: Step, asked_kernels: str, partial: bool) -> dict[str, Any]:
    """Return the record's facts about the selection. Raises CheckError unless groups were skipped (where `partial` asks
    for it), the list is in order, and the kernels are the ones asked for."""
    config, cache, backend = layer.config, layer.cache, layer.backend
    if not config.cache_config.enabled:
        raise CheckError("method off is dense: choose rq, box or another --method")
    if cache.kernels != asked_kernels and asked_kernels != "auto":
        raise CheckError(f"kernels {asked_kernels} were asked for and the cache has {cache.kernels}: nothing was timed")
    counts = backend.to_numpy(step.selection.counts).astype(np.int64)
    groups = backend.to_numpy(step.selection.groups)
    listed = (groups >= 0).sum(axis=-1)
    if not np.array_equal(listed, counts):
        raise CheckError(f"the selection lists {listed.sum():,} groups and counts {counts.sum():,}: nothing was timed")
    ascending = (np.diff(groups, axis=-1) > 0) | (groups[..., 1:] < 0)
    if not ascending.all() or groups.max(initial=-1) >= layer.groups or not counts.all():
        raise CheckError("the selection is empty, not ascending or past the end of a sequence: nothing was timed")
    total = layer.groups * counts.size
    if partial and (counts == layer.groups).any():
        raise CheckError(
            f"attention was not sparse: it selects all {layer.groups:,} groups of a context of {layer.shape.context:,} "
            f"({int(step.selection.always_selected.max()):,} as sink and recent tokens or for want of a summary): "
            "raise --context or lower --fraction"
        )
    return {
        "groups_total": total,
        "groups_selected": int(counts.sum()),
        "groups_always_selected": int(step.selection.always_selected.sum()) * counts.shape[1],
        "selected_ratio": int(counts.sum()) / total,
        "kv_bytes": layer.plan(config).kv_bytes(cache.spec, int(counts.sum())),
    }


def check_values(layer: Layer, config: EpsConfig, step: Step, keys: Array, values: Array) -> dict[str, Any]:
    """Return the record's facts about a step's values. Raises CheckError unless what was read equals float64 attention
    over the listed groups, of a few heads, and every part equals the array functions, of all. keys and values
    [B, Hkv, T, D] are the cache's own, in order."""
    worst = _against_float64(layer, step, keys, values)
    compared_with, computed_by = "float64", dict.fromkeys(PARTS, "arrays")
    if layer.cache.kernels != "arrays":
        worst = _worst([worst, _against_arrays(layer, config, step)])
        compared_with, computed_by = "float64 and arrays", _computed_by(layer, config, step)
    plan = layer.plan(config)
    if not plan.reads_all(0):  # the layer as a decoder takes it, once its parts are judged
        whole, one = sparse_attention(layer.backend, layer.cache, 0, layer.q, plan)
        require_same(layer, (whole, one.lse), step.read, "its own parts, one by one")
    return {"compared_with": compared_with, **worst, "computed_by": computed_by}


def _against_float64(layer: Layer, step: Step, keys: Array, values: Array) -> dict[str, float]:
    backend, size = layer.backend, layer.config.cache_config.S
    groups, counts = (backend.to_numpy(part) for part in (step.selection.groups, step.selection.counts))
    out, lse = (backend.to_numpy(part).astype(np.float64) for part in step.read)

    def selected(b: int, head: int) -> np.ndarray:
        tokens = (groups[b, head, : counts[b, head], None].astype(np.int64) * size + np.arange(size)).reshape(-1)
        return tokens[tokens < layer.shape.context]

    worst = _worst(
        [
            {"out_error": _relative(out[place], expected), "lse_error": abs(lse[place] - mass)}
            for place, expected, mass in _float64(layer, sampled_pairs(*counts.shape), keys, values, selected)
        ]
    )
    _require_close(layer, worst, "float64 attention over the same groups")
    return worst


def _float64(
    layer: Layer, pairs: Sequence[tuple[int, int]], keys: Array, values: Array, tokens_of: Callable[[int, int], Any]
) -> Iterator[tuple[tuple[int, int], np.ndarray, float]]:
    """((sequence, query head), out [D], lse) in float64 of every query head of some (sequence, kv head)s, over the
    tokens that `tokens_of` says."""
    backend, repeat = layer.backend, layer.shape.q_heads // layer.shape.kv_heads
    q = backend.to_numpy(layer.q).astype(np.float64) / np.sqrt(layer.shape.head_dim)
    for b, head in pairs:
        k, v = (backend.to_numpy(part[b, head])[tokens_of(b, head)] for part in (keys, values))
        for row in range(head * repeat, (head + 1) * repeat):
            yield (b, row), *attend_keys(q[b, row], k, v)


def _against_arrays(layer: Layer, config: EpsConfig, step: Step) -> dict[str, float]:
    """Every part of the step against the array function of its name, given the same input."""
    backend, plain = layer.backend, replace(layer.cache, kernels="arrays")
    plan = layer.plan(config)
    estimate = backend.to_numpy(step.scores.estimate).astype(np.float64)
    expected = backend.to_numpy(backend.score(plain, 0, layer.q, plan).estimate).astype(np.float64)
    finite = np.isfinite(expected)
    with np.errstate(invalid="ignore"):
        near = np.abs(estimate - expected) <= ESTIMATE_TOLERANCE * (1 + np.abs(expected))
    odd = 1 - np.where(finite, near, estimate == expected).mean()
    if not odd <= ODD_ESTIMATES:
        raise CheckError(f"{100 * odd:.1f} % of the estimates differ from the array path's: nothing was timed")
    selection = backend.select(replace(step.scores, kernels="arrays"), plan)
    for name in ("groups", "counts"):
        if not np.array_equal(
            backend.to_numpy(getattr(selection, name)), backend.to_numpy(getattr(step.selection, name))
        ):
            raise CheckError(f"the {name} selected differ from the array path's: nothing was timed")
    listed = replace(step.selection, selected_mask=None)
    worst = compare_states(layer, step.read, backend.attend(plain, 0, layer.q, plan, listed))
    _require_close(layer, worst, "the array path over the same groups")
    return worst


def _worst(found: Sequence[dict[str, float]]) -> dict[str, float]:
    """The largest of each error, NaN where one is."""
    return {name: float(np.max([errors[name] for errors in found])) for name in found[0]}


def compare_states(layer: Layer, state: State, right: State) -> dict[str, float]:
    """The largest error of any head: relative L2 of out [B, Hq, D], nats of lse [B, Hq]."""
    (out, lse), (expected, mass) = (
        tuple(layer.backend.to_numpy(part).astype(np.float64) for part in one) for one in (state, right)
    )
    filled = np.isfinite(mass)  # over no keys, out is 0 and lse -inf
    if not np.array_equal(filled, np.isfinite(lse)):
        return {"out_error": np.inf, "lse_error": np.inf}
    errors = [_relative(a, b) for a, b in zip(out[filled], expected[filled], strict=True)]
    return {
        "out_error": float(np.max(errors, initial=0.0)),
        "lse_error": float(np.abs(lse[filled] - mass[filled]).max(initial=0.0)),
    }


def require_same(layer: Layer, state: State, right: State, what: str) -> None:
    _require_close(layer, compare_states(layer, state, right), what)


def _require_close(layer: Layer, worst: dict[str, float], what: str) -> None:
    tolerance = OUT_TOLERANCE[layer.shape.dtype]
    for name, limit in (("out_error", tolerance), ("lse_error", LSE_TOLERANCE)):
        if not worst[name] <= limit:  # NaN too
            raise CheckError(
                f"sparse attention by kernels {layer.cache.kernels} is wrong: {name.replace('_', ' ')} "
                f"{worst[name]:.2g} against {what}, and {layer.shape.dtype} allows {limit:g}: nothing was timed"
            )


def dense_error(layer: Layer, out: Array, keys: Array, values: Array) -> float:
    """The largest relative L2 error, of a few heads, of a dense output [B, Hq, D] against float64."""
    got = layer.backend.to_numpy(out).astype(np.float64)
    pairs = sampled_pairs(layer.shape.batch, layer.shape.kv_heads)[:2]
    exact = _float64(layer, pairs, keys, values, lambda b, head: slice(None))
    return float(np.max([_relative(got[place], expected) for place, expected, _ in exact]))


def sampled_pairs(batch: int, kv_heads: int) -> list[tuple[int, int]]:
    """A few (sequence, kv head)s, the first and the last among them."""
    places = np.unique(np.linspace(0, batch * kv_heads - 1, SAMPLED_PAIRS).astype(int))
    return [divmod(int(place), kv_heads) for place in places[::-1]]


def _relative(value: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(value - expected)) / max(float(np.linalg.norm(expected)), 1e-30)


def _computed_by(layer: Layer, config: EpsConfig, step: Step) -> dict[str, str]:
    """Return the code that computes each part: the cache's kernels, or array operations for what has none. Raises
    CheckError where attention itself has none."""
    cache, plan = layer.cache, layer.plan(config)
    given: dict[str, tuple[Any, ...]] = {
        "score": (cache, 0, layer.q, plan),
        "select": (step.scores, plan, 0),
        "attend": (cache, 0, layer.q, plan, step.selection),
    }
    by = {}
    for name, arguments in given.items():
        kernel = layer.backend.kernel_of(cache, name)
        by[name] = "arrays" if kernel is None or kernel(*arguments) is None else cache.kernels
    if by["attend"] == "arrays":
        raise CheckError(
            f"kernels {cache.kernels} have no attention for groups of {config.cache_config.S} tokens and head dim "
            f"{layer.shape.head_dim}: nothing was timed; use --kernels arrays"
        )
    return by
