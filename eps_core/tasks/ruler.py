"""Retrieval, tracing and aggregation tasks in the manner of RULER (Hsieh et al. 2024), generated from a seed.

The tasks and their settings are RULER's; the sentences are ours, the haystack is the given text in place of essays, and
no solved example precedes the question; `code_function` and `code_constant`, code to complete, are ours. Scores are
therefore comparable between methods here and not with RULER's tables: for those, pass RULER's own JSONL
(`benchmarks.load_ruler`).

`niah_single` and `niah_multikey` use the one sentence that the demo model was trained on (`tasks.needle_line`). It
answers nothing else: on every other task its dense score is about 0, and a task that dense attention fails says
nothing about EPS.
"""

import math
import re
import string
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NoReturn

import numpy as np

from eps_core.errors import ConfigError
from eps_core.tasks.needle import Sample, distinct, draw_key, filler, line_start, needle_document, with_lines

# where the thing asked for stands; the ends are left out because they are always read
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
MULTIKEY_DISTRACTORS = 3  # RULER's niah_multikey_1 has 4 keys
LONG_VALUE_DIGITS = 10
NUM_VALUES = 4  # RULER's niah_multivalue
NUM_QUERIES = 4  # RULER's niah_multiquery
VT_HOPS = 4  # RULER's vt; one chain more than its single one, or "every variable" would be the answer
VT_CHAINS = 2
CWE_COMMON = 10
CWE_LONG_BYTES = 16384  # about the 4,096 tokens from which RULER repeats words 30 and 3 times in place of 6 and 1
FWE_ASKED = 3
FWE_WORD_LETTERS = 6
FWE_ALPHA = 2  # of the zeta distribution; zeta(2) = pi^2 / 6
_LONGEST_KEY = "scarlet-mountain-00"


def check_tasks(names: Sequence[str]) -> None:
    """Raises ConfigError at the first name that is no task."""
    for name in names:
        if name not in TASKS:
            raise ConfigError(f"task {name!r} is unknown: choose among {', '.join(TASKS)}")


def make_sample(task: str, text: bytes, num_bytes: int, seed: int, depth: float = 0.5) -> Sample:
    """One question in a prompt of at most `num_bytes` bytes of UTF-8, nearly all of them used.

    `text` is what haystacks are cut from. The first thing asked for stands at `depth`, 0 to 1, where the task places
    anything. Deterministic by all arguments. Raises ConfigError where the task is unknown or does not fit.
    """
    check_tasks([task])
    sample = TASKS[task](text, num_bytes, seed, depth)
    return sample if sample.lead else replace(sample, lead=sample.prompt.rpartition("Answer: ")[2])


def _needles_in_demo_format(
    task: str, num_distractors: int, text: bytes, num_bytes: int, seed: int, depth: float
) -> Sample:
    doc = needle_document(text, num_bytes, seed, depth, num_distractors)
    return Sample(task, doc.prompt, (doc.answer,), depth, lead=doc.lead)


def _digits(rng: np.random.Generator, num_digits: int) -> str:
    """A number without a leading zero, as RULER draws them."""
    return str(rng.integers(1, 10)) + "".join(map(str, rng.integers(0, 10, num_digits - 1)))


def _uuid(rng: np.random.Generator) -> str:
    return str(uuid.UUID(bytes=rng.bytes(16), version=4))


def _listing(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


def _no_room(task: str, num_bytes: int) -> NoReturn:
    raise ConfigError(f"task {task} does not fit a prompt of {num_bytes:,} bytes: raise --context")


def _hide(
    task: str, text: bytes, num_bytes: int, rng: np.random.Generator, head: str, tail: str, placed: list,
    place_of: Callable[[str, int], int] = line_start,
) -> str:  # fmt: skip
    """`head`, filler with each (depth, line) of `placed` inserted at a line's end, `tail`. Equal places keep order.
    `place_of` moves a place to where a line may stand."""
    room = num_bytes - len((head + tail + "".join(line for _, line in placed)).encode())
    if room < 0:
        _no_room(task, num_bytes)
    body = filler(text, room, rng).decode("utf-8", errors="ignore")
    places = ((place_of(body, int(depth * len(body))), line) for depth, line in placed)
    return head + with_lines(body, sorted(places, key=lambda pair: pair[0])) + tail


def _spread(depth: float, count: int) -> list[float]:
    """`count` depths, the first at `depth` and the rest evenly on, around the end."""
    return [(depth + i / count) % 1.0 for i in range(count)]


def _hidden_numbers(
    task: str, num_keys: int, num_values: int, num_asked: int, num_digits: int, text: bytes, num_bytes: int, seed: int,
    depth: float,
) -> Sample:  # fmt: skip
    """RULER's niah over essays: `num_keys` keys of `num_values` numbers each, of which `num_asked` keys are asked."""
    rng = np.random.default_rng(seed)
    keys = distinct(draw_key, num_keys, rng)
    values = distinct(lambda rng: _digits(rng, num_digits), num_keys * num_values, rng)
    owners = [key for key in keys for _ in range(num_values)]
    lines = [f"\nA secret number of {key} is {value}.\n" for key, value in zip(owners, values, strict=True)]
    num_wanted = num_asked * num_values  # keys asked for come first
    depths = _spread(depth, num_wanted) + rng.random(len(lines) - num_wanted).tolist()
    asked = _listing(keys[:num_asked])
    noun, verb = ("number", "is") if num_wanted == 1 else ("numbers", "are")
    head = "Secret numbers are hidden in the following text. Remember them: a question about them follows.\n"
    tail = (
        f"\nQuestion: What {verb} the secret {noun} of {asked}?\nAnswer: The secret {noun} of {asked} given in the "
        f"text {verb}"
    )
    prompt = _hide(task, text, num_bytes, rng, head, tail, list(zip(depths, lines, strict=True)))
    return Sample(task, prompt, tuple(values[:num_wanted]), depth)


def _uuid_needles(text: bytes, num_bytes: int, seed: int, depth: float) -> Sample:
    """RULER's niah_multikey_3: UUID keys and values in a haystack of nothing but other needles."""
    rng = np.random.default_rng(seed)
    head = "Each line gives the secret UUID of a key. Remember them: a question about one of them follows.\n"
    asked, value = _uuid(rng), _uuid(rng)
    tail = f"\nQuestion: What is the secret UUID of {asked}?\nAnswer: The secret UUID of {asked} is"
    needle = f"The secret UUID of {asked} is {value}.\n"
    count = (num_bytes - len(head + tail)) // len(needle)
    if count < 2:
        _no_room("niah_uuid", num_bytes)
    lines = [f"The secret UUID of {_uuid(rng)} is {_uuid(rng)}.\n" for _ in range(count - 1)]
    lines.insert(int(depth * count), needle)
    return Sample("niah_uuid", head + "".join(lines) + tail, (value,), depth)


def _associative_recall(text: bytes, num_bytes: int, seed: int, depth: float) -> Sample:
    """A list of key and value pairs that fills the prompt; the value of one key is asked (Arora et al. 2023)."""
    rng = np.random.default_rng(seed)
    head = "Each line gives a key and its value.\n"

    def tail(key: str) -> str:
        return f"\nQuestion: Which value does the list give for {key}?\nAnswer: The value of {key} is"

    room = num_bytes - len(head) - len(tail(_LONGEST_KEY))
    pairs: dict[str, str] = {}
    while room >= len(f"{_LONGEST_KEY}: 00000\n"):
        # two digits make more keys than adjectives and nouns alone, enough for any context
        key = f"{draw_key(rng)}-{_digits(rng, 2)}"
        if key not in pairs:
            pairs[key] = _digits(rng, 5)
            room -= len(f"{key}: {pairs[key]}\n")
    if len(pairs) < 2:
        _no_room("associative_recall", num_bytes)
    keys = list(pairs)
    asked = keys[int(depth * len(keys))]
    lines = "".join(f"{key}: {value}\n" for key, value in pairs.items())
    return Sample("associative_recall", head + lines + tail(asked), (pairs[asked],), depth)


def _variable_tracking(text: bytes, num_bytes: int, seed: int, depth: float) -> Sample:
    """RULER's vt: chains of assignments, in order and far apart; asked are all names that hold the first's value."""
    rng = np.random.default_rng(seed)
    names = distinct(lambda rng: "".join(rng.choice(list(string.ascii_uppercase), 5)), VT_CHAINS * (VT_HOPS + 1), rng)
    values = distinct(lambda rng: _digits(rng, 5), VT_CHAINS, rng)
    placed = []
    for chain, value in enumerate(values):
        own = names[chain * (VT_HOPS + 1) : (chain + 1) * (VT_HOPS + 1)]
        first = depth if chain == 0 else float(rng.random()) * 0.5
        depths = [first, *np.sort(rng.uniform(first, 1.0, VT_HOPS)).tolist()]
        rights = [value, *(f"VAR {name}" for name in own)]
        placed += [
            (d, f"\nVAR {name} = {right}\n") for d, name, right in zip(depths, own, rights[: VT_HOPS + 1], strict=True)
        ]
    head = "Follow the chains of variable assignments hidden in the following text.\n"
    tail = (
        f"\nQuestion: Which variables hold the value {values[0]}?\nAnswer: By the assignments in the text, "
        f"{VT_HOPS + 1} variables hold the value {values[0]}:"
    )
    prompt = _hide("vt", text, num_bytes, rng, head, tail, placed)
    return Sample("vt", prompt, tuple(names[: VT_HOPS + 1]), depth)


def _code_lookup(task: str, line: str, asked: str, text: bytes, num_bytes: int, seed: int, depth: float) -> Sample:
    """Code to complete: definitions by `line` stand between those of the text's modules; `asked` asks for one."""
    rng = np.random.default_rng(seed)
    names = [key.replace("-", "_") for key in distinct(draw_key, 1 + MULTIKEY_DISTRACTORS, rng)]
    values = distinct(lambda rng: _digits(rng, 5), len(names), rng)
    lines = [line.format(name=name, NAME=name.upper(), value=value) for name, value in zip(names, values, strict=True)]
    depths = [depth, *rng.random(MULTIKEY_DISTRACTORS).tolist()]
    lead = "    assert " + asked.format(name=names[0], NAME=names[0].upper()) + " == "
    tail = f"\n\n\ndef test_{names[0]}():\n{lead}"
    placed = list(zip(depths, lines, strict=True))
    return Sample(task, _hide(task, text, num_bytes, rng, "", tail, placed, _between), (values[0],), depth, lead=lead)


def _between(body: str, place: int) -> int:
    """Return where the nearest function or class begins, at most a tenth of the body away; else a line's end."""
    reach = len(body) // 10
    starts = re.compile(r"\n(?=\n\n(def|class|@))").finditer(body, max(0, place - reach), place + reach)
    return min((one.end() for one in starts), key=lambda end: abs(end - place), default=line_start(body, place))


def _common_words(text: bytes, num_bytes: int, seed: int, depth: float) -> Sample:
    """RULER's cwe: a numbered list in which 10 words come far oftener than the others. The words are the text's."""
    rng = np.random.default_rng(seed)
    words = sorted({word.decode() for word in re.findall(rb"\b[a-z]{4,9}\b", text)})
    rng.shuffle(words)
    common_repeats, other_repeats = (30, 3) if num_bytes >= CWE_LONG_BYTES else (6, 1)
    head = "In the following numbered list some words come more often than others.\n"
    tail = (
        f"\nQuestion: Which {CWE_COMMON} words come most often in the list?\nAnswer: The {CWE_COMMON} words that come "
        "most often are:"
    )
    entries: list[str] = []
    room = num_bytes - len(head) - len(tail)
    for rank, word in enumerate(words):
        repeats = common_repeats if rank < CWE_COMMON else other_repeats
        room -= repeats * len(f"{len(entries) + repeats}. {word} ")
        if room < 0:
            break
        entries += [word] * repeats
    else:
        raise ConfigError(
            f"task cwe at {num_bytes} bytes needs more than the {len(words)} different words of this text: give a "
            "longer --text"
        )
    if len(entries) < CWE_COMMON * (common_repeats + other_repeats):
        _no_room("cwe", num_bytes)
    rng.shuffle(entries)
    listing = " ".join(f"{number}. {word}" for number, word in enumerate(entries, start=1))
    return Sample("cwe", head + listing + tail, tuple(words[:CWE_COMMON]))


def _frequent_words(text: bytes, num_bytes: int, seed: int, depth: float) -> Sample:
    """RULER's fwe: coded words whose counts fall as the zeta distribution; the first rank is noise, `...`."""
    rng = np.random.default_rng(seed)
    letters = list(string.ascii_lowercase)
    # RULER takes a fiftieth of the tokens; a token is about 4 bytes
    vocabulary = distinct(lambda rng: "".join(rng.choice(letters, FWE_WORD_LETTERS)), max(num_bytes // 200, 8), rng)
    vocabulary[0] = "..."
    head = "Count how often each coded word comes in the following text.\n"
    tail = (
        f"\nQuestion: Leave out the dots. Which {FWE_ASKED} coded words come most often?\n"
        f"Answer: The {FWE_ASKED} coded words that come most often are:"
    )
    shares = np.arange(1, len(vocabulary) + 1) ** -float(FWE_ALPHA) / (math.pi**2 / 6)
    sizes = np.array([len(word) + 1 for word in vocabulary])
    room = num_bytes - len(head) - len(tail)
    num_words = 0
    for step in (1 << bit for bit in reversed(range(max(room, 1).bit_length() + 1))):
        if (((num_words + step) * shares).astype(int) * sizes).sum() <= room:
            num_words += step
    counts = (num_words * shares).astype(int)
    if room < 0 or len(set(counts[: FWE_ASKED + 2])) < FWE_ASKED + 2:  # equal counts would leave the answer open
        _no_room("fwe", num_bytes)
    words = [word for word, count in zip(vocabulary, counts, strict=True) for _ in range(count)]
    rng.shuffle(words)
    return Sample("fwe", head + " ".join(words) + tail, tuple(vocabulary[1 : 1 + FWE_ASKED]))


TASKS: dict[str, Callable[[bytes, int, int, float], Sample]] = {
    "niah_single": partial(_needles_in_demo_format, "niah_single", 0),
    "niah_multikey": partial(_needles_in_demo_format, "niah_multikey", MULTIKEY_DISTRACTORS),
    "niah_digits": partial(_hidden_numbers, "niah_digits", 1, 1, 1, LONG_VALUE_DIGITS),
    "niah_multivalue": partial(_hidden_numbers, "niah_multivalue", 1, NUM_VALUES, 1, 7),
    "niah_multiquery": partial(_hidden_numbers, "niah_multiquery", NUM_QUERIES, 1, NUM_QUERIES, 7),
    "niah_uuid": _uuid_needles,
    "associative_recall": _associative_recall,
    "vt": _variable_tracking,
    "code_function": partial(_code_lookup, "code_function", "\n\ndef {name}():\n    return {value}\n", "{name}()"),
    "code_constant": partial(_code_lookup, "code_constant", "\n\n{NAME} = {value}\n", "{NAME}"),
    "cwe": _common_words,
    "fwe": _frequent_words,
}
