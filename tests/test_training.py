"""Rows that the models of this repository are trained on: their length, their answers, their seeds."""

import re

import numpy as np
import pytest

from eps_core.tasks.corpus import corpus
from experiments.training.rows import BOS, batch_of, needle_row, text_row

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


def test_a_batch_has_answers_and_follows_its_seed() -> None:
    rows, marked = batch_of(TEXT, 512, 8, np.random.default_rng(3))
    again, _ = batch_of(TEXT, 512, 8, np.random.default_rng(3))
    other, _ = batch_of(TEXT, 512, 8, np.random.default_rng(4))
    assert rows.shape == marked.shape == (8, 513) and marked[0].any()
    assert (rows == again).all() and (rows != other).any()
    assert not text_row(TEXT, 512, np.random.default_rng(0))[1].any()
