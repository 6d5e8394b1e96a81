"""transformers' `generate` with a cache that is EPS's: beams, drafts, turns, pipelines; and what is refused."""

import copy
import gc
import logging
import weakref
from typing import Any

import pytest
import torch
import transformers
from hf_models import FAMILIES, SMALL, Attending, Reference, eps_layers, feed, live_sequences, prompts, stock, tiny
from hf_models import tiny_config as config_of
from tiny_models import save_model
from transformers import AutoTokenizer, DynamicCache, StaticCache, pipeline

from eps_core.config.eps import EpsConfig
from eps_core.errors import ConfigError
from eps_cuda.hooks.transformers import EpsCache, eps, plan_of

RQ = EpsConfig.of("rq", budget=0.2, **SMALL)
WHOLE = EpsConfig.of("rq", budget=1.0, **SMALL)


def generate(model: Any, ids: torch.Tensor, mask: torch.Tensor, cache: Any, **how: Any) -> torch.Tensor:
    how = {"do_sample": False, "max_new_tokens": 8, **how}
    return model.generate(ids, attention_mask=mask, past_key_values=cache, **how)


def gone(cache: EpsCache) -> None:
    """Asserts that nothing of a cache is left in its pool once it is reset, and nothing leaked before."""
    pool = eps_layers(cache)[0].rows.paged.pool
    pool.check()
    cache.reset()
    pool.check()
    assert not pool._live and pool.num_free == pool.num_units and cache.get_seq_length() == 0


# ---- ways to generate ----

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 1.3, "top_k": 20},
    "beams": {"num_beams": 4, "num_return_sequences": 2},
    "sampled-beams": {"num_beams": 3, "do_sample": True},
    "several": {"do_sample": True, "num_return_sequences": 3},
    "chunked": {"prefill_chunk_size": 37},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lengths", [[90], [90, 61]], ids=["single", "padded"])
@pytest.mark.parametrize("way", WAYS)
def test_with_everything_visited_every_way_says_what_sdpa_says(
    way: str, lengths: list[int], dtype: torch.dtype
) -> None:
    model, (ids, mask) = tiny("qwen3", dtype), prompts(lengths)
    said = []
    for name in ("sdpa", "eps"):
        cache = EpsCache(model, WHOLE) if name == "eps" else stock(model)
        torch.manual_seed(5)
        with Attending(model, name):
            said.append(generate(model, ids, mask, cache, **WAYS[way]))
    assert torch.equal(*said)
    gone(cache)
    assert cache.gated.stats()["bytes_ratio"] == 1


@pytest.mark.parametrize("way", ["greedy", "sampling", "beams", "several"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_gated_every_way_says_what_the_reference_says(name: str, way: str) -> None:
    """Beams too: their rows are forks that share pages, the reference's hold everything themselves."""
    model, (ids, mask) = tiny(name), prompts([300], seed=4)
    reference, found = Reference(RQ), []
    for attending in (reference.NAME, "eps", "sdpa"):
        cache = EpsCache(model, RQ) if attending == "eps" else stock(model)
        if attending == "eps":
            ours = cache
        torch.manual_seed(6)
        with Attending(model, attending):
            out = generate(
                model, ids, mask, cache, **WAYS[way], max_new_tokens=10, output_scores=True,
                return_dict_in_generate=True,
            )  # fmt: skip
        found.append(out)
    assert torch.equal(found[0].sequences, found[1].sequences)

    def apart(one: Any, other: Any) -> float:
        """The largest difference of two runs' scores; what sampling ruled out is -inf in both."""
        pairs = zip(one.scores, other.scores, strict=True)
        found = [(a - b)[torch.isfinite(a) & torch.isfinite(b)].abs() for a, b in pairs]
        return float(torch.cat(found).max())

    assert apart(found[0], found[1]) < 5e-4 < 1e-2 < apart(found[1], found[2])
    assert ours.gated.stats()["fallbacks"] == {}
    gone(ours)


def test_drafts_are_verified_by_sdpa_and_taken_back() -> None:
    model, (ids, mask) = tiny("llama"), prompts([120], seed=7)
    ids = torch.cat([ids, ids[:, :30]], dim=1)  # something to look up
    mask = torch.ones_like(ids)
    plain = generate(model, ids, mask, stock(model), max_new_tokens=24)
    for how in ({"prompt_lookup_num_tokens": 4}, {"assistant_model": tiny("llama", seed=1)}):
        cache = EpsCache(model, RQ)
        cropped = []
        layer = eps_layers(cache)[0]
        crop = layer.rows.crop
        layer.rows.crop = lambda n, crop=crop, cropped=cropped: (cropped.append(n), crop(n))
        with Attending(model):
            said = generate(model, ids, mask, cache, max_new_tokens=24, **how)
        # tokens whose drafts were all wrong come of gated steps, others of dense ones
        assert said.shape == plain.shape and any(cropped)
        assert cache.get_seq_length() == said.shape[1] - 1
        whole = EpsCache(model, WHOLE)
        with Attending(model):
            assert torch.equal(generate(model, ids, mask, whole, max_new_tokens=24, **how), plain)
        gone(cache)


def test_a_draft_model_under_eps_too() -> None:
    model, assistant, (ids, mask) = tiny("llama"), copy.deepcopy(tiny("llama", seed=1)), prompts([290], seed=8)
    assistant.generation_config.assistant_confidence_threshold = 0.0  # however unsure it is
    plain = generate(model, ids, mask, stock(model), max_new_tokens=12)
    with eps(model, WHOLE) as gated, eps(assistant, RQ) as drafts:
        said = model.generate(ids, assistant_model=assistant, max_new_tokens=12, do_sample=False)
    assert torch.equal(said, plain)
    assert drafts.stats()["steps"] > 0 and drafts.stats()["bytes_ratio"] < 0.5 and gated.stats()["fallbacks"] == {}


def test_turns_go_on_in_one_cache() -> None:
    model, (ids, mask) = tiny("mistral"), prompts([80, 66], seed=9)
    more = torch.randint(1, 256, (2, 11), generator=torch.manual_seed(0))
    said = []
    for name in ("sdpa", "eps"):
        cache = EpsCache(model, WHOLE) if name == "eps" else stock(model)
        with Attending(model, name):
            first = generate(model, ids, mask, cache)
            longer = torch.cat([first, more], dim=1)
            seen = torch.cat([mask, torch.ones(2, longer.shape[1] - mask.shape[1], dtype=torch.long)], dim=1)
            said.append(generate(model, longer, seen, cache))
    assert torch.equal(*said)
    gone(cache)


def test_a_cache_that_was_reset_is_a_new_one() -> None:
    model = tiny("llama")
    cache, said = EpsCache(model, RQ), []
    with Attending(model):
        for seed in (1, 2, 1):
            ids, mask = prompts([300, 280] if seed == 1 else [270], seed=seed)
            said.append(generate(model, ids, mask, cache))
            gone(cache)
    assert torch.equal(said[0], said[2])


def test_a_copied_cache_shares_pages_and_goes_its_own_way() -> None:
    model, (ids, mask) = tiny("llama"), prompts([290], seed=10)
    cache = EpsCache(model, RQ)
    with Attending(model), torch.no_grad():
        feed(model, cache, ids, mask, 0, 280)
        twin = copy.deepcopy(cache)
        pool = eps_layers(cache)[0].rows.paged.pool
        assert live_sequences(cache) == 2 and eps_layers(twin)[0].rows.paged.pool is pool
        one = [feed(model, cache, ids, mask, at, at + 1) for at in range(280, 290)]
        two = [feed(model, twin, ids, mask, at, at + 1) for at in range(280, 290)]
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    del twin
    gc.collect()
    assert live_sequences(cache) == 1
    pool.check()


def test_rows_are_repeated_and_selected() -> None:
    model, (ids, mask) = tiny("llama"), prompts([40, 33], seed=11)
    logits = []
    for name in ("sdpa", "eps"):
        cache = EpsCache(model, WHOLE) if name == "eps" else stock(model)
        with Attending(model, name), torch.no_grad():
            feed(model, cache, ids, mask, 0, 39)
            cache.batch_repeat_interleave(2)
            cache.batch_select_indices(torch.tensor([3, 0, 3]))
            cache.reorder_cache(torch.tensor([2, 1, 1]))
            rows = [1, 0, 0]
            logits.append(feed(model, cache, ids[rows], mask[rows], 39, 40))
            cache.batch_select_indices(torch.tensor([True, False, True]))
            wider = torch.nn.functional.pad(mask[[1, 0]], (0, 1), value=1)
            longer = torch.nn.functional.pad(ids[[1, 0]], (0, 1), value=7)
            logits.append(feed(model, cache, longer, wider, 40, 41))
    assert torch.equal(logits[0], logits[2]) and torch.equal(logits[1], logits[3])
    gone(cache)


def test_a_pipeline(tmp_path: Any) -> None:
    path = save_model("llama2", tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.pad_token, tokenizer.padding_side = "</s>", "left"
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    text = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    asked = {"text_inputs": ["a" * 70 + "bc", "xyz" * 9], "max_new_tokens": 6, "do_sample": False, "batch_size": 2}
    plain = text(**asked)
    with eps(model, WHOLE) as gated:
        assert text(**asked) == plain
    assert gated.stats()["steps"] == 5 and gated.stats()["rows"] == 10
    with eps(model, method="box", group_tokens=2, budget=0.2, first_tokens=2, last_tokens=4) as gated:
        text(**asked)
    assert gated.stats()["groups_visited"] < 0.4 * gated.stats()["groups_total"]
    assert text(**asked) == plain


# ---- faults, masks, gradients ----


def test_a_fault_of_ours_is_the_engines_attention_counted_and_loud(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, (ids, mask) = tiny("llama"), prompts([150, 130], seed=12)
    plain = generate(model, ids, mask, stock(model))
    cache = EpsCache(model, RQ)

    def broken(*_: Any) -> Any:
        raise RuntimeError("a broken selection")

    monkeypatch.setattr(cache.gated.eps, "select", broken)
    with Attending(model), caplog.at_level(logging.ERROR, "eps"):
        assert torch.equal(generate(model, ids, mask, cache), plain)
    stats = cache.gated.stats()
    assert stats["fallbacks"] == {"error": 7 * 2 * 2} and stats["bytes_ratio"] == 1
    assert caplog.text.count("a broken selection") >= 1 and len(caplog.records) == 1


def test_a_mask_that_is_no_left_padding_is_the_engines(caplog: pytest.LogCaptureFixture) -> None:
    model, (ids, _) = tiny("llama"), prompts([60], seed=13)
    hole = torch.ones_like(ids)
    hole[:, 20:25] = 0
    found = []
    for name in ("sdpa", "eps"):
        cache = EpsCache(model, RQ) if name == "eps" else stock(model)
        with Attending(model, name), torch.no_grad():
            feed(model, cache, ids, hole, 0, 50)
            found.append(feed(model, cache, ids, hole, 50, 51))
            added = torch.zeros(1, 1, 1, 52)  # a mask to add, made by the caller
            added[..., 30] = -1.0
            found.append(model(ids[:, 51:52], attention_mask=added, past_key_values=cache).logits)
            found.append(feed(model, cache, ids, torch.ones_like(ids), 52, 53))
    assert torch.equal(found[0], found[3]) and torch.equal(found[1], found[4])
    assert cache.gated.stats()["fallbacks"] == {"mask": 4}  # the third sees every token: gated
    assert not torch.equal(found[2], found[5])


def test_padding_that_is_no_longer_hidden_is_one_line() -> None:
    model, (ids, mask) = tiny("llama"), prompts([40, 30], seed=14)
    with Attending(model), torch.no_grad():
        cache = EpsCache(model, RQ)
        feed(model, cache, ids, mask, 0, 30)
        with pytest.raises(ConfigError, match="no longer hides"):
            feed(model, cache, ids, torch.ones_like(mask), 30, 31)


def test_gradients_may_be_on() -> None:
    model, (ids, mask) = tiny("llama"), prompts([60], seed=15)
    found = []
    for budget, mode in ((0.3, torch.enable_grad), (0.3, torch.inference_mode), (0.3, torch.no_grad)):
        cache = EpsCache(model, RQ.replace(budget=budget))
        with Attending(model), mode():
            feed(model, cache, ids, mask, 0, 59)
            found.append(feed(model, cache, ids, mask, 59, 60).detach().clone())
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_an_own_cache_needs_our_attention() -> None:
    model, (ids, mask) = tiny("llama"), prompts([20])
    with pytest.raises(ConfigError, match=r'attends by "sdpa".*set_attn_implementation\("eps"\)'):
        generate(model, ids, mask, EpsCache(model, RQ))
    with Attending(model), torch.no_grad():
        cache = EpsCache(model, RQ)
        feed(model, cache, ids, mask, 0, 10)
        with pytest.raises(ConfigError, match="2 rows go on with a cache of 1"):
            feed(model, cache, ids.repeat(2, 1), mask.repeat(2, 1), 10, 11)


# ---- the context manager, lives and deaths ----


def test_the_context_leaves_everything_as_it_was_after_a_fault_too() -> None:
    model, (ids, _) = tiny("gemma3"), prompts([40])
    before = dict(vars(model)), model.config._attn_implementation, len(model._forward_pre_hooks)
    plain = model.generate(ids, max_new_tokens=4, do_sample=False)
    for fault in (None, ValueError("the caller's"), KeyboardInterrupt()):
        try:
            with eps(model, RQ):
                assert model.config._attn_implementation == "eps"
                model.generate(ids, max_new_tokens=2, do_sample=False)
                if fault is not None:
                    raise fault
        except BaseException as error:
            assert error is fault
        assert (dict(vars(model)), model.config._attn_implementation, len(model._forward_pre_hooks)) == before
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), plain)


def test_two_models_at_once() -> None:
    one, two, (ids, _) = tiny("llama"), tiny("qwen2"), prompts([300], seed=16)
    alone = []
    for model in (one, two):
        with eps(model, RQ):
            alone.append(model.generate(ids, max_new_tokens=6, do_sample=False))
    with eps(one, RQ) as first, eps(two, method="box", budget=0.4, group_tokens=16) as second:
        assert torch.equal(one.generate(ids, max_new_tokens=6, do_sample=False), alone[0])
        two.generate(ids, max_new_tokens=6, do_sample=False)
        assert torch.equal(one.generate(ids, max_new_tokens=6, do_sample=False), alone[0])
    assert first.stats()["steps"] == 10 and second.stats()["steps"] == 5
    assert first.stats()["bytes_ratio"] < second.stats()["bytes_ratio"]


def test_a_cache_that_was_passed_in_is_left_alone() -> None:
    model, (ids, mask) = tiny("llama"), prompts([60], seed=17)
    plain = generate(model, ids, mask, stock(model))
    with eps(model, RQ) as gated:
        mine = stock(model)
        assert torch.equal(generate(model, ids, mask, mine), plain)
        assert not eps_layers(mine) and gated.stats()["steps"] == 0
        made = model.generate(ids, max_new_tokens=3, do_sample=False, return_dict_in_generate=True).past_key_values
        assert len(eps_layers(made)) == 2 and gated.stats()["steps"] == 2


@pytest.mark.parametrize(("asked", "kind"), [("static", "StaticCache"), ("offloaded", "offloaded")])
def test_other_caches_are_refused_by_name(asked: str, kind: str) -> None:
    model, (ids, _) = tiny("llama"), prompts([20])
    with eps(model, RQ), pytest.raises(ConfigError, match=f"{kind}.*leave cache_implementation out"):
        model.generate(ids, max_new_tokens=2, do_sample=False, cache_implementation=asked)
    with Attending(model), torch.no_grad():  # attention "eps" alone is sdpa for them
        cache = StaticCache(config=model.config, max_cache_len=32)
        ours = model(ids, past_key_values=cache).logits
    cache = StaticCache(config=model.config, max_cache_len=32)
    with torch.no_grad():
        assert torch.equal(ours, model(ids, past_key_values=cache).logits)


def test_memory_goes_with_the_cache() -> None:
    model, (ids, mask) = tiny("llama"), prompts([300, 200], seed=18)
    with Attending(model):
        cache = EpsCache(model, RQ)
        generate(model, ids, mask, cache, num_beams=3)
        gated, paged = cache.gated, eps_layers(cache)[0].rows.paged
        pool, kept = paged.pool, weakref.ref(paged.cache)
        assert pool._live
        del paged, cache
        gc.collect()
    pool.check()
    assert not pool._live and kept() is None and gated.stats()["steps"] == 7
    with eps(model, RQ) as gated:
        out = model.generate(ids, max_new_tokens=3, do_sample=False, return_dict_in_generate=True)
        kept = weakref.ref(eps_layers(out.past_key_values)[0].rows.paged.cache)
        del out
        gc.collect()
        assert kept() is None


# ---- plans ----


def test_plans_say_what_is_left_and_why(caplog: pytest.LogCaptureFixture) -> None:
    for name in FAMILIES:
        assert plan_of(config_of(name)).gated == plan_of(tiny(name)).gated
    plan = plan_of(tiny("gemma3"))
    assert plan.dense == {0: "sliding window of 24", 2: "sliding window of 24"}
    with caplog.at_level(logging.WARNING, "eps"):
        EpsCache(tiny("llama"), RQ)
        assert not caplog.records
        EpsCache(tiny("gemma3"), RQ)
    assert "gates 2 of 4 layers; left dense: sliding window of 24 (0 2)" in caplog.text


REFUSED = {
    "mistral with a window": (lambda: config_of("mistral", sliding_window=16), r"sliding window of 16 \(0-1\)"),
    "gemma2": (
        lambda: transformers.Gemma2Config(num_hidden_layers=2, hidden_size=32, vocab_size=64, head_dim=16),
        "soft-capped",
    ),
    "gpt-oss": (lambda: transformers.GptOssConfig(num_hidden_layers=2), "learned sinks"),
    "deepseek": (lambda: transformers.DeepseekV3Config(num_hidden_layers=2), r"latent attention \(MLA\)"),
    "t5": (lambda: transformers.T5Config(num_layers=2), "encoder-decoder"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_gated_is_refused_by_name(name: str) -> None:
    make, words = REFUSED[name]
    with pytest.raises(ConfigError, match=f"nothing to gate.*{words}"):
        EpsCache(make(), RQ)


def test_settings_are_checked_before_anything_is_touched() -> None:
    model = tiny("llama")
    for wrong, words in (
        ({"methode": "rq"}, "methode"),
        ({}, 'method="rq"'),
        ({"method": "rq", "budget": -1}, "budget"),
    ):
        with pytest.raises(ConfigError, match=words), eps(model, **wrong):
            pass
    with pytest.raises(ConfigError, match="not both: budget"):
        EpsCache(model, RQ, budget=0.1)
    assert model.config._attn_implementation == "sdpa" and not model._forward_pre_hooks


def test_metrics_are_written(tmp_path: Any) -> None:
    model, (ids, _) = tiny("llama"), prompts([300])
    with eps(model, RQ, metrics=tmp_path / "steps.jsonl", audit_every=2) as gated:
        model.generate(ids, max_new_tokens=5, do_sample=False)
    assert len((tmp_path / "steps.jsonl").read_text().splitlines()) == 1 + 4 + 1
    assert gated.stats()["audits"] == 2


def test_a_loop_of_ones_own_has_eps_in_its_empty_cache() -> None:
    """A lazily filled stock cache, as one makes it without a config, gets every layer at once."""
    model, (ids, mask) = tiny("llama"), prompts([50])
    with eps(model, RQ) as gated, torch.no_grad():
        cache = DynamicCache()
        feed(model, cache, ids, mask, 0, 49)
        feed(model, cache, ids, mask, 49, 50)
    assert gated.stats()["steps"] == 1 and len(eps_layers(cache)) == 2
