"""Sparse inside vLLM: what our own decoder does with the same settings, needle by needle and list by list."""

from pathlib import Path
from typing import Any

import engines
import numpy as np
import pytest

from eps_core.config.eps import EpsConfig
from eps_core.decode import layers as layers_module
from eps_core.decode.generate import generate
from eps_core.decode.sampling import Sampling
from eps_core.decode.session import Session
from eps_core.integrations.settings import Settings
from eps_core.kv_cache.pool import PagePool
from eps_cuda.integrations.vllm import adapter, rows

NEW_TOKENS = 12


def own_decoder(
    settings: dict[str, Any], prompt: list[int], tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[np.ndarray], list[list[list[np.ndarray]]]]:
    """(logits [V] of each decode step, the groups that each step's layers visit, by kv head) of our decoder, fed what
    vLLM said."""
    session = Session.open(str(engines.DEMO), "cuda", "cpu", "float32", kernels="numba", **settings)
    config = EpsConfig.of(**settings)
    logits: list[np.ndarray] = []
    lists: list[list[list[np.ndarray]]] = []
    real = layers_module.sparse_attention

    def watched(eps: Any, cache: Any, layer: int, *args: Any, **more: Any) -> Any:
        out, read = real(eps, cache, layer, *args, **more)
        if layer == 0:
            lists.append([])
        assert read.selection is not None
        groups, counts = (eps.to_numpy(part)[0] for part in (read.selection.groups, read.selection.counts))
        lists[-1].append([head[:count] for head, count in zip(groups, counts, strict=True)])
        return out, read

    monkeypatch.setattr(layers_module, "sparse_attention", watched)
    spec = session.cache_spec(config.cache_config, len(prompt) + NEW_TOKENS)
    cache = session.decoder.backend.new_cache(spec, config.cache_config, "cpu", "numba")
    pool = PagePool(spec.num_units, config.cache_config.unit_tokens)
    for record in generate(
        session.decoder, cache, pool, [[*prompt, tokens[0]]], len(tokens) - 1, Sampling(), config.selection_config,
        prefill_chunk=256, forced_tokens=[tokens[1:]], keep_logits=True,
    ):  # fmt: skip
        logits.append(record.logits[0])
    monkeypatch.undo()
    return logits, lists


@pytest.mark.parametrize(
    "settings",
    [
        # rq rounds queries: one that is rounded otherwise, as one of other products may be, moves whole estimates
        {"method": "meanstd", "budget": 0.1},
        {"method": "meanstd", "budget": 0.05, "scope": "union"},
        {"method": "box", "budget": 0.2},
        {"method": "moments", "group_size": 16, "epsilon": 0.05, "strict": True},
    ],
    ids=lambda settings: settings["method"] + settings.get("scope", ""),
)
def test_steps_are_those_of_our_own_decoder(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    [prompt], _ = engines.needles(1500)
    with engines.engine(engines.DEMO, settings) as llm:
        sparse = engines.runtime(llm).sparse
        assert sparse is not None
        sparse.keep_lists = True
        [(tokens, best)] = engines.say(llm, [prompt], NEW_TOKENS)
        found = engines.stats(llm)
        lists = sparse.lists
    logits, wanted = own_decoder(settings, prompt, tokens, monkeypatch)
    assert len(wanted) == len(lists) == len(logits) == found["steps"] == NEW_TOKENS - 1
    same = selected = 0
    for step, layers in enumerate(wanted):
        # the first token comes from the prefill
        mine, theirs = best[step + 1], logits[step] - np.logaddexp.reduce(logits[step].astype(np.float64))
        assert all(abs(value - theirs[token]) < 5e-3 for token, value in mine.items())
        for layer, heads in enumerate(layers):
            rows = lists[step][layer]
            assert rows is not None
            for head, groups in enumerate(heads):
                same += len(np.intersect1d(rows[0][head], groups, assume_unique=True))
                selected += max(len(rows[0][head]), len(groups))
    # K comes from other matrix products, equal to rounding: a sign of a code may turn, and two groups change places
    assert same >= 0.998 * selected, f"{selected - same} of {selected} groups differ"


def test_needles_are_answered_dense_and_sparse() -> None:
    asked, answers = engines.needles(8000, 6000, 7001, 4003)
    more = {"max_model_len": 8320, "max_num_batched_tokens": 1024}
    with engines.engine(engines.DEMO, {"method": "rq", "budget": 0.05}, **more) as llm:
        said = engines.say(llm, asked, 6, logprobs=None)
        found = engines.stats(llm)
        assert [engines.text(tokens)[:5] for tokens, _ in said] == answers
        assert 0.05 < found["bytes_ratio"] < 0.1 and found["groups_selected"] < 0.06 * found["groups_total"]
        assert not found["fallbacks"] and found["rows"] == 4 * 5
        # from the prefix cache now, with the summaries that lie beside it
        llm.collective_rpc("eps_reset")
        again = engines.say(llm, asked, 6, logprobs=None)
        assert [engines.text(tokens)[:5] for tokens, _ in again] == answers
        assert engines.stats(llm)["tokens_adopted"] == 0 and engines.stats(llm)["bytes_ratio"] < 0.1
        dense = engines.say_dense(llm, asked, 6)
    assert [tokens for tokens, _ in dense] == [tokens for tokens, _ in said]


def test_long_prompts_are_sampled_with_a_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """More tokens than vLLM takes in a step if it is not asked to."""
    monkeypatch.setattr(rows, "PREFILL_ROWS", 2048)
    [prompt], [answer] = engines.needles(4300)
    engine = adapter.open_engine(engines.DEMO, Settings.of({"method": "rq", "budget": 0.1}), max_tokens=4400)
    try:
        for sparse in (True, False):
            steps = list(engine.generate([prompt], 5, Sampling(temperature=0.1), sparse))
            assert engines.text([token for step in steps for token in step.tokens]) == answer
    finally:
        engine.close()


def test_coarse_groups_through_the_stock_kernel() -> None:
    """A needle's block is found, a fraction is read, and every head of a layer visits the same blocks."""
    asked, answers = engines.needles(3000, 2500)
    settings = {"method": "meanstd", "route": "stock", "budget": 0.4}
    with engines.engine(engines.DEMO, settings, dtype="bfloat16", max_model_len=4096) as llm:
        sparse = engines.runtime(llm).sparse
        assert sparse is not None
        sparse.keep_lists = True
        said = engines.say(llm, asked, 6, logprobs=None)
        found = engines.stats(llm)
        assert not found["fallbacks"] and 0.3 < found["bytes_ratio"] < 0.6
        for step in sparse.lists:
            for rows in step.values():
                assert rows is not None
                for heads in rows:
                    assert all(np.array_equal(head, heads[0]) for head in heads) and 0 in heads[0]
        dense = engines.say_dense(llm, asked, 6)
    assert [engines.text(tokens)[:5] for tokens, _ in dense] == answers
    assert sum(mine == other for (mine, _), (other, _) in zip(said, dense, strict=True)) >= 1


@pytest.mark.parametrize("block", [32, 96, 128])
def test_blocks_of_other_sizes(block: int, models: dict[str, Path]) -> None:
    """Blocks of one or several units: the same groups, hence nearly the same text."""
    asked, answers = engines.needles(3000)
    settings = {"method": "rq", "budget": 0.05, "mean_tokens": 32} | ({"block_size": 32} if block == 96 else {})
    with engines.engine(engines.DEMO, settings, block_size=block, max_model_len=4096) as llm:
        assert engines.runtime(llm).settings is not None
        [(tokens, _)] = engines.say(llm, asked, 6, logprobs=None)
        assert engines.text(tokens)[:5] == answers[0] and engines.stats(llm)["bytes_ratio"] < 0.1
