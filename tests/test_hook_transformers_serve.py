"""`transformers serve` with EPS in it, asked by the `openai` client over the loopback address."""

import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from command import free_port, served
from tiny_models import save_model

from eps_core.errors import ConfigError
from eps_core.integrations.settings import Settings
from eps_cuda.integrations.transformers import serve
from eps_cuda.integrations.transformers import server as server_module

ROOT = Path(__file__).parent.parent
FLAT = {"method": "box", "group_size": 2, "budget": 0.2, "num_sink_tokens": 2, "num_recent_tokens": 4}
SETTINGS = Settings.of(FLAT)
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
CODE = """
import sys
from pathlib import Path
from eps_core.integrations.settings import Settings, from_environment
from eps_cuda.integrations.transformers import serve
sys.exit(serve(Path(sys.argv[1]), Settings.of(from_environment()), "127.0.0.1", int(sys.argv[2]), ["--device", "cpu"]))
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int, Path, subprocess.Popen]]:
    """(model, port, metrics file, process) of a running server."""
    folder = tmp_path_factory.mktemp("served")
    path, metrics = save_model("llama2", folder / "model"), folder / "steps.jsonl"
    (path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "chat_template": TEMPLATE})
    )
    port = free_port()
    own = {f"EPS_{name.upper()}": str(value) for name, value in FLAT.items()}
    own |= {"EPS_METRICS": str(metrics), "PYTHONPATH": str(ROOT)}
    line = [sys.executable, "-c", CODE, str(path), str(port)]
    with served(line, port, folder / "log", **own, HF_HUB_CACHE=str(folder / "absent")) as process:
        yield str(path), port, metrics, process
        assert "sparse in 2 of 2 layers" in (folder / "log").read_text()


def stats(port: int) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/eps/stats", timeout=30) as answer:
        given: dict[str, Any] = json.load(answer)
    return given


def test_keys_are_balanced_before_it_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_model("llama2", tmp_path / "model")

    def balance(model: Any, folder: Path, config: Any) -> None:
        raise ConfigError(f"{type(model).__name__} of {folder} for {config.method}")

    def served_at_once(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("keys are not balanced")

    monkeypatch.setattr(server_module, "balance", balance)
    monkeypatch.setattr(server_module, "eps", served_at_once)
    with pytest.raises(ConfigError, match=f"LlamaForCausalLM of {path} for box"):
        serve(path, SETTINGS, "127.0.0.1", free_port(), ["--device", "cpu"])


def test_a_client_is_answered_in_a_stream_and_eps_is_in_it(server: Any) -> None:
    model, port, metrics, process = server
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    assert [one.id for one in client.models.list().data] == [model]  # though there is no Hub cache
    before = stats(port)["steps"]
    ask = {"model": model, "prompt": "ab" * 150, "max_tokens": 8, "temperature": 0}
    whole = client.completions.create(**ask).choices[0].text
    pieces = [one.choices[0].text for one in client.completions.create(**ask, stream=True) if one.choices]
    assert "".join(pieces) == whole and len(pieces) >= 8
    given = stats(port)
    assert given["steps"] - before == 14 and given["fallbacks"] == {} and given["bytes_ratio"] < 0.5
    message = [{"role": "user", "content": "ab" * 150}]
    said = client.chat.completions.create(model=model, messages=message, max_tokens=8, temperature=0, stream=True)
    assert sum(bool(one.choices and one.choices[0].delta.content) for one in said) >= 7

    def asked(length: int) -> str:
        text: str = client.completions.create(**{**ask, "prompt": "c" * length}).choices[0].text
        return text

    lengths = [40, 300, 90, 200, 10, 150, 60, 250]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(asked, lengths))
    assert together[:2] == [asked(length) for length in lengths[:2]]

    # a client that goes in mid-stream: its request ends, and the server answers the next
    stream = client.completions.create(**{**ask, "max_tokens": 200}, stream=True)
    next(iter(stream))
    stream.close()
    assert client.completions.create(**ask).choices[0].text == whole
    assert stats(port)["fallbacks"] == {}

    process.send_signal(signal.SIGTERM)
    process.wait(30)
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert lines[0]["type"] == "run" and lines[-1]["type"] == "summary"
    assert lines[-1]["steps"] == len(lines) - 2 > 14


@pytest.mark.parametrize("flag", ["--continuous-batching", "--compile", "--attn-implementation=eager"])
def test_flags_that_cannot_go_with_it_are_refused_by_name(flag: str) -> None:
    with pytest.raises(ConfigError, match=f"serve {flag.split('=')[0]} cannot go with EPS"):
        serve(Path("anywhere"), SETTINGS, "127.0.0.1", 1, [flag])


def test_a_flag_that_the_server_does_not_have_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"transformers serve: .*--nonsense"):
        serve(Path("anywhere"), SETTINGS, "127.0.0.1", 1, ["--nonsense", "3"])


def test_a_model_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="transformers serve cannot start"):
        serve(tmp_path / "none", SETTINGS, "127.0.0.1", 1, ["--device", "cpu"])
