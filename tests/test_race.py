"""The race of decode steps: what a round is, its table by hand, and a race of a tiny model."""

from collections.abc import Callable
from pathlib import Path

import pytest
import race
from command import program, refused

from eps_core.decode.session import Session


def test_each_round_begins_with_another_runner() -> None:
    order: list[str] = []

    def runner(name: str, seconds: list[float]) -> race.Steps:
        def steps(number: int) -> list[float]:
            order.append(f"{name}{number}")
            return seconds[:number]

        return steps

    found = race.race({"a": runner("a", [0.001, 0.003, 0.002]), "b": runner("b", [0.01] * 3)}, 3, 3)
    assert order == ["a2", "b2", "a3", "b3", "b3", "a3", "a3", "b3"]
    assert found == {"a": [pytest.approx(2.0)] * 3, "b": [pytest.approx(10.0)] * 3}
    assert race.race({"a": runner("a", [])}, 0, 3) == {"a": []} and len(order) == 8


def test_prompts_are_timed_in_turns() -> None:
    order: list[str] = []

    def opened(name: str, seconds: float | None) -> Callable:
        def run() -> race.Contestant:
            order.append(name)
            return None if seconds is None else seconds + len(order), lambda number: [float(len(order))] * number

        return run

    seconds = {"a": 1.0, "given": None, "b": 2.0, "llama.cpp x": 3.0}
    runners, firsts = race.prefill_in_turns({name: opened(name, one) for name, one in seconds.items()}, 3, max)
    assert order == ["a", "given", "b", "llama.cpp x", "a", "b", "a", "b"]
    assert firsts == {"a": [2.0, 6.0, 8.0], "b": [5.0, 8.0, 10.0], "llama.cpp x": [7.0]}
    assert list(runners) == list(seconds) and runners["a"][0] == 8.0


def test_lengths_of_a_ragged_batch() -> None:
    assert race.lengths_of(4096, 8, False) == [4096] * 8 and race.lengths_of(100, 1, True) == [100]
    ragged = race.lengths_of(32768, 8, True)
    assert (ragged[0], ragged[-1], len(ragged)) == (32768, 8192, 8) and ragged == sorted(ragged, reverse=True)


def test_table_by_hand() -> None:
    row = {"model": "m", "batch": 1, "ragged": False, "first_token_s": 2.0}
    rows = [
        {**row, "runner": "EPS", "context_tokens": 1000, "step_ms": [1.0, 3.0, 9.0], "first_token_s": [5.0, 1.0, 4.0]},
        {**row, "runner": "EPS", "context_tokens": 3000, "step_ms": [4.0], "first_token_s": None},
        {**row, "runner": "other", "context_tokens": 3000, "step_ms": [8.0, 10.0], "batch": 8, "ragged": True},
    ]
    text = race.table(rows)
    assert "| EPS | 3.0 | 4.0 | 0.50 | 4.0 | - |" in text
    prompts = [{**one, "step_ms": [], "model": "p"} for one in rows[:2]]
    assert "p:\n\n| runner | first token at 1,000, s | first token at 3,000, s |" in race.table([*rows, *prompts])
    assert "| EPS | 4.0 | - |" in race.table(prompts)
    assert "m, 8 sequences of a quarter of it to all:" in text and "| other | 9.0 | - | 2.0 |" in text


def test_runners_of_a_tiny_model_step(saved: Callable) -> None:
    """From K and V that are given, or from a prefill of their own, which alone is timed."""
    path = saved("llama2")
    session = Session.open(path, "cuda", "cpu", "float32")
    prompts = [[1 + (7 * i) % 90 for i in range(length)] for length in race.lengths_of(200, 2, True)]
    prefix = session.prefix(prompts[0][:-1])
    for name, config, weights, verify in race.OURS:
        for own, alone in ((prefix, prompts), (None, prompts[:1])):
            seconds, steps = race.run_eps(session, config, alone, 80, weights, verify, own)
            assert (seconds is None) == (own is not None), name
            assert len(steps(3)) >= 3 and min(steps(2)) > 0
    model = race.transformers_model(path, "float32")
    for filled in (None, prefix.keys_values):
        seconds, steps = race.run_transformers(model, prompts[:1], filled)
        assert (seconds is None) == (filled is not None) and len(steps(2)) == 2


@pytest.mark.parametrize(("words", "said"), [
    (("--context", "10"), "--model is missing"), (("--model", "FOLDER", "--context", "99999"), "beyond the model's"),
])  # fmt: skip
def test_what_cannot_run_is_told_in_a_line(words: tuple, said: str, saved: Callable, tmp_path: Path) -> None:
    line = [str(saved("llama2")) if word == "FOLDER" else word for word in words]
    refused([*line, "-o", "race.jsonl"], tmp_path, said, main=program("race.py"))
