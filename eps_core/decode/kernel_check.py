"""Do a device's kernels say what array operations say? Asked once before a run trusts them.

A driver, a compiler or a CPU that no test has seen can break them. One small case in the model's own shape, dtype and
method tells, in about a second once they are compiled, and the first layer and the head of the model itself, once it is
read. All that a step uses is compiled then, before it is timed.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np

from eps_core.attention.layer import attend_prefill, sparse_attention
from eps_core.attention.protocol import Backend
from eps_core.config.cache import CacheSpec
from eps_core.config.eps import EpsConfig
from eps_core.kv_cache.rows import Rows
from eps_core.kv_cache.step_plan import StepPlan

TOKENS = 700  # past the 256 that the centroid of key codes needs, with a partial group where groups are of two
VERIFIED_ROWS = 5
TIES = 0.005  # share of the estimates
# of an output against the largest |v|: what the rounding of its dtype and of other sum orders may differ by
TOLERANCE = {"float32": 1e-4, "float16": 4e-3, "bfloat16": 3e-2}


def disagreement(
    backend: Backend,
    device: str,
    kernels: str,
    spec: CacheSpec,
    num_heads: int,
    config: EpsConfig,
    progress: Callable[[int, int, str], None] = lambda *given: None,
    verified: bool = False,
) -> str | None:
    """Return how kernels and array operations differ over one layer of `spec`'s shape, in a few words; None where they
    agree. An exception of the kernels is a difference too. `progress(done, total, part)` is told before each part. A
    verify pass is compared where decoding is `verified`."""
    length = TOKENS + (1 if config.cache_config.S > 1 else 0)
    units = -(-length // config.cache_config.unit_tokens)
    one = replace(spec, num_layers=1, num_units=units, max_open_groups=1)
    config = EpsConfig.over(
        config.cache_config, replace(config.selection_config, min_context=0, budget_floor=0, head_modes=None)
    )
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((length, spec.num_kv_heads, spec.head_dim), np.float32) for _ in range(2))
    q = 2 * rng.standard_normal((1, num_heads, spec.head_dim), np.float32)
    expected = _results(backend, device, "arrays", one, config, k, v, q, verified=verified)
    try:
        given = backend, device, kernels, one, config, k, v, q
        with _preparing(kernels, lambda: _results(*given, verified=verified)):
            got = _results(*given, progress, verified)
    except Exception as error:  # whatever a compiler or a driver raises
        return _said(error)
    limit = TOLERANCE[spec.dtype]
    for name, value in expected.items():
        other = got[name]
        if value.dtype.kind in "iu":
            if not np.array_equal(value, other):
                return f"{name} differ"
            continue
        finite = np.isfinite(value)
        if not np.array_equal(value[~finite], other[~finite]):
            return f"{name} differ in what is infinite"
        apart = np.abs(value[finite] - other[finite])
        if (
            name == "estimates" and not np.isnan(apart).any()
        ):  # of a few groups a code, or which of them were refined, rounds to two sides
            apart = np.sort(apart)[: len(apart) - int(TIES * len(apart))]
        worst = float(apart.max(initial=0))
        if not worst <= limit * max(1.0, float(np.abs(value[finite]).max(initial=0))):  # NaN too
            return f"{name} differ by {worst:.3g}"
    return None


def rows_disagreement(backend: Backend, model: Any, kernels: str) -> str | None:
    """Return how a model's kernels for few rows and its own operations differ over its first layer and its head, in a
    few words; None where they agree or there are none."""
    with model.scope():
        few = model.for_rows(kernels, VERIFIED_ROWS)
        if few is model:
            return None
        expected = _rows_results(backend, model)
        try:
            with _preparing(kernels, lambda: _rows_results(backend, few)):
                got = _rows_results(backend, few)
        except Exception as error:  # whatever a compiler raises
            return _said(error)
    for name, value in expected.items():
        finite = np.isfinite(value)  # float16 may overflow where float32 does not
        value, other = value[finite], got[name][finite]
        apart = float(np.abs(value - other).max(initial=0))
        if not apart <= TOLERANCE[model.dtype] * max(1.0, float(np.abs(value).max(initial=0))):  # NaN too
            return f"{name} of a model's rows differ by {apart:.3g}"
    return None


def _rows_results(backend: Backend, model: Any) -> dict[str, np.ndarray]:
    """Return what a model computes of a few rows, with queries for what attention gives."""
    x = model.embed(np.arange(VERIFIED_ROWS) % model.spec.vocab_size)
    q, k, v = model.project(0, x, model.rotation(np.arange(VERIFIED_ROWS)))
    found = {"queries": q, "keys": k, "values": v, "logits": model.logits(model.after_attention(0, x, q))}
    return {name: backend.to_numpy(one).astype(np.float32) for name, one in found.items()}


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"


def _preparing(kernels: str, calls: Callable[[], object]) -> AbstractContextManager[None]:
    if kernels != "numba":
        return nullcontext()
    from eps_core.cpu import beside  # imports numba, which takes a second

    return beside.preparing(calls)


def _results(
    backend: Backend,
    device: str,
    kernels: str,
    spec: CacheSpec,
    config: EpsConfig,
    k: np.ndarray,
    v: np.ndarray,
    q: np.ndarray,
    progress: Callable[[int, int, str], None] = lambda *given: None,
    verified: bool = False,
) -> dict[str, np.ndarray]:
    """Everything that a sparse step and a dense one compute, and a pass that verifies. Groups are not compared where
    estimates are: their rounding may swap two that are nearly equal, so both sides rank the same made-up ones."""
    parts = ["write", "prefill", "dense attention", *(["verify pass"] if verified else [])]
    parts += ["score", "select", "attend", "step"] if config.cache_config.enabled else []

    def begin(part: str) -> None:
        progress(parts.index(part), len(parts), part)

    begin("write")
    cache: Any = backend.new_cache(spec, config.cache_config, device, kernels)
    length = len(k)
    native = [backend.from_numpy(x, spec.dtype, device) for x in (k, v)]
    cut = length - 3
    cache = backend.write_kv(cache, 0, native[0][:cut], native[1][:cut], np.arange(cut))
    wide = [backend.from_numpy(x, "float32", device) for x in (k, v)]
    for token in range(cut, length):  # decode writes take another way than prefill, float32 rows among them
        one = slice(token, token + 1)
        cache = backend.write_kv(cache, 0, wide[0][one], wide[1][one], np.arange(token, token + 1))
    units = -(-length // config.cache_config.unit_tokens)
    plan = StepPlan.of(config, np.arange(units, dtype=np.int32)[None], np.array([length]))
    query = backend.from_numpy(q, spec.dtype, device)
    factors = np.linspace(-1, 1, VERIFIED_ROWS, dtype=np.float32)[:, None, None]
    turned = backend.from_numpy(q * factors, spec.dtype, device)
    begin("prefill")
    prefilled = attend_prefill(backend, cache, 0, turned, plan.table[0], length)
    results = {"prefill outputs": backend.to_numpy(prefilled).astype(np.float32)}
    begin("dense attention")
    states: dict[str, Any] = {"dense": backend.attend(cache, 0, query, plan, None)}
    if verified:
        begin("verify pass")
        rows = Rows.of(plan.table, plan.lengths, np.array([VERIFIED_ROWS]))
        listed = np.zeros((VERIFIED_ROWS, spec.num_kv_heads, plan.num_groups), np.float32)
        listed[..., ::3] = 1
        read = backend.attend_rows(cache, 0, turned, rows, backend.from_numpy(listed, "float32", device) > 0)
        states["verified"] = read.out, read.lse
        results["verified lse of what was selected"] = backend.to_numpy(read.selected_lse)
    if config.cache_config.enabled:
        begin("score")
        scores = backend.score(cache, 0, query, plan)
        results["estimates"] = backend.to_numpy(scores.estimate)
        # ranks that no rounding can change
        clear = replace(scores, estimate=_spread(backend, results["estimates"], device))
        begin("select")
        selection = backend.select(clear, plan)
        results["groups"] = backend.to_numpy(selection.groups)
        results["counts"] = backend.to_numpy(selection.counts)
        begin("attend")
        states["sparse"] = backend.attend(cache, 0, query, plan, selection)
        begin("step")  # what statistics and error bounds also use; its parts are compared above
        out, seen = sparse_attention(backend, cache, 0, query, plan)
        # one kernel may do what the parts do; which groups these are, rounding decides, in both alike
        state = backend.attend(cache, 0, query, plan, seen.selection)
        whole = (out, seen.lse), state
        apart = [np.subtract(*(backend.to_numpy(one[i]).astype(np.float32) for one in whole)) for i in range(2)]
    for name, (out, lse) in states.items():
        results[f"{name} outputs"] = backend.to_numpy(out).astype(np.float32)
        results[f"{name} lse"] = backend.to_numpy(lse)
    if config.cache_config.enabled:
        # by their difference; last, as what is wrong shows in parts first
        results["a whole layer and its parts"] = np.concatenate([part.ravel() for part in apart])
    return results


def _spread(backend: Backend, estimate: np.ndarray, device: str) -> Any:
    """Finite estimates replaced by multiples of 1/8 in a fixed scrambled order, far apart for any rounding."""
    order = np.arange(estimate.shape[-1]) * 379 % 1009 / 8
    return backend.from_numpy(np.where(np.isfinite(estimate), order, estimate).astype(np.float32), "float32", device)
