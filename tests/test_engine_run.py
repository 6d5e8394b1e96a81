"""`eps-proto run --engine` and `serve`: the same table, JSON line, metrics and CSV as of our own decoders, whatever
engine computes; and what they refuse."""

import csv
import json
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_models
from command import last, lines_of, outcome, refused

from eps_core.config.eps import EpsConfig
from eps_core.integrations import versions
from eps_core.integrations.settings import Settings
from eps_core.models import hub

MODEL = "llama2"
HERE = ("transformers", "mlx-lm")  # vLLM has an environment of its own: tests/vllm
SETTINGS = ("--method", "rq", "--eps-budget", "0.2", "--max-new-tokens", "6", "--no-stop")
PROMPT = "It was a dark and stormy night; the rain fell in torrents. " * 6


def both(engine: str, line: list[str], folder: Path, *more: str) -> list[dict[str, Any]]:
    """Return the last lines' objects of our own decoder and of an engine, whose lines of metrics are in steps.jsonl."""
    own = ["--backend", "mlx" if engine == "mlx-lm" else "cuda"]
    theirs = ["--engine", engine, "--metrics", "steps.jsonl", *more]
    return [last(outcome([*line, *flags], folder)) for flags in (own, theirs)]


@pytest.mark.parametrize("engine", HERE)
def test_an_engine_says_and_reads_what_our_own_decoder_does(engine: str, model: Path, tmp_path: Path) -> None:
    line = ["run", "--model", str(model), "--prompt", PROMPT, "--dtype", "float32", *SETTINGS]
    own, theirs = both(engine, [*line, "--eps-min-context", "355"], tmp_path, "--csv", "steps.csv")
    assert theirs["engine"] == engine and theirs["versions"][engine]
    for side in ("dense", "eps"):
        assert theirs[side]["tokens"] == own[side]["tokens"]
        assert theirs[side]["bytes_kv_read"] == own[side]["bytes_kv_read"] > 0
        assert theirs[side]["tokens_per_s"] > 0
    assert own["eps"]["fallbacks"] == {"min_context": 2}  # the prompt has 354 tokens
    for name in ("pages_visited", "fallbacks"):
        assert theirs["eps"][name] == own["eps"][name]
    assert theirs["bytes_ratio"] == own["bytes_ratio"] < 0.5
    run, *steps, summary = lines_of(tmp_path / "steps.jsonl")
    assert EpsConfig.of(**run["config"]).selection_config.budget == 0.2 and run["sparse_layers"] == [0, 1]
    assert [step["type"] for step in steps] == ["step"] * 6
    assert [step["tokens"] for step in steps] == [[token] for token in own["tokens"]]
    assert summary["bytes_ratio"] == own["bytes_ratio"] and summary["dense"]["bytes_ratio"] == 1
    assert run["prompt_tokens"] == summary["prompt_tokens"] == own["prompt_tokens"]
    assert summary["tokens_equal"] is own["tokens_equal"]
    assert outcome(["report", "steps.jsonl", "-o", "steps.html"], tmp_path).code in (None, 0)
    assert f"{engine} on {theirs['device']}" in (tmp_path / "steps.html").read_text()
    rows = list(csv.DictReader((tmp_path / "steps.csv").open()))
    assert [int(row["pages_visited"]) for row in rows] == [step["pages_visited"] for step in steps]


@pytest.mark.parametrize("engine", HERE)
def test_a_batch_of_prompts_is_run_at_once(engine: str, model: Path, tmp_path: Path) -> None:
    lines = [PROMPT[: 40 * n] for n in (3, 8, 5)]
    (tmp_path / "three.jsonl").write_text("".join(json.dumps({"prompt": one}) + "\n" for one in lines))
    line = ["run", "--model", str(model), "--engine", engine, "--dtype", "float32", *SETTINGS]
    found = last(outcome([*line, "--prompt-file", "three.jsonl"], tmp_path))
    assert [one["prompt_tokens"] for one in found["sequences"]] == [len(one) for one in lines]
    for text, one in zip(lines, found["sequences"], strict=True):
        alone = last(outcome([*line, "--prompt", text, "--no-baseline"], tmp_path))
        assert alone["dense"] is None and one["new_tokens"] == 6
        dense = last(outcome([*line[:-2], "2", "--no-stop", "--prompt", text], tmp_path))["dense"]["tokens"]
        assert one["dense_tokens"][:2] == dense
    assert found["eps"]["bytes_kv_read"] < found["dense"]["bytes_kv_read"] / 2


@pytest.mark.parametrize("engine", HERE)
def test_a_prompts_chunk_of_one_token_is_no_step(engine: str, model: Path, tmp_path: Path) -> None:
    """Of two tokens the first one is such a chunk; of 2,050 the one before the last."""
    line = ["run", "--model", str(model), "--dtype", "float32", *SETTINGS]
    own, alone = both(engine, [*line, "--prompt", "ab"], tmp_path)
    for side in ("dense", "eps"):
        assert alone[side]["tokens"] == own[side]["tokens"]
        assert alone[side]["bytes_kv_read"] == own[side]["bytes_kv_read"]
    _, *steps, _ = lines_of(tmp_path / "steps.jsonl")
    assert [step["lengths"] for step in steps] == [[2 + index] for index in range(6)]
    (tmp_path / "three.jsonl").write_text("".join(json.dumps({"prompt": one}) + "\n" for one in ("ab", PROMPT, "c")))
    found = last(outcome([*line, "--prompt-file", "three.jsonl", "--engine", engine], tmp_path))
    assert [one["new_tokens"] for one in found["sequences"]] == [6, 6, 6]
    assert found["sequences"][0]["tokens"] == alone["tokens"]


@pytest.mark.parametrize("engine", HERE)
def test_a_sequence_ends_after_a_stop_token(engine: str, model: Path, tmp_path: Path) -> None:
    line = ["run", "--model", str(model), "--engine", engine, "--prompt", PROMPT, *SETTINGS[:-1]]
    said = last(outcome([*line, "--no-stop"], tmp_path))["dense"]["tokens"]
    ends = {"eos_token_id": said[2]}
    stopping = tiny_models.changed(tmp_path / "stopping", MODEL, "generation_config.json", config=ends)
    line[2] = str(stopping)
    own = [*line[:3], "--backend", "numpy", *line[5:], "--stop"]
    for each in (line, own):
        assert last(outcome(each, tmp_path))["dense"]["tokens"] == said[: said.index(said[2]) + 1]
    # one of several that ends: with everything visited both sides read the same, whatever the engine computed ahead
    (tmp_path / "two.jsonl").write_text("".join(json.dumps({"prompt": one}) + "\n" for one in ("b" * 70, PROMPT)))
    line[line.index("--prompt") : line.index("--prompt") + 2] = ["--prompt-file", "two.jsonl"]
    line[line.index("--eps-budget") + 1] = "1"
    found = last(outcome([*line, "--metrics", "steps.jsonl"], tmp_path))
    assert found["sequences"][1]["new_tokens"] < found["sequences"][0]["new_tokens"] == 6
    assert found["eps"]["bytes_kv_read"] == found["dense"]["bytes_kv_read"] and found["bytes_ratio"] == 1
    _, *steps, _ = lines_of(tmp_path / "steps.jsonl")
    token_bytes = {step["bytes_kv_dense"] / sum(step["lengths"]) for step in steps}
    assert len(token_bytes) == 1 and all(len(step["sequences"]) <= len(step["lengths"]) for step in steps)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--kl"], "--kl belongs to our own decoders"),
        (["--backend", "cuda"], "--backend belongs to our own decoders"),
        (["--pool-tokens", "512"], "--pool-tokens belongs"),
        (["--cache-dir", "kept"], "--cache-dir belongs"),
        (["--kv-bits", "8"], "--kv-bits belongs"),
        (["--sample-by", "cdf", "--temperature", "1"], "--sample-by belongs"),
        (["--method", "off"], "has nothing to compare"),
        (["--eps-min-context", "auto"], "auto"),
    ],
)
def test_what_engines_do_not_do_is_refused(more: list[str], words: str, model: Path, tmp_path: Path) -> None:
    line = ["run", "--engine", "transformers", "--model", str(model), "--prompt", PROMPT, "--method", "rq", *more]
    refused(line, tmp_path, words)


@pytest.mark.parametrize("engine", HERE)
def test_a_prompt_longer_than_the_model_is_refused_before_anything_runs(
    engine: str, model: Path, tmp_path: Path
) -> None:
    line = ["run", "--engine", engine, "--model", str(model), "--prompt", PROMPT * 3, *SETTINGS]
    refused(line, tmp_path, "exceed the model's context of 512 tokens")


def test_serve_hands_over_the_settings_and_the_engines_own_arguments(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    module = SimpleNamespace(serve=lambda *args: calls.append(args) or 3)
    monkeypatch.setattr(hub, "load_engine", lambda name: calls.append(name) or module)
    line = ["serve", "--engine", "vllm", "--model", str(model), "--method", "rq", "--eps-budget", "0.03",
            "--port", "8123", "--", "--max-model-len", "512"]  # fmt: skip
    done = outcome(line, tmp_path)
    settings = Settings(EpsConfig.of("rq", budget=0.03))
    assert done.code == 3
    assert calls == ["vllm", (model, settings, "127.0.0.1", 8123, ("--max-model-len", "512"))]


def test_an_address_that_is_taken_is_one_line_before_anything_runs(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "load_engine", lambda name: SimpleNamespace(serve=lambda *args: 0))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        line = ["serve", "--engine", "mlx-lm", "--model", str(model), "--method", "rq"]
        refused([*line, "--port", taken.getsockname()[1]], tmp_path, "already in use")
    refused([*line, "--host", "no.such.host.invalid"], tmp_path, "nobody can listen at no.such.host.invalid")


@pytest.mark.parametrize(
    ("more", "name"), [(["--port", "9000"], "--port"), (["--host=0.0.0.0"], "--host"), (["--po", "9000"], "--port")]
)
def test_an_address_that_is_the_engines_own_argument_is_refused(
    more: list[str], name: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "load_engine", lambda name: SimpleNamespace(serve=lambda *args: 0))
    line = ["serve", "--engine", "mlx-lm", "--model", str(model), "--method", "rq", "--", *more]
    refused(line, tmp_path, f"{name} stands after --")


def test_an_engine_that_is_not_installed_is_one_line(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "package_version", lambda package: None)
    line = ["run", "--engine", "transformers", "--model", str(model), "--prompt", PROMPT, "--method", "rq"]
    refused(line, tmp_path, "pip install 'eigenpage[transformers]'")
