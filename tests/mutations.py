"""Damage to files, by a seed: fields dropped, changed and nested, numbers past any type, bytes flipped."""

import copy
import json
from collections.abc import Sequence
from random import Random
from typing import Any

JUNK: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 0.0, -0.5, 0.5, 1e-320, 1e308, -1e308, 2**31, 2**53, 2**63, -(2**63) - 1, 10**300,
    float("nan"), float("inf"), "", "x", "0", "nan", "x" * 5000, "\x00", "\ud800", "é $\\frac{1 <b>&", "[" * 200,
    "a\nb", [], {}, [[]], [None], [0, 1], [[0.5, 0.1]], {"": {}}, {"type": []},
)  # fmt: skip
# texts that Python's own JSON writer does not write
TEXTS = (
    b"NaN", b"-Infinity", b"1e999", b"9" * 5000, b'"\\ud800"', b"[" * 100_000, b'{"a":' * 3000, b"\xef\xbb\xbf",
    b"\xff\xfe", b"\xff", b"\x00", b"\n", b"\r", b"{", b"}", b",", b'"', b"//", b"0x1", b"-", b"'",
)  # fmt: skip


def mutated(value: Any, random: Random) -> Any:
    """A copy of a value of JSON with one to three faults."""
    value = copy.deepcopy(value)
    for _ in range(random.randint(1, 3)):
        value = _mutate(value, random)
    return value


def _mutate(value: Any, random: Random) -> Any:
    """One fault at a place of the value: a step is taken inwards as long as there is one, most of the times."""
    if not isinstance(value, dict | list) or not value or random.random() < 0.15:
        return _other(value, random)
    keys: list[Any] = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = random.choice(keys)
    fault = random.random()
    if fault < 0.15:
        del value[key]
    elif fault < 0.25 and isinstance(value, dict):
        value[random.choice(("", "x", "type", "method", "\ud800", "y" * 300))] = random.choice(JUNK)
    elif fault < 0.25:
        value.insert(key, copy.deepcopy(value[key]))
    elif fault < 0.3:
        value[key] = value[random.choice(keys)]
    else:
        value[key] = _mutate(value[key], random)
    return value


def _other(value: Any, random: Random) -> Any:
    if type(value) in (int, float) and random.random() < 0.4:
        return random.choice((-value, value * 1000, value / 1000, value + 1, float(value), str(value)))
    if random.random() < 0.15:
        return [value] if random.random() < 0.5 else {"x": value}
    if random.random() < 0.05:
        return _deep(value, random.choice((70, 400)))
    return random.choice(JUNK)


def _deep(value: Any, depth: int) -> Any:
    for _ in range(depth):
        value = [value]
    return value


def damaged(data: bytes, random: Random) -> bytes:
    """The bytes of a file with one fault."""
    at, fault = random.randrange(len(data) + 1), random.random()
    if fault < 0.25:
        return data[:at]
    if fault < 0.5:
        flipped = bytearray(data)
        for _ in range(random.randint(1, 8)):
            if flipped:
                flipped[random.randrange(len(flipped))] ^= 1 << random.randrange(8)
        return bytes(flipped)
    if fault < 0.6:
        return data + data[at:]
    end = at + random.choice((0, 1, 8))
    return data[:at] + random.choice(TEXTS) + data[end:]


def document(value: Any, random: Random) -> bytes:
    """A JSON file with faults in its value, in its text, or both."""
    which = random.random()
    data = json.dumps(value if which < 0.2 else mutated(value, random)).encode()
    return damaged(data, random) if which < 0.4 else data


def lines(values: Sequence[Any], random: Random) -> bytes:
    """A JSONL file with faults in one or two of its lines, in their order, or in its text."""
    which, values = random.random(), list(values)
    if which < 0.1:
        random.shuffle(values)
    elif which < 0.15:
        values = values[1:]
    elif which < 0.9:
        for _ in range(random.randint(1, 2)):
            at = random.randrange(len(values))
            values[at] = mutated(values[at], random)
    data = b"".join(json.dumps(value).encode() + b"\n" for value in values)
    return damaged(data, random) if which > 0.75 else data
