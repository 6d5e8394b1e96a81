"""EPS inside SGLang on a CPU, with its radix cache, chunked prefill and scheduler: the demo model says and reads
what it does in our own decoder. The engines run in processes of their own, which find the hook by its entry point."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor import cuda_graph_config
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.server_args import prepare_server_args

from eps_core import LLM
from eps_core.config.eps import EpsConfig
from eps_core.decode.balanced_folder import write_balanced
from eps_core.decode.session import Session
from eps_core.errors import ConfigError
from eps_core.integrations import versions
from eps_core.integrations.settings import Settings
from eps_core.models.config import DEMO_MODEL
from eps_core.tasks.corpus import corpus
from eps_cuda.integrations import sglang as hook
from eps_cuda.integrations.sglang import backend
from eps_cuda.integrations.sglang.asked import asked

BUDGET, NEW_TOKENS, PAGE = 0.1, 12, 64
POOL_TOKENS = 40 * PAGE  # fewer than the prompts below have together: pages are given up and used again
LENGTHS = (700, 130, 1100, 900)
_FOLDER = TemporaryDirectory(prefix="eps-tests-")


@cache
def model() -> Path:
    """The demo model with balanced keys, as our own decoder reads it."""
    folder = Path(_FOLDER.name) / "demo"
    write_balanced(Session.open(DEMO_MODEL, "cuda", "cpu", "float32", method="rq"), folder)
    return folder


def prompts(*lengths: int) -> list[list[int]]:
    """Parts of the corpus, whose bytes are the demo model's tokens."""
    return [list(corpus()[3000 * number :][:length]) for number, length in enumerate(lengths)]


def opened(**environment: str) -> Engine:
    """An engine whose processes see only these EPS settings."""
    for name in [name for name in os.environ if name.startswith("EPS_")]:
        del os.environ[name]
    os.environ.update(environment)
    return Engine(
        model_path=str(model()), device="cpu", dtype="float32", attention_backend="torch_native", page_size=PAGE,
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
    llm = LLM(model(), method, budget=BUDGET, **places)
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


def say_without_eps(out: Path) -> None:
    """In a process of its own, as an engine that shuts down ends all others of its process: answers and state."""
    plain = opened()
    answers, state = said(plain, prompts(*LENGTHS[:2])), plain.get_server_info()["internal_states"][0]
    out.write_text(json.dumps({"tokens": tokens(answers), "eps": state.get("eps")}))
    plain.shutdown()


def test_without_the_environment_sglang_is_its_own(engine: Engine, tmp_path: Path) -> None:
    asked, out = prompts(*LENGTHS[:2]), tmp_path / "said.json"
    code = f"import test_sglang, pathlib; test_sglang.say_without_eps(pathlib.Path({str(out)!r}))"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent)
    plain = json.loads(out.read_text())
    assert plain == {"tokens": own(asked, "off")[0], "eps": None}
    assert plain["tokens"] != tokens(said(engine, asked)), "nothing to tell them apart by"


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


def runner(args: dict[str, Any] | None = None, **pool: Any) -> Any:
    """A model runner of two layers over a pool of 8 pages, with nothing that EPS refuses but for the changes."""
    usual = {
        "speculative_algorithm": None, "enable_hierarchical_cache": False, "enable_lmcache": False,
        "radix_cache_backend": None, "disaggregation_mode": "null", "dcp_size": 1, "attn_cp_size": 1, "tp_size": 1,
        "pp_size": 1, "dp_size": 1,
    }  # fmt: skip
    shape = {"size": 7 * PAGE, "page_size": PAGE, "dtype": torch.float32, "head_num": 2, "head_dim": 64, "layer_num": 2}
    found = MHATokenToKVPool(**shape, device="cpu", enable_memory_saver=False, enable_alt_stream=False)
    for name, value in pool.items():
        setattr(found, name, value)
    layers = [RadixAttention(4, 64, 0.125, 2, layer_id) for layer_id in range(2)]
    table = torch.arange(PAGE, 8 * PAGE)[None].repeat(4, 1)
    return SimpleNamespace(
        token_to_kv_pool=found, server_args=SimpleNamespace(**usual | (args or {})), device="cpu", page_size=PAGE,
        model=torch.nn.ModuleList(layers), req_to_token_pool=SimpleNamespace(size=4, req_to_token=table),
        model_config=SimpleNamespace(is_encoder_decoder=False, model_path="m"),
    )  # fmt: skip


@pytest.fixture(autouse=True)
def no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graph_config, "cuda_graph_fully_disabled", lambda: True)
    monkeypatch.setattr(backend, "_runtimes", [])


def batch(slots: np.ndarray, decode: bool) -> Any:
    """A forward of one request whose tokens lie at PAGE, PAGE + 1, ..; the last of `slots` is its last."""
    mode = ForwardMode.DECODE if decode else ForwardMode.EXTEND
    last = torch.tensor([int(slots[-1]) - PAGE + 1])
    rows = torch.zeros(1, dtype=torch.int64)
    return SimpleNamespace(
        out_cache_loc=torch.from_numpy(slots), seq_lens=last, req_pool_indices=rows, forward_mode=mode
    )


def test_what_is_written_past_eps_is_summarised_when_it_is_read() -> None:
    """By a kernel that rotates and writes at once, say, over pages whose summaries were of another request."""
    rng, settings = np.random.default_rng(0), Settings.of({"method": "rq", "budget": 0.1})
    old, new = (torch.from_numpy(rng.standard_normal((2, 300, 2, 64))).float() for _ in range(2))
    q = torch.from_numpy(rng.standard_normal((1, 256))).float()
    slots = np.arange(300) + PAGE
    outs = []
    for begin, past in (([old, new], True), ([new], False)):
        place = backend.Runtime(runner(), settings)
        (layer,) = list(attention for attention in place_layers(place) if attention.layer_id == 0)
        for k, v in begin[:1]:
            assert not written(place, layer, batch(slots, False), k, v, True)
        if past:
            assert written(place, layer, batch(slots, False), *new, False) is False
            place.pool.set_kv_buffer(layer, torch.from_numpy(slots), *new)
        place.begin(batch(slots[-1:], True))
        outs.append(place.decode(0, q, layer, False, lambda: torch.full((1, 256), torch.nan)))
        assert place.counts["tokens_adopted"] == (256 if past else 0)  # whole spans
    torch.testing.assert_close(outs[0], outs[1], rtol=0, atol=0)


def written(place: Any, layer: Any, forward: Any, k: Any, v: Any, save: bool) -> bool:
    place.begin(forward)
    left: bool = place.left_to_write(layer, forward, k, v, save)
    return left


def place_layers(place: Any) -> list[Any]:
    return [RadixAttention(4, 64, 0.125, 2, layer_id) for layer_id in place.places]


def test_a_layer_s_own_scale_is_kept() -> None:
    place = backend.Runtime(runner(), Settings.of({"method": "rq", "budget": 0.1}))
    k, v = torch.from_numpy(np.random.default_rng(0).standard_normal((2, 300, 2, 64))).float()
    q, slots = torch.linspace(-1, 1, 256)[None], np.arange(300) + PAGE
    usual, twice = (RadixAttention(4, 64, scale, 2, 0) for scale in (0.125, 0.25))
    written(place, usual, batch(slots, False), k, v, True)
    place.begin(batch(slots[-1:], True))
    outs = [
        place.decode(0, x, one, False, lambda: torch.full((1, 256), torch.nan))
        for x, one in ((2 * q, usual), (q, twice))
    ]
    torch.testing.assert_close(*outs, rtol=0, atol=0)
    assert not outs[0].isnan().any()


def test_padding_is_not_written_and_a_fault_is_sglangs_own_attention() -> None:
    place = backend.Runtime(runner(), Settings.of({"method": "rq", "budget": 0.1}))
    (layer, _), rows = place_layers(place), torch.ones(3, 2, 64)
    assert not written(place, layer, batch(np.array([0, 0, PAGE]), False), rows, rows, True)
    assert not place.pool.get_key_buffer(0)[:PAGE].any() and place.pool.get_key_buffer(0)[PAGE].all()
    place.begin(SimpleNamespace())
    assert place.counts["failed_writes"] == 1 and place.left_to_write(layer, None, rows, rows, True)
    dense = torch.zeros(1, 256)
    assert place.decode(0, torch.ones(1, 256), layer, False, lambda: dense) is dense
    place.begin(batch(np.array([PAGE]), True))
    for number in range(2):
        assert place.decode(number, torch.ones(1, 256), layer, True, lambda: dense) is dense
    assert place.stats()["fallbacks"] == {"further arguments": 2}


def test_servers_that_eps_cannot_follow_do_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings.of({"method": "rq"})
    backend.refusals(runner(), settings)
    read = prepare_server_args(["--model-path", str(DEMO_MODEL), "--device", "cpu"])
    assert all(hasattr(read, name) for name in vars(runner().server_args))
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"dtype": "torch.float8_e4m3fn"}, {}, "K and V of float8_e4m3fn"),
        ({"kv_cache_layout": "hnd"}, {}, "K and V as hnd"),
        ({}, {"speculative_algorithm": "EAGLE"}, r"speculative decoding \(EAGLE\)"),
        ({}, {"enable_hierarchical_cache": True}, "a cache that loads K and V from elsewhere"),
        ({}, {"enable_lmcache": True}, "a cache that loads K and V from elsewhere"),
        ({}, {"radix_cache_backend": "mine"}, "radix cache mine"),
        ({}, {"disaggregation_mode": "decode"}, r"disaggregation \(decode\)"),
        ({}, {"dcp_size": 2}, "context parallelism"),
    ]
    for pool, args, says in cases:
        with pytest.raises(ConfigError, match=f"SGLang server with {says}: start it without"):
            backend.refusals(runner(args, **pool), settings)
    other = runner()
    other.token_to_kv_pool, other.model_config.is_encoder_decoder = SimpleNamespace(dtype="torch.bfloat16"), True
    with pytest.raises(ConfigError, match="K and V in a SimpleNamespace, an encoder"):
        backend.refusals(other, settings)
    with pytest.raises(ConfigError, match="several processes and a metrics file"):
        backend.refusals(runner({"tp_size": 2}), Settings.of({"method": "rq", "metrics": "m.jsonl"}))
    with pytest.raises(ConfigError, match="attention backend flashinfer: start it with --attention-backend"):
        backend.refused("flashinfer")(None)
    first = runner()
    backend.Runtime(first, settings)
    with pytest.raises(ConfigError, match="several attention backends over one pool"):
        backend.Runtime(first, settings)
    policy = EpsConfig.of(method="rq", head_modes=(("dense", "sparse", "sparse"),) * 2)
    with pytest.raises(ConfigError, match="head modes of 3 kv heads do not fit layers of 2"):
        backend.Runtime(runner(), Settings(policy))
    shared = runner()
    shared.model.append(RadixAttention(4, 64, 0.125, 2, 1))
    with pytest.raises(ConfigError, match="SGLang server with layers that share K and V: start it without EPS"):
        backend.Runtime(shared, settings)
    first.page_size = 16
    monkeypatch.setattr(backend, "_runtimes", [])
    with pytest.raises(ConfigError, match=r"pages of 16 tokens are no multiple .* start it with --page-size 64"):
        backend.Runtime(first, settings)
    monkeypatch.setattr(cuda_graph_config, "cuda_graph_fully_disabled", lambda: False)
    with pytest.raises(ConfigError, match="start SGLang with --disable-cuda-graph"):
        backend.refusals(runner(), settings)


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
    assert calls[0] == [*start, "--port", "1", "--device", "cpu", *more]
    read = prepare_server_args(calls.pop()[3:])
    assert (read.device, read.attention_backend, read.page_size, read.tp_size) == ("cpu", "torch_native", 128, 2)
    # what follows from the method is left to the device
    found = asked()
    assert found is not None and not found.config.for_device("cuda").cascade
    hook.serve(DEMO_MODEL, Settings(), "h", 1, ["--port=7"])
    assert calls.pop() == [*start, "--device", "cpu", "--port=7"] and os.environ["EPS_METHOD"] == "off"
    monkeypatch.setenv("SGLANG_PLUGINS", "other")
    with pytest.raises(ConfigError, match="SGLANG_PLUGINS 'other' leaves EPS out"):
        hook.serve(DEMO_MODEL, Settings(), "h", 1, [])


def test_the_installed_sglang_has_the_interfaces_that_are_checked() -> None:
    interfaces = versions.INTERFACES["sglang"].items()
    assert not [line for name, parameters in interfaces for line in versions._missing(name, parameters.split())]
