"""The parts that several scripts share: Markdown tables, JSONL files of measured rows, prompts and answers."""

import gzip
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from eps_core.cli.numbers import TOKENS, ListOf
from eps_core.errors import require
from eps_core.io import outputs
from eps_core.tasks.sizing import Encode


class Cell(click.ParamType):
    """(context in tokens, batch), written 65536x4."""

    name = "CELL"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        context, _, batch = value.partition("x")
        return TOKENS.convert(context, param, ctx), TOKENS.convert(batch, param, ctx)


CELLS, CONTEXTS = ListOf(Cell()), ListOf(TOKENS)


def markdown_table(head: Sequence[object], rows: Iterable[Sequence[object]], rule: str = " --- ") -> str:
    """Return a Markdown table, whose second line has `rule` for each column."""
    lines = ["| " + " | ".join(str(cell).replace("|", r"\|") for cell in line) + " |" for line in (head, *rows)]
    return "\n".join([lines[0], "|" + f"{rule}|" * len(head), *lines[1:]])


def rows_of(path: Path, *types: str) -> list[dict[str, Any]]:
    """Return the rows of these types of a JSONL, which its script wrote. Raises ConfigError where it is absent."""
    require(path.is_file(), f"{path} is absent: measure first, or name the file of the rows with -o")
    return [line for line in map(json.loads, text_of(path).splitlines()) if line.get("type") in types]


def text_of(path: Path) -> str:
    """Return the text of a file, unpacked where gzip packed it."""
    return gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text("utf-8")


@contextmanager
def replaced(path: Path) -> Iterator[outputs.JsonlWriter]:
    """Yield a writer that replaces the JSONL of a GPU's times, line by line. Raises ConfigError where `path` is another
    file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    outputs.check_start("-o", path, b'{"type": "run", "device_name": ', "JSONL of this script")
    with outputs.Output(path, "-o") as output, outputs.JsonlWriter(output) as writer:
        yield writer


@contextmanager
def appended(path: Path, inputs: Mapping[str, Path] | None = None) -> Iterator[outputs.JsonlWriter]:
    """Yield what adds lines to a JSONL. Raises ConfigError where it is one of `inputs`, by flag, or no JSONL."""
    outputs.check({"-o": path}, inputs or {})
    outputs.check_start("-o", path, b"{", "JSONL")
    with outputs.Output(path, "-o") as output:
        kept_bytes = output.file.stat().st_size if output.file is not None and output.file.exists() else 0
        with outputs.JsonlWriter(output, kept_bytes) as writer:
            yield writer


def cut(text: str, encode: Encode, num_tokens: int) -> str:
    """Return the longest start of `text` of at most `num_tokens` tokens, special ones left out, found by halving."""
    low, high = 0, len(text)
    if len(encode(text, special=False)) <= num_tokens:
        return text
    while high - low > 1:
        middle = (low + high) // 2
        if len(encode(text[:middle], special=False)) <= num_tokens:
            low = middle
        else:
            high = middle
    return text[:low]


def answers(said: str, answer: str) -> bool:
    """Return whether a text begins with a number, white space left out, and not with a longer one."""
    return re.match(rf"\s*{re.escape(answer)}(?!\d)", said) is not None


def answer_steps(encode: Encode, answer: str, num_digits: int) -> int:
    """Return the most decode steps that a needle's answer takes: one a digit of `num_digits`, or the number of its
    tokens where that is larger."""
    return max(num_digits, len(encode(answer, special=False)))
