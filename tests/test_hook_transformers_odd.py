"""Models and calls that transformers allows and EPS leaves dense: each by its own name, as the engine attends it."""

import copy
from typing import Any

import pytest
import torch
import transformers
from hf_models import RQ, WHOLE, Attending, both, eps_layers, feed, prompts, stock, tiny
from hf_models import tiny_config as config_of
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from eps_core.errors import ConfigError
from eps_core.integrations import versions
from eps_cuda.integrations.transformers import EpsCache, eps, plan_of

# ---- single calls ----


def one_step(model: Any, cache: Any, **more: Any) -> Any:
    """Logits of the 60th token, with `more` for attention alone; torch's draws are the same each time."""
    ids, _ = prompts([60], seed=21)
    torch.manual_seed(0)
    model(ids[:, :59], past_key_values=cache)
    return model(ids[:, 59:], past_key_values=cache, **more).logits


BIAS = torch.linspace(-4, 4, 4 * 60).reshape(1, 4, 1, 60)


@pytest.mark.parametrize(
    ("reason", "rate", "more"), [("dropout", 0.5, {}), ("position bias", 0, {"position_bias": BIAS})]
)
def test_what_attention_is_asked_for_besides_is_the_engines_and_counted(reason: str, rate: float, more: Any) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_of("llama", attention_dropout=rate))
    model.train(rate > 0)  # where transformers drops nothing else of a Llama
    with torch.no_grad():
        with Attending(model, "sdpa"):
            plain = one_step(model, stock(model), **more)
            assert not torch.equal(plain, one_step(model.eval(), stock(model)))
            model.train(rate > 0)
        with Attending(model):
            cache = EpsCache(model, RQ)
            assert torch.equal(one_step(model, cache, **more), plain)
            assert cache.sparse.stats()["fallbacks"] == {reason: 2}
            cache.reset()
            cache.sparse.reset()
            one_step(model.eval(), cache)
            assert cache.sparse.stats()["fallbacks"] == {}


def test_learned_sinks_that_reach_attention_are_refused() -> None:
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.GptOssConfig(
            vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, head_dim=16, num_local_experts=2, num_experts_per_tok=1,
        )
    )  # fmt: skip
    with (
        Attending(model),
        pytest.raises(ConfigError, match=r'learned sinks of GptOssAttention.*implementation="eager"'),
    ):
        model(torch.ones(1, 3, dtype=torch.int64))


@pytest.mark.parametrize(
    ("layer", "heads", "width", "value_width", "words"),
    [
        (1, 4, 16, 16, "layer 1 has 4 kv heads of 16 and values of 16, the first sparse one 2 of 16"),
        (1, 2, 8, 8, "layer 1 has 2 kv heads of 8 and values of 8, the first sparse one 2 of 16"),
        (1, 2, 16, 8, "layer 1 has 2 kv heads of 16 and values of 8, the first sparse one 2 of 16"),
        (0, 2, 16, 8, "layer 0 has 2 kv heads of 16 and values of 8, the first sparse one 2 of 16"),
    ],
)
def test_layers_of_several_shapes_are_one_line(
    layer: int, heads: int, width: int, value_width: int, words: str
) -> None:
    model = tiny("llama")

    def attend(at: int, heads: int, width: int, value_width: int) -> None:
        module = model.model.layers[at].self_attn
        key, value = cache.update(torch.zeros(1, heads, 5, width), torch.zeros(1, heads, 5, value_width), at)
        ALL_ATTENTION_FUNCTIONS["eps"](module, torch.zeros(1, 4, 5, width), key, value, None, scaling=0.25)

    with Attending(model):
        cache = EpsCache(model, RQ)
        for below in range(layer):
            attend(below, 2, 16, 16)
        with pytest.raises(ConfigError, match=f"{words}: EPS supports layers of one shape"):
            attend(layer, heads, width, value_width)
    assert not eps_layers(cache)[0].rows.broken


def test_a_batch_may_be_taken_back_into_a_rows_padding() -> None:
    """The row whose tokens are all gone begins again, with other padding."""
    model, (ids, mask) = tiny("llama"), prompts([40, 12], seed=22)
    more, hides = torch.randint(1, 256, (2, 9), generator=torch.manual_seed(1)), torch.ones(2, 9, dtype=torch.int64)
    hides[1, :3] = 0
    found = []
    for cache in both(model, WHOLE):
        feed(model, cache, ids, mask, 0, 40)
        cache.crop(-35)
        assert cache.get_seq_length() == 5
        again, seen = torch.cat([ids[:, :5], more], 1), torch.cat([mask[:, :5], hides], 1)
        logits = [feed(model, cache, again, seen, 5, 12)[:, -1], feed(model, cache, again, seen, 12, 13)[:, -1]]
        cache.crop(-2)
        found.append([*logits, feed(model, cache, again, seen, 11, 12)[:, -1]])
    assert all(torch.equal(mine, its) for mine, its in zip(found[1], found[0], strict=True))
    assert cache.sparse.stats()["fallbacks"] == {} and cache.sparse.stats()["rows"] == 4


def test_tokens_that_a_mask_hides_in_the_midst_are_not_drafted_over() -> None:
    model, (ids, mask) = tiny("llama"), prompts([290], seed=3)
    mask[0, 20:27] = 0
    how = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 8}
    plain = model.generate(ids, **how)
    with eps(model, RQ, verify="tokens", draft=4) as sparse:
        assert torch.equal(model.generate(ids, **how), plain)
        found = sparse.stats()["verified"]
    assert found["fallbacks"] == {"mask": found["rounds"]} == {"mask": 7} and not found["drafted"]


# ---- plans ----


def test_learned_sinks_are_found_by_a_parameters_name() -> None:
    model = copy.deepcopy(tiny("llama"))
    assert plan_of(model).sparse == (0, 1)
    model.model.layers[1].self_attn.register_parameter("sinks", torch.nn.Parameter(torch.zeros(4)))
    with pytest.raises(ConfigError, match=r"no layer of this model can be sparse.*learned sinks \(0-1\)"):
        EpsCache(model, RQ)


def test_layers_that_look_at_a_picture_stay_dense() -> None:
    text = transformers.MllamaConfig().text_config
    text.num_hidden_layers, text.cross_attention_layers = 4, [1, 3]
    plan = plan_of(text)
    assert plan.sparse == (0, 2) and plan.dense == {1: "cross attention", 3: "cross attention"}


def test_the_version_is_checked(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(versions.TESTED, "transformers", ("0.1", "0.1"))
    EpsCache(tiny("llama"), RQ)
    assert "outside the versions that EPS is tested with, 0.1" in caplog.text
