"""The parts that several scripts share: Markdown tables, and JSONL files of measured rows."""

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eps_core.errors import require
from eps_core.io import outputs


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
def appended(path: Path, inputs: Mapping[str, Path] | None = None) -> Iterator[outputs.JsonlWriter]:
    """Yield what adds lines to a JSONL. Raises ConfigError where it is one of `inputs`, by flag, or no JSONL."""
    outputs.check({"-o": path}, inputs or {})
    outputs.check_start("-o", path, b"{", "JSONL")
    with outputs.Output(path, "-o") as output:
        kept_bytes = output.file.stat().st_size if output.file is not None and output.file.exists() else 0
        with outputs.JsonlWriter(output, kept_bytes) as writer:
            yield writer
