"""Decode batches as vLLM's full CUDA graphs have them: what is captured, what the host learns later, what is not."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.attention.backend import AttentionCGSupport

from eps_core.errors import ConfigError
from eps_core.integrations.settings import Settings
from eps_cuda.integrations.vllm import backends
from eps_cuda.integrations.vllm.asked import Asked, uncaptured


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    script = Path(__file__).with_name("graphs_alone.py")
    command = [sys.executable, script, tmp_path_factory.mktemp("graphs") / "model"]
    done = subprocess.run(command, cwd=script.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def new(found: dict[str, Any], after: str, before: str, *names: str) -> list[int]:
    return [found[f"{after} stats"][name] - found[f"{before} stats"][name] for name in names]


def test_a_captured_batch_says_and_counts_what_others_do(found: dict[str, Any]) -> None:
    assert found["graphs"] == found["eager"] != found["dense"]
    assert found["graphs stats"] == found["eager stats"]
    assert found["graphs stats"]["rows"] == 6 and found["graphs stats"]["bytes_ratio"] < 0.5
    masses = found["graphs masses"]
    assert masses == pytest.approx(found["eager masses"], abs=1e-5) and len(set(masses)) == len(masses) == 4
    assert found["replays"] > 0 and found["summarised"] > 0


def test_a_batch_that_is_made_to_be_captured_counts_nowhere(found: dict[str, Any]) -> None:
    assert new(found, "captured", "graphs", "steps", "rows", "groups_selected", "prefill_rows") == [0] * 4
    assert new(found, "captured", "graphs", "forwards") == [1], "nothing tells the first from a batch that is computed"


def test_the_last_token_of_a_cached_prompt_reads_everything_and_is_no_decode_row(found: dict[str, Any]) -> None:
    first, second = found["cached"]
    assert first == second
    ((wanted, all_of_them),) = found["prompts"]
    assert wanted == all_of_them
    # three more tokens of each time, and each time a prompt
    assert new(found, "cached", "captured", "rows", "prefill_rows", "forwards") == [6, 2, 8]


def test_decode_batches_wait_for_nothing(found: dict[str, Any]) -> None:
    assert found["on a device"] == found["graphs"]
    assert new(found, "device", "cached", "forwards", "rows") == [5, 6]
    assert found["waits"] == [2, []], "once in each of two forwards with prompts"


def test_a_prompt_that_comes_between_decode_batches_finds_the_host_up_to_date(found: dict[str, Any]) -> None:
    eager, by_graphs = found["joined"]
    assert by_graphs == eager and not found["joined stats"]["failed_writes"]


def test_padding_changes_nothing_and_the_host_learns_of_all_writes(found: dict[str, Any]) -> None:
    """In this run the host reads the slots every second batch."""
    assert found["padded"] == found["graphs"] and found["padded summarised"] > 0 and found["waiting"] == 1
    names = "rows", "forwards", "groups_selected", "bytes_k_reread"
    assert new(found, "padded", "joined", *names) == new(found, "device", "cached", *names)


def test_the_budget_may_change_under_what_is_captured_and_nothing_else(found: dict[str, Any]) -> None:
    assert found["all"] == found["dense"] and found["on"] == found["graphs"]
    names = "groups_selected", "groups_total"
    assert len(set(new(found, "all", "padded", *names))) == 1
    words = "hold all settings but budget and budget_floor: start it with cudagraph_mode PIECEWISE"
    assert words in found["refused"]


def test_off_reads_everything_and_what_was_written_then_is_summarised_once_it_is_on(found: dict[str, Any]) -> None:
    assert found["off"] == found["dense"] and found["on"] == found["graphs"]
    assert new(found, "off", "switched off", "rows", "forwards") == [0, 5] and found["switched off"] == 0
    # prompts that come then have no summaries, and may lie where one was made then
    assert found["off summarised"] > 0 == found["forgotten"]
    assert new(found, "on", "off", "rows") == [6]
    # in each of two layers whole blocks of both prompts
    assert new(found, "on", "off", "tokens_adopted") == [2 * (128 + 64)]
    for name in ("failed_writes", "failed_adoptions", "fallbacks"):
        assert not found["on stats"][name]


def test_batches_that_no_graph_is_large_enough_for_go_the_way_of_others(found: dict[str, Any]) -> None:
    assert found["many"] == found["graphs"]
    assert found["many replays"] == 2, "two layers of the one batch that has a row alone"


def test_blocks_that_vllm_made_to_measure_its_memory_are_not_held(found: dict[str, Any]) -> None:
    assert not found["held"] and found["made again"] == found["graphs"]


def server(device: str = "cuda", speculative: Any = None) -> Any:
    return SimpleNamespace(device_config=SimpleNamespace(device_type=device), speculative_config=speculative)


@pytest.mark.parametrize(
    ("reason", "flat", "more"),
    [
        (None, {}, {}),
        (None, {"budget": 0.1, "min_context": 4096, "kernels": "triton"}, {}),
        ("route stock", {}, {"route": "stock"}),
        ("a device that is no GPU", {}, {"vllm_config": server("cpu")}),
        ("kernels arrays", {"kernels": "arrays"}, {}),
        ("speculative decoding", {}, {"vllm_config": server(speculative=1)}),
        ("blocks of 128 tokens that are no unit", {}, {"block_tokens": 128}),
        ("method meanstd", {"method": "meanstd", "group_size": 64}, {}),
        ("bounds", {"bound_bits": 8}, {}),
        ("policy threshold", {"policy": "threshold", "top_pages": 9}, {}),
        ("scope union", {"scope": "union"}, {}),
        ("audits", {"audit_every": 8}, {}),
    ],
)
def test_what_the_host_must_know_is_not_captured(reason: str | None, flat: Any, more: Any) -> None:
    arguments = {"vllm_config": server(), "route": "rows", "block_tokens": 64} | more
    assert uncaptured(settings=Settings.of({"method": "rq"} | flat), **arguments) == reason


def test_graphs_are_said_to_be_of_single_tokens_where_the_engine_has_any(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: list[Any] = [None]
    monkeypatch.setattr(backends, "asked", lambda vllm_config: wanted[0])

    def support(stock: AttentionCGSupport, block_tokens: int = 64) -> AttentionCGSupport:
        class Stock:
            @classmethod
            def get_cudagraph_support(cls, *arguments: Any) -> AttentionCGSupport:
                return stock

        builder = type("Builder", (backends.EpsBuilder, Stock), {})
        found: AttentionCGSupport = builder.get_cudagraph_support(server(), SimpleNamespace(block_size=block_tokens))  # type: ignore[arg-type]
        return found

    assert support(AttentionCGSupport.ALWAYS) == AttentionCGSupport.ALWAYS
    wanted[0] = Asked({"method": "rq"}, "rows")
    assert support(AttentionCGSupport.ALWAYS) == AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    assert support(AttentionCGSupport.NEVER) == AttentionCGSupport.NEVER
    assert support(AttentionCGSupport.ALWAYS, 128) == AttentionCGSupport.NEVER


def test_kernels_that_cannot_be_captured_do_not_start() -> None:
    from eps_cuda.integrations.vllm.graphs import DecodeGraphs

    with pytest.raises(ConfigError, match=r'cannot hold kernels numba: .*"cudagraph_mode": "PIECEWISE"'):
        DecodeGraphs(SimpleNamespace(cache=SimpleNamespace(kernels="numba")), 4, 256)
