"""Which layers of an mlx-lm model EPS leaves dense, by the name it gives for it; whole families that it refuses are in
test_hook_mlx_lm.py."""

from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_map
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm_models import prompts, teacher_forced, tiny

from eps_mlx.integrations.mlx_lm import eps

SMALL = {"method": "rq", "num_sink_tokens": 4, "num_recent_tokens": 16}


class OwnMask(llama.Attention):
    """Attention whose steps do not see the first token, whatever mask they are given."""

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        if x.shape[1] == 1:
            mask = mx.arange(cache.offset + 1)[None] > 0
        return super().__call__(x, mask, cache)


class TwiceTheSame(llama.Attention):
    """Two attentions of one layer's K and V."""

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        batch, length, _ = x.shape
        queries, keys, values = (
            project(x).reshape(batch, length, heads, -1).transpose(0, 2, 1, 3)
            for project, heads in (
                (self.q_proj, self.n_heads), (self.k_proj, self.n_kv_heads), (self.v_proj, self.n_kv_heads)
            )
        )  # fmt: skip
        keys, values = cache.update_and_fetch(keys, values)
        out = sum(
            llama.scaled_dot_product_attention(one, keys, values, cache=cache, scale=self.scale, mask=mask)
            for one in (queries, -queries)
        )
        return self.o_proj(out.transpose(0, 2, 1, 3).reshape(batch, length, -1))


class TwoWrites(llama.Attention):
    """Two attentions that write to one cache."""

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        first = super().__call__(x, None, cache)
        return first + super().__call__(x, None, cache)


def odd_llama(kind: type[llama.Attention], **more: Any) -> Any:
    """A Llama whose second layer of three has that attention, of the model's arguments but `more`."""
    model = tiny("llama", num_hidden_layers=3)
    args = llama.ModelArgs.from_dict({**vars(model.args), **more})
    mx.random.seed(1)
    own = kind(args)
    own.update(tree_map(lambda one: 0.2 * mx.random.normal(one.shape), own.parameters()))
    model.layers[1].self_attn = own
    return model


# head dim 16; 4 heads of queries and 2 of K and V are the others'
ODD: dict[str, tuple[type[llama.Attention], dict[str, Any], str]] = {
    "mask": (OwnMask, {}, "a mask of its own"),
    "the same K and V twice": (TwiceTheSame, {}, "keys of another layer"),
    "two writes": (TwoWrites, {}, "keys of another layer"),
    "kv heads": (llama.Attention, {"num_key_value_heads": 4}, "heads of another shape"),
    "head dim": (llama.Attention, {"head_dim": 32}, "heads of another shape"),
    "query heads": (llama.Attention, {"num_attention_heads": 8}, "heads of another shape"),
}


def both_ways(model: Any, plan: tuple[tuple[int, ...], dict[int, str]]) -> None:
    """Asserts the plan, and that with everything visited the model says what it says without EPS, bit for bit."""
    prompt, tokens = mx.array(prompts(200)), mx.array(prompts(4, seed=1))
    plain = teacher_forced(model, make_prompt_cache(model), prompt, tokens)
    with eps(model, **SMALL, budget=1) as sparse:
        assert (sparse.plan.sparse, sparse.plan.dense) == plan
        assert mx.array_equal(plain, teacher_forced(model, make_prompt_cache(model), prompt, tokens))
        assert sparse.stats()["rows"] == 4 and sparse.stats()["fallbacks"] == {}
        sparse.config = sparse.config.replace(budget=0.1)
        assert not mx.array_equal(plain, teacher_forced(model, make_prompt_cache(model), prompt, tokens))


@pytest.mark.parametrize("name", ODD)
def test_an_odd_layer_stays_dense_and_says_why(name: str) -> None:
    kind, more, reason = ODD[name]
    both_ways(odd_llama(kind, **more), ((0, 2), {1: reason}))


def test_a_layer_of_another_dtype_stays_dense() -> None:
    model = odd_llama(llama.Attention)
    model.layers[1].self_attn.set_dtype(mx.bfloat16)
    model.layers[1].input_layernorm.set_dtype(mx.bfloat16)
    cast = model.layers[1].input_layernorm
    model.layers[1].input_layernorm = lambda x: cast(x.astype(mx.bfloat16))
    both_ways(model, ((0, 2), {1: "heads of another shape"}))


def test_a_layer_whose_keys_others_attend_stays_dense() -> None:
    """Gemma 4's last layers have neither keys nor a cache: they are handed what an earlier layer's cache has given."""
    full, sliding = "full_attention", "sliding_attention"
    model = tiny(
        "gemma4_text", num_hidden_layers=5, num_kv_shared_layers=2, layer_types=[full, sliding, full, sliding, full],
        global_head_dim=16, hidden_size_per_layer_input=0,
    )  # fmt: skip
    both_ways(model, ((0,), {1: "sliding window", 2: "keys for other layers"}))
