"""The gated layer: `gate.attend_layer` against its parts in an order of the test's own, on every backend, and wrong
pipelines, which must fail the same check."""

import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_conformance import Case, FilledCase, eps

from eps_core import oracle
from eps_core.config.eps import EpsConfig
from eps_core.gate import attend as gate
from eps_core.oracle.scoring import visit_mask

CASES = {
    "strict with a tail": eps("moments", strict=True, epsilon=0.3, tail_tokens=32, budget=0.2),
    "strict by codes of keys": eps("rq", strict=True, epsilon=0.02, bound_bits=8, tail_tokens=32, budget=0.2),
    "bounds, not strict": eps("ball", tail_tokens=32, budget=0.2),
    "codes about units' means": eps("rq", group_tokens=2, budget=0.2),
    "a tail without bounds": eps("meanstd", tail_tokens=32, budget=0.2),
    "union": eps("box", scope="union", strict=True, epsilon=0.05, tail_tokens=0, budget=0.2),
    "everything within the budget": eps("box", budget=1.0),
    "a dense layer": eps("box", head_modes=(("dense", "dense"),)),
}
LENGTHS = (300, 267)


def scene(backend: Any, device: str, config: EpsConfig) -> FilledCase:
    """One layer's cache and a query of each of two sequences."""
    return FilledCase(backend, device, Case(LENGTHS, config), 5)


def expected(config: EpsConfig) -> dict[str, Any]:
    """Of the oracle, part by part: what was visited, out, lse, statistics."""
    one = scene(oracle, "cpu", config)
    cache, where, q, kv_heads = one.cache, one.where, one.q, one.cache.spec.num_kv_heads
    dense_out, dense_lse = oracle.attend(cache, 0, q, where, None)
    everything = np.repeat(where.inside[:, None], kv_heads, axis=1)
    if config.read.dense_layer(0) or config.budget_groups(min(LENGTHS)) >= where.ends.min():
        zero = np.zeros((2, kv_heads)) if config.store.has_bounds else None
        return {"visit": everything, "out": dense_out, "lse": dense_lse, "cert": zero, "error": zero, "true": 0.0,
                "escalated": None, "scored": False}  # fmt: skip
    scores = oracle.score(cache, 0, q, where)
    first = oracle.select(scores, where)
    visit = visit_mask(first, where.num_groups)
    found: dict[str, Any] = {"cert": None, "error": None, "escalated": None, "scored": True}
    read = oracle.attend(cache, 0, q, where, first)
    whole = first
    before = cache.bound_bytes_read
    if config.store.has_bounds:
        scores = oracle.bounds(cache, 0, q, where, scores, first)
    found["bound_bytes"] = cache.bound_bytes_read - before  # the reference counts what it gathers
    if config.read.strict:
        extra, whole = oracle.escalate(config.read, scores, first, read[1])
        more = visit_mask(extra, where.num_groups)
        assert more.any() and not (more & visit).any(), "the case must escalate"
        visit, found["escalated"] = visit | more, extra.counts
        read = oracle.attend(cache, 0, q, where, whole)  # at once, not in two parts
    if config.store.has_bounds:
        certificate = oracle.certify(cache, 0, scores, whole, *read)
        found |= {"cert": certificate.mass, "error": certificate.error}
    out, lse = read
    if config.store.tail_tokens:
        out, lse = oracle.merge(read, oracle.attend_tail(cache, 0, where, scores, whole, read[1]))
        if found["error"] is not None:
            moved = np.linalg.norm(out - read[0], axis=2).reshape(2, kv_heads, -1).max(axis=2)
            assert (moved > 1e-6).any(), "the tail must move something"
            found["error"] = found["error"] + moved
    unread = 1 - np.exp(read[1] - dense_lse)
    return found | {"visit": visit, "out": out, "lse": lse, "true": unread.reshape(2, kv_heads, -1).max(axis=2)}


def check(module: Any, backend: Any, device: str, config: EpsConfig) -> None:
    want, one = expected(config), scene(backend, device, config)
    out, read = module.attend_layer(backend, one.cache, 0, one.native, one.where, audit=True)
    (stats,), (out, lse) = module.collect(backend, one.cache, [read], out, read.lse)
    counts = want["visit"].sum(axis=2)
    assert np.array_equal(stats.counts, counts) and np.array_equal(stats.groups, one.where.ends)
    tile = config.store.S * one.cache.spec.kv_token_bytes
    kv_bytes = int(counts.sum()) * tile
    if not want["scored"]:
        kv_bytes = sum(LENGTHS) * one.cache.spec.num_kv_heads * one.cache.spec.kv_token_bytes
    assert stats.kv_bytes_read == kv_bytes
    scored = one.where.summary_bytes(one.cache.spec) + want["bound_bytes"] if want["scored"] else 0
    assert stats.summary_bytes_read == scored and (scored > 0) == want["scored"]
    assert np.allclose(out, want["out"], atol=1e-4) and np.allclose(lse, want["lse"], atol=1e-4)
    for name, value in (("mass_skipped_cert", want["cert"]), ("output_error_cert", want["error"]),
                        ("mass_skipped_true", want["true"]), ("escalated", want["escalated"])):  # fmt: skip
        got = getattr(stats, name)
        assert (got is None) == (value is None), name
        assert value is None or np.allclose(got, value, rtol=2e-3, atol=2e-4), name


@pytest.mark.kernels("numba")
@pytest.mark.parametrize("name", CASES)
def test_the_layer_is_its_parts_in_order(target, name):
    check(gate, *target, CASES[name])


WRONG = {
    "no merge after the escalation": (
        "out, lse = eps.merge((out, lse), eps.attend(cache, layer, q, where, extra))",
        "eps.attend(cache, layer, q, where, extra)",
    ),
    "the escalation alone": (
        "out, lse = eps.merge((out, lse), eps.attend(cache, layer, q, where, extra))",
        "out, lse = eps.attend(cache, layer, q, where, extra)",
    ),
    "a certificate of what was selected first": (
        "extra, selection = eps.escalate(config.read, scores, selection, lse)",
        "first, (extra, selection) = selection, eps.escalate(config.read, scores, selection, lse)",
        "eps.certify(cache, layer, scores, selection, out, lse)",
        "eps.certify(cache, layer, scores, locals().get('first', selection), out, lse)",
    ),
    "a certificate before the escalation": (
        "            if config.read.strict:",
        "            held = eps.certify(cache, layer, scores, selection, out, lse) if store.has_bounds else None\n"
        "            if config.read.strict:",
        "certificate = eps.certify(cache, layer, scores, selection, out, lse)",
        "certificate = held",
    ),
    "a forgotten tail": ("            if store.tail_tokens:", "            if False:"),
    "a tail before the escalation": (
        "            read.bounds_skipped = cache",
        "            if store.tail_tokens:\n"
        "                early = eps.add_tail(cache, layer, where, scores, selection, (out, lse))\n"
        "            read.bounds_skipped = cache",
        "whole, read.lse = eps.add_tail(cache, layer, where, scores, selection, (out, lse))",
        "whole, read.lse = early",
    ),
    "the tail's move left out of the error": (
        'pending["output_error_cert"] = pending["output_error_cert"] + moved',
        "moved",
    ),
    "no bounds of single keys": (
        "scores = eps.bounds(cache, layer, q, where, scores, selection)",
        "scores = scores",
    ),
    "escalated groups not counted": (
        "extra, selection = eps.escalate(config.read, scores, selection, lse)",
        "extra, _ = eps.escalate(config.read, scores, selection, lse)",
    ),
    "bytes of bounds not counted": ("    if read.bounds_skipped:", "    if False:"),
    "bytes of bounds after the escalation": ("num_groups - num_selected + added", "num_groups - num_selected"),
    "an audit of the tail": (
        "eps.unread_share(lse, lse_all, kv_heads)",
        "eps.unread_share(read.lse, lse_all, kv_heads)",
    ),
    "scores where everything is read": ("    if where.reads_all(layer):", "    if False:"),
    "summaries not counted": (
        "        stats.summary_bytes_read = where.summary_bytes(spec)\n    if clock",
        "        stats.summary_bytes_read = 0\n    if clock",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_pipeline_fails(name, monkeypatch):
    source = Path(gate.__file__).read_text()
    for old, new in zip(WRONG[name][::2], WRONG[name][1::2], strict=True):
        assert source.count(old) == 1, f"{old!r} is not there once: the mutant tests nothing"
        source = source.replace(old, new)
    module = types.ModuleType("wrong")
    monkeypatch.setitem(sys.modules, "wrong", module)  # where dataclasses look their own names up
    exec(compile(source, "wrong", "exec"), module.__dict__)
    backend = SimpleNamespace(**vars(oracle))
    failed = 0
    for config in CASES.values():
        try:
            check(module, backend, "cpu", config)
        except AssertionError:
            failed += 1
        except ValueError as error:  # the oracle refuses to escalate without bounds
            assert name == "no bounds of single keys" and "has no bounds" in str(error)
            failed += 1
    assert failed
