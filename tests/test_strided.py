"""A cache over an engine's own pools, however they lie, equals one over contiguous pools: values, lists and summaries.

What lies between the rows, and in slots that were never written, is NaN: whatever reads it shows.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from eps_core.config.cache import CacheSpec
from eps_core.config.eps import EpsConfig
from eps_core.kv_cache.step_plan import StepPlan
from eps_core.load import load_backend
from eps_cuda import adopt as adopt_module
from eps_cuda.adopt import adopt, forget, mark_written
from eps_cuda.cache import Cache

eps = load_backend("cuda")

LAYERS, KV_HEADS, HEADS, HEAD_DIM, UNITS = 2, 2, 4, 16, 32
LENGTHS = (300, 129, 7)
Layout = Callable[[int, int, torch.dtype], tuple[Tensor, Tensor]]


def interleaved_hnd(units: int, tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """vLLM's LBHNC: K and V of a token side by side, heads before tokens."""
    base = torch.full((units, KV_HEADS, tokens, 2 * HEAD_DIM), torch.nan, dtype=dtype)
    return base[..., :HEAD_DIM], base[..., HEAD_DIM:]


def interleaved_nhd(units: int, tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """vLLM's LBNHC: tokens before heads."""
    base = torch.full((units, tokens, KV_HEADS, 2 * HEAD_DIM), torch.nan, dtype=dtype).transpose(1, 2)
    return base[..., :HEAD_DIM], base[..., HEAD_DIM:]


def pages(units: int, tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """All K of a page, then all V, then what somebody else keeps there."""
    size = KV_HEADS * tokens * HEAD_DIM
    base = torch.full((units, 2 * size + 24), torch.nan, dtype=dtype)
    k, v = (base[:, i * size : (i + 1) * size].unflatten(1, (KV_HEADS, tokens, HEAD_DIM)) for i in range(2))
    return k, v


LAYOUTS = (interleaved_hnd, interleaved_nhd, pages)
CONFIGS = {
    "rq@2": {"method": "rq", "group_size": 2, "mean_tokens": 32},
    "rq@4": {"method": "rq", "group_size": 4},
    "box": {"method": "box", "group_size": 16},
    "moments": {"method": "moments", "group_size": 16},
    "rq@2, summed": {"method": "rq", "group_size": 2, "mean_tokens": 32, "combine": "sum"},
    "rq@2, bounded": {"method": "rq", "bound_bits": 8},
}
CASES = [
    pytest.param(layout, settings, kernels, dtype, id=f"{layout.__name__}-{name}-{kernels}-{dtype}")
    for layout, dtype in zip(LAYOUTS, ("float32", "bfloat16", "bfloat16"), strict=True)
    for name, settings in CONFIGS.items()
    for kernels in ("arrays", "numba")
] + [  # in the interpreter, which is slow
    pytest.param(layout, CONFIGS[name], "triton", dtype, id=f"{layout.__name__}-{name}-triton-{dtype}")
    for layout, name, dtype in (
        (interleaved_hnd, "rq@2", "bfloat16"), (interleaved_nhd, "rq@2, summed", "float32"), (pages, "rq@2", "float32"),
    )
]  # fmt: skip


def caches(config: EpsConfig, layout: Layout, kernels: str, dtype: str) -> tuple[Cache, Cache]:
    """The same cache over contiguous pools and over strided ones."""
    spec = CacheSpec(LAYERS, KV_HEADS, HEAD_DIM, UNITS, dtype)
    pools = [layout(UNITS, config.cache_config.unit_tokens, getattr(torch, dtype)) for _ in range(LAYERS)]
    for k, v in pools:
        assert not k.is_contiguous() and not v.is_contiguous()
    own, theirs = (eps.new_cache(spec, config.cache_config, "cpu", kernels, given) for given in (None, pools))
    return own, theirs


def parts(both: tuple[Cache, Cache]) -> Iterator[tuple[Any, Any]]:
    """Two caches, and their bounds where they have any."""
    return zip(*(cache.parts() for cache in both), strict=True)


def fill(config: EpsConfig, both: tuple[Cache, Cache]) -> tuple[np.ndarray, torch.Generator]:
    """Writes three sequences, in chunks and then token by token; returns their table."""
    unit = config.cache_config.unit_tokens
    rng = torch.Generator().manual_seed(3)
    order = np.random.default_rng(5).permutation(UNITS)
    table, taken = np.full((len(LENGTHS), -(-max(LENGTHS) // unit)), -1, np.int32), 0
    for b, length in enumerate(LENGTHS):
        needed = -(-length // unit)
        table[b, :needed] = order[taken : taken + needed]
        taken += needed
    for step in range(4):
        slots = []
        for b, length in enumerate(LENGTHS):
            # all but the last three tokens at once
            at = np.arange(length - 3) if step == 0 else np.array([length - 4 + step])
            slots.append(table[b, at // unit].astype(np.int64) * unit + at % unit)
        plan = np.concatenate(slots)
        for layer in range(LAYERS):
            k, v = (torch.randn((len(plan), KV_HEADS, HEAD_DIM), generator=rng) for _ in range(2))
            for cache in both:
                eps.write_kv(cache, layer, k.to(cache.k[0].dtype), v.to(cache.k[0].dtype), plan)
    return table, rng


@pytest.mark.parametrize(("layout", "settings", "kernels", "dtype"), CASES)
def test_strided_pools_equal_contiguous_ones(layout: Layout, settings: dict, kernels: str, dtype: str) -> None:
    config = EpsConfig.of(budget=0.2, num_sink_tokens=4, num_recent_tokens=8, **settings)
    both = caches(config, layout, kernels, dtype)
    table, rng = fill(config, both)
    plan = StepPlan.of(config, table, np.array(LENGTHS))
    ours, theirs = both
    for layer in range(LAYERS):
        for b, length in enumerate(LENGTHS):
            for mine, other in zip(*(eps.read_kv(one, layer, table[b], length) for one in both), strict=True):
                assert torch.isfinite(other).all() and torch.equal(mine, other)
        for one, other in parts(both):
            for name in one.summaries[layer]:
                assert torch.equal(one.summaries[layer][name], other.summaries[layer][name]), name
        q = torch.randn((len(LENGTHS), HEADS, HEAD_DIM), generator=rng)
        for dense in (True, False):
            found = []
            for cache in both:
                chosen = None
                if not dense:
                    scores = eps.score(cache, layer, q, plan)
                    chosen = eps.select(scores, plan, layer)
                state = eps.attend(cache, layer, q, plan, chosen)
                found.append((*state, *(() if chosen is None else (chosen.counts, chosen.groups))))
            for mine, other in zip(*found, strict=True):
                assert torch.isfinite(other).all() and torch.equal(mine, other)
    assert ours.bytes_k_reread == theirs.bytes_k_reread


@pytest.mark.parametrize("layout", LAYOUTS)
def test_units_are_copied_and_nothing_else_is_touched(layout: Layout) -> None:
    config = EpsConfig.of(method="rq")
    both = caches(config, layout, "arrays", "float32")
    table, _ = fill(config, both)
    free = [unit for unit in range(UNITS) if unit not in table]
    for cache in both:
        eps.copy_units(cache, [int(table[0, 1])], free[:1])
    for layer in range(LAYERS):
        for mine, other in zip(both[0].k + both[0].v, both[1].k + both[1].v, strict=True):
            written = ~torch.isnan(other)
            assert torch.equal(mine[written], other[written])
            assert (mine[~written] == 0).all(), "a slot that was never written holds something"
        gaps = both[1].k[layer]
        whole = torch.as_strided(gaps, (gaps.untyped_storage().nbytes() // 4,), (1,), 0)
        if layout is pages:
            assert torch.isnan(whole.view(UNITS, -1)[:, -24:]).all(), "the engine's own bytes were written to"


def test_pools_that_do_not_fit_are_refused() -> None:
    config = EpsConfig.of(method="rq")
    spec = CacheSpec(1, KV_HEADS, HEAD_DIM, UNITS)
    unit = config.cache_config.unit_tokens
    k, v = interleaved_hnd(UNITS, unit, torch.float32)
    good, turned = [(k, v)], k.mT.contiguous().mT
    for pools, message in (
        (good * 2, "2 layers for a cache of 1"),
        ([(k[:-1], v[:-1])], "pool k is"),
        ([(k.bfloat16(), v.bfloat16())], "torch.bfloat16"),
        ([(k, v.contiguous())], "lie alike"),
        ([(turned, turned)], "together"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            eps.new_cache(spec, config.cache_config, "cpu", "arrays", pools)
    assert eps.new_cache(spec, config.cache_config, "cpu", "arrays", good).k[0] is k


@pytest.mark.parametrize("at_a_time", [8192, 256], ids=["whole", "in parts"])
def test_what_an_engine_wrote_is_adopted_as_if_eps_had_been_there(
    at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adopt_module, "ADOPTED_TOKENS", at_a_time)
    config = EpsConfig.of(method="rq", bound_bits=8, budget=0.2)
    watched, late = caches(config, pages, "numba", "float32")
    table, rng = fill(config, (watched, late))
    forget(late)
    lengths = np.array(LENGTHS)
    plan = StepPlan.of(config, table, lengths)
    q = torch.randn((len(LENGTHS), HEADS, HEAD_DIM), generator=rng)
    for layer in range(LAYERS):
        unknown = eps.score(late, layer, q, plan)
        inside = torch.from_numpy(plan.inside)[:, None].expand_as(unknown.estimate)
        assert torch.isposinf(unknown.estimate[inside]).all()
        before = late.bytes_k_reread
        assert adopt(late, layer, table, lengths) == sum(LENGTHS)
        assert late.bytes_k_reread - before >= sum(LENGTHS) * KV_HEADS * HEAD_DIM * 4
        assert adopt(late, layer, table, lengths) == 0, "read a second time"
        for one, other in parts((watched, late)):
            assert np.array_equal(one.state[layer].fill, other.state[layer].fill)
            full = torch.from_numpy(one.state[layer].fill == one.cache_config.S).view(UNITS, 1, -1)
            full = full.expand(-1, KV_HEADS, -1)
            for field in one.summaries[layer]:
                assert torch.equal(one.summaries[layer][field][full], other.summaries[layer][field][full]), field
        found = [eps.score(cache, layer, q, StepPlan.of(config, table, lengths)) for cache in (watched, late)]
        for mine, other in zip(*((one.estimate, one.lower, one.upper) for one in found), strict=True):
            assert (mine is None) == (other is None) and (mine is None or torch.equal(mine, other))


def test_a_group_begun_by_others_is_continued() -> None:
    config = EpsConfig.of(method="ball", group_size=2)
    cache = eps.new_cache(CacheSpec(1, KV_HEADS, HEAD_DIM, UNITS), config.cache_config, "cpu", "arrays")
    k = torch.randn((300, KV_HEADS, HEAD_DIM), generator=torch.Generator().manual_seed(1))
    eps.write_kv(cache, 0, k, k, np.arange(300))
    forget(cache)
    slots = np.array([301 - 2, 300])
    with pytest.raises(AssertionError, match="beyond what its group holds"):
        eps.write_kv(cache, 0, k[:1], k[:1], slots[:1])
    mark_written(cache, 0, slots)
    eps.write_kv(cache, 0, k[299:], k[299:], slots[:1])
    assert cache.state[0].fill[299 // 2] == 2 and cache.state[0].valid(np.array([149])).all()
