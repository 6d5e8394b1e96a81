"""The rows that run.py trains on: text with needles or RULER's questions, and where the answers are."""

import numpy as np

from eps_core.tasks.needle import draw_key, draw_value, filler, needle_line, question
from eps_core.tasks.ruler import make_sample

BOS = 256
ANSWER_BYTES = 48  # at most, of four numbers of seven digits and what is between them
# RULER's look-ups of numbers. Counting (cwe, fwe), chains (vt) and 36 characters without a fault (niah_uuid) are beyond
# four layers in the hour that a training may take: after 500 steps 0 of 20 chains were right, and 12 of 20 of the last
RULER_TASKS = ("niah_digits", "niah_multivalue", "niah_multiquery", "associative_recall")


def _row(data: bytes, spans: list[tuple[int, int]], length: int) -> tuple[np.ndarray, np.ndarray]:
    """`length` + 1 tokens of `data`, whose first byte becomes BOS, and True at the tokens of `spans`."""
    answer = np.zeros(length + 1, bool)
    for start, end in spans:
        answer[start:end] = True
    tokens = np.frombuffer(data, np.uint8).astype(np.int64)[: length + 1]
    tokens[0] = BOS
    return tokens, answer


def text_row(text: bytes, length: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    return _row(b"\x00" + filler(text, length, rng), [], length)


def needle_row(text: bytes, length: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Needles anywhere in a text, and questions about some of them at its end."""
    most = int(np.clip(length // 100, 1, 16))
    keys = list({draw_key(rng): None for _ in range(int(rng.integers(1, most + 1)))})
    lines = {key: draw_value(rng) for key in keys}
    asked = rng.permutation(len(keys))[: int(rng.integers(1, len(keys) + 1))]
    tail, spans = b"", []
    for index in asked:
        tail += question(keys[index]).encode()
        spans.append(len(tail))
        tail += lines[keys[index]].encode() + b".\n"
    needles = [needle_line(key, value).encode() for key, value in lines.items()]
    body = filler(text, length - len(tail) - sum(map(len, needles)), rng)
    places = sorted(int(p) for p in rng.integers(0, len(body) + 1, len(needles)))
    pieces, last = [], 0
    for place, needle in zip(places, needles, strict=True):
        pieces += [body[last:place], needle]
        last = place
    data = b"\x00" + b"".join([*pieces, body[last:], tail])
    starts = [len(data) - len(tail) + span for span in spans]
    return _row(data, [(start, start + 5) for start in starts], length)


def ruler_row(
    text: bytes, length: int, rng: np.random.Generator, task: str | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """A question of `task`, or of one of RULER_TASKS, with its answers in the order in which the text gives them."""
    task = task or RULER_TASKS[rng.integers(len(RULER_TASKS))]
    sample = make_sample(task, text, length - ANSWER_BYTES, int(rng.integers(1 << 31)), float(rng.random()))
    answers = list(sample.answers)
    if task == "niah_multivalue":  # the others are asked for by name
        answers.sort(key=sample.prompt.index)
    data, spans = b"\x00" + sample.prompt.encode(), []
    for index, answer in enumerate(answers):
        data += b", " if index else b" "
        spans.append((len(data), len(data) + len(answer)))
        data += answer.encode()
    data += b".\n"
    return _row(data + filler(text, max(0, length + 1 - len(data)), rng), spans, length)


def batch_of(
    text: bytes, length: int, rows: int, rng: np.random.Generator, ruler_share: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """`rows` rows of `length` + 1 tokens, and True at the tokens of an answer. `ruler_share` of the rows are
    RULER's, and of the others two fifths plain text. The first row always has answers: a batch of few long rows must
    have some to learn from."""
    pairs = []
    for row in range(rows):
        if ruler_share and rng.random() < ruler_share:
            pairs.append(ruler_row(text, length, rng))
        else:
            make = text_row if row and rng.random() < 0.4 else needle_row
            pairs.append(make(text, length, rng))
    return np.stack([p[0] for p in pairs]), np.stack([p[1] for p in pairs])
