"""The file of a grid: locked, continued, never half a line."""

import fcntl
import json
from io import RawIOBase
from pathlib import Path
from typing import Any

from eps_core.errors import ConfigError
from eps_core.files import inputs, outputs

# --- the file ---------------------------------------------------------------------------------------------------------

# what two runs must share to be one grid; versions and commit may differ and are written at each start
IDENTITY = ("grid", "model", "model_id", "backend", "device", "dtype", "plan", "head_modes", "corpus")
_FIRST = b'{"type": "run", "kind": "grid"'


class GridFile:
    """The results: the grid's line, then one line a finished cell, each in one unbuffered write.

    A file of the same grid is continued: what a kill left of its last line is cut off, and `finished` holds the
    indices of the cells that are there. It is locked, so that two processes cannot both write a cell.
    """

    def __init__(self, path: Path, first: dict[str, Any]) -> None:
        outputs.check_writable(path, "results file")
        self.path = path
        self._file: RawIOBase = open(path, "a+b", buffering=0)  # noqa: SIM115
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.finished, self.num_skipped = self._resume(first)
        except BlockingIOError as error:
            self._file.close()
            raise ConfigError(f"{path} is being written by another eps-proto grid: wait, or give another -o") from error
        except BaseException:
            self._file.close()
            raise

    def _resume(self, first: dict[str, Any]) -> tuple[set[int], int]:
        self._file.seek(0)
        lines, size = continued(self.path, self._file.read(), first)
        self._file.truncate(size)
        if not lines:
            self.write(first)
            return set(), 0
        now = {name: first[name] for name in ("versions", "git_commit", "platform")}
        last = [line for line in lines if line.get("type") in ("run", "resume")][-1]
        if any(last.get(name) != value for name, value in json.loads(outputs.to_json(now)).items()):
            self.write({"type": "resume", **now})
        cells = [line for line in lines if line.get("type") == "cell"]
        if any(type(line.get("index")) is not int for line in cells):
            raise ConfigError(f"{self.path} holds a cell without an index, it is damaged: give another -o")
        return {line["index"] for line in cells}, sum(line.get("skipped") is not None for line in cells)

    def write(self, record: dict[str, Any]) -> None:
        outputs.append_line(self._file, record)

    def __enter__(self) -> "GridFile":
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()


def continued(path: Path, data: bytes, first: dict[str, Any]) -> tuple[list[dict[str, Any]], int]:
    """(whole lines, their bytes) of a results file's `data`; ConfigError where they are not of the grid `first`."""
    lines, size = whole_lines(path, data)
    if not lines:
        if data and not (data.startswith(_FIRST) or _FIRST.startswith(data)):
            raise ConfigError(f"{path} is not a grid's results: give another -o")
        return lines, size
    if lines[0].get("type") != "run" or lines[0].get("kind") != "grid":
        raise ConfigError(f"{path} is not a grid's results: give another -o")
    for name, value in json.loads(outputs.to_json({name: first[name] for name in IDENTITY})).items():
        there = lines[0].get(name)
        if there != value:
            what = f" ({there} there, {value} now)" if isinstance(value, str) else ""
            raise ConfigError(f"{path} holds another run's cells: its {name} differs{what}: give another -o")
    return lines, size


def whole_lines(path: Path, data: bytes) -> tuple[list[dict[str, Any]], int]:
    """(objects of the whole lines, their bytes): a last line that is torn or no JSON is left out. Raises ConfigError
    where an earlier line is no JSON object."""
    pieces = data.split(b"\n")[:-1]  # what follows the last newline was never finished
    lines: list[dict[str, Any]] = []
    size = 0
    for number, piece in enumerate(pieces, start=1):
        try:
            line = inputs.parse_json(piece)
        except ValueError:
            line = None
        if not isinstance(line, dict):
            if number == len(pieces) and lines:
                break
            raise ConfigError(f"{path} line {number} is not a JSON object: it is damaged or not JSONL")
        lines.append(line)
        size += len(piece) + 1
    return lines, size
