"""The whole decode step over fixed buffers: it says what the steps of array operations say, asks the host for nothing,
and makes the same operations over the same shapes whatever is kept, so that a CUDA graph can replay it."""

import gc
import itertools
import weakref
from collections import Counter

import numpy as np
import pytest
import tiny_models
import torch
import triton_interpreter
from test_hook_transformers import Reads
from torch.utils._python_dispatch import TorchDispatchMode
from verified_runs import Model, same

import eps_cuda
from eps_core.attention.layer import collect, sparse_attention
from eps_core.backend.cache import invalidate
from eps_core.backend.summaries.table import build_summary
from eps_core.config.eps import EpsConfig
from eps_core.decode.generate import generate
from eps_core.decode.sampling import Sampling
from eps_core.errors import ConfigError
from eps_core.kv_cache.pool import PagePool
from eps_core.kv_cache.step_plan import StepPlan
from eps_cuda import graph
from eps_cuda.kernels import dispatch, thresholds
from eps_cuda.kernels import select as select_kernels
from eps_cuda.kernels.attend import attend_groups
from eps_cuda.ops import OPS

DEVICE = triton_interpreter.DEVICE
PROMPTS = [[7, 5, 3, 2, 9, 30, 41] * 60, [11, 4, 9, 77] * 79 + [5]]  # 420 and 317 tokens: a unit ends at 320
STEPS = 5
CONFIG = EpsConfig.of(
    method="rq", group_size=2, mean_tokens=32, cascade=(0.25,), rescore=0.0625, block_size=128, budget=0.2,
    num_recent_tokens=16,
)  # fmt: skip
CONFIGS = {
    "units": CONFIG,
    "short units in three parts": CONFIG.replace(cascade=(0.5, 0.2)),
    "query heads summed": EpsConfig.of(method="rq", budget=0.2, num_recent_tokens=16, combine="sum"),
    "the largest of query heads": EpsConfig.of(method="rq", budget=0.2, num_recent_tokens=16, combine="max"),
}
WAITS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::item", "aten::equal"}


class Recording(TorchDispatchMode):
    """Names and output shapes of everything that Torch computes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        leaves = out if isinstance(out, tuple | list) else [out]
        shapes = tuple(tuple(x.shape) if isinstance(x, torch.Tensor) else None for x in leaves)
        self.calls.append((func._schema.name, shapes))
        return out


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_models.save_model("llama2-bf16-sharded", tmp_path_factory.mktemp("step"))


def decode(model, kernels, config=CONFIG, prompts=PROMPTS, steps=STEPS, units=60, **more):
    """(records with logits, cache, decoder) of a greedy decode."""
    one = Model(eps_cuda, DEVICE, model, units=units, kernels=kernels)
    run = one.decode(prompts, config, tokens=steps, prefill_chunk=200, **more)
    return run.records, run.cache, one.decoder


@pytest.fixture(scope="module")
def reference(model):
    return decode(model, "arrays")[0]


def same_groups(cache, plain) -> None:
    """The host's state of both is alike, and the device's of the first is what its host says."""
    for layer, state in enumerate(cache.state):
        assert (state.fill == plain.state[layer].fill).all()
        valid = state.valid(np.arange(len(state.fill)))
        assert (cache.valid[layer].cpu().numpy().astype(bool) == valid).all()


@pytest.mark.parametrize("name", CONFIGS)
def test_says_what_array_operations_say(model, reference, name) -> None:
    records, cache, _ = decode(model, "triton", CONFIGS[name])
    (step,) = cache.steps.values()
    assert step.outputs is not None or DEVICE == "cpu"
    same(records, reference if CONFIGS[name] == CONFIG else decode(model, "arrays", CONFIGS[name])[0], 2e-4)


def test_steps_that_are_timed_take_the_other_way_and_agree(model, reference) -> None:
    records, cache, _ = decode(model, "triton", time_every=2)
    assert len(cache.steps) == 1
    same(records, reference, 2e-4)
    assert [r.eps_prepass_ms is not None for r in records] == [True, False, True, False, True]


def test_dense_steps_are_static_too(model) -> None:
    """What a sparse step is compared with is launched the same way: without EPS, and in a cache of EPS."""
    records, cache, _ = decode(model, "triton", EpsConfig.of(method="off"))
    assert [key[3] for key in cache.steps] == [None]
    plain, _, _ = decode(model, "arrays", EpsConfig.of(method="off"))
    same(records, plain, 2e-4)
    # one step of the same cache, sparse and dense
    _, cache, decoder = decode(model, "triton", steps=1)
    _, twin, reference = decode(model, "arrays", steps=1)
    for sparse in (True, False, True):
        arguments = (np.array([5]), np.array([399]), np.arange(8, dtype=np.int32)[None], np.array([400]))
        got, want = (
            one.step(kept, *arguments, CONFIG.selection_config if sparse else None)[1]
            for one, kept in ((decoder, cache), (reference, twin))
        )
        assert np.abs(got.logits - want.logits).max() < 2e-4
        assert len(got.layers) == len(want.layers) == (cache.spec.num_layers if sparse else 0)
        assert got.kv_bytes_read == want.kv_bytes_read > 0
    assert sorted((key[1], key[3] is not None) for key in cache.steps) == [(1, False), (1, True), (2, True)]


def drafts(kernels, model, number, config=CONFIG):
    """(outputs of `number` draft steps after one that is kept, cache, decoder): the last ones in a fresh unit."""
    _, cache, decoder = decode(model, kernels, config, [PROMPTS[0][:380]], 1)
    table, outputs = np.arange(8, dtype=np.int32)[None], []
    for depth in range(number):
        length = 381 + depth
        cache, output = decoder.step(
            cache, np.array([5 + depth]), np.array([length - 1]), table[:, : -(-length // 64)], np.array([length]),
            config.selection_config, draft=True,
        )  # fmt: skip
        outputs.append(output)
    return outputs, cache, decoder


@pytest.mark.parametrize("name", ["units", "query heads summed"])
def test_drafts_are_static_steps_that_leave_no_summary(model, name) -> None:
    got, cache, _ = drafts("triton", model, 6, CONFIGS[name])
    want, plain, _ = drafts("arrays", model, 6, CONFIGS[name])
    assert [key[4] for key in cache.steps] == [False, True]
    for one, other in zip(got, want, strict=True):
        assert np.abs(one.logits - other.logits).max() < 2e-4
        assert len(one.selections) == len(other.selections) == cache.spec.num_layers
        for a, b, x, y in zip(one.selections, other.selections, one.layers, other.layers, strict=True):
            selected = eps_cuda.visits(
                cache, [(a, 0)], len(b.selected_mask[0, 0]) if b.selected_mask is not None else 0
            )
            assert torch.equal(selected, eps_cuda.visits(plain, [(b, 0)], selected.shape[-1]))
            np.testing.assert_array_equal(x.counts, y.counts)
            np.testing.assert_array_equal(x.always_selected, y.always_selected)
            assert x.kv_bytes_read == y.kv_bytes_read and x.summary_bytes_read == y.summary_bytes_read
    assert [one.kv_bytes_read for one in got] == [one.kv_bytes_read for one in want]
    assert cache.bytes_k_reread == plain.bytes_k_reread
    for layer in range(cache.spec.num_layers):
        assert torch.allclose(cache.k[layer], plain.k[layer], atol=1e-5)
    same_groups(cache, plain)
    # what could not be taken back is not there: NaN in a draft's K is nobody's error
    with torch.inference_mode():
        (draft,) = (step for key, step in cache.steps.items() if key[4])
        dispatch.write(
            cache, 0, *(torch.full((1, cache.spec.num_kv_heads, cache.spec.head_dim), np.nan, device=DEVICE),) * 2,
            draft.buffers.slots, draft.finite,
        )  # fmt: skip
    assert torch.isnan(cache.k[0]).any() and not draft.finite
    eps_cuda.check_finite(cache)


def test_drafts_that_no_guard_covers_take_the_other_way(model) -> None:
    _, cache, _ = drafts("triton", model, 20)  # num_recent_tokens covers 16
    assert len(cache.steps) == 2
    _, plain, _ = drafts("arrays", model, 20)
    assert all((a.fill == b.fill).all() for a, b in zip(cache.state, plain.state, strict=True))


def test_cache_is_left_as_array_operations_leave_it(model) -> None:
    plain, static = (decode(model, kernels)[1] for kernels in ("arrays", "triton"))
    same_groups(static, plain)
    for layer in range(plain.spec.num_layers):
        assert torch.allclose(plain.k[layer], static.k[layer], atol=1e-5)
        # what steps finalized is what their keys make, bit for bit
        shape = (-1, static.cache_config.span_tokens)
        keys = static.k[layer].unflatten(2, shape).transpose(1, 2).float()
        made = build_summary(OPS, static.cache_config, static.constants(layer), keys)
        finalized = static.state[layer].valid(np.arange(len(static.state[layer].fill)))
        for field in ("codes", "second", "mean", "rest"):
            if field in made:
                stored = static.summaries[layer][field].transpose(1, 2).flatten(0, 1)[finalized]
                assert torch.equal(stored, made[field].flatten(0, 1)[finalized]), field
    assert 0 < finalized.sum() < len(finalized)


@pytest.mark.parametrize(
    ("config", "prompts"),
    [
        (EpsConfig.of(method="rq", policy="threshold", top_pages=40), PROMPTS),
        (EpsConfig.of(method="rq", bound_bits=8, budget=0.05), PROMPTS),
        (EpsConfig.of(method="box", group_size=16), PROMPTS),
        (EpsConfig.of(method="rq", min_context=330, budget=0.05), PROMPTS),
        (CONFIG.replace(cascade=(), rq_bounds=True), PROMPTS),
    ],
    ids=["threshold", "bounds", "box", "below min_context", "bounds of its own"],
)
def test_what_it_does_not_cover_takes_the_other_way(model, config, prompts) -> None:
    records, cache, _ = decode(model, "triton", config, prompts, 2)
    assert cache.steps == {}
    same(records, decode(model, "arrays", config, prompts, 2)[0], 2e-4)


def filled_step(model, config=CONFIG):
    """(its computation, the step, its cache) as the last step of a decode left them."""
    _, cache, decoder = decode(model, "triton", config, steps=2)
    (step,) = cache.steps.values()
    return lambda: step.compute(decoder.model, cache), step, cache


def stand_in(monkeypatch) -> Counter:
    """Counts launches of kernels, which do nothing from now on."""
    launched, kernel = Counter(), type(select_kernels._list)
    monkeypatch.setattr(kernel, "__getitem__", lambda self, grid: lambda *args, **named: launched.update([self.fn]))
    return launched


@pytest.mark.parametrize(
    ("settings", "launches", "of_torch"),
    [({"cascade": (), "rescore": 1.0}, 5, []), ({}, 13, ["zero_"]), ({"method": "off"}, 3, ["to"])],
)
def test_a_layer_takes_so_many_launches(model, monkeypatch, settings, launches, of_torch) -> None:
    """A step's start (its token, its rounded query), scores, two of the choice and attention. In stages each further
    choice takes three, clears its counters, and has what is read by it. Dense: a token, which is converted where its
    type is another, and two of attention."""
    config = EpsConfig.of(**{"method": "rq", "budget": 0.2, "budget_floor": 0, **settings})
    sparse = config.cache_config.enabled
    _, cache, decoder = decode(model, "triton", config, steps=2)
    (step,) = cache.steps.values()
    launched = stand_in(monkeypatch)
    q = torch.ones((2, 2 * cache.spec.num_kv_heads, cache.spec.head_dim), device=DEVICE)
    k = q[:, : cache.spec.num_kv_heads].contiguous()
    with Recording() as seen, torch.no_grad():
        if sparse:
            graph.attend_static(config, cache, 0, q, k, k, step.buffers, step.depth, step.width)
        else:
            dispatch.write(cache, 0, k, k, step.buffers.slots)
            attend_groups(q, *cache.plain(0), step.buffers.table, step.buffers.lengths, None, None, group_size=1)
    assert launched.total() == launches
    allocate_or_view = "empty new_empty empty_like view detach unbind alias select"
    computed = {name.removeprefix("aten::") for name, _ in seen.calls}
    assert sorted(computed - set(allocate_or_view.split())) == of_torch
    step.compute(decoder.model, cache)
    assert launched.total() == launches * (1 + cache.spec.num_layers)


@pytest.mark.parametrize(("name", "launches"), [("query heads summed", 13), ("at once", 5)])
def test_a_layer_alone_is_its_parts(model, monkeypatch, name, launches) -> None:
    """As engines call it: what it attends to is what the parts select, and listed where that shall last."""
    config = CONFIGS["query heads summed"].replace(**({} if launches == 13 else {"cascade": (), "rescore": 1.0}))
    _, cache, decoder = decode(model, "triton", config, steps=2)
    (step,) = cache.steps.values()
    plan = StepPlan.of(config, step.places["table"].copy(), step.places["lengths"].astype(np.int64))
    q = torch.randn((2, decoder.spec.num_heads, cache.spec.head_dim), device=DEVICE)
    # more groups of the second layer are without a summary; counters come as they are
    invalidate(OPS, cache, 1, step.places["table"][:, 1].astype(np.int64) * 64)
    make = thresholds.new_counters
    with monkeypatch.context() as patched:
        patched.setattr(thresholds, "new_counters", lambda *shape: make(*shape).fill_(7))
        found = [sparse_attention(eps_cuda, cache, layer, q, plan) for layer in range(2)]
    for layer, (out, read) in enumerate(found):
        scores = eps_cuda.score(cache, layer, q, plan)
        selection = eps_cuda.select(scores, plan, layer)
        for field in ("groups", "counts", "selected_mask"):
            assert torch.equal(getattr(read.selection, field), getattr(selection, field)), field
        for field in ("common_counts", "always_selected"):
            np.testing.assert_array_equal(getattr(read.selection, field), getattr(selection, field))
        for got, want in zip((out, read.lse), eps_cuda.attend(cache, layer, q, plan, selection), strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
        (stats,), _ = collect(eps_cuda, cache, [read])
        np.testing.assert_allclose(stats.skipped_mass, eps_cuda.skipped_mass(scores, selection), atol=1e-5)
        assert stats.kv_bytes_read == plan.kv_bytes(cache.spec, int(selection.counts.sum()))
    assert (found[0][1].stats.counts < found[1][1].stats.counts).all()
    # a clock wants to know when each part began, which the whole does not say
    clock = itertools.count().__next__
    assert sparse_attention(eps_cuda, cache, 0, q, plan, clock=lambda *known: clock())[1].stats.prepass_ms == 1000
    launched = stand_in(monkeypatch)
    sparse_attention(eps_cuda, cache, 0, q, plan, passing=True)
    assert launched.total() == launches


@pytest.mark.parametrize("name", ["units", "query heads summed"])
def test_asks_the_host_for_nothing_and_makes_the_same_operations_whatever_is_kept(model, name) -> None:
    compute, step, _ = filled_step(model, CONFIGS[name])
    seen, places = [], [x.data_ptr() for x in vars(step.buffers).values()]
    parts = len(step.buffers.cascaded)
    for lengths, wanted, cascaded, rescored in (
        ([420, 317], [40, 20], [30, 40], [20, 11]), ([299, 320], [9, 150], [2, 90], [1, 2])
    ):  # fmt: skip
        step.fill(
            lengths=np.array(lengths, np.int32), wanted=np.array(wanted, np.int32),
            cascaded=np.array([cascaded] * parts, np.int32), rescored=np.array(rescored, np.int32),
        )  # fmt: skip
        with torch.inference_mode():
            step.inputs.copy_(step.on_host)
        with Recording() as recording:
            compute()
        seen.append(recording.calls)
    assert seen[0] == seen[1]
    assert places == [x.data_ptr() for x in vars(step.buffers).values()]
    names = {name for name, _ in recording.calls}
    assert {"aten::linear", "aten::mm", "aten::addmm"} & names, names  # the recording sees what Torch does
    assert not names & WAITS


def test_a_second_run_changes_nothing(model) -> None:
    """A capture's warm-up runs the step several times."""
    compute, _, cache = filled_step(model)
    with torch.inference_mode():
        first = compute()
        results, k = first.results.clone(), [x.clone() for x in cache.k]
        codes = [x["codes"].clone() for x in cache.summaries]
        again = compute()
    assert torch.equal(results, again.results)
    assert all(torch.equal(a, b) for a, b in zip(k, cache.k, strict=True))
    assert all(torch.equal(a, b["codes"]) for a, b in zip(codes, cache.summaries, strict=True))


def test_uploads_of_a_step_that_is_not_captured_do_not_block(model, monkeypatch) -> None:
    _, cache, decoder = decode(model, "triton", steps=1)
    monkeypatch.setattr(graph, "covers", lambda *arguments: False)
    launched = []
    # the interpreter would read what kernels are given
    monkeypatch.setattr(
        type(select_kernels._list), "__getitem__", lambda self, grid: lambda *args, **named: launched.append(self)
    )
    with Reads() as read:
        made = torch.from_numpy
        monkeypatch.setattr(torch, "from_numpy", lambda array: read.on_host.append(made(array)) or read.on_host[-1])
        decoder.step(
            cache, np.array([5]), np.array([399]), np.arange(8, dtype=np.int32)[None], np.array([400]),
            CONFIG.selection_config,
        )  # fmt: skip
    assert launched and len(read.on_host) > 5 and "to" not in read.seen


def test_few_steps_are_kept(model, monkeypatch) -> None:
    monkeypatch.setattr(graph, "BUCKET_TOKENS", CONFIG.cache_config.unit_tokens)
    monkeypatch.setattr(graph, "MAX_GRAPHS", 1)
    # a sequence that is longer than its share of the pool: from 382 tokens on the table grows by a unit in three steps
    prompts = [PROMPTS[0][:382], PROMPTS[0][:10]]
    records, cache, _ = decode(model, "triton", prompts=prompts, steps=4, units=7)
    assert [key[2] for key in cache.steps] == [4]
    same(records, decode(model, "arrays", prompts=prompts, steps=4)[0], 2e-4)


def test_one_step_serves_a_generation_that_the_pool_is_made_for(model, monkeypatch) -> None:
    monkeypatch.setattr(graph, "BUCKET_TOKENS", CONFIG.cache_config.unit_tokens)
    records, cache, _ = decode(model, "triton", prompts=[PROMPTS[0][:382]], steps=4, units=5)
    assert [key[2] for key in cache.steps] == [5]
    same(records, decode(model, "arrays", prompts=[PROMPTS[0][:382]], steps=4)[0], 2e-4)


def addresses(cache) -> list[int]:
    """Everything that a captured graph holds by address."""
    arrays = [*cache.k, *cache.v, *cache.finite, *cache.valid]
    arrays += [array for fields in cache.summaries for array in fields.values()]
    return [array.data_ptr() for array in arrays]


@pytest.mark.parametrize("name", ["units", "short units in three parts"])
def test_what_a_graph_holds_stays_where_it_is(model, name) -> None:
    """Through the prefill of a second prompt, a copied unit and a failed check."""
    _, cache, decoder = decode(model, "triton", CONFIGS[name], steps=2)
    before = addresses(cache)
    pool = PagePool(60, CONFIG.cache_config.unit_tokens)
    list(
        generate(
            decoder, cache, pool, [[8, 9, 10] * 90], 2, Sampling(), CONFIGS[name].selection_config, prefill_chunk=100
        )
    )
    eps_cuda.copy_units(cache, [1], [59])
    with torch.inference_mode():
        cache.finite[1].fill_(False)
    with pytest.raises(ConfigError, match="NaN or Inf in K of layer 1"):
        eps_cuda.check_finite(cache)
    eps_cuda.check_finite(cache)
    assert addresses(cache) == before


@pytest.mark.parametrize("config", [CONFIG, EpsConfig()], ids=["sparse", "dense"])
def test_a_step_tells_of_nan_in_k(model, config) -> None:
    _, cache, decoder = decode(model, "triton", config, steps=2)
    pool = PagePool(60, config.cache_config.unit_tokens)
    chosen = config.selection_config if config.cache_config.enabled else None
    steps = generate(decoder, cache, pool, [[8, 9, 10] * 90], 4, Sampling(), chosen, prefill_chunk=300)
    next(steps)
    next(steps)
    assert cache.steps
    with torch.inference_mode():
        cache.finite[1].fill_(False)
    with pytest.raises(ConfigError, match="NaN or Inf in K of layer 1"):
        next(steps)


def test_a_cache_is_freed_with_its_last_reference(model) -> None:
    _, cache, decoder = decode(model, "triton", steps=1)
    assert cache.steps
    gone = [weakref.ref(cache.k[0]), weakref.ref(decoder)]
    gc.collect()
    gc.disable()
    try:
        del cache, decoder
        assert [one() for one in gone] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("budget", [319.0, 120.0])
def test_budgets_in_tokens_beside_a_sequence_that_they_cover(model, budget) -> None:
    config = EpsConfig.of(method="rq", group_size=16, budget=budget, num_recent_tokens=16)
    prompts = [PROMPTS[0][:312], PROMPTS[0][:391]]
    records, cache, _ = decode(model, "triton", config, prompts, 3)
    assert cache.steps
    same(records, decode(model, "arrays", config, prompts, 3)[0], 2e-4)
