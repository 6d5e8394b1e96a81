"""mlx-lm as an engine: the same decode as our own decoder's, `run` and `serve` on the command line, real clients."""

import gc
import json
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx_lm
import numpy as np
import openai
import pytest
from command import free_port, process_line, served
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm_models import tiny
from tiny_models import save_model

from eps_core.config.eps import EpsConfig
from eps_core.decode.generate import generate
from eps_core.decode.sampling import Sampling
from eps_core.decode.session import Session
from eps_core.errors import ConfigError
from eps_core.integrations.settings import Settings
from eps_core.models.config import DEMO_MODEL
from eps_core.tasks import needle
from eps_core.tasks.corpus import corpus
from eps_mlx.integrations.mlx_lm import engine as mlx_lm_engine
from eps_mlx.integrations.mlx_lm import open_engine, serve
from eps_mlx.integrations.mlx_lm.hook import Hook

RQ = {"method": "rq", "budget": 0.1, "group_size": 2, "mean_tokens": 32}
# rq rounds queries, which another order of additions may round to other steps, and bytes must be equal
WHOLE = {"method": "meanstd", "budget": 0.2, "group_size": 16}


# ---- our own decoder ----


NEEDLE = needle.needle_document(corpus(), 1200, 1, depth=0.5, num_distractors=2)
STEPS = 6


def test_the_needle_is_read_as_by_our_own_decoder() -> None:
    """Logits to rounding, and bytes: a group read in the place of another would show in both."""
    config = EpsConfig.of(**WHOLE)
    session = Session.open(None, backend="mlx")
    prompt = session.encode(NEEDLE.prompt)
    cache, pool = session.cache(config.cache_config, len(prompt) + STEPS)
    steps = list(
        generate(session.decoder, cache, pool, [prompt], STEPS, Sampling(), config.selection_config, keep_logits=True)
    )
    logits = np.stack([step.logits[0] for step in steps])
    model, tokenizer = mlx_lm.load(str(DEMO_MODEL))
    model.set_dtype(mx.float32)
    assert tokenizer.encode(NEEDLE.prompt) == prompt
    hook = Hook(model, Settings.of(WHOLE), keep_records=True)
    try:
        said = list(generate_step(mx.array(prompt), model, max_tokens=STEPS))
        stats = hook.sparse.stats()
    finally:
        hook.close()
    assert [token for token, _ in said] == [step.tokens[0] for step in steps]
    assert tokenizer.decode([token for token, _ in said]).startswith(NEEDLE.answer)
    logprobs = np.stack([np.array(one) for _, one in said])
    np.testing.assert_allclose(logprobs, logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True), atol=2e-3)
    assert stats["steps"] == STEPS + 1  # mlx-lm is one ahead of what it says
    for mine, theirs in zip(hook.sparse.records[:STEPS], steps, strict=True):
        for name in ("bytes_kv_read_est", "bytes_summary_read", "pages_visited"):
            assert getattr(mine, name) == getattr(theirs, name)
    assert stats["bytes_ratio"] < 0.22


# ---- the engine ----


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("qwen3", tmp_path_factory.mktemp("model") / "qwen3")


PROMPTS = [list(range(60)) * 5, [7, 8, 9], [9] * 40]


def test_an_engine_says_what_it_says_without_eps_in_a_pool_that_does_not_grow(directory: Path) -> None:
    device = mx.default_device()
    engine = open_engine(directory, Settings.of({**RQ, "budget": 1}), dtype="float32", max_tokens=2000, num_sequences=3)
    try:
        said = {}
        for sparse in (False, True):
            said[sparse] = [(s.sequences, s.tokens) for s in engine.generate(PROMPTS, 10, Sampling(), sparse)]
            assert engine.sparse.stats()["rows"] == (33 if sparse else 0)
            assert engine.prefill_ms is not None and engine.prefill_ms > 0
        assert said[True] == said[False]
        pool = engine.hook.pool
        assert pool is not None and pool.num_live == 0
        assert pool.spec.num_units == 188  # of 32 tokens: room for all of them, and it did not grow
        known = engine.describe()
        assert known["engine"] == "mlx-lm" and known["dtype"] == "float32" and known["versions"]["mlx-lm"]
    finally:
        engine.close()
    assert mx.default_device() == device and "make_cache" not in engine.hook.model.__dict__


def test_sampling_is_drawn_from_its_seed(directory: Path) -> None:
    engine = open_engine(directory, Settings.of(RQ))
    try:
        drawn = [
            [step.tokens[0] for step in engine.generate(PROMPTS[:1], 12, Sampling(1.5, 0.9, seed), True)]
            for seed in (1, 1, 2)
        ]
    finally:
        engine.close()
    assert drawn[0] == drawn[1] != drawn[2]


def test_what_cannot_be_opened_is_one_line(directory: Path, tmp_path: Path) -> None:
    settings, before = Settings.of(RQ), mx.default_device()
    with pytest.raises(ConfigError, match=r"no config\.json"):
        open_engine(tmp_path, settings)
    (tmp_path / "config.json").write_text('{"model_type": "nobody"}')
    with pytest.raises(ConfigError, match="mlx-lm cannot load"):
        open_engine(tmp_path, settings)
    with pytest.raises(ConfigError, match="device 'tpu' is absent"):
        open_engine(directory, settings, device="tpu")
    with pytest.raises(ConfigError, match="dtype 'int3' is unknown"):
        open_engine(directory, settings, dtype="int3")
    with pytest.raises(ConfigError, match="kernels triton are not there"):
        open_engine(directory, Settings.of({**RQ, "kernels": "triton"}))
    with pytest.raises(ConfigError, match="mlx-lm cannot load"):
        serve(tmp_path, settings, "127.0.0.1", free_port(), ())
    assert mx.default_device() == before


# ---- the server ----


class Server(NamedTuple):
    process: "subprocess.Popen[str]"
    port: int

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0)

    def stop(self) -> dict[str, Any]:
        """Ctrl-C; what its last line says."""
        self.process.send_signal(signal.SIGINT)
        out, _ = self.process.communicate(timeout=300)  # on a busy machine, too
        assert self.process.returncode == 0
        last: dict[str, Any] = json.loads(out.splitlines()[-1])
        return last


@pytest.fixture
def server(directory: Path, tmp_path: Path) -> Iterator[Server]:
    port = free_port()
    command = process_line(
        "serve", "--engine", "mlx-lm", "--model", directory, "--method", "rq", "--eps-budget", 0.1,
        "--metrics", tmp_path / "steps.jsonl", "--port", port, "--", "--prompt-cache-size", 3,
    )  # fmt: skip
    with served(command, port, tmp_path / "server.log", HF_HUB_CACHE=str(tmp_path / "absent")) as process:
        yield Server(process, port)


def test_eight_clients_at_once_one_of_which_goes_away_leave_nothing_behind(
    server: Server, directory: Path, tmp_path: Path
) -> None:
    texts = [f"the {index} sleeps " * (4 + 5 * index) for index in range(8)]
    said: dict[int, str] = {}

    def ask(index: int, most: int, leave: bool = False) -> None:
        stream = server.client().completions.create(
            model="default_model", prompt=texts[index], max_tokens=most, temperature=0, stream=True
        )
        pieces = []
        for event in stream:
            pieces.append(event.choices[0].text if event.choices else "")
            if leave and len(pieces) == 3:
                stream.close()
                break
        said[index] = "".join(pieces)

    clients = [threading.Thread(target=ask, args=(i, 3000 if i == 5 else 10 + i, i == 5)) for i in range(8)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    models = [one.id for one in server.client().models.list().data]
    assert models == [str(directory.resolve())]  # though there is no Hub cache
    again = dict(said)
    for index in (2, 7):  # their prompts are found in the server's prompt cache, copied and trimmed
        ask(index, 10 + index)
        assert said[index] == again[index]
    last = server.stop()
    assert last["live_sequences"] == 0 and last["units_in_use"] == 0 and last["fallbacks"] == {}
    # of seven clients' tokens, the two asked again, and some of the one that left in the midst of 3,000
    assert 100 < last["rows"] < 1500 and last["bytes_ratio"] < 1
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [line["type"] for line in lines] == ["run", *["step"] * last["steps"], "summary"]
    assert lines[-1]["bytes_kv_read"] == last["bytes_kv_read"] == sum(line["bytes_kv_read_est"] for line in lines[1:-1])
    assert max(len(line["lengths"]) for line in lines[1:-1]) > 2  # clients shared steps


def test_a_model_that_cannot_be_loaded_leaves_the_servers_own_to_be_asked_again(server: Server, tmp_path: Path) -> None:
    """mlx-lm drops the model that it has before it tries another."""

    def ask(model: str = "default_model", **more: Any) -> str:
        made = server.client().completions.create(model=model, prompt=text, max_tokens=8, temperature=0, **more)
        said: str = made.choices[0].text
        return said

    text = "the cat sleeps " * 20
    first = ask()
    with pytest.raises(openai.NotFoundError):
        ask(str(tmp_path / "absent"))
    assert ask(seed=1) == first == ask()  # alone and in a batch; the prompt was in the server's prompt cache
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    with pytest.raises(openai.NotFoundError):
        ask(str(adapter))  # which is refused before anything is dropped
    last = server.stop()
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    kinds = [line["type"] for line in lines]
    assert [a for a, b in zip(kinds, [*kinds[1:], "end"], strict=True) if a != b] == ["run", "step", "summary"] * 2
    assert kinds.count("step") == last["steps"] > 24
    assert last["bytes_kv_read"] == sum(line["bytes_kv_read_est"] for line in lines if line["type"] == "step")
    assert last["bytes_ratio"] == (last["bytes_kv_read"] + last["bytes_summary_read"]) / last["bytes_kv_dense"]
    assert last["live_sequences"] == 0 == last["units_in_use"] and last["on"] is True


# as shells start what runs in the foreground and in the background
@pytest.mark.parametrize("interrupt", ["default_int_handler", "SIG_IGN"])
def test_the_server_without_its_model_ends_with_one_line(interrupt: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "nobody"}')
    (model / "model.safetensors").write_bytes(b"")
    program = f"import signal; signal.signal(signal.SIGINT, signal.{interrupt}); "
    command = [sys.executable, "-c", program + "from eps_core.cli.__main__ import main; main()"]
    arguments = ["serve", "--engine", "mlx-lm", "--model", str(model), "--method", "rq", "--port", str(free_port())]
    # a hang fails, a slow machine does not
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=300)
    lines = done.stderr.splitlines()
    assert done.returncode == 2 and "Traceback" not in done.stderr and done.stdout == ""
    assert [line for line in lines if line.startswith("error: ")] == lines[-1:]
    assert f"mlx-lm cannot load {model}: " in lines[-1]


def test_what_the_server_is_asked_for_besides_is_refused_or_told_at_once(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: Any
) -> None:
    from mlx_lm import server as theirs

    monkeypatch.setattr(theirs, "run", lambda host, port, provider: None)
    settings, draft = Settings.of(RQ), ["--draft-model", str(directory)]
    with pytest.raises(ConfigError, match="KV cache of 4 bits: leave --kv-bits out"):
        serve(directory, settings, "127.0.0.1", 1, ["--kv-bits", "4"])
    assert serve(directory, Settings.of({}), "127.0.0.1", 1, ["--kv-bits", "4", *draft]) == 0
    assert serve(directory, settings, "127.0.0.1", 1, []) == 0 and not caplog.records
    assert serve(directory, settings, "127.0.0.1", 1, draft) == 0
    assert "attended densely" in caplog.text
    assert serve(directory, settings, "127.0.0.1", 1, ["--nonsense"]) == 2
    assert "--nonsense" in capsys.readouterr().err


def test_the_server_balances_the_keys_of_what_it_loads(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlx_lm import server as theirs

    loaded: list[tuple[Any, Path]] = []
    monkeypatch.setattr(theirs, "run", lambda host, port, provider: provider.load_default())
    monkeypatch.setattr(mlx_lm_engine, "balance", lambda hook, path: loaded.append((hook.model, path)))
    assert serve(directory, Settings.of(RQ), "127.0.0.1", 1, []) == 0
    assert [path for _, path in loaded] == [directory]


def test_the_server_keeps_no_k_and_v_of_a_model_that_it_has_dropped(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlx_lm import server as theirs

    def run(host: str, port: int, provider: Any) -> None:
        prompts = theirs.LRUPromptCache(3)
        model, _ = provider.load("default_model")
        cache = make_prompt_cache(model)
        list(generate_step(mx.array([1, 2, 3]), model, max_tokens=2, prompt_cache=cache))
        prompts.insert_cache(provider.model_key, [1, 2, 3], cache)
        held = weakref.ref(provider.hook.pool.paged.cache)
        del cache, model
        with pytest.raises(Exception, match="absent"):
            provider.load("/absent")
        gc.collect()
        assert held() is None and not len(prompts)

    monkeypatch.setattr(theirs, "run", run)
    assert serve(directory, Settings.of(RQ), "127.0.0.1", 1, []) == 0


def test_a_plea_to_end_is_an_interrupt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    from mlx_lm import server as theirs

    before = signal.getsignal(signal.SIGTERM)

    def main() -> None:
        signal.raise_signal(signal.SIGTERM)
        time.sleep(10)
        raise AssertionError("it went on")

    monkeypatch.setattr(theirs, "main", main)
    assert serve(Path("/m"), Settings.of(RQ), "127.0.0.1", 1, ()) == 0
    assert json.loads(capsys.readouterr().out) == {} and signal.getsignal(signal.SIGTERM) is before


def test_off_serves_mlx_lm_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlx_lm import server as theirs

    before, argv, seen = theirs.ModelProvider, sys.argv, {}

    def main() -> None:
        seen["argv"], seen["provider"] = sys.argv, theirs.ModelProvider

    monkeypatch.setattr(theirs, "main", main)
    assert serve(Path("/m"), Settings.of({}), "127.0.0.1", 1, ["--temp", "0.5"]) == 0
    assert seen["argv"] == ["mlx_lm.server", "--model", "/m", "--host", "127.0.0.1", "--port", "1", "--temp", "0.5"]
    assert theirs.ModelProvider is before and sys.argv is argv
    assert mlx_lm_engine._dtype(tiny("llama", mx.bfloat16)) == "bfloat16"
