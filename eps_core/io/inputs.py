"""The one reader of what a user names: texts, JSON and JSONL from files, pipes, devices and stdin.

Every read ends at what could be used of it, so that a device without an end is refused like any other file. What
cannot be read is a ConfigError of one line that names the file, the place in it and the fix.
"""

import codecs
import json
import math
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from eps_core.errors import ConfigError, brief

STDIN = Path("-")
MOST_BYTES = 2**26  # of a text or a JSON document, and of one line of JSONL: far more than any that EPS writes or needs
MOST_KEPT_BYTES, MOST_KEPT_LINES = 2**28, 200_000  # of a JSONL whose lines are all kept
BYTES_PER_TOKEN = 128  # the longest token of common vocabularies: 128 spaces in Llama 3's and Qwen's
MARGIN_BYTES = 2**16
MOST_DEPTH = 64  # of JSON
_CHUNK_BYTES = 2**20
_OTHER_ENCODINGS = (  # UTF-32's little-endian mark begins with UTF-16's
    (codecs.BOM_UTF32_LE, "UTF-32"), (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"), (codecs.BOM_UTF16_BE, "UTF-16"),
)  # fmt: skip


def text_bytes(num_tokens: int) -> int:
    """Most bytes of a text that `num_tokens` tokens could hold, generously."""
    return num_tokens * BYTES_PER_TOKEN + MARGIN_BYTES


def read_text(path: Path, what: str, fix: str, most_bytes: int = MOST_BYTES, limit: str = "") -> str:
    """The UTF-8 text of a file; `-`: of stdin. A byte order mark is dropped. `what` names the file in errors, `limit`
    says what `most_bytes` follow from."""
    name, data = _name(what, path), bytearray()
    with _opened(path, what, fix) as file:
        while len(data) <= most_bytes and (chunk := file.read(min(_CHUNK_BYTES, most_bytes + 1 - len(data)))):
            data += chunk
    if len(data) > most_bytes:
        raise ConfigError(f"{name} is longer than {most_bytes:,} bytes{f', {limit}' if limit else ''}: shorten it")
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        _refuse_other_encodings(data, name)
        raise ConfigError(f"{name} is not UTF-8 at byte {error.start}: convert it") from error


def read_json(path: Path, what: str, fix: str) -> Any:
    """The value of a JSON file; see `parse_json`."""
    text = read_text(path, what, fix)
    try:
        return parse_json(text)
    except ValueError as error:
        raise ConfigError(f"{_name(what, path)} is not JSON ({error}): {fix}") from error


def read_object(path: Path, what: str, fix: str) -> dict[str, Any]:
    """The JSON object in a file."""
    value = read_json(path, what, fix)
    if not isinstance(value, dict):
        raise ConfigError(f"{_name(what, path)} holds a JSON {type(value).__name__}, not an object: {fix}")
    return value


def read_jsonl(path: Path, what: str, fix: str, kept: bool = True) -> Iterator[tuple[str, dict[str, Any]]]:
    """("file, line n", object) of every line that is not blank, read as they are asked for."""
    for place, record in read_values(path, what, fix, kept):
        if not isinstance(record, dict):
            raise ConfigError(f"{place}: a JSON {type(record).__name__}, not an object: fix or remove the line")
        yield place, record


def read_values(path: Path, what: str, fix: str, kept: bool = True) -> Iterator[tuple[str, Any]]:
    """As `read_jsonl`, of lines that hold any JSON."""
    for number, line in read_lines(path, what, fix, kept):
        place = f"{path}, line {number}"
        try:
            value = parse_json(line)
        except ValueError as error:
            raise ConfigError(f"{place}: no JSON in UTF-8 ({error}): fix or remove the line") from error
        yield place, value


def read_lines(path: Path, what: str, fix: str, kept: bool = True) -> Iterator[tuple[int, bytes]]:
    """(number, line) of every line that is not blank. `kept`: the caller keeps them all, so their number is bounded."""
    name, number, total = _name(what, path), 0, 0
    with _opened(path, what, fix) as file:
        while line := file.readline(MOST_BYTES + 1):
            number, total = number + 1, total + len(line)
            if number == 1:
                _refuse_other_encodings(line, name)
                line = line.removeprefix(codecs.BOM_UTF8)
            if len(line) > MOST_BYTES:
                raise ConfigError(f"{name}, line {number} is longer than {MOST_BYTES:,} bytes: {fix}")
            if kept and (total > MOST_KEPT_BYTES or number > MOST_KEPT_LINES):
                limit = f"{MOST_KEPT_BYTES:,} bytes or {MOST_KEPT_LINES:,} lines"
                raise ConfigError(f"{name} is longer than {limit}: give a part of it")
            if line.strip():
                yield number, line


def parse_json(data: str | bytes) -> Any:
    """The value of a JSON document. Raises ValueError, in one line, also for what Python's reader takes and nothing
    after it can use: NaN and infinities, numbers past float64, depth, halves of surrogate pairs."""
    text = data if isinstance(data, str) else data.decode("utf-8")
    try:
        value = json.loads(text, parse_constant=_refuse, parse_float=_finite, parse_int=_integer)
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at character {error.pos}") from error
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    if text.count("[") + text.count("{") > MOST_DEPTH or "\\u" in text:
        _check_depth_and_texts(value)
    return value


_SURROGATES = re.compile("[\ud800-\udfff]")
_TOO_DEEP = f"it is nested more than {MOST_DEPTH} deep"


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no number of JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{brief(digits)} is past what a float64 holds")
    return value


def _integer(digits: str) -> int:
    _finite(digits)  # before Python is asked for thousands of digits
    return int(digits)


def _check_depth_and_texts(value: Any) -> None:
    level, depth = [value], 0
    while level:
        if depth >= MOST_DEPTH and any(isinstance(item, dict | list) for item in level):
            raise ValueError(_TOO_DEEP)
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below += [*item, *item.values()]
            elif isinstance(item, list):
                below += item
            elif isinstance(item, str) and _SURROGATES.search(item):
                raise ValueError("a text in it holds half of a surrogate pair")
        level, depth = below, depth + 1


@contextmanager
def _opened(path: Path, what: str, fix: str) -> Iterator[BinaryIO]:
    """A file to read, or stdin, which stays open. What cannot be opened or read is a ConfigError."""
    try:
        if path != STDIN:
            with open(path, "rb") as file:
                yield file
        elif sys.stdin is None:
            raise OSError("stdin is closed")
        else:
            yield sys.stdin.buffer
    except ConfigError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a path that no file can have
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"{_name(what, path)} cannot be read ({reason}): {fix}") from error


def _name(what: str, path: Path) -> str:
    return f"{what} {'on stdin' if path == STDIN else path}".strip()


def _refuse_other_encodings(data: bytes | bytearray, name: str) -> None:
    for mark, encoding in _OTHER_ENCODINGS:
        if data.startswith(mark):
            raise ConfigError(f"{name} is {encoding}, not UTF-8: convert it (iconv -f {encoding} -t UTF-8)")
