"""The text that tasks and measurements draw from: shipped, so that figures from two machines speak of the same text.

It is a tenth of the standard library of CPython 3.11.7, which no model of ours was trained on; `text/LICENSE` says
which files. The running Python's own will not do: they differ between builds of one version.
"""

import functools
import gzip
import hashlib
import zlib
from pathlib import Path

from eps_core.errors import ConfigError
from eps_core.io import inputs

FILE = Path(__file__).parent / "text" / "held_out.txt.gz"
# part of what identifies a measurement: cells of two texts are not one grid
SHA256 = "9e00b47f5fe934fe257063b235ce83b74b14e86d769d9c0524e673d32a1af758"


@functools.cache
def corpus() -> bytes:
    """The held-out code, 1.1 MB of ASCII. Raises ConfigError where the file is not the one that was shipped."""
    return shipped(FILE, SHA256)


def shipped(file: Path, sha256: str) -> bytes:
    """The text of a gzip file. Raises ConfigError where it is not the one of that hash."""
    try:
        text = gzip.decompress(file.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{file} cannot be read ({error}): install EPS again") from error
    if hashlib.sha256(text).hexdigest() != sha256:
        raise ConfigError(f"{file} is not the text that this version measures on: install EPS again")
    return text


def corpus_or_text(path: Path | None) -> str:
    """The text of a file that the user names, None: the corpus."""
    return corpus().decode("ascii") if path is None else inputs.read_text(path, "text file", "give a text file")
