"""Where EPS stops in transformers: faults, masks, other caches, unsupported models; and what it leaves behind."""

import gc
import logging
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import transformers
from hf_models import FAMILIES, RQ, Attending, both, eps_layers, feed, generate, gone, prompts, stock, tiny
from hf_models import tiny_config as config_of
from tiny_models import save_model
from transformers import DynamicCache, StaticCache

from eps_core.errors import ConfigError
from eps_core.integrations import kernels as engine_kernels
from eps_core.integrations.settings import Settings
from eps_cuda.integrations.transformers import EpsCache, eps, plan_of
from eps_cuda.kernels.cpu import KERNELS

# ---- faults, masks, gradients ----


def test_a_fault_while_summaries_are_written_loses_no_token(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, (ids, mask) = tiny("llama"), prompts([290, 130], seed=12)
    plain = generate(model, ids, mask, stock(model))
    with Attending(model):  # the check of the kernels, once a process, is done before the backend breaks
        generate(model, ids, mask, EpsCache(model, RQ))
    cache = EpsCache(model, RQ)
    write, calls = cache.sparse.backend.write_kv, []

    def broken(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 4:  # the second layer of the first token
            raise RuntimeError("a broken write")
        return write(*args)

    monkeypatch.setattr(cache.sparse.backend, "write_kv", broken)
    with Attending(model), caplog.at_level(logging.ERROR, "eps"):
        said = generate(model, ids, mask, cache, output_scores=True, return_dict_in_generate=True)
    # the first layer of that token was sparse, all that came after is sdpa over the same keys and values
    assert said.sequences.shape == plain.shape and torch.equal(said.sequences[:, :291], plain[:, :291])
    assert cache.sparse.stats()["fallbacks"] == {"error": 2 * (1 + 6 * 2)}
    assert len(calls) == 4 and "a broken write" in caplog.text
    whole = EpsCache(model, RQ.replace(budget=1.0))
    calls.clear()
    with Attending(model):
        assert torch.equal(generate(model, ids, mask, whole), plain)
    whole.reset()
    assert not eps_layers(whole)[0].rows.broken
    gone(cache)


def test_a_mask_that_is_no_left_padding_is_the_engines(caplog: pytest.LogCaptureFixture) -> None:
    model, (ids, _) = tiny("llama"), prompts([60], seed=13)
    hole = torch.ones_like(ids)
    hole[:, 20:25] = 0
    found = []
    for cache in both(model, RQ):
        feed(model, cache, ids, hole, 0, 50)
        found.append(feed(model, cache, ids, hole, 50, 51))
        added = torch.zeros(1, 1, 1, 52)  # a mask to add, made by the caller
        added[..., 30] = -1.0
        found.append(model(ids[:, 51:52], attention_mask=added, past_key_values=cache).logits)
        found.append(feed(model, cache, ids, torch.ones_like(ids), 52, 53))
    assert torch.equal(found[0], found[3]) and torch.equal(found[1], found[4])
    assert cache.sparse.stats()["fallbacks"] == {"mask": 4}  # the third sees every token: sparse
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
    for mode in (torch.enable_grad, torch.inference_mode, torch.no_grad):
        cache = EpsCache(model, RQ.replace(budget=0.3))
        with Attending(model), mode():
            feed(model, cache, ids, mask, 0, 59)
            found.append(feed(model, cache, ids, mask, 59, 60).detach().clone())
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_the_name_may_be_given_while_loading(tmp_path: Any) -> None:
    path, (ids, mask) = save_model("qwen3", tmp_path), prompts([290])
    load = transformers.AutoModelForCausalLM.from_pretrained
    model, plain = (load(path, attn_implementation=name, dtype=torch.float32) for name in ("eps", "sdpa"))
    expected = generate(plain, ids, mask, None)
    assert torch.equal(generate(model, ids, mask, None), expected)  # without our cache it is sdpa
    cache = EpsCache(model.config, RQ)
    generate(model, ids, mask, cache)
    assert cache.sparse.stats()["bytes_ratio"] < 0.5


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
    for fault, more in (
        (None, {}), (ValueError("the caller's"), {}), (KeyboardInterrupt(), {}), (KeyError(), {"verify": "tokens"})
    ):  # fmt: skip
        try:
            with eps(model, RQ, **more):
                assert ("generate" in model.__dict__) == bool(more)
                assert model.config._attn_implementation == "eps"
                model.generate(ids, max_new_tokens=2, do_sample=False)
                if fault is not None:
                    raise fault
        except BaseException as error:
            assert error is fault
        assert (dict(vars(model)), model.config._attn_implementation, len(model._forward_pre_hooks)) == before
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), plain)


def test_a_model_has_eps_on_once(tmp_path: Any) -> None:
    model, (ids, _) = tiny("llama"), prompts([300])
    with eps(model, RQ) as sparse:
        for _ in range(2):
            inner = eps(model, RQ.replace(budget=0.9), metrics=tmp_path / "steps.jsonl")
            with pytest.raises(ConfigError, match="EPS on already"), inner:
                pass
        assert model.config._attn_implementation == "eps" and len(model._forward_pre_hooks) == 1
        model.generate(ids, max_new_tokens=3, do_sample=False)
    assert sparse.stats()["steps"] == 2 and not model._forward_pre_hooks


class Adapted(torch.nn.Module):
    """A wrapper such as PEFT's: `generate` calls the model inside."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.generate = model, model.generate
        self.get_base_model = lambda: model


@pytest.mark.parametrize(
    "wrap", [Adapted, lambda model: torch.compile(model, backend="eager")], ids=["peft", "compile"]
)
def test_a_wrapped_model_is_sparse_inside(wrap: Any) -> None:
    model, (ids, _) = tiny("llama"), prompts([300])
    with eps(wrap(model), RQ) as sparse:
        wrap(model).generate(ids, max_new_tokens=3, do_sample=False)
    assert sparse.stats()["steps"] == 2 and model.config._attn_implementation == "sdpa"
    with pytest.raises(ConfigError, match="Linear is no model of transformers"), eps(torch.nn.Linear(2, 2), RQ):
        pass


def test_a_compiled_forward_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (ids, _) = tiny("llama"), prompts([300])
    with eps(model, RQ):
        plain = model.generate(ids, max_new_tokens=4, do_sample=False)
    monkeypatch.setattr(model, "forward", torch.compile(model.forward, backend="eager"), raising=False)
    with eps(model, RQ) as sparse:
        assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), plain)
        assert sparse.stats()["steps"] == 3 and not sparse.stats()["fallbacks"]


def test_the_cache_of_an_early_exit_is_its_own() -> None:
    model, (ids, _) = tiny("llama"), prompts([300])
    plain = model.generate(ids, max_new_tokens=6, do_sample=False)
    with eps(model, RQ.replace(budget=1.0)) as sparse:
        said = model.generate(ids, max_new_tokens=6, do_sample=False, assistant_early_exit=1)
    assert torch.equal(said, plain) and not sparse.stats()["fallbacks"]


def test_a_cache_ends_with_its_context() -> None:
    model, (ids, _) = tiny("llama"), prompts([300])
    with eps(model, RQ):
        said = model.generate(ids, max_new_tokens=3, do_sample=False, return_dict_in_generate=True)
    with eps(model, RQ), pytest.raises(ConfigError, match="that is over"):
        model.generate(said.sequences, past_key_values=said.past_key_values, max_new_tokens=3, do_sample=False)


def test_a_metrics_file_that_is_full_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    model, (ids, _) = tiny("llama"), prompts([300])
    with caplog.at_level(logging.ERROR, "eps"), eps(model, RQ, metrics="/dev/full") as sparse:
        model.generate(ids, max_new_tokens=6, do_sample=False)
        assert sparse.stats()["steps"] == 5 and not sparse.stats()["fallbacks"]
    assert caplog.text.count("writes no more to its metrics file: /dev/full cannot be written") == 1


def test_two_models_at_once() -> None:
    one, two, (ids, _) = tiny("llama"), tiny("qwen2"), prompts([300], seed=16)
    alone = []
    for model in (one, two):
        with eps(model, RQ):
            alone.append(model.generate(ids, max_new_tokens=6, do_sample=False))
    with eps(one, RQ) as first, eps(two, method="box", budget=0.4, group_size=16) as second:
        assert torch.equal(one.generate(ids, max_new_tokens=6, do_sample=False), alone[0])
        two.generate(ids, max_new_tokens=6, do_sample=False)
        assert torch.equal(one.generate(ids, max_new_tokens=6, do_sample=False), alone[0])
    assert first.stats()["steps"] == 10 and second.stats()["steps"] == 5
    assert first.stats()["bytes_ratio"] < second.stats()["bytes_ratio"]


def test_two_threads_of_one_model_are_counted_as_one_after_the_other() -> None:
    model, counts = tiny("llama"), []
    with eps(model, RQ) as sparse:
        for workers in (1, 2):
            sparse.reset()
            with ThreadPoolExecutor(workers) as pool:
                for made in pool.map(lambda seed: model.generate(prompts([300], seed)[0], max_new_tokens=12), (1, 2)):
                    assert made.shape == (1, 312)
            counts.append(sparse.stats())
    assert counts[0] == counts[1] and counts[0]["fallbacks"] == {} and counts[0]["steps"] == 22


def test_a_cache_that_was_passed_in_is_left_alone() -> None:
    model, (ids, mask) = tiny("llama"), prompts([60], seed=17)
    plain = generate(model, ids, mask, stock(model))
    with eps(model, RQ) as sparse:
        mine = stock(model)
        assert torch.equal(generate(model, ids, mask, mine), plain)
        assert not eps_layers(mine) and sparse.stats()["steps"] == 0
        made = model.generate(ids, max_new_tokens=3, do_sample=False, return_dict_in_generate=True).past_key_values
        assert len(eps_layers(made)) == 2 and sparse.stats()["steps"] == 2


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
        sparse, paged = cache.sparse, eps_layers(cache)[0].rows.paged
        pool, kept = paged.pool, weakref.ref(paged.cache)
        assert pool.num_live
        del paged, cache
        gc.collect()
    pool.check()
    assert not pool.num_live and kept() is None and sparse.stats()["steps"] == 7
    with eps(model, RQ) as sparse:
        out = model.generate(ids, max_new_tokens=3, do_sample=False, return_dict_in_generate=True)
        kept = weakref.ref(eps_layers(out.past_key_values)[0].rows.paged.cache)
        del out
        gc.collect()
        assert kept() is None


# ---- plans ----


def test_plans_say_what_is_left_and_why(caplog: pytest.LogCaptureFixture) -> None:
    for name in FAMILIES:
        assert plan_of(config_of(name)).sparse == plan_of(tiny(name)).sparse
    plan = plan_of(tiny("gemma3"))
    assert plan.dense == {0: "sliding window of 24", 2: "sliding window of 24"}
    with caplog.at_level(logging.WARNING, "eps"):
        EpsCache(tiny("llama"), RQ)
        assert not caplog.records
        EpsCache(tiny("gemma3"), RQ)
    assert "sparse in 2 of 4 layers; left dense: sliding window of 24 (0 2)" in caplog.text


REFUSED = {
    "mistral with a window": (lambda: config_of("mistral", sliding_window=16), r"sliding window of 16 \(0-1\)"),
    "gemma2": (
        lambda: transformers.Gemma2Config(num_hidden_layers=2, hidden_size=32, vocab_size=64, head_dim=16),
        "soft-capped",
    ),
    "gpt-oss": (lambda: transformers.GptOssConfig(num_hidden_layers=2), "learned sinks"),
    "deepseek": (lambda: transformers.DeepseekV3Config(num_hidden_layers=2), r"latent attention \(MLA\)"),
    "t5": (lambda: transformers.T5Config(num_layers=2), "encoder-decoder"),
    "falcon": (
        lambda: transformers.FalconConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, alibi=True),
        r"ALiBi \(0-1\)",
    ),
    "layers that share": (lambda: config_of("llama", num_kv_shared_layers=1), r"sharing K and V \(0-1\)"),
    "modes of sharing": (
        lambda: config_of("llama", kv_sharing_modes=["cache_config", "reuse"]),
        r"sharing K and V \(0-1\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_sparse_is_refused_by_name(name: str) -> None:
    make, words = REFUSED[name]
    with pytest.raises(ConfigError, match=f"no layer of this model can be sparse.*{words}"):
        EpsCache(make(), RQ)


OWN_ATTENTION = {
    "gpt-neox-japanese": lambda: transformers.GPTNeoXJapaneseConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2
    ),
    "mpt": lambda: transformers.MptConfig(vocab_size=64, d_model=32, n_layers=2, n_heads=2),  # parts without one, too
}


@pytest.mark.parametrize("name", OWN_ATTENTION)
def test_a_model_that_attends_by_itself_is_refused_and_left_as_it_was(name: str, tmp_path: Any) -> None:
    model = transformers.AutoModelForCausalLM.from_config(OWN_ATTENTION[name]())
    before = model.config._attn_implementation
    for _ in range(2):  # the metrics file is free again
        with pytest.raises(ConfigError, match="attention of its own"), eps(model, RQ, metrics=tmp_path / "steps.jsonl"):
            pass
    assert model.config._attn_implementation == before and not model._forward_pre_hooks


def test_settings_are_checked_before_anything_is_touched() -> None:
    model = tiny("llama")
    for wrong, words in (
        ({"methode": "rq"}, "methode"),
        ({}, 'method="rq"'),
        ({"method": "rq", "budget": -1}, "budget"),
    ):
        with pytest.raises(ConfigError, match=words), eps(model, **wrong):
            pass
    for config in (RQ, Settings(RQ)):
        with pytest.raises(ConfigError, match="not both: budget"), eps(model, config, budget=0.1):
            pass
    assert model.config._attn_implementation == "sdpa" and not model._forward_pre_hooks


def test_method_off_is_the_rollback() -> None:
    model, (ids, _) = tiny("llama"), prompts([300])
    with eps(model, method="off") as sparse:
        assert model.config._attn_implementation == "sdpa" and not model._forward_pre_hooks
        model.generate(ids, max_new_tokens=2, do_sample=False)
    assert sparse.stats()["steps"] == 0 and not sparse.stats()["on"]


def test_kernels_that_fail_their_check_are_not_used(monkeypatch: Any, caplog: Any) -> None:
    model, (ids, _) = tiny("llama"), prompts([300])
    monkeypatch.setattr(engine_kernels, "_fault", engine_kernels._fault.__wrapped__)  # asked once a shape, else
    monkeypatch.setattr(KERNELS.score, "run", lambda *args: 1 / 0)
    with eps(model, RQ) as sparse:
        made = model.generate(ids, max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
        assert eps_layers(made.past_key_values)[0].rows.paged.cache.kernels == "arrays"
    assert "array operations instead" in caplog.text and sparse.stats()["fallbacks"] == {}
    assert sparse.stats()["steps"] == 3
    with (
        eps(model, RQ, kernels="numba"),
        pytest.raises(ConfigError, match=r"numba failed their check.*--kernels arrays"),
    ):
        model.generate(ids, max_new_tokens=2, do_sample=False)


def test_a_loop_of_ones_own_has_eps_in_its_empty_cache() -> None:
    """A lazily filled stock cache, as one makes it without a config, gets every layer at once."""
    model, (ids, mask) = tiny("llama"), prompts([50])
    with eps(model, RQ) as sparse, torch.no_grad():
        cache = DynamicCache()
        feed(model, cache, ids, mask, 0, 49)
        feed(model, cache, ids, mask, 49, 50)
    assert sparse.stats()["steps"] == 1 and len(eps_layers(cache)) == 2
