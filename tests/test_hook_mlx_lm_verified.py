"""Verified decoding in mlx-lm: its loop of one prompt says what it says without EPS, whatever was drafted, and what a
round leaves in the caches is what dense decoding leaves there. The engine is in test_hook_transformers_verified.py."""

import inspect
import logging
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import mlx_lm.generate
import numpy as np
import pytest
from mlx_lm.models import llama
from mlx_lm.models.cache import RotatingKVCache, load_prompt_cache, make_prompt_cache, save_prompt_cache
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from mlx_lm_models import prompts, tiny, together
from test_hook_mlx_lm import assert_empty, pool_of
from test_hook_mlx_lm_plan import odd_llama

from eps_core.errors import ConfigError
from eps_core.integrations.layers import SparseAttention
from eps_core.integrations.paged import Paged
from eps_mlx.integrations.mlx_lm import eps, hook_of
from eps_mlx.integrations.mlx_lm.names import stock_step

VERIFIED: dict[str, Any] = {
    "method": "rq", "budget": 0.2, "num_sink_tokens": 4, "num_recent_tokens": 8, "verify": "tokens"
}  # fmt: skip
STEPS = sys.modules["mlx_lm.generate"]  # a module, where mlx_lm.generate is its function
WAYS: dict[str, Any] = {
    "greedy": dict,
    "drawn": lambda: {"sampler": make_sampler(0.9, top_p=0.95, top_k=40)},
    "processed": lambda: {"logits_processors": make_logits_processors(None, 1.4, 30)},
}
NEW = 20


def said(model: Any, prompt: list[int], cache: Any = None, most: int = NEW, way: str = "greedy") -> list[int]:
    mx.random.seed(5)
    steps = STEPS.generate_step(mx.array(prompt), model, max_tokens=most, prompt_cache=cache, **WAYS[way]())
    return [int(token) for token, _ in steps]


def verified(sparse: SparseAttention) -> dict[str, Any]:
    found: dict[str, Any] = sparse.stats()["verified"]
    return found


@pytest.mark.parametrize("drafts", [0, 1, 5, "auto"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_the_text_is_that_of_the_model_alone(family: str, way: str, drafts: Any) -> None:
    """Drawn ones, too: of the seed. Every other layer of gemma3_text overwrites a window of 32 tokens."""
    model, (prompt,) = tiny(family), prompts(290)
    plain = said(model, prompt, way=way)
    with eps(model, **VERIFIED, draft=drafts) as sparse:
        pool = pool_of(model)
        assert said(model, prompt, way=way) == plain
        found = verified(sparse)
        assert_empty(pool)
    assert found["new_tokens"] == NEW == found["rounds"] + found["accepted"]
    assert bool(found["drafted"]) == (drafts != 0)
    # a pass of one row reads what a dense step reads
    assert drafts != 0 or found["bytes_kv_verify"] == found["bytes_kv_dense"] > 0
    assert found["fallbacks"] == {} == sparse.stats()["fallbacks"]
    assert drafts == 0 or sparse.stats()["bytes_ratio"] < 0.5
    assert STEPS.generate_step is stock_step and said(model, prompt, way=way) == plain


@pytest.mark.parametrize("broken", ["noise", "nan", "raises", "place"])
def test_whatever_drafts_say_the_text_stays(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, (prompt,) = tiny("llama"), prompts(290)
    plain = {way: said(model, prompt, way=way) for way in WAYS}
    rng = np.random.default_rng(0)

    def attend(self: SparseAttention, cache: Any, layer: int, q: Any, *args: Any) -> Any:
        if broken in ("raises", "place"):
            raise RuntimeError("not today")
        return mx.full(q.shape, float("nan")) if broken == "nan" else mx.array(rng.standard_normal(q.shape, np.float32))

    plan = {
        "raises": "eps_core.integrations.layers.sparse_attention",
        "place": "eps_core.integrations.paged.Paged.place",
    }
    monkeypatch.setattr(plan.get(broken, "eps_core.integrations.layers.SparseAttention.attend"), attend)
    for way in WAYS:
        with eps(model, **VERIFIED, draft=6) as sparse:
            assert said(model, prompt, way=way) == plain[way], way
            found = verified(sparse)
        if broken == "raises":  # without EPS drafts are the model's own dense steps
            assert found["acceptance"] == 1
        elif broken == "place":
            assert found["fallbacks"]["error"] == found["rounds"] - 1
        else:
            assert found["acceptance"] < 0.3


def test_a_verify_pass_that_keeps_what_was_drafted_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (prompt,) = tiny("llama"), prompts(290)
    plain, place = said(model, prompt), Paged.place

    def first_only(self: Paged, layer: int, k: Any, v: Any, slots: np.ndarray) -> None:
        if len(slots) == 1:  # a draft's, or the whole of a pass
            place(self, layer, k, v, slots)

    monkeypatch.setattr(Paged, "place", first_only)
    monkeypatch.setattr(SparseAttention, "attend", lambda self, cache, layer, q, *args: 50 * mx.ones_like(q))
    with eps(model, **VERIFIED, draft=6):
        assert said(model, prompt) != plain


def test_generate_and_stream_generate_come_through_it(tmp_path: Any) -> None:
    from tiny_models import save_model

    model, tokenizer = mlx_lm.load(str(save_model("llama2", tmp_path)))
    text = "It was a dark and stormy night; " * 10
    plain = mlx_lm.generate(model, tokenizer, text, max_tokens=12)
    with eps(model, **VERIFIED, draft=4) as sparse:
        assert mlx_lm.generate(model, tokenizer, text, max_tokens=12) == plain and verified(sparse)["drafted"]
        other = tiny("llama", seed=3)  # a model without EPS, and a draft model of mlx-lm's own
        count = verified(sparse)["rounds"]
        said(other, prompts(60)[0])
        assert verified(sparse)["rounds"] == count


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("taken", [1, 2, 4, 20])
def test_a_text_that_is_left_early_leaves_a_cache_to_go_on_with(family: str, taken: int) -> None:
    """In the middle of a round: K, V and windows are those of a dense run, and the text goes on as it would have."""
    model, (prompt,) = tiny(family), prompts(270)
    plain = said(model, prompt, most=40)
    with eps(model, **VERIFIED, draft=7) as sparse:
        cache = make_prompt_cache(model)
        steps = STEPS.generate_step(mx.array(prompt), model, max_tokens=40, prompt_cache=cache)
        assert [int(next(steps)[0]) for _ in range(taken)] == plain[:taken]
        steps.close()
        num_tokens, whole, own = cache[-1].offset, prompt + plain, make_prompt_cache(model)
        assert num_tokens == 270 + taken  # as a dense text leaves it
        sparse.on = False
        for start, end in [(0, 269), *((i, i + 1) for i in range(269, num_tokens))]:
            model(mx.array([whole[start:end]]), cache=own)
        sparse.on = True
        for one, other in zip(cache, own, strict=True):
            assert one.offset == other.offset
            if isinstance(one, RotatingKVCache):
                assert one._idx == other._idx
            for a, b in zip(contents(one), contents(other), strict=True):
                np.testing.assert_allclose(np.array(a), np.array(b), atol=1e-4, rtol=1e-4)
        left = 309 - num_tokens
        assert said(model, whole[num_tokens : num_tokens + 1], cache, left) == whole[num_tokens + 1 :]
        pool = pool_of(model)
        del cache, own, steps, one, other
        assert_empty(pool)


def test_a_text_that_outlives_eps_may_be_left() -> None:
    model, (prompt,) = tiny("llama"), prompts(270)
    with eps(model, **VERIFIED, draft=7):
        steps = STEPS.generate_step(mx.array(prompt), model, max_tokens=40)
        next(steps)
    steps.close()


def contents(cache: Any) -> Any:
    return (cache.keys, cache.values) if isinstance(cache, RotatingKVCache) else cache.keys_and_values()


def test_a_prompt_that_is_only_read_is_in_the_cache_whole() -> None:
    model, (prompt,) = tiny("llama"), prompts(290)
    plain = said(model, prompt)
    with eps(model, **VERIFIED):
        cache, told = make_prompt_cache(model), list[tuple[int, int]]()
        steps = STEPS.generate_step(
            mx.array(prompt[:-1]), model, max_tokens=0, prompt_cache=cache,
            prompt_progress_callback=lambda *numbers: told.append(numbers),
        )  # fmt: skip
        assert not list(steps) and told == [(0, 289), (288, 289), (289, 289)]
        assert cache[0].offset == 289 and said(model, prompt[-1:], cache) == plain


def test_summaries_after_rounds_are_those_of_dense_decoding() -> None:
    model, (prompt,) = tiny("llama"), prompts(270)
    estimates, plain = [], said(model, prompt, most=40)
    for draft in (7, 0):
        with eps(model, **VERIFIED, draft=draft) as sparse:
            cache = make_prompt_cache(model)
            assert said(model, prompt, cache, most=40) == plain
            assert bool(verified(sparse)["rolled_back"]) == bool(draft)
            pool = pool_of(model)
            plan = pool.paged.plan(sparse.config, [cache[0].rows[0].sequence])
            q = mx.array(np.random.default_rng(1).standard_normal((1, 4, 16), np.float32))
            estimates.append([np.array(sparse.backend.score(pool.paged.cache, i, q, plan).estimate) for i in range(2)])
    first, second = np.array(estimates)
    assert (np.isfinite(first) == np.isfinite(second)).all() and np.isfinite(second).sum() > 200
    np.testing.assert_allclose(first, second, atol=1e-3, rtol=1e-3)


def test_batches_and_other_caches_are_dense_and_mlx_lms_own(caplog: pytest.LogCaptureFixture) -> None:
    model, (first, second) = tiny("llama"), prompts(150, 97)
    plain = together(model, [first, second], [], 8)[0]
    alone = said(model, first)
    with eps(model, **VERIFIED) as sparse, caplog.at_level(logging.WARNING, "eps"):
        assert together(model, [first, second], [], 8)[0] == plain
        hook = hook_of(model)
        assert hook is not None and said(model, first, hook.stock_caches()) == alone
        assert not verified(sparse)["rounds"] and not sparse.stats()["steps"]
        draft = tiny("llama", seed=1)
        prompt_cache = [*make_prompt_cache(model), *make_prompt_cache(draft)]
        steps = STEPS.speculative_generate_step(
            mx.array(first), model, draft, max_tokens=NEW, prompt_cache=prompt_cache, num_draft_tokens=3
        )
        assert [token for token, _, _ in steps] == alone
    assert len([one for one in caplog.records if "decoded densely" in one.message]) == 1


def test_a_batch_of_one_prompt_is_told_to_be_dense(caplog: pytest.LogCaptureFixture) -> None:
    model, batch = tiny("llama"), prompts(150)
    plain = together(model, batch, [], 8)[0]
    with eps(model, **VERIFIED), caplog.at_level(logging.WARNING, "eps"):
        assert together(model, batch, [], 8)[0] == plain
    assert [one.message.split(" is ")[0] for one in caplog.records] == ["eps: a batch"]


def test_a_loaded_cache_that_another_model_holds_is_refused(tmp_path: Path) -> None:
    """Nothing in a file says whose it is: a model of the same shape that had EPS put on later gets it."""
    model, (prompt,), file = tiny("llama"), prompts(290), str(tmp_path / "cache.safetensors")
    with eps(model, **VERIFIED):
        cache = make_prompt_cache(model)
        plain = said(model, prompt, cache)
        save_prompt_cache(file, cache)
        with eps(tiny("llama", seed=1), **VERIFIED), pytest.raises(ConfigError, match="blocks of another model"):
            said(model, plain[-1:], load_prompt_cache(file))
    with eps(model, **VERIFIED), pytest.raises(ConfigError, match="which is off now: make a new one"):
        said(model, prompt, cache)


def test_what_cannot_be_is_refused_in_a_line() -> None:
    model, (prompt,) = tiny("lfm2"), prompts(290)
    with eps(model, **VERIFIED), pytest.raises(ConfigError, match="keeps a ArraysCache"):
        said(model, prompt)
    model = tiny("llama")
    with eps(model, **VERIFIED), pytest.raises(ValueError, match="must be provided"):
        said(model, [])
    with pytest.raises(ConfigError, match="in mlx-lm"), eps(tiny("llama"), **VERIFIED, draft_weights="4bit"):
        pass
    assert STEPS.generate_step is stock_step


def test_the_loop_shows_its_own_parameters_while_eps_is_on() -> None:
    """A second model's hook looks for them where mlx-lm is of another version than the tests run with."""
    with eps(tiny("llama"), **VERIFIED):
        assert STEPS.generate_step is not stock_step
        assert inspect.signature(STEPS.generate_step) == inspect.signature(stock_step)


@pytest.mark.parametrize(
    "make",
    [
        lambda: tiny("llama"),
        lambda: tiny("gemma3_text"),
        lambda: odd_llama(llama.Attention, num_key_value_heads=4),
    ],
    ids=["all sparse", "some sliding", "one dense"],
)
def test_a_round_that_something_ends_is_taken_back(make: Any) -> None:
    model, (prompt,) = make(), prompts(290)
    plain = said(model, prompt)
    with eps(model, **VERIFIED, draft=3):
        cache, calls = make_prompt_cache(model), []
        forward = type(model).__call__

        def fails(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            if len(calls) == 4:
                raise KeyboardInterrupt
            return forward(self, *args, **kwargs)

        type(model).__call__ = fails
        try:
            with pytest.raises(KeyboardInterrupt):
                said(model, prompt, cache)
        finally:
            type(model).__call__ = forward
        assert {one.offset for one in cache} == {289} and pool_of(model).round is None
        assert said(model, prompt[-1:], cache) == plain
