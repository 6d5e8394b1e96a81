"""Rows that the models of this repository are trained on: their length, their answers, their seeds."""

import re

import numpy as np
import pytest

from eps_core.tasks.corpus import corpus
from experiments.training.rows import BOS, RULER_TASKS, batch_of, needle_row, ruler_row, text_row

TEXT = corpus()


def spoken(row: np.ndarray, marked: np.ndarray) -> tuple[str, list[str]]:
    """The row as text, and what is marked in it, piece by piece."""
    text = bytes(np.where(row == BOS, 0, row).astype(np.uint8)).decode()
    edges = np.flatnonzero(np.diff(np.concatenate([[0], marked.astype(int), [0]])))
    return text, [text[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True)]


@pytest.mark.parametrize("length", [1024, 4096])
@pytest.mark.parametrize("seed", range(6))
def test_answers_of_needles_stand_in_the_text(length: int, seed: int) -> None:
    row, marked = needle_row(TEXT, length, np.random.default_rng(seed))
    text, answers = spoken(row, marked)
    assert row.shape == marked.shape == (length + 1,) and row[0] == BOS and row[1:].max() < 256
    lines = dict(re.findall(r"# The code for (\S+) is (\d{5})\.", text))
    asked = re.findall(r"# What is the code for (\S+)\?", text)
    assert asked and answers == [lines[key] for key in asked]


@pytest.mark.parametrize("task", RULER_TASKS)
@pytest.mark.parametrize("seed", range(4))
def test_answers_of_ruler_are_in_the_order_of_the_text(task: str, seed: int) -> None:
    row, marked = ruler_row(TEXT, 1024, np.random.default_rng(seed), task)
    text, answers = spoken(row, marked)
    assert row.shape == marked.shape == (1025,) and row[0] == BOS
    assert answers and all(answer.isdigit() for answer in answers)
    question = text.index("Question: ")
    places = [text.index(answer) for answer in answers]
    assert max(places) < question
    if task == "niah_multivalue":
        assert len(answers) == 4 and places == sorted(places)
        assert "given in the text are " + ", ".join(answers) + "." in text
    if task == "niah_multiquery":
        keys = re.findall(r"[a-z]+-[a-z]+", text[question : text.index("?", question)])
        assert [
            f"A secret number of {key} is {answer}." in text for key, answer in zip(keys, answers, strict=True)
        ] == [True] * 4


def test_a_batch_has_answers_and_follows_its_seed() -> None:
    rows, marked = batch_of(TEXT, 512, 8, np.random.default_rng(3))
    again, _ = batch_of(TEXT, 512, 8, np.random.default_rng(3))
    other, _ = batch_of(TEXT, 512, 8, np.random.default_rng(4))
    assert rows.shape == marked.shape == (8, 513) and marked[0].any()
    assert (rows == again).all() and (rows != other).any()
    shares = [marked_row.any() for marked_row in batch_of(TEXT, 1024, 32, np.random.default_rng(5), 1.0)[1]]
    assert all(shares)
    assert not text_row(TEXT, 512, np.random.default_rng(0))[1].any()
