"""A whole decode step on a CPU in one call of Torch's threads: bit for bit what layer by layer gives, of whatever it
serves, and nothing done where it does not."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from verified_runs import Model, same

import eps_cuda
from eps_core.backend.pages import arrays_of
from eps_core.config.cache import CacheSpec
from eps_core.config.eps import EpsConfig
from eps_core.config.speculative import SpeculativeConfig
from eps_core.cpu import openmp, write
from eps_core.cpu import threads as threads_cpu
from eps_core.decode.generate import generate
from eps_core.decode.sampling import Sampling
from eps_core.decode.session import Session
from eps_core.errors import ConfigError
from eps_cuda.kernels import cpu

PROMPTS = [[7, 5, 3, 2, 9, 30, 41] * 60, [11, 4, 9, 77] * 79 + [5]]  # 420 and 317 tokens: a mean's 64 end at 320
STEPS = 8
RQ = EpsConfig.of(method="rq", budget=0.2, budget_floor=1, num_recent_tokens=16)
CONFIGS = {
    "the default's codes": RQ,
    "groups of two, the largest of query heads": EpsConfig.of(
        method="rq", group_size=2, mean_tokens=32, cascade=(0.25,), rescore=0.0625, combine="max", budget=0.2,
        budget_floor=1, num_recent_tokens=16,
    ),
    "a dense layer": RQ.replace(head_modes=(("dense",) * 2, ("sparse",) * 2)),
    "within the budget": RQ.replace(budget_floor=1024),
    "off": EpsConfig.of(method="off"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def steps_made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the list of whole steps so far: the number of calls of each."""
    made: list[int] = []
    real = openmp.Team.run_all

    def run_all(self: openmp.Team, given: openmp.Calls) -> None:
        if len(given._held) > 1:  # one is a layer's own, asked for layer by layer
            made.append(len(given._held))
        real(self, given)

    monkeypatch.setattr(openmp.Team, "run_all", run_all)
    # a busy machine must not bring helpers
    monkeypatch.setattr(openmp, "LATE_NS", 10**12)
    monkeypatch.setattr(cpu.kernels.team, "patience", openmp.Patience())
    return made


@pytest.fixture(scope="module", params=["llama2", "qwen2-tied"])
def model(request: pytest.FixtureRequest) -> Any:
    return tiny_models.saved(request.param)


def opened(path: Any, dtype: str, kv_bits: tuple = (16, 16)) -> Model:
    return Model(eps_cuda, "cpu", path, dtype, 60, dtype, kv_bits, "numba")


def decoded(
    path: Any, config: EpsConfig, dtype: str, prompts: list = PROMPTS, kv_bits: tuple = (16, 16), **settings: Any
) -> tuple[list[Any], Any]:
    """Records with logits of a greedy decode, and its cache."""
    run = opened(path, dtype, kv_bits).decode(prompts, config, tokens=STEPS, prefill_chunk=200, **settings)
    return run.records, run.cache


def twice(run: Callable[[], Any]) -> tuple[Any, Any]:
    """Return what `run` gives by whole steps, and what it gives layer by layer."""
    got = run()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("eps_cuda.model.Model.whole_step", lambda self, *step: None)
        return got, run()


def same_caches(one: Any, other: Any) -> None:
    for layer in range(one.spec.num_layers):
        pools = (one.k[layer], other.k[layer]), (one.v[layer], other.v[layer])
        pairs = [pair for both in pools for pair in zip(*map(arrays_of, both), strict=True)]
        if one.cache_config.enabled:
            state, its = one.state[layer], other.state[layer]
            assert (state.fill == its.fill).all() and state.history == its.history
            pairs += [(pool, other.summaries[layer][name]) for name, pool in one.summaries[layer].items()]
        assert all(torch.equal(mine, twin) for mine, twin in pairs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_bits_are_those_of_layer_by_layer(model: Any, name: str, dtype: str, steps_made: list[int]) -> None:
    """Two sequences of unlike length, one of which ends a mean's tokens on the way: that step is layer by layer."""
    (records, cache), (plain, twin) = twice(lambda: decoded(model, CONFIGS[name], dtype))
    ends = 0 if name == "off" else sum((len(prompt) + STEPS) // 64 - len(prompt) // 64 for prompt in PROMPTS)
    assert len(steps_made) >= STEPS - 1 - ends > 0
    assert set(steps_made) == {4 * cache.spec.num_layers + 1}
    same(records, plain)
    same_caches(cache, twin)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv_bits", [(8, 4), (16, 8), (4, 16)])
@pytest.mark.parametrize("name", ["the default's codes", "off"])
def test_bits_are_those_of_layer_by_layer_over_k_and_v_in_few_bits(
    name: str, kv_bits: tuple[int, int], dtype: str, steps_made: list[int]
) -> None:
    path = tiny_models.saved("llama2")
    (records, cache), (plain, twin) = twice(lambda: decoded(path, CONFIGS[name], dtype, kv_bits=kv_bits))
    assert len(steps_made) >= STEPS - 2
    same(records, plain)
    same_caches(cache, twin)


def test_the_number_of_prompts_may_change(steps_made: list[int]) -> None:
    """One cache, of one sequence, two and one again: what was kept of another number serves no other."""
    path = tiny_models.saved("llama2")

    def run() -> list[Any]:
        one = opened(path, "bfloat16")
        cache, pool = one.cache(RQ)
        found: list[Any] = []
        for prompts in (PROMPTS[:1], PROMPTS, PROMPTS[1:], PROMPTS[:1]):
            found += generate(
                one.decoder, cache, pool, prompts, STEPS, Sampling(), RQ.selection_config, keep_logits=True,
            )  # fmt: skip
        return found

    same(*twice(run))
    assert len(steps_made) > 3 * STEPS


def steps_of(
    path: Any, drafts: bool, config: EpsConfig = RQ, lengths: range = range(401, 407), batch: int = 1,
    between: Callable[[int, Any, Any], Any] = lambda length, cache, decoder: cache,
    kv_bits: tuple[int, int] = (16, 16),
) -> Iterator[tuple[Any, Any]]:  # fmt: skip
    """(cache, output) of a step at each of `lengths`, drafts or not, over tables of one width: of sequences in units of
    their own, each with a prompt. `between` is called before a step and returns the cache that it takes."""
    model = opened(path, "bfloat16", kv_bits)
    decoder, (cache, _) = model.decoder, model.cache(config)
    units = np.arange(8 * batch, dtype=np.int32).reshape(batch, 8)
    for own in units:
        tokens = np.array(PROMPTS[0])[: lengths[0] - 1] + own[0]
        slots = own[0] * 64 + np.arange(len(tokens))
        cache, _ = decoder.prefill(cache, tokens, slots, own, len(tokens))
    for length in lengths:
        cache = between(length, cache, decoder)
        cache, output = decoder.step(
            cache, np.full(batch, length % 290) + np.arange(batch), units[:, 0] * 64 + length - 1, units,
            np.full(batch, length), config.selection_config, draft=drafts,
        )  # fmt: skip
        yield cache, output


def both(steps_made: list[int], *asked: Any, **about: Any) -> tuple[list[Any], list[Any]]:
    """`steps_of`, as whole steps, every one of them, and layer by layer."""
    steps_made.clear()
    got, want = twice(lambda: list(steps_of(tiny_models.saved("llama2"), *asked, **about)))
    assert len(steps_made) == len(got)
    same_caches(got[-1][0], want[-1][0])
    assert all(np.array_equal(one.logits, other.logits) for (_, one), (_, other) in zip(got, want, strict=True))
    return [output for _, output in got], [output for _, output in want]


def same_statistics(outputs: list[Any], plain: list[Any]) -> None:
    for one, other in zip(outputs, plain, strict=True):
        assert one.kv_bytes_read == other.kv_bytes_read and one.fallbacks == other.fallbacks
        for mine, its in zip(one.layers, other.layers, strict=True):
            assert {key: np.asarray(value).tolist() for key, value in vars(mine).items()} == {
                key: np.asarray(value).tolist() for key, value in vars(its).items()
            }


@pytest.mark.parametrize(("batch", "kv_bits"), [(1, (16, 16)), (2, (16, 16)), (1, (8, 4))])
def test_drafts_place_rows_and_say_what_was_selected(
    batch: int, kv_bits: tuple[int, int], steps_made: list[int]
) -> None:
    got, want = both(steps_made, True, batch=batch, kv_bits=kv_bits)
    for one, other in zip(got, want, strict=True):  # of steps that are long over
        for mine, its in zip(one.selections, other.selections, strict=True):
            assert np.array_equal(mine.common_counts, its.common_counts)
            assert np.array_equal(mine.always_selected, its.always_selected)
            for name in ("groups", "counts", "selected_mask"):
                assert torch.equal(getattr(mine, name), getattr(its, name)), name


def test_a_draft_that_reads_all_says_so_of_each_layer(steps_made: list[int]) -> None:
    got, want = both(steps_made, True, RQ.replace(budget_floor=1024))
    assert [one.selections for one in got] == [one.selections for one in want] == [[None, None]] * len(got)


@pytest.mark.parametrize("kv_bits", [(16, 16), (8, 4)])
def test_statistics_are_each_step_s_own(kv_bits: tuple[int, int], steps_made: list[int]) -> None:
    same_statistics(*both(steps_made, False, kv_bits=kv_bits))


def test_layers_become_sparse_one_by_one(steps_made: list[int]) -> None:
    """At a length within the table's width, beside a layer that stays dense."""
    modes = (("dense", "dense"), ("sparse", "sparse"))
    got, want = both(steps_made, False, RQ.replace(head_modes=modes, budget_floor=403))
    same_statistics(got, want)
    assert [[one.summary_bytes_read > 0 for one in output.layers] for output in got] == [
        [False, length > 403] for length in range(401, 407)
    ]


def test_a_cache_that_grows_and_one_that_is_copied_are_followed(steps_made: list[int]) -> None:
    def between(length: int, cache: Any, decoder: Any) -> Any:
        if length == 403:
            cache = eps_cuda.grow(cache, 80)
        if length == 405:  # the same tokens, brought back from elsewhere
            cache = eps_cuda.copy_units(cache, range(8), range(60, 68))
            with torch.inference_mode():
                for pool in (*cache.k, *cache.v):
                    pool[:8] = 0
            cache = eps_cuda.copy_units(cache, range(60, 68), range(8))
        return cache

    same_statistics(*both(steps_made, False, between=between))


def test_another_thread_goes_on(steps_made: list[int]) -> None:
    def run() -> list[np.ndarray]:
        steps, found = steps_of(tiny_models.saved("llama2"), False), []
        for _ in range(3):
            threads = [threading.Thread(target=lambda: found.append(next(steps)[1].logits)) for _ in range(2)]
            for thread in threads:
                thread.start()
                thread.join()
        return found

    got, want = twice(run)
    assert len(steps_made) == len(got) == 6
    assert all(np.array_equal(one, other) for one, other in zip(got, want, strict=True))


@pytest.mark.parametrize("weights", ["full", "8bit"])
def test_verified_texts_and_drafts_are_the_same(weights: str, steps_made: list[int]) -> None:
    """With a drafter whose weights have 8 bits, too."""

    def run() -> list[Any]:
        session = Session.open(
            tiny_models.saved("qwen2-tied"), "cuda", "cpu", "float32", config=RQ,
            verify=SpeculativeConfig("tokens", draft=4, weights=weights),
        )  # fmt: skip
        return [(one.tokens, one.drafted, one.accepted) for one in session.steps([PROMPTS[0]], 24, Sampling())]

    got, want = twice(run)
    assert len(steps_made) > 10 and got == want


def test_what_a_step_does_not_support_runs_layer_by_layer(steps_made: list[int]) -> None:
    path = tiny_models.saved("llama2")
    for config in (
        EpsConfig.of(method="box", budget=0.2, budget_floor=1),
        EpsConfig.of(method="rq", bound_bits=4, budget=0.2, budget_floor=1),
        EpsConfig.of(method="rq", budget=0.2, budget_floor=1, scope="union"),
    ):  # fmt: skip
        decoded(path, config, "float32", PROMPTS[:1])
        assert not steps_made, config
    for kv_bits in ((8, "fp8"), ("fp8", 4)):
        decoded(path, CONFIGS["off"], "float32", PROMPTS[:1], kv_bits)
        assert not steps_made, kv_bits
    decoded(path, RQ, "float16", PROMPTS[:1])
    decoded(tiny_models.saved("gemma3-256-scaled-capped"), RQ, "float32", [PROMPTS[0][:100]])
    assert not steps_made, "16-bit floats and windows"


def test_whole_steps_tell_the_time_of_their_layers(steps_made: list[int]) -> None:
    """Sparse layers have times in each step that asks for them, as every step of `run` does."""
    records, _ = decoded(tiny_models.saved("llama2"), RQ, "float32", PROMPTS[:1], time_every=2)
    assert len(steps_made) >= STEPS - 1
    assert [one.eps_prepass_ms is not None for one in records] == [True, False] * (STEPS // 2)
    assert all(0 < one.eps_prepass_ms < one.decode_ms for one in records[::2])
    steps_made.clear()
    decoded(tiny_models.saved("llama2"), RQ, "float32", PROMPTS[:1], time_every=1)
    assert len(steps_made) >= STEPS - 1


def test_late_members_bring_helpers_to_later_steps(monkeypatch: pytest.MonkeyPatch, steps_made: list[int]) -> None:
    records, _ = decoded(tiny_models.saved("llama2"), RQ, "float32")
    steps_made.clear()
    monkeypatch.setattr(openmp, "LATE_NS", -1)
    again, _ = decoded(tiny_models.saved("llama2"), RQ, "float32")
    assert len(steps_made) < STEPS - 2 and cpu.kernels.team.patience.avoid
    same(again, records)


@pytest.mark.parametrize("kv_bits", [(16, 16), (8, 4)])
def test_keys_that_are_not_finite_are_refused(kv_bits: tuple[int, int], steps_made: list[int]) -> None:
    """As those of the layer that made them, and once; what a draft places is not asked."""
    path = tiny_models.saved("llama2")
    model = opened(path, "float32", kv_bits)
    decoder, (cache, _) = model.decoder, model.cache(RQ)
    units, tokens = np.arange(8, dtype=np.int32)[None], np.array(PROMPTS[0][:400])
    cache, _ = decoder.prefill(cache, tokens, np.arange(400), units[0], 400)
    norm = decoder.model.for_rows("numba", 1)._before[1][0]  # before layer 1's queries and keys
    kept = norm.copy()

    def step(draft: bool) -> Any:
        about = np.array([5]), np.array([400]), units, np.array([401]), RQ.selection_config
        return decoder.step(cache, *about, draft=draft)

    norm[:] = np.nan
    step(True)
    with pytest.raises(ConfigError, match="NaN or Inf in K of layer 1"):
        step(False)
    assert len(steps_made) == 2
    norm[:] = kept
    with torch.inference_mode():
        cache.finite[0] &= False  # as an earlier write that was not checked leaves it
    with pytest.raises(ConfigError, match="NaN or Inf in K of layer 0"):
        step(True) and step(False)


def test_a_cache_of_another_shape_is_refused(steps_made: list[int]) -> None:
    path = tiny_models.saved("llama2")
    model = opened(path, "float32")
    spec, units, places = model.spec, np.arange(8, dtype=np.int32)[None], (np.array([5]), np.array([0]))
    for shape in ((spec.num_kv_heads + 1, spec.head_dim), (spec.num_kv_heads, 2 * spec.head_dim)):
        cache = eps_cuda.new_cache(CacheSpec(spec.num_layers, *shape, 8), RQ.cache_config, "cpu", "numba")
        with pytest.raises(ValueError, match="has shape"):
            model.decoder.step(cache, *places, units, np.array([1]), RQ.selection_config)
    assert not steps_made


def test_a_thread_that_fails_is_raised_and_the_next_step_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is made again over the same cache: a failed call leaves no counter behind."""
    path = tiny_models.saved("llama2")
    plain = [output.logits for _, output in steps_of(path, True)]
    real, fails = openmp._start, []

    def start(parallel: int, number: int, given: np.ndarray, progress: np.ndarray) -> None:
        real(parallel, number, given, progress)
        if len(given) > 1 and fails:
            progress[:, openmp.FAILED] = fails.pop()

    def between(length: int, cache: Any, decoder: Any) -> Any:
        if length == 403:
            fails.append(1)
            with pytest.raises(RuntimeError, match="a thread of a compiled CPU kernel failed"):
                decoder.step(
                    cache, np.array([length % 290]), np.array([length - 1]), np.arange(8, dtype=np.int32)[None],
                    np.array([length]), RQ.selection_config, draft=True,
                )  # fmt: skip
        return cache

    monkeypatch.setattr(openmp, "_start", start)
    again = [output.logits for _, output in steps_of(path, True, between=between)]
    assert not fails and all(np.array_equal(one, other) for one, other in zip(again, plain, strict=True))


def test_rows_are_rounded_as_torch_rounds_them() -> None:
    """Ties to even, what overflows, what is subnormal, infinities and NaN."""
    bits = np.concatenate([
        np.arange(0x3F80_0000, 0x3F83_0000, 0x0000_1000), [0x7F7F_8000, 0x7F7F_7FFF, 0x7F7F_FFFF, 1, 0x8000, 0x8001,
        0x0001_8000, 0x7F80_0000, 0x7F80_0001, 0x7FC0_0000, 0x7FFF_FFFF],
    ]).astype(np.uint32)  # fmt: skip
    rows = np.concatenate([bits, bits | 0x8000_0000]).view(np.float32)[:, None, None]
    pools = [np.zeros(len(rows), np.uint16) for _ in range(2)]
    slots, finite = np.arange(len(rows)), np.ones(1, np.bool_)
    write.place_rows(
        threads_cpu.new_progress(1), *pools, (1, 1, 1), (1, 1, 1), rows, rows[::-1].copy(), slots, 1, finite
    )
    expected = torch.from_numpy(rows.ravel()).to(torch.bfloat16)
    for pool, wanted in zip(pools, (expected, expected.flip(0)), strict=True):
        got = torch.from_numpy(pool).view(torch.bfloat16)
        assert torch.equal(got.isnan(), wanted.isnan())
        assert torch.equal(got[~got.isnan()], wanted[~wanted.isnan()])
    assert not finite[0]
    write.place_rows(threads_cpu.new_progress(1), *pools, (1, 1, 1), (1, 1, 1), rows[:20], rows[:20], slots[:20], 1,
                     finite := np.ones(1, np.bool_))  # fmt: skip
    assert finite[0]
