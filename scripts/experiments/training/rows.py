"""The rows that run.py trains on: text with needles, and where the answers are."""

import numpy as np

from eps_core.tasks.needle import draw_key, draw_value, filler, needle_line, question

BOS = 256


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


def batch_of(text: bytes, length: int, rows: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """`rows` rows of `length` + 1 tokens, two fifths of them plain text, and True at the tokens of an answer. The first
    row always has answers: a batch of few long rows must have some to learn from."""
    pairs = []
    for row in range(rows):
        make = text_row if row and rng.random() < 0.4 else needle_row
        pairs.append(make(text, length, rng))
    return np.stack([p[0] for p in pairs]), np.stack([p[1] for p in pairs])
