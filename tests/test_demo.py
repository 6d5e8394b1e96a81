"""`scripts/demo.py`: two answers of a chat model beside what they read; and how a model is fetched for it."""

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tiny_models
from command import Outcome, last, outcome
from test_terminal import CODE, Screen

from eps_core.cli.main import main

QUESTION = "Who fell?"
TEMPLATE = "{% for message in messages %}<s>{{ message['content'] }}\n{% endfor %}"


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, with a tiny model of 2,048 tokens in the place of the fetched one, and a document that fits."""
    import demo
    import get_model

    monkeypatch.setenv("EPS_MODEL_CACHE", str(tmp_path / "models"))
    tiny_models.changed(
        get_model.model_folder(demo.MODEL),
        "llama2",
        config={"max_position_embeddings": 2048},
        files={"tokenizer_config.json": {"chat_template": TEMPLATE}},
    )
    known = replace(get_model.MODELS[demo.MODEL], num_layers=tiny_models.COMMON["num_hidden_layers"])
    monkeypatch.setitem(get_model.MODELS, demo.MODEL, known)
    monkeypatch.setattr(demo, "document", lambda: "It was a dark and stormy night; the rain fell in torrents.\n" * 24)
    monkeypatch.setattr(demo, "QUESTION", QUESTION)
    return demo


def ran(demo: ModuleType, folder: Path, *flags: str) -> Outcome:
    return outcome(list(flags), folder, main=lambda: main(demo.demo))


def test_two_answers_a_small_table_and_what_was_saved(
    demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    class Chat(demo.Chat):
        def report(self, ran: Any, dense: Any, eps: Any, *more: Any) -> dict[str, Any]:
            seen.extend((self.job, dense, eps))
            return super().report(ran, dense, eps, *more)

    monkeypatch.setattr(demo, "Chat", Chat)
    done = ran(demo, tmp_path)
    assert done.code in (None, 0), done.err
    answers = ("dense > ", "eps   > ")
    lines = [line for line in done.out.splitlines() if not line.startswith(answers)]
    assert max(map(len, lines)) <= 80 and f"question  {QUESTION}" in lines
    assert [line.split(" > ")[0].strip() for line in done.out.splitlines() if line.startswith(answers)] == [
        "dense", "eps",
    ]  # fmt: skip
    job, dense, eps = seen
    summary = eps.summary()
    assert 0.5 < summary["bytes_ratio"] < 0.9  # sparse: 1,024 of some 1,400 tokens
    for row in (f"{summary['tokens_per_s']:.1f}", f"{100 * summary['bytes_ratio']:.1f} %", "the same answer"):
        assert any(row in line for line in lines), row
    text = " ".join(lines)
    assert f"saved {100 * (1 - summary['bytes_ratio']):.0f} % of the reads of the KV cache. " in text
    assert "An estimate from byte counts, not measured: at 32,768 tokens (this model holds 2,048)" in text
    # the estimate's formula is that of the records
    for side, outcome_ in enumerate((dense, eps)):
        for record in outcome_.records:
            assert demo.step_bytes(job, record.lengths[0])[side] == record.bytes_read


def test_flags_are_those_of_run(demo: ModuleType, tmp_path: Path) -> None:
    short = ("--max-new-tokens", "2", "--no-stop", "--kernels", "arrays")
    found = last(ran(demo, tmp_path, *short))
    assert found["prompt_tokens"] > 1300 and found["new_tokens"] == 2 and found["eps"]["method"] == "rq"
    assert last(ran(demo, tmp_path, *short, "--method", "off"))["eps"] is None
    assert last(ran(demo, tmp_path, *short, "--prompt", "x"))["prompt_tokens"] < 20
    own = last(ran(demo, tmp_path, *short, "--prompt", "x", "--model", str(tmp_path / "models" / demo.MODEL)))
    assert own["eps"] is None  # as `eps-proto run` has it


def nowhere(*args: object) -> None:
    import get_model

    raise get_model.NowhereError("no network")


def test_without_a_network_the_embedded_model_answers(
    demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[Any] = []
    monkeypatch.setattr(demo, "is_there", lambda *args: False)
    monkeypatch.setattr(demo, "get_model", nowhere)
    monkeypatch.setattr(demo.run_command, "main", lambda *args, **more: called.append((args, more)))
    done = ran(demo, tmp_path, "--kl")
    assert done.code in (None, 0) and done.err.count("\n") == 1 and "embedded model" in done.err
    assert called == [((["--kl"], "eps-proto run"), {"standalone_mode": False})]


@pytest.mark.parametrize("flags, says", [(["--bogus"], "No such option"), (["--kl", "x"], "unexpected extra argument")])
def test_wrong_flags_are_refused_before_anything_is_fetched(
    flags: list[str], says: str, demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "is_there", nowhere)
    done = ran(demo, tmp_path, *flags)
    assert done.code == 2 and says in done.err and done.err.count("\n") == 1 and not done.out


def test_a_model_that_is_not_whole_is_named_with_the_fix(demo: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "models" / demo.MODEL
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    done = ran(demo, tmp_path)
    assert done.code == 2 and done.err.startswith(f"error: DIR {folder} is damaged (") and done.err.count("\n") == 1
    assert "remove the folder" in done.err
    weights.unlink()
    done = ran(demo, tmp_path)
    assert done.code == 2 and "lacks model.safetensors" in done.err and "remove the folder" in done.err


def test_how_much_of_a_download_has_come_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import get_model

    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(get_model, "LOOK_SECONDS", 0.01)
    with get_model.watched(tmp_path, 3.0):
        (tmp_path / "in").mkdir()
        for size in (1, 3):
            (tmp_path / "in" / "part").write_bytes(bytes(size * 10**6))
            _until(lambda size=size: f"{size} of 3 MB" in CODE.sub("", screen.getvalue()))  # type: ignore[misc]


def _until(true: Callable[[], bool]) -> None:
    for _ in range(1000):
        if true():
            return
        time.sleep(0.01)
    raise AssertionError("it did not come")


def test_kernels_compile_while_the_model_is_fetched(demo: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run beside is waited for, or ends where the fetch fails."""
    started: list[subprocess.Popen] = []

    def popen(line: list[str], **more: Any) -> subprocess.Popen:
        assert line[:4] == [sys.executable, "-m", "eps_core.cli", "run"]
        started.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.5)"], **more))
        return started[-1]

    monkeypatch.setattr(demo, "Popen", popen)
    with demo.compiling_kernels():
        assert started[0].poll() is None
    assert started[0].returncode == 0
    with pytest.raises(KeyError), demo.compiling_kernels():
        raise KeyError
    assert started[1].returncode < 0
