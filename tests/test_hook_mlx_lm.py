"""EPS inside mlx-lm: with everything visited its own logits bit for bit, and sparse what our own decoder reads; its
batches, chunks and families. Caches' lives are in test_hook_mlx_lm_caches.py, the engine in test_hook_mlx_lm_engine.py.
"""

import gc
import logging
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models import base, gemma3_text, llama
from mlx_lm.models import cache as mlx_caches
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm_models import FAMILIES, alone, prompts, teacher_forced, tiny, together
from tiny_models import save_model

from eps_core.errors import ConfigError
from eps_core.integrations import kernels as engine_kernels
from eps_core.integrations import versions
from eps_core.integrations.settings import Settings
from eps_mlx import open_units
from eps_mlx.integrations.mlx_lm import eps, hook_of, load, names
from eps_mlx.integrations.mlx_lm.hook import Hook
from eps_mlx.kernels.cpu import KERNELS

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16}
SMALL = {"method": "rq", "num_sink_tokens": 4, "num_recent_tokens": 16}
STOCK = base.scaled_dot_product_attention


def pool_of(model: Any) -> Any:
    hook = hook_of(model)
    assert hook is not None and hook.pool is not None
    return hook.pool


def assert_empty(pool: Any) -> None:
    """Nothing of any prompt is left in the pool."""
    gc.collect()
    assert pool.num_live == 0
    assert pool.paged.pool.num_free == pool.paged.pool.num_units
    pool.paged.pool.check()


def assert_equal(first: mx.array, second: mx.array) -> None:
    assert first.dtype == second.dtype and bool(mx.array_equal(first, second)), float(mx.abs(first - second).max())


# ---- the same as without EPS ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_everything_visited_or_switched_off_gives_the_familys_own_logits(family: str, dtype: str) -> None:
    model = tiny(family, DTYPES[dtype])
    prompt, tokens = mx.array(prompts(300, 300)), mx.array(prompts(5, 5, seed=1))
    plain = teacher_forced(model, make_prompt_cache(model), prompt, tokens)
    with eps(model, **SMALL, budget=1) as sparse:
        assert_equal(plain, teacher_forced(model, make_prompt_cache(model), prompt, tokens))
        stats = sparse.stats()
        assert stats["rows"] == 10 and stats["bytes_ratio"] == 1 and not stats["fallbacks"]
        sparse.config = sparse.config.replace(budget=0.1)
        few = teacher_forced(model, make_prompt_cache(model), prompt, tokens)
        assert_equal(plain[0], few[0])  # of the prompt's chunks, which are dense
        assert not mx.array_equal(plain[1], few[1]) and sparse.stats()["bytes_ratio"] < 0.8
        sparse.on = False
        sparse.reset()
        assert_equal(plain, teacher_forced(model, make_prompt_cache(model), prompt, tokens))
        assert sparse.stats()["rows"] == 0
    assert_equal(plain, teacher_forced(model, make_prompt_cache(model), prompt, tokens))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "lfm2"])
def test_a_continuous_batch_of_unequal_prompts_is_mlx_lms_own(family: str, dtype: str) -> None:
    model = tiny(family, DTYPES[dtype])
    first, later = prompts(150, 97, 203, 2), prompts(1, 64, seed=1)
    plain = together(model, first, later)
    with eps(model, **SMALL, budget=1) as sparse:
        pool = pool_of(model)
        found = together(model, first, later)
        assert found[0] == plain[0]
        for index, logprobs in plain[1].items():
            assert_equal(logprobs, found[1][index])
        # each token but the first one comes from a step, and mlx-lm is one step ahead of what it says
        assert sparse.stats()["rows"] >= sum(map(len, plain[0].values())) and not sparse.stats()["fallbacks"]
        assert_empty(pool)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_attention_of_eps_over_everything_is_the_familys_to_rounding(family: str) -> None:
    """All is always selected and nothing is within the budget, so EPS attends: scale, heads and order are right."""
    model = tiny(family)
    prompt, tokens = mx.array(prompts(300, 300)), mx.array(prompts(5, 5, seed=1))
    plain = teacher_forced(model, make_prompt_cache(model), prompt, tokens)
    with eps(model, method="rq", budget=0.5, num_recent_tokens=4096) as sparse:
        found = teacher_forced(model, make_prompt_cache(model), prompt, tokens)
        stats = sparse.stats()
        assert stats["bytes_summary_read"] > 0 and stats["groups_selected"] == stats["groups_total"]
    np.testing.assert_allclose(np.array(found), np.array(plain), atol=2e-4)
    assert not mx.array_equal(found, plain)  # or mlx-lm would have attended


def test_off_touches_nothing() -> None:
    model = tiny("llama")
    with eps(model, method="off") as sparse:
        assert hook_of(model) is None and "make_cache" not in model.__dict__
        assert base.scaled_dot_product_attention is STOCK and not hasattr(mlx_caches, "EpsKVCache")
        assert sparse.stats()["steps"] == 0


# ---- sparse ----


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_sparse_batch_reads_what_each_prompt_reads_alone(family: str) -> None:
    model, differ = tiny(family), 0
    first, later = prompts(300, 97, 203, 2), prompts(1, 64, seed=1)
    with eps(model, **SMALL, budget=0.2) as sparse:
        tokens, logprobs = together(model, first, later)
        stats = sparse.stats()
        assert stats["bytes_ratio"] < 0.5 and not stats["fallbacks"]
        for index, prompt in enumerate([*first, *later]):
            said, alike = alone(model, prompt, len(tokens[index]))
            same = said == tokens[index] and np.allclose(np.array(alike), np.array(logprobs[index]), atol=2e-4)
            differ += not same
        # a query that lies between two whole numbers may round the other way where a batch's products add in another
        # order: once in some thousand dimensions, of codes that ask it so
        assert differ <= 1
        assert_empty(pool_of(model))


def test_head_modes_are_the_models_layers(tmp_path: Path) -> None:
    """Of four layers every other one is sparse, and of those the first alone reads less."""
    model = tiny("gemma3_text", num_hidden_layers=4)
    modes = (("window", "window"), ("sparse", "sparse"), ("window", "window"), ("dense", "dense"))
    hook = Hook(model, Settings.of({**SMALL, "budget": 0.2, "head_modes": modes}), keep_lists=True)
    try:
        alone(model, *prompts(300), 1)
        hook.sparse.settle()
        assert all(step[0] is not None and step[1] is None for step in hook.sparse.lists) and hook.sparse.lists
    finally:
        hook.close()
    for _ in range(2):  # the metrics file is free again
        with pytest.raises(ConfigError, match="head modes of 1 kv heads"):
            eps(model, **SMALL, head_modes=(("sparse",),) * 4, metrics=tmp_path / "steps.jsonl").__enter__()
    assert base.scaled_dot_product_attention is STOCK


@pytest.mark.parametrize("kernels", ["arrays", "numba"])
def test_another_thread_may_generate_and_counts_are_asked_for_after_it(kernels: str) -> None:
    model, said = tiny("llama"), []
    (prompt,) = prompts(300)
    with eps(model, **SMALL, budget=0.2, kernels=kernels) as sparse:
        thread = threading.Thread(target=lambda: said.append(alone(model, prompt, 12)[0]))
        thread.start()
        thread.join()
        assert sparse.stats()["rows"] == 13 and sparse.stats()["bytes_ratio"] < 0.4
        assert said == [alone(model, prompt, 12)[0]]


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_weights(bits: int, tmp_path: Path) -> None:
    stored, converted = save_model("llama2-bf16-sharded", tmp_path / "stored"), str(tmp_path / "converted")
    mlx_lm.convert(str(stored), converted, quantize=True, q_bits=bits, q_group_size=32)
    model = mlx_lm.load(converted)[0]
    assert isinstance(model.layers[0].self_attn.q_proj, nn.QuantizedLinear)
    (prompt,) = prompts(300)
    plain = alone(model, prompt)
    with eps(model, **SMALL, budget=1):
        assert_equal(plain[1], alone(model, prompt)[1])
    with eps(model, **SMALL, budget=0.1) as sparse:
        alone(model, prompt)
        assert sparse.stats()["bytes_ratio"] < 0.4


def test_speculative_decoding_says_what_the_dense_model_says() -> None:
    model, draft = tiny("llama"), tiny("llama", seed=1, num_hidden_layers=1)
    (prompt,) = prompts(200)
    plain, _ = alone(model, prompt, 12)
    with eps(model, **SMALL, budget=0.1):
        pool = pool_of(model)
        said = [token for token, _, _ in speculative_generate_step(mx.array(prompt), model, draft, max_tokens=12)]
        assert said == plain  # rows that are verified several at a time are dense
        assert_empty(pool)
    with eps(draft, **SMALL, budget=0.1) as sparse:  # a sparse drafter
        said = [token for token, _, _ in speculative_generate_step(mx.array(prompt), model, draft, max_tokens=12)]
        assert said == plain and sparse.stats()["rows"] > 0


def test_a_directory_is_loaded_with_eps_on_and_generates(tmp_path: Path) -> None:
    path = save_model("qwen3", tmp_path / "model")
    plain, tokenizer = mlx_lm.load(str(path))
    texts = [tokenizer.encode("a" * 300), tokenizer.encode("tell me")]
    said = mlx_lm.batch_generate(plain, tokenizer, texts, max_tokens=6, return_prompt_caches=True)
    one = mlx_lm.generate(plain, tokenizer, texts[0], max_tokens=6)
    model, tokenizer = load(path, **SMALL, budget=1)
    hook = hook_of(model)
    assert hook is not None
    try:
        found = mlx_lm.batch_generate(model, tokenizer, texts, max_tokens=6, return_prompt_caches=True)
        assert found.texts == said.texts
        assert [cache[0].offset for cache in found.caches] == [cache[0].offset for cache in said.caches]
        assert mlx_lm.generate(model, tokenizer, texts[0], max_tokens=6) == one
        assert hook.sparse.stats()["rows"] >= 18
        pool = hook.pool
        assert pool is not None and pool.num_live == 2  # the two caches that were asked for
        del found
        assert_empty(pool)
    finally:
        hook.close()
    with pytest.raises(ConfigError, match="unknown EPS setting budgte"):
        load(path, method="rq", budgte=0.1)


# ---- installed and taken off ----


def bindings() -> dict[str, Any]:
    """Modules that have mlx-lm's attention, or what stands for it."""
    found = {name: getattr(module, "__dict__", {}).get(names.ATTENTION) for name, module in sys.modules.items()}
    return {
        name: one for name, one in found.items() if one in (STOCK, names.attention) and not name.startswith("eps_mlx")
    }


def test_everything_is_put_back_after_an_exception_too() -> None:
    model, before = tiny("qwen2"), bindings()
    assert len(before) > 3 and set(before.values()) == {STOCK}
    with pytest.raises(ZeroDivisionError), eps(model, **SMALL):
        assert bindings() == dict.fromkeys(before, names.attention)
        assert mlx_caches.EpsKVCache is type(make_prompt_cache(model)[0])
        raise ZeroDivisionError
    assert bindings() == before and not hasattr(mlx_caches, "EpsKVCache")
    assert "make_cache" not in model.__dict__ and hook_of(model) is None
    assert type(make_prompt_cache(model)[0]) is mlx_caches.KVCache


def test_two_models_at_once_and_left_in_any_order() -> None:
    first, second = tiny("llama"), tiny("gemma3_text", seed=1)
    (prompt,) = prompts(300)
    plain = [alone(model, prompt)[1] for model in (first, second)]
    outer, inner = eps(first, **SMALL, budget=1), eps(second, **SMALL, budget=1)
    counts = [outer.__enter__(), inner.__enter__()]
    with pytest.raises(ConfigError, match="EPS on already"):
        eps(first, **SMALL).__enter__()
    for model, logprobs in zip((first, second), plain, strict=True):
        assert_equal(alone(model, prompt)[1], logprobs)
    assert [one.stats()["rows"] for one in counts] == [9, 9]
    outer.__exit__(None, None, None)
    assert llama.scaled_dot_product_attention is not STOCK  # the other model needs it still
    assert_equal(alone(second, prompt)[1], plain[1])
    assert_equal(alone(first, prompt)[1], plain[0])
    assert [one.stats()["rows"] for one in counts] == [9, 18]
    inner.__exit__(None, None, None)
    assert llama.scaled_dot_product_attention is STOCK and gemma3_text.scaled_dot_product_attention is STOCK


def test_a_model_that_is_dropped_takes_eps_with_it() -> None:
    model = tiny("llama")
    Hook(model, Settings.of(SMALL))
    pool, gone = weakref.ref(pool_of(model)), weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None and pool() is None
    assert base.scaled_dot_product_attention is STOCK and not hasattr(mlx_caches, "EpsKVCache")


def test_a_model_that_cannot_be_reached_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    for module in list(sys.modules.values()):
        if module is not base and getattr(module, "__dict__", {}).get(names.ATTENTION) is STOCK:
            monkeypatch.delattr(module, names.ATTENTION)
    with pytest.raises(ConfigError, match="no loaded model binds"):
        eps(model, **SMALL).__enter__()
    assert base.scaled_dot_product_attention is STOCK


# ---- what goes wrong ----


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno == logging.ERROR]


def test_an_exception_inside_eps_attends_densely_counts_and_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny("llama")
    (prompt,) = prompts(300)
    plain = alone(model, prompt)

    def fail(*args: Any) -> Any:
        raise ZeroDivisionError("in a score")

    with eps(model, **SMALL, budget=0.1) as sparse, caplog.at_level(logging.ERROR, "eps"):
        with monkeypatch.context() as patch:
            patch.setattr(KERNELS.attend_fused, "run", fail)
            assert_equal(plain[1], alone(model, prompt)[1])
        assert sparse.stats()["fallbacks"] == {"error": 2 * 9}
        assert ["ZeroDivisionError" in line for line in errors(caplog)] == [True]
        assert "in a score" in caplog.text and "Traceback" in caplog.text
        assert not mx.array_equal(plain[1], alone(model, prompt)[1])  # and on it goes


def test_a_summary_that_fails_leaves_k_and_v_and_nothing_is_sparse_from_then_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from eps_core.backend import cache as eps_cache

    model = tiny("llama")
    (prompt,) = prompts(300)
    plain = alone(model, prompt)
    with eps(model, **SMALL, budget=0.1) as sparse, caplog.at_level(logging.ERROR, "eps"):
        with monkeypatch.context() as patch:
            patch.setattr(eps_cache, "_summarise", lambda *args: 1 / 0)
            assert_equal(plain[1], alone(model, prompt)[1])
        assert sparse.stats()["fallbacks"] == {"error": 2 * 9}
        assert_equal(plain[1], alone(model, prompt)[1])  # no summary of this pool is believed again
        assert len(errors(caplog)) == 1


def test_sinks_and_masks_that_come_up_later_are_dense_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    (prompt,) = prompts(300)
    with eps(model, **SMALL, budget=0.1) as sparse:
        found = {}
        for reason, more in {
            "sinks": {"sinks": mx.zeros(4)},
            "mask": {"mask": mx.ones((1, 1, 1, 1), mx.bool_)},
        }.items():
            sparse.reset()

            def changed(*args: Any, more: Any = more, **kwargs: Any) -> Any:
                more = more if args[0].shape[2] == 1 else {}
                return names.attention(*args, **{**kwargs, **more})

            monkeypatch.setattr(llama, names.ATTENTION, changed)
            alone(model, prompt)
            found[reason] = sparse.stats()["fallbacks"]
        monkeypatch.setattr(llama, names.ATTENTION, names.attention)
    assert found == {"sinks": {"sinks": 18}, "mask": {"mask": 18}}


def test_kernels_that_fail_their_check_are_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What MLX computes later cannot be caught, so kernels are asked before."""
    model = tiny("llama")
    monkeypatch.setattr(engine_kernels, "_fault", engine_kernels._fault.__wrapped__)  # asked once a shape, else
    monkeypatch.setattr(KERNELS.score, "run", lambda *args: 1 / 0)
    with pytest.raises(ConfigError, match=r"kernels numba failed their check on this device .* --kernels arrays"):
        eps(model, **SMALL, kernels="numba").__enter__()
    with eps(model, **SMALL, budget=0.1) as sparse:
        assert "array operations instead" in caplog.text
        alone(model, *prompts(300))
        assert sparse.stats()["fallbacks"] == {} and sparse.stats()["bytes_ratio"] < 0.4
        assert pool_of(model).paged.cache.kernels == "arrays"


ODD: dict[str, tuple[str, dict[str, Any], str]] = {
    "latent keys": (
        "deepseek_v2",
        {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
         "n_routed_experts": None, "rope_scaling": {"type": "yarn", "factor": 2.0, "mscale_all_dim": 0.5}},
        r"latents of rank 16 \(MLA\)",
    ),
    "soft-capping": (
        "gemma2",
        {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        r"attention of its own \(0-1\)",
    ),
    "sinks": (
        "gpt_oss",
        {"num_local_experts": 2, "num_experts_per_tok": 1},
        r"sliding window \(0\), attention sinks \(1\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_what_cannot_be_sparse_is_refused_by_name(name: str) -> None:
    family, more, message = ODD[name]
    model = tiny(family, **more)
    with pytest.raises(ConfigError, match=message):
        eps(model, **SMALL).__enter__()
    assert base.scaled_dot_product_attention is STOCK and hook_of(model) is None


def test_layers_that_slide_are_named_in_the_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with eps(tiny("gemma3_text", num_hidden_layers=5, sliding_window_pattern=3), **SMALL) as sparse:
        assert sparse.plan.sparse == (2,)
    assert "sparse in 1 of 5 layers; left dense: sliding window (0-1 3-4)" in caplog.text
    with eps(tiny("lfm2"), **SMALL) as sparse:
        assert sparse.plan.dense == {0: "no attention", 2: "no attention"}


def test_a_quantised_kv_cache_is_refused() -> None:
    model = tiny("llama")
    with eps(model, **SMALL):
        cache = make_prompt_cache(model)
        with pytest.raises(ConfigError, match="KV cache of 4 bits"):
            list(generate_step(mx.array([1, 2, 3]), model, prompt_cache=cache, kv_bits=4, quantized_kv_start=0))


def test_the_version_is_checked(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(versions.TESTED, "mlx-lm", ("0.1", "0.1"))
    with eps(tiny("llama"), **SMALL):
        assert "outside the versions that EPS is tested with, 0.1" in caplog.text


# ---- memory and waits ----


def test_a_step_waits_for_nothing(tmp_path: Path) -> None:
    """Over array operations, which are a GPU's too: after a step's forward nothing of it has been computed yet."""
    model = tiny("llama")
    (prompt,) = prompts(400)

    def uncomputed(cache: Any) -> list[int]:
        model(mx.array([prompt]), cache=cache)
        mx.eval([one.state for one in cache])
        found = []
        for _ in range(3):
            logits = model(mx.array([[7]]), cache=cache)
            mx.export_to_dot(str(tmp_path / "graph"), logits)
            found.append((tmp_path / "graph").read_text().count("Rsqrt"))
            mx.async_eval(logits)
        return found

    plain = uncomputed(make_prompt_cache(model))
    assert plain == [5, 5, 5]  # norms, two a layer and the last
    with eps(model, **SMALL, budget=0.2, kernels="arrays") as sparse:
        assert uncomputed(make_prompt_cache(model)) == plain
        assert sparse.stats()["bytes_ratio"] < 0.4


def test_on_a_gpu_a_step_waits_once_for_the_one_before_where_pools_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of the step before would hold the pools that it writes."""
    model, waits = tiny("llama"), []
    (prompt,) = prompts(400)
    monkeypatch.setattr(open_units.mx, "synchronize", lambda *stream: waits.append(stream))
    with eps(model, **SMALL, budget=0.2, kernels="arrays"):
        cache = make_prompt_cache(model)
        mx.eval(model(mx.array([prompt]), cache=cache))
        pool = pool_of(model)
        held = sum(one.nbytes for one in (*pool.paged.cache.k, *pool.paged.cache.v))
        for gpu, least, wanted in (("mps", 0, 0), ("cpu", held + 1, 0), ("cpu", held, 3)):
            monkeypatch.setattr(open_units, "GPU", gpu)
            monkeypatch.setattr(open_units, "HELD_BYTES", least)
            for _ in range(3):
                mx.eval(model(mx.array([[7]]), cache=cache))
            assert len(waits) == wanted


@pytest.mark.parametrize(("kernels", "budget"), [("numba", 0.2), ("arrays", 0.2), ("arrays", 1)])
def test_memory_does_not_grow_with_steps(kernels: str, budget: float) -> None:
    """Numbers and flags that no logit needs must be computed with their step: what is only asked for later would hold
    the step's other arrays."""
    model = tiny("llama")
    (prompt,) = prompts(400)
    with eps(model, **SMALL, budget=budget, kernels=kernels):
        cache = make_prompt_cache(model)
        model(mx.array([prompt]), cache=cache)
        mx.eval([one.state for one in cache])
        gc.collect()  # what other tests left
        held = []
        for _ in range(60):
            mx.eval(model(mx.array([[7]]), cache=cache))
            held.append(mx.get_active_memory())
    assert max(held[20:]) - min(held[20:]) < 40_000
