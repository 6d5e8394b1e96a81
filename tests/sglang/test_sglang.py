"""EPS inside SGLang on a CPU, with its radix cache, chunked prefill and scheduler: the demo model says and reads
what it does in our own decoder. The engines run in processes of their own, which find the hook by its entry point."""

import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.entrypoints.engine import Engine

from eps_core import LLM
from eps_core.config.eps import EpsConfig
from eps_core.errors import ConfigError
from eps_core.integrations import versions
from eps_core.integrations.settings import Settings
from eps_core.models.config import DEMO_MODEL
from eps_core.tasks.corpus import corpus
from eps_cuda.integrations import sglang as hook
from eps_cuda.integrations.sglang import backend

BUDGET, NEW_TOKENS, PAGE = 0.1, 12, 64
POOL_TOKENS = 40 * PAGE  # fewer than the prompts below have together: pages are given up and used again
LENGTHS = (700, 130, 1100, 900)


def prompts(*lengths: int) -> list[list[int]]:
    """Parts of the corpus, whose bytes are the demo model's tokens."""
    return [list(corpus()[3000 * number :][:length]) for number, length in enumerate(lengths)]


def opened(**environment: str) -> Engine:
    """An engine whose processes see only these EPS settings."""
    for name in [name for name in os.environ if name.startswith("EPS_")]:
        del os.environ[name]
    os.environ.update(environment)
    return Engine(
        model_path=str(DEMO_MODEL), device="cpu", dtype="float32", attention_backend="torch_native", page_size=PAGE,
        skip_tokenizer_init=True, max_total_tokens=POOL_TOKENS, max_running_requests=4, chunked_prefill_size=256,
        context_length=2048, disable_cuda_graph=True, sampling_backend="pytorch", grammar_backend="none",
        log_level="error",
    )  # fmt: skip


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    found = opened(EPS_METHOD="rq", EPS_BUDGET=str(BUDGET))
    yield found
    found.shutdown()


def said(engine: Engine, asked: list[list[int]]) -> list[Any]:
    drawn = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    found: list[Any] = engine.generate(input_ids=asked, sampling_params=drawn)
    return found


def tokens(answers: list[Any]) -> list[list[int]]:
    return [answer["output_ids"] for answer in answers]


def counters(engine: Engine) -> dict[str, Any]:
    found: dict[str, Any] = engine.get_server_info()["internal_states"][0]["eps"]
    return found


def own(asked: list[list[int]], method: str) -> tuple[list[list[int]], float]:
    """(tokens, bytes of K, V and summaries over dense ones) of our own decoder: the first token dense, as an engine's
    prefill is."""
    places = {"backend": "cuda", "dtype": "float32", "kv_dtype": "float32"}
    dense = LLM(DEMO_MODEL, "off", **places).generate(asked, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    if method == "off":
        return [one.tokens for one in dense], 1.0
    begun = [[*prompt, one.tokens[0]] for prompt, one in zip(asked, dense, strict=True)]
    llm = LLM(DEMO_MODEL, method, budget=BUDGET, **places)
    found = llm.generate(begun, max_new_tokens=NEW_TOKENS - 1, ignore_eos=True)
    ratio = found[0].kv_bytes_read / found[0].kv_bytes_dense
    return [[*first.tokens[:1], *one.tokens] for first, one in zip(dense, found, strict=True)], ratio


def test_a_batch_says_and_reads_what_our_own_decoder_does(engine: Engine) -> None:
    asked = prompts(*LENGTHS[:3])
    wanted, ratio = own(asked, "rq")
    assert tokens(said(engine, asked)) == wanted
    found = counters(engine)
    assert found["sparse_layers"] == [0, 1, 2, 3] and found["on"]
    # the first of the new tokens is the prefill's
    assert found["rows"] == len(asked) * (NEW_TOKENS - 1) and found["prefill_rows"] >= len(asked)
    assert found["bytes_ratio"] == ratio < 0.3
    assert not found["fallbacks"] and not found["tokens_adopted"] and not found["failed_writes"]


def test_summaries_ride_the_radix_cache_and_pages_are_used_again(engine: Engine) -> None:
    asked = prompts(*LENGTHS)
    wanted, _ = own(asked, "rq")
    for _ in range(2):  # each evicts others, which are computed again
        for prompt, answer in zip(asked, wanted, strict=True):
            assert tokens(said(engine, [prompt])) == [answer]
    again = said(engine, asked[3:])
    assert again[0]["meta_info"]["cached_tokens"] == LENGTHS[3] // PAGE * PAGE
    longer = [asked[3] + list(b"\nimport os\n" * 9)]
    assert tokens(said(engine, longer)) == own(longer, "rq")[0]
    assert tokens(again) == wanted[3:] and not counters(engine)["tokens_adopted"]


def test_without_the_environment_sglang_is_its_own(engine: Engine) -> None:
    asked = prompts(*LENGTHS[:2])
    plain = opened()
    try:
        answers, state = said(plain, asked), plain.get_server_info()["internal_states"][0]
    finally:
        plain.shutdown()
    assert tokens(answers) == own(asked, "off")[0] and "eps" not in state
    assert tokens(answers) != tokens(said(engine, asked)), "nothing to tell them apart by"


def layer(**changes: Any) -> Any:
    usual = {
        "attn_type": SimpleNamespace(value="decoder"), "is_cross_attention": False, "sliding_window_size": -1,
        "logit_cap": 0.0, "v_head_dim": 64, "head_dim": 64, "xai_temperature_len": -1,
    }  # fmt: skip
    return SimpleNamespace(**usual | changes)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"attn_type": SimpleNamespace(value="encoder_only")}, "encoder_only attention"),
        ({"is_cross_attention": True}, "decoder attention"),
        ({"sliding_window_size": 127}, "sliding window"),
        ({"logit_cap": 50.0}, "logits soft-capping"),
        ({"v_head_dim": 32}, "values of another size"),
        ({"xai_temperature_len": 9}, "a temperature by position"),
    ],
)
def test_layers_that_stay_dense(changes: dict[str, Any], reason: str | None) -> None:
    assert backend.dense_reason(layer(**changes)) == reason


def runner(pool: dict[str, Any], args: dict[str, Any]) -> Any:
    """A model runner with nothing that EPS refuses, but for the changes."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    found = MHATokenToKVPool.__new__(MHATokenToKVPool)
    for name, value in ({"dtype": "torch.bfloat16", "kv_cache_layout": "nhd"} | pool).items():
        setattr(found, name, value)
    usual = {"speculative_algorithm": None, "enable_hierarchical_cache": False, "disaggregation_mode": "null"}
    return SimpleNamespace(token_to_kv_pool=found, server_args=SimpleNamespace(**usual | args))


def test_servers_that_eps_cannot_follow_do_not_start() -> None:
    backend.refusals(runner({}, {}))
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"dtype": "torch.float8_e4m3fn"}, {}, "K and V of float8_e4m3fn"),
        ({"kv_cache_layout": "hnd"}, {}, "K and V as hnd"),
        ({}, {"speculative_algorithm": "EAGLE"}, r"speculative decoding \(EAGLE\)"),
        ({}, {"enable_hierarchical_cache": True}, "a hierarchical cache"),
        ({}, {"disaggregation_mode": "decode"}, r"disaggregation \(decode\)"),
    ]
    for pool, args, says in cases:
        with pytest.raises(ConfigError, match=f"SGLang server with {says}: start it without"):
            backend.refusals(runner(pool, args))
    other = runner({}, {})
    other.token_to_kv_pool = SimpleNamespace(dtype="torch.bfloat16")
    with pytest.raises(ConfigError, match="K and V in a SimpleNamespace"):
        backend.refusals(other)
    with pytest.raises(ConfigError, match="attention backend flashinfer: start it with --attention-backend"):
        backend.refused("flashinfer")(None)
    with pytest.raises(ConfigError, match="--disable-cuda-graph"):
        backend.with_eps(type("Stock", (), {}))().init_cuda_graph_state(1, 1)


def test_a_misspelt_setting_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang goes on without a plugin that raises an Exception."""
    monkeypatch.setenv("EPS_METHOD", "rqq")
    with pytest.raises(SystemExit, match="method 'rqq' is unknown"):
        hook.register()
    monkeypatch.setenv("EPS_METHOD", "rq")
    monkeypatch.setenv("EPS_VERIFY", "tokens")
    with pytest.raises(SystemExit, match="eps-verify: SGLang has no place for drafts"):
        hook.register()


def test_serve_becomes_sglangs_server(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _, command: calls.append(command))
    monkeypatch.setattr(os, "environ", {**os.environ})
    start = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(DEMO_MODEL), "--host", "h"]
    hook.serve(DEMO_MODEL, Settings(EpsConfig.of(method="rq")), "h", 1, ["--page-size", "128", "--tp-size", "2"])
    more = ["--attention-backend", "torch_native", "--disable-cuda-graph", "--page-size", "128", "--tp-size", "2"]
    assert calls.pop() == [*start, "--port", "1", *more] and os.environ["EPS_METHOD"] == "rq"
    hook.serve(DEMO_MODEL, Settings(), "h", 1, ["--port=7"])
    assert calls.pop() == [*start, "--port=7"] and os.environ["EPS_METHOD"] == "off"
    monkeypatch.setenv("SGLANG_PLUGINS", "other")
    with pytest.raises(ConfigError, match="SGLANG_PLUGINS 'other' leaves EPS out"):
        hook.serve(DEMO_MODEL, Settings(), "h", 1, [])


def test_the_installed_sglang_has_the_interfaces_that_are_checked() -> None:
    interfaces = versions.INTERFACES["sglang"].items()
    assert not [line for name, parameters in interfaces for line in versions._missing(name, parameters.split())]
