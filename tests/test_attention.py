"""The sparse layer: `sparse_attention` against its parts in an order of the test's own, on every backend, and
wrong pipelines, which must fail the same check."""

import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_conformance import Case, FilledCase, eps

from eps_core import reference
from eps_core.attention import layer as attention_layer
from eps_core.config.eps import EpsConfig
from eps_core.reference.scoring import selection_mask

CASES = {
    "strict": eps("moments", strict=True, epsilon=0.3, budget=0.2),
    "strict by codes of keys": eps("rq", strict=True, epsilon=0.02, bound_bits=8, budget=0.2),
    "bounds, not strict": eps("ball", budget=0.2),
    "codes about units' means": eps("rq", group_size=2, budget=0.2),
    "no bounds": eps("meanstd", budget=0.2),
    "union": eps("box", scope="union", strict=True, epsilon=0.05, budget=0.2),
    "everything within the budget": eps("box", budget=1.0),
    "a dense layer": eps("box", head_modes=(("dense", "dense"),)),
}
LENGTHS = (300, 267)


def scene(backend: Any, device: str, config: EpsConfig) -> FilledCase:
    """One layer's cache and a query of each of two sequences."""
    return FilledCase(backend, device, Case(LENGTHS, config), 5)


def expected(config: EpsConfig) -> dict[str, Any]:
    """Of the oracle, part by part: what was visited, out, lse, statistics."""
    one = scene(reference, "cpu", config)
    cache, plan, q, kv_heads = one.cache, one.plan, one.q, one.cache.spec.num_kv_heads
    dense_out, dense_lse = reference.attend(cache, 0, q, plan, None)
    everything = np.repeat(plan.inside[:, None], kv_heads, axis=1)
    if config.selection_config.dense_layer(0) or config.budget_groups(min(LENGTHS)) >= plan.ends.min():
        zero = np.zeros((2, kv_heads)) if config.cache_config.has_bounds else None
        return {"visit": everything, "out": dense_out, "lse": dense_lse, "cert": zero, "error": zero, "true": 0.0,
                "extended": None, "scored": False}  # fmt: skip
    scores = reference.score(cache, 0, q, plan)
    first = reference.select(scores, plan)
    selected_mask = selection_mask(first, plan.num_groups)
    found: dict[str, Any] = {"cert": None, "error": None, "extended": None, "scored": True, "bound_bytes": 0}
    read = reference.attend(cache, 0, q, plan, first)
    whole = first
    if config.cache_config.has_bounds:
        scores = reference.bounds(cache, 0, q, plan, scores, first)
        key_bytes = cache.spec.head_dim + 2 + 3 * 2  # 8-bit codes, their scale and three float16 numbers
        num_left = int(plan.ends.sum()) * kv_heads - int(first.counts.sum())
        found["bound_bytes"] = num_left * config.cache_config.S * key_bytes if cache.bound else 0
    if config.selection_config.strict:
        extra, whole = reference.extend_selection(config.selection_config, scores, first, read[1])
        more = selection_mask(extra, plan.num_groups)
        assert more.any() and not (more & selected_mask).any(), "the case must extend"
        selected_mask, found["extended"] = selected_mask | more, extra.counts
        read = reference.attend(cache, 0, q, plan, whole)  # at once, not in two parts
    if config.cache_config.has_bounds:
        error_bound = reference.bound_error(cache, 0, scores, whole, *read)
        found |= {"cert": error_bound.mass, "error": error_bound.error}
    out, lse = read
    unread = 1 - np.exp(lse - dense_lse)
    return found | {"visit": selected_mask, "out": out, "lse": lse, "true": unread.reshape(2, kv_heads, -1).max(axis=2)}


def check(module: Any, backend: Any, device: str, config: EpsConfig) -> None:
    want, one = expected(config), scene(backend, device, config)
    out, read = module.sparse_attention(backend, one.cache, 0, one.native, one.plan, audit=True)
    (stats,), (out, lse) = module.collect(backend, one.cache, [read], out, read.lse)
    counts = want["visit"].sum(axis=2)
    assert np.array_equal(stats.counts, counts) and np.array_equal(stats.groups, one.plan.ends)
    tile = config.cache_config.S * one.cache.spec.kv_token_bytes
    kv_bytes = int(counts.sum()) * tile
    if not want["scored"]:
        kv_bytes = sum(LENGTHS) * one.cache.spec.num_kv_heads * one.cache.spec.kv_token_bytes
    assert stats.kv_bytes_read == kv_bytes
    scored = one.plan.summary_bytes(one.cache.spec) + want["bound_bytes"] if want["scored"] else 0
    assert stats.summary_bytes_read == scored and (scored > 0) == want["scored"]
    assert np.allclose(out, want["out"], atol=1e-4) and np.allclose(lse, want["lse"], atol=1e-4)
    for name, value in (("skipped_mass_bound", want["cert"]), ("output_error_bound", want["error"]),
                        ("skipped_mass_true", want["true"]), ("extended", want["extended"])):  # fmt: skip
        got = getattr(stats, name)
        assert (got is None) == (value is None), name
        assert value is None or np.allclose(got, value, rtol=2e-3, atol=2e-4), name


@pytest.mark.kernels("numba")
@pytest.mark.parametrize("name", CASES)
def test_the_layer_is_its_parts_in_order(target, name):
    check(attention_layer, *target, CASES[name])


WRONG = {
    "no merge after the extension": (
        "out, lse = backend.merge((out, lse), backend.attend(cache, layer, q, plan, extra))",
        "backend.attend(cache, layer, q, plan, extra)",
    ),
    "the extension alone": (
        "out, lse = backend.merge((out, lse), backend.attend(cache, layer, q, plan, extra))",
        "out, lse = backend.attend(cache, layer, q, plan, extra)",
    ),
    "an error bound of what was selected first": (
        "extra, selection = backend.extend_selection(config.selection_config, scores, selection, lse)",
        "first, (extra, selection) = selection, "
        "backend.extend_selection(config.selection_config, scores, selection, lse)",
        "backend.bound_error(cache, layer, scores, selection, out, lse)",
        "backend.bound_error(cache, layer, scores, locals().get('first', selection), out, lse)",
    ),
    "an error bound before the extension": (
        "            if config.selection_config.strict:",
        "            held = backend.bound_error(cache, layer, scores, selection, out, lse) "
        "if cache_config.has_bounds else None\n"
        "            if config.selection_config.strict:",
        "error_bound = backend.bound_error(cache, layer, scores, selection, out, lse)",
        "error_bound = held",
    ),
    "no bounds of single keys": (
        "scores = backend.bounds(cache, layer, q, plan, scores, selection)",
        "scores = scores",
    ),
    "extended groups not counted": (
        "extra, selection = backend.extend_selection(config.selection_config, scores, selection, lse)",
        "extra, _ = backend.extend_selection(config.selection_config, scores, selection, lse)",
    ),
    "bytes of bounds not counted": ("    if read.bounds_skipped:", "    if False:"),
    "bytes of bounds after the extension": ("num_groups - num_selected + added", "num_groups - num_selected"),
    "scores where everything is read": ("    if plan.reads_all(layer):", "    if False:"),
    "summaries not counted": (
        "        stats.summary_bytes_read = plan.summary_bytes(spec)\n    read.lse",
        "        stats.summary_bytes_read = 0\n    read.lse",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_pipeline_fails(name, monkeypatch):
    source = Path(attention_layer.__file__).read_text()
    for old, new in zip(WRONG[name][::2], WRONG[name][1::2], strict=True):
        assert source.count(old) == 1, f"{old!r} is not there once: the mutant tests nothing"
        source = source.replace(old, new)
    module = types.ModuleType("wrong")
    monkeypatch.setitem(sys.modules, "wrong", module)  # where dataclasses look their own names up
    exec(compile(source, "wrong", "exec"), module.__dict__)
    backend = SimpleNamespace(**vars(reference))
    failed = 0
    for config in CASES.values():
        try:
            check(module, backend, "cpu", config)
        except AssertionError:
            failed += 1
        except ValueError as error:  # the oracle refuses to extend without bounds
            assert name == "no bounds of single keys" and "has no bounds" in str(error)
            failed += 1
    assert failed
