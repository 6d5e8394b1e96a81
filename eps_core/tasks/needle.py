"""Needle tasks over text.

A needle document is filler text with one or more lines ``# The code for KEY is VALUE.`` somewhere inside and a question
at its end.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from eps_core.errors import ConfigError

_ADJECTIVES = (
    "amber azure brave brisk broad calm clear coral crisp deep early eager fair fast fierce final fleet fresh gentle "
    "giant glad golden grand green hollow humble icy idle inner ivory jolly keen kind large late light little lively "
    "lone loud lucky major mellow merry minor misty modest narrow neat noble odd olive open outer pale plain polar "
    "prime proud quick quiet rapid rare red rich ripe royal rustic sandy scarlet secret sharp shiny silent silver "
    "simple sleepy slow small smooth snowy soft solar solid stark steady steep still stormy strong sunny sweet swift "
    "tall tame tidy tiny urban vast vivid warm wild windy wise young"
).split()
_NOUNS = (
    "acorn anchor apple arrow badger bamboo barn basin beacon bear birch bridge brook candle canyon castle cedar "
    "cliff clock cloud comet copper cove crane creek crystal dawn delta desert eagle elm ember engine falcon feather "
    "fern field fjord flame forest fox galaxy garden glacier grove harbor hawk hazel heron hill island jaguar jungle "
    "kettle lagoon lake lantern lemon lily lion lotus maple marble meadow mirror moon moss mountain oasis ocean orchid "
    "otter owl palm pebble pepper pine planet pond prairie quartz rabbit raven reef ridge river robin rocket saddle "
    "salmon shadow shore sparrow spruce star stone summit temple thunder tiger tower trail tulip tundra valley violet "
    "walnut water whale willow window winter wolf zebra"
).split()
VALUE_DIGITS = 5


@dataclass(frozen=True)
class NeedleDocument:
    """A prompt that ends just before the answer, and the answer that a correct model continues with."""

    prompt: str
    answer: str
    lead: str = ""  # the end of the prompt that begins the answer: in a chat the assistant's own words


@dataclass(frozen=True)
class Sample:
    """One question of any task, generated or read from a benchmark file.

    `answers`: what a prediction is scored against; what several of them mean (all, or any) is the task's metric.
    """

    task: str
    prompt: str
    answers: tuple[str, ...]
    depth: float | None = None  # of the first thing asked for: 0 the document's start, 1 its end; None: not placed
    max_new_tokens: int | None = None  # the benchmark's own limit; None: what the answers need
    all_classes: tuple[str, ...] = ()  # LongBench's classification
    source: str = "generated"  # or the benchmark: longbench, ruler
    lead: str = ""  # as of a NeedleDocument


def draw_key(rng: np.random.Generator) -> str:
    return f"{_ADJECTIVES[rng.integers(len(_ADJECTIVES))]}-{_NOUNS[rng.integers(len(_NOUNS))]}"


def distinct(draw: Callable[[np.random.Generator], str], count: int, rng: np.random.Generator) -> list[str]:
    """`count` different draws, in their order."""
    found: dict[str, None] = {}
    while len(found) < count:
        found[draw(rng)] = None
    return list(found)


def draw_value(rng: np.random.Generator) -> str:
    return "".join(str(digit) for digit in rng.integers(0, 10, VALUE_DIGITS))


def needle_line(key: str, value: str) -> str:
    return f"\n# The code for {key} is {value}.\n"


def question(key: str) -> str:
    return f"\n# What is the code for {key}? {_lead(key)}"


def _lead(key: str) -> str:
    return f"The code for {key} is "


def filler(text: bytes, num_bytes: int, rng: np.random.Generator, reach: int = 0) -> bytes:
    """A random window of `text`, `num_bytes` long, that starts at a line; of all lengths up to `reach` at the same."""
    if num_bytes <= 0:
        return b""
    reach = max(num_bytes, reach)
    if len(text) < reach + 400:
        raise ConfigError(
            f"{reach:,} bytes of text and 400 to choose from are wanted and the text has {len(text):,}: give a longer "
            "--text or lower --context"
        )
    start = int(rng.integers(0, len(text) - reach - 300))
    line = text.find(b"\n", start, start + 300)
    start = start if line < 0 else line + 1
    return text[start : start + num_bytes]


def needle_document(
    text: bytes, num_bytes: int, seed: int, depth: float = 0.5, num_distractors: int = 0, reach: int = 0
) -> NeedleDocument:
    """One question whose answer stands at `depth` (0 = start, 1 = end) of a document of about `num_bytes` bytes.

    `num_distractors` needles with other keys are spread over the same document. The prompt, question included, is at
    most `num_bytes` long. Deterministic by `seed`. `reach`: as of `filler`.
    """
    rng = np.random.default_rng(seed)
    keys = distinct(draw_key, num_distractors + 1, rng)
    values = [draw_value(rng) for _ in keys]
    lines = [needle_line(k, v) for k, v in zip(keys, values, strict=True)]
    tail = question(keys[0])
    room = num_bytes - len(tail) - sum(map(len, lines))
    if room < 0:
        raise ConfigError(
            f"a prompt of {num_bytes:,} bytes has no room for its question and needles, {num_bytes - room:,} "
            "bytes: raise --context"
        )
    # a user's text may be cut inside a character; the standard library's is ASCII and loses nothing
    body = filler(text, room, rng, reach).decode("utf-8", errors="ignore")
    depths = [depth, *rng.random(num_distractors)]
    places = sorted(((line_start(body, int(d * len(body))), line) for d, line in zip(depths, lines, strict=True)))
    return NeedleDocument(with_lines(body, places) + tail, values[0], _lead(keys[0]))


def with_lines(body: str, placed: Iterable[tuple[int, str]]) -> str:
    """`body` with each (character index, line) inserted; the places rise."""
    pieces, last = [], 0
    for place, line in placed:
        pieces += [body[last:place], line]
        last = place
    return "".join([*pieces, body[last:]])


def line_start(body: str, place: int) -> int:
    """The end of the line that `place` (a character index) is in, or `place` where no line ends within 120."""
    found = body.find("\n", place, place + 120)
    return place if found < 0 else found
