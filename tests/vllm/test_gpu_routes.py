"""What a GPU's routes do with vLLM's metadata, blocks and kernel, over a stand-in for its backend (plain_backend)."""

from collections.abc import Iterator

import engines
import plain_backend
import pytest
from shadow import Shadow
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.selector import _cached_get_attn_backend

from eps_cuda.integrations.vllm import register


@pytest.fixture(autouse=True)
def stand_in() -> Iterator[None]:
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    register_backend(AttentionBackendEnum.CPU_ATTN, "plain_backend.Backend")
    _cached_get_attn_backend.cache_clear()
    try:
        yield
    finally:
        register()
        _cached_get_attn_backend.cache_clear()


def test_everything_visited_is_the_stock_kernel_bit_for_bit() -> None:
    asked = engines.prompts(700, 130, 400)
    with engines.engine(engines.DEMO, dtype="bfloat16") as llm:
        dense = engines.say(llm, asked)
    for settings in ({"method": "rq"}, {"method": "meanstd", "route": "stock"}):
        with engines.engine(engines.DEMO, {**settings, "budget": 1.0}, dtype="bfloat16") as llm:
            assert engines.say(llm, asked) == dense
            found = engines.stats(llm)
            assert found["rows"] > 0 and found["bytes_ratio"] == 1.0 and not found["fallbacks"]


def test_sparse_rows_find_their_needles_beside_prefills() -> None:
    asked, answers = engines.needles(1500, 900, 1200)
    settings = {"method": "rq", "budget": 0.1}
    with engines.engine(engines.DEMO, settings, max_num_batched_tokens=256) as llm:
        shadow = Shadow(llm)
        said = engines.say(llm, asked, 10, logprobs=None)
        found = engines.stats(llm)
        assert not found["fallbacks"] and not found["failed_writes"] and found["bytes_ratio"] < 0.15
        assert shadow.largest == 0 and shadow.wrong == 0 and shadow.lacking == 0 and shadow.checked > 300
        llm.collective_rpc("eps_set", kwargs={"on": False})
        llm.reset_prefix_cache()
        dense = engines.say(llm, asked, 10, logprobs=None)
        llm.collective_rpc("eps_set", kwargs={"on": True})
        again = engines.say(llm, asked, 10, logprobs=None)
        assert engines.stats(llm)["tokens_adopted"] > 0
    assert [tokens[:5] for tokens, _ in again] == [tokens[:5] for tokens, _ in said]
    assert sum(engines.text(tokens)[:5] == answer for (tokens, _), answer in zip(dense, answers, strict=True)) >= 2
    for (tokens, _), (other, _) in zip(said, dense, strict=True):
        assert tokens[:5] == other[:5]


def test_compacted_tables_read_a_part_and_find_it() -> None:
    asked, _ = engines.needles(1800, 1500)
    with engines.engine(engines.DEMO, {"method": "meanstd", "route": "stock", "budget": 0.3}) as llm:
        engines.say(llm, asked, 8, logprobs=None)
        found = engines.stats(llm)
        decoded = plain_backend.CALLS[-4 * 5 :]  # of the last steps, four layers each
        assert found["bytes_ratio"] < 0.6 and not found["fallbacks"] and max(decoded) < 0.7 * (1800 + 1500)
