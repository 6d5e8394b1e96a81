"""The one writer: lines, whole files, and what may be written to at all."""

import io
import json
import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from eps_core.errors import ConfigError


def jsonable(value: Any) -> Any:
    """Plain JSON values: numpy becomes Python, NaN and infinities become None."""
    if isinstance(value, np.ndarray):
        return jsonable(value.tolist())
    if isinstance(value, np.generic):
        return jsonable(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    return value


def to_json(record: dict[str, Any]) -> str:
    return json.dumps(jsonable(record), allow_nan=False)


def append_line(file: io.RawIOBase, record: dict[str, Any]) -> None:
    """Appends one object in one unbuffered write: a killed run leaves whole lines only."""
    line, size_bytes = (to_json(record) + "\n").encode(), os.fstat(file.fileno()).st_size
    written = file.write(line)
    if written != len(line):  # a full disk takes part of a line: take it back
        file.truncate(size_bytes)
        raise OSError(f"{getattr(file, 'name', 'file')}: only {written} of {len(line)} bytes could be written")


class JsonlWriter:
    """A new file of one object a line, each there as soon as it is written."""

    def __init__(self, path: Path) -> None:
        self._file: io.RawIOBase = open(path, "wb", buffering=0)  # noqa: SIM115

    def write(self, record: dict[str, Any]) -> None:
        append_line(self._file, record)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> "JsonlWriter":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@contextmanager
def replacing(path: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """A file under a temporary name that becomes `path` when the block ends, and is removed where the block fails."""
    handle, partial = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
    try:
        text: dict[str, Any] = {} if "b" in mode else {"encoding": "utf-8", "newline": ""}
        with os.fdopen(handle, mode, **text) as file:
            yield file
        # mkstemp makes the file private; give it the mode that open() would have
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(partial, 0o666 & ~mask)
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise


def check_writable(path: Path, what: str) -> None:
    """Raises ConfigError unless `path` can be created or replaced; leaves nothing behind."""
    if path.is_dir():
        raise ConfigError(f"{what} {path} is a directory: name a file in it")
    if not path.parent.is_dir():
        raise ConfigError(f"{what} {path}: there is no directory {path.parent}; create it first")
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent):
            pass
        if path.exists():
            with open(path, "ab"):
                pass
    except OSError as error:
        raise ConfigError(f"{what} {path} cannot be written ({error.strerror}): choose another path") from error
