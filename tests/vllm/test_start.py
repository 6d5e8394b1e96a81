"""What a start says, and what does not start: a server that was asked for EPS runs with it or not at all."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engines
import prometheus_client
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from vllm import envs
from vllm.config.compilation import CUDAGraphMode
from vllm.entrypoints.serve.instrumentator import metrics as page

from eps_core.errors import ConfigError
from eps_core.integrations.settings import Settings
from eps_cuda.integrations import vllm as hook
from eps_cuda.integrations.vllm import adapter, metrics
from eps_cuda.integrations.vllm.asked import Asked, asked, fitted, refusals

RQ = {"method": "rq", "budget": 0.1}


@pytest.mark.parametrize(
    ("name", "sparse", "dense_layers"),
    [
        ("gemma3", [1, 3], {"0": "sliding window", "2": "sliding window"}),
        (
            "gemma4",
            [1],
            {"0": "sliding window", "2": "sliding window", "3": "its K and V are read by another layer",
             "4": "sliding window", "5": "another layer's K and V"},
        ),
    ],
    ids=["gemma3", "gemma4"],
)  # fmt: skip
def test_layers_that_cannot_be_sparse_stay_dense_by_name(
    name: str, sparse: list[int], dense_layers: dict[str, str], models: dict[str, Path]
) -> None:
    """Gemma 3: sliding windows beside full attention, and a scale of its own. Gemma 4: layers that share K and V, which
    vLLM's kernel reads in its own layout."""
    prompts = engines.prompts(500, 90)
    with engines.engine(models[name]) as llm:
        dense = engines.say(llm, prompts)
    with engines.engine(models[name], {"method": "rq", "budget": 1.0}) as llm:
        said = engines.say(llm, prompts)
        found = engines.stats(llm)
        assert found["sparse_layers"] == sparse and found["layers_dense"] == dense_layers
        llm.collective_rpc("eps_set", kwargs={"budget": 0.1})
        llm.collective_rpc("eps_reset")
        engines.say(llm, prompts)
        assert engines.stats(llm)["bytes_ratio"] < 0.5
    for (tokens, best), (wanted, wanted_best) in zip(said, dense, strict=True):
        assert tokens == wanted
        for mine, other in zip(best, wanted_best, strict=True):
            assert all(abs(mine[one] - other[one]) < 2e-4 for one in mine.keys() & other.keys())


@pytest.mark.parametrize(
    ("name", "settings", "more", "message"),
    [
        ("mistral-window", RQ, {}, r"no layer of this model can be sparse.* sliding window \(0-3\)"),
        ("gemma2", RQ, {}, "no layer of this model can be sparse.* logits soft-capping"),
        ("demo", RQ, {"kv_cache_dtype": "fp8"}, "a quantised KV cache"),
        ("demo", {"method": "rqq"}, {}, "method 'rqq' is unknown"),
        ("demo", {"method": "rq", "budgets": 0.1}, {}, "unknown EPS setting budgets"),
        ("demo", {"budget": 0.1}, {}, 'add "method": "rq"'),
        ("demo", "rq", {}, "no mapping"),
        ("demo", RQ | {"route": "fast"}, {}, "route 'fast' is unknown"),
        ("demo", RQ | {"route": "stock"}, {}, "route stock has no softmax mass"),
        (
            "demo",
            {"method": "meanstd", "group_size": 128},
            {},
            "no multiple of EPS's units of 128 .*--block-size 128",
        ),
        ("demo", {"method": "meanstd", "route": "stock", "scope": "kv-head"}, {}, "cannot have scope 'kv-head'"),
        ("demo", RQ | {"head_modes": [["sparse"]] * 4}, {}, "head modes of 1 kv heads do not fit layers of 2"),
    ],
)
def test_what_cannot_be_sparse_does_not_start(
    name: str, settings: Any, more: dict[str, Any], message: str, models: dict[str, Path]
) -> None:
    with pytest.raises(Exception, match=message) as caught, engines.engine(models[name], settings, **more):
        pass
    assert "\n" not in str(caught.value).splitlines()[0]


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ("serve DIR", False),
        ('serve DIR --additional-config {"eps":{}}', True),
        ("serve DIR --additional-config.eps.method rq", True),
        ("serve DIR --additional_config.eps.method=rq", True),
        ("serve /models/x.eps.d", False),
        ("serve DIR --config with.yaml", True),
        ("serve DIR --config=with.yaml", True),
        ("serve DIR --config short.yaml", True),
        ("serve DIR --config dotted.yaml", True),
        ("serve DIR --config without.yaml", False),
        ("serve DIR --config absent.yaml", False),
        ("serve DIR --config", False),
    ],
)
def test_what_names_eps_before_vllm_reads_its_arguments(
    argv: str, named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "with.yaml").write_text("port: 1\nadditional-config:\n  eps:\n    method: rq\n")
    (tmp_path / "short.yaml").write_text("additional-config: {'eps': {method: rq}}\n")
    (tmp_path / "dotted.yaml").write_text("additional-config.eps.method: rq\n")
    (tmp_path / "without.yaml").write_text("port: 1\nsteps: 2\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", argv.split())
    assert hook._named() == named


def configured(**changes: Any) -> Any:
    """A server's configuration with nothing that EPS refuses, but for the changes, `part.name=value`."""
    parts: dict[str, Any] = {
        "model_config": {"use_mla": False, "is_hybrid": False, "is_encoder_decoder": False, "rswa_window": None,
                         "is_mm_prefix_lm": False},
        "cache_config": {"cache_dtype": "auto", "kv_sharing_fast_prefill": False},
        "parallel_config": {
            "decode_context_parallel_size": 1, "prefill_context_parallel_size": 1, "use_ubatching": False,
            "tensor_parallel_size": 1,
        },
        "kv_transfer_config": None, "speculative_config": None,
        "compilation_config": {
            "cudagraph_mode": CUDAGraphMode.FULL_AND_PIECEWISE, "use_inductor_graph_partition": False,
            "splitting_ops_contain_attention": lambda: True, "splitting_ops_contain_kv_cache_update": lambda: True,
        },
    }  # fmt: skip
    for name, value in changes.items():
        part, _, inner = name.partition("__")
        if inner:
            parts[part][inner] = value
        else:
            parts[part] = value
    return SimpleNamespace(**{n: SimpleNamespace(**v) if isinstance(v, dict) else v for n, v in parts.items()})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"kv_transfer_config": "a connector"}, "a KV connector"),
        ({"model_config__use_mla": True}, "MLA"),
        ({"model_config__is_hybrid": True}, "Mamba"),
        ({"model_config__is_encoder_decoder": True}, "cross attention"),
        ({"model_config__is_mm_prefix_lm": True}, "a prefix that attends both ways"),
        ({"cache_config__cache_dtype": "fp8_e4m3"}, r"quantised KV cache \(fp8_e4m3\)"),
        ({"parallel_config__decode_context_parallel_size": 2}, "decode context parallelism"),
        ({"parallel_config__prefill_context_parallel_size": 2}, "prefill context parallelism"),
        ({"parallel_config__use_ubatching": True}, "dual batch overlap"),
        ({"cache_config__kv_sharing_fast_prefill": True}, "fast prefill"),
        ({"speculative_config": {"method": "eagle"}}, "speculative decoding by eagle"),
        ({"compilation_config__use_inductor_graph_partition": True}, "piecewise CUDA graphs that hold attention"),
        ({"compilation_config__splitting_ops_contain_attention": lambda: False}, "piecewise CUDA graphs that hold"),
        ({"compilation_config__splitting_ops_contain_kv_cache_update": lambda: False}, "piecewise CUDA graphs that"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_whole_models_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    want = Asked(dict(RQ), "rows")
    refusals(configured(), want)
    with pytest.raises(ConfigError, match=f"does not support a vLLM server with .*{named}"):
        refusals(configured(**changes), want)


def test_graphs_that_hold_attention_are_refused_where_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    want = Asked(dict(RQ), "rows")
    monkeypatch.setattr(envs, "VLLM_USE_BREAKABLE_CUDAGRAPH", True)
    with pytest.raises(ConfigError, match="piecewise CUDA graphs that hold attention"):
        refusals(configured(), want)
    for mode in (CUDAGraphMode.NONE, CUDAGraphMode.FULL_DECODE_ONLY, None):
        refusals(configured(compilation_config__cudagraph_mode=mode), want)


def test_the_environment_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    server = SimpleNamespace(additional_config={"eps": {"method": "rq", "budget": 0.1}})
    assert asked(server) == Asked({"method": "rq", "budget": 0.1}, "rows")
    assert asked(SimpleNamespace(additional_config={})) is None
    monkeypatch.setenv("EPS_BUDGET", "0.3")
    assert asked(server) == Asked({"method": "rq", "budget": 0.3}, "rows")
    assert asked(SimpleNamespace(additional_config={})) is None, "a budget alone asks for nothing"
    monkeypatch.setenv("EPS_METHOD", "off")
    assert asked(server) is None
    monkeypatch.setenv("EPS_METHOD", "meanstd")
    monkeypatch.setenv("EPS_ROUTE", "stock")
    assert asked(SimpleNamespace(additional_config={})) == Asked({"method": "meanstd", "budget": 0.3}, "stock")


@pytest.mark.parametrize(
    ("block", "unit"), [(32, 32), (64, 64), (96, 32), (128, 64), (160, 32), (192, 64), (224, 32), (256, 64), (320, 64)]
)
def test_units_divide_the_blocks_of_the_server(block: int, unit: int) -> None:
    assert fitted(Asked(dict(RQ), "rows"), block).config.cache_config.unit_tokens == unit
    big = fitted(Asked({**RQ, "group_size": 16}, "rows"), 192).config.cache_config
    assert (big.S, big.unit_tokens) == (16, 64)


def test_codes_speak_of_means_that_a_block_holds() -> None:
    for block in (32, 64):
        cache_config = fitted(Asked(dict(RQ), "rows"), block).config.cache_config
        assert block % cache_config.unit_tokens == 0 and cache_config.mean_tokens == block
    with pytest.raises(ConfigError, match="start it with --block-size 64"):
        fitted(Asked(dict(RQ), "rows"), 16)
    with pytest.raises(ConfigError, match=r"no multiple of EPS's units of 64 \(mean_tokens 64\)"):
        fitted(Asked({**RQ, "mean_tokens": 64}, "rows"), 32)


def test_a_backend_that_is_not_hooked_refuses_a_server_that_asked() -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    hook.register()
    backend = AttentionBackendEnum.FLEX_ATTENTION.get_class()
    stock = backend.__mro__[1]
    assert stock.__module__.startswith("vllm.") and backend.get_name() == stock.get_name()
    with set_current_vllm_config(VllmConfig()):
        assert backend.get_impl_cls() is stock.get_impl_cls()
    with (
        set_current_vllm_config(VllmConfig(additional_config={"eps": RQ})),
        pytest.raises(ConfigError, match="does not support vLLM's attention backend FLEX_ATTENTION"),
    ):
        backend.get_impl_cls()


def test_on_an_amd_gpu_a_server_is_given_a_backend_that_is_hooked(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr(adapter.os, "execv", lambda program, command: calls.append(command))
    own = ["--attention-backend", "FLASH_ATTN"]
    other = [
        ["--attention-config.backend=FLASH_ATTN"],
        ["--attention_backend=FLASH_ATTN"],
        ["-ac.backend", "FLASH_ATTN"],
    ]
    for hip, more in ((None, []), ("7.0", []), ("7.0", own), *(("7.0", one) for one in other)):
        monkeypatch.setattr(adapter.torch.version, "hip", hip)
        adapter.serve(Path("/m"), Settings.of(RQ), "127.0.0.1", 1, more)
    asked_for = [command[command.index(own[0]) + 1] for command in calls if own[0] in command]
    assert asked_for == ["TRITON_ATTN", "FLASH_ATTN"] and len(calls) == 6


def test_nothing_replaces_the_settings_of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's parser takes these for one flag, of which the last one counts."""
    calls: list[list[str]] = []
    monkeypatch.setattr(adapter.os, "execv", lambda program, command: calls.append(command))
    for name in ("--additional-config", "--additional_config", "--additional_config.x", "--additional-conf", "--add"):
        for more in ([name, "1"], ["--seed", "0", f"{name}=1"]):
            with pytest.raises(ConfigError, match="--additional-config carries EPS's settings"):
                adapter.serve(Path("/m"), Settings.of(RQ), "127.0.0.1", 1, more)
    assert not calls
    adapter.serve(Path("/m"), Settings.of(RQ), "127.0.0.1", 1, ["--all2all-backend", "--", "additional-config"])
    adapter.serve(Path("/m"), Settings.of(RQ), "127.0.0.1", 1, ["--worker_extension_cls", "mine"])
    assert [adapter.EXTENSION in command for command in calls] == [True, False]


def test_each_of_several_api_processes_shows_what_workers_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prometheus_client, "REGISTRY", prometheus_client.CollectorRegistry())
    monkeypatch.setattr(prometheus_client.multiprocess.MultiProcessCollector, "collect", lambda self: [])
    monkeypatch.setattr(page, "get_prometheus_registry", lambda: prometheus_client.REGISTRY)
    monkeypatch.setenv(metrics.FOLDER, str(tmp_path))  # of the process that started this one
    monkeypatch.setenv("EPS_METHOD", "rq")
    metrics.export.cache_clear()
    try:
        for _ in range(2):
            hook.register()
    finally:
        metrics.export.cache_clear()
    (tmp_path / "0.json").write_text('{"on": true, "rows": 3}')
    for several in (False, True):
        if several:
            monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
        app = FastAPI()
        page.attach_router(app)
        lines = TestClient(app).get("/metrics").text.splitlines()
        assert lines.count('eps_rows_total{worker="0"} 3.0') == 1


def test_a_plugin_that_cannot_hook_ends_the_start_where_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.attention.backends import registry

    monkeypatch.delattr(registry, "register_backend")
    hook.register()  # nobody asked
    monkeypatch.setenv("EPS_METHOD", "rq")
    with pytest.raises(ConfigError, match="EPS cannot be used with this vLLM"):
        hook.register()


def test_importing_the_hook_changes_nothing() -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

    assert CPUAttentionBackend.get_impl_cls() is CPUAttentionBackendImpl
    assert not hasattr(CPUAttentionBackendImpl, "eps_route")
