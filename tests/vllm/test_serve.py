"""`vllm serve` with EPS on, asked by the `openai` client over the loopback address."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import engines
import openai
import pytest

SERVE = (
    "import sys; from pathlib import Path; from eps_core.integrations.settings import Settings; "
    "from eps_core.load import load_engine; sys.exit(load_engine('vllm').serve(Path({path!r}), "
    "Settings.of({settings!r}), '127.0.0.1', {port}, {more!r}))"
)
ASK = (
    "import openai; print(openai.OpenAI(base_url={url!r} + '/v1', api_key='none').completions.create(model={model!r}, "
    "prompt={prompt!r}, max_tokens=6, temperature=0).choices[0].text)"
)
SETTINGS = {"method": "rq", "budget": 0.05}
MORE = ["--enforce-eager", "--max-model-len", "4096", "--block-size", "64", "--max-num-seqs", "8"]


class NoAnswer(AssertionError):
    """A server neither answered nor ended in its time."""


class Server:
    """A server in a process of its own, and what it wrote."""

    def __init__(self, folder: Path, settings: dict[str, Any], more: list[str]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / "server.log"
        root = Path(__file__).parents[2]
        environment = os.environ | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_SERVER_DEV_MODE": "1", "VLLM_LOGGING_LEVEL": "INFO",
            "PYTHONPATH": str(root),
        }  # fmt: skip
        code = SERVE.format(path=str(engines.DEMO), settings=settings, port=port, more=more)
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code], stdout=log, stderr=log, env=environment, start_new_session=True
            )

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=20) as answer:
            return answer.read().decode()

    def rpc(self, method: str, **settings: Any) -> Any:
        body = json.dumps({"method": method, "kwargs": settings}).encode()
        asked = urllib.request.Request(
            f"{self.url}/collective_rpc", body, {"Content-Type": "application/json"}, method="POST"
        )
        with urllib.request.urlopen(asked, timeout=20) as answer:
            return json.loads(answer.read() or b"null")

    def wait(self, seconds: float) -> bool:
        """Whether it answers; False where it ended before."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.process.poll() is not None:
                return False
            try:
                self.get("/health")
                return True
            except OSError:
                time.sleep(0.5)
        raise NoAnswer(f"no answer after {seconds} s: {self.log.read_text()[-3000:]}")

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that EPS refuses; it takes its time to say so, beside the other one."""
    one = Server(tmp_path_factory.mktemp("refused"), {"method": "meanstd", "group_size": 128}, MORE)
    yield one
    one.end()


@pytest.fixture(scope="module")
def server(refused: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    one = Server(tmp_path_factory.mktemp("serve"), SETTINGS, MORE)
    try:
        assert one.wait(300), one.log.read_text()[-3000:]
        yield one
    finally:
        one.end()


def counters(server: Server) -> dict[str, float]:
    """Of /metrics, labels left out and summed."""
    found: dict[str, float] = {}
    for line in server.get("/metrics").splitlines():
        if line and line[0] != "#":
            name = line.split("{")[0].split(" ")[0]
            found[name] = found.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
    return found


def streamed(server: Server, prompt: list[int], tokens: int = 6) -> str:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    pieces = client.completions.create(
        model=str(engines.DEMO), prompt=prompt, max_tokens=tokens, temperature=0, stream=True
    )  # fmt: skip
    return "".join(piece.choices[0].text for piece in pieces if piece.choices)


def test_eight_clients_are_streamed_their_answers(server: Server) -> None:
    asked, answers = engines.needles(*range(600, 3800, 400))
    said: dict[int, str] = {}

    def ask(number: int) -> None:
        said[number] = streamed(server, asked[number])

    clients = [threading.Thread(target=ask, args=(number,)) for number in range(len(asked))]
    for client in clients:
        client.start()
    for client in clients:
        client.join(180)
    # as many as dense: a random document may be one that the little model does not answer
    assert len(said) == 8 and sum(said[n].startswith(answer) for n, answer in enumerate(answers)) >= 7
    [found] = server.rpc("eps_stats")["results"]
    assert found["on"] and found["rows"] >= 8 * 5 and not found["fallbacks"] and found["bytes_ratio"] < 0.2


def test_a_client_that_goes_away_leaves_nothing(server: Server) -> None:
    [prompt], _ = engines.needles(2000)
    code = (
        "import openai, sys, time\n"
        f"client = openai.OpenAI(base_url={server.url + '/v1'!r}, api_key='none')\n"
        f"for piece in client.completions.create(model={str(engines.DEMO)!r}, prompt={prompt!r}, max_tokens=1900, "
        "temperature=0, stream=True, extra_body={'ignore_eos': True}):\n    print('piece', flush=True)\n"
    )
    client = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert client.stdout is not None
    for _ in range(5):
        assert client.stdout.readline() == "piece\n"

    client.kill()
    client.wait()
    time.sleep(1)  # the page may be a step behind
    end = time.monotonic() + 30
    while counters(server)["vllm:num_requests_running"] and time.monotonic() < end:
        time.sleep(0.1)
    found = counters(server)
    assert found["vllm:num_requests_running"] == found["vllm:num_requests_waiting"] == 0
    assert found["vllm:kv_cache_usage_perc"] == 0, "blocks of a request that ended are held"
    asked, answers = engines.needles(900)
    assert streamed(server, asked[0]).startswith(answers[0])


def test_counters_are_on_the_servers_own_page_and_knobs_turn(server: Server) -> None:
    [prompt], _ = engines.needles(1200)
    assert server.rpc("eps_set", budget=0.2)["results"][0]["budget"] == 0.2
    streamed(server, prompt)
    [known] = server.rpc("eps_stats")["results"]
    found, end = counters(server), time.monotonic() + 10
    while found.get("eps_rows_total") != known["rows"] and time.monotonic() < end:
        time.sleep(0.5)  # the last step is counted, though none follows
        found = counters(server)
    assert found["eps_on"] == 1 and found["eps_bytes_kv_dense_total"] > found["eps_bytes_kv_read_total"] > 0
    assert found["eps_rows_total"] == known["rows"] > 0
    assert "eps: rq" in server.log.read_text() and "sparse in 4 of 4 layers" in server.log.read_text()
    assert server.rpc("eps_set", on=False)["results"][0]["on"] is False
    streamed(server, prompt)
    assert server.rpc("eps_set", on=True)["results"][0]["on"] is True


def test_a_server_that_is_refused_does_not_answer(refused: Server) -> None:
    with suppress(NoAnswer):  # vLLM's shutdown has hung, once in hundreds of runs: what its worker says is the same
        assert not refused.wait(120) and refused.process.wait(30) != 0
    said = refused.log.read_text()
    assert "ConfigError" in said and "no multiple of EPS's units of 128" in said


def test_two_workers_are_sparse_in_their_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas, each with a line of its own on the page; shards of one model are those of test_scale_out.py."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    one = Server(tmp_path, SETTINGS, [*MORE, "--data-parallel-size", "2"])
    try:
        assert one.wait(300), one.log.read_text()[-3000:]
        asked, answers = engines.needles(900, 1200, 1400, 2100)
        clients = [
            subprocess.Popen([sys.executable, "-c", ASK.format(url=one.url, model=str(engines.DEMO), prompt=prompt)],
                             stdout=subprocess.PIPE, text=True)
            for prompt in asked
        ]  # fmt: skip
        said = [client.communicate(timeout=120)[0] for client in clients]
        assert sum(text.startswith(answer) for text, answer in zip(said, answers, strict=True)) >= 3
        workers = {line.split("{")[1].split("}")[0] for line in one.get("/metrics").splitlines() if "eps_on{" in line}
        assert workers == {'worker="0"', 'worker="1"'}
        assert one.log.read_text().count("sparse in 4 of 4 layers") == 2
    finally:
        one.end()
