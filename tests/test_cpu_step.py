"""A whole decode step on a CPU in one call of Torch's threads: bit for bit what layer by layer gives, of whatever it
serves, and nothing done where it does not."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch

import eps_cuda
from eps_core.config.cache import CacheSpec
from eps_core.config.eps import EpsConfig
from eps_core.cpu import openmp
from eps_core.decode.forward import Decoder, load_decoder
from eps_core.decode.generate import generate
from eps_core.decode.sampling import Sampling
from eps_core.errors import ConfigError
from eps_core.kv_cache.pool import PagePool
from eps_core.models.config import read_spec
from eps_core.models.spec import ModelSpec
from eps_cuda.kernels import cpu
from eps_cuda.model import Model

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
    """How many calls each whole step made."""
    made: list[int] = []
    real = openmp.Team.run_all

    def run_all(self: openmp.Team, given: openmp.Calls) -> None:
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


def opened(path: Any, config: EpsConfig, dtype: str) -> tuple[Decoder, Any, PagePool, ModelSpec]:
    spec = read_spec(path)
    decoder = load_decoder(eps_cuda, path, spec, dtype, "cpu")
    units = 60
    shape = CacheSpec(spec.num_layers, spec.num_kv_heads, spec.head_dim, units, dtype=dtype)
    cache = eps_cuda.new_cache(shape, config.cache_config, "cpu", "numba")
    return decoder, cache, PagePool(units, config.cache_config.unit_tokens), spec


def decoded(
    path: Any, config: EpsConfig, dtype: str, prompts: list[list[int]] = PROMPTS, **settings: Any
) -> tuple[list[Any], Any]:
    """Records with logits of a greedy decode, and its cache."""
    decoder, cache, pool, _ = opened(path, config, dtype)
    steps = generate(
        decoder, cache, pool, prompts, STEPS, Sampling(), config.selection_config, keep_logits=True, prefill_chunk=200,
        **settings,
    )  # fmt: skip
    return list(steps), cache


def layer_by_layer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Model, "whole_step", lambda self, *step: None)


def same(got: list[Any], want: list[Any]) -> None:
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert one.tokens == other.tokens and np.array_equal(one.logits, other.logits)
        for name in (
            "pages_total", "pages_visited", "pages_skipped", "pages_always_selected", "bytes_kv_read_est",
            "bytes_kv_dense", "bytes_summary_read", "bytes_k_reread", "fallbacks", "skipped_mass_mean",
        ):  # fmt: skip
            assert getattr(one, name) == getattr(other, name), name


def same_caches(one: Any, other: Any) -> None:
    for layer in range(one.spec.num_layers):
        pairs = [(one.k[layer], other.k[layer]), (one.v[layer], other.v[layer])]
        if one.cache_config.enabled:
            state, its = one.state[layer], other.state[layer]
            assert (state.fill == its.fill).all() and state.history == its.history
            pairs += [(pool, other.summaries[layer][name]) for name, pool in one.summaries[layer].items()]
        assert all(torch.equal(mine, twin) for mine, twin in pairs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_bits_are_those_of_layer_by_layer(model: Any, name: str, dtype: str, steps_made: list[int]) -> None:
    """Two sequences of unlike length, one of which ends a mean's tokens on the way: that step is layer by layer."""
    records, cache = decoded(model, CONFIGS[name], dtype)
    ends = 0 if name == "off" else sum((len(prompt) + STEPS) // 64 - len(prompt) // 64 for prompt in PROMPTS)
    assert len(steps_made) >= STEPS - 1 - ends > 0
    assert set(steps_made) == {4 * cache.spec.num_layers + 1}
    with pytest.MonkeyPatch.context() as patch:
        layer_by_layer(patch)
        plain, twin = decoded(model, CONFIGS[name], dtype)
    same(records, plain)
    same_caches(cache, twin)


def test_prompts_of_any_number_come_and_go(steps_made: list[int]) -> None:
    """One cache, of one sequence, two and one again: what was kept of another number serves no other."""
    path = tiny_models.saved("llama2")

    def run() -> list[Any]:
        decoder, cache, pool, _ = opened(path, RQ, "bfloat16")
        found: list[Any] = []
        for prompts in (PROMPTS[:1], PROMPTS, PROMPTS[1:], PROMPTS[:1]):
            found += generate(
                decoder, cache, pool, prompts, STEPS, Sampling(), RQ.selection_config, keep_logits=True,
            )  # fmt: skip
        return found

    records = run()
    assert len(steps_made) > 3 * STEPS
    with pytest.MonkeyPatch.context() as patch:
        layer_by_layer(patch)
        same(records, run())


def steps_of(path: Any, drafts: bool) -> Iterator[tuple[Any, Any]]:
    """(cache, output) of six steps of one sequence after a prompt, drafts or not."""
    decoder, cache, _, _ = opened(path, RQ, "bfloat16")
    units = np.arange(8, dtype=np.int32)[None]
    tokens = np.array(PROMPTS[0][:400])
    cache, _ = decoder.prefill(cache, tokens, np.arange(400), units[0], 400)
    for length in range(401, 407):
        one = np.array([length - 1])
        cache, output = decoder.step(
            cache, np.array([length % 300]), one, units, np.array([length]), RQ.selection_config, draft=drafts
        )
        yield cache, output


def test_drafts_place_rows_and_say_what_was_selected(steps_made: list[int]) -> None:
    path = tiny_models.saved("llama2")
    got = list(steps_of(path, True))
    assert len(steps_made) == len(got) == 6
    with pytest.MonkeyPatch.context() as patch:
        layer_by_layer(patch)
        want = list(steps_of(path, True))
    same_caches(got[-1][0], want[-1][0])
    for (_, one), (_, other) in zip(got, want, strict=True):  # of steps that are long over
        assert np.array_equal(one.logits, other.logits)
        for mine, its in zip(one.selections, other.selections, strict=True):
            assert np.array_equal(mine.common_counts, its.common_counts)
            assert np.array_equal(mine.always_selected, its.always_selected)
            for name in ("groups", "counts", "selected_mask"):
                assert torch.equal(getattr(mine, name), getattr(its, name)), name


def test_statistics_are_each_step_s_own() -> None:
    outputs = [output for _, output in steps_of(tiny_models.saved("llama2"), False)]
    with pytest.MonkeyPatch.context() as patch:
        layer_by_layer(patch)
        plain = [output for _, output in steps_of(tiny_models.saved("llama2"), False)]
    for one, other in zip(outputs, plain, strict=True):
        assert np.array_equal(one.logits, other.logits) and one.kv_bytes_read == other.kv_bytes_read
        for mine, its in zip(one.layers, other.layers, strict=True):
            assert {key: np.asarray(value).tolist() for key, value in vars(mine).items()} == {
                key: np.asarray(value).tolist() for key, value in vars(its).items()
            }


def test_what_a_step_does_not_serve_runs_layer_by_layer(steps_made: list[int]) -> None:
    path = tiny_models.saved("llama2")
    for config in (
        EpsConfig.of(method="box", budget=0.2, budget_floor=1),
        EpsConfig.of(method="rq", bound_bits=4, budget=0.2, budget_floor=1),
        EpsConfig.of(method="rq", correction_tokens=128, budget=0.2, budget_floor=1),
        EpsConfig.of(method="rq", budget=0.2, budget_floor=1, scope="union"),
    ):  # fmt: skip
        decoded(path, config, "float32", PROMPTS[:1])
        assert not steps_made, config
    decoded(path, RQ, "float16", PROMPTS[:1])
    decoded(tiny_models.saved("gemma3-256-scaled-capped"), RQ, "float32", [PROMPTS[0][:100]])
    assert not steps_made, "16-bit floats and windows"
    decoded(path, RQ, "float32", PROMPTS[:1], time_every=1)
    assert not steps_made, "steps that are timed"


def test_a_step_that_is_late_goes_to_helpers(monkeypatch: pytest.MonkeyPatch, steps_made: list[int]) -> None:
    monkeypatch.setattr(type(cpu.kernels.team), "serves", lambda self: False)
    records, _ = decoded(tiny_models.saved("llama2"), RQ, "float32")
    assert not steps_made and len(records) == STEPS


def test_keys_that_are_not_finite_are_refused(steps_made: list[int]) -> None:
    path = tiny_models.saved("llama2")
    decoder, cache, _, _ = opened(path, RQ, "float32")
    units, tokens = np.arange(8, dtype=np.int32)[None], np.array(PROMPTS[0][:400])
    cache, _ = decoder.prefill(cache, tokens, np.arange(400), units[0], 400)
    decoder.model.for_rows("numba", 1)._before[1][0][:] = np.nan  # the norm before layer 1's queries and keys
    with pytest.raises(ConfigError, match="NaN or Inf"):
        decoder.step(cache, np.array([5]), np.array([400]), units, np.array([401]), RQ.selection_config)
    assert steps_made


def test_a_thread_that_fails_is_said_and_the_next_step_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a failed call left in the counters is gone."""
    path = tiny_models.saved("llama2")
    plain = [output.logits for _, output in steps_of(path, True)]
    real, failed = openmp._start, []

    def start(parallel: int, number: int, given: np.ndarray, progress: np.ndarray) -> None:
        real(parallel, number, given, progress)
        if len(given) > 1 and not failed:
            failed.append(True)
            progress[:, openmp.FAILED] = 1

    monkeypatch.setattr(openmp, "_start", start)
    steps = steps_of(path, True)
    with pytest.raises(RuntimeError, match="a thread of a compiled CPU kernel failed"):
        next(steps)
    assert all(np.array_equal(output.logits, one) for (_, output), one in zip(steps_of(path, True), plain, strict=True))
