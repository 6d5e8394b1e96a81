"""transformers' `generate` with a cache that is EPS's: beams, sampling, drafts, turns, pipelines."""

import copy
import gc
from typing import Any

import pytest
import torch
import transformers
from hf_models import (
    RQ,
    WHOLE,
    Attending,
    Reference,
    both,
    eps_layers,
    feed,
    generate,
    gone,
    live_sequences,
    prompts,
    stock,
    tiny,
)
from tiny_models import save_model
from transformers import AutoTokenizer, LogitsProcessor, pipeline

from eps_cuda.integrations.transformers import EpsCache, eps

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
    for cache in both(model, WHOLE):
        torch.manual_seed(5)
        said.append(generate(model, ids, mask, cache, **WAYS[way]))
    assert torch.equal(*said)
    gone(cache)
    assert cache.sparse.stats()["bytes_ratio"] == 1


@pytest.mark.parametrize("way", ["greedy", "sampling", "beams", "several"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_sparse_every_way_says_what_the_reference_says(name: str, way: str) -> None:
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
    assert ours.sparse.stats()["fallbacks"] == {}
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
        # tokens whose drafts were all wrong come of sparse steps, others of dense ones
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
    with eps(model, WHOLE) as sparse, eps(assistant, RQ) as drafts:
        said = model.generate(ids, assistant_model=assistant, max_new_tokens=12, do_sample=False)
    assert torch.equal(said, plain)
    assert drafts.stats()["steps"] > 0 and drafts.stats()["bytes_ratio"] < 0.5 and sparse.stats()["fallbacks"] == {}


def test_turns_go_on_in_one_cache() -> None:
    model, (ids, mask) = tiny("mistral"), prompts([80, 66], seed=9)
    more = torch.randint(1, 256, (2, 11), generator=torch.manual_seed(0))
    said = []
    for cache in both(model, WHOLE):
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


def test_rounds_of_texts_that_are_generated_at_once_are_counted_each_for_itself() -> None:
    """One text is generated in the midst of the other's rounds: threads would do so whenever they like."""
    model, first, second = tiny("llama"), prompts([290], seed=3)[0], prompts([310], seed=4)[0]
    how = {"do_sample": False, "max_new_tokens": 16}
    nested: list[Any] = []

    class Within(LogitsProcessor):
        calls = 0

        def __call__(self, ids: Any, scores: Any) -> Any:
            self.calls += 1
            if self.calls == 4:  # of drafts, and of a verify pass
                nested.append(model.generate(second, **how))
            return scores

    def rounds(ids: Any, **more: Any) -> Any:
        with eps(model, RQ, verify="tokens", draft=4) as sparse:
            sparse.keep_records = True
            model.generate(ids, **how, **more)
            records = [one.to_dict() for one in sparse.take_rounds()]
            assert min(one["draft_ms"] for one in records) >= 0
            for name in ("bytes_kv_draft", "bytes_summary_draft"):
                assert all((one[name] > 0) == (sum(one["drafted"]) > 0) for one in records)
            own = [{n: v for n, v in one.items() if n != "step" and not n.endswith("_ms")} for one in records]
            return sorted(own, key=str)

    alone, other = rounds(first), rounds(second)
    found = rounds(first, logits_processor=[Within()])
    assert len(nested) > 1 and found == sorted(alone + len(nested) * other, key=str)


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
    for cache in both(model, WHOLE):
        feed(model, cache, ids, mask, 0, 39)
        cache.batch_repeat_interleave(2)
        with pytest.raises(IndexError):
            cache.batch_select_indices(torch.tensor([0, 4]))
        cache.batch_select_indices(torch.tensor([-1, 0, 3]))
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
    with eps(model, WHOLE) as sparse:
        assert text(**asked) == plain
    assert sparse.stats()["steps"] == 5 and sparse.stats()["rows"] == 10
    with eps(model, method="box", group_size=2, budget=0.2, num_sink_tokens=2, num_recent_tokens=4) as sparse:
        text(**asked)
    assert sparse.stats()["groups_selected"] < 0.4 * sparse.stats()["groups_total"]
    assert text(**asked) == plain
